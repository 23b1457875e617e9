"""One rank's part of a step's batch, in microbatches.

A batch is named tensors whose first dim is the sequence (or row) and, for tokens, the
second is time. Nothing needs to divide evenly: shares differ by at most one sequence,
and time is padded at its end.

Along cp, time is cut by head and tail. With a ring of n there are 2n chunks, and rank r
holds chunks r and 2n - 1 - r: an early one, preceded by few keys, and a late one,
preceded by many. So causal attention costs every rank the same (Brandon et al. 2023,
"Striped Attention", name the imbalance; the halves are Llama 3's). Inside a rank of the
ring, the Ulysses ranks hold equal runs of its tokens, and with `seq`, ranks of tp hold
equal runs of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import Layout, LayoutError
from ..layout.exact import held_runs, uneven_microbatches
from ..models import IGNORED
from ..models.ahead import AHEAD_TARGETS, look_ahead

VALID = "valid"  # in a padded batch, marks the tokens that are not padding
# Padding is a document of its own, and its targets are ignored.
DOCUMENTS = "documents"
_FILLS = {"targets": IGNORED, AHEAD_TARGETS: IGNORED, DOCUMENTS: -1}


def share(size: int, parts: int, index: int) -> slice:
    """The slice of `size` items for part `index` of `parts`; first parts are longer."""
    # share(7, 3, i) is 0:3, 3:5 and 5:7.
    each, more = divmod(size, parts)
    start = index * each + min(index, more)
    return slice(start, start + each + (index < more))


def time_multiple(layout: Layout) -> int:
    """The multiple to which sequences are padded, so that ranks hold equal parts."""
    ring, ulysses = layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses")
    # `exact` adds gradients over equal parts of time, with seq or without.
    parts = layout.tp if layout.seq else 1
    inside = ulysses * max(parts, layout.exact)
    # A rank of a ring holds two chunks of equal length.
    if layout.time_parts > 1:
        return layout.time_parts * layout.exact
    return ring * (math.lcm(2, inside) if ring > 1 else inside)


def held_times(length: int, ring: int, ulysses: int, cp: int) -> Tensor:
    """The token indices of a sequence that rank `cp` holds, in its order.

    `length` is a multiple of `time_multiple`. No other function knows this order.
    """
    outer, inner = divmod(cp, ulysses)
    times = torch.arange(length)
    # ring = 2, length = 8: rank 0 holds the times 0 1 6 7, and rank 1 holds 2 3 4 5.
    if ring > 1:
        chunks = times.view(2 * ring, -1)  # (2 * ring, length / (2 * ring))
        times = torch.cat((chunks[outer], chunks[2 * ring - 1 - outer]))
    # The Ulysses ranks of one ring place hold equal runs of its tokens.
    return times.view(ulysses, -1)[inner]


def _own_times(length: int, layout: Layout, cp: int) -> Tensor:
    """The token indices that rank `cp` holds, also in a layout of `exact`."""
    if layout.time_parts > 1:
        runs = torch.arange(length).view(layout.time_parts, -1)
        return runs[held_runs(layout, cp)].flatten()
    ring, ulysses = layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses")
    return held_times(length, ring, ulysses, cp)


def microbatches(
    batch: Mapping[str, Tensor],
    layout: Layout,
    dp: int | None,
    cp: int = 0,
    *,
    ahead: int = 0,
) -> list[dict[str, Tensor]]:
    """The microbatches of the ranks at these coordinates on dp and cp.

    `ahead` is the number of modules that predict later tokens. What they take of a row
    is found before cp cuts it.

    With ep, `dp` counts over dp and ep. If `dp` is None, the batch already holds one dp
    rank's rows alone.

    Every per-token tensor is sharded alike, also positions: they come from the batch,
    so a cp rank rotates its queries and keys by the tokens' true positions.
    """
    # Time first, then rows: cp shards dim 1, and dp and the microbatches shard dim 0.
    if ahead:
        batch = {**batch, **look_ahead(batch, ahead)}
    whole = _held(batch, layout, cp)
    size = next(iter(whole.values())).shape[0]
    mine = slice(0, size) if dp is None else share(size, layout.data, dp)
    own = mine.stop - mine.start
    every = size if dp is not None else size * layout.data
    if uneven := uneven_microbatches(layout, every):
        raise LayoutError(" ".join(uneven))
    parts = [
        share(own, layout.microbatches, m) for m in range(layout.microbatches)
    ]
    # (B, T, ...): rows of this dp rank, divided over microbatches
    return [
        {n: x[mine][part].contiguous() for n, x in whole.items()}
        for part in parts
    ]


def on_device(
    batch: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Copy the batch to the device, except documents, which kernel launches need."""

    def sent(x: Tensor) -> Tensor:
        # A GPU copies from pinned memory while the host continues.
        pinned = (
            x.pin_memory() if device.type == "cuda" and not x.is_cuda else x
        )
        return pinned.to(device, non_blocking=True)

    return {
        name: x if name == DOCUMENTS else sent(x) for name, x in batch.items()
    }


def _held(
    batch: Mapping[str, Tensor], layout: Layout, cp: int
) -> dict[str, Tensor]:
    """The batch, with each per-token tensor padded in time and then sharded along cp."""
    if "tokens" not in batch:
        return dict(batch)
    size, held = batch["tokens"].shape[:2], dict(batch)
    # Only a padded batch has marks; without them every token is valid.
    if short := -size[1] % time_multiple(layout):
        held[VALID] = torch.ones_like(batch["tokens"], dtype=torch.bool)
    for name, x in held.items():
        # Not per token: one entry a row, such as the inputs of an MLP.
        if x.shape[:2] != size:
            continue
        if short:
            fill = x.new_full(
                (x.shape[0], short, *x.shape[2:]), _FILLS.get(name, 0)
            )
            x = torch.cat((x, fill), 1)
        apart = layout.cp > 1 or layout.time_parts > 1
        if apart and name != DOCUMENTS:
            # Every rank holds the documents of all tokens, so attention masks need no
            # messages.
            # (B, T / cp, ...)
            x = x[:, _own_times(x.shape[1], layout, cp).to(x.device)]
        held[name] = x
    return held


def edge_shape(
    batch: Mapping[str, Tensor], width: int, time_cut: int
) -> tuple[int, ...]:
    """The shape of activations between two pieces for a rank's microbatch.

    With `seq`, ranks of tp hold equal parts of its time.
    """
    if "tokens" not in batch:
        return tuple(next(iter(batch.values())).shape)
    rows, tokens = batch["tokens"].shape
    return rows, tokens // time_cut, width


def count_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """The number of real tokens in a batch, as a tensor on its device."""
    return (
        batch[VALID].sum()
        if VALID in batch
        else torch.ones_like(batch["tokens"]).sum()
    )


def count_valid(batch: Mapping[str, Tensor]) -> Tensor:
    """The number of real targets in a batch, which divides the loss."""
    targets = batch.get("targets")
    if targets is None or targets.is_floating_point():
        first = next(iter(batch.values()))
        return first.new_full((), first.shape[0], dtype=torch.int64)
    return (targets != IGNORED).sum()
