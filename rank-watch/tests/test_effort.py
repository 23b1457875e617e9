"""Ranks that save, read or start: left alone while they work, and not for ever when they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rank_watch import Positions, diagnose
from rank_watch.diagnosis import PATIENCE
from rank_watch.effort import Effort, _Sample
from rank_watch.hosted import RankProcess
from rank_watch.positions import PHASES, WAITS
from rank_watch.processes import started_at
from rank_watch.watched_rank import COMPUTING, WatchedRank

LIMIT = 10.0
PAUSED = ["starting", "reading a checkpoint", "saving", "compiling"]


@pytest.fixture
def positions() -> Iterator[Positions]:
    made = Positions(0)
    yield made
    made.close("ended")


Work = Callable[[float], tuple[float, int, int]]


def still_after(
    positions: Positions,
    phase: str,
    seconds: float,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[float, bool]:
    """Seconds without progress after so many in a phase, and whether the run is then taken to hang.
    `work`: seconds computed, bytes moved and calls of the rank's own thread, after so many seconds."""
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    with positions.phase(phase):
        seen = WatchedRank(entry, "a")
        begun = seen.since
        monkeypatch.setattr(
            Effort, "_sample", lambda _, now: _Sample(now, *work(now - begun))
        )
        seen.effort.begin(begun)
        step = LIMIT / 10
        for n in range(int(seconds / step) + 1):
            seen.look(begun + n * step, LIMIT)
        state = seen.state(begun + seconds)
        seen.reader.close()
    # Of this process, which runs the test, the kernel says that it computes.
    return state.still, diagnose([state], LIMIT).hangs


def idle(t: float) -> tuple[float, int, int]:
    return 0.0, 0, 0


def heartbeats(t: float) -> tuple[float, int, int]:
    return 0.02 * t, int(800 * t), 0  # and a progress bar, 2 % of a core


def computing(t: float) -> tuple[float, int, int]:
    return 0.2 * t, 0, 0


def bytes_of_a_thread(t: float) -> tuple[float, int, int]:
    return 0.0, int(20_000 * t), 0


def own_bytes(t: float) -> tuple[float, int, int]:
    return 0.0, 0, int(t / 40)  # one call in 40 s


@pytest.mark.parametrize("phase", PAUSED)
@pytest.mark.parametrize("work", [idle, heartbeats])
def test_who_does_nothing_is_ended_after_30_times_the_timeout(
    phase: str,
    work: Work,
    positions: Positions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = PATIENCE * LIMIT
    assert still_after(positions, phase, most - 1, work, monkeypatch) == (
        most - 1,
        False,
    )
    assert still_after(positions, phase, most + 2, work, monkeypatch)[1]


@pytest.mark.parametrize("phase", PAUSED)
@pytest.mark.parametrize("work", [bytes_of_a_thread, own_bytes])
def test_who_reads_or_writes_is_left_alone_for_ever(
    phase: str,
    work: Work,
    positions: Positions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    still, hangs = still_after(
        positions, phase, 2 * COMPUTING * PATIENCE * LIMIT, work, monkeypatch
    )
    assert still <= 41.0
    assert not hangs


@pytest.mark.parametrize("phase", PAUSED)
def test_who_only_computes_is_left_alone_for_long_and_not_for_ever(
    phase: str, positions: Positions, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = COMPUTING * PATIENCE * LIMIT
    assert (
        still_after(positions, phase, most - 2, computing, monkeypatch)[0]
        < 10.0
    )
    much = most + PATIENCE * LIMIT + 10
    assert still_after(positions, phase, much, computing, monkeypatch)[1]


@pytest.mark.parametrize(
    ("phase", "work", "hangs"),
    [("first step", computing, False), ("first step", heartbeats, True), ("first step", idle, True),
     ("loading data", bytes_of_a_thread, False), ("loading data", computing, True),
     ("loading data", idle, True), ("in a step", computing, True), ("in a step", own_bytes, True),
     ("validating", computing, True), ("between steps", own_bytes, True)],
)  # fmt: skip
def test_outside_of_saves_only_some_work_counts(
    phase: str,
    work: Work,
    hangs: bool,
    positions: Positions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert phase in PHASES
    assert (
        still_after(positions, phase, 5 * LIMIT, work, monkeypatch)[1] == hangs
    )
    # Nothing is let compute or read for ever there.
    assert still_after(
        positions, phase, 2 * PATIENCE * LIMIT, work, monkeypatch
    )[1]


def test_who_waits_in_a_call_does_not_work(
    positions: Positions, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions.words[WAITS] = (
        1  # as over shared memory, which costs processor time
    )
    still, _ = still_after(
        positions, "saving", 40 * LIMIT, computing, monkeypatch
    )
    assert still == 40 * LIMIT


# ---- of real processes, whose seconds are made up

LOCKS = """
import sys, threading
from rank_watch import Positions
positions = Positions(0)
with positions.phase("saving"):
    print(*positions.paths, flush=True)
    sys.stdin.readline()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_real_deadlock_in_a_save_beats_and_does_not_work() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKS],
        stdin=-1,
        stdout=-1,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    files = tuple(process.stdout.readline().split())
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    seen = WatchedRank(
        RankProcess(0, process.pid, started_at(process.pid), files), "a"
    )
    waits = threading.Event()
    beat = seen.beat
    while (
        seen.state(seen.since).doing != "asleep in futex (a lock)"
        or seen.beat < beat + 2
    ):
        waits.wait(0.01)
        seen.look(seen.since)
    begun = seen.since
    for n in range(1, 3000):
        seen.look(begun + n, 60.0)
    state = seen.state(begun + 2999)
    assert state.still > 2900
    assert diagnose([state], 60.0).ranks == (0,)
    process.kill()
    process.communicate()


def test_work_of_this_process_and_of_its_children_is_seen(
    tmp_path: Path,
) -> None:
    effort = Effort(os.getpid(), 0.0)
    effort.thread = threading.get_native_id()
    effort.begin(0.0)
    effort.look(1.0)
    assert (effort.computed_at, effort.moved_at) == (0.0, 0.0)
    (tmp_path / "file").write_bytes(b"x")
    effort.look(2.0)
    assert effort.moved_at == 2.0
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    effort.look(3.0)
    assert effort.computed_at == 3.0
