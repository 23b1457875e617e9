"""Shapes with delta layers: mistakes, and layouts that they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.layout import Layout, Shape
from phalanx.layout.cases import SHAPES
from phalanx.layout.legal import legal
from phalanx.layout.mixers import absent_sizes
from phalanx.layout.shape import ShapeError

DELTA = SHAPES["delta"]
UNUSED = dict(absent_sizes(())) | {"mixers": ()}


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"mixers": ("delta", "mamba")}, "mixers names 'mamba'. Write attention or delta"),
        ({"mixers": ("delta",) * 5}, "mixers has 5 words for 4 blocks"),
        ({"mixers": ()}, "delta_heads without a delta layer"),
        ({"mixers": (), "delta_heads": 0}, "delta_key_heads without a delta layer"),
        (UNUSED | {"delta_chunk": 8}, "delta_chunk without a delta layer"),
        ({"kind": "mlp"}, "mixers in an MLP"),
        (UNUSED | {"kind": "mlp", "mixers": ("attention",)}, "mixers in an MLP"),
        ({"delta_heads": 0}, "delta_heads is missing"),
        ({"delta_key_heads": 3}, "delta_key_heads = 3 does not divide delta_heads = 8"),
        ({"shared_experts": 0}, "shared_gate without shared_experts"),
        ({"rope_dim": 6}, "rope turns rope_dim = 6 of head_dim = 4"),
        ({"rope_dim": 3}, "rope_dim = 3 is odd"),
        ({"rope_dim": 0, "head_dim": 5}, "head_dim = 5 is odd"),
        ({"positions": "learned"}, "rope turns rope_dim = 2 .*positions = 'rope'"),
    ],
)  # fmt: skip
def test_sizes_that_no_delta_layer_has_are_named(
    changed: dict[str, object], says: str
) -> None:
    with pytest.raises(ShapeError, match=says):
        replace(DELTA, **changed)  # type: ignore[arg-type]


def test_latent_attention_has_no_gate() -> None:
    with pytest.raises(ShapeError, match="output_gate beside latent"):
        replace(SHAPES["latent"], output_gate=True)


@pytest.mark.parametrize(
    "shape, layout, says",
    [
        (replace(DELTA, delta_key_heads=2), "tp4", "tp=4 does not divide delta_key_heads=2"),
        (DELTA, "dp2 fp8", "does not support delta layers"),
        (DELTA, "dp2 compile", "compile has not been compared in blocks with delta layers"),
        (DELTA, "cp2 exact:1x2", "exact:1x2 does not fix the order of sums of states"),
        (replace(SHAPES["gqa"], output_gate=True), "cp2 exact:1x2",
         "exact:1x2 does not cover output_gate yet"),
        (replace(DELTA, delta_key_heads=2), "exact:4", "exact:4 does not divide delta_key_heads=2"),
    ],
)  # fmt: skip
def test_layouts_without_delta_layers_are_refused(
    shape: Shape, layout: str, says: str
) -> None:
    found = legal(Layout.parse(layout), shape, batch=24)
    assert any(says in each.what for each in found)


def test_ulysses_divides_heads_of_attention_alone() -> None:
    layout = Layout.parse("cp2:ulysses")
    hybrid = replace(DELTA, heads=3, kv_heads=3)
    assert [each.rule for each in legal(layout, hybrid)] == ["ulysses"]
    assert legal(layout, replace(hybrid, mixers=("delta",))) == ()


def test_blocks_repeat_the_mixers() -> None:
    rows = [DELTA.mixer(piece) for piece in range(6)]
    assert [row and row.name for row in rows] == [
        None, "delta", "delta", "attention", "delta", None,
    ]  # fmt: skip
