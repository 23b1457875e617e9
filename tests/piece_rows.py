"""Rows of pieces from a shape, compared with those from a model's modules and rule table."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.layout import Layout, Shape, legal
from phalanx.parallel import Model, build_model
from phalanx.verification.rows import rows_differ

LAYOUTS = (
    "", "pp2 1f1b:2", "tp2", "tp2 seq", "tp4", "tp4 seq", "ep2", "ep2 tp2 seq", "ep2 tp2 seq experts:tp",
    "compile", "dp2 zero3 fp8:tile", "dp2 tp2 zero1 fp8:tile",
)  # fmt: skip


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
        assert rows_differ(layout, shape, model) == "", str(layout)
        compared += 1
    return compared
