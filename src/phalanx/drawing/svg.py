"""A timeline as SVG: a row for each lane, readable on light and dark pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..program import Span, ops
from .markup import (
    LETTER,
    PLAIN,
    Html,
    KeyEntry,
    box,
    document,
    key,
    label,
    line,
    stripes,
    tag,
)
from .picture import LEGEND, PAINTS, Picture, Track
from .words import number, ticks

_ROW, _LANE, _GAP, _PAD, _TOP = 26, 17, 4, 20, 62
_LEAST = 100.0  # pixels of the axis of time, however narrow the page


class Bar(NamedTuple):
    """Something that takes time. `names` are possible labels, longest first.

    Without a fill, it is an empty box with a dashed outline.
    """

    start: float
    end: float
    fill: str
    ink: str
    tip: str
    names: tuple[str, ...] = ()
    texture: str = PLAIN


class Area(NamedTuple):
    """An amount over time, drawn as the area below it.

    `levels` are (time, amount) at each change.
    """

    name: str
    levels: Sequence[tuple[float, float]]
    fill: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Row:
    """One lane. A main row is taller and separate from the row above.

    `areas` are stacked, the first at the bottom. A sum of `most` fills the row's
    height. `amounts` are the numbers of the row's own axis; a line marks `limit`.
    """

    name: str
    bars: Sequence[Bar] = ()
    main: bool = True
    areas: Sequence[Area] = ()
    most: float = 1.0
    tall: int = 0
    amounts: Sequence[tuple[float, str]] = ()
    limit: float = 0.0

    @property
    def height(self) -> int:
        return self.tall or (_ROW if self.main or self.areas else _LANE)


class _TimeScale(NamedTuple):
    """The mapping from time to x coordinates."""

    margin: float
    scale: float  # pixels per unit of time
    start: float
    end: float

    def x(self, time: float) -> float:
        return self.margin + (time - self.start) * self.scale


def gantt(
    title: str,
    rows: Sequence[Row],
    start: float,
    end: float,
    *,
    clock: str = "",
    notes: Sequence[str] = (),
    colours: Sequence[KeyEntry] = (),
    width: float = 0.0,
    scale: float = 0.0,
) -> Html:
    """One SVG document with rows over an axis of time, and a legend of `colours`.

    It is `width` pixels wide, or as wide as `scale` pixels per unit of time require. It is
    wider than `width` if the names of the rows leave too little room.
    """
    margin = _PAD + max([40.0, *(_label_width(row) for row in rows)])
    room = max(width - margin - _PAD, _LEAST) if width else 700.0
    at = _TimeScale(margin, scale or room / ((end - start) or 1), start, end)
    floor, body, axis = float(_TOP), list[Html](), list[Html]()
    for i, row in enumerate(rows):
        # Main rows are separate, and their other lanes close below them.
        floor += (_GAP if row.main else 1) * bool(i)
        body += _row(row, floor, at)
        floor += row.height
    # 64 pixels between two numbers on the axis.
    for time in ticks(start, end, 64 / at.scale):
        axis.append(line(at.x(time), _TOP - 8, at.x(time), floor + 3))
        axis.append(
            label(at.x(time), _TOP - 12, f"{number(time)}{clock}", "soft mid")
        )
    width = max(at.x(end) + _PAD, width or 480.0)
    below, floor = key(colours, floor + 26, width) if colours else ([], floor)
    return document(
        title,
        width,
        floor + (20 if colours else 14),
        axis + body + below,
        notes,
    )


def _label_width(row: Row) -> float:
    """Pixels on the left of a row: its name, and the numbers of its own axis."""
    numbers = max([0, *(len(words) for _, words in row.amounts)])
    return LETTER * (len(row.name) + numbers) + 12 + 8 * bool(numbers)


def _row(row: Row, top: float, at: _TimeScale) -> Iterator[Html]:
    indent = len(row.name) - len(row.name.lstrip())
    soft = "" if row.main else "soft"
    yield label(
        _PAD + 5 * indent, top + row.height / 2 + 4, row.name.strip(), soft
    )
    yield box(at.margin, top, at.x(at.end) - at.margin, row.height, cls="idle")
    yield from _areas(row, top, at)
    yield from _amounts(row, top, at)
    for bar in row.bars:
        # Short bars stay visible, and neighbours are a pixel apart.
        x, width = (
            at.x(bar.start),
            max(0.75, (bar.end - bar.start) * at.scale - 1),
        )
        cls = "op" if bar.fill else "op empty"
        look = {"cls": cls, "rx": min(2.0, width / 3), "fill": bar.fill}
        yield box(x + 0.5, top, width, row.height, tip=bar.tip, **look)
        yield stripes(x + 0.5, top, width, row.height, bar.texture, bar.ink)
        fitting = (n for n in bar.names if LETTER * len(n) + 2 <= width)
        # The longest name that fits; none in a narrow bar.
        if name := next(fitting, ""):
            middle, wide = x + 0.5 + width / 2, LETTER * len(name) + 2
            if bar.texture:  # letters on stripes are hard to read
                plate = {"fill": bar.fill, "pointer_events": "none"}
                yield box(middle - wide / 2, top + 3, wide, 16, **plate)
            yield label(
                middle, top + row.height / 2 + 4, name, "cell", bar.ink
            )


def _amounts(row: Row, top: float, at: _TimeScale) -> Iterator[Html]:
    """The row's own axis: numbers on the left with lines, and the limit."""
    left, right = at.margin, at.x(at.end)
    for amount, words in row.amounts:
        y = top + row.height * (1 - amount / row.most)
        yield line(left - 4, y, right, y)
        # The highest and the lowest number stay inside the row.
        inside = min(max(y + 4, top + 9), top + row.height)
        yield label(left - 7, inside, words, "soft end")
    if row.limit:
        y = top + row.height * (1 - row.limit / row.most)
        yield line(left, y, right, y, "limit", "limit of the device")


