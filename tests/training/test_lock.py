"""Two runs never work in one folder, whoever is killed, and no run is stopped by another's end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
from loop_worlds import records, small, trained

from phalanx.cli.main import main
from phalanx.cli.train import _passed_on
from phalanx.comm import RankFailed
from phalanx.training import lock
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import verify_checkpoint
from phalanx.training.lock import (
    Owner,
    RunLocked,
    hold_as_rank,
    hold_run,
    owner_of,
    unshared,
)
from torch_shm.watch import process_state

CODE = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
SMALL = [
    "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}", "batch=4", "sequence=12",
    "validation.batches=0", "checkpoint.every=3", "optimizer.schedule=constant",
]  # fmt: skip
LONG = "steps=1000000"


def _wait(what: Callable[[], object], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


@pytest.fixture
def begin() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start runs that have saved once when this returns; whatever is left of them ends with the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(out: Path, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, "train", *SMALL, LONG, f"out={out}", *more],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # Whoever runs the tests in the background of a shell has Ctrl-C ignored for all of them.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        begun.append(process)
        _wait(lambda: steps(out / "checkpoints") or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        return process

    yield start
    for process in begun:
        for each in [*_tree(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.communicate()


def _tree(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            each for child in _children(pid) for each in (child, *_tree(child))
        ]
    return []


def test_a_second_run_is_refused_at_once_and_the_first_goes_on(
    begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    first = begin(out, "layout=dp2 zero1")
    for where in (
        [f"out={out}"],
        [f"out={tmp_path / 'b'}", f"checkpoint.dir={out}/checkpoints"],
    ):
        assert main(["train", *SMALL, LONG, "layout=fp32", *where]) == 2
        said = capsys.readouterr().err
        assert (
            f"host {socket.gethostname()!r}, process {first.pid}, since '20"
            in said
        )
        assert "write another `out`" in said
    assert not (out / "STOP").exists()
    newest = steps(out / "checkpoints")[0]
    _wait(lambda: steps(out / "checkpoints")[0] > newest)
    assert len(records(out, "start")) == 1
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    assert [
        verify_checkpoint(path) for path in steps(out / "checkpoints")
    ] == [[], []]


def test_a_stopped_rank_goes_with_its_launcher_and_frees_the_folder(
    begin: Any, tmp_path: Path
) -> None:
    """Else it would go on to write later, beside the next run."""
    out = tmp_path / "run"
    first = begin(out, "layout=dp2")
    stuck = max(_children(first.pid))
    os.kill(stuck, signal.SIGSTOP)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    # The run has passed step 1 and has nothing to do.
    assert main(["train", *SMALL, "steps=1", "layout=fp32", f"out={out}"]) == 0
    assert process_state(stuck) in "ZX"


@pytest.mark.parametrize("layout", ["", "dp2"])
def test_rank_0_holds_the_folder_where_no_launcher_does(
    layout: str, tmp_path: Path
) -> None:
    """As under torchrun: every rank hears the same refusal."""
    out = tmp_path / "run"
    with hold_run(out), pytest.raises((RankFailed, RunLocked)) as refused:
        trained(small(out), layout)
    assert f"process {os.getpid()}" in str(refused.value)
    if isinstance(refused.value, RankFailed):
        assert all(
            "RunLocked" in report.error for report in refused.value.reports
        )
    assert not (out / "metrics.jsonl").exists()
    trained(small(out, "steps=1"), layout)


def _racer(folder: Path, go: Event, results: Any) -> None:
    go.wait()
    try:
        with hold_run(folder):
            inside = folder / "inside"
            # Fails if two are in.
            descriptor = os.open(inside, os.O_CREAT | os.O_EXCL)
            time.sleep(0.05)
            os.close(descriptor)
            inside.unlink()
        results.put("in")
    except RunLocked as error:
        results.put(
            "refused"
            if "process" in str(error) or "just begun" in str(error)
            else "?"
        )
    except BaseException as error:
        results.put(repr(error))


def test_of_many_starts_at_once_never_two_are_in(tmp_path: Path) -> None:
    context = get_context("fork")
    for _ in range(3):
        go, results = context.Event(), context.SimpleQueue()
        racers = [
            context.Process(target=_racer, args=(tmp_path, go, results))
            for _ in range(6)
        ]
        for each in racers:
            each.start()
        go.set()
        found = [results.get() for _ in racers]
        for each in racers:
            each.join()
        assert "in" in found
        assert set(found) <= {"in", "refused"}, found


def _holder(folder: Path, ready: Event) -> None:
    with hold_run(folder), hold_as_rank(folder):
        ready.set()
        time.sleep(100)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    context = get_context("fork")
    ready = context.Event()
    process = context.Process(target=_holder, args=(tmp_path, ready))
    process.start()
    ready.wait(30)
    with (
        pytest.raises(RunLocked, match=f"process {process.pid}"),
        hold_run(tmp_path),
    ):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with hold_run(tmp_path):
        assert (
            json.loads((tmp_path / lock.RUN).read_text())["pid"] == os.getpid()
        )


def _rank(folder: Path, ready: Event) -> None:
    with hold_as_rank(folder):
        ready.set()
        time.sleep(100)


def test_a_rank_holds_the_folder_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that were not forked from their launcher have no part of its lock."""
    monkeypatch.setattr(lock, "ENDING", 0.2)
    context = get_context("fork")
    ready = context.Event()
    process = context.Process(target=_rank, args=(tmp_path, ready))
    process.start()
    ready.wait(30)
    with (
        pytest.raises(RunLocked, match=f"process {process.pid}. End them"),
        hold_run(tmp_path),
    ):
        pass
    process.kill()
    process.join()
    with hold_run(tmp_path):
        pass


