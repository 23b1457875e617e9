"""Collectives over a group: checked, timed, and converted to comparable bandwidths.

Algorithm bandwidth is S/t. Bus bandwidth multiplies it by the bytes that each rank must
send for each byte of S, so that it can be compared with a link's. `planner/curve.py`
defines S for each operation: taking the *output* of reduce-scatter as S would lower its
bandwidth by the number of ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import Group, World
from ..layout.choices import DTYPES, FP32
from ..planner import bus_factor
from ..planner.curve import FACTORS
from .clock import Clock

OPERATIONS = tuple(FACTORS)
_PERIOD = 997  # prime, so that no two parts of a tensor start alike


@dataclass(frozen=True)
class Sweep:
    """The collectives to measure.

    `groups` lists shapes as (ranks, apart). All groups of a shape communicate at once,
    like those of a mesh axis.
    """

    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # S in bytes
    groups: tuple[tuple[int, int], ...]
    dtype: str = DTYPES[FP32].torch
    repeats: int = 7
    limit: float = 4.0  # seconds for each operation and size
    total: float = 600.0  # seconds after which no larger size is started


@dataclass(frozen=True)
class Sample:
    """One operation at one size over groups of one shape."""

    op: str
    ranks: int
    apart: int
    bytes: int  # S
    seconds: float
    least: float
    most: float
    readings: int
    correct: bool
    # Time of reduce-scatter then all-gather of the same tensor, measured in turn with
    # all-reduce.
    halves: float = 0.0

    @property
    def algorithm(self) -> float:
        """S/t in bytes per second."""
        return self.bytes / self.seconds

    @property
    def factor(self) -> float:
        return bus_factor(self.op, self.ranks)

    @property
    def bus(self) -> float:
        return self.algorithm * self.factor


@dataclass(frozen=True)
class _Prepared:
    """An operation prepared on one rank: the call, the tensor it receives (or None),
    and the expected result."""

    call: Callable[[], object] = lambda: None
    received: Tensor | None = None
    expected: Tensor = torch.empty(0)
    # keeps repeated sums from growing without limit
    clear: Callable[[], object] = lambda: None

    def is_right(self) -> bool:
        self.call()
        right = self.received is None or torch.equal(
            self.received.view(-1), self.expected
        )
        self.clear()
        return right


def pattern(rank: int, start: int, count: int, like: Tensor) -> Tensor:
    """Return elements start, start+1, ... of what a rank sends: 0, 1 or 2 in
    pseudo-random order."""
    return _sum([rank], start, count, like)


def _sum(ranks: Sequence[int], start: int, count: int, like: Tensor) -> Tensor:
    # Exact in every dtype for up to 128 ranks: bf16 represents integers up to 256.
    table = torch.zeros(_PERIOD, dtype=torch.int64)
    for rank in ranks:
        # 0, 1 or 2 from each rank, the same on every run.
        table += torch.randint(
            0, 3, (_PERIOD,), generator=torch.Generator().manual_seed(rank)
        )
    # Rotated, so that any range can be made without the elements before it.
    turned = table.roll(-(start % _PERIOD)).to(like.dtype)
    return turned.repeat(count // _PERIOD + 1)[:count].to(like.device)


def _prepared(op: str, group: Group, n: int, like: Tensor) -> _Prepared:
    """Prepare one operation on S of `n` elements; the root is the group's first
    rank."""
    rank, size, part = group.rank, group.size, n // group.size
    root, mine = rank == 0, rank * part

    def of_all(start: int, count: int) -> Tensor:
        return torch.cat(
            [pattern(other, start, count, like) for other in range(size)]
        )

    # x: the tensor that this rank sends; out: the one it receives, if different
    x = pattern(rank, 0, part if op in ("all_gather", "gather") else n, like)
    received = dict.fromkeys(("reduce_scatter", "halves", "scatter"), part)
    received |= {
        "all_gather": n,
        "all_to_all": n,
        "gather": n * root,
        "send": n * (rank == 1),
    }
    out = like.new_empty(received.get(op, 0))

    # An all-reduce as its two halves, for comparison.
    def halves() -> None:
        group.reduce_scatter(out, x)
        group.all_gather(x, out)

    match op:
        # After each check the input is zeroed, since sums are in place.
        case "all_reduce":
            return _Prepared(
                lambda: group.all_reduce(x),
                x,
                _sum(range(size), 0, n, like),
                x.zero_,
            )
        case "halves":  # an all-reduce in two steps
            return _Prepared(halves, x, _sum(range(size), 0, n, like), x.zero_)
        case "reduce":
            expected = _sum(range(size), 0, n, like)
            return _Prepared(
                lambda: group.reduce(x, 0),
                x if root else None,
                expected,
                x.zero_,
            )
        case "reduce_scatter":
            return _Prepared(
                lambda: group.reduce_scatter(out, x),
                out,
                _sum(range(size), mine, part, like),
            )
        case "all_gather":
            return _Prepared(
                lambda: group.all_gather(out, x), out, of_all(0, part)
            )
        case "all_to_all":
            return _Prepared(
                lambda: group.all_to_all(out, x), out, of_all(mine, part)
            )
        case "broadcast":
            return _Prepared(
                lambda: group.broadcast(x, 0), x, pattern(0, 0, n, like)
            )
        case "scatter":
            parts, expected = (
                x.chunk(size) if root else None,
                pattern(0, mine, part, like),
            )
            return _Prepared(
                lambda: group.scatter(out, parts, 0), out, expected
            )
        case "gather" if root:
            return _Prepared(
                lambda: group.gather(out.chunk(size), x, 0),
                out,
                of_all(0, part),
            )
        case "gather":
            return _Prepared(lambda: group.gather(None, x, 0))
        case "send" if root:
            return _Prepared(lambda: group.send(x, 1))
        case "send" if rank == 1:
            return _Prepared(
                lambda: group.receive(out, 0), out, pattern(0, 0, n, like)
            )
    # A rank that sends or receives nothing has an empty call.
    return _Prepared()  # other ranks take no part in a message


def measure_collectives(world: World, sweep: Sweep) -> list[Sample]:
    """Measure every operation at every size. Collective; all ranks return the same
    list."""
    began = time.monotonic()
    clock = Clock(world.device, world.split("bench", [range(world.size)]))
    groups = {}
    # All groups of a shape communicate at once, as along a mesh axis.
    for ranks, apart in sweep.groups:
        name, inside = (
            f"bench-{ranks}x{apart}",
            grouped(world.size, ranks, apart),
        )
        groups[ranks, apart] = world.split(name, inside, [(0, 1)])
    samples: list[Sample] = []
    for size in sweep.sizes:
        # The slowest rank's clock decides, so that all stop together.
        if clock.agree([time.monotonic() - began])[0] > sweep.total:
            break
        for shape, group in groups.items():
            samples += [
                _sample(clock, group, op, shape, size, sweep)
                for op in sweep.ops
            ]
    world.clear()
    return samples


def _sample(
    clock: Clock,
    group: Group,
    op: str,
    shape: tuple[int, int],
    size: int,
    sweep: Sweep,
) -> Sample:
    ranks, apart = shape
    like = torch.empty(
        0, dtype=getattr(torch, sweep.dtype), device=clock.device
    )
    # Each rank's part is a whole number of elements, at least one.
    n = max(1, size // like.element_size() // ranks) * ranks
    # Some ranks are unused if the shape does not divide the world.
    prepared = [
        _Prepared() if group.size < ranks else _prepared(name, group, n, like)
        for name in ((op, "halves") if op == "all_reduce" else (op,))
    ]
    # `is_right` is collective, so every rank calls it for each
    right = [each.is_right() for each in prepared]
    calls = [each.call for each in prepared]
    # Both are measured in turn, so that a disturbance affects both.
    first, *halves = clock.measure(
        *calls, repeats=sweep.repeats, limit=sweep.limit
    )
    return Sample(
        op,
        ranks,
        apart,
        n * like.element_size(),
        first.median,
        first.least,
        first.most,
        len(first.readings),
        # an error seen by one rank is reported on all
        clock.agree([0.0 if all(right) else 1.0])[0] == 0.0,
        halves[0].median if halves else 0.0,
    )


def grouped(world: int, ranks: int, apart: int) -> list[list[int]]:
    """Return the ranks of a world in groups of `ranks`, `apart` from each other; the
    rest are alone."""
    block = ranks * apart
    # Blocks of `ranks * apart` neighbours, each with `apart` groups.
    whole = [
        [start + i + apart * j for j in range(ranks)]
        for start in range(0, world - block + 1, block)
        for i in range(apart)
    ]
    inside = {rank for group in whole for rank in group}
    return whole + [[rank] for rank in range(world) if rank not in inside]
