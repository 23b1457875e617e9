"""Timelines: which operation ran where, and its start and end.

`simulate` and the executor both create one, so a prediction can be compared with a
measurement.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ..layout.files import parse_json
from .ops import RECEIVE, SEND
from .program import Op


class Span(NamedTuple):
    """One operation on one rank's lane, in the unit of the costs (seconds if measured)."""

    rank: int
    lane: str
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans by rank and list; `memory` has (time, bytes by kind) for each rank."""

    spans: tuple[Span, ...]
    memory: (
        Mapping[int, tuple[tuple[float, Mapping[str, float]], ...]] | None
    ) = None

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.ranks)} ranks: {len(self.spans):,} spans, {self.makespan:.4g} s>"

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(s.rank for s in self.spans))

    @cached_property
    def lanes(self) -> tuple[tuple[int, str], ...]:
        """Every (rank, lane), ranks in order, the compute lane first."""
        found = dict.fromkeys((s.rank, s.lane) for s in self.spans)
        order = {rank: i for i, rank in enumerate(self.ranks)}

        def place(found: tuple[int, str]) -> tuple[int, bool, str]:
            rank, lane = found
            return order[rank], lane != "compute", lane

        return tuple(sorted(found, key=place))

    @cached_property
    def start(self) -> float:
        return min((s.start for s in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        return max((s.end for s in self.spans), default=0.0) - self.start

    @cached_property
    def computing(self) -> dict[int, tuple[Span, ...]]:
        """The spans on each rank's compute lane that take time."""
        found: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for span in self.spans:
            if span.lane == "compute" and span.end > span.start:
                found[span.rank].append(span)
        return {rank: tuple(spans) for rank, spans in found.items()}

    def busy(self, rank: int) -> float:
        return sum(s.end - s.start for s in self.computing[rank])

    @cached_property
    def ideal(self) -> float:
        """The busiest rank's computing time: no order of operations takes less."""
        return max(map(self.busy, self.ranks), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    def inner_idle(self, rank: int) -> float:
        """The idle time between a rank's first and last computation."""
        spans = self.computing[rank]
        return (
            spans[-1].end - spans[0].start - self.busy(rank) if spans else 0.0
        )

    def exposed(self, rank: int) -> float:
        """The time in which a rank computes nothing while another lane is busy."""
        return sum(exposed for _, exposed in self._beside(rank))

    def breakdown(self, rank: int) -> dict[str, float]:
        """The rank's step time by kind of operation; the parts add up to the makespan.

        Operations beside computing count only while nothing is computed, for the one
        that began first. Both ends of a message are one kind. "" is idle time.
        """
        # Compute time counts in full; other lanes count only where nothing is computed.
        parts: dict[str, float] = defaultdict(float)
        for span in self.computing[rank]:
            parts[span.op.kind] += span.end - span.start
        for span, exposed in self._beside(rank):
            parts[SEND if span.op.kind == RECEIVE else span.op.kind] += exposed
        parts[""] = max(0.0, self.makespan - sum(parts.values()))
        return {kind: time for kind, time in parts.items() if time}

    def _beside(self, rank: int) -> Iterator[tuple[Span, float]]:
        """Yield other spans of a rank, each with its time without computing."""
        # Prefix sums over the computing spans, which do not overlap.
        work = self.computing[rank]
        ends, done = (
            [s.end for s in work],
            [0.0, *accumulate(s.end - s.start for s in work)],
        )

        def computed(time: float) -> float:
            """The time spent computing before a time."""
            # All spans that end before, and the part of the one that is running.
            i = bisect(ends, time)
            begun = max(0.0, time - work[i].start) if i < len(work) else 0.0
            return done[i] + begun

        # In order of start; what an earlier span covered does not count again.
        reached = -math.inf
        beside = (
            s for s in self.spans if s.rank == rank and s.lane != "compute"
        )
        for span in sorted(beside, key=lambda s: (s.start, s.end)):
            begun = max(span.start, reached)
            if span.end > begun:
                yield (
                    span,
                    span.end - begun - (computed(span.end) - computed(begun)),
                )
                reached = span.end

    def to_json(self) -> dict[str, object]:
        return {
            "spans": [
                [s.rank, s.lane, str(s.op), s.start, s.end] for s in self.spans
            ],
            "memory": {
                str(rank): [[time, dict(kinds)] for time, kinds in points]
                for rank, points in (self.memory or {}).items()
            },
        }

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Parse a timeline's file, or raise an error."""
        # A file from outside: names and numbers are checked, and nothing is executed.
        try:
            value = parse_json(text, "this", ValueError)
            spans = tuple(
                Span(int(r), str(lane), Op.parse(op), float(a), float(b))
                for r, lane, op, a, b in value["spans"]
            )
            memory = {
                int(r): tuple(map(_point, ps))
                for r, ps in value.get("memory", {}).items()
            }
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            raise ValueError(
                f"this is not a timeline: {str(error)[:200]}"
            ) from None
        times = [(span.start, span.end) for span in spans]
        times += [
            (time, time) for points in memory.values() for time, _ in points
        ]
        if not all(math.isfinite(a) and a <= b < math.inf for a, b in times):
            raise ValueError(
                "this is not a timeline: a span ends before it starts, or never"
            )
        return cls(spans, memory or None)


def _point(point: Any) -> tuple[float, dict[str, float]]:
    time, kinds = point
    return float(time), {
        str(kind): float(amount) for kind, amount in kinds.items()
    }
