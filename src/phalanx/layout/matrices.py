"""Newton-Schulz orthogonalization: the work that each matrix needs, and the rank that does it. Muon
runs it, and the planner prices it."""

import heapq
from collections.abc import Sequence

STEPS = 5  # as Jordan et al. 2024


def orthogonal_products(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """The (m, k, n) of a step's products: x x^T, its square, and that times x, with x lying down."""
    short, long = sorted((rows, columns))
    return (short, long, short), (short, short, short), (short, short, long)


def orthogonal_work(rows: int, columns: int) -> float:
    """Multiply-adds of all steps."""
    return float(
        STEPS * sum(m * k * n for m, k, n in orthogonal_products(rows, columns))
    )


def dealt(work: Sequence[float], ranks: int, first: int = 0) -> list[int]:
    """An owner for each matrix: the dearest first, each to who has least to do so far; of those the
    next from `first`."""
    owners, loads = [0] * len(work), [(0.0, turn) for turn in range(ranks)]
    for n in sorted(range(len(work)), key=lambda n: -work[n]):
        load, turn = loads[0]
        heapq.heapreplace(loads, (load + work[n], turn))
        owners[n] = (turn + first) % ranks
    return owners
