"""Charts as SVG: lines and points over two axes, and rows of bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .markup import COLOURS, LETTER, Html, box, document, label, line, tag
from .words import ticks, wrapped

Points = Sequence[tuple[float, float]]

_LEFT, _TOP, _WIDTH, _HEIGHT = 78.0, 62.0, 560.0, 300.0
# Lines are thin: on white they need darker colours than areas do.
_COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #b08900 #56b4e9 #8a5a44 #7f7f7f #5e3c99"
_INK = tuple(_COLOURS.split())


@dataclass(frozen=True)
class Series:
    """Points of one name. `line` is what was fitted to them, dashed; without it a line joins the
    points if `joined`. `tips` are shown under the mouse in place of the numbers; series that
    share a name share a line of the key, and `faint` ones are not in it."""

    name: str
    points: Points
    line: Points = ()
    joined: bool = True
    dots: bool = True
    faint: bool = False
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class ChartAxis:
    """What an axis shows, and how a number on it is written. `base` 0 is a linear axis."""

    name: str
    write: Callable[[float], str] = "{:.6g}".format
    base: int = 10
    zero: bool = False  # a linear axis that begins at 0


def chart(
    title: str,
    series: Sequence[Series],
    x: ChartAxis,
    y: ChartAxis,
    notes: Sequence[str] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> Html:
    """One SVG document; `marks` are vertical lines with a word."""
    points = [p for s in series for p in (*s.points, *s.line) if _shown(p, x, y)]
    across = _Scale([*(p[0] for p in points), *(at for at, _ in marks)], x, _LEFT, _LEFT + _WIDTH)
    up = _Scale([p[1] for p in points], y, _TOP + _HEIGHT, _TOP)
    names = list(dict.fromkeys(s.name for s in series if not s.faint))
    body = [*_grid(across, up), *_marks(marks, across)]
    for each in series:
        colour = _INK[(names.index(each.name) if each.name in names else -1) % len(_INK)]
        body += _series(each, colour, across, up)
    for i, name in enumerate(names):
        top = _TOP + 14 + 20 * i
        body.append(box(_LEFT + _WIDTH + 22, top - 10, 12, 12, rx=2, fill=_INK[i % len(_INK)]))
        body.append(label(_LEFT + _WIDTH + 40, top, name))
    width = _LEFT + _WIDTH + 52 + LETTER * max(map(len, names), default=0)
    floor = max(_TOP + _HEIGHT, _TOP + 20 * len(names)) + 50
    return document(title, width, floor, body, notes)


def _shown(point: tuple[float, float], x: ChartAxis, y: ChartAxis) -> bool:
    """A logarithmic axis cannot show 0."""
    return all(
        math.isfinite(v) and (v > 0 or not axis.base) for v, axis in zip(point, (x, y), strict=True)
    )


class _Scale:
    """An axis between two coordinates of the page."""

    def __init__(self, values: Sequence[float], axis: ChartAxis, start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        values = [self._log(v) for v in values] + [0.0] * axis.zero or [0.0, 1.0]
        self.low, self.high = min(values), max(values)
        if axis.base:
            self.low = math.floor(self.low + 1e-9)
            self.high = max(math.ceil(self.high - 1e-9), self.low + 1)
        elif self.high <= self.low:
            wide = abs(self.high) / 10 or 1.0
            self.low, self.high = self.low - wide * (not axis.zero), self.high + wide
        elif start > end:  # a vertical axis: a line along the edge is hard to see
            self.high += (self.high - self.low) / 12

    def _log(self, value: float) -> float:
        return math.log(value, self.axis.base) if self.axis.base else value

    def at(self, value: float) -> float:
        part = (self._log(value) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        span = self.high - self.low
        if not self.axis.base:
            for value in ticks(self.low, self.high, span / 8):
                yield self.at(value), self.axis.write(value)
            return
        step = max(1, math.ceil(span / 9))
        for power in range(int(self.low), int(self.high) + 1, step):
            value = float(self.axis.base) ** power
            yield self.at(value), self.axis.write(value)


def _grid(across: _Scale, up: _Scale) -> Iterator[Html]:
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    for x, words in across.ticks():
        yield line(x, _TOP, x, bottom)
        yield label(x, bottom + 16, words, "soft mid")
    for y, words in up.ticks():
        yield line(_LEFT, y, right, y)
        yield label(_LEFT - 8, y + 4, words, "soft end")
    yield label(20, 50, f"{up.axis.name} over {across.axis.name}", "soft")


def _marks(marks: Sequence[tuple[float, str]], across: _Scale) -> Iterator[Html]:
    for i, (at, words) in enumerate(marks):
        x = across.at(at)
        yield line(x, _TOP, x, _TOP + _HEIGHT, "mark")
        # Words of neighbouring marks stand at different heights; those on the right lean left.
        turned = x > _LEFT + _WIDTH * 0.7
        y = _TOP + 11 + 13 * (i % 4)
        yield label(x + (-4 if turned else 4), y, words, "soft end" if turned else "soft")


def _series(series: Series, colour: str, across: _Scale, up: _Scale) -> Iterator[Html]:
    def shown(points: Points) -> list[tuple[float, float]]:
        return [p for p in points if _shown(p, across.axis, up.axis)]

    opacity = "0.35" if series.faint else ""
    path = shown(series.line or (series.points if series.joined else ()))
    if len(path) > 1:
        points = " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in path)
        look = {"fill": "none", "stroke": colour, "stroke-width": 1.5, "opacity": opacity}
        dash = "5 4" if series.line else ""
        yield tag("polyline", points=points, **look, stroke_dasharray=dash)
    if series.dots or len(series.points) == 1:
        for i, (x, y) in enumerate(shown(series.points)):
            numbers = f"{across.axis.write(x)}, {up.axis.write(y)}"
            tip = tag("title", f"{series.name}: {series.tips[i] if series.tips else numbers}")
            look = {"r": 3.2, "fill": colour, "opacity": opacity}
            yield tag("circle", tip, cx=across.at(x), cy=up.at(y), **look)


@dataclass(frozen=True)
class Bars:
    """One row: its name, how long its bar is, and words beside, below and under the mouse."""

    name: str
    length: float
    beside: str = ""
    below: str = ""
    tip: str = ""


def bars(title: str, rows: Sequence[Bars], notes: Sequence[str] = (), width: float = 860) -> Html:
    """One SVG document: a bar a row, all to the same scale."""
    margin = 36 + LETTER * min(30, max(len(row.name) for row in rows))
    room = width - margin - 30 - LETTER * max(len(row.beside) for row in rows)
    scale = room / max(row.length for row in rows)
    names = list(dict.fromkeys(row.name for row in rows))
    body: list[Html] = []
    y = 50.0
    for row in rows:
        lines = wrapped(row.name, 30)
        body += [label(20, y + 15 + 14 * i, words) for i, words in enumerate(lines)]
        look = {"rx": 2, "cls": "op", "fill": COLOURS[names.index(row.name) % len(COLOURS)]}
        body.append(box(margin, y, row.length * scale - 1, 22, tip=row.tip, **look))
        body.append(label(margin + row.length * scale + 8, y + 15, row.beside))
        if row.below:
            body.append(label(margin, y + 38, row.below, "soft"))
        y += 30 + 14 * max(len(lines) - 1, 2 * bool(row.below))
    return document(title, width, y + 14, body, notes)
