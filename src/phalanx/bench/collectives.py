"""Collectives over a group: checked, timed, and told as bandwidths that can be compared.

Algorithm bandwidth is S/t. Bus bandwidth multiplies it with what each rank has to send for a byte
of S, so that it can be held against a link. What S is, each operation says here: a formula that
took the *output* of reduce-scatter as S would read as many times lower as there are ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Group, World
from ..plan import bus_factor
from .clock import Clock, Timing

__all__ = ["OPERATIONS", "Ask", "Sample", "WrongResult", "grouped", "measure_collectives"]

_PERIOD = 997  # prime, so that no part of a tensor begins as another does


class WrongResult(RuntimeError):
    """A collective gave wrong numbers: whatever its time was, it means nothing."""


@dataclass(frozen=True)
class Ask:
    """What to measure. `groups`: (ranks, apart) of each shape; all groups of a shape talk at once,
    as those of a mesh axis do."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # S in bytes
    groups: tuple[tuple[int, int], ...]
    dtype: str = "float32"
    repeats: int = 7
    limit: float = 4.0  # seconds for each operation and size
    total: float = 600.0  # seconds after which no larger size is begun


@dataclass(frozen=True)
class Sample:
    """One operation at one size over one shape of group."""

    op: str
    ranks: int
    apart: int
    bytes: int  # S
    seconds: float
    least: float
    most: float
    readings: int
    correct: bool
    # Reduce-scatter then all-gather of the same tensor, read in turn with the all-reduce.
    halves: float = 0.0

    @property
    def algorithm(self) -> float:
        """S/t in bytes a second."""
        return self.bytes / self.seconds

    @property
    def factor(self) -> float:
        return bus_factor(self.op, self.ranks)

    @property
    def bus(self) -> float:
        return self.algorithm * self.factor


@dataclass(frozen=True)
class Trial:
    """An operation made ready on one rank: call it, look at what came, against what should have."""

    call: Callable[[], object]
    came: Tensor | None  # None: this rank receives nothing
    due: Tensor | None
    clear: Callable[[], object]  # so that repeating does not grow the numbers without end


def pattern(rank: int, start: int, count: int, like: Tensor) -> Tensor:
    """The numbers start, start+1, ... of what a rank brings: 0, 1 or 2, without order."""
    return _tile(_table(rank), start, count, like)


def _table(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, (_PERIOD,), generator=generator)


