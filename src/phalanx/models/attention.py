"""Grouped-query and latent attention with rotary positions and a replaceable core.

Not here: a key-value cache, and dropout of attention probabilities (a fused kernel
draws it from its own generator, so no two layouts would agree on it).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .expansion import expand
from .kernels import HALVES, attention
from .noise import Dropout
from .norm import RMSNorm, norm_of
from .rope import rotate
from .side_by_side import SideBySide
from .sizes import DecoderSizes

# Lines of the decoder's rule table: see `decoder.py`.
RULES = """\
layers.*.attn.heads : heads
layers.*.attn.sinks : heads
layers.*.attn.w[qg].weight : heads embed
layers.*.attn.wq.bias : heads
layers.*.attn.w[kv].weight : kv embed
layers.*.attn.w*_a.weight : latent embed
layers.*.attn.*_a_norm.weight : latent
layers.*.attn.w*_b.weight : heads latent
layers.*.attn.w[kv].bias : kv
layers.*.attn.[qk]_norm.weight : head
layers.*.attn.q_wide_norm.weight : heads
layers.*.attn.k_wide_norm.weight : kv
layers.*.attn.wo.weight : embed heads
layers.*.attn.wo.bias : embed
"""
# For the norms of latent vectors, whatever eps the model's other norms use.
LATENT_EPS = 1e-6


class Core(nn.Module):
    """softmax(q k' / sqrt(head_dim)) v, causal in the order of the time dim.

    Call it as `core(q, k, v, positions, documents)` with q (B, T, heads, head_dim) and
    k, v (B, T, kv_heads, head_dim), where kv_heads divides heads and each key head
    serves a run of neighbouring query heads. It returns (B, T, heads, head_dim). With
    `documents` (B, T), on the host, a token attends only to its own run of equal
    numbers. With a `window` it attends only to itself and the window - 1 tokens before
    it. `positions` (B, T) are not used here and do not order the tokens: they start
    again with each document.

    With a `softcap` c, a score s becomes c tanh(s / c). `sinks` (heads), the optional
    last argument, are the scores of one more key for each head, whose value is zero.
    """

    def __init__(self, window: int = 0, softcap: float = 0.0) -> None:
        super().__init__()
        self.window, self.softcap = window, softcap

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # Meta tensors do not say where documents end, so costs are counted without
        # them.
        documents = None if q.is_meta else documents
        window = self.window if self.window < q.shape[1] else 0
        if (
            documents is not None
            or sinks is not None
            or window
            or self.softcap
        ):
            return attention(q, k, v, documents, sinks, window, self.softcap)
        grouped = q.shape[2] != k.shape[2]
        if (
            grouped
            and q.dtype not in HALVES
            and q.device.type not in ("cpu", "meta")
        ):
            # A GPU's float32 kernel takes no groups, and its fallback keeps the whole
            # score matrix.
            k, v = (
                each.repeat_interleave(q.shape[2] // k.shape[2], 2)
                for each in (k, v)
            )
            grouped = False
        # (B, heads, T, head_dim) or (B, kv_heads, T, head_dim), as torch's kernels
        # expect
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )
        return y.transpose(1, 2)  # (B, T, heads, head_dim)


class HeadsAttention(nn.Module, ABC):
    """Base class of attentions: core, dropout and `wo`; subclasses compute q, k, v.

    `heads` holds each query head's index in the unsharded model. Shard it as wq's heads
    are sharded.
    """

    heads: Tensor
    wo: nn.Linear

    def __init__(
        self, sizes: DecoderSizes, value_dim: int, window: int
    ) -> None:
        super().__init__()
        self.value_dim, self._heads = value_dim, sizes.heads
        self.rope, self.rope_pairs = sizes.rope(window), sizes.rope_pairs
        # Blocks with a window may have another theta than the rest (Gemma 3); this is
        # the index of this block's rope among the model's distinct ones.
        self.rope_number = sizes.ropes.index(self.rope) if self.rope else 0
        self.turned_dim = sizes.turned_dim
        self.core = Core(window, sizes.softcap)
        self.dropout = Dropout(sizes.dropout, place=0)
        self.wo = nn.Linear(
            sizes.heads * value_dim, sizes.hidden, bias=sizes.bias == "all"
        )
        self.sinks = (
            nn.Parameter(torch.zeros(sizes.heads)) if sizes.sinks else None
        )
        # (heads * value_dim): Qwen3-Next's gate of each feature of each head
        self.wg = (
            nn.Linear(sizes.hidden, sizes.heads * value_dim, bias=False)
            if sizes.output_gate
            else None
        )
        self.register_buffer(
            "heads", torch.arange(sizes.heads), persistent=False
        )

    @abstractmethod
    def projected(
        self, x: Tensor, positions: Tensor, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v for the core; computes the angles unless they are given."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        noise: Tensor | None = None,
        angles: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        sinks = () if self.sinks is None else (self.sinks,)
        q, k, v = self.projected(x, positions, angles)
        y: Tensor = self.core(q, k, v, positions, documents, *sinks)
        if self.wg is not None:
            gate = self.wg(x).sigmoid()
            y = y * gate.view(y.shape)
        return self.merged(y, noise)

    def merged(self, y: Tensor, noise: Tensor | None = None) -> Tensor:
        """The output projection of the core's y (B, T, heads, size)."""
        # without padding, (B, T, heads * value_dim)
        y = y[..., : self.value_dim].flatten(2)
        if noise is not None:
            # (value_dim)
            feature = torch.arange(self.value_dim, device=y.device)
            index = (
                self.heads.unsqueeze(-1) * self.value_dim + feature
            ).flatten()
            # index: (heads * value_dim), feature numbers of the unsharded model
            y = self.dropout(y, noise, index)
        out: Tensor = self.wo(y)  # (B, T, hidden)
        return out

    def _turn(
        self, positions: Tensor, angles: Tensor | None, dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """Rotate the first `turned_dim` features of q or k (B, T, heads, head_dim).

        Learned positions return them as they are.
        """
        if self.rope is None:
            return lambda x: x
        if angles is None:
            cos, sin = self.rope.angles(positions, self.turned_dim, dtype)
        else:
            # angles: (ropes, 2, B, T, 1, turned_dim), computed once for all blocks
            cos, sin = angles[self.rope_number].unbind()
        # cos, sin: (B, T, 1, turned_dim)

        def turn(x: Tensor) -> Tensor:
            sizes = [self.turned_dim, x.shape[-1] - self.turned_dim]
            if not sizes[1]:
                return rotate(x, cos, sin, self.rope_pairs)
            first, rest = torch.split(x, sizes, -1)
            turned = rotate(first, cos, sin, self.rope_pairs)
            return torch.cat((turned, rest), -1)

        return turn

    def reset_buffers(self) -> None:
        """Number the heads again, after `to_empty` has left the buffer undefined."""
        torch.arange(self._heads, out=self.heads)


class Attention(SideBySide, HeadsAttention):
    """Grouped-query attention, with optional norms of q and k per head or "wide"."""

    side_by_side = ("wq", "wk", "wv")

    def __init__(self, sizes: DecoderSizes, window: int = 0) -> None:
        super().__init__(sizes, sizes.head_dim, window)
        self.head_dim = sizes.head_dim
        self.reads_elsewhere = self.wg is not None
        # Scale q, so that any core can divide by sqrt(head_dim) and need not know the
        # query scalar.
        scalar = sizes.query_scalar or sizes.head_dim
        self.query_scale = math.sqrt(sizes.head_dim / scalar)
        wide, narrow = (
            sizes.heads * self.head_dim,
            sizes.kv_heads * self.head_dim,
        )
        linear = partial(nn.Linear, sizes.hidden, bias=sizes.bias != "none")
        self.wq, self.wk, self.wv = (
            linear(wide),
            linear(narrow),
            linear(narrow),
        )
        kind = "rms" if sizes.norm == "layer" else sizes.norm
        norm = partial(norm_of, kind, eps=sizes.eps)
        # OLMo-2 normalizes all heads of a token together, Qwen3 and Gemma 3 each head.
        over_all = sizes.qk_norm and sizes.qk_norm_wide
        each = sizes.qk_norm and not over_all
        self.q_norm = norm(self.head_dim) if each else None
        self.k_norm = norm(self.head_dim) if each else None
        self.q_wide_norm = norm(wide) if over_all else None
        self.k_wide_norm = norm(narrow) if over_all else None

    def projected(
        self, x: Tensor, positions: Tensor, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        per_head = (-1, self.head_dim)
        # (B, T, heads * head_dim), (B, T, kv_heads * head_dim) twice
        q, k, v = self.products(x)
        v = v.unflatten(-1, per_head)  # (B, T, kv_heads, head_dim)
        # A wide norm comes before the heads are split, a norm per head after it.
        if self.q_wide_norm is not None and self.k_wide_norm is not None:
            q, k = self.q_wide_norm(q), self.k_wide_norm(k)
        # (B, T, heads or kv_heads, head_dim)
        q = q.unflatten(-1, per_head)
        k = k.unflatten(-1, per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # The norms come before the rotation, as in Qwen3 and Gemma 3.
        turn = self._turn(positions, angles, q.dtype)
        q, k = turn(q), turn(k)
        if self.query_scale != 1:
            q = q * self.query_scale
        return q, k, v


class LatentAttention(HeadsAttention):
    """Attention with q, k and v expanded from narrow, normalized latent vectors.

    DeepSeek-V2 2024. The last `rope_dim` features of a head are rotated; a key's
    rotated features are shared by all heads.

    The core takes heads of one size, so the narrower of keys and values (mostly the
    values) is padded with zeros.
    """

    def __init__(self, sizes: DecoderSizes, window: int = 0) -> None:
        super().__init__(sizes, sizes.value_dim, window)
        hidden, heads, q_latent = sizes.hidden, sizes.heads, sizes.q_latent
        self.head_dim, self.rope_dim = sizes.head_dim, sizes.rope_dim
        self.kv_latent = sizes.kv_latent
        # The core's head size. It divides by the square root of this, so `query_scale`
        # corrects for it.
        self.size = max(self.head_dim, self.value_dim)
        self.query_scale = math.sqrt(
            self.size / (sizes.query_scalar or self.head_dim)
        )
        linear, norm = (
            partial(nn.Linear, bias=False),
            partial(RMSNorm, eps=LATENT_EPS),
        )
        # q_latent = 0, as in DeepSeek-V2-Lite: queries have no latent vector.
        self.wq: Any = (
            None if q_latent else linear(hidden, heads * self.head_dim)
        )
        self.wq_a: Any = linear(hidden, q_latent) if q_latent else None
        self.q_a_norm: Any = norm(q_latent) if q_latent else None
        self.wq_b: Any = (
            linear(q_latent, heads * self.head_dim) if q_latent else None
        )
        # the latent vector, and the keys' shared rotated features
        self.wkv_a = linear(hidden, self.kv_latent + self.rope_dim)
        self.kv_a_norm = norm(self.kv_latent)
        plain = self.head_dim - self.rope_dim
        self.wkv_b = linear(self.kv_latent, heads * (plain + self.value_dim))

    def projected(
        self, x: Tensor, positions: Tensor, angles: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        plain = self.head_dim - self.rope_dim
        q_head = (-1, self.head_dim)
        kv_head = (-1, plain + self.value_dim)
        # queries: (B, T, q_latent or hidden)
        queries = x if self.wq_a is None else self.q_a_norm(self.wq_a(x))
        q = expand(self.wq_b, queries) if self.wq is None else self.wq(x)
        q = q.view(*x.shape[:-1], *q_head)  # (B, T, heads, head_dim)
        # k_turned is one key for all heads; the norm covers the latent vector alone.
        # (B, T, kv_latent), (B, T, rope_dim)
        latent, k_turned = torch.split(
            self.wkv_a(x), [self.kv_latent, self.rope_dim], -1
        )
        # both: (B, T, heads, plain + value_dim)
        both = expand(self.wkv_b, self.kv_a_norm(latent))
        both = both.view(*both.shape[:-1], *kv_head)
        # (B, T, heads, plain), (B, T, heads, value_dim)
        k, v = torch.split(both, [plain, self.value_dim], -1)
        # (B, T, heads, plain), (B, T, heads, rope_dim)
        q, q_turned = torch.split(q, [plain, self.rope_dim], -1)
        assert self.rope is not None
        turn = self._turn(positions, angles, q.dtype)
        # k_turned (B, T, 1, rope_dim)
        q_turned, k_turned = turn(q_turned), turn(k_turned.unsqueeze(-2))
        # shared by all heads: (B, T, heads, rope_dim)
        k_turned = k_turned.expand(*k.shape[:-1], -1)
        # q, k: (B, T, heads, head_dim)
        q = torch.cat((q, q_turned), -1)
        k = torch.cat((k, k_turned), -1)
        q = q * self.query_scale if self.query_scale != 1 else q
        # each (B, T, heads, size): kernels take heads of one size only
        q, k, v = (
            F.pad(each, (0, self.size - each.shape[-1]))  # zeros at the end
            for each in (q, k, v)
        )
        return q, k, v
