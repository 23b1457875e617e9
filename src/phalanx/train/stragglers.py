"""Ranks that take longer for the same work than their peers: which, how much, and at what.

A rank's own time is that of its steps without what it waited in calls of groups. Ranks that carry out
the same row of the program are peers; a rank without any is compared with its own earlier steps. All
ranks send their numbers with each line of the log, and the log's rank compares them.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..layout.numbers import seconds_text
from ..program import Span, ops

DATA = "loading data"
NAMES = (DATA, *(kind.name for kind in ops.KINDS.values()))
Interval = tuple[float, float]  # from when to when
_ENOUGH = 1.0  # seconds beyond the factor, added up, that are worth a line
_EARLIER = 20  # lines of the log that a rank without peers is compared with


class Slow(NamedTuple):
    """A rank that was slow, its seconds a step beside its peers', and the same of its operations."""

    rank: int
    seconds: float
    usual: float
    operations: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        own, usual = map(seconds_text, (self.seconds, self.usual))
        text = f"rank {self.rank} is slow: {own} of its own work a step, where {usual} is usual; "
        each = [(name, *map(seconds_text, both)) for name, both in self.operations.items()]
        return text + ", ".join(f"{name} {own} ({usual})" for name, own, usual in each)


class OwnTime:
    """What one rank has worked since the last line of the log."""

    def __init__(self) -> None:
        self.steps, self.total = 0, 0.0
        self.parts = dict.fromkeys(NAMES, 0.0)

    def add(
        self, seconds: float, data: float, spans: Iterable[Span], waits: Sequence[Interval]
    ) -> None:
        """A step: its seconds, those of reading its data, its operations, and when it waited."""
        self.steps += 1
        self.total += seconds - sum(b - a for a, b in waits)
        self.parts[DATA] += data
        for span in spans:
            if span.lane == ops.COMPUTE:
                waited = sum(max(0.0, min(b, span.end) - max(a, span.start)) for a, b in waits)
                self.parts[ops.KINDS[span.op.kind].name] += span.end - span.start - waited

    def taken(self) -> list[float]:
        """Seconds a step, whole and in parts; counting begins again."""
        numbers = [each / max(1, self.steps) for each in (self.total, *self.parts.values())]
        self.__init__()  # type: ignore[misc]
        return numbers


class Stragglers:
    """Compares the ranks' own time. `rows`: of the program, which row each rank carries out."""

    def __init__(self, factor: float, rows: Sequence[int]) -> None:
        self.factor, self.rows = factor, rows
        self.excess = [0.0] * len(rows)
        self.earlier: list[deque[Sequence[float]]] = [deque(maxlen=_EARLIER) for _ in rows]

    def look(self, table: Sequence[Sequence[float]], steps: int) -> Iterator[Slow]:
        """The ranks that have become slow with this line of so many steps. The table has each rank's
        seconds a step: of all its own work, then of each of `NAMES`."""
        for rank, own in enumerate(table) if self.factor else ():
            alike = (o for o, row in enumerate(self.rows) if row == self.rows[rank] and o != rank)
            peers = [table[other] for other in alike]
            if not peers and len(self.earlier[rank]) * 4 >= _EARLIER:
                peers = list(self.earlier[rank])
            self.earlier[rank].append(own)
            if not peers:
                continue
            usual = [statistics.median(each) for each in zip(*peers, strict=True)]
            # What is beyond the factor in some steps is paid back in others, so that noise ends nowhere.
            beyond = steps * (own[0] - self.factor * usual[0])
            self.excess[rank] = max(0.0, self.excess[rank] + beyond)
            if self.excess[rank] > _ENOUGH:
                self.excess[rank] = 0.0
                parts = zip(NAMES, own[1:], usual[1:], strict=True)
                most = sorted(parts, key=lambda part: part[2] - part[1])[:3]
                lost = {name: (mine, theirs) for name, mine, theirs in most if mine > theirs}
                yield Slow(rank, own[0], usual[0], lost)
