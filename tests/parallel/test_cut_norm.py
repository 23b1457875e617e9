"""Norms over features that ranks of tp share, against the norm of all features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.models import RMSNorm
from phalanx.parallel.tensor import CutRMSNorm
from rounding import SINGLE, assert_rounded_once

ROWS, WIDTH, EPS = 300, 24, 1e-3


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, WIDTH), (WIDTH,), (ROWS, WIDTH)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).to(dtype) for shape in shapes
    )
    return x, weight, gradient


def on_a_rank(
    world: World, dtype: torch.dtype, copies: int, plus_one: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the result and of the gradients of x and the weight. `copies` neighbours have
    the same features, and each of them a share of the gradient of the result."""
    parts = world.size // copies
    here = slice(
        *(WIDTH // parts * (world.rank // copies + n) for n in (0, 1))
    )
    x, weight, gradient = (each[..., here].clone() for each in inputs(dtype))
    norm = RMSNorm(weight.numel(), EPS, plus_one=plus_one).to(dtype)
    norm.weight.data = weight
    cut = CutRMSNorm(
        norm, WIDTH, copies, world.split("tp", [range(world.size)])
    )
    x.requires_grad_()
    y = cut(x)
    y.backward(gradient / copies)
    assert x.grad is not None
    assert norm.weight.grad is not None
    return y.detach(), x.grad, norm.weight.grad


def whole(x: Tensor, weight: Tensor, plus_one: bool) -> Tensor:
    root = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return x / root * (weight + 1 if plus_one else weight)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (4, 2)])
def test_a_norm_over_ranks_is_the_norm_of_all_features(
    ranks: int, copies: int, plus_one: bool
) -> None:
    x, weight, gradient = (
        each.requires_grad_() for each in inputs(torch.float64)
    )
    exact = whole(x, weight, plus_one)
    into_x, into_weight = torch.autograd.grad(exact, (x, weight), gradient)
    seen = launch(
        on_a_rank, ranks, torch.float64, copies, plus_one, backend="threads"
    )
    for got, want in zip(
        zip(*seen, strict=True), (exact, into_x, into_weight), strict=True
    ):
        # Of the result each copy is whole; the gradients are sums over the copies.
        runs = [got[n : n + copies] for n in range(0, ranks, copies)]
        each = [
            run[0] if want is exact else torch.stack(run).sum(0)
            for run in runs
        ]
        torch.testing.assert_close(
            torch.cat(each, -1), want, rtol=1e-13, atol=1e-13
        )


@pytest.mark.parametrize("plus_one", [False, True])
def test_in_bfloat16_a_norm_over_ranks_is_summed_in_float32_and_rounded_once(
    plus_one: bool,
) -> None:
    x, weight, gradient = (
        each.double().requires_grad_() for each in inputs(torch.bfloat16)
    )
    exact = whole(x, weight, plus_one)
    into_x, into_weight = torch.autograd.grad(exact, (x, weight), gradient)
    seen = launch(on_a_rank, 2, torch.bfloat16, 1, plus_one, backend="threads")
    y, dx, dweight = (
        torch.cat(parts, -1) for parts in zip(*seen, strict=True)
    )
    x, weight, gradient, exact = (
        each.detach() for each in (x, weight, gradient, exact)
    )
    # So many float32 roundings come before that to bfloat16: of squares, their sums, a root, products.
    assert_rounded_once(y, exact, 10 * SINGLE * exact.abs())
    root = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    normed = (x / root).abs()
    assert_rounded_once(
        dweight, into_weight, 10 * SINGLE * (gradient.abs() * normed).sum(0)
    )
    inside = gradient.abs() * (weight + 1 if plus_one else weight).abs()
    along = (inside * normed).mean(-1, keepdim=True)
    assert_rounded_once(
        dx, into_x, 20 * SINGLE * (inside + normed * along) / root
    )
