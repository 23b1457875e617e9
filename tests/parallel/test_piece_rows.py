"""The rows of a model's pieces are the same, whether a shape says them or the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from phalanx.comm import TallyWorld
from phalanx.layout import Layout, Shape, legal
from phalanx.models.routed import CHOICES
from phalanx.parallel import build_model
from phalanx.parallel.local import build_local
from phalanx.parallel.rows import model_pieces
from phalanx.training.program import program_of
from phalanx.verification import SHAPES
from piece_rows import same_rows


def _few_blocks(shape: Shape) -> Shape:
    """The shape with as few blocks as have every kind of block."""
    layers = shape.dense_layers + 2 * max(1, len(shape.windows))
    return replace(shape, layers=min(shape.layers, layers))


@pytest.mark.parametrize("name", Shape.names())
def test_the_rows_of_every_built_in_size_are_those_of_its_model(
    name: str,
) -> None:
    assert same_rows(_few_blocks(Shape.load(name))) >= 4


@pytest.mark.parametrize("text", ["", "tp2 seq", "ep2"])
@pytest.mark.parametrize("name", ["gqa", "experts", "latent"])
def test_a_piece_takes_and_gives_what_its_row_says(
    name: str, text: str
) -> None:
    """The pieces of a rank, called one after the other on meta tensors as a step calls them."""
    shape, layout = SHAPES[name], Layout.parse(text)
    if legal(layout, shape):
        pytest.skip("ep needs experts")
    model = build_model(shape)
    program = program_of(model, layout)
    rows = model_pieces(model, layout).rows
    world = TallyWorld(0, layout.ranks)
    held = build_local(world, layout, model, program)
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    batch = held.complete(
        dict.fromkeys(("tokens", "targets", "positions"), ids)
    )
    bundle: dict[str, torch.Tensor] = {}
    for number, row in enumerate(rows):
        if "counts" in bundle:
            # As many tokens come as go, to one expert of each rank.
            del bundle["counts"]
            bundle["routes"] = torch.empty(
                layout.ep, 1, dtype=torch.long, device="meta"
            )
        assert {*row.takes} <= {*bundle}
        beside = {
            key: value for key, value in bundle.items() if key not in row.takes
        }
        out = held.pieces[number].forward(0, dict(bundle), batch, keep=False)
        out.pop(CHOICES, None)  # these go to no piece: ranks add them up
        last = number == len(rows) - 1
        assert {*out} == ({*beside, *row.gives} if not last else {"x"})
        bundle = out
    world.clear()


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
