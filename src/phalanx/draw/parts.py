"""Pictures of a step's parts: time by kind of operation, memory over time.

`svg` and `page` show when each operation ran.
"""

from collections.abc import Iterator

from ..layout.numbers import bytes_text
from ..program import Timeline
from .markup import COLOURS, WIDE, Html, KeyEntry
from .picture import LEGEND, PAINTS, Picture, named
from .svg import Area, Bar, Row, gantt
from .words import number

_IDLE = "#c8ced6"
_TALL = 64  # pixels of a rank's memory


def _ranks(picture: Picture) -> Iterator[tuple[int, str, Timeline]]:
    """Every rank of each timeline with its name; the second's follows the first's."""
    for rank in picture.timeline.ranks:
        for source, timeline in enumerate(picture.timelines):
            if rank in timeline.ranks:
                name = (
                    f"  {picture.names[1]}"
                    if source
                    else picture.name_of(rank)
                )
                yield rank, name, timeline


def breakdown_svg(picture: Picture, width: float = WIDE) -> Html:
    """For each rank its step as one bar, divided by kind of operation.

    Messages count only while nothing is computed.
    """
    rows, kinds = [], set[str]()
    for rank, name, timeline in _ranks(picture):
        parts, bars, at = timeline.breakdown(rank), list[Bar](), 0.0
        # "" stands for idle time, which comes last.
        for kind in (*LEGEND, ""):
            if not (time := parts.get(kind, 0.0)):
                continue
            kinds.add(kind)
            fill, ink = (
                (PAINTS[kind].fill, PAINTS[kind].ink)
                if kind
                else (_IDLE, "#000000")
            )
            share = f"{100 * time / timeline.makespan:.1f} %"
            took = f"{number(time)}{picture.clock}, {share} of the step"
            tip = f"{name.strip()}: {named(kind)} {took}"
            bars.append(Bar(at, at + time, fill, ink, tip, (share,)))
            at += time
        # Indented names belong to the second timeline, below the first.
        rows.append(Row(name, bars, main=not name.startswith(" "), tall=22))
    fills = (
        (k, PAINTS[k].fill if k else _IDLE)
        for k in (*LEGEND, "")
        if k in kinds
    )
    colours = [KeyEntry(fill, named(kind)) for kind, fill in fills]
    return gantt(
        "where the time of each rank goes",
        rows,
        0.0,
        max(t.makespan for t in picture.timelines),
        clock=picture.clock,
        notes=[
            "What runs beside computing is counted where the rank computes nothing."
        ],
        colours=colours,
        width=width,
    )


def memory_svg(picture: Picture, width: float = WIDE) -> Html:
    """Memory of each rank over the step, by kind, with one scale; "" if unknown."""
    held = [
        (rank, name, timeline.memory[rank])
        for rank, name, timeline in _ranks(picture)
        if timeline.memory and rank in timeline.memory
    ]
    if not held:
        return Html("")
    # One scale for all ranks, so that their heights can be compared.
    most = (
        max(sum(now.values()) for _, _, points in held for _, now in points)
        or 1.0
    )
    kinds = sorted(
        {
            k
            for _, _, points in held
            for _, now in points
            for k in now
            if now[k] > 0
        }
    )
    fills = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    write = (
        bytes_text
        if picture.unit == "bytes"
        else lambda x: f"{number(x)} {picture.unit}"
    )
    rows = []
    for rank, name, points in held:
        areas = []
        for kind in kinds:
            levels = [
                # Rounding may leave a freed amount slightly below 0.
                (time, max(0.0, now.get(kind, 0.0)))
                for time, now in points
            ]
            highest = max(amount for _, amount in levels)
            tip = (
                f"rank {rank}, {name.strip()}: {kind} at most {write(highest)}"
            )
            areas.append(Area(kind, levels, fills[kind], tip))
        rows.append(Row(name, areas=areas, most=most, tall=_TALL))
    return gantt(
        "memory of each rank by kind",
        rows,
        picture.start,
        picture.end,
        clock=picture.clock,
        notes=[
            f"A row is as high as the most that any rank holds: {write(most)}."
        ],
        colours=[KeyEntry(fill, kind) for kind, fill in fills.items()],
        width=width,
    )
