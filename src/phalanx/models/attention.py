"""Grouped-query attention with rotary positions; its core is a child that may be replaced.

Not here: sliding windows, a key-value cache, dropout of attention probabilities (a fused kernel
draws that from its own generator, so no two layouts would agree on it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .noise import Dropout
from .norm import RMSNorm


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of slow frequencies to a longer context than the first training's.

    Waves longer than `sequence / low` slow down by `factor`, those shorter than `sequence / high`
    stay, the ones between are blended.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    sequence: int = 8192

    def __call__(self, frequency: Tensor) -> Tensor:
        turns = self.sequence * frequency / (2 * math.pi)
        blend = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return frequency * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True)
class Rope:
    """The angles of rotary positions.

    Each block computes its own: a few small kernels, no state, no longest sequence, and right for
    any positions. A table would depend on the length and would be lost on the meta device.
    """

    theta: float
    scaling: RopeScaling | None = None

    def angles(self, positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (B, T, 1, head_dim / 2), of float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        half = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide) / head_dim
        frequency = self.theta**-half
        if self.scaling is not None:
            frequency = self.scaling(frequency)
        angle = (positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(-2)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` (B, T, heads, head_dim), its feature i turned together with feature i + head_dim / 2.

    Published weights in the Hugging Face form pair features so; Meta's own pair neighbours.
    """
    first, second = x.to(cos.dtype).chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


class Core(nn.Module):
    """softmax(q k' / sqrt(head_dim)) v, causal in the order of the time dim.

    Called `core(q, k, v, positions, documents)` with q (B, T, heads, head_dim) and k, v (B, T,
    kv_heads, head_dim), where kv_heads divides heads and each key head serves a run of neighbouring
    query heads; returns (B, T, heads, head_dim). With `documents` (B, T) a token attends only to
    its own document. `positions` (B, T) are not needed here, nor do they order the tokens: they
    begin again with each document.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        if grouped and documents is not None and q.is_cuda:
            # The memory-efficient CUDA kernel takes a mask but no groups; the fallback keeps scores.
            k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
            grouped = False
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = None if documents is None else self.mask(documents, q.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return y.transpose(1, 2)

    @staticmethod
    def mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, 1, T, T): 0 where a token may look, -inf elsewhere; no row is all -inf."""
        same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
        full = torch.full(same.shape, -math.inf, dtype=dtype, device=documents.device)
        return full.masked_fill(same.tril(), 0.0).unsqueeze(1)


class Attention(nn.Module):
    """Grouped-query attention: q, k, v, optional norms of q and k per head, rotation, core, wo.

    `heads` holds the index of each query head in the uncut model; cut it as wq's heads are cut.
    """

    heads: Tensor

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope | None = None,
        bias: str = "none",
        qk_norm: bool = False,
        dropout: float = 0.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.head_dim, self.rope, self._heads = head_dim, rope, heads
        qkv = bias != "none"
        self.wq = nn.Linear(hidden, heads * head_dim, bias=qkv)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=qkv)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=qkv)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=bias == "all")
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.core = Core()
        self.dropout = Dropout(dropout, place=0)
        self.register_buffer("heads", torch.arange(heads), persistent=False)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        per_head = (-1, self.head_dim)
        q: Tensor = self.wq(x).unflatten(-1, per_head)
        k: Tensor = self.wk(x).unflatten(-1, per_head)
        v: Tensor = self.wv(x).unflatten(-1, per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            cos, sin = self.rope.angles(positions, self.head_dim, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y: Tensor = self.core(q, k, v, positions, documents).flatten(2)
        if noise is not None:
            feature = torch.arange(self.head_dim, device=x.device)
            index = (self.heads.unsqueeze(-1) * self.head_dim + feature).flatten()
            y = self.dropout(y, noise, index)
        out: Tensor = self.wo(y)
        return out

    def reset_buffers(self) -> None:
        """Number the heads again, after `to_empty` has left them undefined."""
        torch.arange(self._heads, out=self.heads)
