"""Blocks of each virtual stage: named by the layout, or balanced by cost; and the part of a layout that
one piece depends on."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .choices import ACCUM, COMPILE, ZB_H1
from .layout import Layout
from .mesh import LayoutError, Mesh


def stage_blocks(layout: Layout, name: str, work: Sequence[int]) -> tuple[int, ...]:
    """The number of blocks of each virtual stage of the model of that name. `work` is that of each of
    its pieces, by which stages are balanced where the layout does not name them."""
    embed, *blocks, head = work
    counts = layout.stages or balance(blocks, layout.virtual_stages, embed, head)
    if len(counts) != layout.virtual_stages or sum(counts) != len(blocks):
        raise LayoutError(
            f"stages:{'-'.join(map(str, counts))} is {len(counts)} stages of {sum(counts)} blocks;"
            f" {layout} has {layout.virtual_stages} stages, {name} has {len(blocks)} blocks."
        )
    return counts


def balance(
    costs: Sequence[int], parts: int, first: int = 0, last: int = 0
) -> tuple[int, ...]:
    """Lengths of `parts` runs of `costs` whose most expensive run is as cheap as can be. `first` and
    `last` are work that the first and last run carry besides. Every run gets at least one; where the
    bound allows it runs are even, the earlier ones longer by one."""
    n = len(costs)
    if parts > n:
        raise LayoutError(
            f"{n} blocks cannot fill {parts} stages with one each; use {n} or fewer."
        )
    total = [0, *accumulate(costs)]
    low, high = 0, total[-1] + first + last
    while low < high:
        middle = (low + high) // 2
        if _starts(total, parts, middle, first, last):
            high = middle
        else:
            low = middle + 1
    starts = _starts(total, parts, high, first, last)
    lengths, i = [], 0
    for k in range(parts - 1):
        left = high - (first if k == 0 else 0)
        longest = min(bisect_right(total, total[i] + left) - 1, n - (parts - k - 1))
        j = min(max(i - (i - n) // (parts - k), starts[k + 1]), longest)
        lengths.append(j - i)
        i = j
    return (*lengths, n - i)


def _starts(
    total: Sequence[int], parts: int, bound: int, first: int, last: int
) -> list[int]:
    """The earliest start of each run with which it and all later ones stay within the bound;
    empty if the bound is too small."""
    starts, end = [0] * parts, len(total) - 1
    for k in range(parts - 1, 0, -1):
        left = bound - (last if k == parts - 1 else 0)
        # The runs before this one need at least one each.
        starts[k] = max(k, bisect_left(total, total[end] - left, hi=end))
        if starts[k] == end:
            return []
        end = starts[k]
    whole = total[end] + first + (last if parts == 1 else 0)
    return starts if whole <= bound else []


def piece_layout(layout: Layout) -> Layout:
    """The part of a layout that a piece's cost depends on: tp, cp and ep, who shares experts, seq,
    selective recomputation, precision and products, whether it is compiled, and whether the backward is two
    operations (written as zb-h1). Copies, stages, ZeRO and whole-piece recomputation change when a
    piece runs, never what it does."""
    axes = (a for a in layout.mesh.axes if a.name in ("tp", "cp", "ep"))
    return Layout(
        mesh=Mesh(tuple(sorted(axes, key=lambda a: a.name))),
        seq=layout.seq,
        experts=layout.experts,
        schedule=ZB_H1 if layout.splits_backward else ACCUM,
        microbatches=1,
        recompute="selective" if layout.recompute == "selective" else "none",
        precision=layout.precision,
        matmul=layout.matmul,
        # autotuned graphs do the same operations
        compile=COMPILE if layout.compile else "",
    )
