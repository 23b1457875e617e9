"""A decoder's sizes stand twice: `Shape` for files and plans, `DecoderSizes` for plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from phalanx.layout import LayoutError, Shape
from phalanx.models import DecoderSizes
from phalanx.parallel.model import Undrawn, decoder_of
from phalanx.verification import SHAPES

# Of the decoder alone: a choice of the run, and an object where a shape has words and numbers.
OF_THE_DECODER = {"rope_scaling"}
# A decoder may be made without these, and a shape must name them, or has a longer default.
WITHOUT_DEFAULT = {"vocab", "layers", "sequence", "hidden"}


def _shapes() -> Iterator[Shape]:
    yield from (shape for shape in SHAPES.values() if shape.kind == "decoder")
    for name in Shape.names():
        shape = Shape.load(name)
        if shape.kind == "decoder":
            yield replace(
                shape, layers=shape.dense_layers + 1, windows=shape.windows[:1]
            )


def test_every_size_of_a_decoder_is_a_key_of_a_shape_with_the_same_default() -> (
    None
):
    keys = {each.name: each for each in fields(Shape)}
    for size in fields(DecoderSizes):
        if size.name in OF_THE_DECODER:
            continue
        assert size.name in keys
        if size.name not in WITHOUT_DEFAULT | {"heads"}:
            assert keys[size.name].default == size.default, size.name


def test_a_decoder_has_the_sizes_of_its_shape_and_fills_in_the_same() -> None:
    """What a size of 0 stands for is said on both sides."""
    for shape in _shapes():
        with torch.device("meta"), Undrawn():
            sizes = decoder_of(shape)._sizes
        filled: dict[str, Any] = {
            "rope_dim": shape.turned,
            "value_dim": shape.valued,
        }
        filled["activation"] = shape.activation or (
            "silu" if shape.gated else "gelu"
        )
        filled["expert_ffn"] = shape.expert_ffn or shape.ffn
        for size in fields(DecoderSizes):
            if size.name not in OF_THE_DECODER:
                wanted = filled.get(size.name, getattr(shape, size.name))
                assert getattr(sizes, size.name) == wanted, (
                    shape.name,
                    size.name,
                )


CHOICES = ("norm", "norms", "positions", "activation", "bias")


@pytest.mark.parametrize("name", CHOICES)
def test_both_allow_the_same_words(name: str) -> None:
    (key,) = (each for each in fields(Shape) if each.name == name)
    small = replace(SHAPES["gqa"], gated=True)
    plain = {"hidden": 32, "heads": 4}
    for word in key.metadata["choices"]:
        assert getattr(replace(small, **{name: word}), name) == word
        DecoderSizes(**plain, **{name: word})
    with pytest.raises(LayoutError):
        replace(small, **{name: "none of them"})
    with pytest.raises(ValueError, match=name):
        DecoderSizes(**plain, **{name: "none of them"})


def test_both_refuse_heads_that_keys_and_values_do_not_divide() -> None:
    with pytest.raises(LayoutError, match="kv_heads"):
        replace(SHAPES["gqa"], heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="kv_heads"):
        DecoderSizes(hidden=32, heads=4, kv_heads=3)
