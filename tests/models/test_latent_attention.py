"""Latent attention against the formulas of DeepSeek-V2 (2024, section 2.1) with all scores, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models import DecoderSizes
from phalanx.models.attention import LatentAttention

ROWS, TIME, HIDDEN, HEADS, KEY, TURNED, LATENT = 2, 9, 10, 3, 6, 4, 5
THETA = 50.0
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [2] * 9])


def made(value: int, window: int = 0, **more: Any) -> LatentAttention:
    sizes = DecoderSizes(
        hidden=HIDDEN, heads=HEADS, head_dim=KEY, rope_dim=TURNED, kv_latent=LATENT,
        value_dim=value, rope_theta=THETA, **more,
    )  # fmt: skip
    torch.manual_seed(value)
    attention = LatentAttention(sizes, window).double()
    for weight in attention.parameters():
        torch.nn.init.normal_(weight)
    return attention


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """The published models have 1e-6 in the norms of latents, whatever `rms_norm_eps` is."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Features i and i + TURNED / 2 of x (rows, time, heads, TURNED) as one complex number."""
    half = TURNED // 2
    rates = THETA ** (-2 * torch.arange(half, dtype=torch.float64) / TURNED)
    angles = (positions.double().unsqueeze(-1) * rates).unsqueeze(2)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((z.real, z.imag), -1)


def by_formula(
    weights: dict[str, Tensor],
    x: Tensor,
    positions: Tensor,
    documents: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    scalar: float = KEY,
) -> Tensor:
    """Scores of all pairs; `weights` by the module's names."""
    if "wq.weight" in weights:
        q = x @ weights["wq.weight"].T
    else:
        latent = normed(
            x @ weights["wq_a.weight"].T, weights["q_a_norm.weight"]
        )
        q = latent @ weights["wq_b.weight"].T
    q = q.view(ROWS, TIME, HEADS, KEY)
    down = x @ weights["wkv_a.weight"].T
    latent, shared = down[..., :LATENT], down[..., LATENT:].unsqueeze(2)
    up = (
        normed(latent, weights["kv_a_norm.weight"]) @ weights["wkv_b.weight"].T
    )
    up = up.view(ROWS, TIME, HEADS, -1)
    plain = KEY - TURNED
    k, v = up[..., :plain], up[..., plain:]
    q = torch.cat((q[..., :plain], turned(q[..., plain:], positions)), -1)
    k = torch.cat((k, turned(shared, positions).expand(-1, -1, HEADS, -1)), -1)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(scalar)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    apart = torch.arange(TIME).unsqueeze(1) - torch.arange(TIME)
    sees = ((apart >= 0) & (apart < (window or TIME))).expand(ROWS, -1, -1)
    if documents is not None:
        sees = sees & (documents.unsqueeze(2) == documents.unsqueeze(1))
    shares = scores.masked_fill(~sees.unsqueeze(1), -math.inf).softmax(-1)
    y = torch.einsum("bhts,bshd->bthd", shares, v).flatten(2)
    return y @ weights["wo.weight"].T


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "queries of latents": {"q_latent": 7},
    "scaled scores": {"query_scalar": 11.0},
    "soft caps": {"softcap": 0.8},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [3, KEY, 11])
def test_values_narrower_as_wide_and_wider_than_keys_are_those_of_all_scores(
    value: int, case: str, window: int, packed: bool
) -> None:
    more = CASES[case]
    attention = made(value, window, **more)
    positions = torch.arange(TIME).expand(ROWS, -1)
    documents = DOCUMENTS if packed else None
    # So small that the norms' eps is a good part of the latents' mean square.
    x = (
        1e-3 * torch.randn(ROWS, TIME, HIDDEN, dtype=torch.float64)
    ).requires_grad_()
    weights = dict(attention.named_parameters())
    got = attention(x, positions, documents)
    scalar, softcap = more.get("query_scalar", KEY), more.get("softcap", 0.0)
    want = by_formula(
        weights, x, positions, documents, window, softcap, scalar
    )
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    aim = torch.randn_like(got)
    inputs = (x, *weights.values())
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs, aim),
        torch.autograd.grad(want, inputs, aim),
        strict=True,
    ):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max())
        )
