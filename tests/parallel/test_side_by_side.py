"""Linear layers of one input are one node of autograd's graph, with the bits of separate nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm.alone import AloneWorld
from phalanx.layout import Layout, Rules, plain_pieces
from phalanx.models import Decoder, adapt
from phalanx.models.side_by_side import SideBySide
from phalanx.parallel import Model
from phalanx.parallel.local import build_local
from phalanx.parallel.pieces import Piece
from phalanx.program import StepOptions, build

ROWS, WIDTH = 7, 6


class Three(SideBySide):
    """Three layers on one input, as attention's projections are."""

    side_by_side = ("a", "b", "c")
    only_reader = True

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 5)
        self.b = nn.Linear(WIDTH, 5, bias=False)
        self.c = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, **shared: Tensor | None) -> Tensor:
        a, b, c = self.products(x)
        return a.tanh() * b + c


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def piece_of(module: nn.Module, words: str = "accum:2") -> Piece:
    """The piece of a module in the middle, with its gradients open."""
    layout = Layout.parse(words)
    named = tuple(
        (f"p{number}", each)
        for number, each in enumerate((nn.Identity(), module, Last()))
    )
    rules = Rules.parse("*.weight : - -\n*.bias : -")
    model = Model(named, rules, draw=lambda name, weight, generator: None)
    stages = plain_pieces((range(3),), tied=model.tied)
    program = build(layout, stages, StepOptions(agree=False))
    piece = build_local(AloneWorld(), layout, model, program).pieces[1]
    (unit,) = piece.units
    for weight in unit.parameters.values():
        weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(3))
    return piece


def by_autograd(
    piece: Piece, x: Tensor, gradient: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of plain layers with the weights of a piece."""
    plain = Three()
    own = {name: p.detach() for name, p in piece.module.named_parameters()}
    plain.load_state_dict(own)
    plain.to(x.dtype)
    leaf = x.clone().requires_grad_()
    plain(leaf).backward(gradient)
    assert leaf.grad is not None
    found: Any = {name: p.grad for name, p in plain.named_parameters()}
    return leaf.grad, found


def nodes(root: Any) -> Iterator[str]:
    """The names of the nodes of a graph."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node.name()
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)


def products_of(piece: Piece, x: Tensor) -> list[str]:
    y = piece.module(x.requires_grad_())
    return [name for name in nodes(y.grad_fn) if "Product" in name]


@pytest.mark.parametrize("splits", [False, True])
def test_gradients_are_those_of_separate_layers(splits: bool) -> None:
    piece = piece_of(Three())
    piece.splits = splits
    x, gradient = torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, 5)
    expected, weights = by_autograd(piece, x, gradient)
    piece.forward(0, {"x": x}, {}, keep=True)
    if splits:
        found = piece.input_gradient(0, {"x": gradient})["x"]
        assert len(piece.kept[0].pending) == 3
        piece.weight_gradient(0)
    else:
        found = piece.backward(0, {"x": gradient})["x"]
    # Three terms: another order of the sum has other bits.
    assert torch.equal(found, expected)
    own = {name: p.grad for name, p in piece.module.named_parameters()}
    torch.testing.assert_close(own, weights)
    assert len(products_of(piece, x)) == 1


def test_a_hook_sees_the_call_of_its_layer() -> None:
    module = Three()
    piece = piece_of(module)
    seen: list[Tensor] = []
    module.b.register_forward_hook(lambda m, args, y: seen.append(y))
    x, gradient = torch.randn(2, ROWS, WIDTH), torch.randn(2, ROWS, 5)
    expected, _ = by_autograd(piece, x, gradient)
    piece.forward(0, {"x": x}, {}, keep=True)
    assert len(seen) == 1
    assert torch.equal(piece.backward(0, {"x": gradient})["x"], expected)


def test_blocks_know_where_others_read_the_input() -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 12, "vocab": 11}

    def readers(**more: Any) -> list[bool]:
        modules = Decoder(**sizes, **more).layers[0].modules()
        return [m.only_reader for m in modules if isinstance(m, SideBySide)]

    assert readers() == [True, True]
    assert readers(norms="post") == [False, False]
    assert readers(output_gate=True) == [False, True]
    # A router reads what shared experts read.
    routed = readers(experts=2, top_k=1, shared_experts=1)
    assert routed == [True, False]


def test_layers_that_are_not_plain_keep_separate_products() -> None:
    x = torch.randn(2, ROWS, WIDTH)
    # `exact` exchanges single products, and an adapter adds to one of them.
    assert len(products_of(piece_of(Three(), "accum:2 exact"), x)) == 3
    # With another reader, the sum of the input's gradient would have another order.
    read_elsewhere = Three()
    read_elsewhere.only_reader = False
    assert len(products_of(piece_of(read_elsewhere), x)) == 3
    adapted = Three()
    adapt(adapted.b, "lora", 2, alpha=1.0)
    assert len(products_of(piece_of(adapted), x)) == 5
