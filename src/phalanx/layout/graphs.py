"""The choices that `compile:graphs` does not cover, each with its reason.

With `compile:graphs` a piece's forward and its backward are a CUDA graph each: kernels
that are recorded once and then launched together. A graph keeps the addresses and the
shapes of the tensors with which it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout

SPLIT_BACKWARD = (
    "compile:graphs with a backward in two parts: weight gradients are part of a"
    " backward's graph. Use 1f1b or another schedule with whole backwards"
)


def unrecordable(x: Layout) -> Iterator[str]:
    """Every reason why graphs cannot serve the steps of this layout."""
    for axis in ("tp", "cp", "ep"):
        if x.mesh.of(axis) > 1:
            yield (
                f"compile:graphs with {axis}{x.mesh.of(axis)}: a graph holds computation"
                " alone, and here a piece sends messages. Use dp and pp, or compile"
            )
    if x.zero == 3:
        yield (
            "compile:graphs with zero3: weights are gathered into buffers that other"
            " pieces use too, and a graph reads one address. Use zero1, or compile"
        )
    elif x.reduce == "micro":
        yield (
            "compile:graphs with reduce:micro: a gradient is still being summed when the"
            " next microbatch adds to it, and a graph has one address for both. Use"
            " reduce:step, or compile"
        )
    if x.offload:
        yield (
            f"compile:graphs with offload:{','.join(x.offload)}: a graph's tensors stay"
            " on the GPU. Leave offload out, or use compile"
        )
    if x.recompute not in ("none", "selective"):
        yield (
            f"compile:graphs with recompute:{x.recompute}: a graph holds its activations"
            " for good, so nothing is saved. Use recompute:selective, or compile"
        )
    if x.splits_backward:
        yield SPLIT_BACKWARD
    if x.matmul:
        yield (
            f"compile:graphs with {x.matmul}: its padded copies of weights are made"
            " outside of a graph. Leave it out, or use compile"
        )
