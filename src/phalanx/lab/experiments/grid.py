"""The grid: a rank's coordinate along every axis of a mesh, and the groups that differ in only one.

Ranks are numbered like the digits of a number, the last axis fastest. Neighbours along the last axis
have neighbouring numbers and so are in one machine: what communicates most (tensor parallel) comes
last. The groups along an axis are the ranks that agree in all other digits. Summing along every axis
in turn is summing over everybody, so the axes of a layout can be considered one at a time.
"""

from collections.abc import Sequence
from math import prod

import torch

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab, gathered
from phalanx.lab.mlp import gradients_of, one_process, start

AXES = ("dp", "pp", "cp", "tp")


def shape_of(n: int) -> tuple[int, ...]:
    """Four sizes whose product is n: its prime factors in turn, the last axis first."""
    sizes = [1] * len(AXES)
    axis, factor = len(AXES) - 1, 2
    while n > 1:
        if n % factor:
            factor += 1
            continue
        sizes[axis] *= factor
        n //= factor
        axis = (axis - 1) % len(AXES)
    return tuple(sizes)


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The digits of a rank."""
    digits: list[int] = []
    for size in reversed(sizes):
        rank, digit = divmod(rank, size)
        digits.insert(0, digit)
    return tuple(digits)


def groups_along(axis: int, sizes: Sequence[int]) -> list[list[int]]:
    """The ranks that differ in one digit only, in order of that digit."""
    stride = prod(sizes[axis + 1 :])
    firsts = [rank for rank in range(prod(sizes)) if coordinates(rank, sizes)[axis] == 0]
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]


def run(lab: Lab) -> Values:
    rank, n = lab.rank, lab.n
    sizes = shape_of(n)
    own = coordinates(rank, sizes)
    gradient = gradients_of(start(lab.size), lab.rows(0))[1][0] / n
    lab.step("a mesh of " + " x ".join(f"{a}{s}" for a, s in zip(AXES, sizes, strict=True)))
    lab.shows("before", rank=rank, coordinates=list(own), gradient=gradient)
    met: list[list[int]] = []
    for axis, name in enumerate(AXES):
        group = lab.split(name, groups_along(axis, sizes))
        met.append(gathered(group, torch.tensor([rank])).tolist())
        group.all_reduce(gradient)
        lab.note(f"Rank {rank}'s group along {name}: {met[-1]}")
    lab.group.barrier()
    lab.shows("after", gradient=gradient)
    for drawn in dict.fromkeys((sizes, (2, 2, 2, 2))) if rank == 0 else ():
        show(lab, drawn)
    return {"coordinates": list(own), "met": met, "gradient": gradient}


def show(lab: Lab, sizes: Sequence[int]) -> None:
    """A row of all ranks for every axis, each in the colour of its group."""
    rows: dict[str, list[tuple[str, int, str]]] = {}
    for i, axis in enumerate(AXES):
        of = {rank: g for g, group in enumerate(groups_along(i, sizes)) for rank in group}
        rows[axis] = [(f"group {of[rank]}", 1, str(rank)) for rank in range(prod(sizes))]
    title = " ".join(f"{axis}{size}" for axis, size in zip(AXES, sizes, strict=True))
    lab.bars(f"groups of {title}: ranks of one colour are one group", rows)


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    sizes = shape_of(n)
    yield Claim(f"the mesh has {n} ranks", prod(sizes) == n, str(sizes))
    ranks = torch.arange(n).reshape(sizes)  # a second way to number them
    where = [(ranks == rank).nonzero()[0].tolist() for rank in range(n)]
    says = "it is where the array has it"
    yield from every(results, "coordinates", says, where.__getitem__)

    def groups(rank: int) -> list[torch.Tensor]:
        whole = slice(None)
        return [
            ranks[tuple(whole if i == axis else digit for i, digit in enumerate(where[rank]))]
            for axis in range(len(AXES))
        ]

    yield from every(results, "met", "its groups are the lines of the array", groups)
    says = "the sums along every axis are the sum over all"
    yield from every(results, "gradient", says, one_process(size).gradients[0])
