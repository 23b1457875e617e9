"""Which pieces each virtual stage holds: told by the layout, or balanced by cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from .layout import Layout
from .shape import Shape

__all__ = ["balance", "stage_pieces"]


def stage_pieces(layout: Layout, shape: Shape) -> tuple[range, ...]:
    """The pieces of every virtual stage, in the order in which data flows through them.

    `stages:2-2-2-1` counts blocks; the embedding goes with the first stage, the head with the last.
    """
    counts = layout.stages or _balanced(layout, shape)
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    ends = [1 + b for b in bounds]  # piece 0 is the embedding
    ends[0], ends[-1] = 0, shape.pieces
    return tuple(range(a, b) for a, b in pairwise(ends))


def _balanced(layout: Layout, shape: Shape) -> tuple[int, ...]:
    costs = [shape.cost(piece) for piece in range(1, 1 + shape.layers)]
    return balance(costs, layout.virtual_stages, shape.cost(0), shape.cost(shape.pieces - 1))


def balance(costs: Sequence[int], parts: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Lengths of `parts` runs of `costs` whose dearest run is as cheap as can be.

    `first` and `last` are work that the first and last run carry besides. Every run gets at
    least one; among equals the later runs are the shorter ones, as the last also computes the loss.
    """
    n = len(costs)
    if parts > n:
        raise ValueError(f"{n} blocks cannot fill {parts} stages with one each")
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)

    def weight(part: int, start: int, end: int) -> int:
        extra = (first if part == 0 else 0) + (last if part == parts - 1 else 0)
        return total[end] - total[start] + extra

    # least[k][i]: the dearest of runs k.. over costs[i:], when they are cut as well as can be.
    least = [[0] * (n + 1) for _ in range(parts)]
    for i in range(n + 1):
        least[-1][i] = weight(parts - 1, i, n)
    for k in range(parts - 2, -1, -1):
        for i in range(n - (parts - k) + 1):
            least[k][i] = min(
                max(weight(k, i, j), least[k + 1][j]) for j in range(i + 1, n - (parts - k) + 2)
            )
    bound, lengths, i = least[0][0], [], 0
    for k in range(parts - 1):
        # Even runs where the bound leaves room: no stage holds more than its fair share needs.
        fair = -(-(n - i) // (parts - k))
        fits = [
            j
            for j in range(i + 1, n - (parts - k) + 2)
            if weight(k, i, j) <= bound and least[k + 1][j] <= bound
        ]
        j = min(fits, key=lambda j: abs(j - i - fair))
        lengths.append(j - i)
        i = j
    return (*lengths, n - i)
