"""A matrix of things that were tried together: names along both sides, a word and a colour in a cell."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .markup import LETTER, WIDE, Html, KeyEntry, box, document, key, label, tag

_LEAST = 22.0  # pixels of a cell


class MatrixCell(NamedTuple):
    """What a cell says, its colour, and its words under the mouse."""

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
    """The lower half of a square, with its diagonal: `cell` is asked for each pair."""
    margin = 30 + LETTER * max(map(len, names))
    size = max(_LEAST, min(44.0, (width - margin - 20) / len(names)))
    top, body = 40 + 0.75 * margin, list[Html]()
    for i, name in enumerate(names):
        y = top + i * size
        body.append(label(margin - 8, y + size / 2 + 4, name, "end"))
        x = margin + (i + 0.5) * size
        turned = f"rotate(-50 {x:.1f} {y - 6:.1f})"
        body.append(tag("text", name, x=x, y=y - 6, transform=turned))
        for j, other in enumerate(names[: i + 1]):
            x, found = margin + j * size, cell(name, other)
            look = {"cls": "op", "fill": found.fill, "tip": found.tip} if found else {"cls": "idle"}
            body.append(box(x, y, size - 2, size - 2, rx=3, **look))
            if found and LETTER * len(found.text) <= size - 2:
                middle = x + size / 2 - 1
                body.append(label(middle, y + size / 2 + 3, found.text, "cell", "#000000"))
    wide = max(width, margin + len(names) * size + 40)
    below, floor = key([KeyEntry(*c) for c in colours], top + len(names) * size + 24, wide)
    return document(title, wide, floor + 22, body + below, notes)
