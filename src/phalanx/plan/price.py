"""Seconds of the operations of a model's pieces on a site, under a stack: Loads made into times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..layout import Layout
from ..program import Attention, Costs, Load, Weighed
from .site import Site
from .stack import Stack

__all__ = ["Times", "Trio", "costs_of", "time_of", "trio"]

# Bytes that scores cost in memory when attention keeps them, for each pair and head: written,
# softened, masked, read (forward), and back.
_SCORES = {True: 12.0, False: 16.0}
KEPT_SCORES = 5.0  # Korthikanti et al. 2022: two halves and a mask


@dataclass(frozen=True)
class Times:
    """One operation: computing, and the messages inside it that computing does not hide."""

    compute: float = 0.0
    messages: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.messages


@dataclass(frozen=True)
class Trio:
    """One kind of piece at one microbatch: times of its operations, bytes of what it holds."""

    forward: Times
    inputs: Times  # I
    weights_: Times  # W
    again: Times  # R
    kept: float
    input: float
    temporary: float
    weights: float
    edge: float

    @property
    def backward(self) -> float:
        return self.inputs.total + self.weights_.total


def time_of(load: Load, site: Site, stack: Stack, cut: Layout, dtype: str) -> Times:
    """One operation on one rank. Starting kernels is hidden as long as they last longer."""
    products = sum(site.rates.product(p, dtype) for p in load.products) / stack.speed
    attention = sum(_attend(a, site, stack, dtype) for a in load.attention)
    moved = site.rates.move(load.moved) * stack.traffic
    device = products + attention + moved
    host = load.launches * site.rates.launch * stack.host
    compute = max(device, host) * _shared(site)
    return Times(compute, _messages(load, site, cut, stack, compute))


def _shared(site: Site) -> float:
    """How much slower a rank computes when there are more of them than cores."""
    return max(1.0, site.ranks / site.cores) if site.cores else 1.0


def _attend(a: Attention, site: Site, stack: Stack, dtype: str) -> float:
    if stack.fused_attention:
        return site.rates.attention(a, dtype) / stack.attention
    pairs = a.batch * a.heads * a.queries * a.keys
    forward = a.products <= 2
    products = 2 if forward else 4  # nothing is computed again where scores are kept
    flops = 2.0 * products * pairs * a.head_dim
    rate = site.rates.attention(a, dtype) / max(a.flops, 1.0)
    uneven = 1.0 if a.head_dim % 32 == 0 else 1.5 if a.head_dim % 16 == 0 else 2.2
    traffic = site.rates.move(_SCORES[forward] * pairs)
    return (flops * rate * uneven + traffic * uneven) / stack.attention


def _messages(load: Load, site: Site, cut: Layout, stack: Stack, compute: float) -> float:
    total = 0.0
    ring = cut.mesh.of("cp.ring")
    for message in load.messages:
        ranks = cut.tp if message.axis == "tp" else cut.mesh.of(message.axis)
        apart = 1 if message.axis == "tp" else cut.tp
        if message.axis in ("cp", "cp.ring"):
            apart = cut.tp * cut.mesh.of("cp.ulysses")
        size, n = np.asarray(message.bytes), np.asarray(float(ranks))
        time = float(site.wire.seconds(message.op, size, n, np.asarray(float(apart))))
        # A ring's sends travel while a block is computed.
        hides = 0.9 if message.op == "send" and ring > 1 else stack.hides_tensor
        total += time * (1 - hides)
    return total


def trio(w: Weighed, site: Site, stack: Stack, cut: Layout, dtype: str) -> Trio:
    """A weighed piece, priced."""
    loads = (w.forward, w.input_gradient, w.weight_gradient, w.again)
    forward, inputs, weights, again = (time_of(x, site, stack, cut, dtype) for x in loads)
    scores = 0.0
    if not stack.fused_attention and cut.recompute == "selective":
        # What is worth computing again is then attention, scores and all, and nothing else.
        again = time_of(Load(attention=w.forward.attention), site, stack, cut, dtype)
    elif not stack.fused_attention:
        scores = KEPT_SCORES * sum(
            a.batch * a.heads * a.queries * a.keys for a in w.forward.attention
        )
    return Trio(
        forward, inputs, weights, again,
        kept=w.kept * stack.kept + scores,
        input=w.input,
        temporary=w.temporary * stack.scratch + (2 * scores if scores else 0.0),
        weights=w.weights,
        edge=w.edge,
    )  # fmt: skip


def costs_of(trios: Mapping[int, Trio], also: Mapping[str, float] | None = None) -> Costs:
    """The times as `simulate` takes them: by kind and piece, and the rest by kind."""
    pieces: dict[tuple[str, int], float] = {}
    for piece, t in trios.items():
        pieces["F", piece] = t.forward.total
        pieces["I", piece] = t.inputs.total
        pieces["W", piece] = t.weights_.total
        pieces["R", piece] = t.again.total
    return Costs(kinds=dict(also or {}), pieces=pieces)