def _tile(table: Tensor, start: int, count: int, like: Tensor) -> Tensor:
    turned = table.roll(-(start % _PERIOD)).to(like.dtype)
    return turned.repeat(count // _PERIOD + 1)[:count].to(like.device)


def _sum(ranks: int, start: int, count: int, like: Tensor) -> Tensor:
    # Exact in every dtype for up to 128 ranks: bf16 holds whole numbers up to 256.
    return _tile(sum((_table(rank) for rank in range(ranks)), torch.zeros(1)), start, count, like)


def _all_reduce(group: Group, n: int, like: Tensor) -> Trial:
    x = pattern(group.rank, 0, n, like)
    return Trial(lambda: group.all_reduce(x), x, _sum(group.size, 0, n, like), x.zero_)


def _halves(group: Group, n: int, like: Tensor) -> Trial:
    """All-reduce as its two halves."""
    x = pattern(group.rank, 0, n, like)
    part = x.new_empty(n // group.size)

    def call() -> None:
        group.reduce_scatter(part, x)
        group.all_gather(x, part)

    return Trial(call, x, _sum(group.size, 0, n, like), x.zero_)


def _reduce(group: Group, n: int, like: Tensor) -> Trial:
    x = pattern(group.rank, 0, n, like)
    due = _sum(group.size, 0, n, like) if group.rank == 0 else None
    return Trial(lambda: group.reduce(x, 0), x if group.rank == 0 else None, due, x.zero_)


def _broadcast(group: Group, n: int, like: Tensor) -> Trial:
    x = pattern(group.rank, 0, n, like)
    return Trial(lambda: group.broadcast(x, 0), x, pattern(0, 0, n, like), _nothing)


def _reduce_scatter(group: Group, n: int, like: Tensor) -> Trial:
    part = n // group.size
    x, out = pattern(group.rank, 0, n, like), like.new_empty(part)
    due = _sum(group.size, group.rank * part, part, like)
    return Trial(lambda: group.reduce_scatter(out, x), out, due, _nothing)


def _all_gather(group: Group, n: int, like: Tensor) -> Trial:
    part = n // group.size
    x, out = pattern(group.rank, 0, part, like), like.new_empty(n)
    due = torch.cat([pattern(rank, 0, part, like) for rank in range(group.size)])
    return Trial(lambda: group.all_gather(out, x), out, due, _nothing)


def _all_to_all(group: Group, n: int, like: Tensor) -> Trial:
    part = n // group.size
    x, out = pattern(group.rank, 0, n, like), like.new_empty(n)
    due = torch.cat([pattern(r, group.rank * part, part, like) for r in range(group.size)])
    return Trial(lambda: group.all_to_all(out, x), out, due, _nothing)


def _scatter(group: Group, n: int, like: Tensor) -> Trial:
    part = n // group.size
    out = like.new_empty(part)
    parts = pattern(0, 0, n, like).chunk(group.size) if group.rank == 0 else None
    due = pattern(0, group.rank * part, part, like)
    return Trial(lambda: group.scatter(out, parts, 0), out, due, _nothing)


def _gather(group: Group, n: int, like: Tensor) -> Trial:
    part = n // group.size
    x = pattern(group.rank, 0, part, like)
    if group.rank:
        return Trial(lambda: group.gather(None, x, 0), None, None, _nothing)
    came = like.new_empty(n)
    due = torch.cat([pattern(rank, 0, part, like) for rank in range(group.size)])
    return Trial(lambda: group.gather(came.chunk(group.size), x, 0), came, due, _nothing)


def _send(group: Group, n: int, like: Tensor) -> Trial:
    """From the first rank of a group to the second; the others watch."""
    x = pattern(0, 0, n, like) if group.rank == 0 else like.new_empty(n if group.rank == 1 else 0)
    if group.rank == 0:
        return Trial(lambda: group.send(x, 1), None, None, _nothing)
    if group.rank == 1:
        return Trial(lambda: group.receive(x, 0), x, pattern(0, 0, n, like), _nothing)
    return Trial(_nothing, None, None, _nothing)


def _nothing() -> None:
    pass


OPERATIONS: dict[str, Callable[[Group, int, Tensor], Trial]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "send": _send,
}


def measure_collectives(world: World, ask: Ask) -> list[Sample]:
    """Every operation of `ask` at every size, the same list on every rank. All ranks call it."""
    began = time.monotonic()
    everyone = world.split("bench", [range(world.size)])
    clock = Clock(world.device, everyone)
    groups = {
        (ranks, apart): world.split(
            f"bench-{ranks}x{apart}", grouped(world.size, ranks, apart), [(0, 1)]
        )
        for ranks, apart in ask.groups
    }
    found: list[Sample] = []
    for size in ask.sizes:
        # One rank's clock decides for all, so that they stop together.
        if clock.agree([time.monotonic() - began])[0] > ask.total:
            break
        for (ranks, apart), group in groups.items():
            found += [_sample(clock, group, (op, ranks, apart), size, ask) for op in ask.ops]
    world.clear()
    return found


def _sample(clock: Clock, group: Group, what: tuple[str, int, int], size: int, ask: Ask) -> Sample:
    op, ranks, _ = what
    like = torch.empty(0, dtype=getattr(torch, ask.dtype), device=clock.device)
    # Each rank's part is whole numbers of the dtype, at least one.
    n = max(1, size // like.element_size() // ranks) * ranks
    idle = group.size < ranks  # left over where the shape does not part the world
    makers = [OPERATIONS[op], *([_halves] if op == "all_reduce" else [])]
    trials = [Trial(_nothing, None, None, _nothing) if idle else m(group, n, like) for m in makers]
    checked = [_check(trial) for trial in trials]  # each is a call that every rank has to make
    timings = clock.measure(*(t.call for t in trials), repeats=ask.repeats, limit=ask.limit)
    # A rank that saw a wrong number says so to all.
    right = clock.agree([0.0 if all(checked) else 1.0])[0] == 0.0
    return _told(what, n * like.element_size(), timings, right)


def _check(trial: Trial) -> bool:
    trial.call()
    right = trial.due is None or (
        trial.came is not None and torch.equal(trial.came.view(-1), trial.due.view(-1))
    )
    trial.clear()
    return right


def _told(what: tuple[str, int, int], size: int, timings: Sequence[Timing], right: bool) -> Sample:
    first = timings[0]
    halves = timings[1].median if len(timings) > 1 else 0.0
    return Sample(
        *what, size, first.median, first.least, first.most, len(first.readings), right, halves
    )


def grouped(world: int, ranks: int, apart: int) -> list[list[int]]:
    """The ranks of a world in groups of `ranks`, each `apart` from the next; who is left is alone."""
    block = ranks * apart
    whole = [
        [start + i + apart * j for j in range(ranks)]
        for start in range(0, world - block + 1, block)
        for i in range(apart)
    ]
    inside = {rank for group in whole for rank in group}
    return whole + [[rank] for rank in range(world) if rank not in inside]
