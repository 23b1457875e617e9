"""A pool of flat buffers for weights and gradients, and the identity of a storage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor


class BufferPool:
    """A small set of flat buffers that are taken, given back and reused.

    `check` proves how many buffers are in use at once. `most` is the largest number of
    buffers of each size, `most_bytes` the peak of bytes in use. The peak can be smaller
    than all buffers together, because a buffer serves its own size only. `empty`
    allocates them: where ranks share memory, in a shared region, so that other ranks
    read and write them in place. With `poison`, new and returned buffers are filled
    with NaN, so a use before the gather or after the drop shows.
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
        self.used_bytes = self.most_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """The bytes of buffers that were not among those in use at the peak."""
        made = sum(
            number * numel * dtype.itemsize
            for (numel, dtype), number in self.most.items()
        )
        return made - self.most_bytes

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        waiting = self.free.setdefault((numel, dtype), [])
        if waiting:
            self._use(numel * dtype.itemsize)
            return waiting.pop()
        self.count(numel, dtype)
        new = self.empty(numel, dtype)
        return new.fill_(math.nan) if self.poison else new

    def count(self, numel: int, dtype: torch.dtype, by: int = 1) -> None:
        """Count `by` buffers as made; a negative number as released."""
        key = numel, dtype
        self.made[key] += by
        self.most[key] = max(self.most[key], self.made[key])
        self._use(by * numel * dtype.itemsize)

    def _use(self, size: int) -> None:
        self.used_bytes += size
        self.most_bytes = max(self.most_bytes, self.used_bytes)

    def give(self, buffer: Tensor, *, keep: bool = True) -> None:
        """Give a buffer back, to be reused or, without `keep`, to be freed."""
        # On a GPU this runs behind launched work that still reads the values.
        if self.poison:
            buffer.fill_(math.nan)
        if keep:
            self.free[buffer.numel(), buffer.dtype].append(buffer)
            self._use(-buffer.nbytes)
        else:
            self.count(buffer.numel(), buffer.dtype, -1)


def storage_of(tensor: Tensor) -> int:
    """A number shared by all views of one storage, even on meta."""
    return int(tensor.untyped_storage()._cdata)
