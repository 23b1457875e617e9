"""Whole weights of a model whose shards are distributed over ranks, one weight at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checkpoint import owned
from .checkpoint_format import WEIGHT
from .parallelize import ModelPart


@torch.no_grad()
def whole_weights(part: ModelPart) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight by name, whole and on the device, in the order of names.

    Collective, and all ranks must take all weights. Each weight is the all-reduced sum
    of the parts that ranks own, so that a rank holds only one whole weight at a time.
    """
    # Elements that this rank writes to checkpoints: each exists once.
    mine: dict[str, list[tuple[Any, Tensor]]] = {}
    for tensor, numbers in owned(part.local, part.updates):
        if tensor.kind == WEIGHT:
            mine.setdefault(tensor.name, []).append(
                (tensor.shards[0], numbers)
            )
    group = part.everyone
    # Sums of one rank's values and zeros are exact.
    master = next(iter(part.local.every_unit)).precision.master
    shapes = {
        name: weight.shape for name, weight in part.model.weights.items()
    }
    for name in sorted(shapes):
        whole = torch.zeros(shapes[name], dtype=master, device=group.device)
        for shard, numbers in mine.get(name, ()):
            _put(whole, shard, numbers)
        group.all_reduce(whole)
        yield name, whole


def _put(whole: Tensor, shard: Any, numbers: Tensor) -> None:
    """Copy a rank's elements of a weight to their place in the whole weight."""
    # The padded part, then its box in the whole.
    local = torch.zeros(shard.local, dtype=whole.dtype, device=whole.device)
    local.view(-1)[shard.start : shard.stop] = numbers.to(whole.device)
    inside = tuple(slice(0, stop - start) for start, stop in shard.box)
    place = tuple(slice(start, stop) for start, stop in shard.box)
    whole[place] += local[inside]
