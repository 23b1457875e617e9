"""The memory hierarchy as SVG: one bar a level, as wide as the logarithm of its bandwidth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..draw.svg import STYLE
from ..draw.words import wrapped
from ..plan import Place
from ..plan.size import rate, seconds, size

__all__ = ["hierarchy_svg"]

_COLOURS = ("#0072b2", "#3f8fc4", "#009e73", "#b08900", "#d55e00", "#cc79a7", "#8a5a44", "#7f7f7f")
_WIDTH, _ROW, _LABEL = 860.0, 58.0, 210.0


def hierarchy_svg(title: str, places: Sequence[Place]) -> str:
    """One SVG document: speed to the right, size in words, from the inside at the top."""
    logs = [math.log10(place.bandwidth) for place in places]
    low, high = math.floor(min(logs)) - 0.5, max(logs)
    body = [
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
        '<text class="soft" x="20" y="50">each bar: bytes a second, logarithmic;'
        " a step of one tenth of speed is equally wide everywhere</text>",
    ]
    for i, (place, log) in enumerate(zip(places, logs, strict=True)):
        width = (log - low) / (high - low) * (_WIDTH - _LABEL - 150)
        body += _bar(place, 66 + i * _ROW, width, _COLOURS[i % len(_COLOURS)])
    floor = 66 + len(places) * _ROW + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {floor:.0f}"'
        f' width="{_WIDTH:.0f}" height="{floor:.0f}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1:.0f}" height="{floor - 1:.0f}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bar(place: Place, top: float, width: float, colour: str) -> list[str]:
    held = f"{size(place.bytes)}, read in {seconds(place.to_read)}" if place.bytes else ""
    lines = wrapped(place.name, 30)
    names = [
        f'<text x="20" y="{top + 16 + 14 * i:.0f}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return [
        *names,
        f'<rect x="{_LABEL:.0f}" y="{top + 4:.0f}" width="{width:.1f}" height="18" rx="2"'
        f' fill="{colour}"><title>{escape(place.how)}</title></rect>',
        f'<text x="{_LABEL + width + 8:.1f}" y="{top + 17:.0f}">{escape(rate(place.bandwidth))}</text>',
        f'<text class="soft" x="{_LABEL:.0f}" y="{top + 38:.0f}">'
        f"{escape(' · '.join(part for part in (held, place.how) if part))}</text>",
    ]
