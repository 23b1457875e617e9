"""Bytes of training state: weights, gradients and optimizer state, and what of them a rank holds under ZeRO.

This is the only place that says what each stage of ZeRO cuts. The engine's own buffers are in
`parallel/data.py`; a test holds both equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from .choices import DTYPES
from .layout import Layout

MASTER = 4.0  # bytes of an element that an update changes; narrower weights are copies


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one trained element of a weight in each buffer that has it, before anything is cut."""

    weight: float  # of the weights that computing reads
    gathered: float  # of a copy that other ranks have parts of, while it is used
    gradient: float
    reduced: float  # of a gradient that is summed after every microbatch, until it is
    optimizer: float  # of the moments, and of a master copy where weights are narrower

    @property
    def total(self) -> float:
        """All that stays from step to step, and the gradient."""
        return self.weight + self.gradient + self.optimizer


def engine_state(precision: str, moments: int = 2) -> StateBytes:
    """The buffers of our engine in a precision, with an optimizer that keeps so many moments: gradients are
    added up and weights updated in float32 or wider."""
    width = float(DTYPES[precision].bytes)
    wide = max(MASTER, width)
    copy = wide if width < MASTER else 0.0
    return StateBytes(width, width, wide, wide, moments * wide + copy)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a rank holds for one element of a unit, of which it has one part of all shards.

    `weight`, `frozen` and `optimizer` are always there: `frozen` is of an element that is not trained.
    `gathered` is there while the weights are used, `gradient` from its first contribution until it is
    summed, `gradient_shard` from then until the update; 0 where a sum is in place.
    """

    weight: float
    frozen: float
    gathered: float
    gradient: float
    gradient_shard: float
    optimizer: float


def held_bytes(layout: Layout, state: StateBytes) -> HeldBytes:
    """Bytes that a rank holds of an element: ZeRO cuts optimizer state from stage 1 on, gradients from 2,
    weights from 3. What is offloaded is on the host."""
    parts = layout.shards
    offloaded = "weights" in layout.offload
    comes_and_goes = layout.zero == 3 or offloaded
    each_microbatch = layout.reduce == "micro" and parts > 1
    optimizer = 0.0 if "optimizer" in layout.offload else state.optimizer / parts
    return HeldBytes(
        weight=_weight(layout, state) if comes_and_goes else state.weight,
        frozen=_frozen(layout, state),
        gathered=state.gathered if comes_and_goes else 0.0,
        gradient=state.reduced if each_microbatch else state.gradient,
        gradient_shard=state.gradient / parts if parts > 1 else 0.0,
        optimizer=optimizer,
    )


def _weight(layout: Layout, state: StateBytes) -> float:
    """Bytes at home of weights that come and go: the master copy, if that is the weights themselves; else
    it counts as optimizer state."""
    if layout.weights_on_host or state.weight < MASTER:
        return 0.0
    return state.weight / layout.shards


def _frozen(layout: Layout, state: StateBytes) -> float:
    """Bytes at home of a frozen element, of which no copy is wider."""
    if layout.weights_on_host:
        return 0.0
    return state.gathered / (layout.shards if layout.zero == 3 else 1)
