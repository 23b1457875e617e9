"""Grouped-query and latent attention with rotary positions; their core is a child that may be replaced.

Not here: a key-value cache, dropout of attention probabilities (a fused kernel
draws that from its own generator, so no two layouts would agree on it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import HALVES, within_documents
from .masked import masked_attention, visible_pairs
from .noise import Dropout
from .norm import RMSNorm, norm_of

LATENT_EPS = 1e-6  # of latents' norms, whatever that of the others is


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "halves") -> Tensor:
    """`x` (B, T, heads, head_dim), its feature i turned together with feature i + head_dim / 2.

    Published weights in the Hugging Face form pair features so; Meta's own and DeepSeek's pair
    `neighbours`. What these become stands in halves: queries and keys alike, so scores are the same.
    """
    wide = x.to(cos.dtype)
    first, second = wide.chunk(2, -1) if pairs == "halves" else (wide[..., ::2], wide[..., 1::2])
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


class HeadsAttention(nn.Module):
    """What attention of any kind ends with: core, dropout, `wo`. Its kinds say what q, k and v are.

    `heads` holds the index of each query head in the uncut model; cut it as wq's heads are cut.
    """

    heads: Tensor
    wo: nn.Linear

    def __init__(self, heads: int, value_dim: int, core: Core, dropout: float) -> None:
        super().__init__()
        self.value_dim, self._heads = value_dim, heads
        self.core, self.dropout = core, Dropout(dropout, place=0)
        self.register_buffer("heads", torch.arange(heads), persistent=False)

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, as the core takes them."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        y: Tensor = self.core(*self.projected(x, positions), positions, documents)
        y = y[..., : self.value_dim].flatten(2)
        if noise is not None:
            feature = torch.arange(self.value_dim, device=x.device)
            index = (self.heads.unsqueeze(-1) * self.value_dim + feature).flatten()
            y = self.dropout(y, noise, index)
        out: Tensor = self.wo(y)
        return out

    def reset_buffers(self) -> None:
        """Number the heads again, after `to_empty` has left them undefined."""
        torch.arange(self._heads, out=self.heads)


class Attention(HeadsAttention):
    """Grouped-query attention: q, k, v, optional norms of q and k (of each head, or wide: over all
    heads together), rotation."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rope: Rope | None = None,
        rope_pairs: str = "halves",
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
        super().__init__(heads, head_dim, Core(window, softcap), dropout)
        self.head_dim, self.rope, self.rope_pairs = head_dim, rope, rope_pairs
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

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        per_head = (-1, self.head_dim)
        q, k, v = self.wq(x), self.wk(x), self.wv(x).unflatten(-1, per_head)
        if self.q_wide_norm is not None and self.k_wide_norm is not None:
            q, k = self.q_wide_norm(q), self.k_wide_norm(k)
        q, k = q.unflatten(-1, per_head), k.unflatten(-1, per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            cos, sin = self.rope.angles(positions, self.head_dim, q.dtype)
            q, k = (rotate(each, cos, sin, self.rope_pairs) for each in (q, k))
        if self.query_scale != 1:
            q = q * self.query_scale
        return q, k, v


class LatentAttention(HeadsAttention):
    """Attention whose queries, keys and values are made of narrow normed vectors (DeepSeek-V2 2024). The
    last `rope_dim` features of a head are turned; of a key these are the same for all heads.

    The core has heads of one size: what is narrower, a value mostly, has zeros behind it there.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        *,
        kv_latent: int,
        q_latent: int,
        rope_dim: int,
        value_dim: int,
        rope: Rope,
        rope_pairs: str,
        dropout: float,
        window: int,
        softcap: float,
        query_scalar: float,
    ) -> None:
        super().__init__(heads, value_dim, Core(window, softcap), dropout)
        self.head_dim, self.rope_dim, self.kv_latent = head_dim, rope_dim, kv_latent
        self.rope, self.rope_pairs = rope, rope_pairs
        self.size = max(head_dim, value_dim)  # of the core's heads, by whose root it divides
        self.query_scale = math.sqrt(self.size / (query_scalar or head_dim))
        linear, norm = partial(nn.Linear, bias=False), partial(RMSNorm, eps=LATENT_EPS)
        self.wq = None if q_latent else linear(hidden, heads * head_dim)
        self.wq_a = linear(hidden, q_latent) if q_latent else None
        self.q_a_norm = norm(q_latent) if q_latent else None
        self.wq_b = linear(q_latent, heads * head_dim) if q_latent else None
        self.wkv_a = linear(hidden, kv_latent + rope_dim)
        self.kv_a_norm = norm(kv_latent)
        self.wkv_b = linear(kv_latent, heads * (head_dim - rope_dim + value_dim))
        self.wo = linear(heads * value_dim, hidden)

    def projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plain = self.head_dim - self.rope_dim
        q_head, kv_head = (-1, self.head_dim), (-1, plain + self.value_dim)
        q = self._queries(x).view(*x.shape[:-1], *q_head)
        latent, k_turned = torch.split(self.wkv_a(x), [self.kv_latent, self.rope_dim], -1)
        both = self.wkv_b(self.kv_a_norm(latent)).unflatten(-1, kv_head)
        k, v = torch.split(both, [plain, self.value_dim], -1)
        q, q_turned = torch.split(q, [plain, self.rope_dim], -1)
        cos, sin = self.rope.angles(positions, self.rope_dim, q.dtype)
        q_turned = rotate(q_turned, cos, sin, self.rope_pairs)
        k_turned = rotate(k_turned.unsqueeze(-2), cos, sin, self.rope_pairs)
        k_turned = k_turned.expand(*k.shape[:-1], -1)
        q, k = torch.cat((q, q_turned), -1), torch.cat((k, k_turned), -1)
        q = q * self.query_scale if self.query_scale != 1 else q
        q, k, v = (F.pad(each, (0, self.size - each.shape[-1])) for each in (q, k, v))
        return q, k, v

    def _queries(self, x: Tensor) -> Tensor:
        if self.wq_a is None or self.q_a_norm is None or self.wq_b is None:
            assert self.wq is not None
            q: Tensor = self.wq(x)
            return q
        y: Tensor = self.wq_b(self.q_a_norm(self.wq_a(x)))
        return y
