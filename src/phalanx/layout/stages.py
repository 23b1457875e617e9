"""Blocks of each virtual stage, given or balanced; a piece's part of a layout."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .choices import ACCUM, COMPILE, ZB_H1
from .layout import Layout
from .mesh import LayoutError, Mesh


def stage_blocks(
    layout: Layout, name: str, work: Sequence[int]
) -> tuple[int, ...]:
    """The number of blocks on each virtual stage of the model `name`.

    If the layout does not give them, stages are balanced by `work`, that of each of the
    model's pieces.
    """
    embed, *blocks, head = work
    counts = layout.stages or balance(
        blocks, layout.virtual_stages, embed, head
    )
    if len(counts) != layout.virtual_stages or sum(counts) != len(blocks):
        raise LayoutError(
            f"stages:{'-'.join(map(str, counts))} is {len(counts)} stages of {sum(counts)} blocks;"
            f" {layout} has {layout.virtual_stages} stages, {name} has {len(blocks)} blocks."
        )
    return counts


def balance(
    costs: Sequence[int], parts: int, first: int = 0, last: int = 0
) -> tuple[int, ...]:
    """The lengths of `parts` runs of `costs` that minimize the most expensive run.

    `first` and `last` are extra work of the first and the last run. Every run gets at
    least one item. Where the optimum allows it, runs are equally long, the earlier ones
    longer by one.
    """
    n = len(costs)
    if parts > n:
        raise LayoutError(
            f"{n} blocks cannot fill {parts} stages with one each; use {n} or fewer."
        )
    # Prefix sums: the cost of a run is a difference of two of them.
    total = [0, *accumulate(costs)]
    low, high = 0, total[-1] + first + last
    # Binary search for the least bound that some division keeps.
    while low < high:
        middle = (low + high) // 2
        if _starts(total, parts, middle, first, last):
            high = middle
        else:
            low = middle + 1
    starts = _starts(total, parts, high, first, last)
    lengths, i = [], 0
    for k in range(parts - 1):
        # The embedding is extra work of the first run.
        left = high - (first if k == 0 else 0)
        longest = min(
            bisect_right(total, total[i] + left) - 1, n - (parts - k - 1)
        )
        # An equal share of what is left, rounded up, moved into the range that
        # keeps the bound.
        j = min(max(i - (i - n) // (parts - k), starts[k + 1]), longest)
        lengths.append(j - i)
        i = j
    return (*lengths, n - i)


def _starts(
    total: Sequence[int], parts: int, bound: int, first: int, last: int
) -> list[int]:
    """The earliest start of each run with which it and all later ones keep the bound.

    Empty if the bound is too small.
    """
    starts, end = [0] * parts, len(total) - 1
    # From the last run backwards, each as long as the bound allows.
    for k in range(parts - 1, 0, -1):
        left = bound - (last if k == parts - 1 else 0)
        # Each earlier run needs at least one item.
        starts[k] = max(k, bisect_left(total, total[end] - left, hi=end))
        # Not even one item fits.
        if starts[k] == end:
            return []
        end = starts[k]
    whole = total[end] + first + (last if parts == 1 else 0)
    return starts if whole <= bound else []


def piece_layout(layout: Layout) -> Layout:
    """The part of a layout that a piece's cost depends on.

    These are tp, cp and ep, the axes that share experts, seq, selective recomputation,
    precision and matmuls, compilation, the parts of `exact`, and a backward in two operations (written as
    zb-h1). Copies, stages, ZeRO and recomputation of whole pieces change when a piece
    runs, never what it does.
    """
    # Sorted, so that the order of axes in the mesh does not make another
    # piece.
    axes = (a for a in layout.mesh.axes if a.name in ("tp", "cp", "ep"))
    in_parts = layout.exact > 1 or layout.time_parts > 1
    return Layout(
        mesh=Mesh(tuple(sorted(axes, key=lambda a: a.name))),
        seq=layout.seq,
        experts=layout.experts,
        schedule=ZB_H1 if layout.splits_backward else ACCUM,
        microbatches=1,
        recompute="selective" if layout.recompute == "selective" else "none",
        precision=layout.precision,
        matmul=layout.matmul,
        # Autotuned graphs run the same operations.
        compile=COMPILE if layout.compile else "",
        exact=layout.exact if in_parts else 0,
        time_parts=layout.time_parts,
    )
