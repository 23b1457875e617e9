"""Attention over some keys only: kernels that return the log-sum-exp, so that parts can be merged.

The fused kernels of torch where they fit, else a few matrix products. Which of a block's rows and
keys meet is a `MaskBlock`; with documents a block is cut into strips of rows, so that no mask and no
score matrix is longer than a strip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STRIP = 512
HALVES = (torch.bfloat16, torch.float16)


class MaskBlock(NamedTuple):
    """Some rows against some keys: all pairs, or those under the diagonal of as many rows as keys,
    or those of `pairs` (B or 1, rows, keys)."""

    rows: slice
    keys: slice
    causal: bool = False
    pairs: Tensor | None = None


def mask_blocks(
    q: Tensor, block: MaskBlock, ids: Tensor | None, its_ids: Tensor | None
) -> Iterator[MaskBlock]:
    """A block as the kernels take it. `ids` and `its_ids` are the documents (B, T) of the queries
    and of the keys."""
    if ids is None and _fused(q):
        yield block
        return
    for start in range(block.rows.start, block.rows.stop, STRIP):
        rows = slice(start, min(start + STRIP, block.rows.stop))
        # Under the diagonal rows and keys begin together: no key after the strip's last row.
        keys = slice(block.keys.start, rows.stop) if block.causal else block.keys
        if ids is not None and its_ids is not None:
            pairs = ids[:, rows, None] == its_ids[:, None, keys]
        else:
            size = (1, rows.stop - rows.start, keys.stop - keys.start)
            pairs = torch.ones(size, dtype=torch.bool, device=q.device)
        yield from _trimmed(
            rows, keys, pairs.tril(start - block.keys.start) if block.causal else pairs
        )


def _trimmed(rows: slice, keys: slice, pairs: Tensor) -> Iterator[MaskBlock]:
    """Without the keys before the first and after the last that any row sees; nothing if none is.

    On CPU only: elsewhere the host would wait for the device to answer.
    """
    if pairs.device.type == "cpu":
        seen = pairs.flatten(0, 1).any(0).nonzero()
        if not len(seen):
            return
        first, last = int(seen[0]), int(seen[-1]) + 1
        keys, pairs = slice(keys.start + first, keys.start + last), pairs[..., first:last]
    yield MaskBlock(rows, keys, False, pairs)


def attend(q: Tensor, kv: Tensor, visible: MaskBlock) -> tuple[Tensor, Tensor]:
    """The result (B, rows, heads, size) over these keys alone, its log-sum-exp (B, rows, heads)."""
    q, k, v = (x.transpose(1, 2) for x in (q[:, visible.rows], *kv[:, :, visible.keys]))
    out, lse = _kernels(q, visible)[0](q, k, v, visible)
    if visible.pairs is not None:
        # The kernels say 0 for a row that sees nothing.
        lse = lse.masked_fill(~visible.pairs.any(-1).unsqueeze(1), -math.inf)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_gradients(
    gradient: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, visible: MaskBlock
) -> list[Tensor]:
    """What these pairs give to the gradients of q, k and v; out and lse are over all keys."""
    g, q, out, lse = (x[:, visible.rows].transpose(1, 2) for x in (gradient, q, out, lse))
    k, v = (x.transpose(1, 2) for x in kv[:, :, visible.keys])
    into = _kernels(q, visible)[1](g, (q, k, v), out, lse.contiguous(), visible)
    return [x.transpose(1, 2) for x in into]


# ---- kernels: heads before time

Qkv = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, MaskBlock], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Qkv, Tensor, Tensor, MaskBlock], Sequence[Tensor]]


def _fused(q: Tensor) -> bool:
    """Whether a kernel of torch takes this without a mask. On meta the CPU's gives the shapes."""
    if q.device.type in ("cpu", "meta"):
        return True
    return q.is_cuda and q.dtype in HALVES and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _kernels(q: Tensor, visible: MaskBlock) -> tuple[Forward, Backward]:
    if not _fused(q) or (q.is_cuda and visible.pairs is not None):
        return _plain, _plain_back
    return (_cuda, _cuda_back) if q.is_cuda else (_cpu, _cpu_back)


def _cpu(q: Tensor, k: Tensor, v: Tensor, visible: MaskBlock) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, visible.causal, attn_mask=_added(visible, q.dtype))
    return out, lse


def _cpu_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, visible: MaskBlock
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = _added(visible, g.dtype)
    into: Sequence[Tensor] = op(g, *qkv, out, lse, 0.0, visible.causal, attn_mask=mask)
    return into


def _added(visible: MaskBlock, dtype: torch.dtype) -> Tensor | None:
    """0 where a pair may meet, -inf elsewhere, in the dtype of q: the kernel takes no booleans."""
    if visible.pairs is None:
        return None
    zeros = torch.zeros(visible.pairs.shape, dtype=dtype, device=visible.pairs.device)
    return zeros.masked_fill_(~visible.pairs, -math.inf).unsqueeze(1)


def _cuda(q: Tensor, k: Tensor, v: Tensor, visible: MaskBlock) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = op(q, k, v, 0.0, visible.causal)[:2]
    return out, lse


def _cuda_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, visible: MaskBlock
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    # The state of a generator, of which nothing is drawn without dropout.
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=g.device) for n in ((2,), ()))
    lengths = g.shape[2], qkv[1].shape[2]
    causal = visible.causal
    into: Sequence[Tensor] = op(g, *qkv, out, lse, None, None, *lengths, 0.0, causal, seed, offset)
    return into


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: MaskBlock) -> tuple[Tensor, Tensor]:
    wide, scores = _scores(q, k, visible)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)).exp_()
    out = weights @ v.to(wide)
    return out.view(q.shape).to(q.dtype), lse.view(q.shape[:-1])


def _plain_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, visible: MaskBlock
) -> Sequence[Tensor]:
    q, k, v = qkv
    wide, scores = _scores(q, k, visible)
    g, out, folded = (_folded(x, k).to(wide) for x in (g, out, q))
    weights = (scores - lse.reshape(scores.shape[:-1]).unsqueeze(-1)).exp_()
    into_v = weights.mT @ g
    inside = weights * (g @ v.mT.to(wide) - (g * out).sum(-1, keepdim=True))
    inside *= q.shape[-1] ** -0.5
    return (inside @ k.to(wide)).view(q.shape), inside.mT @ folded, into_v


def _scores(q: Tensor, k: Tensor, visible: MaskBlock) -> tuple[torch.dtype, Tensor]:
    """(B, kv heads, rows of all heads that share one, keys), -inf where a pair must not meet."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _folded(q, k).to(wide) @ k.mT.to(wide) * q.shape[-1] ** -0.5
    assert not visible.causal, "what is computed plainly comes in strips"
    if visible.pairs is not None:
        groups = q.shape[1] // k.shape[1]
        scores.masked_fill_(~visible.pairs.repeat(1, groups, 1).unsqueeze(1), -math.inf)
    return wide, scores


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """The query heads that share a key head one below another."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])
