"""HTML pages of one file that load nothing: their frame, and the interactive timeline.

The timeline has zoom, pan, details of the operation under the mouse, and memory over
time. `page.html` beside this file is the frame, `page.js` draws the timeline, and
`figure.js` shows details of marks in SVGs.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from ..program import Span, ops
from .markup import PHONE, WIDE, Html, escaped, paragraphs, table, tag
from .picture import LEGEND, PAINTS, Picture
from .svg import tinted

_HERE = Path(__file__).parent
_HINT = (
    "+ and − zoom, and so does the wheel with Ctrl; drag or ← → move, n and p go to the next and"
    " previous operation, ↑ ↓ change the lane, 0 shows all."
)


def frame(title: str, *body: str, narrow: bool = True) -> str:
    """A page as text. Scripts are allowed only if its body has one."""
    # Make elements that may be wider than the page scrollable with the arrow keys.
    content = re.sub(
        '<(pre(?=>)|div(?= class="scroll))',
        r'<\1 tabindex="0"',
        "\n".join(body),
    )
    if "<figure" in content:
        content += tag(
            "script", Html((_HERE / "figure.js").read_text(encoding="utf-8"))
        )
    parts = {
        "title": escaped(title),
        # A page without scripts forbids them: nothing that it shows can run.
        "scripts": "script-src 'unsafe-inline'; "
        if "<script" in content
        else "",
        "width": "narrow" if narrow else "",
        "body": content,
    }
    frame = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], frame)


def page(picture: Picture) -> str:
    """A page that shows one picture."""
    return frame(picture.title, timeline(picture), narrow=False)


def figure(draw: Callable[[float], Html]) -> Html:
    """A picture in a page, drawn once for a wide screen and once for a phone.

    Its marks respond to the pointer and the arrow keys.
    """
    # Style sheets show the one that suits the screen.
    both = (("desk", WIDE), ("phone", PHONE))
    drawn = (
        tag("div", draw(width), cls=f"scroll {screen}")
        for screen, width in both
    )
    return tag("figure", *drawn, tag("p", cls="details", aria_live="polite"))


def timeline(picture: Picture) -> Html:
    """The picture with its legend and tables; a page can have only one."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    legend = []
    for kind in picture.kinds:
        look = f"background:{PAINTS[kind].fill};color:{PAINTS[kind].ink}"
        letter = tag("b", "" if kind == ops.SEND else kind, style=look)
        legend.append(tag("span", letter, LEGEND[kind], cls="key"))
    names = {
        "in": ("+", "zoom in"),
        "out": ("−", "zoom out"),
        "all": ("whole step", ""),
    }
    buttons = [
        tag("button", name, id=id, aria_label=does)
        for id, (name, does) in names.items()
    ]
    spoken = {"aria_label": "Timeline: each rank's operations over time"}
    spoken |= {"aria_describedby": "details", "role": "application"}
    times = [
        f"{name}, {picture.clock.strip()}" if picture.clock else name
        for name in picture.names
    ]
    head = ("", *times, "difference")
    words = (
        "Time of the ranks shown, by kind of operation. Messages count only while a rank does"
        " nothing else. Differences are shares of the predicted step."
    )
    data = json.dumps(_data(picture), separators=(",", ":"), ensure_ascii=True)
    # `<` as \u003c is the same in JSON.
    for character in "<>&":  # nothing in the data may end the script element
        data = data.replace(character, f"\\u{ord(character):04x}")
    parts = [
        paragraphs([*picture.summary, *picture.notes]),
        tag("div", *legend, cls="legend"),
        tag("div", *buttons, tag("span", _HINT, cls="hint"), cls="tools"),
        tag("canvas", id="lanes", tabindex=0, **spoken),
        tag("p", cls="details", id="details", aria_live="polite"),
        tag("div", id="memory"),
        table(head, picture.differences, caption=words)
        if picture.other
        else "",
        tag("script", Html(data), type="application/json", id="data"),
        tag("script", Html(script)),
    ]
    return Html("\n".join(parts))


def _data(picture: Picture) -> dict[str, object]:
    """The data for the page's script: tracks with their spans, labels, and memory."""
    tracks = [
        track._asdict()
        | {"spans": [_span(picture, track.rank, span) for span in track.spans]}
        for track in picture.tracks
    ]
    colours = {
        kind: {"fill": p.fill, "light": tinted(p.fill, 1), "ink": p.ink}
        for kind, p in PAINTS.items()
    }
    # For each rank its kinds of memory, and [time, amounts...] whenever they change.
    memory = []
    for source, timeline in enumerate(picture.timelines):
        # Kinds that a rank never holds would only fill the key.
        for rank, points in (timeline.memory or {}).items():
            kinds = sorted(
                {
                    k
                    for _, held in points
                    for k, amount in held.items()
                    if amount > 0
                }
            )
            amounts = [
                [time, *(held.get(k, 0.0) for k in kinds)]
                for time, held in points
            ]
            if kinds:
                memory.append(
                    {
                        "rank": rank,
                        "source": source,
                        "kinds": kinds,
                        "points": amounts,
                    }
                )
    # A rank's measured memory comes right after its predicted one.
    memory.sort(key=lambda one: (one["rank"], one["source"]))
    names = list(picture.names) if picture.other else []
    own = {
        name: getattr(picture, name)
        for name in ("start", "end", "clock", "unit")
    }
    own |= {"limit": picture.limit_shown, "most_words": picture.most_words}
    return own | {
        "names": names,
        "tracks": tracks,
        "colours": colours,
        "memory": memory,
    }


def _span(picture: Picture, rank: int, span: Span) -> list[object]:
    op, tint = span.op, round(picture.tint(rank, span.op), 3)
    words = [op.kind, str(op), picture.explain(op)]
    return [span.start, span.end, *words, tint, list(picture.names_of(op))]
