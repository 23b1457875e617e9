"""Bytes of training state: weights, gradients and optimizer, and a rank's share.

Only this file defines what each ZeRO stage shards. The engine's own buffers are in
`parallel/data.py`; a test checks that both are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from .choices import DTYPES
from .layout import Layout

MASTER = 4.0  # bytes of an element in an update; narrower weights are copies


@dataclass(frozen=True)
class StateBytes:
    """The bytes of one trained element in each buffer that has it, before sharding."""

    weight: float  # in the weights used for computing
    gathered: float  # in a copy gathered from other ranks, while it is used
    gradient: float
    reduced: (
        float  # in a gradient summed after every microbatch, until its sum
    )
    optimizer: (
        float  # in the moments, and in the master copy of narrower weights
    )

    @property
    def total(self) -> float:
        """The bytes that stay from step to step, and those of the gradient."""
        return self.weight + self.gradient + self.optimizer


def engine_state(precision: str, moments: int = 2) -> StateBytes:
    """The buffers of our engine in a precision, with `moments` optimizer moments.

    Gradients are added up and weights updated in float32 or wider.
    """
    width = float(DTYPES[precision].bytes)
    # Updates are in float32 or wider; narrower weights need a copy of that
    # width.
    wide = max(MASTER, width)
    copy = wide if width < MASTER else 0.0
    return StateBytes(width, width, wide, wide, moments * wide + copy)


@dataclass(frozen=True)
class HeldBytes:
    """The bytes that a rank holds for one element of a unit, of which it has one shard.

    `weight`, `frozen` and `optimizer` are permanent; `frozen` is for an element that is
    not trained. `gathered` is held while the weights are used, `gradient` from its
    first contribution until its sum, and `gradient_shard` from then until the update; 0
    if sums are in place.
    """

    weight: float
    frozen: float
    gathered: float
    gradient: float
    gradient_shard: float
    optimizer: float


def held_bytes(layout: Layout, state: StateBytes) -> HeldBytes:
    """The bytes that a rank holds for one element.

    ZeRO shards optimizer state from stage 1 on, gradients from 2, weights from 3.
    Offloaded state is on the host.
    """
    parts = layout.shards
    offloaded = "weights" in layout.offload
    comes_and_goes = layout.zero == 3 or offloaded
    each_microbatch = layout.reduce == "micro" and parts > 1
    optimizer = (
        0.0 if "optimizer" in layout.offload else state.optimizer / parts
    )
    return HeldBytes(
        weight=_weight(layout, state) if comes_and_goes else state.weight,
        frozen=_frozen(layout, state),
        gathered=state.gathered if comes_and_goes else 0.0,
        # Sums after every microbatch send the gradient, so it may be narrower.
        gradient=state.reduced if each_microbatch else state.gradient,
        gradient_shard=state.gradient / parts if parts > 1 else 0.0,
        optimizer=optimizer,
    )


def _weight(layout: Layout, state: StateBytes) -> float:
    """The bytes at home of weights that are gathered and dropped.

    This is the master copy, if that is the weights themselves; otherwise it counts as
    optimizer state.
    """
    if layout.weights_on_host or state.weight < MASTER:
        return 0.0
    return state.weight / layout.shards


def _frozen(layout: Layout, state: StateBytes) -> float:
    """The bytes at home of a frozen element, which has no wider copy."""
    if layout.weights_on_host:
        return 0.0
    return state.gathered / (layout.shards if layout.zero == 3 else 1)
