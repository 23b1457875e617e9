"""A picture as text for a terminal: a row for each rank, cells as wide as their time.

Kinds differ by letter as well as by colour. A picture wider than the terminal is folded
into bands, one below the other.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ..program import KINDS, Op, ops
from .markup import text_table
from .picture import LEGEND, PAINTS, Picture, Track
from .words import number, ticks, wrapped

_IDLE = "·"
_LINES = 150  # a longer picture is drawn with narrower cells


class _Cell(NamedTuple):
    """The columns `start` to `stop` of a track, and the operation that fills them."""

    start: int
    stop: int
    op: Op


def text(picture: Picture, *, width: int = 80, colour: bool = False) -> str:
    """The picture in lines of at most `width` columns."""
    tracks = picture.tracks
    widest = max((len(t.label) for t in tracks), default=0)
    # Labels take a third of the width at most.
    margin = min(widest, max(6, width // 3)) + 1
    room = max(8, width - margin)
    scale = _scale(picture, room)
    # Rounding must not add an empty column.
    columns = max(1, math.ceil((picture.end - picture.start) * scale - 1e-6))
    band = _band(picture, scale, room, columns)
    rows = [(track, _cells(track, picture.start, scale)) for track in tracks]
    # Each band shows a part of the time, all ranks above one another.
    lines = wrapped(picture.title, width)
    for left in range(0, columns, band):
        right = min(columns, left + band)
        lines += ["", " " * margin + _axis(picture, scale, left, right)]
        for track, cells in rows:
            label = track.label[: margin - 1].ljust(margin)
            lines.append(
                label + _row(picture, track, cells, (left, right), colour)
            )
    lines += ["", *wrapped(_legend(picture, scale), width)]
    compared = ""
    if picture.other:  # time by kind of operation
        head = ("", *picture.names, "of the step")
        compared = f"\n{text_table(head, picture.differences)}\n"
    for line in (*picture.summary, *compared.splitlines(), *picture.notes):
        lines += wrapped(line, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _scale(picture: Picture, room: int) -> float:
    """Columns per unit of time: labels fit if possible; one band is better than two."""
    # Updates are shorter than forwards and backwards, and do not set the scale.
    spans = [
        s for t in picture.tracks for s in t.spans if s.op.kind in ops.COMPUTES
    ]
    spans = spans or [s for t in picture.tracks for s in t.spans]
    if not spans:
        return 1.0
    total = picture.end - picture.start
    shortest = min(s.end - s.start for s in spans)
    # A label that begins with a digit needs a blank before it: 2F6 and 5B0 are not
    # 2F65B0.
    label = (
        max(len(picture.names_of(s.op)[0]) for s in spans) + picture.several
    )
    most = max(1, _LINES // (len(picture.tracks) + 2))
    # A very short operation among long ones does not set the scale for all.
    shortest = max(shortest, median(s.end - s.start for s in spans) / 4)
    # First in one band, with wide cells if they fit.
    for cell in range(label + 2, label - 1, -1):
        if total / shortest * cell <= room + 1e-6:
            return cell / shortest
    # Then in as many bands as `_LINES` allow.
    for cell in range(label + 1, 0, -1):
        if total / shortest * cell <= room * most:
            return cell / shortest
    return room * most / total


def _band(picture: Picture, scale: float, room: int, columns: int) -> int:
    """Columns per band: equal bands, each a whole number of the shortest cells."""
    spans = [
        s for t in picture.tracks for s in t.spans if s.op.kind in ops.COMPUTES
    ]
    cell = min(
        room,
        max(
            1,
            round(min((s.end - s.start for s in spans), default=1.0) * scale),
        ),
    )
    # A whole number of cells, so that no label is cut at the end of a band.
    room -= room % cell
    fair = -(-columns // -(-columns // room))
    return min(room, -(-fair // cell) * cell)


def _cells(track: Track, begin: float, scale: float) -> list[_Cell]:
    """The spans in whole columns without overlap; very short ones are dropped."""
    cells: list[_Cell] = []
    reached = 0
    for span in sorted(track.spans, key=lambda s: s.start):
        # Columns are whole: round both ends alike.
        start, stop = (
            round((t - begin) * scale) for t in (span.start, span.end)
        )
        start = max(start, reached)
        # On a link lane a short message still gets one column; compute lanes keep
        # proportions.
        visible = track.lane != "compute" and span.end > span.start
        if stop > start or (stop == start and visible):
            reached = max(stop, start + 1)
            cells.append(_Cell(start, reached, span.op))
    return cells


def _row(
    picture: Picture,
    track: Track,
    cells: Sequence[_Cell],
    window: tuple[int, int],
    colour: bool,
) -> str:
    left, right = window
    row, at = "", left
    for cell in cells:
        start, stop = max(cell.start, left), min(cell.stop, right)
        if start < stop:
            words = _words(picture, cell, window)
            if colour:
                # Underline later pieces of a rank: 256 colours do not have enough
                # tints.
                op, paint = cell.op, PAINTS[cell.op.kind]
                later = (
                    picture.tint(track.rank, op) > 0.5
                    and op.kind in ops.COMPUTES
                )
                # White ink is 15 of the terminal's colours, black 16.
                ink = 15 if paint.ink == "#ffffff" else 16
                look = f"38;5;{ink};48;5;{paint.terminal}" + ";4" * later
                words = f"\x1b[{look}m{words}\x1b[0m"
            row += _IDLE * (start - at) + words
            at = stop
    return row + _IDLE * (right - at)


def _words(picture: Picture, cell: _Cell, window: tuple[int, int]) -> str:
    """The characters of the part of a cell that a window shows.

    A cell folded over two bands has its label in the larger part.
    """
    left, band = window[0], window[1] - window[0]
    # Where this window's band would begin inside the cell.
    first = left + (cell.start - left) // band * band
    cuts = [e for e in range(first, cell.stop, band) if e > cell.start]
    parts = list(pairwise([cell.start, *cuts, cell.stop]))
    here = (max(cell.start, window[0]), min(cell.stop, window[1]))
    size = here[1] - here[0]
    # The larger part has the label; of equal ones the first.
    if here != max(parts, key=lambda p: (p[1] - p[0], -p[0])):
        return "─" * size
    for name in picture.names_of(cell.op):
        need = len(name)
        if KINDS[cell.op.kind].lane == ops.COMPUTE:
            # A number alone does not name a kind. Labels that begin with a digit need a
            # blank between.
            need = size + 1 if name.isdigit() else need + picture.several
        if need <= size:
            rest = size - len(name)
            # The last column stays free to separate neighbours.
            return name + "─" * (rest - 1) + " " * min(1, rest)
    # Too narrow for a label: small letters of the kind.
    return cell.op.kind.lower()[:1] * size


def _axis(picture: Picture, scale: float, left: int, right: int) -> str:
    """Round times above a band."""
    begin = picture.start
    marks = [" "] * (right - left)
    # At least nine columns apart.
    for time in ticks(
        begin + (left - 0.5) / scale,
        begin + right / scale,
        9 / scale,
    ):
        column = round((time - begin) * scale) - left
        words = f"╷{number(time)}{picture.clock}"
        if 0 <= column <= len(marks) - len(words):
            marks[column : column + len(words)] = words
    return "".join(marks)


def _legend(picture: Picture, scale: float) -> str:
    # Kinds of operations that are so short that only their letter is shown.
    narrow = set()
    for span in (span for track in picture.tracks for span in track.spans):
        # Half a column less: rounding may have made it wide enough.
        short = (span.end - span.start) * scale < len(
            f"{span.op.kind}{span.op.index}"
        ) - 0.5
        if short and KINDS[span.op.kind].lane == ops.COMPUTE:
            narrow.add(span.op.kind)
    words = [f"{k} {LEGEND[k]}" for k in picture.kinds if k != ops.SEND]
    if letters := [k.lower() for k in picture.kinds if k in narrow]:
        words.append(f"{' '.join(letters)} the same, too narrow for a number")
    words += ["a>b messages from stage a to b"] * (ops.SEND in picture.kinds)
    words.append(f"{_IDLE} idle")
    if picture.several:
        words.append("2F0 is piece 2, forward of microbatch 0")
    elif ops.FORWARD in picture.kinds:
        words.append("F0 is the forward of microbatch 0")
    return " | ".join(words)
