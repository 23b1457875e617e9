"""A mesh as text and SVG: ranks' coordinates, groups along axes, and parts of a weight."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase

from ..layout import Layout, LayoutError, Mesh
from ..layout.rules import AXIS_OF, Cut
from .markup import COLOURS, Html, box, document, label, text_table
from .svg import tinted
from .words import wrapped

_DIMS = (*AXIS_OF, "embed", "head", "position", "-")
_RANKS = 64  # further ranks are counted, not listed


@dataclass(frozen=True)
class MeshPicture:
    """A layout's mesh, with the dims of a weight to divide if `weight` is given.

    Written as `heads=4096`, or `heads=4096/128` if 128 elements are one unit, as in a
    head.
    """

    layout: Layout
    weight: tuple[tuple[str, int, int], ...] = ()  # (dim, size, unit)

    def __str__(self) -> str:
        return mesh_text(self)

    def _repr_svg_(self) -> str:
        """The picture in a notebook."""
        return mesh_svg(self)

    @classmethod
    def parse(cls, layout: str, weight: str = "") -> "MeshPicture":
        return cls(Layout.parse(layout), tuple(map(_dim, weight.split())))

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def title(self) -> str:
        return (
            f"mesh {self.layout}: {self.mesh.size} ranks"
            if self.mesh.size > 1
            else "one rank"
        )

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes, and the parts of an axis with an inner grid."""
        names: list[str] = []
        for axis in self.mesh.axes:
            names.append(axis.name)
            names += [
                # Only parts that differ from their axis and from one rank.
                n
                for n in axis.part_names
                if n != axis.name and 1 < self.mesh.of(n) < axis.size
            ]
        return tuple(names)

    @cached_property
    def panels(self) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
        """The grid in panels of rows and columns.

        The innermost axis runs along the columns, the next along the rows. Each
        coordinate along the outer axes has its own panel.
        """
        sizes = [axis.size for axis in self.mesh.axes]
        # Meshes of fewer axes have one row, or a single rank.
        rows, columns = [1, 1, *sizes][-2:]
        panels = []
        # The last axis varies fastest, so a panel is a range of ranks.
        for first in range(0, self.mesh.size, rows * columns):
            at = self.mesh.coordinates(first)
            title = " ".join(
                f"{axis.name}={at[axis.name]}" for axis in self.mesh.axes[:-2]
            )
            starts = range(first, first + rows * columns, columns)
            panels.append(
                (title, tuple(tuple(range(r, r + columns)) for r in starts))
            )
        return tuple(panels)

    @property
    def axes_of(self) -> tuple[tuple[str, ...], ...]:
        """The axes that divide each dim of the weight."""
        return self.layout.axes_of([name for name, _, _ in self.weight])

    def part(self, rank: int) -> tuple[tuple[Cut, ...], Cut | None]:
        """A rank's part of the weight.

        A range of each dim by tensor parallelism. With ZeRO-3, a range of the flattened
        elements as well.
        """
        at = self.mesh.coordinates(rank)
        cuts = tuple(
            # Tensor parallelism keeps units whole; a dim that nothing divides
            # needs none.
            Cut.of(size, *self.mesh.part(axes, at), unit if axes else 1)
            for (_, size, unit), axes in zip(
                self.weight, self.axes_of, strict=True
            )
        )
        if self.layout.zero < 3:
            return cuts, None
        # The shards of a weight lie on the ranks along these axes.
        group = self.mesh.group(rank, self.layout.shard_axes)
        count = math.prod(cut.length for cut in cuts)
        return cuts, Cut.of(count, len(group), group.index(rank))

    def ranges(self, rank: int) -> list[tuple[str, str]]:
        """The rank's ranges as names and text; empty without a weight."""
        if not self.weight:
            return []
        cuts, shard = self.part(rank)
        named = [
            (name, cut)
            for (name, _, _), cut in zip(self.weight, cuts, strict=True)
        ]
        named += [("flat shard", shard)] if shard else []
        return [(name, f"{cut.start}:{cut.stop}") for name, cut in named]


def _dim(word: str) -> tuple[str, int, int]:
    # below 2 ** 63
    match = re.fullmatch("([a-z-]+)=([0-9]{1,18})(?:/([0-9]{1,18}))?", word)
    if not match or match[1] not in _DIMS:
        raise LayoutError(
            f"{word[:60]!r} is not a dim of a weight. Write heads=4096, or heads=4096/128 where 128 are one"
            f" head; dims are {', '.join(_DIMS)}."
        )
    size, unit = int(match[2]), int(match[3] or 1)
    if not size or not unit:
        raise LayoutError(f"{word!r}: a dim has a size of 1 or more.")
    return match[1], size, unit


