"""Products of blocks in another dtype than the model's: an object in `Precision`, and no other change.

One multiplies in float32 inside a float64 model, one rounds its factors to float8 with a scale of
their own, as float8 training does. Judged by a plain model on one process whose linears are written
out in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.models import Decoder
from phalanx.parallel import Precision, build_model, microbatches, start
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import Sgd
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

Multiply = Callable[[Tensor, Tensor], Tensor]  # (m, k), (k, n) -> (m, n)
GQA, ROWS = SHAPES["gqa"], 24


def batch() -> dict[str, Tensor]:
    return {name: x[:ROWS] for name, x in batch_of(GQA, 0).items()}


def narrow(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def float8(a: Tensor, b: Tensor) -> Tensor:
    """Factors rounded to e4m3, each scaled so that its largest number is the format's."""

    def rounded(x: Tensor) -> Tensor:
        scale = 448.0 / x.abs().max().clamp(min=1e-12)
        return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale

    return rounded(a) @ rounded(b)


@dataclass(frozen=True)
class Products:
    """The three products of a linear by one function."""

    multiply: Multiply

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.multiply(x.flatten(0, -2), weight.mT).view(
            *x.shape[:-1], -1
        )

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return self.forward(gradient, weight.mT)

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        return self.multiply(gradient.flatten(0, -2).mT, x.flatten(0, -2))


def trained(
    world: World, layout: Layout, multiply: Multiply
) -> dict[str, Tensor]:
    """The gradients of one step, as momentum's first update shows them."""
    model = build_model(GQA)
    program = program_of(model, layout)
    precision = Precision(*(torch.float64,) * 3, matmul=Products(multiply))
    local = build_local(world, layout, model, program, precision=precision)
    executor = Executor(local, program, world.rank, Sgd())
    own = microbatches(batch(), layout, local.coordinates["dp"])
    executor.step(own, 1.0)
    weights = {}
    for unit in local.units.values():
        unit.gather().wait()
        weights |= {
            name: p.detach().clone() for name, p in unit.parameters.items()
        }
    world.clear()
    return {
        name: start(model, name, 0, torch.float64) - w
        for name, w in weights.items()
    }


def one_process(multiply: Multiply, rows: int) -> dict[str, Tensor]:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return multiply(x.flatten(0, 1), weight.T).view(*x.shape[:2], -1)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            into = multiply(g.flatten(0, 1), weight).view(x.shape)
            return into, multiply(g.flatten(0, 1).T, x.flatten(0, 1))

    model = Decoder(
        vocab=GQA.vocab, hidden=GQA.hidden, layers=GQA.layers, heads=GQA.heads,
        kv_heads=GQA.kv_heads, ffn=GQA.ffn, sequence=GQA.sequence, eps=GQA.eps,
    ).double()  # fmt: skip
    for module in model.layers.modules():
        if isinstance(module, nn.Linear):
            own: Any = module
            own.forward = lambda x, m=own: Product.apply(x, m.weight)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start(build_model(GQA), name, 0, torch.float64))
    count = int((batch()["targets"] != -100).sum())
    for begin in range(0, ROWS, rows):
        part = {name: x[begin : begin + rows] for name, x in batch().items()}
        (model(**part) / count).backward()
    return {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("multiply", [narrow, float8])
@pytest.mark.parametrize(
    "text", ["", "dp2 zero3", "pp2 zb-h1:2", "recompute:selective accum:2"]
)
def test_products_of_another_kind_give_the_gradients_of_plain_torch(
    text: str, multiply: Multiply
) -> None:
    layout = Layout.parse(text)
    want = one_process(multiply, ROWS // (layout.dp * layout.microbatches))
    exact = one_process(torch.mm, ROWS)
    got: dict[str, Tensor] = {}
    for rank in launch(
        trained, layout.ranks, layout, multiply, backend="threads"
    ):
        got |= rank
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        apart = float((gradient - exact[name]).abs().max())
        # The choice shows.
        assert apart > 1e-9 * float(gradient.abs().max()), name
        assert float((got[name] - gradient).abs().max()) < 0.02 * apart, name


def test_a_forward_alone_multiplies_so_too() -> None:
    calls = []

    def counting(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a.shape)
        return narrow(a, b)

    x, w = (
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(5, 4, dtype=torch.float64),
    )
    torch.testing.assert_close(
        counting(x, w.T), F.linear(x, w), rtol=1e-5, atol=1e-6
    )
    launch(trained, 1, Layout(), counting, backend="threads")
    linears = 7 * GQA.layers
    # Forward, input's gradient, weight's gradient.
    assert len(calls) == 1 + 3 * linears
