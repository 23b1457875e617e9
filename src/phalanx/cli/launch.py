"""`phalanx launch`: what starts a run on a cluster, as a person would write it for that system.

Nothing here runs ranks: Slurm, Kubernetes, Ray, SkyPilot and torchrun do, and `phalanx train` finds out
from what they set which rank it is (`layout/environment.py`).
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from ..layout.choices import GLOO, NCCL
from ..layout.environment import PORT
from ..layout.run import Run
from .usage import Parser, UsageError, result, whole

_EPILOG = """\
  phalanx launch slurm run.toml --nodes 4 --gpus 8 --time 24:00:00
  phalanx launch k8s run.toml --nodes 4 --image team/phalanx --submit
  phalanx launch torchrun run.toml --nodes 2 --gpus 8 --master node1

The layout needs as many ranks as there are GPUs; --gpus 0: ranks on CPUs, as many on each node as the
layout needs. What a system asks for beyond this is edited in what is printed."""
GRACE = 120  # seconds before a time limit, or after a request to end, in which a run saves


@dataclass(frozen=True)
class Job:
    """What every system is told."""

    name: str
    file: str
    words: tuple[str, ...]
    nodes: int
    gpus: int  # of each node
    ranks: int  # of each node
    run: Run
    time: str
    image: str
    volume: str
    accelerator: str
    master: str

    @property
    def command(self) -> str:
        return shlex.join(["phalanx", "train", self.file, *self.words])

    @property
    def fewest(self) -> int:
        """The fewest nodes that one of the run's layouts needs."""
        layouts = [each.layout_of() for each in (self.run, *self.run.fallbacks)]
        needed = [-(-layout.ranks // self.ranks) for layout in layouts if layout]
        return max(1, min([self.nodes, *needed]))


def run(argv: list[str]) -> int:
    parser = Parser(
        "phalanx launch", "Writes what starts a run on a cluster, or submits it.", _EPILOG
    )
    add = parser.add
    add("system", choices=tuple(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
    add("words", nargs="+", metavar="RUN.toml key=value", help="a run file, and keys to set in it")
    add("--nodes", type=whole(1, 1 << 14), default=1)
    add("--gpus", type=whole(0, 64), default=8, metavar="G", help="GPUs of each node; 0: CPUs")
    add("--name", default="", help="name of the job; default the run file's")
    add("--time", default="24:00:00", metavar="LIMIT", help="time limit, for Slurm")
    add("--image", default="phalanx", help="container image, for Kubernetes")
    add("--volume", default="phalanx", metavar="CLAIM", help="shared volume, for Kubernetes")
    add("--accelerator", default="H100", metavar="NAME", help="kind of GPU, for SkyPilot")
    add("--master", default="localhost", metavar="HOST", help="a node that all reach, for torchrun")
    add("--submit", action="store_true", help="hand it to the system instead of printing it")
    add("--json", help="print the text and what it starts as JSON")
    args = parser.read(argv, intermixed=True)
    text_of, submit, suffix = SYSTEMS[args.system]
    job = _job(args)
    text = text_of(job)
    if not args.submit:
        figures = {"system": args.system, "nodes": job.nodes, "ranks": job.ranks, "text": text}
        result(args, figures, text)
        return 0
    if shutil.which(submit[0]) is None:
        what = "is not installed here. Leave --submit out and take the text."
        raise UsageError(f"{submit[0]} {what}")
    with tempfile.NamedTemporaryFile("w", prefix="phalanx-", suffix=suffix) as file:
        file.write(text)
        file.flush()
        return subprocess.run([*submit, file.name], check=False).returncode


def _job(args: argparse.Namespace) -> Job:
    files = [word for word in args.words if "=" not in word]
    if len(files) != 1:
        raise UsageError("name one run file, and keys of it as key=value.")
    words = tuple(word for word in args.words if "=" in word)
    plan = Run.load(files[0], words)
    layout = plan.layout_of()
    ranks = args.gpus or (layout.ranks // args.nodes if layout else 1)
    if layout and layout.ranks != args.nodes * ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; --nodes {args.nodes} with --gpus"
            f" {args.gpus} are {args.nodes * ranks}."
        )
    name = re.sub(r"[^a-z0-9]+", "-", (args.name or Path(files[0]).stem).lower()).strip("-")
    return Job(
        name or "run", files[0], words, args.nodes, args.gpus, ranks, plan,
        args.time, args.image, args.volume, args.accelerator, args.master,
    )  # fmt: skip


# ---- one function for each system


def _slurm(job: Job) -> str:
    gpus = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    journal = shlex.quote(f"{job.run.out}/metrics.jsonl")
    return f"""\
#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node={job.ranks}
{gpus}#SBATCH --time={job.time}
#SBATCH --signal=TERM@{GRACE}  # to every rank, before the time limit: it finishes its step and saves
#SBATCH --requeue  # after a node has failed
#SBATCH --open-mode=append
#SBATCH --output={job.name}-%j.out

# A rank that fails ends the others. One that was stopped has saved, as have all: that is no failure.
start() {{
    srun --kill-on-bad-exit=1 \\
        sh -c 'trap : TERM; "$@" || {{ code=$?; [ $code -eq 75 ] || exit $code; }}' train \\
        {job.command}
}}
code=1
for attempt in $(seq 0 {job.run.train.restarts}); do
    start && code=0 && break
done
if [ $code -eq 0 ] && tail -n 1 {journal} | grep -q '"event": "stop"'; then
    scontrol requeue "$SLURM_JOB_ID"  # the same job goes on from its newest checkpoint
fi
exit $code
"""


def _torchrun(job: Job) -> str:
    nodes = str(job.nodes) if job.fewest == job.nodes else f"{job.fewest}:{job.nodes}"
    return f"""\
# The same command on each of {job.nodes} nodes. All of them reach {job.master}, and share {job.run.out}.
# Where a node's own name does not lead to it, add --local-addr and its address, and on {job.master}
# --rdzv-conf=is_host=1. The run ends with that node; others may leave and come back.
# A store of its own for each start: ranks of a start with other nodes must not meet those of the last.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nnodes={nodes} --nproc-per-node={job.ranks} --max-restarts={job.run.train.restarts} \\
    --rdzv-backend=c10d --rdzv-id={job.name} --rdzv-endpoint={job.master}:29400 \\
    --no-python {job.command}
"""


def _container(job: Job, resources: str) -> str:
    """What Kubernetes runs on each node: `phalanx train` starts torchrun there, which reads PET_*."""
    out = Path("/workspace", job.run.out)
    words = ["/etc/phalanx/run.toml", *job.words, f"out={out}"]
    limits = f'nvidia.com/gpu: "{job.gpus}"' if job.gpus else f'cpu: "{job.ranks}"'
    return f"""\
image: {job.image}
command: ["phalanx", "train"]
args: [{", ".join(map(_quoted, words))}]
{resources}:
  limits: {{{limits}}}
"""


_MOUNTS = """\
volumeMounts:
  - {name: workspace, mountPath: /workspace}
  - {name: run, mountPath: /etc/phalanx}
  - {name: shm, mountPath: /dev/shm}
"""


def _volumes(job: Job) -> str:
    return f"""\
volumes:
  - name: workspace  # shared by all nodes: checkpoints, and data that the run file names
    persistentVolumeClaim: {{claimName: {job.volume}}}
  - name: run
    configMap: {{name: {job.name}}}
  - name: shm
    emptyDir: {{medium: Memory}}
"""


def _config_map(job: Job) -> str:
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}
data:
  run.toml: |
{indent(Path(job.file).read_text(), "    ")}---
"""


def _k8s(job: Job) -> str:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return f"""\
{_config_map(job)}apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  failurePolicy:
    maxRestarts: {job.run.train.restarts}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: {job.nodes}
          completions: {job.nodes}
          completionMode: Indexed
          backoffLimit: 0  # the set starts all nodes again together
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {GRACE}
{indent(_volumes(job), " " * 14)}\
              containers:
                - name: node
{indent(_container(job, "resources"), " " * 18)}\
                  workingDir: /workspace
{indent(_MOUNTS, " " * 18)}\
                  env:
                    - {{name: PET_NNODES, value: "{job.nodes}"}}
                    - {{name: PET_NPROC_PER_NODE, value: "{job.ranks}"}}
                    - {{name: PET_MASTER_ADDR, value: {job.name}-node-0-0.{job.name}}}
                    - {{name: PET_MASTER_PORT, value: "{PORT}"}}
                    - name: PET_NODE_RANK
                      valueFrom: {{fieldRef: {{fieldPath: "{index}"}}}}
"""


def _kubeflow(job: Job) -> str:
    return f"""\
{_config_map(job)}apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed  # it sets PET_NNODES and the rest
  trainer:
    numNodes: {job.nodes}
    numProcPerNode: {job.ranks}
{indent(_container(job, "resourcesPerNode"), " " * 4)}\
  podTemplateOverrides:
    - targetJobs: [{{name: node}}]
      spec:
{indent(_volumes(job), " " * 8)}\
        containers:
          - name: node
{indent(_MOUNTS, " " * 12)}"""


def _ray(job: Job) -> str:
    backend = NCCL if job.gpus else GLOO
    # Workers have folders of their own.
    words = [*job.words, f"out={Path(job.run.out).absolute()}"]
    return f'''\
"""Run {job.name} on a Ray cluster: python this file where Ray is reached (RAY_ADDRESS)."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(settings):
    from phalanx import Run, join, train

    run = Run.parse(settings["run"], {job.name!r}, tuple(settings["words"]))
    train(join(interface=run.network.interface), run)


RUN = """\\
{Path(job.file).read_text()}"""

if __name__ == "__main__":
    TorchTrainer(
        work,
        train_loop_config={{"run": RUN, "words": {words!r}}},
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig(num_workers={job.nodes * job.ranks}, use_gpu={bool(job.gpus)}),
        run_config=RunConfig(
            name={job.name!r},
            failure_config=FailureConfig(max_failures={job.run.train.restarts}),
        ),
    ).fit()
'''


def _sky(job: Job) -> str:
    gpus = f"accelerators: {job.accelerator}:{job.gpus}" if job.gpus else f"cpus: {job.ranks}+"
    return f"""\
name: {job.name}
num_nodes: {job.nodes}
workdir: .  # with the run file; its `out` has to lie on a volume or bucket that all nodes mount
resources:
  {gpus}
  job_recovery: {{max_restarts_on_errors: {job.run.train.restarts}}}
setup: pip install phalanx
run: {_quoted(job.command)}
"""


def _quoted(word: str) -> str:
    """A word in YAML's double quotes."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


SYSTEMS: dict[str, tuple[Callable[[Job], str], list[str], str]] = {
    "slurm": (_slurm, ["sbatch"], ".sh"),
    "k8s": (_k8s, ["kubectl", "create", "-f"], ".yaml"),
    "kubeflow": (_kubeflow, ["kubectl", "create", "-f"], ".yaml"),
    "ray": (_ray, [sys.executable], ".py"),
    "sky": (_sky, ["sky", "jobs", "launch", "--yes"], ".yaml"),
    "torchrun": (_torchrun, ["bash"], ".sh"),
}
