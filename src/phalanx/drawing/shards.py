"""A table of shards as SVG: a row for each weight, a column for each rank."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .markup import (
    LETTER,
    WIDE,
    Html,
    KeyEntry,
    box,
    document,
    key,
    label,
)
from .words import wrapped

RANKS = 16  # most that are shown
_CELL, _GAP = 30, 8
_NAME = 7.6  # width of an average character of a weight's name
# A dark and a light colour, which differ without hue as well.
_KEPT, _USED = "#0072b2", "#b6d7ec"


class Slice(NamedTuple):
    """A rank's part of a weight.

    `box` is the range of each dim that it computes with. `kept` is the range of the
    flattened box that it keeps and updates; None: nothing.
    """

    rank: int
    weight: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    kept: tuple[int, int] | None

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{b}" for a, b in self.box)
        count = math.prod(b - a for a, b in self.box)
        kept = (
            "keeps none of it"
            if self.kept is None
            else "keeps {}:{}".format(*self.kept)
        )
        shape = " x ".join(map(str, self.shape))
        return f"rank {self.rank}: {self.weight} [{ranges}] of {shape}; {kept} of {count} numbers"


def shards_svg(slices: Sequence[Slice], width: float = WIDE) -> Html:
    """The table of shards as one SVG document.

    Weights whose names differ only in numbers share a row. Each rank shows its first
    one.
    """
    ranks = sorted({each.rank for each in slices})
    rows: dict[str, dict[int, Slice]] = {}
    more: dict[tuple[str, int], int] = {}
    for each in slices:
        # "layers.3.attn.wq" -> "layers.*.attn.wq".
        name = re.sub(r"\b\d+\b", "*", each.weight)
        rows.setdefault(name, {}).setdefault(each.rank, each)
        # Further weights of this name on the rank, the first one not counted.
        more[name, each.rank] = more.get((name, each.rank), -1) + 1
    wide = min(64.0, (width - 40 + _GAP) / len(ranks) - _GAP)
    fits = LETTER * len(f"rank {ranks[-1]}") <= wide
    body: list[Html] = [] if fits else [label(20, 46, "rank", "soft")]
    for i, rank in enumerate(ranks):
        middle = 20 + i * (wide + _GAP) + wide / 2
        name = f"rank {rank}" if fits else str(rank)
        body.append(label(middle, 60, name, "mid"))
    y = 72.0
    for name, held in rows.items():
        shape = " x ".join(map(str, next(iter(held.values())).shape))
        for words in wrapped(f"{name}  {shape}", int((width - 40) / _NAME)):
            body.append(label(20, y + 12, words, "name"))
            y += 16
        for i, rank in enumerate(ranks):
            x = 20 + i * (wide + _GAP)
            look = "idle" if rank in held else "empty"
            body.append(box(x, y + 2, wide, _CELL, cls=look))
            if rank in held:
                body += _part(
                    held[rank], (x, y + 2, wide, _CELL), more[name, rank]
                )
        y += _CELL + 14
    meanings = (
        KeyEntry(_KEPT, "keeps and updates"),
        KeyEntry(_USED, "also computes with"),
        KeyEntry("", "does not hold"),
    )
    below, y = key(meanings, y + 16, width)
    title = "which part of each weight is on which rank"
    notes = [
        "A column is a rank, a cell the whole weight: its rows from top to bottom. Weights of several"
        " layers share a row; * stands for the number of the layer."
    ]
    return document(title, width, y + 24, body + below, notes)


def _part(
    slice: Slice, cell: tuple[float, float, float, float], more: int
) -> Iterator[Html]:
    """The box in a light colour, with the part that is kept in full colour."""
    x, y, width, height = cell
    # A vector is a row; of more dims, the first and the last are shown.
    down, across = (
        (slice.box[0], slice.box[-1])
        if len(slice.box) > 1
        else ((0, 1), slice.box[0])
    )
    rows, columns = (
        (slice.shape[0], slice.shape[-1])
        if len(slice.box) > 1
        else (1, slice.shape[0])
    )
    left, right = (x + width * at / max(columns, 1) for at in across)
    top, bottom = (y + height * at / max(rows, 1) for at in down)
    tip = f"{slice}" + (f"; and so {more} more" if more else "")
    yield box(
        left,
        top,
        right - left,
        bottom - top,
        cls="op",
        fill=_USED,
        tip=tip,
    )
    if slice.kept is None:
        return
    count = math.prod(b - a for a, b in slice.box) or 1
    # The share of the box that is kept, in its flat order.
    a, b = (min(at, count) / count for at in slice.kept)
    if rows > 1:  # elements run along rows
        top, bottom = top + (bottom - top) * a, top + (bottom - top) * b
    else:
        left, right = left + (right - left) * a, left + (right - left) * b
    yield box(
        left,
        top,
        right - left,
        bottom - top,
        fill=_KEPT,
        pointer_events="none",
    )
