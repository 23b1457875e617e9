"""The batch script for Slurm, run by bash, with programs in the places of `srun`, `scontrol` and `phalanx`
that write down how they were called: which ends start the tasks again, queue the job again, or end it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from phalanx.cli.launch import run as launch

RUN = "layout = 'dp2 zero1'\nout = 'runs/some run'\ntrain = {restarts = 2}\n"
PROGRAMS = {
    # What follows the options of srun is the command of each task.
    "srun": 'echo srun >> calls\nwhile case "$1" in --*) ;; *) false ;; esac; do shift; done\n"$@"',
    "scontrol": 'echo "scontrol $*" >> calls',
    # The first line of `ends` is how this start ends: its exit code and its last record.
    "phalanx": (
        "mkdir -p 'runs/some run'\n"
        'read -r code record < ends && sed -i 1d ends\necho "$record" >> "runs/some run/metrics.jsonl"\n'
        'exit "$code"'
    ),
}


def _ended(
    folder: Path, *ends: tuple[int, dict[str, object]]
) -> tuple[int, list[str]]:
    """The exit code of the job, and the calls that it made, if its starts end so."""
    lines = [f"{code} {json.dumps(record)}" for code, record in ends]
    (folder / "ends").write_text("\n".join(lines) + "\n")
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=env, timeout=60, check=False
    )
    calls = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return done.returncode, calls


@pytest.fixture
def job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    assert launch(["slurm", "run.toml", "--nodes", "1", "--gpus", "0"]) == 0
    Path("job.sh").write_text(capsys.readouterr().out)
    Path("bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    return tmp_path


def _stop(by: str) -> dict[str, object]:
    return {"event": "stop", "time": 1.0, "step": 5, "by": by, "goodput": 0.5}


@pytest.mark.parametrize("by", ["SIGTERM", "SIGUSR1"])
def test_a_job_that_slurm_has_warned_is_queued_again(
    by: str, job: Path
) -> None:
    assert _ended(job, (75, _stop(by))) == (0, ["srun", "scontrol requeue 7"])


@pytest.mark.parametrize(
    "code, record",
    [
        (0, _stop("STOP")),
        (75, _stop("SIGINT")),
        (0, {"event": "end", "step": 5}),
        (0, {"event": "end", "text": '"by": "SIGTERM"'}),
    ],
)
def test_a_job_that_a_user_has_stopped_or_that_is_done_is_not_queued_again(
    code: int, record: dict[str, object], job: Path
) -> None:
    assert _ended(job, (code, record)) == (0, ["srun"])


def test_tasks_that_fail_are_started_again_as_often_as_the_run_says(
    job: Path,
) -> None:
    failed = (1, {"event": "step"})
    assert _ended(job, failed, failed, failed, failed) == (1, ["srun"] * 3)
    assert _ended(job, failed, (0, {"event": "end"})) == (0, ["srun"] * 2)
    assert _ended(job, failed, (0, _stop("STOP"))) == (0, ["srun"] * 2)
    queued = ["srun", "srun", "scontrol requeue 7"]
    assert _ended(job, failed, (75, _stop("SIGTERM"))) == (0, queued)


def test_a_run_that_is_refused_is_not_started_again(job: Path) -> None:
    assert _ended(job, (2, {"event": "step"})) == (2, ["srun"])
