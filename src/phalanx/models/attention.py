"""Grouped-query attention with rotary positions; its core is a child that may be replaced.

Not here: a key-value cache, dropout of attention probabilities (a fused kernel
draws that from its own generator, so no two layouts would agree on it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import HALVES, within_documents
from .masked import masked_attention, visible_pairs
from .noise import Dropout
from .norm import norm_of


@dataclass(frozen=True)
class RopeScaling:
    """A stretch of rope's frequencies to a longer context than the first training's, `sequence`.

    `llama3`: waves longer than `sequence / low` slow down by `factor`, those shorter than
    `sequence / high` stay, the ones between are blended. `yarn` (Peng et al. 2023) blends by the
    frequency's index instead, and multiplies cosine and sine by `attention`. `linear` slows down
    all. `dynamic` raises theta as far as the trained length, `longest`, asks for.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    sequence: int = 8192
    kind: str = "llama3"
    attention: float = 1.0
    longest: int = 0

    def __call__(self, theta: float, half: Tensor) -> Tensor:
        """The frequencies, where `half` (head_dim / 2) is 0, 2/head_dim, 4/head_dim, ..."""
        dim = 2 * half.shape[0]
        if self.kind == "dynamic":
            grown = self.factor * max(self.longest, self.sequence) / self.sequence - self.factor + 1
            theta *= grown ** (dim / (dim - 2))
        frequency: Tensor = theta**-half
        if self.kind == "dynamic":
            return frequency
        if self.kind == "linear":
            return frequency / self.factor
        if self.kind == "yarn":
            # The indices at which a wave turns `high` and `low` times within the sequence.
            first, last = (
                dim * math.log(self.sequence / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (self.high, self.low)
            )
            start, stop = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
            index = torch.arange(dim // 2, device=half.device, dtype=half.dtype)
            blend = 1 - ((index - start) / ((stop - start) or 0.001)).clamp(0.0, 1.0)
        else:
            turned = self.sequence * frequency / (2 * math.pi)
            blend = ((turned - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
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
        frequency = self.scaling(self.theta, half) if self.scaling else self.theta**-half
        angle = (positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(-2)
        if self.scaling is not None and self.scaling.attention != 1:
            return angle.cos() * self.scaling.attention, angle.sin() * self.scaling.attention
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
    query heads; returns (B, T, heads, head_dim). With `documents` (B, T), on the host, a token
    attends only to its own run of equal numbers, with a `window` only to itself and the window - 1
    tokens before it. `positions` (B, T) are not needed here, nor do they order the tokens: they begin
    again with each document.

    With a `softcap` c a score s is c tanh(s / c).
    """

    def __init__(self, window: int = 0, softcap: float = 0.0) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        if self.softcap or 0 < self.window < q.shape[1]:
            times = torch.arange(q.shape[1], device=q.device)
            sees = visible_pairs(times, times, self.window)
            if documents is not None:
                sees = sees & (documents.unsqueeze(-1) == documents.unsqueeze(-2)).to(q.device)
            return masked_attention(q, k, v, sees, self.softcap)
        # On meta nobody knows where documents end; what is counted there is counted without them.
        if documents is not None and not q.is_meta:
            return within_documents(q, k, v, documents)
        grouped = q.shape[2] != k.shape[2]
        if grouped and q.dtype not in HALVES and q.device.type not in ("cpu", "meta"):
            # A GPU's kernel for 32 bits takes no groups, and what takes its place keeps all scores.
            k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], 2) for each in (k, v))
            grouped = False
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention: q, k, v, optional norms of q and k (of each head, or wide: over all
    heads together), rotation, core, wo.

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
        qk_norm_wide: bool = False,
        norm: str = "rms",
        dropout: float = 0.0,
        eps: float = 1e-5,
        window: int = 0,
        softcap: float = 0.0,
        query_scalar: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim, self.rope, self._heads = head_dim, rope, heads
        # On q, so that the core may stay what it is: it divides by the root of head_dim.
        self.query_scale = math.sqrt(head_dim / query_scalar) if query_scalar else 1.0
        qkv = bias != "none"
        self.wq = nn.Linear(hidden, heads * head_dim, bias=qkv)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=qkv)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=qkv)
        self.wo = nn.Linear(heads * head_dim, hidden, bias=bias == "all")
        kind = "rms" if norm == "layer" else norm
        each, wide = qk_norm and not qk_norm_wide, qk_norm and qk_norm_wide
        self.q_norm = norm_of(kind, head_dim, eps) if each else None
        self.k_norm = norm_of(kind, head_dim, eps) if each else None
        self.q_wide_norm = norm_of(kind, heads * head_dim, eps) if wide else None
        self.k_wide_norm = norm_of(kind, kv_heads * head_dim, eps) if wide else None
        self.core = Core(window, softcap)
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
        q, k, v = self.wq(x), self.wk(x), self.wv(x).unflatten(-1, per_head)
        if self.q_wide_norm is not None and self.k_wide_norm is not None:
            q, k = self.q_wide_norm(q), self.k_wide_norm(k)
        q, k = q.unflatten(-1, per_head), k.unflatten(-1, per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            cos, sin = self.rope.angles(positions, self.head_dim, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.query_scale != 1:
            q = q * self.query_scale
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
