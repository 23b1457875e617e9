"""The lab's pictures as SVG: a step's timeline with its memory, who sends what to whom, and figures.

Colours of text and ground come from the page's style sheet; every mark has its name under the mouse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from ..draw.picture import PAINTS
from .record import Figure, Message, Span
from .told import Told, bytes_said

__all__ = ["figure", "timeline", "traffic"]

_WIDTH, _LEFT, _LANE, _LETTER = 860.0, 96.0, 18, 6.4
# Okabe and Ito (2008): told apart by colour-blind readers.
_SERIES = ("#0072b2", "#e69f00", "#2fb98f", "#d55e00", "#cc79a7", "#56b4e9", "#8c6bb1", "#6e6e6e")


def timeline(told: Told) -> str:
    """What each rank did when: a lane of computing, a lane of messages, a curve of bytes held."""
    starts = [span.start for _, span in told.spans]
    ends = [span.end for _, span in told.spans]
    if not starts:
        return ""
    start, end = min(starts), max(ends)
    scale = (_WIDTH - _LEFT - 10) / max(end - start, 1e-9)
    held = {
        rank: [(t, b) for t, b in samples if t <= end] for rank, samples in told.memory if samples
    }
    most = max((b for samples in held.values() for _, b in samples), default=0)
    top, body = 26.0, []
    body.append(
        f'<text class="soft" x="{_LEFT}" y="14">0</text><text class="soft end" x="{_WIDTH - 10}" y="14">'
        f"{_ms(end - start)}</text>"
    )
    for rank in sorted({rank for rank, _ in told.spans}):
        for lane in ("compute", "wire"):
            name = f"rank {rank}" if lane == "compute" else "  messages"
            body.append(_lane(name, top))
            for who, span in told.spans:
                if who == rank and span.lane == lane:
                    body.append(_span(span, rank, top, start, scale))
            top += _LANE + 2
        if most:
            body.append(_memory(held.get(rank, []), top, (start, end, scale), most))
            top += 34
        top += 6
    return _svg(f"timeline of {told.title}", _WIDTH, top, body)


def _lane(name: str, top: float) -> str:
    soft = ' class="soft"' if name.startswith(" ") else ""
    x = 4 + 8 * (len(name) - len(name.lstrip()))
    return (
        f'<text{soft} x="{x}" y="{top + 13}">{escape(name.strip())}</text>'
        f'<rect class="idle" x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_LANE}"/>'
    )


def _span(span: Span, rank: int, top: float, start: float, scale: float) -> str:
    x, width = _LEFT + (span.start - start) * scale, max(0.8, (span.end - span.start) * scale)
    if span.lane == "wire":
        fill, ink = (
            ("#b0b0b0", "#000000") if span.name[:2] in ("se", "re") else ("#0072b2", "#ffffff")
        )
        if span.name.startswith("reduce"):
            fill, ink = "#d55e00", "#000000"
    else:
        paint = PAINTS.get(span.name[:1])
        known = paint and (len(span.name) < 2 or span.name[1:2].isdigit() or span.name[1] == " ")
        fill, ink = (paint.fill, paint.ink) if paint and known else ("#9fd3c7", "#000000")
    took = _ms(span.end - span.start)
    mark = (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_LANE}" rx="1.5" fill="{fill}">'
        f"<title>rank {rank}: {escape(span.name)}, {took}</title></rect>"
    )
    label = span.name.split(" on ")[0]
    if len(label) * _LETTER + 4 <= width:
        middle = x + width / 2
        mark += (
            f'<text class="mid" style="fill:{ink}" x="{middle:.1f}" y="{top + 13}">'
            f"{escape(label)}</text>"
        )
    return mark


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _memory(
    samples: Sequence[tuple[float, int]], top: float, time: tuple[float, float, float], most: int
) -> str:
    start, end, scale = time
    floor, height = top + 28, 26
    points: list[str] = []
    level = 0.0
    for t, size in samples:
        x = _LEFT + (min(max(t, start), end) - start) * scale
        points += [f"{x:.1f},{floor - level:.1f}"] if points else [f"{x:.1f},{floor}"]
        level = height * size / most
        points.append(f"{x:.1f},{floor - level:.1f}")
    right = _LEFT + (end - start) * scale
    points += [f"{right:.1f},{floor - level:.1f}", f"{right:.1f},{floor}"]
    peak = max((size for _, size in samples), default=0)
    return (
        f'<text class="soft" x="12" y="{top + 12}">held, at</text>'
        f'<text class="soft" x="12" y="{top + 25}">most {bytes_said(peak)}</text>'
        f'<polygon class="held" points="{" ".join(points)}"><title>{peak:,} bytes at most</title></polygon>'
        f'<line class="grid" x1="{_LEFT}" x2="{right:.1f}" y1="{floor}" y2="{floor}"/>'
    )


def traffic(messages: Sequence[Message], ranks: int) -> str:
    """A table of senders and receivers: the darker a cell, the more bytes."""
    if not messages:
        return ""
    sums: dict[tuple[int, int], dict[str, float]] = {}
    for message in messages:
        kinds = sums.setdefault((message.source, message.to), {})
        kinds[message.kind] = kinds.get(message.kind, 0.0) + message.bytes
    most = max(sum(kinds.values()) for kinds in sums.values()) or 1.0
    side, left, top = 76, 76, 40
    body = [f'<text class="soft" x="{left}" y="14">bytes from (rows) to (columns)</text>']
    for i in range(ranks):
        body.append(
            f'<text class="mid" x="{left + side * (i + 0.5)}" y="{top - 8}">rank {i}</text>'
        )
        body.append(f'<text x="8" y="{top + 34 * i + 21}">rank {i}</text>')
        for j in range(ranks):
            kinds = sums.get((i, j), {})
            total = sum(kinds.values())
            x, y = left + side * j, top + 34 * i
            said = ", ".join(f"{kind} {bytes_said(size)}" for kind, size in kinds.items())
            body.append(
                f'<rect class="idle" x="{x + 1}" y="{y + 1}" width="{side - 2}" height="32" rx="3"/>'
                f'<rect x="{x + 1}" y="{y + 1}" width="{side - 2}" height="32" rx="3" fill="#0072b2"'
                f' fill-opacity="{0.9 * total / most:.3f}">'
                f"<title>rank {i} to rank {j}: {escape(said) or 'nothing'}</title></rect>"
            )
            if total:
                ink = ' style="fill:#ffffff"' if total > most / 2 else ""
                body.append(
                    f'<text class="mid"{ink} x="{x + side / 2}" y="{y + 21}">{bytes_said(total)}</text>'
                )
    return _svg("who sends what to whom", left + side * ranks + 8, top + 34 * ranks + 6, body)


def figure(told: Figure) -> str:
    """What an experiment drew itself: curves, segments or groups; tables are no pictures."""
    drawn = {"curves": _curves, "segments": _segments, "groups": _groups}[told.kind]
    return drawn(told.title, told.data)


def _curves(title: str, data: dict[str, Any]) -> str:
    points = [(x, y) for line in data["lines"].values() for x, y in line if x > 0 and y > 0]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    width, height, left, top = 420.0, 240.0, 60.0, 16.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / low_x) / (math.log(high_x / low_x) or 1)
        up = math.log(y / low_y) / (math.log(high_y / low_y) or 1)
        return left + across * width, top + (1 - up) * height

    body = [
        f'<text class="mid soft" x="{left + width / 2}" y="{top + height + 34}">{escape(data["x"])}</text>'
    ]
    for x in sorted({x for x, _ in points}):
        px, _ = at(x, low_y)
        body.append(f'<text class="mid soft" x="{px:.1f}" y="{top + height + 16}">{x:g}</text>')
        body.append(
            f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{top}" y2="{top + height}"/>'
        )
    for exponent in range(math.ceil(math.log10(low_y)), math.floor(math.log10(high_y)) + 1):
        _, py = at(low_x, 10.0**exponent)
        body.append(
            f'<text class="end soft" x="{left - 6}" y="{py + 4:.1f}">{10.0**exponent:g}</text>'
        )
        body.append(
            f'<line class="grid" x1="{left}" x2="{left + width}" y1="{py:.1f}" y2="{py:.1f}"/>'
        )
    for i, (name, line) in enumerate(data["lines"].items()):
        colour = _SERIES[i % len(_SERIES)]
        places = [at(x, y) for x, y in line if x > 0 and y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (px, py) in zip(line, places, strict=True):
            body.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}">'
                f"<title>{escape(name)}: {x:g}, {y:.4g}</title></circle>"
            )
        key = top + 12 + 20 * i
        body.append(
            f'<rect x="{left + width + 20}" y="{key - 9}" width="12" height="12" fill="{colour}"/>'
        )
        body.append(f'<text x="{left + width + 38}" y="{key + 1}">{escape(name)}</text>')
    return _svg(title, left + width + 180, top + height + 44, body)


def _segments(title: str, data: dict[str, Any]) -> str:
    longest = max(sum(length for _, length in bar) for bar in data["bars"].values())
    unit, body = (_WIDTH - 90) / longest, []
    colours = {
        part: _SERIES[(i + 1) % len(_SERIES)]
        for i, part in enumerate(dict.fromkeys(p for bar in data["bars"].values() for p, _ in bar))
    }
    for row, (name, bar) in enumerate(data["bars"].items()):
        x, y = 60.0, 6 + 26 * row
        body.append(f'<text x="8" y="{y + 15}">{escape(name)}</text>')
        for part, length in bar:
            body.append(
                f'<rect x="{x + 0.5:.1f}" y="{y}" width="{length * unit - 1:.1f}" height="22" rx="2"'
                f' fill="{colours[part]}"><title>{length} bits of {escape(part)}</title></rect>'
            )
            said = f"{length} {part}" if length * unit > 90 else str(length)
            body.append(
                f'<text class="mid" style="fill:#000000" x="{x + length * unit / 2:.1f}" y="{y + 15}">'
                f"{escape(said)}</text>"
            )
            x += length * unit
    return _svg(title, _WIDTH, 10 + 26 * len(data["bars"]), body)


def _groups(title: str, data: dict[str, Any]) -> str:
    ranks = max(rank for groups in data["axes"].values() for group in groups for rank in group) + 1
    cell, body = min(44.0, (_WIDTH - 60) / ranks), []
    for row, (axis, groups) in enumerate(data["axes"].items()):
        y = 6 + 34 * row
        body.append(f'<text x="8" y="{y + 19}">{escape(axis)}</text>')
        for number, group in enumerate(groups):
            said = f"{axis}: {' '.join(map(str, group))}"
            for rank in group:
                x = 50 + cell * rank
                body.append(
                    f'<rect x="{x + 1:.1f}" y="{y}" width="{cell - 2:.1f}" height="28" rx="3"'
                    f' fill="{_SERIES[number % len(_SERIES)]}"><title>{escape(said)}</title></rect>'
                    f'<text class="mid" style="fill:#000000" x="{x + cell / 2:.1f}" y="{y + 18}">'
                    f"{rank}</text>"
                )
    return _svg(title, 60 + cell * ranks, 10 + 34 * len(data["axes"]), body)


def _svg(title: str, width: float, height: float, body: Sequence[str] | Iterator[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"<title>{escape(title)}</title>\n" + "\n".join(body) + "\n</svg>\n"
    )
