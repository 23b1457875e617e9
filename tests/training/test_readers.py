"""Runs of `phalanx train` whose output is read slowly, not at all, or cannot be written: each trains to its
end, saves, and has the exit code of a run that is read."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from loop_worlds import records

from phalanx.training.checkpoint import steps

SMALL = [
    "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}", "batch=2", "sequence=8",
    "validation.batches=0", "optimizer.schedule=constant", "metrics.every=1",
]  # fmt: skip
CODE = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run. One that a failed test leaves behind is killed, and its ranks end with it."""
    started: list[subprocess.Popen[bytes]] = []

    def make(
        out: Path, *words: str, **streams: Any
    ) -> subprocess.Popen[bytes]:
        run = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CODE,
                "train",
                *SMALL,
                f"out={out}",
                *words,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
            **streams,
        )
        started.append(run)
        return run

    yield make
    for run in started:
        run.kill()
        run.wait()


def _whole(out: Path, last: int) -> None:
    """The run was trained to its end, saved, and every step is in its journal."""
    assert [r["step"] for r in records(out, "step")] == [*range(1, last + 1)]
    assert records(out, "end")[0]["step"] == last
    assert steps(out / "checkpoints")[0].name == f"step-{last:08}"


def _until_step(count: int, out: Path, run: subprocess.Popen[bytes]) -> None:
    while (
        not (out / "metrics.jsonl").exists()
        or len(records(out, "step")) < count
    ):
        assert run.poll() is None
        time.sleep(0.05)


@pytest.fixture
def full_pipe() -> Iterator[IO[bytes]]:
    """The end to write of a pipe that nobody reads, and that takes nothing more."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    with os.fdopen(write, "wb", buffering=0) as file:
        yield file
    os.close(read)


# A rank in the command's own process, and processes of their own.
@pytest.mark.parametrize("layout", ["fp32", "dp2"])
def test_a_run_whose_output_nobody_reads_trains_to_its_end(
    layout: str, start: Start, full_pipe: IO[bytes], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = start(
        out, f"layout={layout}", "steps=30", stdout=full_pipe, stderr=full_pipe
    )
    assert run.wait(240) == 0
    _whole(out, 30)


def test_a_signal_saves_a_run_whose_output_nobody_reads(
    start: Start, full_pipe: IO[bytes], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["layout=dp2", "steps=1000000", "checkpoint.every=0"]
    run = start(out, *words, stdout=full_pipe, stderr=full_pipe)
    _until_step(1, out, run)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGTERM)
    assert run.wait(240) == 75
    last = records(out, "stop")[0]["step"]
    assert steps(out / "checkpoints")[0].name == f"step-{last:08}"


def test_a_run_whose_output_cannot_be_written_says_so_once_and_ends_with_0(
    start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with open("/dev/full", "wb") as full:
        run = start(
            out, "layout=dp2", "steps=5", stdout=full, stderr=subprocess.PIPE
        )
        _, told = run.communicate(timeout=240)
    assert run.returncode == 0
    assert re.search(
        rb"phalanx: \d+ lines of standard output were not shown: No space left",
        told,
    )
    assert b"Traceback" not in told
    _whole(out, 5)


def test_a_reader_gets_every_line_in_order(
    start: Start, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = start(
        out,
        "layout=dp2",
        "steps=300",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    told, _ = run.communicate(timeout=240)
    assert run.returncode == 0
    lines = told.decode().splitlines()
    numbers = [
        int(m[1])
        for line in lines
        if (m := re.match(r"step (\d+)/300  loss", line))
    ]
    assert numbers == [*range(1, 301)]
    first = [line.partition(",")[0] for line in lines[:3]]
    assert "dp2: 2 ranks" in first  # of the command, before those of its ranks
    assert lines[-1].startswith("goodput ")
    assert not any("not shown" in line for line in lines)


def test_the_result_is_whole_in_a_pipe_that_is_read_after_the_end(
    start: Start, tmp_path: Path
) -> None:
    run = start(
        tmp_path / "run",
        "layout=fp32",
        "steps=3",
        "--json",
        stdout=subprocess.PIPE,
    )
    assert run.wait(240) == 0
    assert run.stdout is not None
    assert json.load(run.stdout)["step"] == 3
    run.stdout.close()


def _read(master: int, until: bytes) -> bytes:
    """What a terminal gets until that comes; nothing may come for a minute at most."""
    data = b""
    while until not in data and select.select([master], [], [], 60)[0]:
        data += os.read(master, 65536)
    return data


def test_a_paused_terminal_stops_no_run_and_shows_its_last_line_later(
    start: Start, tmp_path: Path
) -> None:
    """Ctrl-S: the terminal takes nothing until Ctrl-Q."""
    out = tmp_path / "run"
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    words = ["layout=dp2", "steps=1000000", "checkpoint.every=0"]
    run = start(out, *words, stdin=slave, stdout=slave, stderr=slave)
    _until_step(20, out, run)
    termios.tcflow(slave, termios.TCOON)
    assert b"step 2" in _read(master, b"step 2")
    run.send_signal(signal.SIGTERM)
    assert b"asked to stop by SIGTERM: saved at step" in _read(
        master, b"goodput"
    )
    while run.poll() is None:
        if select.select([master], [], [], 0.1)[0]:
            os.read(master, 65536)
    assert run.returncode == 75
    os.close(slave)
    os.close(master)


def test_a_failure_is_an_exit_code_though_nobody_reads_why(
    start: Start, full_pipe: IO[bytes], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["layout=dp2", "steps=1000000", "train.restarts=0"]
    run = start(out, *words, stdout=full_pipe, stderr=full_pipe)
    _until_step(1, out, run)
    children = (
        Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    )
    os.kill(int(children[-1]), signal.SIGKILL)
    assert run.wait(240) == 1
