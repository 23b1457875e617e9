"""Detects ranks that take longer than their peers for the same work, and the operations
that are slow.

A rank's own time is that of its steps without waiting for other ranks. On a CPU that is
the step without its waits in calls of groups. On a GPU the host queues a whole step and
waits nowhere, so the own time is the device's compute time, by the events around each
operation, plus reading data.

Ranks that execute the same row of the program are peers; a rank without peers is
compared with its own earlier steps. All ranks send their times with each line of the
log, and rank 0 compares them.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..layout.numbers import seconds_text
from ..program import Span, ops

DATA = "loading data"
NAMES = (DATA, *(kind.name for kind in ops.KINDS.values()))
Interval = tuple[float, float]  # start and end
_ENOUGH = 1.0  # accumulated seconds beyond the factor that cause a report
_EARLIER = 20  # log lines that a rank without peers is compared with
_NAMED = 8  # maximum ranks named with one log line


class Slow(NamedTuple):
    """A slow rank: its seconds per step and its peers', in total and by operation."""

    rank: int
    seconds: float
    usual: float
    operations: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        own, usual = map(seconds_text, (self.seconds, self.usual))
        text = f"rank {self.rank} is slow: {own} of its own work a step, where {usual} is usual; "
        each = [
            (name, *map(seconds_text, both))
            for name, both in self.operations.items()
        ]
        return text + ", ".join(
            f"{name} {own} ({usual})" for name, own, usual in each
        )


class OwnTime:
    """One rank's own working time since the last log line.

    `queued`: its host queues work for a device, so only the device's times show
    durations.
    """

    def __init__(self, *, queued: bool = False) -> None:
        self.queued = queued
        self._clear()

    def _clear(self) -> None:
        self.steps, self.total = 0, 0.0
        self.parts = dict.fromkeys(NAMES, 0.0)

    def add(
        self,
        seconds: float,
        data: float,
        spans: Iterable[Span],
        waits: Sequence[Interval],
        ahead: float = 0.0,
    ) -> None:
        """Add a step: its seconds, those of reading data, its operations, and its
        waits.

        `ahead`: seconds in which the next data was read while the device computed.
        """
        self.steps += 1
        computed = 0.0
        for span in spans:
            # Only computation is a rank's own work; messages depend on others.
            if span.lane == ops.COMPUTE:
                # The waits inside this span: a region of tensor parallelism
                # sends within it.
                waited = sum(
                    max(0.0, min(b, span.end) - max(a, span.start))
                    for a, b in waits
                )
                own = span.end - span.start - (0.0 if self.queued else waited)
                self.parts[ops.KINDS[span.op.kind].name] += own
                computed += own
        # Prefetching costs time only if the device had to wait for it.
        data += max(0.0, ahead - computed)
        self.parts[DATA] += data
        if self.queued:
            self.total += data + computed
        else:
            # On a CPU, all that is not waiting is the rank's own.
            self.total += seconds - sum(b - a for a, b in waits)

    def taken(self) -> list[float]:
        """Return seconds per step, in total and in parts, and restart the count."""
        numbers = [
            each / max(1, self.steps)
            for each in (self.total, *self.parts.values())
        ]
        self._clear()
        return numbers


class Stragglers:
    """Compares the ranks' own times. `rows`: the program row that each rank
    executes."""

    def __init__(self, factor: float, rows: Sequence[int]) -> None:
        self.factor = factor
        self.excess = [0.0] * len(rows)
        self.earlier: list[deque[Sequence[float]]] = [
            deque(maxlen=_EARLIER) for _ in rows
        ]
        self.peers: dict[int, list[int]] = {}  # the ranks of each row
        for rank, row in enumerate(rows):
            self.peers.setdefault(row, []).append(rank)

    def look(
        self, table: Sequence[Sequence[float]], steps: int
    ) -> Iterator[Slow]:
        """Yield the ranks found slow with this log line of `steps` steps, slowest
        first.

        `table` has each rank's seconds per step: the total of its own work, then each
        of `NAMES`.
        """
        # 0 turns reports off.
        if not self.factor:
            return
        numbers = np.asarray(table, dtype=np.float64)  # (ranks, 1 + names)
        found = [
            rank
            for ranks in self.peers.values()
            for rank in self._beyond(numbers, ranks, steps)
        ]
        found.sort(key=lambda rank: -numbers[rank, 0])
        # A reported rank starts over, and is named again if it stays slow.
        for rank in found:
            self.excess[rank] = 0.0
        for rank in found[:_NAMED]:
            yield self._slow(numbers, rank)
        # A rank without peers is compared with itself later on.
        for ranks in self.peers.values():
            if len(ranks) == 1:
                self.earlier[ranks[0]].append(table[ranks[0]])

    def _beyond(
        self, numbers: np.ndarray, ranks: Sequence[int], steps: int
    ) -> list[int]:
        """Return the ranks of one row whose accumulated excess over the factor is large
        enough."""
        totals = numbers[ranks, 0]
        usual = (
            _medians_of_others(totals)
            if len(ranks) > 1
            else self._earlier_median(ranks[0])
        )
        if usual is None:
            return []
        # Excess of some steps is offset by others, so that noise does not add up.
        beyond = steps * (totals - self.factor * usual)
        for rank, more in zip(ranks, beyond.tolist(), strict=True):
            self.excess[rank] = max(0.0, self.excess[rank] + more)
        return [rank for rank in ranks if self.excess[rank] > _ENOUGH]

    def _earlier_median(self, rank: int) -> "np.ndarray | None":
        earlier = self.earlier[rank]
        # A quarter of the lines first: a median of few is no measure.
        if len(earlier) * 4 < _EARLIER:
            return None
        return np.array([statistics.median(numbers[0] for numbers in earlier)])

    def _slow(self, numbers: np.ndarray, rank: int) -> Slow:
        (row,) = (ranks for ranks in self.peers.values() if rank in ranks)
        others = [other for other in row if other != rank]
        peers = numbers[others] if others else np.asarray(self.earlier[rank])
        usual = np.median(peers, axis=0).tolist()
        own = numbers[rank].tolist()
        parts = zip(NAMES, own[1:], usual[1:], strict=True)
        # The three operations that lose most.
        most = sorted(parts, key=lambda part: part[2] - part[1])[:3]
        lost = {
            name: (mine, theirs)
            for name, mine, theirs in most
            if mine > theirs
        }
        return Slow(rank, own[0], usual[0], lost)


def _medians_of_others(values: np.ndarray) -> np.ndarray:
    """Return for each value the median of all others, with a single sort: it runs at
    every log line."""
    count = len(values)
    # Without one value, the sorted order only closes the gap.
    order = values.argsort(kind="stable")
    ordered = values[order]
    # Position of each value in sorted order.
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)

    def without_own(at: int) -> np.ndarray:
        # the value at this position after its own is removed
        return ordered[np.where(place <= at, at + 1, at)]

    # An even number of others has two middle values.
    middle = (count - 1) // 2
    above = without_own(middle)
    below = above if (count - 1) % 2 else without_own(middle - 1)
    return np.asarray((below + above) / 2)
