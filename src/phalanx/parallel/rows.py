"""The rows of a model's pieces, read from its modules and its rule table; `layout/pieces.py` derives the same
rows from a shape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

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
from ..models import ExpertsPart, MergingPart, RoutingPart
from ..models.experts import loss_router
from .experts import cut_blocks
from .kinds import alike
from .local import model_stages
from .model import Model
from .narrow import linear_weights

_PARTS: dict[type[nn.Module], BlockPart] = dict(
    zip((RoutingPart, ExpertsPart, MergingPart), PARTS_APART, strict=True)
)


def model_pieces(model: Model, layout: Layout) -> StagedPieces:
    """The pieces of a layout's program for this model."""
    return StagedPieces(model_rows(model, layout), model_stages(model, layout))


def model_rows(model: Model, layout: Layout) -> tuple[PieceRow, ...]:
    """One row for each piece of a layout's program, with blocks cut where the layout cuts them."""
    model = cut_blocks(model, layout)
    weights = _weights(model)
    uses = defaultdict[int, list[int]](list)
    for piece, unit in model.tied:
        uses[piece].append(unit)
    rows = []
    piece = -1
    for number, ((_, module), kind) in enumerate(zip(model.pieces, alike(model), strict=True)):
        part = _PARTS.get(type(module), BlockPart.WHOLE)
        piece += part in (BlockPart.WHOLE, BlockPart.ROUTING)
        row = row_of(piece, part, kind, weights[number])
        if router := loss_router(module):
            sequence, batch = router.sequence_loss > 0, router.batch_loss > 0
            row = replace(row, sequence_loss=sequence, batch_loss=batch)
        rows.append(replace(in_layout(row, layout), uses=tuple(uses[number])))
    return tuple(rows)


def _weights(model: Model) -> dict[int, list[WeightRow]]:
    """The weights of each piece's own unit; a weight of several pieces is the first one's."""
    found = defaultdict[int, list[WeightRow]](list)
    count = len(model.pieces)
    narrow = linear_weights(model)
    for name, parameter in model.weights.items():
        piece = model.unit_of[name] % count
        shape = tuple(parameter.shape)
        dims = model.rules.dims(name, len(shape))
        matrices = tuple(
            (rows.stop - rows.start, columns.stop - columns.start)
            for rows, columns in model.rules.matrices(name, shape)
        )
        experts = shape[0] if len(shape) > 2 else 1
        row = WeightRow(
            name.removeprefix(f"{model.pieces[piece][0]}."),
            dims,
            shape,
            granules(dims, shape, model.counts),
            trained=name not in model.frozen,
            matrices=matrices * experts,
            narrow=name in narrow,
        )
        found[piece].append(row)
    return found
