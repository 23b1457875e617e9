"""Attention with windows and soft caps: which keys a query sees is a mask, (rows, keys) for each sequence.

Plain attention, also within documents, makes no masks and is elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def visible_pairs(times: Tensor, its_times: Tensor, window: int) -> Tensor:
    """(1, rows, keys): a token sees itself and those before it, with a window its last `window`.

    `times` (rows) and `its_times` (keys) say where queries and keys stand in their sequence.
    """
    apart = times.unsqueeze(-1) - its_times
    sees = apart >= 0
    return (sees & (apart < window) if window else sees).unsqueeze(0)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, softcap: float) -> Tensor:
    """Like q (B, rows, heads, size); k and v (B, keys, kv_heads, size); `sees` (B or 1, rows, keys).

    With a `softcap` c a score s is c tanh(s / c). No fused kernel of torch computes that: scores
    (B, heads, rows, keys) are kept for backward.
    """
    groups = q.shape[2] // k.shape[2]
    if groups > 1:  # kernels that take a mask take no groups
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    full = torch.full(sees.shape, -math.inf, dtype=q.dtype, device=q.device)
    mask = full.masked_fill(sees, 0.0).unsqueeze(1)
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    scores = softcap * torch.tanh((q * q.shape[-1] ** -0.5) @ k.mT / softcap) + mask
    wide = torch.promote_types(q.dtype, torch.float32)
    y: Tensor = scores.softmax(-1, dtype=wide).to(q.dtype) @ v
    return y.transpose(1, 2)
