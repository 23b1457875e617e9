"""Newton-Schulz orthogonalization: each matrix's work, and the rank that does it.

Muon runs it, and the planner prices it.
"""

import heapq
from collections.abc import Sequence

STEPS = 5  # as in Jordan et al. 2024


def orthogonal_products(
    rows: int, columns: int
) -> tuple[tuple[int, int, int], ...]:
    """The (m, k, n) of one step's matmuls: x x', its square, and that times x."""
    # The short side first: x x' is then the smaller of the two Gram matrices.
    short, long = sorted((rows, columns))
    return (short, long, short), (short, short, short), (short, short, long)


def orthogonal_work(rows: int, columns: int) -> float:
    """The multiply-adds of all steps."""
    return float(
        STEPS
        * sum(m * k * n for m, k, n in orthogonal_products(rows, columns))
    )


def assign_owners(
    work: Sequence[float], ranks: int, first: int = 0
) -> list[int]:
    """Assign an owner to each matrix, the most expensive first.

    Each goes to the rank with the least work so far; among equals, to the next one from
    `first`.
    """
    # A heap of (load, rank); equal loads are taken in the order of ranks.
    owners, loads = [0] * len(work), [(0.0, turn) for turn in range(ranks)]
    for n in sorted(range(len(work)), key=lambda n: -work[n]):
        load, turn = loads[0]
        # The least loaded rank takes the next expensive matrix (longest
        # processing time first).
        heapq.heapreplace(loads, (load + work[n], turn))
        owners[n] = (turn + first) % ranks
    return owners
