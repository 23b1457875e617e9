"""The timing method of all benchmarks: number of calls, barriers, and aggregation over
ranks.

The work is run beforehand, so that nothing is started, compiled or mapped while it is
timed. Before each reading the device is idle and the ranks have passed a barrier. A
reading repeats short work until it is far longer than the clock's noise. The slowest
rank's reading counts, and of all readings the median. Several works are read in turn,
so that disturbances of the machine affect all of them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm import Group

# minimum seconds of a reading: hundreds of times the clock's resolution
LEAST = 1e-3
MOST_CALLS = 200

WorkOf = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The readings of one work, each the slowest rank's, in seconds per call."""

    readings: tuple[float, ...]
    calls: int  # per reading
    warm_up: int

    @property
    def median(self) -> float:
        return statistics.median(self.readings)

    @property
    def least(self) -> float:
        return min(self.readings)

    @property
    def most(self) -> float:
        return max(self.readings)


class Clock:
    """The clock of one rank. With a group, its methods are collective."""

    def __init__(
        self, device: torch.device | str = "cpu", group: Group | None = None
    ) -> None:
        self.device = torch.device(device)
        self._group = group if group is not None and group.size > 1 else None

    @property
    def method(self) -> str:
        """Describes the method of measurement in a sentence."""
        how = (
            "device events"
            if self.device.type == "cuda"
            else "the system's monotonic clock"
        )
        among = (
            "between ranks: barriers before and after, the slowest rank counts"
        )
        return f"{how}; warmed up, device idle before and after; medians over repeats; {among}"

    def settle(self) -> None:
        """Wait until the device has finished all issued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait until every rank's device has finished all issued work."""
        self.settle()
        if self._group is not None:
            self._group.barrier()
            self.settle()

    def agree(self, seconds: Sequence[float]) -> list[float]:
        """Return the maximum over ranks of each time."""
        if self._group is None:
            return list(seconds)
        slowest = torch.tensor(
            seconds, dtype=torch.float64, device=self.device
        )
        # The slowest rank counts, since all wait for it in a step.
        self._group.all_reduce(slowest, "max")
        return [float(each) for each in slowest.tolist()]

    def read(self, work: WorkOf, calls: int = 1) -> float:
        """Return one reading of this rank, in seconds per call."""
        self.meet()
        # Events are times of the device itself, in milliseconds.
        if self.device.type == "cuda":
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            took = float(start.elapsed_time(end)) / 1e3
        else:
            began = time.perf_counter()
            for _ in range(calls):
                work()
            took = time.perf_counter() - began
        # Ranks that are still working would disturb the next reading.
        self.meet()
        return took / calls

    def claimed(self, work: WorkOf) -> float:
        """Return the time of a clock that does not wait for the device: on a GPU, that
        of the launch alone."""
        self.meet()
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
        self.meet()
        return took

    def measure(
        self,
        *works: WorkOf,
        repeats: int = 7,
        warm_up: int = 2,
        limit: float = 5.0,
    ) -> tuple[Timing, ...]:
        """Measure each work.

        `limit` is the approximate total in seconds. Long calls are repeated less often,
        but each is read at least once.
        """
        # Warm up at least once; long works not more often.
        warmed = 0
        while not warmed or warmed < warm_up:
            firsts = self.agree([self.read(work) for work in works])
            warmed += 1
            if sum(firsts) > limit / 4:
                break
        # So many calls that a reading takes at least LEAST seconds.
        calls = [
            min(MOST_CALLS, max(1, round(LEAST / max(first, 1e-9))))
            for first in firsts
        ]
        # Seconds of one turn of all works; the limit allows so many turns.
        once = sum(first * n for first, n in zip(firsts, calls, strict=True))
        times = max(1, min(repeats, int(limit / max(once, 1e-9))))
        # A, B, A, B, ...: a disturbance hits all works alike.
        turns = list(zip(works, calls, strict=True)) * times
        slowest = self.agree([self.read(work, n) for work, n in turns])
        # Every n-th reading belongs to one work.
        return tuple(
            Timing(tuple(slowest[i :: len(works)]), n, warmed)
            for i, n in enumerate(calls)
        )
