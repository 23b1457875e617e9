"""Rows of pieces from a shape, compared with those from a model's modules and rule table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from phalanx.layout import (
    Layout,
    PieceRow,
    Shape,
    StagedPieces,
    legal,
    staged_pieces,
)
from phalanx.parallel import Model, build_model
from phalanx.parallel.rows import model_pieces

LAYOUTS = (
    "", "pp2 1f1b:2", "tp2", "tp2 seq", "tp4", "tp4 seq", "ep2", "ep2 tp2 seq", "ep2 tp2 seq experts:tp",
    "compile", "dp2 zero3 fp8:tile", "dp2 tp2 zero1 fp8:tile",
)  # fmt: skip


def _sorted(pieces: StagedPieces) -> StagedPieces:
    """Sort each piece's weights by name."""

    def in_order(row: PieceRow) -> PieceRow:
        return replace(
            row, weights=tuple(sorted(row.weights, key=lambda w: w.name))
        )

    return replace(pieces, rows=tuple(map(in_order, pieces.rows)))


def same_rows(
    shape: Shape, texts: Iterable[str] = LAYOUTS, model: Model | None = None
) -> int:
    """Assert that a shape and its model have equal rows; return the number of layouts
    compared."""
    model = model or build_model(shape)
    compared = 0
    for layout in map(Layout.parse, texts):
        if legal(layout, shape):
            continue
        ours, theirs = (
            _sorted(staged_pieces(layout, shape)),
            _sorted(model_pieces(model, layout)),
        )
        assert ours.stages == theirs.stages
        for mine, other in zip(ours.rows, theirs.rows, strict=True):
            assert mine == other
        compared += 1
    return compared