def test_an_empty_or_foreign_lock_file_means_nothing_by_itself(
    tmp_path: Path,
) -> None:
    for text in (
        "",
        "{",
        '{"host": "elsewhere", "pid": 1, "since": "x"}',
        "[1]",
    ):
        (tmp_path / lock.RUN).write_text(text)
        with hold_run(tmp_path):
            assert (
                json.loads((tmp_path / lock.RUN).read_text())["pid"]
                == os.getpid()
            )


def test_where_there_are_no_locks_a_file_holds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused = pytest.raises(
        RunLocked, match=rf"process {os.getpid()}.*remove .*run\.held"
    )
    with (
        hold_run(tmp_path),
        hold_as_rank(tmp_path),
        refused,
        hold_run(tmp_path),
    ):
        pass
    assert not (tmp_path / lock.HELD).exists()
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = {"host": socket.gethostname(), "pid": gone.pid, "since": "then"}
    (tmp_path / lock.HELD).write_text(json.dumps(left))
    with hold_run(tmp_path):  # its process is gone
        pass
    (tmp_path / lock.HELD).write_text(
        json.dumps({**left, "host": "elsewhere"})
    )
    with (
        pytest.raises(RunLocked, match="host 'elsewhere'"),
        hold_run(tmp_path),
    ):
        pass


def test_a_host_that_does_not_see_the_run_s_folder_is_named(
    tmp_path: Path,
) -> None:
    with hold_run(tmp_path / "shared"):
        owner = owner_of(tmp_path / "shared")
        assert f"process {os.getpid()}" in owner
        assert unshared(tmp_path / "shared", owner) == ""
        with hold_run(tmp_path / "another"):
            (tmp_path / "another" / ".run.lock").write_bytes(
                Owner("b", 1, "now").text
            )
            assert "is not the folder that rank 0" in unshared(
                tmp_path / "another", owner, 0.0
            )
        assert "all hosts share" in unshared(tmp_path / "missing", owner, 0.0)


# ---- STOP


def test_a_rank_never_writes_stop_with_the_handler_it_was_forked_with(
    tmp_path: Path,
) -> None:
    """A STOP that a failed rank wrote would end the next run."""
    file = tmp_path / "STOP"
    with _passed_on(file):
        rank = os.fork()
        if not rank:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), number)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 3
        assert not file.exists()
        os.kill(os.getpid(), signal.SIGTERM)
        _wait(file.exists, 5)
    assert not file.exists()


@pytest.mark.parametrize("command", [True, False])
def test_a_stop_file_of_an_earlier_run_is_removed_with_a_notice(
    command: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "STOP").touch()
    os.utime(out / "STOP", (1e9, 1e9))
    if command:
        assert (
            main(["train", *SMALL, "steps=3", "layout=dp2", f"out={out}"]) == 0
        )
        assert (
            f"{out / 'STOP'} was left by an earlier run"
            in capfd.readouterr().out
        )
    else:
        assert trained(small(out, "steps=3"), "dp2")[0].step == 3
    assert not (out / "STOP").exists()
    assert records(out, "end")[0]["step"] == 3


@pytest.mark.parametrize(
    "layout, number",
    [
        ("fp32", signal.SIGINT),
        pytest.param("dp2", signal.SIGINT, marks=pytest.mark.slow),
        ("dp2", signal.SIGTERM),
        ("dp2", signal.SIGHUP),
        ("fp32", signal.SIGUSR1),
    ],
)
def test_signals_that_ask_for_it_save_and_stop(
    number: signal.Signals, layout: str, begin: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = begin(out, f"layout={layout}", "checkpoint.every=7")
    # As a terminal does that closes.
    for each in [
        run.pid,
        *_children(run.pid),
    ]:
        os.kill(each, number)
    assert run.wait(60) == 75
    (stopped,) = records(out, "stop")
    assert steps(out / "checkpoints")[0].name == f"step-{stopped['step']:08}"


def test_a_second_ctrl_c_ends_at_once_without_a_traceback(
    begin: Any, tmp_path: Path
) -> None:
    run = begin(tmp_path / "run", "layout=dp2")
    rank = _children(run.pid)[-1]
    os.kill(rank, signal.SIGSTOP)  # no step ends any more
    for _ in range(2):
        for each in [run.pid, *_children(run.pid)]:  # as a terminal does
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGINT)
        time.sleep(0.05)
    _, said = run.communicate(timeout=60)
    once, last = said.splitlines()
    assert "Ctrl-C again" in once
    assert (run.returncode, last) == (130, "phalanx: interrupted.")