def _areas(row: Row, top: float, at: _TimeScale) -> Iterator[Html]:
    """The stacked areas from the top down: each is drawn over the one above it."""
    # Heights of the stack: each area's own amounts on those below it.
    amounts = ([amount for _, amount in area.levels] for area in row.areas)
    sums = accumulate(
        amounts,
        lambda below, own: [a + b for a, b in zip(below, own, strict=True)],
    )
    floor = top + row.height
    for area, heights in reversed(list(zip(row.areas, sums, strict=True))):
        times = [at.x(time) for time, _ in area.levels] + [at.x(at.end)]
        points = [f"{times[0]:.2f},{floor:.2f}"]
        # Levels are constant between changes: a step at each.
        for x, until, amount in zip(times, times[1:], heights, strict=False):
            y = floor - row.height * amount / row.most
            points += [f"{x:.2f},{y:.2f}", f"{until:.2f},{y:.2f}"]
        points.append(f"{times[-1]:.2f},{floor:.2f}")
        look = {
            "cls": "" if area.fill else "area",
            "fill": area.fill,
            "data-name": area.name,
        }
        tip = [tag("title", area.tip)] if area.tip else []
        yield tag("polygon", *tip, points=" ".join(points), **look)


def tinted(colour: str, light: float) -> str:
    """A colour mixed with white: 0 leaves it, 1 makes it as light as text allows."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(
        # 55 % of white at most, on which black text is legible.
        f"{round(p + (255 - p) * 0.55 * light):02x}"
        for p in parts
    )


def svg(picture: Picture, width: float = 0.0) -> Html:
    """The picture as one SVG document, `width` pixels wide or as labels need."""
    rows = []
    for track in picture.tracks:
        bars = [_bar(picture, track, span) for span in track.spans]
        rows.append(
            Row(
                track.label,
                bars,
                main=track.lane == "compute" and not track.source,
            )
        )
    compared = [
        f"{kind}: {first} {picture.names[0]}, {second} {picture.names[1]} ({share} of the step)"
        for kind, first, second, share in (
            picture.differences if picture.other else ()
        )
    ]
    legend = [
        KeyEntry(
            PAINTS[kind].fill,
            LEGEND[kind],
            "" if kind == ops.SEND else kind,
            PAINTS[kind].ink,
        )
        for kind in picture.kinds
    ]
    return gantt(
        picture.title,
        rows,
        picture.start,
        picture.end,
        clock=picture.clock,
        notes=[*picture.summary, *compared, *picture.notes],
        colours=legend,
        width=width,
        scale=0.0 if width else _scale(picture),
    )


def _scale(picture: Picture) -> float:
    """Pixels per unit of time: labels fit short operations, and all fits a page."""
    span = (picture.end - picture.start) or 1.0
    spans = [s for t in picture.tracks if t.lane == "compute" for s in t.spans]
    # Very short operations would make the picture far too wide.
    shortest = max(
        min((s.end - s.start for s in spans), default=span), span / 2000
    )
    letters = 4.6 if picture.several else 3.6
    # Between 640 and 1,500 pixels, within which labels decide.
    return min(max(letters * LETTER / shortest, 640 / span), 1500 / span)


def _bar(picture: Picture, track: Track, span: Span) -> Bar:
    paint, light = PAINTS[span.op.kind], picture.tint(track.rank, span.op)
    named = {
        "start": span.start,
        "end": span.end,
        "takes": span.end - span.start,
    }
    times = " ".join(
        f"{name} {number(time)}{picture.clock}" for name, time in named.items()
    )
    tip = f"{span.op}: {picture.explain(span.op)}\nrank {track.rank}, {track.lane}\n{times}"
    ink = paint.ink if light < 0.4 else "#000000"
    names = picture.names_of(span.op)
    return Bar(
        span.start, span.end, tinted(paint.fill, light), ink, tip, names
    )
