"""What an experiment gets on each rank: its peers, its part of the work, and a recorder.

Messages and memory are recorded without the experiment's help: groups are wrapped, and a dispatch
mode follows every tensor. Nothing is changed on the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..comm import Group, Work, World
from ..comm.base import Call
from ..cost import Live
from .claims import Size, Values
from .mlp import Kept, backward, batch, forward
from .record import Figure, Message, Record, Span, Step, value_of

__all__ = ["Lab", "Memory", "flows", "gathered", "scattered"]


class Memory(Live):  # type: ignore[no-untyped-call]
    """The bytes of this rank's tensors, with the time of every change."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[float, int]] = []
        # Another rank's thread may free a storage, and so may the thread that is counting.
        self._lock = threading.RLock()

    def count(self, size: int) -> None:
        with self._lock:
            super().count(size)
            self.samples.append((time.perf_counter(), self.now))


class Lab:
    """One rank of an experiment. `group` connects all ranks, any two of which may send messages."""

    def __init__(self, world: World, size: Size) -> None:
        self.rank, self.n, self.size = world.rank, world.size, size
        self.record = Record(world.rank)
        self.memory = Memory()
        self._world = world
        self._kept: dict[int, Kept] = {}
        self._sent: dict[str, float] = {}
        self._received = 0.0
        pairs = [(i, j) for i in range(self.n) for j in range(self.n) if i != j]
        self.group = self.split("everyone", [range(self.n)], pairs)

    # ---- the experiment's work

    def split(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Group:
        """This rank's group out of `groups`; its messages are recorded."""
        return _RecordedGroup(self._world.split(name, groups, pairs), self)

    def part(self, name: str) -> slice:
        """This rank's range of `batch`, `width` or `layers`."""
        return self.size.part(name, self.rank, self.n)

    def rows(self, step: int) -> Tensor:
        """This rank's rows of a step's batch."""
        return batch(self.size, step)[self.part("batch")]

    def forward(self, layer: int, x: Tensor, w: Tensor) -> Tensor:
        """A layer's output; what its backward needs is kept until then."""
        with self.doing(f"F{layer}"):
            y, self._kept[layer] = forward(x, w)
        return y

    def backward(self, layer: int, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the layer's input and weight."""
        with self.doing(f"B{layer}"):
            return backward(g, self._kept.pop(layer), w)

    def train(
        self,
        step: Callable[[int], tuple[Tensor | None, list[Tensor]]],
        weights: list[Tensor],
        how: str = "",
        **state: Sequence[Tensor],
    ) -> Values:
        """All steps, recorded before and after. `step` returns the loss, if this rank knows one,
        and the gradients that this rank has; it updates `weights` in place."""
        losses: list[float] = []
        first: list[Tensor] = []
        for number in range(self.size.steps):
            self.step(f"step {number}{how}")
            self.shows("before", weights=weights, **state)
            loss, gradients = step(number)
            self.shows("after", gradients=gradients, weights=weights, **state)
            losses += [] if loss is None else [loss.item()]
            first = first or gradients
        values = {"losses": losses, "gradients": first, "weights": [w.detach() for w in weights]}
        return {name + how: value for name, value in values.items()}

    # ---- the recorder

    def step(self, title: str) -> None:
        """From here on, everything belongs to a step of that name."""
        self.record.steps.append(Step(title, time.perf_counter()))

    @property
    def now(self) -> Step:
        if not self.record.steps:
            self.step("start")
        return self.record.steps[-1]

    def shows(self, when: str, **values: Any) -> None:
        """What this rank has now, by name."""
        with _disable_current_modes():
            self.now.values += [(when, value_of(k.replace("_", " "), x)) for k, x in values.items()]

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """What this rank computes in here, for the timeline."""
        start = time.perf_counter()
        yield
        self.now.spans.append(Span("compute", name, start, time.perf_counter()))

    def note(self, sentence: str) -> None:
        """A result in words. One rank may speak for all: `if lab.rank == 0`."""
        self.now.notes.append(sentence)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        data = {"header": list(header), "rows": [[str(cell) for cell in row] for row in rows]}
        self.now.figures.append(Figure("table", title, data))

    def curves(
        self, title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]
    ) -> None:
        """A chart with a line for every name, both axes logarithmic."""
        self.now.figures.append(Figure("curves", title, {"x": x, "y": y, "lines": dict(lines)}))

    def bars(self, title: str, rows: Mapping[str, Sequence[tuple[str, int, str]]]) -> None:
        """A bar for every name, each of parts: (name, length, words on it)."""
        self.now.figures.append(Figure("bars", title, {"rows": dict(rows)}))

    def sent(self, group: str | None = None) -> float:
        """Bytes that this rank has sent so far, in one group or in all."""
        return sum(self._sent.values()) if group is None else self._sent.get(group, 0.0)

    def received(self) -> float:
        """Bytes that this rank has received so far."""
        return self._received

    def called(self, group: Group, call: Call, start: float) -> None:
        """Record a call that is complete."""
        step = self.now
        name = f"{call.kind} on {group.name}"
        step.spans.append(Span("messages", name, start, time.perf_counter()))
        for source, to, size in flows(call, group.rank, group.size):
            if source == group.rank:
                self._sent[group.name] = self.sent(group.name) + size
                step.messages.append(Message(group.name, call.kind, group.ranks[to], size))
            else:
                self._received += size

    def close(self) -> Record:
        """The record, its memory curve thinned to what a picture can show."""
        samples, most = self.memory.samples, 300
        run = -(-len(samples) // most)
        if run > 2:
            parts = [samples[i : i + run] for i in range(0, len(samples), run)]
            samples = [s for part in parts for s in (max(part, key=lambda x: x[1]), part[-1])]
        self.record.memory = list(samples)
        return self.record


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
        moved = [(root, i, x) for i in others] if place == root else [(root, place, x)]
    elif call.kind in ("reduce", "gather"):
        moved = [(i, root, x) for i in others] if place == root else [(place, root, x)]
    elif call.kind == "all_to_all":
        row = call.x[:1].numel() * call.x.element_size()
        moved = [(place, i, float(call.in_splits[i] * row)) for i in others]
        moved += [(i, place, float(call.out_splits[i] * row)) for i in others]
    elif call.kind in ("send", "receive"):
        moved = [(place, root, x) if call.kind == "send" else (root, place, x)]
    else:
        moved = []
    return [(source, to, size) for source, to, size in moved if source != to]


class _RecordedWork(Work):
    """A call under way, which is recorded once it has been waited for."""

    def __init__(self, inner: Work, complete: Callable[[], None]) -> None:
        self._inner = inner
        self._complete: Callable[[], None] | None = complete

    def wait(self) -> None:
        if self._complete:
            with _disable_current_modes():
                self._inner.wait()
            self._complete()
            self._complete = None

    def done(self) -> bool:
        return self._inner.done()


class _RecordedGroup(Group):
    """A group that records what it sends and receives."""

    def __init__(self, inner: Group, lab: Lab) -> None:
        super().__init__(inner.name, inner.rank, inner.ranks, inner.device)
        self._inner, self._lab = inner, lab

    def _begin(self, call: Call) -> Work:
        start = time.perf_counter()
        with _disable_current_modes():
            inner = self._inner._begin(call)
        work = _RecordedWork(inner, lambda: self._lab.called(self, call, start))
        if call.kind == "send":
            work.wait()
        return work


def gathered(group: Group, x: Tensor) -> Tensor:
    """Everyone's x, one after another along the first dim."""
    out = torch.empty(group.size * x.shape[0], *x.shape[1:], dtype=x.dtype)
    group.all_gather(out, x)
    return out


def scattered(group: Group, x: Tensor, op: str = "sum") -> Tensor:
    """Of x reduced over ranks, this rank's equal part along the first dim."""
    out = torch.empty(x.shape[0] // group.size, *x.shape[1:], dtype=x.dtype)
    group.reduce_scatter(out, x, op)
    return out
