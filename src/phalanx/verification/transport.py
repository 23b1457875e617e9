"""Tests of every call of a transport against its formula, before layouts train over it.

Layouts call groups in a few ways, with tensors of few sizes. Here ranks make each call
with difficult tensors: of one element, larger than a slot of the transport,
non-contiguous, in 16 bits, or with a NaN. Values are small integers, so that sums are
exact in every order and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..comm import Group, World
from ..comm.regions import carry, exchange, gather_sum, scatter_sum
from ..comm.threads import ThreadWorld

# Elements of a large call in float32: more than a chunk of shared memory (4 MiB).
# Threads pass whole tensors, of any size.
LARGE, LARGE_OF_THREADS = (1 << 20) + 7, 1 << 10
# elements of each rank's part of a call, besides the large one
SIZES = (1, 5)
DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64)
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda every: every.sum(0),
    "min": lambda every: every.amin(0),
    "max": lambda every: every.amax(0),
}
Faults = Iterator[str]


def transport_fault(world: World) -> str:
    """Return the first call whose result on this rank differs from its formula, or
    ""."""
    ranks = range(world.size)
    neighbours = [(a, b) for a in ranks for b in ranks if a != b]
    everyone = world.split("transport", [ranks], neighbours)
    # Every rank makes all calls, even after a wrong result.
    found: list[str] = []
    large = LARGE_OF_THREADS if isinstance(world, ThreadWorld) else LARGE
    for sized in (_collectives, _messages):
        found += sized(everyone, world.device, large)
    for check in (_nans, _strided):
        found += check(everyone, world.device)
    # NCCL rounds in its own way.
    if not getattr(world, "native", False):
        found += _narrow_sums(everyone, world.device)
    world.clear()
    return f"rank {world.rank}: {found[0]}" if found else ""


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a rank's input to a call: integers from 0 to 10."""
    # Small integers: exact in every dtype and order of summation.
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def _unlike(what: str, got: Tensor, wanted: Tensor) -> Faults:
    got = got.detach().cpu()
    if got.shape != wanted.shape or not torch.equal(got, wanted):
        yield f"{what} gives {_short(got)}, its formula {_short(wanted)}"


def _short(x: Tensor) -> str:
    return f"{x.flatten()[:4].tolist()} ... of {list(x.shape)}"


