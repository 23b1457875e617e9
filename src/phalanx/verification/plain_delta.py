"""The gated delta rule as plainly as possible, one token after another: the reference of
`verify` (Yang et al. 2024, "Gated Delta Networks", equation 10).

Letters in comments: B sequences, T tokens in each, H heads, K features of a key, V
features of a value. Weights have their names in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..layout import Shape

Weights = Mapping[str, Tensor]
# The linear layer of a name, applied to x; see `plain.linear`.
Linear = Callable[[str, Tensor], Tensor]
# The convolution and its activation are in 16 bits. The rule, its decays and its gate
# have 32.
NARROW = {
    "models/delta.py:DeltaCore.forward": "silu",
    "models/delta.py:GatedDelta.forward": "_to_copy",
    "models/delta.py:short_convolution": "add mul",
}
LENGTH_EPS = 1e-6  # added to the squared length of a query or a key


def delta_layer(
    shape: Shape,
    w: Weights,
    linear: Linear,
    x: Tensor,
    documents: Tensor | None,
) -> Tensor:
    """Project x (B, T, C), mix its tokens by the rule, and project back."""
    b, t, _ = x.shape
    heads, key_heads = shape.delta_heads, shape.delta_key_heads
    shared = heads // key_heads  # value heads for each key head
    q, k, v = (
        convolution(linear(f"attn.in_{n}", x), w[f"attn.taps_{n}"], documents)
        for n in "qkv"
    )
    q = normalized(q.view(b, t, key_heads, -1)).repeat_interleave(shared, 2)
    k = normalized(k.view(b, t, key_heads, -1)).repeat_interleave(shared, 2)
    v = v.view(b, t, heads, -1)
    strength = torch.sigmoid(linear("attn.in_b", x))  # (B, T, H)
    step = torch.log(1 + torch.exp(linear("attn.in_a", x) + w["attn.step"]))
    kept = torch.exp(-torch.exp(w["attn.decay"]) * step)
    q = q / shape.delta_key_dim**0.5
    y = delta_rule(q, k, v, kept, strength, documents)
    # each head's output, divided by its root mean square
    y = y / (y.pow(2).mean(-1, keepdim=True) + shape.eps).sqrt()
    y = y * w["attn.head_norm.weight"]
    gate = linear("attn.in_z", x).view(y.shape)
    y = y * gate / (1 + torch.exp(-gate))
    return linear("attn.out", y.flatten(2))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    strength: Tensor,
    documents: Tensor | None,
) -> Tensor:
    """The read of each token from the state S: q, k (B, T, H, K), v (B, T, H, V)."""
    state = torch.zeros(len(q), *k.shape[2:], v.shape[-1], dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        a = kept[:, t].unsqueeze(-1).unsqueeze(-1)
        b = strength[:, t].unsqueeze(-1)
        # a new document starts with an empty state
        if documents is not None and t:
            same = documents[:, t] == documents[:, t - 1]
            state = state * same.view(-1, 1, 1, 1)
        state = a * state
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        wrong = b * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], wrong)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def convolution(x: Tensor, taps: Tensor, documents: Tensor | None) -> Tensor:
    """silu of a sum over the last tokens of the same document, by each channel's taps.

    x is (B, T, channels), taps (channels, 1, width); the last tap is the token's own.
    """
    width = taps.shape[-1]
    outputs = []
    for t in range(x.shape[1]):
        total = x[:, t] * taps[:, 0, -1]
        for lag in range(1, min(width, t + 1)):
            term = x[:, t - lag] * taps[:, 0, -1 - lag]
            if documents is not None:
                # no document starts among these tokens
                run = documents[:, t - lag : t + 1]
                term = term * (run == run[:, :1]).all(1).unsqueeze(-1)
            total = total + term
        outputs.append(total / (1 + torch.exp(-total)))
    return torch.stack(outputs, 1)


def normalized(x: Tensor) -> Tensor:
    """x divided by its length over the last dim."""
    return x / (x.pow(2).sum(-1, keepdim=True) + LENGTH_EPS).sqrt()


def delta_start(
    name: str, size: torch.Size, generator: torch.Generator
) -> Tensor | None:
    """The initial value of a weight that only these layers have, or None."""
    last = name.rpartition(".attn.")[2]
    if last in ("step", "head_norm.weight"):
        return torch.ones(size)
    if last == "decay":  # rates from 0.01 to 16, as logarithms
        rates = torch.empty(size).uniform_(0.01, 16.0, generator=generator)
        return torch.log(rates)
    if last.startswith("taps_"):  # as torch's convolutions of so many taps
        spread = size[-1] ** -0.5
        return torch.empty(size).uniform_(-spread, spread, generator=generator)
    return None
