"""The grid: a rank's coordinate along every axis of a mesh, and the groups that differ in only one.

Ranks are numbered like the digits of a number, the last axis fastest. Neighbours along the last axis
have neighbouring numbers and so are in one machine: what communicates most (tensor parallel) comes
last. The groups along an axis are the ranks that agree in all other digits. Summing along every axis
in turn is summing over everybody, so the axes of a layout can be considered one at a time.
"""

from collections.abc import Sequence
from math import prod

import torch

from phalanx.lab.lab import Lab, gathered
from phalanx.lab.mlp import gradients_of, one_process, start

AXES = ("dp", "pp", "cp", "tp")


def shape_of(n: int) -> list[int]:
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
    return sizes


def coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    """The digits of a rank."""
    digits: list[int] = []
    for size in reversed(sizes):
        rank, digit = divmod(rank, size)
        digits.insert(0, digit)
    return digits


def groups_along(axis: int, sizes: Sequence[int]) -> list[list[int]]:
    """The ranks that differ in one digit only, in order of that digit."""
    stride = prod(sizes[axis + 1 :])
    firsts = [rank for rank in range(prod(sizes)) if coordinates(rank, sizes)[axis] == 0]
    return [[first + i * stride for i in range(sizes[axis])] for first in firsts]


def run(lab: Lab) -> None:
    rank, sizes = lab.rank, shape_of(lab.n)
    own = coordinates(rank, sizes)
    ranks = torch.arange(lab.n).reshape(sizes)  # a second way to number them
    lab.claim("it is where the array has it", own, (ranks == rank).nonzero()[0])
    gradient = gradients_of(start(lab.size), lab.rows(0))[1][0] / lab.n
    title = "a mesh of " + " x ".join(f"{a}{s}" for a, s in zip(AXES, sizes, strict=True))
    lab.step(title, rank=rank, coordinates=own, gradient=gradient)
    for axis, name in enumerate(AXES):
        group = lab.split(name, groups_along(axis, sizes))
        met = gathered(group, torch.tensor([rank])).tolist()
        group.all_reduce(gradient)
        lab.note(f"Rank {rank}'s group along {name}: {met}")
        line = ranks[tuple(slice(None) if i == axis else digit for i, digit in enumerate(own))]
        lab.claim(f"its group along {name} is a line of the array", met, line)
    lab.group.barrier()
    lab.after(gradient=gradient)
    want = one_process(lab.size).gradients[0]
    lab.claim("the sums along every axis are the sum over all", gradient, want)
    if rank == 0:
        rows = [(axis, *map(str, groups_along(i, (2, 2, 2, 2)))) for i, axis in enumerate(AXES)]
        lab.table("groups of dp2 pp2 cp2 tp2", ("axis", *[""] * 8), rows)
