"""The rank that owns each matrix, for an optimizer that updates matrices whole.

The optimizer uses it, and the planner prices it.
"""

import heapq
from collections.abc import Sequence


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
