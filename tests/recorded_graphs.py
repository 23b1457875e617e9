"""Graphs of a device that this machine lacks: a list of operations on fixed tensors.

As a CUDA graph does, a recording runs nothing while it is made, reads and writes the
addresses that it was made with, and leaves memory that nobody holds to other graphs.
Such memory is NaN after the replay of any graph, and all of it is before the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from phalanx.parallel.pool import storage_of


class Call(NamedTuple):
    """An operation, with aliases of the tensors that it reads and of those it makes."""

    function: Any
    args: Any
    kwargs: Any
    made: list[Tensor]


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Recording(TorchDispatchMode):
    """The operations of a function, in their order."""

    def __init__(self, aliases: Counter[int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        # By storage: a tensor that was made here, and the aliases that recordings hold.
        self.own: dict[int, Tensor] = {}
        self.aliases = aliases
        self.spare: list[Tensor] = []
        # Memory of earlier recordings that this one may use.
        self.free: list[Tensor] = []
        self.replays = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # compiled functions run as such, not eagerly

    def _alias(self, x: Tensor) -> Tensor:
        """Another tensor on the same memory, of which autograd knows nothing."""
        self.aliases[storage_of(x)] += 1
        return x.data

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        written = list(_written(function, *given))
        before = {storage_of(x) for x in tensors_in(given)}
        # Nothing runs while a graph is recorded. Only shapes matter here, and writes
        # to tensors from outside would stay.
        outside = {storage_of(x) for x in written} - {*self.own}
        out = written[0] if outside else function(*given[0], **given[1])
        out = tree_map_only(Tensor, partial(self._placed, before), out)
        made = [x for x in tensors_in(out) if storage_of(x) not in before]
        for x in made:
            self.own[storage_of(x)] = self._alias(x)
        # Views need no memory of their own.
        if made or written:
            aliases = tree_map_only(Tensor, self._alias, given)
            own = [self._alias(x) for x in made]
            self.calls.append(Call(function, *aliases, own))
        return out

    def _placed(self, before: set[int], x: Tensor) -> Tensor:
        """A new tensor, in memory of an earlier recording if some has its size."""
        if storage_of(x) in before or storage_of(x) in self.own:
            return x
        size = x.untyped_storage().nbytes()
        for number, spare in enumerate(self.free):
            alike = spare.untyped_storage().nbytes() == size
            if alike and spare.dtype == x.dtype and not x.storage_offset():
                place = self.free.pop(number).data
                return place.as_strided(x.shape, x.stride(), 0)
        return x

    def find_spare(self) -> None:
        """Find the memory that nothing but recordings hold now."""
        uses: Any = torch._C._storage_Use_Count  # type: ignore[attr-defined]
        probe = torch.empty(1)
        more = uses(storage_of(probe)) - 1
        self.spare = [
            x
            for key, x in self.own.items()
            if uses(key) == self.aliases[key] + more
        ]

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for call in self.calls:
                out = tensors_in(call.function(*call.args, **call.kwargs))
                # An operation in place has made nothing.
                for into, x in zip(call.made, out, strict=False):
                    into.copy_(x)


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes to."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = (
            args[number] if number < len(args) else kwargs.get(argument.name)
        )
        yield from tensors_in(given)


def _poison(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        if x.is_floating_point():
            size = x.untyped_storage().nbytes() // x.itemsize
            x.as_strided((size,), (1,), 0).fill_(math.nan)


class Recorder:
    """Records graphs on the CPU.

    Memory that one recording has freed goes to later ones of the same pool, as on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings: list[Recording] = []
        self.sharing: list[Recording] = []  # of the shared pool
        self.aliases: Counter[int] = Counter()

    def __call__(
        self, run: Callable[[], None], *, kept: bool
    ) -> Callable[[], None]:
        recording = Recording(self.aliases)
        if not kept:
            recording.free = self._freed()
        with recording:
            run()
        recording.free = []
        _poison(recording.own.values())
        self.recordings.append(recording)
        if not kept:
            self.sharing.append(recording)
        # What a graph held before may be free by now, and used by later graphs.
        for each in self.recordings:
            each.find_spare()

        def replay() -> None:
            recording.replay()
            for each in self.recordings:
                _poison(each.spare)

        return replay

    def _freed(self) -> list[Tensor]:
        """Memory that recordings of the shared pool have used, and that nothing holds."""
        for each in self.recordings:
            each.find_spare()
        found = {storage_of(x): x for each in self.sharing for x in each.spare}
        for each in self.recordings:
            each.spare = []  # no further references
        return [*found.values()]
