"""Attention with its log-sum-exp, by torch's fused kernels: within documents, with masks, with sinks.

What attends is cut into blocks of queries and keys of which all meet, or those under a diagonal. So
no mask is made, and no work is done for pairs of different documents. Documents are known on the host:
how many blocks there are decides what is launched, and a GPU would have to be waited for to say it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

STRIP = 512
HALVES = (torch.bfloat16, torch.float16)


class AttentionBlock(NamedTuple):
    """Of some sequences of a batch, queries and the keys that they see: all, or with `causal`, where
    there are as many of both, those under the diagonal."""

    batch: slice
    rows: slice
    keys: slice
    causal: bool = False


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(size)) v for q (B, T, heads, size), and k and v with the same or fewer heads.

    Causal, with `documents` (B, T), on the host, each run of equal numbers by itself; or with a `mask`
    (B or 1, T, keys) of numbers like q's that are added to the scores. `sinks` (heads) are scores of one
    more key for each head, whose value is zero.
    """
    out: Tensor = torch.ops.phalanx.attention(q, k, v, documents, mask, sinks)[0]
    return out


def all_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    into_qkv = own_gradients(gradient, (q, k, v), documents, out, lse, mask)
    return *into_qkv, sink_gradients(gradient, out, lse, sinks)


def _keep(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    into = torch.ops.phalanx.attention_gradients(gradient, *ctx.saved_tensors)
    return *into[:3], None, None, into[3] if ctx.needs_input_grad[5] else None


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """A result (B, T, heads, size) and its log-sum-exp (B, T, heads) with one more key for each head. What
    a backward makes of these two is then right for all other keys."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype), total


def sink_gradients(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The gradient of the sinks; `out` and `lse` are with these. Empty without sinks."""
    if sinks is None:
        return gradient.new_empty(0)
    share = (sinks.to(lse.dtype) - lse).exp()
    inside = (gradient.to(lse.dtype) * out).sum(-1)
    return -(share * inside).flatten(0, 1).sum(0).to(sinks.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _room(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


# ---- all documents of a batch


def _edges(documents: Tensor) -> list[list[int]]:
    """For each row where its documents begin, and its length."""
    numbers = documents.numpy()
    return [[0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)] for row in numbers]


def _own_blocks(documents: Tensor) -> list[AttentionBlock]:
    """Each document by itself. Neighbouring rows that are cut alike share blocks."""
    blocks: list[AttentionBlock] = []
    for edges, run in groupby(enumerate(_edges(documents)), key=lambda each: each[1]):
        rows = [row for row, _ in run]
        batch = slice(rows[0], rows[-1] + 1)
        blocks += [
            AttentionBlock(batch, slice(*ends), slice(*ends), True) for ends in pairwise(edges)
        ]
    return blocks


def attend_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The result like q, and its log-sum-exp (B, T, heads)."""
    out, lse = add_sinks(*_attend_blocks(q, k, v, documents, mask), sinks)
    return out.contiguous(), lse.contiguous()


def _attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if documents is None:
        return attend(q, k, v, _whole(mask), mask)
    if _kernels(q) is FLASH:
        return _varlen(q, k, v, documents)
    blocks = _own_blocks(documents)
    if len(blocks) == 1:
        return attend(q, k, v, blocks[0])
    out, lse = _room(q), _room(q[..., 0], _wide(q))
    for block in blocks:
        at = block.batch, block.rows
        out[at], lse[at] = attend(q, k, v, block)
    return out, lse


def own_gradients(
    gradient: Tensor,
    qkv: Qkv,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; `out` and `lse` are what `attend_own` gave."""
    if documents is None:
        dq, dk, dv = attend_gradients(gradient, qkv, out, lse, _whole(mask), mask)
        return dq, dk, dv
    if _kernels(qkv[0]) is FLASH:
        return _varlen_back(gradient, qkv, documents, out, lse)
    blocks = _own_blocks(documents)
    if len(blocks) == 1:
        dq, dk, dv = attend_gradients(gradient, qkv, out, lse, blocks[0])
        return dq, dk, dv
    q, k, v = into = tuple(map(_room, qkv))
    for block in blocks:
        # Every token is in one block, so nothing is added up.
        parts = attend_gradients(gradient, qkv, out, lse, block)
        for whole, part in zip(into, parts, strict=True):
            whole[block.batch, block.rows] = part
    return q, k, v


def _no_gradients(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    sinks = given[5]
    return *map(_room, given[:3]), gradient.new_empty(0) if sinks is None else _room(sinks)


def _whole(mask: Tensor | None) -> AttentionBlock:
    return AttentionBlock(slice(None), slice(None), slice(None), causal=mask is None)


# One operation for autograd, for recomputation and for a compiled graph, which cannot know the blocks.
# Not by `torch.library.custom_op`: the first call of such an operation imports torch's compiler.
for _name, _function, _fake in (
    ("phalanx::attention", attend_own, lambda q, *_: (_room(q), _room(q[..., 0], _wide(q)))),
    ("phalanx::attention_gradients", all_gradients, _no_gradients),
):
    _schema = torch.library.infer_schema(_function, mutates_args=())
    torch.library.define(_name, _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _fake)
torch.library.register_autograd("phalanx::attention", _back, setup_context=_keep)


def _starts(documents: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Where documents begin in all rows one after another, on the device, and the longest's length."""
    length = documents.shape[1]
    edges = [row * length + t for row, each in enumerate(_edges(documents)) for t in each[:-1]]
    edges.append(documents.numel())
    starts = torch.from_numpy(np.array(edges, np.int32))
    return starts.to(device, non_blocking=True), max(b - a for a, b in pairwise(edges))


def _varlen(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    starts, longest = _starts(documents, q.device)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    op = torch.ops.aten._flash_attention_forward
    ends = starts, starts, longest, longest
    out, lse = op(*flat, *ends, 0.0, True, False)[:2]  # lse: (heads, tokens)
    return out.view(q.shape), lse.T.contiguous().view(q.shape[:-1])


def _varlen_back(
    gradient: Tensor, qkv: Qkv, documents: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    starts, longest = _starts(documents, out.device)
    g, q, k, v, o = (x.reshape(-1, *x.shape[2:]) for x in (gradient, *qkv, out))
    op = torch.ops.aten._flash_attention_backward
    ends = starts, starts, longest, longest
    heads_first = lse.flatten(0, 1).T.contiguous()
    into = op(g, q, k, v, o, heads_first, *ends, 0.0, True, *_no_dropout(g))
    dq, dk, dv = (x.reshape(like.shape) for x, like in zip(into, qkv, strict=True))
    return dq, dk, dv


# ---- one block


def attend(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result (B, rows, heads, size) over these keys alone, its log-sum-exp (B, rows, heads)."""
    q, k, v = _heads_first(block, (q,), (k, v))
    out, lse = _kernels(q, mask).forward(q, k, v, block.causal, _over_heads(q, mask))
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_gradients(
    gradient: Tensor,
    qkv: Qkv,
    out: Tensor,
    lse: Tensor,
    block: AttentionBlock,
    mask: Tensor | None = None,
) -> list[Tensor]:
    """What these pairs give to the gradients of q, k and v; out and lse are over all keys."""
    q, k, v = qkv
    g, q, out, lse, k, v = _heads_first(block, (gradient, q, out, lse), (k, v))
    mask = _over_heads(q, mask)
    into = _kernels(q, mask).backward(g, (q, k, v), out, lse.contiguous(), block.causal, mask)
    return [x.transpose(1, 2) for x in into]


def _heads_first(
    block: AttentionBlock, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> list[Tensor]:
    batch, rows, times = block.batch, block.rows, block.keys
    parts = [x[batch, rows] for x in queries] + [x[batch, times] for x in keys]
    return [x.transpose(1, 2) for x in parts]


def _over_heads(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """(B, heads, rows, keys), without memory for the heads."""
    return None if mask is None else mask.unsqueeze(1).expand(*q.shape[:2], -1, -1)


# ---- kernels: heads before time

Qkv = tuple[Tensor, Tensor, Tensor]
Mask = Tensor | None
Forward = Callable[[Tensor, Tensor, Tensor, bool, Mask], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Qkv, Tensor, Tensor, bool, Mask], Sequence[Tensor]]


class Kernels(NamedTuple):
    """Attention of q, k, v, whether it is causal, and a mask or none; its gradients from out and
    log-sum-exp."""

    forward: Forward
    backward: Backward


def _kernels(q: Tensor, mask: Mask = None) -> Kernels:
    """What the device has for this dtype, head and mask. On meta the CPU's gives the shapes."""
    size = q.shape[-1]
    if q.device.type in ("cpu", "meta"):
        return CPU
    if q.dtype in HALVES and size % 8 == 0 and mask is None and size <= 256:
        return FLASH
    # It loads 16 bytes at once.
    fits = size * q.element_size() % 16 == 0
    return EFFICIENT if q.dtype != torch.float64 and fits else PLAIN


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse


def _cpu_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    into: Sequence[Tensor] = op(g, *qkv, out, lse, 0.0, causal, attn_mask=mask)
    return into


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = op(q, k, v, 0.0, causal)[:2]
    return out, lse


def _flash_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    ends = None, None, g.shape[2], qkv[1].shape[2]
    into: Sequence[Tensor] = op(g, *qkv, out, lse, *ends, 0.0, causal, *_no_dropout(g))
    return into


def _no_dropout(g: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a generator, of which nothing is drawn without dropout."""
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=g.device) for n in ((2,), ()))
    return seed, offset


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))  # it knows no groups
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse = op(q, k, v, mask, True, 0.0, causal)[:2]
    return out, lse[..., : q.shape[2]]  # which comes in multiples of 32


def _efficient_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    q, k, v = qkv
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed, offset = (torch.zeros((), dtype=torch.int64, device=g.device) for _ in range(2))
    lse, wanted = F.pad(lse, (0, -lse.shape[2] % 32)), [True, True, True, False]
    into = op(g, q, k, v, mask, out, lse, seed, offset, 0.0, wanted, causal)
    return into[0], *(x.unflatten(1, (kv_heads, groups)).sum(2) for x in into[1:3])


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask) -> tuple[Tensor, Tensor]:
    """A few products, in strips of queries, so that no matrix of scores is longer than a strip."""
    parts = []
    for rows, seen in _strips(q, k, causal):
        wide, scores = _scores(
            q[:, :, rows], k[:, :, :seen], rows.start if causal else None, _rows_of(mask, rows)
        )
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp_() @ v[:, :, :seen].to(wide)
        shape = *q.shape[:2], -1
        parts.append((out.view(*shape, q.shape[3]).to(q.dtype), lse.view(shape)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    q, k, v = qkv
    into_q, into_k, into_v = (torch.zeros_like(x, dtype=_wide(x)) for x in qkv)
    for rows, seen in _strips(q, k, causal):
        own = q[:, :, rows]
        wide, scores = _scores(
            own, k[:, :, :seen], rows.start if causal else None, _rows_of(mask, rows)
        )
        dy, y, folded = (_folded(x, k).to(wide) for x in (g[:, :, rows], out[:, :, rows], own))
        weights = (scores - lse[:, :, rows].reshape(scores.shape[:-1]).unsqueeze(-1)).exp_()
        inside = weights * (dy @ v[:, :, :seen].mT.to(wide) - (dy * y).sum(-1, keepdim=True))
        inside *= q.shape[-1] ** -0.5
        into_q[:, :, rows] = (inside @ k[:, :, :seen].to(wide)).view(own.shape)
        into_k[:, :, :seen] += inside.mT @ folded
        into_v[:, :, :seen] += weights.mT @ dy
    return into_q, into_k, into_v


def _strips(q: Tensor, k: Tensor, causal: bool) -> list[tuple[slice, int]]:
    """Rows of queries, and how many keys they see."""
    length = q.shape[2]
    ends = [(start, min(start + STRIP, length)) for start in range(0, length, STRIP)]
    return [(slice(*each), each[1] if causal else k.shape[2]) for each in ends]


def _rows_of(mask: Mask, rows: slice) -> Mask:
    return None if mask is None else mask[:, :, rows]


def _scores(q: Tensor, k: Tensor, first: int | None, mask: Mask) -> tuple[torch.dtype, Tensor]:
    """(B, kv heads, rows of all heads that share one, keys); -inf, where rows are numbered from
    `first`, for later keys."""
    wide = _wide(q)
    scores = _folded(q, k).to(wide) @ k.mT.to(wide) * q.shape[-1] ** -0.5
    if mask is not None:
        scores += _folded(mask, k)
    if first is not None:
        size = q.shape[2], k.shape[2]
        later = torch.ones(size, dtype=torch.bool, device=q.device).triu(first + 1)
        scores.masked_fill_(later.repeat(q.shape[1] // k.shape[1], 1), -math.inf)
    return wide, scores


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """The query heads that share a key head one below another."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


CPU, FLASH = Kernels(_cpu, _cpu_back), Kernels(_flash, _flash_back)
EFFICIENT, PLAIN = Kernels(_efficient, _efficient_back), Kernels(_plain, _plain_back)
