"""`phalanx launch`: writes what starts a run on a cluster, as a person would for that system, or submits it.

  phalanx launch slurm run.toml --nodes 4 --gpus 8 --time 24:00:00
  phalanx launch k8s run.toml --nodes 4 --image team/phalanx --submit
  phalanx launch torchrun run.toml --nodes 2 --gpus 8 --master node1

The layout needs as many ranks as there are GPUs; --gpus 0: ranks on CPUs, as many on each node as the
layout needs. What a system asks for beyond this is edited in what is printed.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import indent

from ..layout.choices import GLOO, NCCL
from ..layout.environment import PORT
from ..layout.run import Run
from .usage import Parser, UsageError, result, whole

_FOLDER = Path(__file__).parent / "jobs"
# Of each system its text, and what hands it over.
SYSTEMS = {
    "slurm": ("slurm.sh", ["sbatch"]),
    "k8s": ("k8s.yaml", ["kubectl", "create", "-f"]),
    "kubeflow": ("kubeflow.yaml", ["kubectl", "create", "-f"]),
    "ray": ("ray.txt", [sys.executable]),
    "sky": ("sky.yaml", ["sky", "jobs", "launch", "--yes"]),
    "torchrun": ("torchrun.sh", ["bash"]),
}
GRACE = 120  # seconds before a time limit, or after a request to end, in which a run saves


def run(argv: list[str]) -> int:
    parser = Parser(__doc__)
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
    args = parser.read(argv, intermixed=True)
    file, submit = SYSTEMS[args.system]
    values = _values(args)
    text = filled(file, values)
    if not args.submit:
        figures = {name: values[name] for name in ("system", "nodes", "ranks")} | {"text": text}
        return result(args, figures, text)
    if shutil.which(submit[0]) is None:
        what = "is not installed here. Leave --submit out and take the text."
        raise UsageError(f"{submit[0]} {what}")
    with tempfile.NamedTemporaryFile("w", prefix="phalanx-", suffix=Path(file).suffix) as script:
        script.write(text)
        script.flush()
        return subprocess.run([*submit, script.name], check=False).returncode


def filled(name: str, values: Mapping[str, object]) -> str:
    """A file of `jobs` with its values. A name of a value or of another such file that is alone on its
    line stands for lines with that indent, or for none."""

    def replaced(match: re.Match[str]) -> str:
        margin, lines, word = match.groups()
        part = lines or word
        text = str(values[part]) if part in values else filled(part, values)
        return text if word else indent(f"{text.rstrip()}\n", margin) if text else ""

    text = (_FOLDER / name).read_text(encoding="utf-8")
    return re.sub(r"(?m)^( *)\{\{([\w.]+)\}\}\n|\{\{([\w.]+)\}\}", replaced, text)


def _values(args: argparse.Namespace) -> dict[str, object]:
    """What the texts are filled in with."""
    files = [word for word in args.words if "=" not in word]
    if len(files) != 1:
        raise UsageError("name one run file, and keys of it as key=value.")
    words = [word for word in args.words if "=" in word]
    plan, nodes, gpus = Run.load(files[0], tuple(words)), args.nodes, args.gpus
    layout, *fallbacks = (each.layout_of() for each in (plan, *plan.fallbacks))
    ranks = gpus or (layout.ranks // nodes if layout else 1)
    if layout and layout.ranks != nodes * ranks:
        raise UsageError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; --nodes {nodes} with --gpus"
            f" {gpus} are {nodes * ranks}."
        )
    name = re.sub(r"[^a-z0-9]+", "-", (args.name or Path(files[0]).stem).lower()).strip("-")
    command = shlex.join(["phalanx", "train", files[0], *words])
    needed = [-(-each.ranks // ranks) for each in (layout, *fallbacks) if each]
    fewest = max(1, min([nodes, *needed]))
    # In a container the run file lies elsewhere; Ray's workers have folders of their own.
    mounted = ["/etc/phalanx/run.toml", *words, f"out={Path('/workspace', plan.out)}"]
    quoted = partial(json.dumps, ensure_ascii=False)  # which YAML reads as it is
    return vars(args) | {
        "name": name or "run",
        "text": Path(files[0]).read_text(),
        "command": command,
        "out": plan.out,
        "ranks": ranks,  # of each node
        "workers": nodes * ranks,
        "restarts": plan.train.restarts,
        "grace": GRACE,
        "port": PORT,
        "journal": shlex.quote(f"{plan.out}/metrics.jsonl"),
        "sbatch_gpus": f"#SBATCH --gpus-per-node={gpus}" if gpus else "",
        "elastic_nodes": nodes if fewest == nodes else f"{fewest}:{nodes}",
        "container_words": ", ".join(map(quoted, mounted)),
        "resources": "resourcesPerNode" if args.system == "kubeflow" else "resources",
        "limits": f'nvidia.com/gpu: "{gpus}"' if gpus else f'cpu: "{ranks}"',
        "ray_words": repr([*words, f"out={Path(plan.out).absolute()}"]),
        "backend": NCCL if gpus else GLOO,
        "use_gpu": bool(gpus),
        "sky_devices": f"accelerators: {args.accelerator}:{gpus}" if gpus else f"cpus: {ranks}+",
        "sky_run": quoted(command),
    }
