"""Pictures of a step's parts: time by kind of operation, memory over time.

`svg` and `page` show when each operation ran.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from ..program import Timeline
from .markup import COLOURS, TEXTURES, WIDE, Html, KeyEntry
from .picture import LEGEND, PAINTS, Picture, named
from .svg import Area, Bar, Row, gantt
from .words import number, ticks

_TALL = 96  # pixels of a rank's memory


def _ranks(picture: Picture) -> Iterator[tuple[int, str, Timeline]]:
    """Every rank of each timeline with its name; the second's follows the first's."""
    ranks = {rank for timeline in picture.timelines for rank in timeline.ranks}
    for rank in sorted(ranks):
        for source, timeline in enumerate(picture.timelines):
            if rank not in timeline.ranks:
                continue
            name = picture.name_of(rank)
            if source:
                below = rank in picture.timeline.ranks
                name = f"{'' if below else name}  {picture.names[1]}"
            yield rank, name, timeline


def breakdown_svg(picture: Picture, width: float = WIDE) -> Html:
    """For each rank its step as one bar, divided by kind of operation.

    Messages count only while nothing is computed.
    """
    shares = [
        (name, timeline, timeline.breakdown(rank))
        for rank, name, timeline in _ranks(picture)
    ]
    # "" stands for idle time, which comes last.
    kinds = [k for k in (*LEGEND, "") if any(k in part for *_, part in shares)]
    textures = _textures(kinds)
    rows = []
    for name, timeline, parts in shares:
        bars, at = list[Bar](), 0.0
        for kind in kinds:
            if not (time := parts.get(kind, 0.0)):
                continue
            share = f"{100 * time / timeline.makespan:.1f} %"
            took = f"{number(time)}{picture.clock}, {share} of the step"
            tip = f"{name.strip()}: {named(kind)} {took}"
            words = (f"{named(kind)} {share}", f"{kind} {share}".strip(), kind)
            fill, ink = _look(kind)
            texture = textures[kind]
            bars.append(Bar(at, at + time, fill, ink, tip, words, texture))
            at += time
        # Indented names belong to the second timeline, below the first.
        rows.append(Row(name, bars, main=not name.startswith(" "), tall=22))
    entries = []
    for kind in kinds:
        fill, ink = _look(kind)
        entries.append(KeyEntry(fill, named(kind), kind, ink, textures[kind]))
    return gantt(
        "where the time of each rank goes",
        rows,
        0.0,
        max(t.makespan for t in picture.timelines),
        clock=picture.clock,
        notes=[
            "The parts are in the order of the legend. Operations that run beside computation"
            " count only while the rank computes nothing."
        ],
        colours=entries,
        width=width,
    )


def _look(kind: str) -> tuple[str, str]:
    """The fill and ink of a part of the step; idle time is an empty box."""
    return (PAINTS[kind].fill, PAINTS[kind].ink) if kind else ("", "")


def _textures(kinds: Sequence[str]) -> dict[str, str]:
    """A texture for each kind, such that kinds of one colour differ."""
    seen, found = Counter[str](), dict[str, str]()
    for kind in kinds:
        fill, _ = _look(kind)
        found[kind] = TEXTURES[seen[fill] % len(TEXTURES)]
        seen[fill] += 1
    return found


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
    limit = picture.limit_shown
    top = max(most, limit)
    # Four numbers above 0 at most: a row is low.
    amounts = [
        (amount, picture.amount(amount)) for amount in ticks(0, top, top / 4)
    ]
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
            tip = f"rank {rank}, {name.strip()}: {kind} at most {picture.amount(highest)}"
            areas.append(Area(kind, levels, fills[kind], tip))
        rows.append(
            Row(
                name,
                areas=areas,
                most=top,
                tall=_TALL,
                amounts=amounts,
                limit=limit,
            )
        )
    return gantt(
        "memory of each rank by kind",
        rows,
        picture.start,
        picture.end,
        clock=picture.clock,
        notes=[
            picture.most_words,
            "The kinds are stacked in the order of the legend, the first at the bottom.",
        ],
        colours=[KeyEntry(fill, kind) for kind, fill in fills.items()],
        width=width,
    )
