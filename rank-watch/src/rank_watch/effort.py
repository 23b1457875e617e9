"""Work of a rank that its position does not show: processor time, and bytes read and written.

A rank that saves, reads or starts makes no progress by its position for minutes, and is healthy while
it works. A rank that is stuck costs a little processor time, too: its heartbeat, threads that draw a
progress bar or look after communication. So work has to reach a rate to count.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .processes import stat_of

RATE = 0.05  # of a core, since work was last seen
BYTES, BYTES_RATE = (
    1 << 16,
    4096,
)  # bytes, and bytes a second, of threads that are not the rank's own
EVERY = 0.5  # seconds between two looks: they read a file for each thread
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    at: float
    computed: float  # seconds of processor time
    moved: int  # bytes read and written by the whole process
    own: int  # the same, and such calls, of the rank's own thread


class Effort:
    """Measures the work of one process. `computed_at` and `moved_at` are the last times, on the
    caller's clock, at which it computed, and read or wrote."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.computed_at = self.moved_at = now
        # the rank's own thread, and the one that beats
        self.thread = self.heartbeat = 0
        self._looked = now
        self._computed = self._moved = self._sample(now)
        self._begins = False

    def begin(self, now: float) -> None:
        """Starts to count anew: the rank has made progress."""
        self.computed_at = self.moved_at = now
        self._begins = True

    def look(self, now: float) -> None:
        """Looks at the process anew, if it is time to."""
        if not self._begins and now - self._looked < EVERY:
            return
        self._looked = now
        sample = self._sample(now)
        if self._begins:
            self._begins = False
            self._computed = self._moved = sample
            return
        seconds = now - self._computed.at
        computed = sample.computed - self._computed.computed
        # Three ticks: the times of the process and of its heartbeat are rounded down apart.
        if computed > max(3 * _TICK, RATE * seconds):
            self.computed_at, self._computed = now, sample
        elif computed < 0:  # a child has ended whose time its parent does not get
            self._computed = sample
        seconds = now - self._moved.at
        moved = sample.moved - self._moved.moved
        if sample.own != self._moved.own or moved > BYTES + BYTES_RATE * seconds:
            self.moved_at, self._moved = now, sample

    def skip(self, seconds: float) -> None:
        """Leaves out seconds in which the process could not run."""
        self.computed_at += seconds
        self.moved_at += seconds

    def _sample(self, now: float) -> _Sample:
        computed = _seconds(f"/proc/{self.pid}", 4) + self._of_children()
        if self.heartbeat:
            computed -= _seconds(f"/proc/{self.pid}/task/{self.heartbeat}", 2)
        moved = _counters(f"/proc/{self.pid}/io")
        own = _counters(f"/proc/{self.pid}/task/{self.thread}/io") if self.thread else 0
        return _Sample(now, computed, moved, own)

    def _of_children(self) -> float:
        """Processor time of processes that the rank has started, as compilers are; not of the watcher."""
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
    """Processor time of a process or thread; of 4 fields also its children's that have ended."""
    times = stat_of(path)[11 : 11 + fields]
    return _TICK * sum(map(int, times))


def _counters(path: str) -> int:
    """Counters of what a process or thread reads and writes: bytes, and calls."""
    with suppress(OSError, IndexError, ValueError):
        return sum(
            int(line.split()[1]) for line in Path(path).read_text().splitlines()[:6]
        )
    return 0


def _children(pid: int) -> list[int]:
    children = list[int]()
    with suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            children += map(int, text.split())
    return children
