"""Charts as SVG: lines and points over axes, bars, and triangular matrices."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .markup import (
    COLOURS,
    LETTER,
    WIDE,
    Html,
    KeyEntry,
    box,
    document,
    key,
    label,
    line,
    tag,
)
from .words import ticks, wrapped

Points = Sequence[tuple[float, float]]

_TOP, _HEIGHT, _SMALL = 68.0, 300.0, 110.0
# Thin lines on white need darker colours than areas.
_COLOURS = (
    "#0072b2 #d55e00 #009e73 #cc79a7 #b08900 #56b4e9 #8a5a44 #7f7f7f #5e3c99"
)
_INK = tuple(_COLOURS.split())


@dataclass(frozen=True)
class Series:
    """Named points of a chart.

    `line` is a fit to them, drawn dashed. Without it a line joins the points if
    `joined`. `tips` replace the numbers of a tooltip, and `more` is shown after a
    click. Series with one name share an entry of the key; `faint` ones have none.
    """

    name: str
    points: Points
    line: Points = ()
    joined: bool = True
    dots: bool = True
    faint: bool = False
    tips: Sequence[str] = ()
    more: Sequence[str] = ()
    large: bool = False


@dataclass(frozen=True)
class ChartAxis:
    """An axis: its name, and the format of its numbers. `base` 0 makes it linear."""

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
    width: float = WIDE,
) -> Html:
    """A chart as one SVG document; `marks` are vertical lines with words above."""
    # Both scales cover points and fitted lines alike.
    points = _seen([p for s in series for p in (*s.points, *s.line)], x, y)
    # SVG's y grows downwards, so an axis that rises starts at the bottom.
    up = _Scale([p[1] for p in points], y, _TOP + _HEIGHT, _TOP)
    # Room on the left for the widest number of the y axis.
    left = 30 + LETTER * max(
        (len(words) for _, words in up.ticks()), default=0
    )
    ends = left, width - 24
    across = _Scale(
        [*(p[0] for p in points), *(at for at, _ in marks)], x, *ends
    )
    marked, rows = _marks(marks, across)
    top = _TOP + 14 * rows
    up.start, up.end = top + _HEIGHT, top  # below the words of marks
    names = list(dict.fromkeys(s.name for s in series if not s.faint))
    body = [
        label(20, 50, f"{y.name} over {x.name}", "soft"),
        *_grid(across, up),
        *marked,
    ]
    for each in series:
        colour = _INK[
            (names.index(each.name) if each.name in names else -1) % len(_INK)
        ]
        body += _series(each, colour, across, up)
    entries = [
        KeyEntry(_INK[i % len(_INK)], name) for i, name in enumerate(names)
    ]
    below, floor = key(entries, top + _HEIGHT + 42, width)
    return document(title, width, floor + 26, [*body, *below], notes)


def panels(
    title: str,
    series: Sequence[Series],
    x: ChartAxis,
    y: ChartAxis,
    notes: Sequence[str] = (),
    width: float = WIDE,
) -> Html:
    """Small charts with one scale, one for each series, as one SVG document.

    The other series are faint in the background. If many curves are alike, each can be
    seen by itself and against the others.
    """
    points = _seen([p for s in series for p in (*s.points, *s.line)], x, y)
    # As many columns as have 230 pixels each.
    columns = max(1, min(len(series), int((width - 40) // 230)))
    wide, top = (width - 40) / columns, _TOP + 10
    body = [label(20, 50, f"{y.name} over {x.name}", "soft")]
    for i, each in enumerate(series):
        left, upper = (
            20 + i % columns * wide,
            top + i // columns * (_SMALL + 52),
        )
        up = _Scale([p[1] for p in points], y, upper + _SMALL, upper)
        margin = 10 + LETTER * max(len(words) for _, words in up.ticks())
        across = _Scale(
            [p[0] for p in points], x, left + margin, left + wide - 16
        )
        body += _grid(across, up)
        # The others first, so that this one lies above them.
        for other in series:
            if other is not each:
                quiet = replace(
                    other,
                    dots=False,
                    line=other.line or other.points,
                    faint=True,
                )
                body += _series(quiet, "#8c959f", across, up)
        body += _series(each, _INK[i % len(_INK)], across, up)
        body.append(label(left + margin, upper - 6, each.name))
    floor = top + -(-len(series) // columns) * (_SMALL + 52)
    return document(title, width, floor, body, notes)


def _seen(points: Points, x: ChartAxis, y: ChartAxis) -> Points:
    """The points that can be shown; a logarithmic axis has no 0."""
    on_x = [
        p for p in points if math.isfinite(p[0]) and (p[0] > 0 or not x.base)
    ]
    return [
        p for p in on_x if math.isfinite(p[1]) and (p[1] > 0 or not y.base)
    ]


class _Scale:
    """The mapping from values of an axis to coordinates of the page."""

    def __init__(
        self,
        values: Sequence[float],
        axis: ChartAxis,
        start: float,
        end: float,
    ) -> None:
        self.axis, self.start, self.end = axis, start, end
        values = [self._log(v) for v in values] + [0.0] * axis.zero or [
            0.0,
            1.0,
        ]
        self.low, self.high = min(values), max(values)
        if axis.base:
            # Whole powers of the base at both ends, and at least one between.
            self.low = math.floor(self.low + 1e-9)
            self.high = max(math.ceil(self.high - 1e-9), self.low + 1)
        # A single value gets room on both sides.
        elif self.high <= self.low:
            wide = abs(self.high) / 10 or 1.0
            self.low, self.high = (
                self.low - wide * (not axis.zero),
                self.high + wide,
            )
        elif (
            start > end
        ):  # a vertical axis: a line along its edge is hard to see
            room = (self.high - self.low) / 12
            self.high += room
            self.low -= room * (not axis.zero)

    def _log(self, value: float) -> float:
        return math.log(value, self.axis.base) if self.axis.base else value

    def at(self, value: float) -> float:
        part = (self._log(value) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        span, room = self.high - self.low, abs(self.end - self.start)
        # 70 pixels for a number beside another, 36 for one above another.
        # as many ticks as fit
        most = room / (70 if self.start < self.end else 36)
        if not self.axis.base:
            values = ticks(self.low, self.high, span / most)
        else:
            # Powers that are left out keep the same distance.
            powers = range(
                int(self.low),
                int(self.high) + 1,
                max(1, math.ceil(span / most)),
            )
            values = [float(self.axis.base) ** power for power in powers]
        for value in values:
            yield self.at(value), self.axis.write(value)


def _grid(across: _Scale, up: _Scale) -> Iterator[Html]:
    left, right, bottom, top = across.start, across.end, up.start, up.end
    for x, words in across.ticks():
        yield line(x, top, x, bottom)
        yield label(x, bottom + 16, words, "soft mid")
    for y, words in up.ticks():
        yield line(left, y, right, y)
        yield label(left - 8, y + 4, words, "soft end")


def _marks(
    marks: Sequence[tuple[float, str]], across: _Scale
) -> tuple[list[Html], int]:
    """Lines through the plot, and the number of rows of words above it.

    Words that do not fit in four rows appear as tooltips only.
    """
    free = [-math.inf] * 4  # where the words of each row end
    lines, out = list[tuple[float, int, str]](), list[Html]()
    # From left to right, each in the first row that has room.
    for at, words in sorted(marks):
        x, wide = across.at(at), LETTER * len(words)
        # Words that would leave the page stand to the left of their line.
        fits = x + 3 + wide < across.end + 20
        start = x + 3 if fits else max(20.0, x - 3 - wide)
        row = next(
            (i for i, end in enumerate(free) if end + 8 < start), len(free)
        )
        if row < len(free):
            free[row] = start + wide
            out.append(label(start, _TOP + 14 * row, words, "soft"))
        lines.append((x, row, words))
    rows = sum(end > 0 for end in free)
    bottom = _TOP + 14 * rows + _HEIGHT
    for x, row, words in lines:
        out.append(
            line(x, _TOP + 14 * min(row, rows) - 10, x, bottom, "mark", words)
        )
    return out, rows


def _series(
    series: Series, colour: str, across: _Scale, up: _Scale
) -> Iterator[Html]:
    axes, opacity = (across.axis, up.axis), "0.35" if series.faint else ""
    path = _seen(
        series.line or (series.points if series.joined else ()), *axes
    )
    if len(path) > 1:
        points = " ".join(
            f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in path
        )
        look = {
            "fill": "none",
            "stroke": colour,
            "stroke-width": 1.5,
            "opacity": opacity,
        }
        dash = "5 4" if series.line else ""
        # Without dots to point at, the page's script shows the values.
        bare = not (series.dots or series.line)
        values = "; ".join(
            f"{across.axis.write(x)}, {up.axis.write(y)}" for x, y in path
        )
        tooltip = (
            {"data-name": series.name, "data-values": values} if bare else {}
        )
        # A path of one point has no length: show it as a dot.
        yield tag(
            "polyline",
            points=points,
            **look,
            stroke_dasharray=dash,
            **tooltip,
        )
    if series.dots or len(series.points) == 1:
        for i, (x, y) in enumerate(_seen(series.points, *axes)):
            numbers = f"{across.axis.write(x)}, {up.axis.write(y)}"
            tip = tag(
                "title",
                f"{series.name}: {series.tips[i] if series.tips else numbers}",
            )
            look = {
                "r": 5.5 if series.large else 3.2,
                "fill": colour,
                "opacity": opacity,
            }
            look |= {"cls": "large"} if series.large else {}
            more = {"data-more": series.more[i]} if series.more else {}
            yield tag(
                "circle", tip, cx=across.at(x), cy=up.at(y), **look, **more
            )


@dataclass(frozen=True)
class Bars:
    """One row: name, length of its bar, words beside and below it, and a tooltip."""

    name: str
    length: float
    beside: str = ""
    below: str = ""
    tip: str = ""


def bars(
    title: str,
    rows: Sequence[Bars],
    notes: Sequence[str] = (),
    width: float = WIDE,
) -> Html:
    """One SVG document with a bar for each row, all with one scale."""
    # Names of more than 30 characters are wrapped.
    margin = 36 + LETTER * min(30, max(len(row.name) for row in rows))
    room = width - margin - 30 - LETTER * max(len(row.beside) for row in rows)
    scale = room / max(row.length for row in rows)
    names = list(dict.fromkeys(row.name for row in rows))
    body: list[Html] = []
    y = 50.0
    for row in rows:
        lines = wrapped(row.name, 30)
        body += [
            label(20, y + 15 + 14 * i, words) for i, words in enumerate(lines)
        ]
        look = {
            "rx": 2,
            "cls": "op",
            "fill": COLOURS[names.index(row.name) % len(COLOURS)],
        }
        body.append(
            box(margin, y, row.length * scale - 1, 22, tip=row.tip, **look)
        )
        body.append(label(margin + row.length * scale + 8, y + 15, row.beside))
        if row.below:
            body.append(label(margin, y + 38, row.below, "soft"))
        # A row for each line of its name or of the words below.
        y += 30 + 14 * max(len(lines) - 1, 2 * bool(row.below))
    return document(title, width, y + 14, body, notes)


class MatrixCell(NamedTuple):
    """The text of a cell, its colour, and its tooltip."""

    text: str
    fill: str
    tip: str


def matrix_svg(
    title: str,
    names: Sequence[str],
    cell: Callable[[str, str], MatrixCell | None],
    colours: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
    width: float = WIDE,
) -> Html:
    """The lower triangle of a matrix with its diagonal; `cell` is called for each pair."""
    margin = 30 + LETTER * max(map(len, names))
    # Square cells, from 22 to 44 pixels.
    size = max(22.0, min(44.0, (width - margin - 20) / len(names)))
    top, body = 40 + 0.75 * margin, list[Html]()
    for i, name in enumerate(names):
        y = top + i * size
        body.append(label(margin - 8, y + size / 2 + 4, name, "end"))
        x = margin + (i + 0.5) * size
        # Names above the diagonal are turned, so that they do not overlap.
        turned = f"rotate(-50 {x:.1f} {y - 6:.1f})"
        body.append(tag("text", name, x=x, y=y - 6, transform=turned))
        for j, other in enumerate(names[: i + 1]):
            x, found = margin + j * size, cell(name, other)
            look = (
                {"cls": "op", "fill": found.fill, "tip": found.tip}
                if found
                else {"cls": "idle"}
            )
            body.append(box(x, y, size - 2, size - 2, rx=3, **look))
            if found and LETTER * len(found.text) <= size - 2:
                middle = x + size / 2 - 1
                body.append(
                    label(
                        middle, y + size / 2 + 3, found.text, "cell", "#000000"
                    )
                )
    wide = max(width, margin + len(names) * size + 40)
    below, floor = key(
        [KeyEntry(*c) for c in colours], top + len(names) * size + 24, wide
    )
    return document(title, wide, floor + 22, body + below, notes)
