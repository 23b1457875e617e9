"""Measured points and what was fitted to them, over two logarithmic axes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ..draw.svg import STYLE
from ..draw.words import wrapped

__all__ = ["Axis", "Series", "chart"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _KEY = 78.0, 62.0, 560.0, 330.0, 190.0
# Okabe and Ito's colours in turn, darkened where white would swallow them.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b08900", "#56b4e9", "#8a5a44", "#7f7f7f", "#5e3c99",
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Points (x, y), joined; `line` are those of what was fitted, drawn dashed."""

    name: str
    points: tuple[tuple[float, float], ...]
    line: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Axis:
    """What an axis tells, and how a number on it is written."""

    name: str
    write: Callable[[float], str]
    base: int = 10


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, notes: Sequence[str] = ()) -> str:
    """One SVG document."""
    points = [p for s in series for p in (*s.points, *s.line) if p[0] > 0 and p[1] > 0]
    across = _Scale([p[0] for p in points], x, _LEFT, _LEFT + _WIDTH)
    up = _Scale([p[1] for p in points], y, _TOP + _HEIGHT, _TOP)
    body = [f'<text class="title" x="20" y="30">{escape(title)}</text>', *_grid(across, up)]
    for i, each in enumerate(series):
        body += _series(each, _COLOURS[i % len(_COLOURS)], across, up)
        top = _TOP + 14 + 20 * i
        body.append(
            f'<rect x="{_LEFT + _WIDTH + 22:.0f}" y="{top - 10:.0f}" width="12" height="12" rx="2"'
            f' fill="{_COLOURS[i % len(_COLOURS)]}"/><text x="{_LEFT + _WIDTH + 40:.0f}"'
            f' y="{top:.0f}">{escape(each.name)}</text>'
        )
    width, floor = _LEFT + _WIDTH + _KEY, max(_TOP + _HEIGHT, _TOP + 20 * len(series)) + 50
    for note in notes:
        for part in wrapped(note, int((width - 40) / 6.3)):
            body.append(f'<text class="soft" x="20" y="{floor:.0f}">{escape(part)}</text>')
            floor += 18
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {floor:.0f}"'
        f' width="{width:.0f}" height="{floor:.0f}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{floor - 1:.0f}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


class _Scale:
    """A logarithmic axis between two places on the page."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float) -> None:
        self.axis, self.start, self.end = axis, start, end
        logs = [math.log(v, axis.base) for v in values] or [0.0, 1.0]
        self.low = math.floor(min(logs) + 1e-9)
        self.high = max(math.ceil(max(logs) - 1e-9), self.low + 1)

    def at(self, value: float) -> float:
        part = (math.log(value, self.axis.base) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self) -> Iterator[tuple[float, str]]:
        step = max(1, math.ceil((self.high - self.low) / 9))
        for power in range(self.low, self.high + 1, step):
            value = float(self.axis.base) ** power
            yield self.at(value), self.axis.write(value)


def _grid(across: _Scale, up: _Scale) -> Iterator[str]:
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    for x, said in across.ticks():
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:.0f}" y2="{bottom:.0f}"/>'
        yield f'<text class="soft mid" x="{x:.1f}" y="{bottom + 16:.0f}">{escape(said)}</text>'
    for y, said in up.ticks():
        yield f'<line class="grid" x1="{_LEFT:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="soft" text-anchor="end" x="{_LEFT - 8:.0f}" y="{y + 4:.1f}">'
            f"{escape(said)}</text>"
        )
    yield f'<text class="soft" x="20" y="50">{escape(up.axis.name)} over {escape(across.axis.name)}</text>'


def _series(series: Series, colour: str, across: _Scale, up: _Scale) -> Iterator[str]:
    def path(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points if x > 0 and y > 0)

    plain = f'fill="none" stroke="{colour}" stroke-width="1.5"'
    if series.line:
        yield f'<polyline {plain} stroke-dasharray="5 4" points="{path(series.line)}"/>'
    else:
        yield f'<polyline {plain} points="{path(series.points)}"/>'
    for x, y in series.points:
        said = escape(f"{series.name}: {across.axis.write(x)}, {up.axis.write(y)}")
        yield (
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.2" fill="{colour}">'
            f"<title>{said}</title></circle>"
        )
