"""What the modules of a model compute in float32 though activations and weights are bfloat16.

Each result must be the exact one, in float64 from the same bfloat16 inputs, rounded once. The slack of a
comparison counts the float32 roundings before that.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.models import Attention, DecoderSizes, ExpertMlps, RMSNorm, Router
from phalanx.models.attention import LatentAttention
from phalanx.models.rope import Rope, rotate
from rounding import SINGLE, assert_rounded_once

HIDDEN, EXPERTS, TOP = 64, 6, 3
THETA = 5e5  # Llama 3's
# bfloat16 has eight digits: it tells no position beyond 256 from its neighbours.
POSITIONS = torch.tensor(
    [0, 1, 3, 200, 255, 257, 1001, 1023, 2047, 4097, 6001, 8191]
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed)
    ).bfloat16()


# ---- rope


def exact_angles(positions: Tensor, size: int) -> Tensor:
    """Su et al. 2021, equation 15: (..., size / 2)."""
    half = torch.arange(size // 2, dtype=torch.float64)
    return positions.double().unsqueeze(-1) * THETA ** (-2 * half / size)


def angle_error(angles: Tensor) -> Tensor:
    """In float32 an exponent is rounded, which the power multiplies by log(theta); then the power, its
    product with the position, and the cosine."""
    return (math.log(THETA) + 3) * SINGLE * angles + 2 * SINGLE


def exactly_turned(
    x: Tensor, angles: Tensor, pairs: str
) -> tuple[Tensor, Tensor]:
    """x (..., size) turned in float64, in halves, and how far float32 angles may be off."""
    wide = x.double()
    halves = (
        wide.chunk(2, -1)
        if pairs == "halves"
        else (wide[..., ::2], wide[..., 1::2])
    )
    z = torch.complex(*halves) * torch.polar(torch.ones_like(angles), angles)
    # Two products and their sum.
    slack = (angle_error(angles) + 3 * SINGLE) * sum(
        half.abs() for half in halves
    )
    return torch.cat((z.real, z.imag), -1), torch.cat((slack, slack), -1)


def test_angles_of_16_bit_activations_are_those_of_float32_far_into_a_context() -> (
    None
):
    size = 128
    cos, sin = Rope(THETA).angles(POSITIONS.unsqueeze(0), size, torch.bfloat16)
    angles = exact_angles(POSITIONS.unsqueeze(0), size).unsqueeze(-2)
    for got, *halves in (
        (cos, angles.cos(), angles.cos()),
        (sin, -angles.sin(), angles.sin()),
    ):
        assert got.dtype == torch.float32
        assert got.shape == (1, len(POSITIONS), 1, size)
        for half, exact in zip(got.chunk(2, -1), halves, strict=True):
            assert bool(
                ((half.double() - exact).abs() <= angle_error(angles)).all()
            )


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_16_bit_vector_is_turned_in_float32_and_rounded_once(
    pairs: str,
) -> None:
    size = 32
    x, positions = random(1, len(POSITIONS), 3, size), POSITIONS.unsqueeze(0)
    got = rotate(x, *Rope(THETA).angles(positions, size, x.dtype), pairs)
    exact, slack = exactly_turned(
        x, exact_angles(positions, size).unsqueeze(-2), pairs
    )
    assert got.dtype == torch.bfloat16
    assert_rounded_once(got, exact, slack)


@pytest.mark.parametrize("latent", [False, True])
def test_queries_and_keys_of_a_16_bit_model_are_turned_by_exact_angles(
    latent: bool,
) -> None:
    size = 16
    sizes = DecoderSizes(
        hidden=HIDDEN, heads=2, head_dim=2 * size if latent else size, rope_theta=THETA,
        kv_latent=8 if latent else 0, rope_dim=size if latent else 0,
    )  # fmt: skip
    torch.manual_seed(0)
    attention = (
        LatentAttention(sizes) if latent else Attention(sizes)
    ).bfloat16()
    x, positions = random(1, len(POSITIONS), HIDDEN), POSITIONS.unsqueeze(0)
    with torch.no_grad():
        q, k, _ = attention.projected(x, positions)
        plain_q = attention.wq(x).unflatten(-1, (2, -1))
        if latent:
            plain_k = (
                attention.wkv_a(x)[..., 8:].unsqueeze(2).expand(-1, -1, 2, -1)
            )
        else:
            plain_k = attention.wk(x).unflatten(-1, (2, -1))
    angles = exact_angles(positions, size).unsqueeze(-2)
    for got, plain in ((q, plain_q), (k, plain_k)):
        exact, slack = exactly_turned(plain[..., -size:], angles, "halves")
        assert_rounded_once(got[..., -size:], exact, slack)


# ---- norms


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_and_its_gradients_are_rounded_once(plus_one: bool) -> None:
    rows, width, eps = 512, 96, 1e-6
    x, weight = random(rows, width), random(width, seed=1)
    gradient = random(rows, width, seed=2)
    norm = RMSNorm(width, eps, plus_one=plus_one).bfloat16()
    norm.weight.data = weight.clone()
    narrow = x.clone().requires_grad_()
    y = norm(narrow)
    y.backward(gradient)

    wide, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    root = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    exact = wide / root * (scale + 1 if plus_one else scale)
    exact.backward(gradient.double())
    assert narrow.grad is not None
    assert norm.weight.grad is not None
    # A sum over the features (pairwise, so its error does not grow with them), a root and products.
    assert_rounded_once(y, exact.detach(), 10 * SINGLE * exact.detach().abs())
    terms = gradient.double().abs() * (wide / root).detach().abs()
    assert wide.grad is not None
    assert scale.grad is not None
    assert_rounded_once(
        norm.weight.grad, scale.grad, 10 * SINGLE * terms.sum(0)
    )
    factor = (scale + 1 if plus_one else scale).detach().abs()
    inside = gradient.double().abs() * factor
    along = (inside * (wide / root).detach().abs()).mean(-1, keepdim=True)
    size = (inside + (wide / root).detach().abs() * along) / root.detach()
    assert_rounded_once(narrow.grad, wide.grad, 20 * SINGLE * size)


# ---- experts


def test_scores_of_a_router_have_the_digits_of_float32() -> None:
    sizes = DecoderSizes(hidden=HIDDEN, experts=EXPERTS, top_k=TOP, bias="all")
    router = Router(sizes).bfloat16()
    x = random(2, 7, HIDDEN)
    with torch.no_grad():
        router.weight.copy_(random(EXPERTS, HIDDEN, seed=1))
        assert router.logit_bias is not None
        router.logit_bias.copy_(random(EXPERTS, seed=2))
    wide = x.double()
    weight, bias = (
        router.weight.detach().double(),
        router.logit_bias.detach().double(),
    )
    exact = wide @ weight.T + bias
    size = wide.abs() @ weight.abs().T + bias.abs()
    got = router.logits(x)
    assert got.dtype == torch.float32
    assert bool(
        ((got.double() - exact).abs() <= (HIDDEN + 1) * SINGLE * size).all()
    )
    # Nor are there fewer digits on the way from scores to gates.
    gates, chosen, _ = router(x)
    best = exact.softmax(-1).gather(-1, chosen)
    best = best / best.sum(-1, keepdim=True)
    error = 2 * (HIDDEN + 1) * SINGLE * size.max(-1, keepdim=True).values
    assert bool(((gates.double() - best).abs() <= error * best).all())


def test_gradients_of_a_router_are_rounded_once() -> None:
    sizes = DecoderSizes(hidden=HIDDEN, experts=EXPERTS, top_k=TOP)
    router = Router(sizes).bfloat16()
    with torch.no_grad():
        router.weight.copy_(random(EXPERTS, HIDDEN, seed=1))
    x = random(8, 64, HIDDEN).requires_grad_()
    gradient = torch.randn(
        8, 64, EXPERTS, generator=torch.Generator().manual_seed(3)
    )
    router.logits(x).backward(gradient)
    wide, weight = (
        gradient.double().flatten(0, 1),
        router.weight.detach().double(),
    )
    tokens = x.detach().double().flatten(0, 1)
    assert x.grad is not None
    assert router.weight.grad is not None
    into_x, size = wide @ weight, wide.abs() @ weight.abs()
    assert_rounded_once(x.grad.flatten(0, 1), into_x, EXPERTS * SINGLE * size)
    into_weight, size = wide.T @ tokens, wide.abs().T @ tokens.abs()
    assert_rounded_once(
        router.weight.grad, into_weight, len(tokens) * SINGLE * size
    )


def test_results_of_experts_are_merged_in_float32_and_rounded_once() -> None:
    sizes = DecoderSizes(
        hidden=HIDDEN, expert_ffn=8, experts=EXPERTS, top_k=TOP
    )
    merge = ExpertMlps(sizes).merge
    tokens = 40
    y = random(tokens * TOP, HIDDEN).requires_grad_()
    gates = torch.rand(
        1, tokens, TOP, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    order = torch.randperm(
        tokens * TOP, generator=torch.Generator().manual_seed(2)
    )
    aim = random(1, tokens, HIDDEN, seed=3)
    got = merge(y, gates, order)
    got.backward(aim)

    # Row i of y is the result of choice `order[i]`, which counts choices token by token.
    each = torch.empty(tokens * TOP, HIDDEN, dtype=torch.float64)
    each[order] = y.detach().double()
    each = each.view(1, tokens, TOP, HIDDEN)
    wide, out = (
        gates.detach().double().unsqueeze(-1),
        aim.double().unsqueeze(2),
    )
    assert_rounded_once(
        got.detach(),
        (each * wide).sum(2),
        TOP * SINGLE * (each * wide).abs().sum(2),
    )
    assert y.grad is not None
    assert gates.grad is not None
    into_y = (out * wide).view(-1, HIDDEN)[order]
    assert_rounded_once(y.grad, into_y, 2 * SINGLE * into_y.abs())
    into_gates, size = (each * out).sum(-1), (each * out).abs().sum(-1)
    assert bool(
        (
            (gates.grad.double() - into_gates).abs() <= HIDDEN * SINGLE * size
        ).all()
    )