def _collectives(group: Group, device: torch.device, large: int) -> Faults:
    for dtype in DTYPES:
        yield from _each_collective(group, device, SIZES[-1], dtype)
    # One element, and more than a chunk holds.
    for size in (SIZES[0], large // group.size):
        yield from _each_collective(group, device, size, torch.float32)


def _each_collective(
    group: Group, device: torch.device, size: int, dtype: torch.dtype
) -> Faults:
    n, me = group.size, group.rank
    # Every rank can compute every other rank's input, and so the result.
    every = torch.stack([values(rank, n * size, dtype) for rank in range(n)])
    mine = every[me].to(device)
    what = f"of {size} elements of {dtype}"
    for op, formula in REDUCTIONS.items():
        total = formula(every)
        x = mine.clone()
        group.all_reduce(x, op)
        yield from _unlike(f"all_reduce({op}) {what}", x, total)
        part = mine.new_empty(size)
        group.reduce_scatter(part, mine.clone(), op)
        parts = total.view(n, size)
        yield from _unlike(f"reduce_scatter({op}) {what}", part, parts[me])
    # two calls in flight, waited for in reverse order
    out, back = torch.empty_like(mine), torch.empty_like(mine)
    first = group.all_gather(out, mine[:size].clone(), wait=False)
    second = group.all_to_all(back, mine.clone(), wait=False)
    second.wait()
    first.wait()
    yield from _unlike(f"all_gather {what}", out, every[:, :size].flatten())
    sent = every.view(n, n, size)[:, me]
    yield from _unlike(f"all_to_all {what}", back, sent.flatten())
    x = mine.clone()
    group.broadcast(x, n - 1)
    yield from _unlike(f"broadcast {what}", x, every[-1])
    yield from _uneven(group, device, every, dtype)


def _uneven(
    group: Group, device: torch.device, every: Tensor, dtype: torch.dtype
) -> Faults:
    """Test an all-to-all in which rank i sends j elements to rank j, so that one rank
    gets none."""
    n, me = group.size, group.rank
    # Rank 0 receives nothing, rank 1 one element from each, and so on.
    sends = [min(to, every.shape[1] // n) for to in range(n)]
    takes = [sends[me]] * n
    x = every[me, : sum(sends)].to(device)
    out = torch.empty(sum(takes), dtype=dtype, device=device)
    group.all_to_all(out, x.clone(), takes, sends)
    start = sum(sends[:me])
    wanted = every[:, start : start + sends[me]].flatten()
    yield from _unlike(f"all_to_all of parts {sends} of {dtype}", out, wanted)


def _narrow_sums(group: Group, device: torch.device) -> Faults:
    """Test that 16-bit sums are rounded only once.

    The inputs are 256 and ones, each of which alone would be lost in bfloat16.
    """
    x = torch.full((3,), 1.0 if group.rank else 256.0, dtype=torch.bfloat16)
    group.all_reduce(x)
    # 256 + 1 = 257 needs 9 bits, and bfloat16 has 8: ones are lost if sums are
    # rounded on the way.
    wanted = torch.tensor(256.0 + group.size - 1).bfloat16().expand(3)
    yield from _unlike("all_reduce(sum) in bfloat16", x, wanted)


def _nans(group: Group, device: torch.device) -> Faults:
    for op in ("min", "max"):
        for bad in range(group.size):
            value = math.nan if group.rank == bad else float(group.rank)
            x = torch.tensor([value, 1.0], device=device)
            group.all_reduce(x, op)
            # A minimum that ignores NaN would hide it.
            if not x[0].isnan() or x[1] != 1.0:
                yield f"all_reduce({op}) of a NaN on rank {bad} gives {x.tolist()}"


def _messages(group: Group, device: torch.device, large: int) -> Faults:
    """Test messages when all ranks send several before any receives, and then overwrite
    the sent tensors."""
    n, me = group.size, group.rank
    to, source = (me + 1) % n, (me - 1) % n
    sizes = (*SIZES, large, *SIZES)
    for size in sizes:
        x = values(me, size, torch.float32).to(device)
        group.send(x, to)
        # A message must have been copied before `send` returns.
        x.fill_(-1.0)
    for size in sizes:
        x = torch.empty(size, device=device)
        group.receive(x, source)
        wanted = values(source, size, torch.float32)
        yield from _unlike(f"a message of {size} elements", x, wanted)


def _strided(group: Group, device: torch.device) -> Faults:
    """Test a model's regions with a transposed tensor and a transposed gradient."""
    n, me = group.size, group.rank
    size = 2 * n, 3 * n
    every = [
        # Transposed, so not contiguous.
        values(rank, math.prod(size), torch.float32).view(size).T
        for rank in range(n)
    ]
    total, mine = torch.stack(every).sum(0), every[me].to(device)
    for dim in (0, 1):
        other = 1 - dim
        joined = torch.cat(every, dim)
        wanted = {
            "reduce": total,
            "take": mine.cpu().chunk(n, dim)[me],
            "gather": joined,
            "scatter_sum": total.chunk(n, dim)[me],
            "exchange": torch.cat([x.chunk(n, dim)[me] for x in every], other),
        }
        for kind, result in wanted.items():
            got = carry(mine, kind, group, dim, other)
            yield from _unlike(f"{kind} along dim {dim}, strided", got, result)
        yield from _gradients(group, mine, every, dim)


def _gradients(
    group: Group, mine: Tensor, every: list[Tensor], dim: int
) -> Faults:
    """Test strided gradients through the regions whose backward communicates."""
    n, me = group.size, group.rank
    total = torch.stack(every).sum(0)
    # Each region's output has the size of `mine`, whose values serve as its gradient.
    there = partial(_gradient, mine)
    part = mine.chunk(n, dim)[0].contiguous()
    got = there(lambda x: gather_sum(x, group, dim), part)
    yield from _unlike(
        f"gather_sum's gradient along dim {dim}", got, total.chunk(n, dim)[me]
    )
    whole = torch.cat([mine] * n, dim).contiguous()
    got = there(lambda x: scatter_sum(x, group, dim), whole)
    yield from _unlike(
        f"scatter_sum's gradient along dim {dim}", got, torch.cat(every, dim)
    )
    # the parts joined along the other dim are split again
    back = torch.cat([x.chunk(n, 1 - dim)[me] for x in every], dim)
    cut = torch.empty_like(back, device=mine.device)
    got = there(lambda x: exchange(x, group, dim, 1 - dim), cut)
    yield from _unlike(f"exchange's gradient along dim {dim}", got, back)


def _gradient(
    gradient: Tensor, region: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(region(x), x, gradient)
    return found
