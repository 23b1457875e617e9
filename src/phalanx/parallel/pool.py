"""Flat buffers for weights and gradients that come and go, and the identity of a storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor


class BufferPool:
    """A small set of flat buffers, taken and given back; what was once made is used again.

    `check` proves how many are out at once; `most` is how many there were. `empty` makes them: where
    ranks share memory, in what they share, so that the others read and write them where they lie.
    With `poison` a buffer is NaN until it is written to, when it is new and after it was given back, so
    that a use before the gather or after the drop shows.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
        poison: bool = False,
    ) -> None:
        self.device, self.poison = device, poison
        self.empty = empty or (
            lambda n, dtype: torch.empty(n, dtype=dtype, device=device)
        )
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self.made: Counter[tuple[int, torch.dtype]] = Counter()
        self.most: Counter[tuple[int, torch.dtype]] = Counter()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        waiting = self.free.setdefault((numel, dtype), [])
        if waiting:
            return waiting.pop()
        self.count(numel, dtype)
        new = self.empty(numel, dtype)
        return new.fill_(math.nan) if self.poison else new

    def count(self, numel: int, dtype: torch.dtype, by: int = 1) -> None:
        """Count so much memory as made, or as let go."""
        key = numel, dtype
        self.made[key] += by
        self.most[key] = max(self.most[key], self.made[key])

    def give(self, buffer: Tensor, *, keep: bool = True) -> None:
        """Give a buffer back: to be used again, or to `keep` nothing of it, to the allocator."""
        if self.poison:
            buffer.fill_(math.nan)
        if keep:
            self.free[buffer.numel(), buffer.dtype].append(buffer)
        else:
            self.count(buffer.numel(), buffer.dtype, -1)


def storage_of(tensor: Tensor) -> int:
    """One number for all views of one storage. Not its address: on meta all have the same."""
    return int(tensor.untyped_storage()._cdata)
