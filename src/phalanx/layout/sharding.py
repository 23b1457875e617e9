"""Frequency of ZeRO's messages, and the stages that send less often.

Lower stages hold more. ZeRO-3 with `gather:step` equals ZeRO-2 in time and memory, and
with `reduce:step` as well it equals ZeRO-1, so only stages are compared.
"""

from dataclasses import replace
from typing import NamedTuple

from .layout import Layout


class Sends(NamedTuple):
    """The most times that a step gathers a unit's weights and sums its gradient."""

    gathers: int
    sums: int


def sends(layout: Layout) -> Sends:
    microbatches = layout.microbatches
    # once for the forward and once for the backward
    gathers = 2 * microbatches if layout.gather == "micro" else 1
    sums = microbatches if layout.reduce == "micro" else 1
    return Sends(gathers, sums)


def sends_less(layout: Layout) -> tuple[Layout, ...]:
    """The layout with each lower ZeRO stage that gathers or sums less often.

    The one that sends least comes first.
    """
    # Offloaded weights are fetched from the host for each use, under every stage.
    if "weights" in layout.offload:
        return ()
    mine = sends(layout)
    found: dict[Sends, Layout] = {}
    # Stage 0 is left out: it does not shard the optimizer.
    for zero in range(layout.zero - 1, 0, -1):
        other = replace(layout, zero=zero, gather="", reduce="")
        its = sends(other)
        less = (
            its != mine
            and its.gathers <= mine.gathers
            and its.sums <= mine.sums
        )
        # Of two that send equally often, the higher stage holds less.
        if less and its not in found:
            found[its] = other
    return tuple(reversed(found.values()))


def less_text(layout: Layout, other: Layout) -> str:
    """The messages that the lower stage sends once per step instead, in words."""
    mine, its = sends(layout), sends(other)
    parts = ["gathers weights"] * (its.gathers < mine.gathers)
    parts += ["sums gradients"] * (its.sums < mine.sums)
    return f"{' and '.join(parts)} once a step"
