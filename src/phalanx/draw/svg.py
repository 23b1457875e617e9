"""A picture as SVG: readable on a light and a dark page, with the operation's name under the mouse."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ..program import Span
from .picture import LEGEND, PAINTS, Picture, Track
from .words import change, number, ticks, wrapped

__all__ = ["STYLE", "svg", "tinted"]

_ROW, _LANE, _GAP, _PAD = 26, 17, 4, 20
_LETTER = 6.3  # how wide a character of 11 px is, about

# Colours of the page itself; those of operations are the same on both.
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de }
  .idle { fill: #eef1f4 }
  .grid { stroke: #d0d7de; stroke-width: 1 }
  text { fill: #1f2328; font: 11px ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }
  .title { font-size: 15px; font-weight: 600 }
  .soft { fill: #59636e }
  .cell { text-anchor: middle; font-variant-numeric: tabular-nums; pointer-events: none }
  .mid { text-anchor: middle }
  rect.op:hover { stroke: #1f2328; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; stroke: #3d444d }
    .idle { fill: #1b222c }
    .grid { stroke: #3d444d }
    text { fill: #e6edf3 }
    .soft { fill: #9198a1 }
    rect.op:hover { stroke: #ffffff }
  }
"""


def tinted(colour: str, light: float) -> str:
    """A colour mixed with white: 0 leaves it, 1 makes it as light as letters on it allow."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * 0.55 * light):02x}" for p in parts)


def svg(picture: Picture) -> str:
    """The picture as one SVG document."""
    margin = _PAD + max([40.0, *(_LETTER * len(t.label) + 12 for t in picture.tracks)])
    scale = _scale(picture)
    span = picture.end - picture.start
    width = max(margin + span * scale + _PAD, 480.0)
    top = 62.0
    bottoms = _bottoms(picture, top)
    floor = bottoms[-1] if bottoms else top
    body = [f'<text class="title" x="{_PAD}" y="30">{escape(picture.title)}</text>']
    body += _axis(picture, margin, scale, top, floor)
    for track, bottom in zip(picture.tracks, bottoms, strict=True):
        body += _track(picture, track, bottom, margin, scale)
    below, floor = _below(picture, floor + 26, width)
    body += below
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {floor:.0f}"'
        f' width="{width:.0f}" height="{floor:.0f}" role="img">\n'
        f"<title>{escape(picture.title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{width - 1:.0f}" height="{floor - 1:.0f}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _scale(picture: Picture) -> float:
    """Pixels per unit of time: numbers fit in the shortest operations, as long as all fits a page."""
    span = (picture.end - picture.start) or 1.0
    spans = [s for t in picture.tracks if t.lane == "compute" for s in t.spans]
    shortest = max(min((s.end - s.start for s in spans), default=span), span / 2000)
    letters = 4.6 if picture.several else 3.6
    return min(max(letters * _LETTER / shortest, 640 / span), max(1500 / span, 9 / shortest))


def _bottoms(picture: Picture, top: float) -> list[float]:
    """Where each track ends; a rank stands a little apart from the one before."""
    found: list[float] = []
    for i, track in enumerate(picture.tracks):
        fresh = i and track.lane == "compute" and not track.source
        top += _height(track) + (_GAP if fresh else 1 if i else 0)
        found.append(top)
    return found


def _height(track: Track) -> int:
    return _ROW if track.lane == "compute" else _LANE


def _axis(picture: Picture, margin: float, scale: float, top: float, floor: float) -> Iterator[str]:
    for time in ticks(picture.start, picture.end, 64 / scale):
        x = margin + (time - picture.start) * scale
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8:.1f}" y2="{floor + 3:.1f}"/>'
        said = escape(f"{number(time)}{picture.clock}")
        yield f'<text class="soft mid" x="{x:.1f}" y="{top - 12:.1f}">{said}</text>'


def _track(
    picture: Picture, track: Track, bottom: float, margin: float, scale: float
) -> Iterator[str]:
    height = _height(track)
    top = bottom - height
    width = (picture.end - picture.start) * scale
    soft = "" if track.lane == "compute" and not track.source else ' class="soft"'
    indent = len(track.label) - len(track.label.lstrip())
    yield (
        f'<text{soft} x="{_PAD + 5 * indent}" y="{bottom - height / 2 + 4:.1f}">'
        f"{escape(track.label.strip())}</text>"
    )
    yield f'<rect class="idle" x="{margin:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}"/>'
    for span in track.spans:
        yield from _cell(picture, track, span, (margin, top, scale))


def _cell(
    picture: Picture, track: Track, span: Span, at: tuple[float, float, float]
) -> Iterator[str]:
    margin, top, scale = at
    paint = PAINTS[span.op.kind]
    light = picture.tint(track.rank, span.op)
    ink = paint.ink if light < 0.4 else "#000000"
    x = margin + (span.start - picture.start) * scale
    width = max(0.75, (span.end - span.start) * scale - 1)
    yield (
        f'<rect class="op" x="{x + 0.5:.2f}" y="{top:.1f}" width="{width:.2f}"'
        f' height="{_height(track)}" rx="{min(2.0, width / 3):.1f}"'
        f' fill="{tinted(paint.fill, light)}"><title>{escape(tip(picture, track, span))}</title></rect>'
    )
    for name in picture.names_of(span.op):
        if _LETTER * len(name) + 2 <= width:
            yield (
                f'<text class="cell" x="{x + 0.5 + width / 2:.2f}"'
                f' y="{top + _height(track) / 2 + 4:.1f}" style="fill:{ink}">{escape(name)}</text>'
            )
            return


def tip(picture: Picture, track: Track, span: Span) -> str:
    """What is said of the operation under the mouse."""
    times = " ".join(
        f"{name} {number(t)}{picture.clock}"
        for name, t in (("start", span.start), ("end", span.end), ("takes", span.end - span.start))
    )
    return f"{span.op}: {picture.explain(span.op)}\nrank {track.rank}, {track.lane}\n{times}"


def _below(picture: Picture, y: float, width: float) -> tuple[list[str], float]:
    """The legend and what is said under the picture, and where that ends."""
    out: list[str] = []
    x = float(_PAD)
    for kind in picture.kinds:
        said = LEGEND[kind]
        shown = "" if kind == ">" else kind
        need = 28 + _LETTER * len(said)
        if x + need > width - _PAD and x > _PAD:
            x, y = float(_PAD), y + 22
        paint = PAINTS[kind]
        out.append(
            f'<rect x="{x:.1f}" y="{y - 12:.1f}" width="16" height="16" rx="2" fill="{paint.fill}"/>'
            f'<text class="cell" x="{x + 8:.1f}" y="{y:.1f}" style="fill:{paint.ink}">{escape(shown)}</text>'
            f'<text x="{x + 21:.1f}" y="{y:.1f}">{said}</text>'
        )
        x += need + 10
    for line in (*picture.summary, *_compared(picture), *picture.notes):
        for part in wrapped(line, int((width - 2 * _PAD) / _LETTER)):
            y += 20
            out.append(f'<text class="soft" x="{_PAD}" y="{y:.1f}">{escape(part)}</text>')
    return out, y + 20


def _compared(picture: Picture) -> Iterator[str]:
    for kind, first, second in picture.differences if picture.other else ():
        times = f"{number(first)} {picture.names[0]}, {number(second)} {picture.names[1]}"
        yield f"{LEGEND[kind]}: {times} ({change(first, second)})"
