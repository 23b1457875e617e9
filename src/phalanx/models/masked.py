"""Attention with windows and soft caps: which keys a query sees is a mask, (rows, keys) for each sequence.

Plain attention, also within documents, makes no masks and is elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kernels import attention


def visible_pairs(times: Tensor, its_times: Tensor, window: int) -> Tensor:
    """(1, rows, keys): a token sees itself and those before it, with a window its last `window`.

    `times` (rows) and `its_times` (keys) say where queries and keys stand in their sequence.
    """
    apart = times.unsqueeze(-1) - its_times
    sees = apart >= 0
    return (sees & (apart < window) if window else sees).unsqueeze(0)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Like q (B, rows, heads, size); k and v (B, keys, kv_heads, size); `sees` (B or 1, rows, keys).

    With a `softcap` c a score s is c tanh(s / c). No fused kernel of torch computes that: scores
    (B, heads, rows, keys) are kept for backward.
    """
    # Kernels on a GPU want rows of 16 bytes.
    room = q.new_full((*sees.shape[:-1], -(-sees.shape[-1] // 8) * 8), -math.inf)
    mask = room[..., : sees.shape[-1]].masked_fill_(sees, 0.0)
    if not softcap:
        return attention(q, k, v, mask=mask, sinks=sinks)
    groups, keys = q.shape[2] // k.shape[2], k.shape[1]
    k, v = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    scores = softcap * torch.tanh((q * q.shape[-1] ** -0.5) @ k.mT / softcap) + mask.unsqueeze(1)
    if sinks is not None:
        column = sinks.to(q.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    y: Tensor = scores.softmax(-1, dtype=wide)[..., :keys].to(q.dtype) @ v
    return y.transpose(1, 2)
