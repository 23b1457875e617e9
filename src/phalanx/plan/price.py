"""Seconds of the operations of a model's pieces on some hardware, under a profile: Loads made into times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..layout import Layout
from ..program import AttentionLoad, Costs, Load, MessageLoad, PieceCost, ops
from .hardware import Hardware
from .profile import Profile

__all__ = ["Raw", "RawTrio", "Times", "Trio", "costs_of", "raw_of", "raw_trio", "time_of", "trio"]

# Bytes that scores cost in memory when attention keeps them, for each pair and head: written,
# softened, masked, read (forward), and back.
_SCORES = {True: 12.0, False: 16.0}
_STARTS = 4.0  # operations that start as slowly as one message does
_RING = 0.9  # of computing that a ring's sends may hide behind
KEPT_SCORES = 5.0  # Korthikanti et al. 2022: two halves and a mask


@dataclass(frozen=True)
class Times:
    """One operation: what the device computes, the messages inside it that computing does not
    hide, and the least that starting its kernels takes."""

    device: float = 0.0
    messages: float = 0.0
    host: float = 0.0

    @property
    def compute(self) -> float:
        """All but the messages: starting kernels is hidden as long as they last longer."""
        return max(self.device, self.host - self.messages)

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


@dataclass(frozen=True)
class Raw:
    """One operation on some hardware, before a profile: seconds of each part as the machine could do it."""

    products: float
    attention: float
    moved: float
    host: float
    ring: float  # sends that travel while a block is computed
    messages: float  # the other ones inside the operation
    members: float  # ranks that the messages' groups have, all added
    shared: float  # how much slower it is for ranks that share cores
    serial: bool = False  # the device is the host: what starts a kernel computes it too

    def under(self, profile: Profile) -> Times:
        """Its times with a profile."""
        device = self.products / profile.speed + self.attention / profile.attention
        device = (device + self.moved * profile.traffic) * self.shared
        seen = max(0.0, self.ring - _RING * device) + self.messages * (1 - profile.hides_tensor)
        host = (self.host * profile.host + self.members * profile.member_host) * self.shared
        return Times(device + host, seen) if self.serial else Times(device, seen, host)


def raw_of(load: Load, hardware: Hardware, cut: Layout, dtype: str, fused: bool) -> Raw:
    """The parts of one operation on one rank. `fused`: attention keeps no scores."""
    ring, messages = _messages(load, hardware, cut)
    shared = max(1.0, hardware.ranks / hardware.cores) if hardware.cores else 1.0
    if hardware.cores and hardware.ranks >= hardware.cores:
        # No core is left to carry a ring's messages, and each carries what comes and what goes.
        ring, messages = 0.0, messages + 2 * ring * shared
    return Raw(
        products=sum(hardware.rates.product(p, dtype) for p in load.products),
        attention=sum(_attend(a, hardware, dtype, fused) for a in load.attention),
        moved=hardware.rates.move(load.moved),
        host=(load.launches + _STARTS * len(load.messages)) * hardware.rates.launch,
        ring=ring,
        messages=messages,
        members=float(sum(_group(m, cut)[0] for m in load.messages)),
        shared=shared,
        serial=bool(hardware.cores),
    )


def time_of(load: Load, hardware: Hardware, profile: Profile, cut: Layout, dtype: str) -> Times:
    """One operation on one rank, priced."""
    return raw_of(load, hardware, cut, dtype, profile.fused_attention).under(profile)


def _attend(a: AttentionLoad, hardware: Hardware, dtype: str, fused: bool) -> float:
    if fused:
        return hardware.rates.attention(a, dtype)
    pairs = a.batch * a.heads * a.queries * a.keys
    forward = a.products <= 2
    products = 2 if forward else 4  # nothing is computed again where scores are kept
    flops = 2.0 * products * pairs * a.head_dim
    rate = hardware.rates.attention(a, dtype) / max(a.flops, 1.0)
    # Tensor cores take 16 bytes at a time: eight numbers. What is no multiple goes round them.
    uneven = 1.0 if a.head_dim % 64 == 0 else 1.25 if a.head_dim % 8 == 0 else 6.0
    return (flops * rate + hardware.rates.move(_SCORES[forward] * pairs)) * uneven


def _group(message: MessageLoad, cut: Layout) -> tuple[int, int]:
    """How many ranks share a message, and how far each is from the next."""
    if message.axis == "tp":
        return cut.tp, 1
    inner = cut.mesh.of("cp.ulysses") if message.axis in ("cp", "cp.ring") else 1
    return cut.mesh.of(message.axis), cut.tp * inner


def _messages(load: Load, hardware: Hardware, cut: Layout) -> tuple[float, float]:
    """Seconds of a ring's sends, and of the other messages."""
    ring = other = 0.0
    for message in load.messages:
        ranks, apart = _group(message, cut)
        size, n = np.asarray(message.bytes), np.asarray(float(ranks))
        time = float(hardware.network.seconds(message.op, size, n, np.asarray(float(apart))))
        if message.op == "send":
            ring += time
        else:
            other += time
    return ring, other


