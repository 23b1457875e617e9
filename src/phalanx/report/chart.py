"""A line chart as SVG: some series over steps, marks where a run was started again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Chart", "Series", "chart"]

WIDTH, HEIGHT = 860, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 34
# Okabe and Ito's, as in the pictures of `draw`; each series also has its name at its end.
COLOURS = ("#0072b2", "#d55e00", "#2fb98f", "#8c6bb1")

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points in order of x. `dots` shows each one; `faint` is for what was done in vain."""

    name: str
    points: tuple[Point, ...]
    colour: int = 0
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn. `marks` are (x, words): a vertical line each."""

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False


class _Scale:
    """From numbers to pixels."""

    def __init__(self, chart: Chart) -> None:
        points = [p for s in chart.series for p in s.points]
        xs = [x for x, _ in points] + [x for x, _ in chart.marks]
        ys = [y for _, y in points] + [0.0] * chart.from_zero
        self.left, self.right = _wide(xs)
        self.low, self.high = _wide(ys)

    def x(self, x: float) -> float:
        return LEFT + (x - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _wide(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if high > low:
        return low, high
    return low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9


def chart(said: Chart) -> str:
    """The chart as one SVG element; a sentence where there is nothing to draw."""
    if not any(series.points for series in said.series):
        return f"<p>{escape(said.title)}: nothing was recorded yet.</p>"
    scale = _Scale(said)
    body = [*_axes(said, scale), *_marks(said, scale)]
    for series in said.series:
        body += _line(series, scale)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(said.title)}">{"".join(body)}</svg>'
    )


def _axes(said: Chart, scale: _Scale) -> Iterator[str]:
    for tick in _ticks(scale.low, scale.high, 5):
        y = scale.y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="soft end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick:.6g}</text>'
    for tick in _ticks(scale.left, scale.right, 10):
        if tick == int(tick):
            x = scale.x(tick)
            yield f'<text class="soft mid" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{tick:.0f}</text>'
    yield f'<text class="soft mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}">step</text>'
    yield f'<text class="soft" x="4" y="{TOP - 3}">{escape(said.unit)}</text>'


def _marks(said: Chart, scale: _Scale) -> Iterator[str]:
    for number, (at, words) in enumerate(said.marks):
        x = scale.x(at)
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        # Names of neighbouring marks stand below each other; those at the right end lean left.
        y, turned = TOP + 11 + 13 * (number % 4), x > WIDTH * 0.7
        place = f'class="soft end" x="{x - 4:.1f}"' if turned else f'class="soft" x="{x + 4:.1f}"'
        yield f'<text {place} y="{y}">{escape(words)}</text>'


def _line(series: Series, scale: _Scale) -> Iterator[str]:
    colour = COLOURS[series.colour % len(COLOURS)]
    faint = ' opacity="0.35"' if series.faint else ""
    places = [(scale.x(x), scale.y(y)) for x, y in series.points]
    if len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{faint}/>'
    if series.dots or len(places) == 1:
        for (x, y), (step, number) in zip(places, series.points, strict=True):
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"{faint}>'
                f"<title>{escape(series.name)}, step {step:.0f}: {number:.6g}</title></circle>"
            )


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two, at most so many."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / most))
    step = next(step * k for k in (1, 2, 5, 10) if span / (step * k) <= most)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]
