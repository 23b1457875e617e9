"""A timeline as SVG: a row for each lane, readable on a light and a dark page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..program import Span, ops
from .markup import LETTER, Html, box, document, label, line, tag
from .picture import LEGEND, PAINTS, Picture, Track
from .words import change, number, ticks

_ROW, _LANE, _GAP, _PAD, _TOP = 26, 17, 4, 20, 62


class Bar(NamedTuple):
    """Something that takes time. `names` are what its cell may say, the fullest first."""

    start: float
    end: float
    fill: str
    ink: str
    tip: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One lane. A main row is taller and stands apart from the row above. `levels` are (time,
    amount) wherever the amount changes: drawn as an area, the largest as high as the row."""

    name: str
    bars: Sequence[Bar] = ()
    main: bool = True
    levels: Sequence[tuple[float, float]] = ()
    most: float = 1.0
    gap: bool = True

    @property
    def height(self) -> int:
        return _ROW if self.main or self.levels else _LANE


class _TimeScale(NamedTuple):
    """Where time is on the page."""

    margin: float
    scale: float  # pixels per unit of time
    start: float
    end: float

    def x(self, time: float) -> float:
        return self.margin + (time - self.start) * self.scale


def gantt(title: str, rows: Sequence[Row], start: float, end: float, *, clock: str = "") -> Html:
    """One SVG document of any rows under an axis of time."""
    body, width, floor = _rows(rows, start, end, clock=clock)
    return document(title, max(width, 480.0), floor + 14, body)


def _rows(
    rows: Sequence[Row], start: float, end: float, *, scale: float = 0.0, clock: str = ""
) -> tuple[list[Html], float, float]:
    """The rows under their axis; and where they end to the right and below."""
    margin = _PAD + max([40.0, *(LETTER * len(row.name) + 12 for row in rows)])
    at = _TimeScale(margin, scale or 700 / ((end - start) or 1), start, end)
    floor = float(_TOP)
    body: list[Html] = []
    for i, row in enumerate(rows):
        floor += (_GAP if row.gap else 1) * bool(i)
        body += _row(row, floor, at)
        floor += row.height
    axis: list[Html] = []
    for time in ticks(start, end, 64 / at.scale):
        axis.append(line(at.x(time), _TOP - 8, at.x(time), floor + 3))
        axis.append(label(at.x(time), _TOP - 12, f"{number(time)}{clock}", "soft mid"))
    return axis + body, at.x(end) + _PAD, floor


def _row(row: Row, top: float, at: _TimeScale) -> Iterator[Html]:
    indent = len(row.name) - len(row.name.lstrip())
    soft = "" if row.main else "soft"
    yield label(_PAD + 5 * indent, top + row.height / 2 + 4, row.name.strip(), soft)
    yield box(at.margin, top, at.x(at.end) - at.margin, row.height, cls="idle")
    if row.levels:
        floor, points = top + row.height, [f"{at.x(row.levels[0][0]):.1f},{top + row.height:.1f}"]
        times = [*(time for time, _ in row.levels[1:]), at.end]
        for (time, amount), until in zip(row.levels, times, strict=True):
            y = floor - row.height * amount / row.most
            points += [f"{at.x(time):.1f},{y:.1f}", f"{at.x(until):.1f},{y:.1f}"]
        points.append(f"{at.x(at.end):.1f},{floor:.1f}")
        yield tag("polygon", cls="area", points=" ".join(points))
    for bar in row.bars:
        x, width = at.x(bar.start), max(0.75, (bar.end - bar.start) * at.scale - 1)
        look = {"cls": "op", "rx": min(2.0, width / 3), "fill": bar.fill}
        yield box(x + 0.5, top, width, row.height, tip=bar.tip, **look)
        for name in bar.names:
            if LETTER * len(name) + 2 <= width:
                middle = x + 0.5 + width / 2
                yield label(middle, top + row.height / 2 + 4, name, "cell", bar.ink)
                break


def tinted(colour: str, light: float) -> str:
    """A colour mixed with white: 0 leaves it, 1 makes it as light as text on it allows."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * 0.55 * light):02x}" for p in parts)


def svg(picture: Picture) -> str:
    """The picture as one SVG document."""
    rows = [
        Row(
            track.label,
            [_bar(picture, track, span) for span in track.spans],
            main=track.lane == "compute" and not track.source,
            gap=track.lane == "compute" and not track.source,
        )
        for track in picture.tracks
    ]
    body, right, floor = _rows(
        rows, picture.start, picture.end, scale=_scale(picture), clock=picture.clock
    )
    width = max(right, 480.0)
    legend, floor = _legend(picture, floor + 26, width)
    notes = [*picture.summary, *_compared(picture), *picture.notes]
    return document(picture.title, width, floor + 20, body + legend, notes)


def _scale(picture: Picture) -> float:
    """Pixels per unit of time: names fit in the shortest operations, as long as all fits a page."""
    span = (picture.end - picture.start) or 1.0
    spans = [s for t in picture.tracks if t.lane == "compute" for s in t.spans]
    shortest = max(min((s.end - s.start for s in spans), default=span), span / 2000)
    letters = 4.6 if picture.several else 3.6
    return min(max(letters * LETTER / shortest, 640 / span), max(1500 / span, 9 / shortest))


def _bar(picture: Picture, track: Track, span: Span) -> Bar:
    paint, light = PAINTS[span.op.kind], picture.tint(track.rank, span.op)
    named = {"start": span.start, "end": span.end, "takes": span.end - span.start}
    times = " ".join(f"{name} {number(time)}{picture.clock}" for name, time in named.items())
    tip = f"{span.op}: {picture.explain(span.op)}\nrank {track.rank}, {track.lane}\n{times}"
    ink = paint.ink if light < 0.4 else "#000000"
    names = picture.names_of(span.op)
    return Bar(span.start, span.end, tinted(paint.fill, light), ink, tip, names)


def _legend(picture: Picture, y: float, width: float) -> tuple[list[Html], float]:
    """What the colours mean, in as many lines as it takes, and where that ends."""
    out: list[Html] = []
    x = float(_PAD)
    for kind in picture.kinds:
        words, paint = LEGEND[kind], PAINTS[kind]
        need = 28 + LETTER * len(words)
        if x + need > width - _PAD and x > _PAD:
            x, y = float(_PAD), y + 22
        out.append(box(x, y - 12, 16, 16, rx=2, fill=paint.fill))
        out.append(label(x + 8, y, "" if kind == ops.SEND else kind, "cell", paint.ink))
        out.append(label(x + 21, y, words))
        x += need + 10
    return out, y


def _compared(picture: Picture) -> Iterator[str]:
    for kind, first, second in picture.differences if picture.other else ():
        times = f"{number(first)} {picture.names[0]}, {number(second)} {picture.names[1]}"
        yield f"{LEGEND[kind]}: {times} ({change(first, second)})"
