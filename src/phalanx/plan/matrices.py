"""The cost of Muon beyond an elementwise update, in seconds, FLOPs and bytes.

Every matrix has an owner rank, which computes its Newton-Schulz products. Ranks
exchange matrices before and after.
"""

from collections.abc import Callable
from typing import NamedTuple

from ..layout import Layout, PieceRow
from ..layout.choices import BF16, DTYPES
from ..layout.matrices import (
    STEPS,
    assign_owners,
    orthogonal_products,
    orthogonal_work,
)
from ..program import Product
from .hardware import Hardware


class MatrixTimes(NamedTuple):
    """Seconds of the operations on the matrices of one block."""

    to_owners: float = 0.0
    update: float = 0.0
    from_owners: float = 0.0


# (in features, out features) of each matrix of a piece: of dense weights, then of
# routed experts.
Matrices = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


def row_matrices(row: PieceRow) -> Matrices:
    """The trained matrices of a piece: those of dense weights, and those of experts."""
    trained = [weight for weight in row.weights if weight.trained]
    dense = (
        sides
        for weight in trained
        if not weight.routed
        for sides in weight.matrices
    )
    # Expert by expert, each with all of its matrices: an expert is never divided among
    # owners.
    every = (
        weight.matrices
        for weight in trained
        if weight.routed and weight.matrices
    )
    routed = zip(*every, strict=True)
    return (
        tuple((into, out) for out, into in dense),
        tuple((into, out) for expert in routed for out, into in expert),
    )


def _groups(
    matrices: Matrices, x: Layout
) -> list[tuple[tuple[tuple[int, int], ...], int, int]]:
    """Matrices that share owners, as (matrices, number of owners, parts of a matrix).

    Tensor parallelism and shards divide each matrix into parts. All ranks of a stage
    own dense weights. The ranks that share experts own those.
    """
    dense, routed = matrices
    # Whole experts are owned: the fullest rank of experts has the rounded-up
    # share.
    stage, own = x.ranks // x.pp, routed[: -(-len(routed) // x.expert_ranks)]
    cut = max(1, x.shards // x.copies_sharing) * (
        1 if "tp" in x.experts else x.tp
    )
    groups = [
        (dense, stage, x.shards * x.tp),
        (own, stage // x.expert_ranks, cut),
    ]
    return [group for group in groups if group[0]]


def matrix_bytes(matrices: Matrices, x: Layout, width: float) -> float:
    """Bytes of one rank's matrices: sent, received, and results that it owns."""
    groups = _groups(matrices, x)
    return (
        3
        * width
        * sum(sum(a * b for a, b in m) / parts for m, _, parts in groups)
    )


def _loads(
    sides: tuple[tuple[int, int], ...],
    ranks: int,
    of: Callable[[Product], float],
) -> dict[int, float]:
    """The work of Newton-Schulz products for each owner, in the unit that `of` returns."""
    loads = dict.fromkeys(range(ranks), 0.0)
    # Owners are chosen by FLOPs, whatever `of` measures.
    owners = assign_owners([orthogonal_work(*each) for each in sides], ranks)
    for owner, each in zip(owners, sides, strict=True):
        loads[owner] += STEPS * sum(
            of(Product(*sizes)) for sizes in orthogonal_products(*each)
        )
    return loads


def newton_schulz(
    matrices: Matrices, x: Layout, *, cpu: bool = False
) -> tuple[float, float]:
    """FLOPs of the busiest owners, and bytes that their products read and write."""
    # Newton-Schulz runs in bf16 on a GPU; on a CPU it keeps the layout's
    # precision.
    width, flops, moved = DTYPES[x.precision if cpu else BF16].bytes, 0.0, 0.0
    for these, ranks, _ in _groups(matrices, x):
        loads = _loads(these, ranks, lambda p: p.flops)
        # Bytes of the same owner that has the most FLOPs.
        busiest = max(loads, key=loads.__getitem__)
        sizes = _loads(
            these, ranks, lambda p: width * (p.m * p.k + p.k * p.n + p.m * p.n)
        )
        flops, moved = flops + loads[busiest], moved + sizes[busiest]
    return flops, moved


def matrix_times(
    matrices: Matrices, x: Layout, hardware: Hardware
) -> MatrixTimes:
    """Seconds of the busiest owner's products, and of the exchanges before and after."""
    dtype = x.precision if hardware.cores else BF16
    network, width = hardware.network.seconds, DTYPES[dtype].bytes
    there = update = back = 0.0
    for these, ranks, parts in _groups(matrices, x):
        # The busiest owner determines the time: the others wait for its
        # results.
        update += max(
            _loads(
                these, ranks, lambda p: hardware.rates.product(p, dtype)
            ).values()
        )
        size = width * sum(a * b for a, b in these)
        there += network("all_to_all", size / ranks, ranks, 1)
        back += network("all_to_all", size / parts, ranks, 1)
    return MatrixTimes(there, update, back)
