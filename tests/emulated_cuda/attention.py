"""What CUDA's attention kernels compute, in plain torch. A CPU has no kernels of these names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """The result (B, heads, rows, size) and the log-sum-exp (B, heads, rows) in float32."""
    scores = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return _laid_out(weights @ _wide(v, q), q), lse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Tensor | None, causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    factor = scale or 1 / math.sqrt(q.shape[-1])
    scores = _scores(q, k, bias, causal, scale)
    # (B, heads, rows, keys)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    wide = g.to(scores.dtype)
    into_v = _grouped(weights.mT @ wide, v)
    slope = weights * (
        wide @ _wide(v, q).mT - (wide * out).sum(-1, keepdim=True)
    )
    into_q = slope @ _wide(k, q) * factor
    into_k = _grouped(slope.mT @ q.to(scores.dtype) * factor, k)
    return _laid_out(into_q, q), _laid_out(into_k, k), _laid_out(into_v, v)


def _scores(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = (
        q.to(wide) @ _wide(k, q).mT * (scale or 1 / math.sqrt(q.shape[-1]))
    )
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, keys = scores.shape[-2:]
        sees = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~sees, -math.inf)
    return scores


def _wide(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each head of the queries, in the dtype of sums."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return x.to(dtype).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A tensor in the dtype and with the strides of another, as CUDA's kernels return it."""
    return torch.empty_like(like).copy_(x)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """The sum over the heads of the queries that share one of `like`."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2)


# ---- as torch calls them


def _empty(like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False,
    debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(q, dropout)
    out, lse = forward(q, k, v, None, causal, scale)
    empty = _empty(q)
    return (
        out,
        lse,
        empty,
        empty,
        q.shape[2],
        k.shape[2],
        empty,
        empty,
        _empty(q, q.dtype),
    )


def flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _cu_q: Any, _cu_k: Any,
    _max_q: int, _max_k: int, dropout: float, causal: bool, _seed: Tensor, _offset: Tensor, *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse(q, dropout)
    return backward(g, q, k, v, out, lse, None, causal, scale)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, dropout: float = 0.0,
    causal: bool = False, debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(q, dropout)
    assert bias is None
    assert wants_lse
    out, lse = forward(q, k, v, None, causal, scale)
    empty = _empty(q)
    ends = empty, empty, q.shape[2], k.shape[2]
    return out, lse.unsqueeze(-1), *ends, empty, empty, _empty(q, q.dtype)


def cudnn_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _seed: Tensor,
    _offset: Tensor, bias: Tensor | None, _cu_q: Any, _cu_k: Any, _max_q: int, _max_k: int,
    dropout: float, causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse(q, dropout)
    assert bias is None
    assert lse.shape[-1] == 1, "cuDNN's statistics are a column"
    return backward(g, q, k, v, out, lse.squeeze(-1), None, causal, scale)


def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int,
    max_k: int, dropout: float, causal: bool, debug: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of packed sequences: q, k, v are (tokens, heads, size), and the log-sum-exp (heads, tokens)."""
    _refuse(q, dropout)
    assert cu_q is not None
    assert cu_k is not None
    out, lse = (
        torch.empty_like(q),
        q.new_empty(q.shape[1], len(q), dtype=torch.float32),
    )
    for rows, keys in _parts(cu_q, cu_k, max_q, max_k):
        own = [
            _heads_first(x[at]) for x, at in ((q, rows), (k, keys), (v, keys))
        ]
        band = _band(
            own[0], own[1], causal, window_size_left, window_size_right
        )
        y, sums = forward(*own, band, False, scale)
        out[rows], lse[:, rows] = y[0].transpose(0, 1), sums[0]
    return out, lse, _empty(q), _empty(q), _empty(q, q.dtype)


def varlen_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor,
    cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, _seed: Tensor,
    _offset: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(q, dropout)
    into = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in _parts(cu_q, cu_k, max_q, max_k):
        places = (g, rows), (q, rows), (k, keys), (v, keys), (out, rows)
        own = [_heads_first(x[at]) for x, at in places]
        band = _band(
            own[1], own[2], causal, window_size_left, window_size_right
        )
        found = backward(*own, lse[None, :, rows], band, False, scale)
        for whole, at, part in zip(
            into, (rows, keys, keys), found, strict=True
        ):
            whole[at] = part[0].transpose(0, 1)
    return into


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(q, dropout, halves=False)
    assert q.shape[1] == k.shape[1], "the kernel knows no groups of heads"
    out, lse = forward(q, k, v, bias, causal, scale)
    # The kernel's rows come in multiples of 32.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    return out, lse, _empty(q), _empty(q)


def efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    _seed: Tensor, _offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _refuse(q, dropout, halves=False)
    assert lse.shape[2] % 32 == 0, "the kernel's rows come in multiples of 32"
    own = lse[..., : q.shape[2]]
    return *backward(g, q, k, v, out, own, bias, causal, scale), None


def _refuse(q: Tensor, dropout: float, *, halves: bool = True) -> None:
    """What the kernels refuse on a device."""
    if halves and q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(
            "FlashAttention only support fp16 and bf16 data type"
        )
    if q.dtype == torch.float64:
        raise RuntimeError("Expected query to be float32, float16 or bfloat16")
    assert not dropout


def _parts(
    cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    ends, far = cu_q.tolist(), cu_k.tolist()
    parts = [
        (slice(a, b), slice(c, d))
        for a, b, c, d in zip(ends, ends[1:], far, far[1:], strict=False)
    ]
    assert max(rows.stop - rows.start for rows, _ in parts) <= max_q
    assert max(keys.stop - keys.start for _, keys in parts) <= max_k
    return [(rows, keys) for rows, keys in parts if rows.stop > rows.start]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _band(
    q: Tensor, k: Tensor, causal: bool, left: int | None, right: int | None
) -> Tensor | None:
    """What is added to the scores of a sequence: rows see `left` keys before them and `right` after.
    The last row and the last key have the same place."""
    rows, keys = q.shape[2], k.shape[2]
    far = rows + keys
    before = far if left is None or left < 0 else left
    after = far if right is None or right < 0 else right
    if causal:
        after = 0
    at = torch.arange(rows, device=q.device).unsqueeze(1) + keys - rows
    key = torch.arange(keys, device=q.device)
    hidden = (key < at - before) | (key > at + after)
    return torch.zeros(rows, keys, device=q.device).masked_fill(
        hidden, -math.inf
    )


KERNELS: dict[str, Any] = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_forward": varlen,
    "_flash_attention_backward": varlen_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
