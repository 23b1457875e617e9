"""Rows of a built-in model's pieces, derived from its shape and from its modules.

`plan`, `check` and `draw` read the rows of the shape, before any model exists. A run
builds its program from the rows of the model's modules and rule table. Both must be
equal, or prices and pictures are those of another step.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import torch

from ..layout import (
    Layout,
    PieceRow,
    Shape,
    StagedPieces,
    legal,
    staged_pieces,
)
from ..layout.cases import LARGER, SHAPES
from ..parallel import Model, build_model
from ..parallel.rows import model_pieces

# Layouts in which the rows of every small shape are compared.
_SPLITS = ("pp2 tp2", "cp2 ep2")


class _ShapeDiffersError(Exception):
    """Raised with the first difference between a small shape and its model."""


def shapes_differ() -> str:
    """Describe the first small shape whose rows or sizes are not those of its model; ""
    if there is none.

    All shapes share the code that derives them, and few are trained in one comparison.
    """
    try:
        _compare_shapes()
    except _ShapeDiffersError as error:
        return str(error)
    return ""


# Once in a process, if nothing differs: an error is not kept.
@cache
def _compare_shapes() -> None:
    layouts = [Layout.parse(text) for text in ("", *_SPLITS)]
    for name, shape in (SHAPES | LARGER).items():
        # Rows depend on names and lengths alone.
        with torch.device("meta"):
            model = build_model(shape)
        sizes = sum(weight.numel() for weight in model.weights.values())
        if sizes != shape.total:
            raise _ShapeDiffersError(
                f"the shape {name} has {shape.total} weights, and its model has {sizes}"
            )
        for layout in layouts:
            if legal(layout, shape):
                continue
            if wrong := rows_differ(layout, shape, model):
                raise _ShapeDiffersError(f"{name}: {wrong}")


def rows_differ(layout: Layout, shape: Shape, model: Model) -> str:
    """Describe the first row or stage of a layout on which a shape and its model
    differ; "" if there is none."""
    planned = staged_pieces(layout, shape)
    run = model_pieces(model, layout)
    if planned.stages != run.stages:
        return (
            f"the shape has the stages {_ends(planned)}, and the model has {_ends(run)}"
            " (pieces at which they end)"
        )
    if len(planned) != len(run):
        return f"the shape has {len(planned)} pieces, and the model has {len(run)}"
    for one, other in zip(planned.rows, run.rows, strict=True):
        # A shape lists weights by kind, a model in the order of its modules.
        one, other = _by_name(one), _by_name(other)
        if one != other:
            return _first_field(one, other)
    return ""


def _by_name(row: PieceRow) -> PieceRow:
    weights = sorted(row.weights, key=lambda weight: weight.name)
    return replace(row, weights=tuple(weights))


def _first_field(planned: PieceRow, run: PieceRow) -> str:
    for field in fields(PieceRow):
        one = getattr(planned, field.name)
        other = getattr(run, field.name)
        if one != other:
            return (
                f"piece {planned.piece}: '{field.name}' is {one} by the shape, and {other} by the"
                " model's modules and rules"
            )
    return ""


def _ends(pieces: StagedPieces) -> str:
    return "-".join(str(stage.stop) for stage in pieces.stages)
