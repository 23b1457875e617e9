"""A picture as a Chrome trace: JSON for Perfetto, with a track for each rank and lane."""

import json
from collections.abc import Mapping

from .picture import Picture, apart

# The trace counts microseconds. A measured second stays a second. A unit of cost, which
# is not a time, becomes a millisecond, so that a step is neither invisible nor hours
# long.
_CLOCKS = {"s": 1e6, " ms": 1e3, "": 1e3}


def chrome(picture: Picture) -> str:
    """The trace as text.

    Each rank is a process and each lane a thread. Ranks of a second timeline follow
    those of the first.
    """
    events: list[dict[str, object]] = []
    scale = _CLOCKS[picture.clock]

    def at(time: float) -> float:
        return (time - picture.start) * scale

    for source, timeline in enumerate(picture.timelines):
        # Processes of the second timeline are numbered after those of the
        # first.
        base = source * (max(picture.timeline.ranks, default=0) + 1)
        name = f" {picture.names[source]}" if picture.other else ""
        threads: dict[int, int] = {}
        for rank, lane in timeline.lanes:
            pid = base + rank
            if rank not in threads:
                threads[rank] = 0
                events.append(
                    _event(
                        # M: metadata, which names a process or a thread.
                        "M",
                        pid,
                        "process_name",
                        {"name": picture.name_of(rank) + name},
                    )
                )
                events.append(
                    _event("M", pid, "process_sort_index", {"sort_index": pid})
                )
            spans = [
                s for s in timeline.spans if (s.rank, s.lane) == (rank, lane)
            ]
            # Perfetto may drop slices of a thread that overlap without nesting.
            for row in apart(spans):
                # A lane has one thread for each row of spans that overlap.
                tid = {"tid": threads[rank]}
                events.append(
                    _event("M", pid, "thread_name", {"name": lane}) | tid
                )
                index = {"sort_index": threads[rank]}
                events.append(
                    _event("M", pid, "thread_sort_index", index) | tid
                )
                threads[rank] += 1
                for span in row:
                    event = _event(
                        # X: a complete event, with its start and duration.
                        "X",
                        pid,
                        str(span.op),
                        {"does": picture.explain(span.op)},
                    )
                    times = {
                        "ts": at(span.start),
                        "dur": (span.end - span.start) * scale,
                    }
                    events.append(event | tid | times | {"cat": span.op.kind})
        for rank, points in (timeline.memory or {}).items():
            for time, kinds in points:
                # C: a counter, drawn as stacked areas.
                event = _event(
                    "C", base + rank, f"memory ({picture.unit})", kinds
                )
                events.append(event | {"ts": at(time)})
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": picture.title},
    }
    return json.dumps(trace) + "\n"


def _event(
    phase: str, pid: int, name: str, args: Mapping[str, object]
) -> dict[str, object]:
    return {"name": name, "ph": phase, "pid": pid, "args": dict(args)}
