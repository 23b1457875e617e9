"""What Muon takes beside an elementwise update: products at the owner that has most of them, and the
ways of matrices there and back."""

from __future__ import annotations

from typing import NamedTuple

from ..layout import Layout, Shape
from ..layout.choices import BF16, DTYPES
from ..layout.matrices import STEPS, dealt, orthogonal_products, orthogonal_work
from ..layout.stages import program_pieces
from ..program import Product
from .hardware import Hardware


class MatrixTimes(NamedTuple):
    """Seconds of the operations on one block's matrices."""

    to_owners: float = 0.0
    update: float = 0.0
    from_owners: float = 0.0


# Features in and out of a piece's matrices: of its dense weights, of its routed experts.
Matrices = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


def program_matrices(shape: Shape, x: Layout) -> list[Matrices]:
    """Of each piece of a layout's program. Of a block that ep cuts into three the first has what is
    dense, the second its experts."""
    pieces = program_pieces(x, shape)
    cut = {piece for piece, part in pieces if part}
    found: list[Matrices] = []
    for piece, part in pieces:
        dense, routed = shape.matrices(piece) if 0 < piece <= shape.layers else ([], [])
        first, second = (part == 0, part == 1) if piece in cut else (True, True)
        found.append((tuple(dense) * first, tuple(routed) * second))
    return found


def _groups(matrices: Matrices, x: Layout) -> list[tuple[tuple[tuple[int, int], ...], int, int]]:
    """Those that are owned together, by how many ranks, and over how many they are sharded: of dense
    weights all ranks of a stage, of experts those that have the same."""
    dense, routed = matrices
    stage, own = x.ranks // x.pp, routed[: -(-len(routed) // x.ep)]
    shards = x.shards // x.ep if x.zero else 1
    groups = [(dense, stage, x.shards), (own, stage // x.ep, shards)]
    return [group for group in groups if group[0]]


def matrix_bytes(matrices: Matrices, x: Layout, width: float) -> float:
    """What is sent, what came, and the results of what a rank owns."""
    groups = _groups(matrices, x)
    return 3 * width * sum(sum(a * b for a, b in m) / x.tp / shards for m, _, shards in groups)


def matrix_times(matrices: Matrices, x: Layout, hardware: Hardware) -> MatrixTimes:
    """The owner that has most to do, and the numbers of which each rank has as many."""
    dtype = x.precision if hardware.cores else BF16
    network, width = hardware.network.seconds, DTYPES[dtype].bytes
    there = update = back = 0.0
    for these, ranks, shards in _groups(matrices, x):
        loads = dict.fromkeys(range(ranks), 0.0)
        owners = dealt([orthogonal_work(*each) for each in these], ranks)
        for owner, sides in zip(owners, these, strict=True):
            products = (Product(m, k, n) for m, k, n in orthogonal_products(*sides))
            loads[owner] += STEPS * sum(hardware.rates.product(p, dtype) for p in products)
        update += max(loads.values())
        size = width * sum(a * b for a, b in these)
        there += network("all_to_all", size / ranks, ranks, 1)
        back += network("all_to_all", size / x.tp / shards, ranks, 1)
    return MatrixTimes(there, update, back)