@dataclass(frozen=True)
class RawTrio:
    """One kind of piece at one microbatch on some hardware, before a profile."""

    loads: tuple[Raw, Raw, Raw, Raw]  # F, I, W, R
    costed: PieceCost
    scores: float  # bytes, where attention keeps them

    def under(self, profile: Profile) -> Trio:
        forward, inputs, weights, again = (raw.under(profile) for raw in self.loads)
        w = self.costed
        return Trio(
            forward, inputs, weights, again,
            kept=w.kept * profile.kept + self.scores,
            input=w.input,
            temporary=w.temporary * profile.scratch + 2 * self.scores,
            weights=w.weights,
            edge=w.edge,
        )  # fmt: skip


def raw_trio(
    w: PieceCost, hardware: Hardware, profile: Profile, cut: Layout, dtype: str
) -> RawTrio:
    """A costed piece on some hardware, as software with the profile's facts runs it; of the profile's fitted
    numbers it knows none."""
    again, scores, fused = w.again, 0.0, profile.fused_attention
    if not fused and cut.recompute == "selective":
        # What is worth computing again is then attention, scores and all, and nothing else.
        again = Load(attention=w.forward.attention)
    elif not fused:
        pairs = sum(a.batch * a.heads * a.queries * a.keys for a in w.forward.attention)
        scores = KEPT_SCORES * pairs
    loads = (w.forward, w.input_gradient, w.weight_gradient, again)
    forward, inputs, weights, repeated = (raw_of(x, hardware, cut, dtype, fused) for x in loads)
    if fused and cut.recompute == "selective":
        repeated = replace(
            repeated, products=repeated.products + profile.repeats * forward.products
        )
    if profile.regathers and cut.seq:
        # Kept in parts, and gathered while the gradient of a column's input is computed.
        taken = [m for m in w.forward.messages if (m.axis, m.op) == ("tp", "all_gather")]
        w = replace(w, kept=w.kept - sum(m.bytes for m in taken) * (1 - 1 / cut.tp))
        gathers = sum(_messages(Load(messages=tuple(taken)), hardware, cut))
        inputs = replace(inputs, ring=inputs.ring + gathers)
    return RawTrio((forward, inputs, weights, repeated), w, scores)


def trio(w: PieceCost, hardware: Hardware, profile: Profile, cut: Layout, dtype: str) -> Trio:
    """A costed piece, priced."""
    return raw_trio(w, hardware, profile, cut, dtype).under(profile)


def costs_of(trios: Mapping[int, Trio], also: Mapping[str, float] | None = None) -> Costs:
    """The times as `simulate` takes them: by kind and piece, and the rest by kind."""
    pieces: dict[tuple[str, int], float] = {}
    for piece, t in trios.items():
        pieces[ops.FORWARD, piece] = t.forward.total
        pieces[ops.INPUT_GRADIENT, piece] = t.inputs.total
        pieces[ops.WEIGHT_GRADIENT, piece] = t.weights_.total
        pieces[ops.RECOMPUTE, piece] = t.again.total
    return Costs(kinds=dict(also or {}), pieces=pieces)
