"""The interface of an experiment on each rank: its peers, its part of the work, and a
recorder.

Messages and memory are recorded without the experiment's help: groups are wrapped, and
a dispatch mode tracks every tensor. Results are not affected.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.comm import Group, Work, World
from phalanx.cost import Live
from torch_shm.calls import Call

from .catalogue import Size
from .mlp import batch, gradients_of, one_process, start, update
from .record import Interval, LabStep, RankRecord, compared, value_of

Part = Callable[[list[Tensor]], list[Tensor]]


class LiveOverTime(Live):  # type: ignore[no-untyped-call]
    """The bytes of this rank's tensors, with the time of every change."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[tuple[float, int]] = []
        # Storages may be freed in another rank's thread, or in the thread that is
        # counting.
        self._lock = threading.RLock()

    def count(self, size: int) -> None:
        with self._lock:
            super().count(size)
            self.samples.append((time.perf_counter(), self.now))


class Lab:
    """One rank of an experiment. `group` contains all ranks, any two of which may
    exchange messages."""

    def __init__(
        self, world: World, size: Size, code: CodeType | None = None
    ) -> None:
        self.rank, self.n, self.size = world.rank, world.size, size
        self._code = code  # of the experiment's function
        self.record = RankRecord(world.rank)
        self.memory = LiveOverTime()
        self.received = 0.0  # bytes so far
        self._world = world
        pairs = [
            (i, j) for i in range(self.n) for j in range(self.n) if i != j
        ]
        self.group = self.split("everyone", [range(self.n)], pairs)
        self._claims = world.split("claims", [range(self.n)])  # not recorded

    # ---- the experiment's work

    def split(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        pairs: Sequence[tuple[int, int]] = (),
    ) -> Group:
        """Return this rank's group out of `groups`; its messages are recorded."""
        return _RecordedGroup(self._world.split(name, groups, pairs), self)

    def part(self, name: str) -> slice:
        """Return this rank's range of `batch`, `width` or `layers`."""
        return self.size.part(name, self.rank, self.n)

    def rows(self, step: int) -> Tensor:
        """Return this rank's rows of a step's batch."""
        return batch(self.size, step)[self.part("batch")]

    def gradients(
        self,
        weights: Sequence[Tensor] | Callable[[int, int], Tensor],
        x: Tensor,
        **hooks: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Call `gradients_of`, with its layers on the timeline."""
        return gradients_of(
            weights, x, self.size.layers, doing=self.doing, **hooks
        )

    def own_gradient(self) -> Tensor:
        """Return the first layer's gradient from this rank's rows of the first step."""
        return gradients_of(start(self.size), self.rows(0))[1][0]

    def whole_gradient(self) -> Tensor:
        """Return the first layer's gradient from all rows, in one process."""
        return one_process(self.size).gradients[0]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average each tensor over ranks, in place."""
        for x in tensors:
            self.group.all_reduce(x, "average")

    def train(
        self,
        step: Callable[[int], tuple[Tensor | None, list[Tensor]]],
        weights: list[Tensor],
        part: Part = list,
        *,
        update: Callable[[list[Tensor], list[Tensor]], None] = update,
        of_weights: Part | None = None,
        how: str = "",
        adam: bool = False,
        **state: Sequence[Tensor],
    ) -> list[float]:
        """Run all steps, recording values before and after; then claim that they equal
        one process's training.

        `step` returns the loss, if this rank knows it, and this rank's gradients, with
        which `weights` are updated in place. `part` selects from all layers the
        gradients and weights that this rank has.
        """
        losses: list[float] = []
        first: list[Tensor] = []
        for number in range(self.size.steps):
            self.step(f"step {number}{how}", weights=weights, **state)
            loss, gradients = step(number)
            with self.doing("U"):
                update(weights, gradients)
            self.after(gradients=gradients, weights=weights, **state)
            losses.append(torch.nan if loss is None else loss.item())
            first = first or gradients
        alone = one_process(self.size, adam)
        mean = self.everyone(
            torch.tensor(losses, dtype=torch.float64)
        ).nanmean(0)
        self.claim(
            f"the losses{how} are those of one process", mean, alone.losses
        )
        self.claim(
            f"gradients{how} are those of one process",
            first,
            part(alone.gradients),
        )
        want = (of_weights or part)(alone.weights)
        self.claim(f"weights{how} are those of one process", weights, want)
        return losses

    # ---- the recorder

    def step(self, title: str, **before: Any) -> None:
        """Start a step with this title and record the rank's current values."""
        frame: FrameType | None = sys._getframe()
        while frame and frame.f_code is not self._code:
            frame = frame.f_back
        line = frame.f_lineno if frame else 0
        self.record.steps.append(LabStep(title, time.perf_counter(), line))
        self.shows("before", **before)

    def after(self, **values: Any) -> None:
        """Record this rank's values at the end of a step."""
        self.shows("after", **values)

    @property
    def now(self) -> LabStep:
        if not self.record.steps:
            self.step("start")
        return self.record.steps[-1]

    def shows(self, when: str, **values: Any) -> None:
        """Record this rank's current values by name."""
        with _disable_current_modes():
            self.now.values += [
                (when, value_of(k.replace("_", " "), x))
                for k, x in values.items()
            ]

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """Record the enclosed computation in the timeline."""
        start = time.perf_counter()
        yield
        self.now.spans.append(
            Interval("compute", name, start, time.perf_counter())
        )

    def note(self, sentence: str) -> None:
        """Record a result in words. One rank may do so for all: `if lab.rank == 0`."""
        self.now.notes.append(sentence)

    def table(
        self,
        title: str,
        header: Sequence[str],
        rows: Iterable[Sequence[object]],
    ) -> None:
        """Record a table, on rank 0 for all."""
        if self.rank == 0:
            cells = [[str(cell) for cell in row] for row in rows]
            self.now.tables.append((title, list(header), cells))

    def claim(
        self, says: str, got: Any, want: Any = True, *, within: float = 1e-10
    ) -> None:
        """Assert that two values agree: text and booleans exactly, numbers within a
        relative tolerance."""
        with _disable_current_modes():
            says = f"rank {self.rank}: {says}"
            self.record.claims.append(compared(says, got, want, within))

    def everyone(self, x: Tensor) -> Tensor:
        """Gather x of every rank for a claim about all of them: (ranks, *x.shape). It
        is not recorded."""
        with _disable_current_modes():
            return gathered(self._claims, x[None].contiguous())

    def sent(self, group: str | None = None) -> float:
        """Return the bytes that this rank has sent so far, in one group or in all."""
        calls = [
            call for step in self.record.steps for call in step.sent.items()
        ]
        return sum(
            sum(to.values())
            for call, to in calls
            if group in (None, call.partition(" on ")[2])
        )

    def called(self, group: Group, call: Call, start: float) -> None:
        """Record a completed call."""
        name = f"{call.kind} on {group.name}"
        self.now.spans.append(
            Interval("messages", name, start, time.perf_counter())
        )
        for source in range(group.size):
            for to, size in sends(
                call, group.rank, source, group.size
            ).items():
                if source == group.rank:
                    sums = self.now.sent.setdefault(name, {})
                    sums[group.ranks[to]] = (
                        sums.get(group.ranks[to], 0.0) + size
                    )
                elif to == group.rank:
                    self.received += size

    def close(self) -> RankRecord:
        """Return the record, with the memory curve thinned to what a picture can
        show."""
        samples = self.memory.samples
        if (run := -(-len(samples) // 300)) > 2:
            parts = [samples[i : i + run] for i in range(0, len(samples), run)]
            samples = [
                s
                for part in parts
                for s in (max(part, key=lambda x: x[1]), part[-1])
            ]
        self.record.memory = list(samples)
        return self.record


def sends(call: Call, rank: int, source: int, size: int) -> dict[int, float]:
    """Return the bytes that `source` sends to each rank of the group in a call made by
    `rank`."""
    x = float(call.x.nbytes)
    others = [i for i in range(size) if i != source]
    # All-reduce is a reduce-scatter of equal parts, then an all-gather of them.
    parts = {
        "all_gather": x,
        "reduce_scatter": x / size,
        "all_reduce": 2 * x / size,
    }
    if call.kind == "all_to_all":  # its parts may be uneven
        splits = (
            call.in_splits
            if source == rank
            else (call.out_splits[source],) * size
        )
        row = (
            call.x[:1].nbytes or call.x.new_empty(1, *call.x.shape[1:]).nbytes
        )
        return {to: splits[to] * float(row) for to in others}
    if call.kind in parts:
        return dict.fromkeys(others, parts[call.kind])
    if call.kind in ("broadcast", "scatter"):
        return dict.fromkeys(others if source == call.at else (), x)
    if call.kind in ("reduce", "gather"):
        return {call.at: x} if source != call.at else {}
    ends = {"send": (rank, call.at), "receive": (call.at, rank)}.get(
        call.kind, (rank, rank)
    )
    return {ends[1]: x} if source == ends[0] != ends[1] else {}


class _RecordedWork(Work):
    """A pending call, which is recorded once it has been waited for."""

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
        work = _RecordedWork(
            inner, lambda: self._lab.called(self, call, start)
        )
        if call.kind == "send":
            work.wait()
        return work


def gathered(group: Group, x: Tensor) -> Tensor:
    """Gather every rank's x along the first dimension."""
    out = torch.empty(group.size * x.shape[0], *x.shape[1:], dtype=x.dtype)
    group.all_gather(out, x)
    return out


def scattered(group: Group, x: Tensor, op: str = "sum") -> Tensor:
    """Return this rank's equal part, along the first dimension, of x reduced over all
    ranks."""
    out = torch.empty(x.shape[0] // group.size, *x.shape[1:], dtype=x.dtype)
    group.reduce_scatter(out, x, op)
    return out
