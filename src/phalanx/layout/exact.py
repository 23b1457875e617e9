"""The choices that `exact` does not cover yet, each with its reason.

With `exact` in a layout, a step has the same bits as on one process: each sum has one
order that does not depend on the layout. `program/tree.py` defines the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choices import BF16, FP32

if TYPE_CHECKING:
    from .layout import Layout

EXACT = "exact"  # the word of a layout
COVERED = (FP32, BF16)
NOT_MATRICES = (
    "exact does not cover muon yet: its products of whole matrices have not been"
    " compared bit by bit. Use adamw or sgd."
)
NOT_EXPERTS = (
    "exact does not cover experts yet: their gradients are sums over tokens in the order"
    " of arrival."
)
_AXES = {
    "tp": "a product is split into as many parts as there are ranks",
    "cp": "weight gradients are sums over the tokens of each rank",
    "ep": "the gradients of experts are sums over tokens in the order of arrival",
}


def uncovered(x: Layout) -> list[str]:
    """Every reason why this layout cannot give the bits of one process."""
    found = [
        f"exact does not cover {axis} yet: {why}. Use dp, ZeRO or pp"
        for axis, why in _AXES.items()
        if x.mesh.of(axis) > 1
    ]
    if x.precision not in COVERED:
        found.append(
            f"exact does not cover {x.precision} yet: only {' and '.join(COVERED)}"
            " have been compared bit by bit"
        )
    if x.matmul:
        found.append(
            f"exact does not cover {x.matmul} yet: its scales have not been compared"
            " bit by bit"
        )
    if x.compile:
        found.append(
            "exact does not cover compile yet: a compiler may fuse the same piece"
            " in two ways"
        )
    if x.reduce == "micro":
        found.append(
            "exact does not cover reduce:micro: a rank adds its own microbatches"
            " before it exchanges sums. Use reduce:step"
        )
    return found


def exact_batch(x: Layout) -> int:
    """A small batch for comparisons: two rows in each microbatch."""
    return 2 * x.data * x.microbatches


def no_subtree(x: Layout) -> tuple[str, str] | None:
    """Why a rank's microbatches are no subtree of those of all ranks, and a way out."""
    count = x.microbatches
    if not x.exact or x.data == 1 or count & (count - 1) == 0:
        return None
    lower = 1 << count.bit_length() - 1
    what = (
        f"exact: {count} microbatches a rank are no subtree of the {count * x.data} of"
        f" {x.data} ranks."
    )
    return what, f"Use a power of two: {lower} or {2 * lower}; or dp1."


def uneven_microbatches(x: Layout, batch: int) -> tuple[str, str] | None:
    """Why microbatches would have different sizes, and a way out."""
    count = x.data * x.microbatches
    if not x.exact or batch % count == 0:
        return None
    what = (
        f"exact: a batch of {batch} is no multiple of {count} microbatches, and products"
        " of different sizes round differently."
    )
    lower = batch // count * count
    fits = [str(size) for size in (lower, lower + count) if size]
    return what, f"Use a batch of {' or '.join(fits)}."
