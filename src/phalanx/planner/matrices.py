"""The cost of updating whole matrices beyond an elementwise update.

Every matrix has an owner rank, which computes its update. Ranks exchange matrices
before and after. The row of the optimizer says what an owner computes and keeps.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..layout import Layout, PieceRow
from ..layout.choices import DTYPES
from ..layout.matrices import assign_owners
from ..layout.optimizer_row import MatrixRow
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
    """The trained matrices of a piece: those of dense weights, and those of routed MLPs."""
    trained = [weight for weight in row.weights if weight.trained]
    dense = (
        sides
        for weight in trained
        if not weight.routed
        for sides in weight.matrices
    )
    # MLP by MLP, each with all of its matrices: a routed MLP is never divided among
    # owners.
    every = (
        weight.matrices
        for weight in trained
        if weight.routed and weight.matrices
    )
    routed = zip(*every, strict=True)
    return (
        tuple((into, out) for out, into in dense),
        tuple((into, out) for each in routed for out, into in each),
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
    stage, own = x.ranks // x.pp, routed[: -(-len(routed) // x.ep_ranks)]
    cut = max(1, x.shards // x.copies_sharing) * (
        1 if "tp" in x.ep_axes else x.tp
    )
    groups = [
        (dense, stage, x.shards * x.tp),
        (own, stage // x.ep_ranks, cut),
    ]
    return [group for group in groups if group[0]]


def matrix_elements(matrices: Matrices, x: Layout) -> float:
    """The elements of matrices that one rank holds, as a mean over ranks."""
    groups = _groups(matrices, x)
    return sum(sum(a * b for a, b in m) / parts for m, _, parts in groups)


def matrix_bytes(matrices: Matrices, x: Layout, width: float) -> float:
    """Bytes of one rank's matrices: sent, received, and results that it owns."""
    return 3 * width * matrix_elements(matrices, x)


def _loads(
    row: MatrixRow,
    sides: tuple[tuple[int, int], ...],
    ranks: int,
    of: Callable[[tuple[int, int]], float],
    first: int = 0,
) -> list[float]:
    """The sum of `of` over the matrices of each owner."""
    loads = [0.0] * ranks
    # Owners are chosen by multiply-adds, whatever `of` measures.
    owners = assign_owners([row.work(*each) for each in sides], ranks, first)
    for owner, each in zip(owners, sides, strict=True):
        loads[owner] += of(each)
    return loads


def owned_elements(
    row: MatrixRow,
    matrices: Sequence[Matrices],
    x: Layout,
    stages: Sequence[Sequence[int]],
) -> tuple[float, ...]:
    """The elements that owners keep for their matrices, by piece.

    Those of one rank of each stage: the one that keeps most of the matrices of dense
    weights, with the experts of the one that keeps most of those. `stages` are the pieces
    of each.
    """
    found = [0.0] * len(matrices)
    if not row.owned:
        return tuple(found)

    def kept(sides: tuple[int, int]) -> float:
        return float(row.owned_elements(*sides))

    for pieces in stages:
        # By number of owners, the elements of each of them for each piece.
        by_owners: dict[int, dict[int, list[float]]] = {}
        for n in pieces:
            for sides, ranks, _ in _groups(matrices[n], x):
                # Every unit starts with another rank, as `matrices_of` has it.
                loads = _loads(row, sides, ranks, kept, n * len(sides))
                by_owners.setdefault(ranks, {})[n] = loads
        for of_piece in by_owners.values():
            totals = [
                sum(each) for each in zip(*of_piece.values(), strict=True)
            ]
            fullest = totals.index(max(totals))
            for n, loads in of_piece.items():
                found[n] += loads[fullest]
    return tuple(found)


def owners_work(
    row: MatrixRow, matrices: Matrices, x: Layout, *, cpu: bool = False
) -> tuple[float, float]:
    """FLOPs of the busiest owners, and bytes that their matmuls read and write."""
    dtype = x.precision if cpu else row.gpu_dtype
    width = DTYPES[dtype].bytes
    flops, moved = 0.0, 0.0

    def flops_of(sides: tuple[int, int]) -> float:
        return 2.0 * row.work(*sides)

    def bytes_of(sides: tuple[int, int]) -> float:
        return width * sum(
            times * (m * k + k * n + m * n)
            for times, m, k, n in row.matmuls(*sides)
        )

    for these, ranks, _ in _groups(matrices, x):
        loads = _loads(row, these, ranks, flops_of)
        # Bytes of the same owner that has the most FLOPs.
        busiest = loads.index(max(loads))
        flops += loads[busiest]
        moved += _loads(row, these, ranks, bytes_of)[busiest]
    return flops, moved


def matrix_times(
    row: MatrixRow, matrices: Matrices, x: Layout, hardware: Hardware
) -> MatrixTimes:
    """Seconds of the busiest owner's matmuls, and of the exchanges before and after."""
    dtype = x.precision if hardware.cores else row.gpu_dtype
    network, width = hardware.network.seconds, DTYPES[dtype].bytes
    there = update = back = 0.0

    def seconds_of(sides: tuple[int, int]) -> float:
        return sum(
            times * hardware.rates.product(Product(m, k, n), dtype)
            for times, m, k, n in row.matmuls(*sides)
        )

    for these, ranks, parts in _groups(matrices, x):
        # The busiest owner determines the time: the others wait for its results.
        update += max(_loads(row, these, ranks, seconds_of))
        size = width * sum(a * b for a, b in these)
        there += network("all_to_all", size / ranks, ranks, 1)
        back += network("all_to_all", size / parts, ranks, 1)
    return MatrixTimes(there, update, back)
