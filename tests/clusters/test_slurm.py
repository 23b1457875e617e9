"""A batch script of `phalanx launch slurm`, on Slurm itself: one host is the controller and the node.

It needs Debian's slurmctld, slurmd, slurm-client and munge, and root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import TRAIN
from loss_bits import losses

from phalanx.layout.journal import read_journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0
        or not all(
            map(shutil.which, ("slurmctld", "slurmd", "sbatch", "munged"))
        ),
        reason="no Slurm, or not root",
    ),
]
CONF = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@pytest.fixture(scope="module")
def slurm(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, str]]:
    """The environment in which commands of Slurm, and phalanx, are found."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(host=socket.gethostname().split(".")[0], folder=folder)
    )
    command = folder / "bin" / "phalanx"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    command.chmod(0o755)
    env = {**os.environ, "SLURM_CONF": str(conf), "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{command.parent}:{env['PATH']}"
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    shutil.chown("/run/munge", "munge")
    # may run already
    subprocess.run(
        ["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=False
    )
    for daemon in ("slurmctld", "slurmd"):
        subprocess.run(
            [daemon, "-f", str(conf)], check=True, env=env, timeout=30
        )
    try:
        yield env
    finally:
        for daemon in ("slurmd", "slurmctld"):
            os.kill(int((folder / f"{daemon}.pid").read_text()), 15)


def _submit(env: dict[str, str], folder: Path, *words: str) -> str:
    """Submit a run of two ranks; the job's number."""
    (folder / "job.toml").write_text("layout = 'dp2 zero1'\n")
    run = [word for word in TRAIN if "=" in word]
    launch = ["phalanx", "launch", "slurm", "job.toml", *run, *words]
    done = subprocess.run(
        [*launch, "--nodes", "1", "--gpus", "0", "--time", "20", "--submit"],
        cwd=folder, env=env, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout.split()[-1]


def _wait(
    what: str, env: dict[str, str], job: str, seconds: float = 300.0
) -> None:
    """Until a field of the job has that value."""
    end, text = time.monotonic() + seconds, ""
    while what not in text.split():
        assert time.monotonic() < end, text
        time.sleep(0.5)
        text = subprocess.run(
            ["scontrol", "show", "job", job],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def test_a_batch_script_gives_the_losses_of_local_ranks(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    _wait("JobState=COMPLETED", slurm, _submit(slurm, tmp_path, "steps=12"))
    out = tmp_path / "local"
    words = [
        *TRAIN,
        "steps=12",
        f"out={out}",
        "layout=dp2 zero1",
        "--backend",
        "gloo",
    ]
    subprocess.run(
        words, check=True, timeout=300, env=slurm, capture_output=True
    )
    assert losses(tmp_path / "runs" / "job") == losses(out)


def test_a_job_that_is_warned_saves_and_is_queued_again(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = _submit(slurm, tmp_path, "steps=1000000")
    journal = tmp_path / "runs" / "job" / "metrics.jsonl"
    end = time.monotonic() + 200
    while not journal.exists() or len(losses(journal.parent)) < 3:
        assert time.monotonic() < end
        time.sleep(0.5)
    # What --signal does before the time limit.
    subprocess.run(["scancel", "--signal=TERM", job], check=True, env=slurm)
    _wait("Restarts=1", slurm, job)
    last = read_journal(journal)[-1]
    assert last["event"] == "stop"
    assert (
        journal.parent / "checkpoints" / f"step-{last['step']:08}"
    ).is_dir()
    subprocess.run(["scancel", job], check=True, env=slurm)
