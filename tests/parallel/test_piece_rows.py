"""The rows of a model's pieces are the same, whether a shape says them or the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phalanx.layout import Shape
from phalanx.verify import SHAPES
from piece_rows import same_rows


def _few_blocks(shape: Shape) -> Shape:
    """The shape with as few blocks as have every kind of block."""
    layers = shape.dense_layers + 2 * max(1, len(shape.windows))
    return replace(shape, layers=min(shape.layers, layers))


@pytest.mark.parametrize("name", Shape.names())
def test_the_rows_of_every_built_in_size_are_those_of_its_model(name: str) -> None:
    assert same_rows(_few_blocks(Shape.load(name))) >= 4


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
    compared = [same_rows(shape) for shape in _variants()]
    assert min(compared) >= 2
    assert sum(compared) > 300
