"""Lines of the watcher, and output of ranks, that nobody reads."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_diagnosis import made, rank, waiting

from rank_watch import Positions, diagnose, processes, watched_rank, watcher
from rank_watch.diagnosis import Diagnosis
from rank_watch.hosted import Hosted, RankProcess
from rank_watch.processes import started_at, unread_output
from rank_watch.voice import Voice
from rank_watch.watched_rank import WatchedRank
from rank_watch.watcher import Watcher

SLEEPS = """
from rank_watch import Positions
import sys, time
print(*Positions(0).paths, flush=True)
time.sleep(1e6)
"""


def full_pipe() -> tuple[int, int]:
    """A pipe that takes no more."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while True:
            os.write(writes, b"x" * 65536)
    except BlockingIOError:
        return reads, writes


@pytest.mark.parametrize("blocks", [True, False])
def test_a_voice_that_nobody_hears_blocks_nobody_and_is_heard_later(
    blocks: bool,
) -> None:
    reads, writes = full_pipe()
    os.set_blocking(writes, blocks)
    voice = Voice("rank-watch", writes)
    for number in range(200):
        voice.say(f"line {number}\nmore")
    assert not voice.flush(0.01)
    os.set_blocking(reads, False)
    heard = b""
    while not heard.endswith(b"line 199\n  more\n"):
        try:
            heard += os.read(reads, 1 << 20)
        except BlockingIOError:
            voice.flush(0.01)
    assert voice.flush(10)
    # The oldest are left out: it keeps no more than a screen or two.
    assert heard.count(b"rank-watch: line ") < 100
    os.close(reads)
    os.close(writes)


def test_a_voice_of_a_process_with_many_open_files_is_heard() -> None:
    """`select` takes no file numbered 1,024 or above."""
    reads, writes = full_pipe()
    high = fcntl.fcntl(writes, fcntl.F_DUPFD, 1500)
    voice = Voice("rank-watch", high)
    voice.say("a line")
    assert not voice.flush(0.01)
    while os.read(reads, 1 << 20).endswith(b"x"):
        pass
    assert voice.flush(10)
    for file in (reads, writes, high):
        os.close(file)


def test_a_voice_into_a_closed_pipe_is_silent() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    voice = Voice("rank-watch", writes)
    voice.say("a")
    assert voice.flush(10)
    os.close(writes)


@pytest.fixture
def sleeping() -> Iterator[tuple[subprocess.Popen[str], RankProcess]]:
    """A process that is a rank and does nothing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPS],
        stdout=-1,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    files = tuple(process.stdout.readline().split())
    yield process, RankProcess(0, process.pid, started_at(process.pid), files)
    process.kill()
    process.communicate()


def test_ranks_are_ended_before_anything_is_printed(
    tmp_path: Path,
    sleeping: tuple[subprocess.Popen[str], RankProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, entry = sleeping
    ends = Watcher(Hosted("a", str(tmp_path), ("a",), 1.0, (entry,)))
    reads, writes = full_pipe()
    os.set_blocking(writes, True)
    monkeypatch.setattr(watcher, "_PRINTED", 0.01)
    ends.voice = Voice("rank-watch", writes)
    for _ in range(100):
        ends.voice.say("rank 0 saves")
    ends.end(Diagnosis(True, (0,), ("the run hangs",), ("the run hangs",)))
    assert process.wait(10) == -9
    assert (tmp_path / watcher.FILE).read_text() == "the run hangs\n"
    os.close(reads)
    os.close(writes)


WRITES = """
import os, sys, threading, time
what = sys.argv[1]
if what == "other":
    _, file = os.pipe()
else:
    file = 2 if what == "error" else 1
write = lambda: os.write(file, b"x" * (1 << 20))
if what == "thread":
    threading.Thread(target=write).start()
    time.sleep(1e6)
write()
time.sleep(1e6)
"""


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("what", "stream"),
    [
        ("output", "standard output, a pipe"),
        ("error", "standard error, a pipe"),
        ("thread", "standard output, a pipe"),
        ("other", ""),
    ],
)
def test_a_process_whose_output_nobody_reads_is_known(
    what: str, stream: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, what], stdout=-1, stderr=-1
    )
    seen = processes.system_call_of
    write = lambda: any(  # noqa: E731
        seen(process.pid, thread)[0] == "write"
        for thread in processes._threads(process.pid)
    )
    until(write)
    if hidden:  # as by Yama on Ubuntu
        monkeypatch.setattr(
            processes, "system_call_of", lambda pid, thread: ("", ())
        )
    assert unread_output(process.pid) == stream
    assert process.stdout is not None
    if what in ("output", "thread"):
        process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
        os.set_blocking(process.stdout.fileno(), False)
        # `read` returns None for an empty pipe, b"" if the writer is gone.
        until(
            lambda: (
                not process.stdout.read()  # type: ignore[union-attr]
                and not unread_output(process.pid)
            )
        )
    process.kill()
    process.communicate()


def test_who_waits_for_somebody_to_read_its_output_is_mentioned_and_left_alone() -> (
    None
):
    held = rank(0, 70.0, held=600.0, output="standard output, a pipe")
    others = [waiting(n, made(1, 0), still=600.0) for n in (1, 2)]
    found = diagnose([held, *others], 60.0)
    assert not found.hangs
    assert (
        "rank 0 has waited 600 s for somebody to read its output (standard output"
        in found.text
    )
    late = replace(rank(2), still=600.0)
    # another that really hangs
    assert diagnose([held, others[0], late], 60.0).ranks == (2,)


def test_time_in_which_output_is_not_read_counts_for_no_operation(
    sleeping: tuple[subprocess.Popen[str], RankProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, entry = sleeping
    seen = WatchedRank(entry, "a")
    begun = seen.since
    output = ["standard output, a pipe"]
    monkeypatch.setattr(watched_rank, "unread_output", lambda pid: output[0])
    for n in range(1, 400):
        seen.look(begun + n)
    state = seen.state(begun + 399)
    assert state.still < 5
    assert state.held > 390
    assert state.output
    output[0] = ""
    for n in range(400, 405):
        seen.look(begun + n)
    state = seen.state(begun + 404)
    assert 4 <= state.still < 10  # not 404: it would be ended as it goes on
    assert (state.held, state.output) == (0.0, "")
    seen.reader.close()


def test_a_position_is_left_as_it_was_by_a_watcher_that_was_killed() -> None:
    positions = Positions(0)
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    first = WatchedRank(entry, "a")
    begun = first.since
    positions.begin()
    first.look(begun + 1)
    positions.words[8] += 1  # the next step, after an operation of 90 s
    first.look(begun + 91)
    assert first.longest == 90.0
    assert WatchedRank(entry, "a").longest == 90.0
    positions.close("ended")


def test_ranks_that_are_threads_leave_no_open_files() -> None:
    def opened() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before, others = opened(), set(threading.enumerate())
    for _ in range(5):
        positions = Positions(0)
        positions.close("ended")
        for thread in set(threading.enumerate()) - others:
            thread.join(10)
    del positions, thread
    assert opened() <= before
