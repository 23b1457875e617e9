"""The rows of a model's pieces are the same, whether a shape says them or the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx.layout import Layout, PieceRow, Shape, StagedPieces, legal, staged_pieces
from phalanx.parallel import build_model
from phalanx.parallel.rows import model_pieces
from phalanx.verify import SHAPES

LAYOUTS = (
    "", "pp2 1f1b:2", "tp2", "tp2 seq", "tp4", "tp4 seq", "ep2", "ep2 tp2 seq", "ep2 tp2 seq experts:tp",
    "compile",
)  # fmt: skip


def _sorted(pieces: StagedPieces) -> StagedPieces:
    """The same with each piece's weights in the order of their names."""

    def in_order(row: PieceRow) -> PieceRow:
        return replace(row, weights=tuple(sorted(row.weights, key=lambda w: w.name)))

    return replace(pieces, rows=tuple(map(in_order, pieces.rows)))


def _same_rows(shape: Shape, texts: tuple[str, ...]) -> int:
    model = build_model(shape)
    compared = 0
    for layout in map(Layout.parse, texts):
        if legal(layout, shape):
            continue
        ours, theirs = _sorted(staged_pieces(layout, shape)), _sorted(model_pieces(model, layout))
        assert ours.stages == theirs.stages
        for mine, other in zip(ours.rows, theirs.rows, strict=True):
            assert mine == other
        compared += 1
    return compared


def _few_blocks(shape: Shape) -> Shape:
    """The shape with as few blocks as have every kind of block."""
    layers = shape.dense_layers + 2 * max(1, len(shape.windows))
    return replace(shape, layers=min(shape.layers, layers))


@pytest.mark.parametrize("name", Shape.names())
def test_the_rows_of_every_built_in_size_are_those_of_its_model(name: str) -> None:
    assert _same_rows(_few_blocks(Shape.load(name)), LAYOUTS) >= 4


def _variants() -> Iterator[Shape]:
    for shape in SHAPES.values():
        yield shape
        yield replace(shape, freeze=("layers.1",))
        yield replace(shape, freeze=("embed", "layers.0"))
        if shape.kind != "decoder":
            continue
        yield replace(shape, norms="both")
        yield replace(shape, norms="post", norm="layer")
        yield replace(shape, lora_r=2)
        yield replace(shape, lora_r=2, lora_targets=("wo",))
        yield replace(shape, windows=(4, 0))
        yield replace(shape, windows=(0, 4, 4)[: shape.layers])
        yield replace(shape, tied=not shape.tied)


def test_the_rows_of_every_technique_are_those_of_its_model() -> None:
    compared = [_same_rows(shape, LAYOUTS) for shape in _variants()]
    assert min(compared) >= 2
    assert sum(compared) > 300


@pytest.mark.parametrize("name", Shape.names())
def test_the_weights_of_a_size_add_up_to_its_parameters(name: str) -> None:
    shape = Shape.load(name)
    rows = staged_pieces(Layout(), shape).rows
    assert [row.numel for row in rows] == [shape.parameters(n) for n in range(shape.pieces)]
    assert sum(row.numel for row in rows) == shape.total
