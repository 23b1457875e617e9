"""Which tensors' storages are alive, counted as operations make them. Works on meta tensors too.

Neither the allocator nor the process's size is asked: both round, cache and hold what is not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..split.shard import storage_of

__all__ = ["Live"]


class Live(TorchDispatchMode):
    """While it is on (in this thread), every storage that an operation makes is known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            # A view of, or a write into, what was there before is nothing new.
            if isinstance(tensor, Tensor) and storage_of(tensor) not in given:
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.known[reference.cdata] = (reference, storage.nbytes())

    def bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        gone = [k for k, (r, _) in self.known.items() if r.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self.known[key]
        return sum(size for _, size in self.known.values())
