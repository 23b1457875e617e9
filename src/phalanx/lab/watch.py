"""A world whose wires write down what goes over them, and the bytes a rank holds at every moment.

The wires below are the real ones; nothing is changed on the way.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..comm import Group, Work, World
from ..comm.base import Call

__all__ = ["Live", "WatchedWorld", "flows"]

# wire, call, the (from, to, bytes) that concern this rank, start, end
Told = Callable[[Group, Call, list[tuple[int, int, float]], float, float], None]


def flows(call: Call, place: int, size: int) -> list[tuple[int, int, float]]:
    """What a call sends from this place and to it, as (from, to, bytes) by place in the group."""
    others = [i for i in range(size) if i != place]
    x = float(call.x.numel() * call.x.element_size())
    root = call.at
    if call.kind in ("all_gather", "reduce_scatter", "all_reduce"):
        # All-reduce is a reduce-scatter of equal parts, then an all-gather of them.
        each = {"all_gather": x, "reduce_scatter": x / size, "all_reduce": 2 * x / size}[call.kind]
        return [(place, i, each) for i in others] + [(i, place, each) for i in others]
    if call.kind in ("broadcast", "scatter"):
        return [(root, i, x) for i in others] if place == root else [(root, place, x)]
    if call.kind in ("reduce", "gather"):
        return [(i, root, x) for i in others] if place == root else [(place, root, x)]
    if call.kind == "all_to_all":
        row = call.x[:1].numel() * call.x.element_size()
        sent = [(place, i, float(call.in_splits[i] * row)) for i in others]
        return sent + [(i, place, float(call.out_splits[i] * row)) for i in others]
    if call.kind in ("send", "receive"):
        return [(place, root, x) if call.kind == "send" else (root, place, x)]
    return []


class WatchedWork(Work):
    """A call under way, which is written down once it has been waited for."""

    def __init__(self, inner: Work, waited: Callable[[Work], None]) -> None:
        self._inner, self._waited = inner, waited
        self._told = False

    def wait(self) -> None:
        if not self._told:
            self._told = True
            self._waited(self._inner)

    def done(self) -> bool:
        return self._inner.done()


class WatchedGroup(Group):
    """A wire that tells what it carries."""

    def __init__(self, inner: Group, told: Told, live: Live) -> None:
        super().__init__(inner.name, inner.rank, inner.ranks, inner.device)
        self._inner, self._told, self._live = inner, told, live

    def _begin(self, call: Call) -> Work:
        start = time.perf_counter()
        moved = [
            (self.ranks[source], self.ranks[to], size)
            for source, to, size in flows(call, self.rank, self.size)
        ]

        def waited(work: Work) -> None:
            with self._live.paused():
                work.wait()
            self._told(self, call, moved, start, time.perf_counter())

        with self._live.paused():
            work = self._inner._begin(call)
        watched = WatchedWork(work, waited)
        if call.kind == "send":
            watched.wait()
        return watched


class WatchedWorld(World):
    """The world of a rank, every wire of which tells what it carries."""

    def __init__(self, inner: World, told: Told, live: Live) -> None:
        super().__init__(inner.rank, inner.size, inner.device)
        self._inner, self._told, self._live = inner, told, live

    def split(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        flows: Sequence[tuple[int, int]] = (),
    ) -> Group:
        return WatchedGroup(self._inner.split(name, groups, flows), self._told, self._live)

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        raise NotImplementedError("the world inside splits")

    def clear(self) -> None:
        self._inner.clear()


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of every tensor that this thread made and that somebody still holds.

    A storage is counted when an operation first returns it, and until it is freed. What wires and
    notes allocate for themselves is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.samples: list[tuple[float, int]] = []
        self._held: dict[int, weakref.ref[Any]] = {}
        self._pauses = 0
        # A storage may be freed by another rank's thread, or while we are counting.
        self._lock = threading.RLock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In here nothing is counted."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def reset_peak(self) -> None:
        """From here on, `peak` is the most held at once."""
        self.peak = self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._pauses:
            for each in tree_leaves(out):
                if isinstance(each, Tensor) and each.device.type != "meta":
                    self._add(each.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        with self._lock:
            if key not in self._held:
                self._held[key] = weakref.ref(storage, lambda _: self._freed(key, size))
                self._count(size)

    def _freed(self, key: int, size: int) -> None:
        with self._lock:
            self._held.pop(key, None)
            self._count(-size)

    def _count(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        self.samples.append((time.perf_counter(), self.now))
