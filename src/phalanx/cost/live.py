"""Counts the bytes of live tensor storages, as operations make them.

Neither the allocator nor the process's size can be asked: both round, cache and hold unused memory.
The profiler cannot either: with its memory events, ranks over gloo end with a corrupted heap.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..parallel.pool import storage_of


class Live(TorchDispatchMode):
    """While it is on (in this thread), every storage that an operation makes is known until it is
    gone. What a kernel takes for itself inside is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0  # bytes of the storages that are alive
        self.most = 0  # the highest that `now` has been
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            storage_of(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            # A view of, or a write into, what was there before is nothing new; meta holds nothing.
            if isinstance(tensor, Tensor) and not (
                tensor.is_meta or storage_of(tensor) in given
            ):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = int(storage._cdata), storage.nbytes()
        if key in self.known:
            return

        def gone(_: object) -> None:
            del self.known[key]
            self.count(-size)

        self.known[key] = weakref.ref(storage, gone)
        self.count(size)

    def count(self, size: int) -> None:
        """Adds to the live bytes, or subtracts."""
        self.now += size
        self.most = max(self.most, self.now)
