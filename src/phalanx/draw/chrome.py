"""A picture as a Chrome trace: JSON that opens in Perfetto, a track for every rank and lane."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..program import Span, Timeline
from .picture import Picture, apart

# The trace's clock counts microseconds. A measured second is a second there; a unit of cost, which
# is no time at all, becomes a millisecond, so that a step is neither invisible nor hours long.
_CLOCKS = {"s": 1e6, " ms": 1e3, "": 1e3}


def chrome(picture: Picture) -> str:
    """The trace's text. Each rank is a process, each lane a thread; the ranks of a second timeline
    follow those of the first."""
    events: list[dict[str, object]] = []
    scale = _CLOCKS[picture.clock]
    for source, timeline in enumerate(picture.timelines):
        base = source * (max(picture.timeline.ranks, default=0) + 1)
        name = f" {picture.names[source]}" if picture.other else ""
        threads: dict[int, int] = {}
        for rank, lane in timeline.lanes:
            if rank not in threads:
                threads[rank] = 0
                label = picture.labels.get(rank, f"rank {rank}")
                events.append(_named("process_name", base + rank, 0, name=label + name))
                events.append(_named("process_sort_index", base + rank, 0, sort_index=base + rank))
            spans = [s for s in timeline.spans if (s.rank, s.lane) == (rank, lane)]
            # Perfetto may drop slices of one thread that overlap without being nested.
            for row in apart(spans):
                where = threads[rank]
                threads[rank] += 1
                events.append(_named("thread_name", base + rank, where, name=lane))
                events.append(_named("thread_sort_index", base + rank, where, sort_index=where))
                events += [_span(picture, span, base, where, scale) for span in row]
        events += _memory(picture, timeline, base, scale)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": picture.title}}
    return json.dumps(trace) + "\n"


def _span(picture: Picture, span: Span, base: int, thread: int, scale: float) -> dict[str, object]:
    return {
        "name": str(span.op),
        "cat": span.op.kind,
        "ph": "X",
        "ts": (span.start - picture.start) * scale,
        "dur": (span.end - span.start) * scale,
        "pid": base + span.rank,
        "tid": thread,
        "args": {"does": picture.explain(span.op)},
    }


def _memory(
    picture: Picture, timeline: Timeline, base: int, scale: float
) -> Iterator[dict[str, object]]:
    for rank, points in (timeline.memory or {}).items():
        for time, kinds in points:
            yield {
                "name": f"memory ({picture.unit})",
                "ph": "C",
                "ts": (time - picture.start) * scale,
                "pid": base + rank,
                "args": dict(kinds),
            }


def _named(what: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
