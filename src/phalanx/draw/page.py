"""A picture as one HTML page that needs nothing else: zoom, pan, the operation under the mouse,
memory over time, and a prediction with its measurement lane by lane.

`page.html` and `page.js` beside this file are the page; here they are filled with a picture.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from ..program import ops
from .picture import LEGEND, PAINTS, Picture
from .svg import tinted
from .words import change, number

__all__ = ["page"]


def page(picture: Picture) -> str:
    """The page's text."""
    here = Path(__file__).parent
    filled = (here / "page.html").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    parts = {
        "{{title}}": escape(picture.title),
        "{{summary}}": "".join(f"<p>{escape(s)}</p>" for s in (*picture.summary, *picture.notes)),
        "{{legend}}": _legend(picture),
        "{{table}}": _table(picture),
        "{{data}}": _json(_data(picture)),
        "{{script}}": script,
    }
    for mark, said in parts.items():
        filled = filled.replace(mark, said)
    return filled


def _json(said: object) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(picture: Picture) -> dict[str, object]:
    """What the page's script draws: tracks with their spans, the words for them, memory."""
    tracks = [
        {
            "rank": track.rank,
            "lane": track.lane,
            "label": track.label,
            "source": track.source,
            "spans": [
                [s.start, s.end, s.op.kind, str(s.op), picture.explain(s.op),
                 round(picture.tint(track.rank, s.op), 3), list(picture.names_of(s.op))]
                for s in track.spans
            ],
        }
        for track in picture.tracks
    ]  # fmt: skip
    colours = {
        kind: {"fill": p.fill, "light": tinted(p.fill, 1), "ink": p.ink}
        for kind, p in PAINTS.items()
    }
    return {
        "start": picture.start,
        "end": picture.end,
        "clock": picture.clock,
        "unit": picture.unit,
        "names": list(picture.names) if picture.other else [],
        "tracks": tracks,
        "colours": colours,
        "memory": _memory(picture),
    }


def _memory(picture: Picture) -> list[dict[str, object]]:
    """For each rank: the kinds that it holds and [time, amounts...] wherever they change."""
    found: list[dict[str, object]] = []
    for source, timeline in enumerate(picture.timelines):
        for rank, points in (timeline.memory or {}).items():
            kinds = sorted({k for _, held in points for k, amount in held.items() if amount > 0})
            found.append(
                {
                    "rank": rank,
                    "source": source,
                    "kinds": kinds,
                    "points": [[time, *(held.get(k, 0.0) for k in kinds)] for time, held in points],
                }
            )
    return [one for one in found if one["kinds"]]


def _legend(picture: Picture) -> str:
    return "".join(
        f'<span class="key"><b style="background:{PAINTS[k].fill};color:{PAINTS[k].ink}">'
        f"{escape('' if k == ops.SEND else k)}</b>{LEGEND[k]}</span>"
        for k in picture.kinds
    )


def _table(picture: Picture) -> str:
    if picture.other is None:
        return ""
    first, second = map(escape, picture.names)
    rows = "".join(
        f"<tr><th scope=row>{LEGEND[kind]}</th><td>{number(a)}</td><td>{number(b)}</td>"
        f"<td>{change(a, b)}</td></tr>"
        for kind, a, b in picture.differences
    )
    return (
        "<table><caption>Time by kind of operation, over all ranks</caption><thead><tr><th></th>"
        f"<th scope=col>{first}</th><th scope=col>{second}</th><th scope=col>difference</th></tr>"
        f"</thead><tbody>{rows}</tbody></table>"
    )
