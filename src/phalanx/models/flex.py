"""Attention with soft caps on a GPU, by torch's flex attention.

flex_attention makes one Triton kernel for each direction, which never writes the scores to
memory. A mask of blocks of 128 queries by 128 keys leaves out pairs that do not attend.
Everywhere else `kernels.py` computes soft caps by matmuls in strips of rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .fused import compiles_kernels

NAME = "flex attention"
# Fewer rows use the strips. Generated text has one row at a time.
FEWEST_ROWS = 1024
# Set to 1: soft caps take flex attention on a GPU. It has not run on one yet.
ON = "PHALANX_FLEX"
_BLOCK = 128  # rows and keys of a block, torch's own default
# Compiled variants in a process. Beyond this limit torch would run eagerly and write
# all scores to memory.
_ENTRIES = 64
_HALVES = torch.bfloat16, torch.float16
_LOG = logging.getLogger(__name__)

Edges = tuple[tuple[int, ...], ...]

_dispatch: Any = torch._C  # its stubs leave these functions out


def _dispatch_keys() -> tuple[Any, Any]:
    included = _dispatch._dispatch_tls_local_include_set()
    return included, _dispatch._dispatch_tls_local_exclude_set()


# Dispatch keys outside any operator: this module is imported there.
_OUTSIDE = _dispatch_keys()


def _outside() -> Any:
    """A context with the dispatch keys outside any operator, so that autograd records.

    Without it torch would compile again for each set of dispatch keys.
    """
    return _dispatch._ForceDispatchKeyGuard(*_OUTSIDE)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """True if flex attention can run on a device in a dtype."""
    if os.environ.get(ON, "0") == "0":
        return False
    return device.type == "cuda" and dtype in _HALVES and compiles_kernels()


class BlockRows:
    """The pairs of a query block and a key block that attend, in one sequence.

    `edges` are the starts of its documents and the number of its keys. The rows are the
    last positions of the keys.
    """

    def __init__(self, edges: tuple[int, ...], rows: int, window: int) -> None:
        keys = edges[-1]
        time = np.arange(keys)
        runs = np.searchsorted(edges, time, side="right") - 1
        self.runs = runs  # the number of each key's document
        # the first key that each row sees; it never falls
        low = np.maximum(np.array(edges)[runs], time + 1 - window)
        blocks = -(-rows // _BLOCK)
        first = keys - rows + np.arange(blocks) * _BLOCK
        stop = first + _BLOCK  # beyond the keys if the last block is not whole
        last = np.minimum(stop, keys) - 1
        begin = np.arange(-(-keys // _BLOCK)) * _BLOCK
        end = begin + _BLOCK
        # (blocks of rows, blocks of keys)
        self.some = (end > low[first][:, None]) & (begin <= last[:, None])
        whole = (stop <= keys)[:, None] & (end <= keys)
        after = begin >= low[last][:, None]
        before = end - 1 <= first[:, None]
        self.full = whole & after & before


def _indices(there: np.ndarray) -> tuple[Tensor, Tensor]:
    """The number of attended blocks in each row, and all indices, attended first."""
    count = there.sum(-1).astype(np.int32)
    order = np.argsort(~there, axis=-1, kind="stable").astype(np.int32)
    return torch.from_numpy(count), torch.from_numpy(order)


@lru_cache(maxsize=32)
def block_mask(
    edges: Edges, rows: int, window: int, device: torch.device
) -> Any:
    """The mask of a batch, from the starts of documents in each sequence.

    A batch has the same mask in all layers and in both directions, and so has every batch
    without documents.
    """
    from torch.nn.attention.flex_attention import BlockMask

    keys = edges[0][-1]
    window = window or keys
    before = keys - rows
    found = [BlockRows(each, rows, window) for each in edges]
    runs = np.stack([each.runs for each in found]).astype(np.int32)
    document = torch.from_numpy(runs).to(device)  # (B, keys)

    def sees(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        time = row + before
        near = (key <= time) & (key > time - window)
        return near & (document[b, time] == document[b, key])

    # (B, 1, blocks of rows, blocks of keys): the same for all heads
    some = np.stack([each.some for each in found])[:, None]
    full = np.stack([each.full for each in found])[:, None]
    tables: dict[str, Any] = {}
    for name, blocks in (("", some & ~full), ("full_", full)):
        # Forward and dq go along a row of blocks, dk and dv along a column.
        of_rows, of_columns = blocks, blocks.swapaxes(-1, -2)
        for side, there in (("kv", of_rows), ("q", of_columns)):
            count, indices = (x.to(device) for x in _indices(there))
            tables[f"{name}{side}_num_blocks"] = count
            tables[f"{name}{side}_indices"] = indices
    # Not `from_kv_blocks`, whose vmap fails inside of a dispatch mode.
    return BlockMask(
        seq_lengths=(rows, keys),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=sees,
        **tables,
    )


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, softcap: float
) -> tuple[Tensor, Tensor]:
    """The output (B, heads, rows, size) and log-sum-exp (B, heads, rows)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def capped(score: Tensor, *where: Tensor) -> Tensor:
        # c tanh(s / c) by a sigmoid, which Triton computes in fewer instructions.
        share = torch.sigmoid(score * (2.0 / softcap))
        return softcap * (2.0 * share - 1.0)

    out, more = flex_attention(
        q,
        k,
        v,
        score_mod=capped,
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert more.lse is not None
    return out, more.lse


@cache
def _compiled() -> Any:
    compiled: Any = torch.compile
    return compiled(_flex, dynamic=False)


def _call(
    qkv: Sequence[Tensor], mask: Any, softcap: float
) -> tuple[Tensor, Tensor]:
    """The result of `_flex` for q, k and v (B, T, heads, size)."""
    import torch._dynamo

    # Thread-local, and autograd calls from a thread of its own.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _ENTRIES)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    out, lse = _compiled()(q, k, v, mask, softcap)
    return out, lse


@torch.no_grad()
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, softcap: float
) -> tuple[Tensor, Tensor]:
    """The output (like q) and log-sum-exp (B, rows, heads) of q (B, rows, heads, size)."""
    with _outside():
        given = [x.detach() for x in (q, k, v)]
        out, lse = _call(given, mask, softcap)
    return out.transpose(1, 2), lse.transpose(1, 2)


