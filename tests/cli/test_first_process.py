"""`phalanx train` as the first process of a container, and signals that come before its ranks are started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.cli import train as train_verb
from phalanx.cli.first_process import early_requests
from phalanx.cli.main import main

EARLY = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SMALL = [
    "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}",
    "batch=2",
    "sequence=8",
]
CODE = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Whoever started the tests may ignore some of the signals."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in EARLY
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", EARLY, ids=lambda number: number.name)
def test_a_signal_before_the_run_begins_ends_the_command_with_75(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(run: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr(train_verb, "refuse_before", refuse)
    out = tmp_path / "run"
    assert main(["train", *SMALL, f"out={out}", "steps=2"]) == 75
    said = capfd.readouterr()
    assert said.err == (
        f"phalanx: stopped by {number.name} before the run began. The same command starts it again.\n"
    )
    assert not out.exists()
    assert [signal.getsignal(each) for each in EARLY] == [signal.SIG_DFL] * 3


@pytest.mark.usefixtures("default_signals")
def test_ranks_of_a_launcher_keep_the_answer_that_ends_them_at_once() -> None:
    """They wait in calls of C++, in which no handler of Python's runs."""
    for variable in ("RANK", "SLURM_PROCID"):
        with early_requests({variable: "0"}):
            assert [signal.getsignal(each) for each in EARLY] == [
                signal.SIG_DFL
            ] * 3


# The parent stands for process 1: what loses its parent becomes its child. The child waits until an
# orphan that has ended is collected, then has a signal passed on to it, and ends with a code.
SERVES = """
import ctypes, os, signal, sys
from phalanx.cli.first_process import serve
from phalanx.layout.signals import signals_held_back

def gone(pid):
    while os.path.exists(f"/proc/{pid}"):
        pass

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
parent = os.getpid()
with signals_held_back():
    child = os.fork()
    if child:
        sys.exit(serve(child))
read, write = os.pipe()
if not os.fork():  # between this process and the orphan
    orphan = os.fork()
    if orphan:
        os.write(write, b"%d\\n" % orphan)
    os._exit(0)
gone(int(os.read(read, 64)))
os.wait()
signal.signal(signal.SIGUSR2, lambda *given: os._exit(7))
{end}
while True:
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl and /proc")
@pytest.mark.parametrize(
    "end, code",
    [
        ("os.kill(parent, signal.SIGUSR2)", 7),
        ("os.kill(parent, signal.SIGTERM)", 128 + 15),
    ],
)
def test_the_first_process_collects_orphans_and_passes_signals_on(
    end: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVES.replace("{end}", end)], timeout=60
    )
    assert done.returncode == code


def _namespaces() -> bool:
    """True if this user may make a process 1."""
    unshare = shutil.which("unshare")
    words = ["--pid", "--fork", "--mount-proc", "true"]
    return (
        unshare is not None
        and not subprocess.run(
            [unshare, *words], capture_output=True
        ).returncode
    )


def _only_child(pid: int) -> int:
    """The child of a process, once it has one."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    return int(found[0])


@pytest.mark.skipif(not _namespaces(), reason="needs a namespace of processes")
def test_process_1_is_stopped_by_a_signal_that_comes_while_it_starts(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    words = [
        *SMALL,
        f"out={out}",
        "steps=1000000",
        "checkpoint.every=0",
        "layout=dp2",
    ]
    command = [sys.executable, "-c", CODE, "train", *words]
    unshare = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", *command],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first = _only_child(unshare.pid)
    try:
        _only_child(first)  # it has left process 1, and begins to load itself
        os.kill(first, signal.SIGTERM)
        assert unshare.wait(120) == 75
    finally:
        if unshare.poll() is None:
            os.kill(first, signal.SIGKILL)
        unshare.wait()