def mesh_text(picture: MeshPicture, *, width: int = 80) -> str:
    """The grid, groups along axes, ranks' coordinates, and parts of the weight."""
    lines = [*wrapped(picture.title, width), "", *_grid(picture, width)]
    lines += ["", "groups"] * bool(picture.axes)
    widest = max(map(len, picture.axes), default=0)
    for axis in picture.axes:
        groups = picture.mesh.groups([axis])
        shown = [
            f"{{{' '.join(map(str, group))}}}" for group in groups[:_RANKS]
        ]
        shown += [f"and {len(groups) - _RANKS} more"] * (len(groups) > _RANKS)
        lead = f"  {axis:{widest}}  "
        line = wrapped(" ".join(shown), max(8, width - len(lead)))
        lines += [
            lead + line[0],
            *(" " * len(lead) + part for part in line[1:]),
        ]
    table = _table(picture, picture.axes)
    # Too wide for the terminal: leave out the parts of axes.
    if len(table[0]) > width:  # groups show the parts of an axis as well
        table = _table(
            picture, tuple(axis for axis in picture.axes if "." not in axis)
        )
    lines += ["", *table]
    if picture.weight:
        lines += [
            "",
            *(
                part
                for line in _explained(picture)
                for part in wrapped(line, width)
            ),
        ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _grid(picture: MeshPicture, width: int) -> Iterator[str]:
    """The panels, side by side as far as they fit."""
    # "tp0 tp1 ..." above the columns, "pp0" before each row.
    row, column = ["", "", *(axis.name for axis in picture.mesh.axes)][-2:]
    cell = max(len(str(picture.mesh.size - 1)), len(column) + 2) + 1
    margin = max(len(row) + 3, len(row) + len(column) + bool(row))
    blocks = []
    for title, grid in picture.panels:
        block = [title] if title else []
        if column:
            heads = "".join(
                f"{column}{c}".rjust(cell) for c in range(len(grid[0]))
            )
            block.append(" " * margin + heads)
        for r, ranks in enumerate(grid):
            label = f"{row}{r}" if row else ""
            numbers = "".join(str(n).rjust(cell) for n in ranks)
            block.append(label.ljust(margin) + numbers)
        wide = max(map(len, block))
        blocks.append([line.ljust(wide + 4) for line in block])
    # Panels that fit side by side.
    fit = max(1, width // len(blocks[0][0]))
    for first in range(0, len(blocks), fit):
        yield from [""] * bool(first)
        for lines in zip(*blocks[first : first + fit], strict=True):
            yield "".join(lines).rstrip()


def _table(picture: MeshPicture, axes: tuple[str, ...]) -> list[str]:
    """A line for each rank; for very many, only the first and last ones."""
    ranks = list(range(picture.mesh.size))
    # The first 32 and the last 4 ranks.
    if len(ranks) > _RANKS:
        ranks = [*ranks[: _RANKS // 2], *ranks[-4:]]
    head, rows = ["rank", *axes, *(name for name, _ in picture.ranges(0))], []
    for rank in ranks:
        at, held = picture.mesh.coordinates(rank), picture.ranges(rank)
        rows.append(
            [
                str(rank),
                *(str(at[axis]) for axis in axes),
                *(cut for _, cut in held),
            ]
        )
    if len(ranks) < picture.mesh.size:
        rows.insert(_RANKS // 2, ["...", *[""] * (len(head) - 1)])
    return text_table(head, rows, left="r").splitlines()


def _explained(picture: MeshPicture) -> Iterator[str]:
    """Explain in sentences how the weight is divided."""
    (cuts, shard), whole = (
        picture.part(0),
        " x ".join(f"{n}={size}" for n, size, _ in picture.weight),
    )
    yield f"weight {whole}: each rank computes with {' x '.join(str(cut.length) for cut in cuts)}."
    for (name, size, _), cut, over in zip(
        picture.weight, cuts, picture.axes_of, strict=True
    ):
        parts, _ = picture.mesh.part(over, {})
        axis = " and ".join(axis for axis in over if picture.mesh.of(axis) > 1)
        if parts > 1:
            count = parts // cut.copies
            words = f"{name}={size} is cut over {axis} into {count} parts of {cut.length}"
            words += (
                f", each held by {cut.copies} ranks" if cut.copies > 1 else ""
            )
            padding = cut.length * count - size
            yield words + (
                f"; {padding} of padding at the end." if padding else "."
            )
    if shard:
        axes = " and ".join(
            axis
            if "." in axis and axis in picture.axes
            else axis.split(".")[0]
            for axis in picture.layout.shard_axes
            if picture.mesh.of(axis) > 1
        )
        keeps = f"zero3 keeps it as flat shards of {shard.length} numbers over {axes}."
        yield keeps if axes else "zero3 has no dp or cp to shard over."
    elif picture.layout.copies > 1:
        yield f"{picture.layout.copies} ranks along dp and cp hold the same part."


def mesh_svg(picture: MeshPicture, most: float = 920.0) -> Html:
    """The grid of ranks, then one for each axis with colours and letters by group."""
    grids: list[tuple[str, dict[int, int] | None]] = [("ranks", None)]
    for axis in picture.axes:
        groups = picture.mesh.groups([axis])
        # The number of each rank's group, which gives its colour and letter.
        of = {rank: g for g, group in enumerate(groups) for rank in group}
        grids.append((_groups_title(axis, groups), of))
    body: list[Html] = []
    y, width = 44.0, min(420.0, most - 20)
    for title, group_of in grids:
        body.append(label(20, y + 16, title))
        drawn, bottom, right = _panels(picture, y + 26, group_of, most)
        body += drawn
        y, width = bottom + 14, max(width, right)
    notes = list(_explained(picture)) if picture.weight else []
    return document(picture.title, width + 20, y + 12, body, notes)


def _groups_title(axis: str, groups: Sequence[Sequence[int]]) -> str:
    ranks = f"{len(groups[0])} ranks along {axis}"
    if len(groups) == 1:
        return f"1 group of {ranks}, named by a letter"
    return f"{len(groups)} groups of {ranks}, named by letters"


def _panels(
    picture: MeshPicture,
    top: float,
    group_of: Mapping[int, int] | None,
    most: float,
) -> tuple[list[Html], float, float]:
    """Draw one grid in rows of panels; returns its bottom and right ends."""
    cell, tall = (44, 36) if group_of else (64, 40)
    x, y, right = 20.0, top, 0.0
    out: list[Html] = []
    first_title, grid = picture.panels[0]
    head = 18 if first_title else 0
    wide, high = len(grid[0]) * cell + 18, len(grid) * tall + head + 10
    for title, grid in picture.panels:
        # The next panel would leave the page.
        if x > 20 and x + wide > most:
            x, y = 20.0, y + high
        if title:
            out.append(label(x, y + 12, title, "soft"))
        for r, ranks in enumerate(grid):
            for c, rank in enumerate(ranks):
                where = (x + c * cell, y + head + r * tall, cell - 2, tall - 2)
                out += _square(
                    picture, rank, where, group_of[rank] if group_of else None
                )
        right = max(right, x + wide)
        x += wide
    return out, y + high, right


def _square(
    picture: MeshPicture,
    rank: int,
    where: tuple[float, float, float, float],
    group: int | None,
) -> Iterator[Html]:
    x, y, width, height = where
    at = picture.mesh.coordinates(rank)
    tip = f"rank {rank}: " + " ".join(
        f"{axis}={at[axis]}" for axis in picture.axes
    )
    if held := [" ".join(pair) for pair in picture.ranges(rank)]:
        tip += f"\nholds {', '.join(held)}"
    fill = tinted(
        COLOURS[(group or 0) % len(COLOURS)], 0.25 if group is None else 0.0
    )
    yield box(x, y, width, height, cls="op", rx=4, fill=fill, tip=tip)
    middle, centre = x + width / 2, y + height / 2
    if group is not None:
        # a to z, then aa, bb ...
        letters = ascii_lowercase[group % 26] * (group // 26 + 1)
        yield label(middle, centre - 2, rank, "cell", "#000000")
        yield label(middle, centre + 12, letters, "cell", "#000000")
        return
    yield label(middle, centre - 2, rank, "cell", "#000000")
    # The panel's title has the coordinates along the other axes.
    inner = " ".join(
        f"{axis.name}{at[axis.name]}" for axis in picture.mesh.axes[-2:]
    )
    yield label(middle, centre + 12, inner, "cell", "#000000")