def gradients(
    gradient: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Any,
    out: Tensor,
    lse: Tensor,
    softcap: float,
    *,
    sinks: bool,
) -> list[Tensor]:
    """The gradients of q, k and v; `out` and `lse` may include `sinks`.

    torch has no call of flex attention's backward alone, so the forward runs again: two
    more matmuls beside the backward's five.
    """
    with _outside(), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in qkv]
        own, own_lse = _call(leaves, mask, softcap)
        into = gradient.detach().transpose(1, 2)
        if not sinks:
            return list(torch.autograd.grad(own, leaves, into))
        given = _with_sinks(into, (own, own_lse), out, lse)
        return list(torch.autograd.grad((own, own_lse), leaves, given))


@torch.no_grad()
def _with_sinks(
    into: Tensor, result: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the result without sinks, from that of the result with sinks.

    The result with sinks is the one without, times the keys' share of the denominator:
    exp(own_lse - lse).
    The derivative of the former by own_lse is share * (own - out).
    """
    own, own_lse = result
    share = (own_lse - lse.transpose(1, 2)).exp().unsqueeze(-1)
    weighted = into * share
    beyond = own - out.transpose(1, 2)
    into_lse = (weighted * beyond).sum(-1)
    return weighted.to(own.dtype), into_lse.to(own_lse.dtype)


def sample(
    shapes: tuple[torch.Size, torch.Size],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor]]:
    """A gradient, and q, k and v of these shapes, for a comparison with the strips."""
    generator = torch.Generator(device).manual_seed(0)
    of_q, of_k = shapes
    drawn = [
        torch.randn(size, generator=generator, device=device).to(dtype)
        for size in (of_q, of_q, of_k, of_k)
    ]
    return drawn[0], drawn[1:]


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raise unless results in 16 bits agree with those of the strips."""
    for one, other in zip(found, wanted, strict=True):
        apart = float((one.float() - other.float()).norm())
        size = float(other.float().norm())
        if not apart <= 0.02 * size:
            raise ValueError(f"results differ by {apart / size:.2g}")


def warn(device: torch.device, error: Exception) -> None:
    """Log that the strips replace flex attention on this device, with the reason."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    _LOG.warning(
        "soft caps take matmuls in strips on %s, in place of flex attention: %s",
        device,
        reason,
    )
