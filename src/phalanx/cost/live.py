"""Counts the bytes of live tensor storages as operations create them.

Neither the allocator nor the size of the process can tell: both round, cache and hold
unused memory. Nor can the profiler: with its memory events, ranks over gloo end with a
corrupted heap.
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
    """While active in this thread, tracks every storage until it is freed.

    Memory that a kernel allocates internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0  # bytes of live storages
        self.most = 0  # the peak of `now`
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Noted before the call, which may write into what it was given.
        given = {
            storage_of(x)
            for x in tree_iter((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            # A view of an existing storage or a write into it is not new. Meta tensors
            # hold nothing.
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
        """Add to the live bytes; a negative size subtracts."""
        self.now += size
        self.most = max(self.most, self.now)
