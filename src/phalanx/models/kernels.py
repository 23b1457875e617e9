"""Attention and its log-sum-exp by torch's fused kernels, with documents, windows, soft
caps and sinks.

The pairs that attend are cut into blocks of queries and keys, each of them full or
causal, so no work is spent on pairs from different documents. Where a window is shorter
than a document, a GPU uses its 16-bit kernel for variable lengths. Elsewhere the blocks
are strips of rows with the keys that these rows see, and a mask of the size of a strip.

A GPU can compute soft caps by flex attention (`flex.py`).

Documents are known on the host. Their number decides which kernels are launched, and
reading it from a GPU would wait for the GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from . import flex

# Rows of a strip. On a CPU, 512 took 1.3 to 2.2 times as long with windows and soft
# caps.
STRIP = 128
HALVES = (torch.bfloat16, torch.float16)
# Compute capabilities on which torch prefers cuDNN's attention (sdp_utils.cpp).
CUDNN_FIRST = ((9, 0), (10, 0))


class AttentionBlock(NamedTuple):
    """A block of queries and the keys they see, of some sequences of a batch.

    Every query sees every key, unless `causal`: then there are as many keys as queries,
    and they see the keys under the diagonal. With a `band` (first, window) row i sees
    the last `window` of the keys up to first + i.
    """

    batch: slice
    rows: slice
    keys: slice
    causal: bool = False
    band: tuple[int, int] | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """softmax(q k' / sqrt(size)) v, causal.

    q is (B, rows, heads, size); k and v are (B, keys, ...) with as many heads or fewer.
    The rows are the last of the keys' times. With `documents` (B, keys), on the host, a
    token attends only to its own run of equal numbers; with a `window`, only to the
    last `window` tokens, itself included.

    With a `softcap` c, a score s becomes c tanh(s / c). `sinks` (heads) are the scores
    of one more key for each head, whose value is zero.
    """
    args = q, k, v, documents, sinks, window, softcap
    out: Tensor = torch.ops.phalanx.attention(*args)[0]
    return out


def all_gradients(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = gradient, (q, k, v), documents, out, lse, window, softcap
    into = own_gradients(*given, sinks=sinks is not None)
    # A compiled graph relies on the strides of `_no_gradients`.
    dq, dk, dv = (x.contiguous() for x in into)
    return dq, dk, dv, sink_gradients(gradient, out, lse, sinks)


def _keep(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    *tensors, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    op = torch.ops.phalanx.attention_gradients
    into = op(gradient, *ctx.saved_tensors, ctx.window, ctx.softcap)
    # In the order of the inputs: q, k, v, documents, sinks, window, softcap.
    return (
        *into[:3],
        None,
        into[3] if ctx.needs_input_grad[4] else None,
        None,
        None,
    )


def add_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add a key per head to a result (B, T, heads, size) and log-sum-exp (B, T, heads).

    From these two, a backward computes the right gradients for all other keys.
    """
    if sinks is None:
        return out, lse
    # The sink joins the softmax's denominator only, as its value is zero: the output
    # shrinks by exp(lse - total).
    total = torch.logaddexp(lse, sinks.to(lse.dtype))  # (B, T, heads)
    share = (lse - total).exp().unsqueeze(-1)
    return (out * share).to(out.dtype), total


def sink_gradients(
    gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> Tensor:
    """The gradient of the sinks (heads), empty without; `out`, `lse` include them."""
    if sinks is None:
        return gradient.new_empty(0)
    # (B, T, heads): the sink's softmax weight
    share = (sinks.to(lse.dtype) - lse).exp()
    # dS = P * (dP - sum(dO * O)), and dP is zero, as the sink's value is.
    inside = (gradient.to(lse.dtype) * out).sum(-1)  # (B, T, heads)
    gradient = -(share * inside).flatten(0, 1).sum(0)
    return gradient.to(sinks.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _room(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


# ---- all documents of a batch


# Facts about a batch's documents hold in every layer and in both directions, so they
# are computed once and cached while the batch lives: the edges of documents, and their
# starts on each device.
_known_edges: Any = WeakIdKeyDictionary()
_known_starts: Any = WeakIdKeyDictionary()


def _edges(documents: Tensor) -> list[list[int]]:
    """The start of each document and the row's length, for each row."""
    version, known = _known_edges.get(documents, (-1, None))
    if known is None or version != documents._version:
        known = []
        for row in documents.numpy():
            starts = 1 + np.flatnonzero(row[1:] != row[:-1])
            known.append([0, *starts.tolist(), len(row)])
        _known_edges[documents] = documents._version, known
    edges: list[list[int]] = known
    return edges


def _cutting(documents: Tensor | None) -> Tensor | None:
    """The documents, or None if each row is a single document."""
    if documents is None or any(len(edges) > 2 for edges in _edges(documents)):
        return documents
    return None


def _own_blocks(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int
) -> list[AttentionBlock]:
    """The blocks of each document; neighbouring equal sequences share blocks."""
    # With queries split over time, row r of q stands at time before + r of the keys.
    keys = k.shape[1]
    before = keys - q.shape[1]
    # When only shapes are counted: as many keys as a row sees on average.
    if q.is_meta and window:
        seen = np.minimum(np.arange(before, keys) + 1, window).mean()
        return [
            AttentionBlock(slice(None), slice(None), slice(0, math.ceil(seen)))
        ]
    runs = [(slice(None), [0, keys])]
    if documents is not None:
        runs = []
        # Only neighbours share a launch, because a block is a slice of sequences.
        for edges, run in groupby(
            enumerate(_edges(documents)), key=lambda each: each[1]
        ):
            cut = [sequence for sequence, _ in run]
            rows = slice(cut[0], cut[-1] + 1)
            runs.append((rows, edges))
    blocks: list[AttentionBlock] = []
    for batch, edges in runs:
        for begin, end in pairwise(edges):
            first = max(begin, before)
            # All rows of the document are here, and no window cuts it: one kernel.
            if first == begin and not 0 < window < end - begin:
                rows = slice(first - before, end - before)
                blocks.append(
                    AttentionBlock(batch, rows, slice(begin, end), causal=True)
                )
                continue
            # Otherwise strips, whose first row sees no key before start + 1 - window.
            for start in range(first, end, STRIP):
                stop = min(start + STRIP, end)
                low = max(begin, start + 1 - window) if window else begin
                rows, band = (
                    slice(start - before, stop - before),
                    (start - low, window or keys),
                )
                blocks.append(
                    AttentionBlock(batch, rows, slice(low, stop), band=band)
                )
    return blocks


def attend_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (like q) and its log-sum-exp (B, rows, heads)."""
    documents = _cutting(documents)
    if _by_lengths(q, k, documents, window, softcap):
        out, lse = _varlen(q, k, v, documents, window)
    elif _takes_flex(q, k, window, softcap):
        mask = _block_mask(q, k, documents, window)
        out, lse = flex.attend(q, k, v, mask, softcap)
    else:
        blocks = _own_blocks(q, k, documents, window)
        out, lse = _in_blocks(q, k, v, blocks, softcap)
    out, lse = add_sinks(out, lse, sinks)
    return out.contiguous(), lse.contiguous()


def own_gradients(
    gradient: Tensor,
    qkv: Qkv,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    *,
    sinks: bool = False,
) -> Sequence[Tensor]:
    """The gradients of q, k and v; `out` and `lse` come from `attend_own`.

    `sinks`: they include sinks.
    """
    q, k, _ = qkv
    documents = _cutting(documents)
    if _by_lengths(q, k, documents, window, softcap):
        return _varlen_back(gradient, qkv, documents, out, lse, window)
    if _takes_flex(q, k, window, softcap):
        mask = _block_mask(q, k, documents, window)
        given = gradient, qkv, mask, out, lse, softcap
        return flex.gradients(*given, sinks=sinks)
    blocks = _own_blocks(q, k, documents, window)
    return _block_gradients(gradient, qkv, out, lse, blocks, softcap)


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[AttentionBlock],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of blocks that contain each row exactly once."""
    if len(blocks) == 1:
        (only,) = blocks
        return attend(q, k, v, only, softcap, whole=only.causal)
    out = _room(q)
    lse = _room(q[..., 0], _wide(q))
    for block in blocks:
        at = block.batch, block.rows
        out[at], lse[at] = attend(q, k, v, block, softcap)
    return out, lse


def _block_gradients(
    gradient: Tensor,
    qkv: Qkv,
    out: Tensor,
    lse: Tensor,
    blocks: Sequence[AttentionBlock],
    softcap: float,
) -> Sequence[Tensor]:
    """The gradients of q, k and v from the blocks of `_in_blocks`."""
    q, k, _ = qkv
    plain = all(block.band is None for block in blocks)
    once = q.shape[1] == k.shape[1] and plain
    if once and len(blocks) == 1 and blocks[0].causal:
        return attend_gradients(
            gradient, qkv, out, lse, blocks[0], softcap, whole=True
        )
    # Each row is in one block, so its gradient is assigned. Keys shared by strips need
    # a sum in float32.
    into_q, *into_kv = (
        _room(x) if once or x is q else torch.zeros_like(x, dtype=_wide(x))
        for x in qkv
    )
    for block in blocks:
        dq, *dkv = attend_gradients(gradient, qkv, out, lse, block, softcap)
        into_q[block.batch, block.rows] = dq
        for whole, part in zip(into_kv, dkv, strict=True):
            if once:
                whole[block.batch, block.keys] = part
            else:
                whole[block.batch, block.keys] += part
    return [into_q, *(whole.to(k.dtype) for whole in into_kv)]


def _by_lengths(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int, softcap: float
) -> bool:
    """True if one variable-length kernel handles all documents and their windows."""
    cut = documents is not None or window > 0
    return (
        cut
        and not softcap
        and q.shape[1] == k.shape[1]
        and _kernels(q) is FLASH
    )


def _takes_flex(q: Tensor, k: Tensor, window: int, softcap: float) -> bool:
    """True if flex attention computes this soft cap, on a GPU in 16 bits."""
    if not softcap or q.shape[1] < flex.FEWEST_ROWS:
        return False
    if not flex.available(q.device, q.dtype):
        return False
    return _flex_agrees(q.device, q.dtype, q.shape, k.shape, window, softcap)


@cache
def _flex_agrees(
    device: torch.device,
    dtype: torch.dtype,
    of_q: torch.Size,
    of_k: torch.Size,
    window: int,
    softcap: float,
) -> bool:
    """True if flex attention gives what the strips give, for tensors of these shapes.

    A compiler that fails on this machine, or a kernel that does not fit this GPU, must
    not end a run that the strips can do.
    """
    sizes = of_q, of_k
    given = device, dtype, sizes, window, softcap
    # In a thread, because autograd records nothing inside of an operator's forward.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(_compare_flex, *given).result()
        except Exception as error:  # whatever a compiler or a driver raises
            flex.warn(device, error)
            return False
    return True


def _compare_flex(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[torch.Size, torch.Size],
    window: int,
    softcap: float,
) -> None:
    """Raise unless flex attention gives what the strips give for three documents."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    gradient, (q, k, v) = flex.sample(sizes, device, dtype)
    rows, keys = k.shape[:2]
    runs = torch.arange(keys) * 3 // keys
    documents = runs.expand(rows, keys).contiguous()
    blocks = _own_blocks(q, k, documents, window)
    mask = _block_mask(q, k, documents, window)
    given = gradient, (q, k, v)
    with torch.no_grad():
        out, lse = _in_blocks(q, k, v, blocks, softcap)
        wanted = _block_gradients(*given, out, lse, blocks, softcap)
    found = flex.attend(q, k, v, mask, softcap)
    into = flex.gradients(*given, mask, out, lse, softcap, sinks=False)
    flex.compare([*found, *into], [out, lse, *wanted])


def _block_mask(
    q: Tensor, k: Tensor, documents: Tensor | None, window: int
) -> Any:
    """The mask of flex attention for these documents, or for whole rows."""
    keys = k.shape[1]
    every = [[0, keys]] * len(q) if documents is None else _edges(documents)
    edges = tuple(map(tuple, every))
    return flex.block_mask(edges, q.shape[1], window, q.device)


def _no_gradients(gradient: Tensor, *given: Any) -> tuple[Tensor, ...]:
    sinks = given[4]
    return *map(_room, given[:3]), gradient.new_empty(
        0
    ) if sinks is None else _room(sinks)


# A single operation for autograd, for recomputation and for compiled graphs, which
# cannot know the blocks. Not `torch.library.custom_op`: its first call imports torch's
# compiler.
for _name, _function, _fake in (
    (
        "phalanx::attention",
        attend_own,
        lambda q, *_: (_room(q), _room(q[..., 0], _wide(q))),
    ),
    ("phalanx::attention_gradients", all_gradients, _no_gradients),
):
    _schema = torch.library.infer_schema(_function, mutates_args=())
    torch.library.define(_name, _schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(_name, "default", _function)
    torch.library.register_fake(_name, _fake)
torch.library.register_autograd(
    "phalanx::attention", _back, setup_context=_keep
)


def _starts(documents: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """Document starts (documents + 1) in concatenated rows, and the longest length."""
    rows, length = like.shape[:2]
    if documents is None:
        return _starts_of([[0, length]] * rows, length, like.device)
    key = documents._version, like.device
    known = _known_starts.setdefault(documents, {})
    if key not in known:
        known[key] = _starts_of(_edges(documents), length, like.device)
    starts: tuple[Tensor, int] = known[key]
    return starts


def _starts_of(
    edges: list[list[int]], length: int, device: torch.device
) -> tuple[Tensor, int]:
    # flat: the start of each document in the rows of all sequences, joined end to end
    flat = [
        row * length + t for row, own in enumerate(edges) for t in own[:-1]
    ]
    flat.append(len(edges) * length)
    starts = torch.from_numpy(np.array(flat, np.int32))
    return starts.to(device, non_blocking=True), max(
        b - a for a, b in pairwise(flat)
    )


def _within(window: int) -> dict[str, int]:
    return (
        {"window_size_left": window - 1, "window_size_right": 0}
        if window
        else {}
    )


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    starts, longest = _starts(documents, q)
    # (B * T, heads, size)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    op = torch.ops.aten._flash_attention_forward
    ends = starts, starts, longest, longest
    # lse: (heads, tokens)
    outputs = op(*flat, *ends, 0.0, True, False, **_within(window))
    out, lse = outputs[:2]
    lse = lse.T.contiguous()
    return out.view(q.shape), lse.view(q.shape[:-1])


def _varlen_back(
    gradient: Tensor,
    qkv: Qkv,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: int,
) -> list[Tensor]:
    starts, longest = _starts(documents, out)
    # each (B * T, heads, size)
    given = (gradient, *qkv, out)
    g, q, k, v, o = (x.reshape(-1, *x.shape[2:]) for x in given)
    op = torch.ops.aten._flash_attention_backward
    ends = starts, starts, longest, longest
    heads_first = lse.flatten(0, 1).T.contiguous()  # (heads, tokens)
    into = op(
        g, q, k, v, o, heads_first, *ends, 0.0, True, *_no_dropout(g), **_within(window)
    )  # fmt: skip
    return [x.reshape(like.shape) for x, like in zip(into, qkv, strict=True)]


# ---- one block


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    softcap: float = 0.0,
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return a block's result (B, rows, heads, size) and log-sum-exp (B, rows, heads).

    A `whole` block is causal and has all rows, so its shape is the same in every step.
    """
    # q: (B, heads, rows, size); k, v: (B, kv_heads, keys, size)
    q, k, v = _heads_first(block, (q,), (k, v))
    mask = _mask_of(block, q)
    own = _block_kernels(q, mask, softcap, whole=whole)
    out, lse = own.forward(q, k, v, block.causal, mask)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_gradients(
    gradient: Tensor,
    qkv: Qkv,
    out: Tensor,
    lse: Tensor,
    block: AttentionBlock,
    softcap: float = 0.0,
    *,
    whole: bool = False,
) -> list[Tensor]:
    """The gradients of q, k, v from a block; `out` and `lse` cover all keys."""
    q, k, v = qkv
    g, q, out, lse, k, v = _heads_first(block, (gradient, q, out, lse), (k, v))
    mask = _mask_of(block, q)
    own = _block_kernels(q, mask, softcap, whole=whole)
    into = own.backward(
        g, (q, k, v), out, lse.contiguous(), block.causal, mask
    )
    return [x.transpose(1, 2) for x in into]


def _heads_first(
    block: AttentionBlock, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> list[Tensor]:
    batch, rows, times = block.batch, block.rows, block.keys
    # (B, rows or keys, heads, size), or (B, rows, heads) for lse
    of_queries = [x[batch, rows] for x in queries]
    of_keys = [x[batch, times] for x in keys]
    parts = of_queries + of_keys
    return [x.transpose(1, 2) for x in parts]


def _mask_of(block: AttentionBlock, q: Tensor) -> Tensor | None:
    """The mask added to scores, (B, heads, rows, keys), expanded without memory."""
    if block.band is None:
        return None
    first, window = block.band
    rows = q.shape[2]
    keys = block.keys.stop - block.keys.start
    # GPU kernels need mask rows aligned to 16 bytes.
    columns = -(-keys // 8) * 8
    room = q.new_full((rows, columns), -math.inf)[:, :keys]
    sees = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    # Row i sees keys first + i - window + 1 to first + i.
    sees = sees.tril(first).triu(first + 1 - window)
    room.masked_fill_(sees, 0.0)
    return room.expand(*q.shape[:2], -1, -1)


# ---- kernels, which take (B, heads, time, size)

Qkv = tuple[Tensor, Tensor, Tensor]
Mask = Tensor | None
Forward = Callable[[Tensor, Tensor, Tensor, bool, Mask], tuple[Tensor, Tensor]]
Backward = Callable[
    [Tensor, Qkv, Tensor, Tensor, bool, Mask], Sequence[Tensor]
]


class Kernels(NamedTuple):
    """The forward and the backward of an attention kernel.

    Forward takes q, k, v, a causal flag and an optional mask; backward also the output
    and log-sum-exp.
    """

    name: str
    forward: Forward
    backward: Backward


def _capped(softcap: float) -> Kernels:
    """The plain kernel with a softcap: no fused kernel of torch has one."""
    return Kernels(
        PLAIN.name,
        partial(_plain, softcap=softcap),
        partial(_plain_back, softcap=softcap),
    )


@cache
def _has_flash(device: torch.device) -> bool:
    """True if a device has torch's flash kernels: NVIDIA GPUs from Ampere on."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _prefers_cudnn(device: torch.device) -> bool:
    """True if torch prefers cuDNN's attention here: H100, B200 and variants."""
    if device.type != "cuda" or torch.version.hip:
        return False
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED"):
        return False
    cudnn: Any = torch.backends.cudnn  # its stubs are not typed
    version = cudnn.version() or 0
    return (
        version > 91500
        and torch.cuda.get_device_capability(device) in CUDNN_FIRST
    )


def _kernels(q: Tensor, mask: Mask = None) -> Kernels:
    """The kernels for these queries, with or without a mask."""
    masked = mask is not None
    return _kernels_of(q.device, q.dtype, q.shape[-1], masked=masked)


def _kernels_of(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    *,
    masked: bool = False,
    whole: bool = False,
) -> Kernels:
    """A device's kernels for a dtype and head size; meta tensors use the CPU's.

    Only a `whole` block may take cuDNN's kernels: they are built for each new shape, in
    some 30 ms.
    """
    if device.type in ("cpu", "meta"):
        return CPU
    flash = dtype in HALVES and size % 8 == 0 and not masked and size <= 256
    if flash and whole and size <= 128 and _prefers_cudnn(device):
        return CUDNN
    if flash and _has_flash(device):
        return FLASH
    # The memory-efficient kernel loads 16 bytes at once.
    fits = size * dtype.itemsize % 16 == 0
    return EFFICIENT if dtype != torch.float64 and fits else PLAIN


def _block_kernels(
    q: Tensor, mask: Mask, softcap: float, *, whole: bool
) -> Kernels:
    if softcap:
        return _capped(softcap)
    if whole and q.shape[2] > 1 and _prefers_cudnn(q.device):
        return _kernels_of(q.device, q.dtype, q.shape[-1], whole=True)
    return _kernels(q, mask)


def kernel_names(
    device: torch.device, dtype: torch.dtype, size: int
) -> dict[str, str]:
    """The names of the kernels used for heads of this size, by the kind of mask."""
    lengths = _kernels_of(device, dtype, size)
    masked = _kernels_of(device, dtype, size, masked=True)
    flash = lengths is FLASH
    return {
        "rows of one document": _kernels_of(
            device, dtype, size, whole=True
        ).name,
        "documents": f"{lengths.name} by lengths" if flash else lengths.name,
        "windows": f"{lengths.name} by lengths" if flash else masked.name,
        "soft caps": flex.NAME
        if flex.available(device, dtype)
        else PLAIN.name,
    }


@cache
def use_flash_3(device: torch.device) -> bool:
    """Make torch use FlashAttention 3 on Hopper, if installed; True if it does.

    `phalanx` calls flash attention through torch's operators, whose kernels this
    replaces for the process.
    """
    from torch.nn import attention as of_torch

    hopper = device.type == "cuda" and not torch.version.hip
    hopper = hopper and torch.cuda.get_device_capability(device) == (9, 0)
    activate = getattr(of_torch, "activate_flash_attention_impl", None)
    if (
        not hopper
        or activate is None
        or find_spec("flash_attn_interface") is None
    ):
        return False
    activate("FA3")
    return True


def _cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, causal, attn_mask=mask)
    return out, lse


def _cpu_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    into: Sequence[Tensor] = op(g, *qkv, out, lse, 0.0, causal, attn_mask=mask)
    return into


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = op(q, k, v, 0.0, causal)[:2]
    return out, lse


def _flash_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    ends = None, None, g.shape[2], qkv[1].shape[2]
    into: Sequence[Tensor] = op(
        g, *qkv, out, lse, *ends, 0.0, causal, *_no_dropout(g)
    )
    return into


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    outputs = op(q, k, v, None, True, 0.0, causal)
    out, lse = outputs[:2]
    return out, lse.reshape(q.shape[:-1])  # from (B, heads, rows, 1)


def _cudnn_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    # The state of the random generator, which is unused without dropout.
    seed, offset = (
        torch.zeros((), dtype=torch.int64, device=g.device) for _ in range(2)
    )
    no_bias = None
    ends = (None, None, g.shape[2], qkv[1].shape[2])
    into: Sequence[Tensor] = op(
        g,
        *qkv,
        out,
        lse.unsqueeze(-1),
        seed,
        offset,
        no_bias,
        *ends,
        0.0,
        causal,
    )
    return into


def _no_dropout(g: Tensor) -> tuple[Tensor, Tensor]:
    """The state of a random generator, unused without dropout."""
    seed, offset = (
        torch.zeros(n, dtype=torch.uint64, device=g.device) for n in ((2,), ())
    )
    return seed, offset


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Mask
) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    # It takes no groups.
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs = op(q, k, v, mask, True, 0.0, causal)
    out, lse = outputs[:2]
    # The kernel pads it to a multiple of 32.
    return out, lse[..., : q.shape[2]]


def _efficient_back(
    g: Tensor, qkv: Qkv, out: Tensor, lse: Tensor, causal: bool, mask: Mask
) -> Sequence[Tensor]:
    q, k, v = qkv
    kv_heads = k.shape[1]
    groups = q.shape[1] // kv_heads
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    seed, offset = (
        torch.zeros((), dtype=torch.int64, device=g.device) for _ in range(2)
    )
    lse = F.pad(lse, (0, -lse.shape[2] % 32))
    wanted = [True, True, True, False]
    into = op(g, q, k, v, mask, out, lse, seed, offset, 0.0, wanted, causal)
    # the gradients of k and v, summed over the query heads that share each
    return into[0], *(
        x.unflatten(1, (kv_heads, groups)).sum(2) for x in into[1:3]
    )


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Mask,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention by matmuls, in strips of queries that bound the score matrix."""
    parts = []
    for _, seen, scores in _strips(q, k, causal, mask, softcap):
        lse = scores.logsumexp(-1)  # (B, kv_heads, groups * rows)
        # scores: (B, kv_heads, groups * rows, seen); minus lse, exp is the softmax
        out = (scores - lse.unsqueeze(-1)).exp_() @ v[:, :, :seen].to(
            scores.dtype
        )
        shape = *q.shape[:2], -1
        # from heads folded into rows to (B, heads, rows, size) and (B, heads, rows)
        out = out.view(*shape, q.shape[3])
        out = out.to(q.dtype)
        parts.append((out, lse.view(shape)))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_back(
    g: Tensor,
    qkv: Qkv,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Mask,
    softcap: float = 0.0,
) -> Sequence[Tensor]:
    q, k, v = qkv
    into_q, into_k, into_v = (torch.zeros_like(x, dtype=_wide(x)) for x in qkv)
    for rows, seen, scores in _strips(q, k, causal, mask, softcap):
        own, wide = q[:, :, rows], scores.dtype
        # the strip's dO, O and q, as (B, kv_heads, groups * rows, size)
        dy, y, folded = (
            _folded(x, k).to(wide)
            for x in (g[:, :, rows], out[:, :, rows], own)
        )
        # The softmax again, from the recomputed scores and the saved log-sum-exp.
        of_rows = lse[:, :, rows].reshape(scores.shape[:-1])
        weights = (scores - of_rows.unsqueeze(-1)).exp_()
        # The gradient of the scores: P * (dP - sum(dO * O)), as in flash attention.
        values = v[:, :, :seen].mT.to(wide)
        mean = (dy * y).sum(-1, keepdim=True)
        inside = weights * (dy @ values - mean)
        # Derivative of c tanh(s / c). Clamped, as it is zero for masked keys, whose
        # score is -inf.
        if softcap:
            slope = 1 - (scores / softcap).square_()
            inside *= slope.clamp_(min=0)
        # Scores are q k' / sqrt(size), so dq and dk both carry this factor.
        inside *= q.shape[-1] ** -0.5
        into_rows = inside @ k[:, :, :seen].to(wide)
        into_q[:, :, rows] = into_rows.view(own.shape)
        # `folded` stacks the query heads of a key head, so the products sum over them.
        into_k[:, :, :seen] += inside.mT @ folded
        into_v[:, :, :seen] += weights.mT @ dy
    return into_q, into_k, into_v


def _strips(
    q: Tensor, k: Tensor, causal: bool, mask: Mask, softcap: float
) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield strips of rows, their number of keys, and masked scores.

    Scores are (B, kv_heads, query heads per kv head * rows, keys), in float32 or wider.
    """
    wide, length = _wide(q), q.shape[2]
    for start in range(0, length, STRIP):
        rows = slice(start, min(start + STRIP, length))
        seen = rows.stop if causal else k.shape[2]
        # own: (B, kv_heads, groups * rows, size); keys: (B, kv_heads, size, seen)
        own = _folded(q[:, :, rows], k).to(wide)
        keys = k[:, :, :seen].mT.to(wide)
        scale = q.shape[-1] ** -0.5
        scores = own @ keys * scale
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += _folded(mask[:, :, rows], k)
        if causal:
            # A strip's row i is row start + i of the queries, and sees keys up to
            # itself.
            size = rows.stop - start, seen
            later = torch.ones(size, dtype=torch.bool, device=q.device).triu(
                start + 1
            )
            groups = q.shape[1] // k.shape[1]
            later = later.repeat(groups, 1)
            scores.masked_fill_(later, -math.inf)
        yield rows, seen, scores


def _folded(x: Tensor, k: Tensor) -> Tensor:
    """Stack heads that share a key: (B, kv_heads, heads / kv_heads * rows, size)."""
    batch, kv_heads = x.shape[0], k.shape[1]
    return x.reshape(batch, kv_heads, -1, x.shape[-1])


CPU = Kernels("flash attention of the CPU", _cpu, _cpu_back)
CUDNN = Kernels("cuDNN", _cudnn, _cudnn_back)
FLASH = Kernels("flash attention", _flash, _flash_back)
EFFICIENT = Kernels("memory-efficient attention", _efficient, _efficient_back)
PLAIN = Kernels("products in strips of rows", _plain, _plain_back)
