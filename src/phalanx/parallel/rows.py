"""Derives the rows of a model's pieces from its modules and its rule table.

`layout/pieces.py` derives the same rows from a shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from ..layout import Layout
from ..layout.kinds import PARTS_APART, BlockPart
from ..layout.pieces import (
    PieceRow,
    StagedPieces,
    WeightRow,
    granules,
    in_layout,
    row_of,
)
from ..models.mlps import SPLIT
from ..models.routed import losing_chooser
from .block_parts import cut_blocks
from .kinds import alike
from .local import model_stages
from .model import Model
from .narrow import linear_weights

_PARTS: dict[type[nn.Module], BlockPart] = {
    kind: part
    for parts in SPLIT.values()
    for kind, part in zip(parts, PARTS_APART, strict=True)
}


def model_pieces(model: Model, layout: Layout) -> StagedPieces:
    """The pieces of a layout's program for this model."""
    return StagedPieces(model_rows(model, layout), model_stages(model, layout))


def model_rows(model: Model, layout: Layout) -> tuple[PieceRow, ...]:
    """One row for each piece of a layout's program, with split blocks."""
    model = cut_blocks(model, layout)
    weights = _weights(model)
    bundles = _bundles(model)
    rows = []
    piece = -1
    for number, ((_, module), kind) in enumerate(
        zip(model.pieces, alike(model), strict=True)
    ):
        part = _PARTS.get(type(module), BlockPart.WHOLE)
        # The three parts of a block share its number: only its first part counts on.
        piece += part in (BlockPart.WHOLE, BlockPart.ROUTING)
        row = row_of(piece, part, kind, weights.own[number])
        # Losses of choices are facts of a row, as their sums are operations.
        if chooser := losing_chooser(module):
            row = replace(
                row,
                sequence_loss=chooser.sequence_loss > 0,
                batch_loss=chooser.batch_loss > 0,
            )
        takes, gives = bundles[number]
        tied, uses = tuple(weights.tied[number]), tuple(weights.uses[number])
        row = in_layout(row, layout)
        rows.append(
            replace(row, tied=tied, uses=uses, takes=takes, gives=gives)
        )
    return tuple(rows)


@dataclass(frozen=True)
class _ModelWeights:
    """A model's weights by piece: its own, those of earlier pieces, and their units.

    A weight of several pieces belongs to the first one.
    """

    own: Mapping[int, list[WeightRow]]
    tied: Mapping[int, list[WeightRow]]
    uses: Mapping[int, list[int]]


def _weights(model: Model) -> _ModelWeights:
    count = len(model.pieces)
    narrow = linear_weights(model)
    rows: dict[str, WeightRow] = {}
    own = defaultdict[int, list[WeightRow]](list)
    for name, parameter in model.weights.items():
        # Experts' units are numbered behind the pieces, hence the remainder.
        piece = model.unit_of[name] % count
        row = _weight(model, piece, name, tuple(parameter.shape))
        rows[name] = replace(row, narrow=name in narrow)
        own[piece].append(rows[name])
    tied = defaultdict[int, list[WeightRow]](list)
    uses = defaultdict[int, list[int]](list)
    # A tied weight's row is listed again at each later piece that uses its unit.
    for piece, unit in model.tied:
        mine = {*model.pieces[piece][1].parameters()}
        names = (name for name, each in model.weights.items() if each in mine)
        tied[piece] += [
            rows[name] for name in names if model.unit_of[name] == unit
        ]
        uses[piece].append(unit)
    return _ModelWeights(own, tied, uses)


def _weight(
    model: Model, piece: int, name: str, shape: tuple[int, ...]
) -> WeightRow:
    dims = model.rules.dims(name, len(shape))
    matrices = tuple(
        (rows.stop - rows.start, columns.stop - columns.start)
        for rows, columns in model.rules.matrices(name, shape)
    )
    # Stacked MLPs, (MLPs, out, in), are as many matrices for the optimizer.
    stacked = shape[0] if len(shape) > 2 else 1
    return WeightRow(
        name.removeprefix(f"{model.pieces[piece][0]}."),
        dims,
        shape,
        granules(dims, shape, model.counts),
        trained=name not in model.frozen,
        matrices=matrices * stacked,
    )


def _bundles(model: Model) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names that each piece takes from the bundle and gives to it.

    A module with outputs named other than `x` lists them as `gives`.
    """
    found = []
    bundle: set[str] = set()
    last = len(model.pieces) - 1
    for number, (_, module) in enumerate(model.pieces):
        # Ranks exchange the counts of tokens, which become routes on the way.
        if "counts" in bundle:
            bundle = bundle - {"counts"} | {"routes"}
        names = model.takes(number)
        # A piece's first argument is x, unless the bundle has its name.
        if number and names[0] not in bundle:
            names = ("x", *names[1:])
        takes = tuple(name for name in names if name in bundle)
        gives = (
            () if number == last else tuple(getattr(module, "gives", ("x",)))
        )
        # What a piece takes leaves the bundle; what it does not name passes by.
        bundle = bundle.difference(takes).union(gives)
        found.append((takes, gives))
    return found
