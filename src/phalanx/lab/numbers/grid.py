"""The grid: a rank's place in every dimension of a mesh, and the groups that differ in only one.

Ranks are numbered like the digits of a number, the last axis fastest. Neighbours in the last axis
are neighbours in number, hence in one machine: what talks most (tensor parallel) stands last. A
group along an axis are the ranks that agree in all other digits. Summing along every axis in turn
is summing over everybody, and that is why the axes of a layout can be thought of one at a time.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.note import Note, everyone

AXES = ("dp", "pp", "cp", "tp")


def shape_of(n: int) -> tuple[int, ...]:
    """Four sizes whose product is n: prime factors dealt out, the last axis first."""
    sizes = [1] * len(AXES)
    at, factor = len(AXES) - 1, 2
    while n > 1:
        if n % factor:
            factor += 1
            continue
        sizes[at] *= factor
        n //= factor
        at = (at - 1) % len(AXES)
    return tuple(sizes)


def place(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The digits of a rank."""
    digits: list[int] = []
    for size in reversed(sizes):
        rank, digit = divmod(rank, size)
        digits.insert(0, digit)
    return tuple(digits)


def groups_along(axis: int, sizes: Sequence[int]) -> list[list[int]]:
    """The ranks that differ in one digit only, in order of that digit."""
    stride = prod(sizes[axis + 1 :])
    firsts = [rank for rank in range(prod(sizes)) if place(rank, sizes)[axis] == 0]
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    sizes = shape_of(n)
    digits = place(rank, sizes)
    rows = size.part("batch", rank, n)
    _, gradients = gradients_of(start(size), batch(size, 0)[rows])
    gradient = gradients[0] / n
    note.step("a mesh of " + " x ".join(f"{a}{s}" for a, s in zip(AXES, sizes, strict=True)))
    note.holds("before", rank=rank, place=list(digits), gradient=gradient)
    met: list[list[int]] = []
    for axis, name in enumerate(AXES):
        line = world.split(name, groups_along(axis, sizes))
        members = torch.empty(line.size, dtype=torch.int64)
        line.all_gather(members, torch.tensor([rank]))
        met.append(members.tolist())
        line.all_reduce(gradient)
        note.says(f"Rank {rank} meets along {name}: {met[-1]}")
    wire.barrier()
    note.holds("after", gradient=gradient)
    if rank == 0:
        for drawn in dict.fromkeys((sizes, (2, 2, 2, 2))):
            title = "all groups of " + " ".join(f"{a}{s}" for a, s in zip(AXES, drawn, strict=True))
            note.groups(title, {a: groups_along(i, drawn) for i, a in enumerate(AXES)})
    return {"place": list(digits), "met": met, "gradient": gradient}


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    sizes = shape_of(n)
    yield holds(f"the mesh has {n} places", prod(sizes) == n, str(sizes))
    ranks = torch.arange(n).reshape(sizes)  # a second way to number them
    want = one_process(size).gradients[0]
    for rank, held in enumerate(results):
        where = (ranks == rank).nonzero()[0].tolist()
        yield equal(f"rank {rank} stands where the array has it", held["place"], where)
        for axis, name in enumerate(AXES):
            at = [slice(None) if i == axis else digit for i, digit in enumerate(where)]
            members = ranks[tuple(at)]
            yield equal(f"rank {rank} met its group along {name}", held["met"][axis], members)
        says = f"rank {rank}: sums along every axis are the sum over all"
        yield equal(says, held["gradient"], want)
