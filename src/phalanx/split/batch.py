"""The part of a step's batch that one rank works on, in microbatches.

A batch is named tensors whose first dim is the sequence (or row) and, for tokens, the second is time.
Nothing needs to divide: shares differ by one sequence at most, time is padded at its end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..layout import Layout
from .tensor import IGNORED

__all__ = ["count_valid", "microbatches", "share"]


def share(size: int, parts: int, place: int) -> slice:
    """Which of `size` things place `place` of `parts` takes; the first take one more."""
    each, more = divmod(size, parts)
    start = place * each + min(place, more)
    return slice(start, start + each + (place < more))


def microbatches(batch: Mapping[str, Tensor], layout: Layout, dp: int) -> list[dict[str, Tensor]]:
    """The microbatches of the ranks at place `dp`."""
    whole = _padded(batch, layout.tp if layout.seq else 1)
    size = next(iter(whole.values())).shape[0]
    mine = {name: x[share(size, layout.dp, dp)] for name, x in whole.items()}
    own = next(iter(mine.values())).shape[0]
    return [
        {name: x[share(own, layout.microbatches, m)].contiguous() for name, x in mine.items()}
        for m in range(layout.microbatches)
    ]


def _padded(batch: Mapping[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """Time made a multiple: padding is a document of its own whose targets count nothing."""
    if "tokens" not in batch:
        return dict(batch)
    short = -batch["tokens"].shape[1] % multiple
    if not short:
        return dict(batch)
    fills = {"tokens": 0, "targets": IGNORED, "documents": -1, "positions": 0, "noise": 0}
    return {
        name: torch.nn.functional.pad(x, (0, short), value=fills[name]) for name, x in batch.items()
    }


def count_valid(batch: Mapping[str, Tensor]) -> int:
    """How many targets a batch really has: what the loss is divided by."""
    targets = batch.get("targets")
    if targets is None or targets.is_floating_point():
        return next(iter(batch.values())).shape[0]
    return int((targets != IGNORED).sum())
