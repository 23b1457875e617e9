"""Work of a rank that its position does not show: CPU time, and bytes read and written.

A rank that saves, reads or starts may keep its position for minutes, and is healthy as
long as it works. A stuck rank also uses some CPU time, for its heartbeat, progress bars
or communication threads. So work must reach a minimum rate to count.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .processes import stat_of

RATE = 0.05  # of a core, since work was last seen
# Bytes, and bytes a second, of threads that are not the rank's own.
BYTES, BYTES_RATE = (
    1 << 16,
    4096,
)
EVERY = 0.5  # seconds between two samples: each reads a file per thread
# /proc counts processor time in ticks, usually of 10 ms.
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    at: float
    computed: float  # seconds of processor time
    moved: int  # bytes read and written by the whole process
    own: int  # the same plus the number of calls, for the rank's own thread


class Effort:
    """Measures the work of one process.

    `computed_at` and `moved_at` are the last times, on the caller's clock, at which it
    computed, and at which it read or wrote.
    """

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.computed_at = self.moved_at = now
        # the rank's own thread, and its heartbeat thread
        self.thread = self.heartbeat = 0
        self._looked = now
        # Two baselines: a sample that shows computing must not restart the
        # count of bytes, and vice versa.
        self._computed = self._moved = self._sample(now)
        self._begins = False

    def begin(self, now: float) -> None:
        """Restart the measurement after the rank has made progress."""
        self.computed_at = self.moved_at = now
        self._begins = True

    def look(self, now: float) -> None:
        """Take a new sample if it is time to."""
        if not self._begins and now - self._looked < EVERY:
            return
        self._looked = now
        sample = self._sample(now)
        if self._begins:
            self._begins = False
            # The old baseline belongs to an earlier phase.
            self._computed = self._moved = sample
            return
        seconds = now - self._computed.at
        computed = sample.computed - self._computed.computed
        # Three ticks: the times of the process and of its heartbeat are rounded down
        # separately.
        if computed > max(3 * _TICK, RATE * seconds):
            self.computed_at, self._computed = now, sample
        elif (
            computed < 0
        ):  # a child has ended whose time is not added to its parent's
            self._computed = sample
        seconds = now - self._moved.at
        moved = sample.moved - self._moved.moved
        # Any byte or call of the rank's own thread counts; other threads,
        # which may only log, must reach a rate.
        if (
            sample.own != self._moved.own
            or moved > BYTES + BYTES_RATE * seconds
        ):
            self.moved_at, self._moved = now, sample

    def skip(self, seconds: float) -> None:
        """Exclude seconds in which the process could not run."""
        self.computed_at += seconds
        self.moved_at += seconds

    def _sample(self, now: float) -> _Sample:
        computed = _seconds(f"/proc/{self.pid}", 4) + self._of_children()
        # The heartbeat would otherwise keep a stuck rank alive.
        if self.heartbeat:
            computed -= _seconds(f"/proc/{self.pid}/task/{self.heartbeat}", 2)
        moved = _counters(f"/proc/{self.pid}/io")
        own = (
            _counters(f"/proc/{self.pid}/task/{self.thread}/io")
            if self.thread
            else 0
        )
        return _Sample(now, computed, moved, own)

    def _of_children(self) -> float:
        """Return the CPU time of processes that the rank started, such as compilers,
        without the watcher."""
        # The watcher is a child of one of the ranks, and computes as long as
        # it watches.
        total, found = 0.0, _children(self.pid)
        seen = {os.getpid()}
        while found:
            child = found.pop()
            if child not in seen:
                seen.add(child)
                total += _seconds(f"/proc/{child}", 4)
                found += _children(child)
        return total


def _seconds(path: str, fields: int) -> float:
    """Return the CPU seconds of a process or thread; with 4 fields including its ended
    children."""
    # utime and stime, then cutime and cstime: indices count from the field
    # after the name.
    times = stat_of(path)[11 : 11 + fields]
    return _TICK * sum(map(int, times))


def _counters(path: str) -> int:
    """Return the sum of a process's or thread's I/O counters: bytes and calls."""
    with suppress(OSError, IndexError, ValueError):
        return sum(
            int(line.split()[1])
            # rchar, wchar, syscr, syscw, read_bytes and write_bytes, without
            # cancelled_write_bytes.
            for line in Path(path).read_text().splitlines()[:6]
        )
    return 0


def _children(pid: int) -> list[int]:
    children = list[int]()
    with suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            children += map(int, text.split())
    return children
