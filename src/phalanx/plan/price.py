"""Seconds of a piece's operations on some hardware, under a profile.

A cost says what an operation does (products, bytes, messages); here this becomes time. Collectives
of whole units, sends between stages and updates are priced in `step.py`: they depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout import Layout
from ..layout.choices import DTYPES
from ..program import AttentionLoad, Load, MessageLoad, PieceCost, Product
from .hardware import Hardware
from .profile import SCORES, SoftwareProfile

# Bytes that attention which keeps its scores moves for each of them beside its products: one kernel
# scales, masks and softens them, one drops some out; and both again in the backward.
_SCORES = {True: 9.0, False: 11.0}
FUSED = 0.5  # of the bytes that operations move one by one, where neighbours are one kernel
_ADDING = 10.0  # bytes of a gradient in 16 bits that is added to one in 32, which costs have
_STARTS = 4.0  # operations that start as slowly as one message does
_OVERLAP = 0.9  # of computing that messages sent beside it may take
SLOWED = 0.25  # of their time: what computing loses to them, units and memory
KEPT_SCORES = 5.0  # Korthikanti et al. 2022: two halves and a mask


@dataclass(frozen=True)
class OpTime:
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
class PieceTimes:
    """One kind of piece at one microbatch: times of its operations, bytes of what it holds."""

    forward: OpTime
    inputs: OpTime  # I
    weights_: OpTime  # W
    again: OpTime  # R
    kept: float
    kept_after_i: float
    input: float
    temporary: float
    weights: float  # numbers, before ZeRO shards them
    edge: float
    selected: float = 0.0
    frozen: float = 0.0  # those of the weights that are not trained
    experts: float = 0.0  # those of the weights that ranks of ep have parts of
    parts: tuple[PieceTimes, ...] = ()  # of a block that is several pieces

    @property
    def backward(self) -> float:
        return self.inputs.total + self.weights_.total


@dataclass(frozen=True)
class OpParts:
    """One operation on some hardware, before a profile: seconds as the machine could do each part."""

    products: float
    attention: float
    moved: float
    added: float  # adding weights' gradients to those of earlier microbatches
    host: float
    ring: float  # sends that travel while a block is computed
    messages: float  # the other ones inside the operation
    calls: float  # how many messages these are
    members: float  # ranks that their groups have, all added, where there are several servers
    serial: bool = False  # the device is the host: what starts a kernel computes it too

    def under(self, profile: SoftwareProfile, piped: bool = False) -> OpTime:
        """Its times, in a pipeline or without one."""
        device = self.products / profile.speed + self.attention
        moved = self.moved * (FUSED if profile.fused else 1.0) + self.added
        device += moved * profile.traffic
        inside = 0.0 if profile.overlaps_tensor else self.messages
        beside = self.ring + self.messages - inside
        hidden = min(beside, _OVERLAP * device)
        seen = inside + beside - hidden + (0.0 if self.serial else SLOWED * hidden)
        host = self.host * profile.host + self.calls * profile.call_host
        if piped:
            host = self.host * profile.host * profile.pipe_host + self.calls * profile.call_host
            host += self.members * profile.member_host
        return OpTime(device + host, seen) if self.serial else OpTime(device, seen, host)


def op_parts(
    load: Load,
    hardware: Hardware,
    cut: Layout,
    dtype: str,
    profile: SoftwareProfile,
    added: float = 0.0,
) -> OpParts:
    """The parts of one operation on one rank, with the profile's kernels. `added` of what it moves
    are gradients of weights, however many tokens there are."""
    ring, messages = _messages(load, hardware, cut)
    if hardware.cores and hardware.ranks >= hardware.cores:
        # No core is left to carry a ring's messages, and each carries what comes and what goes.
        # Messages were measured among ranks that share the cores, as `simulate` has it again.
        ring, messages = 0.0, 2 * ring + messages / hardware.crowding
    rates, several = hardware.rates, hardware.ranks > hardware.node
    return OpParts(
        products=sum(rates.product(p, dtype) for p in load.products),
        attention=sum(_attention(a, hardware, dtype, profile.attention) for a in load.attention),
        moved=rates.move(load.moved - added),
        added=rates.move(added * profile.adding / _ADDING),
        host=(load.launches + _STARTS * len(load.messages)) * rates.launch,
        ring=ring,
        messages=messages,
        calls=float(len(load.messages)),
        members=float(sum(_group(m, cut)[0] for m in load.messages)) if several else 0.0,
        serial=bool(hardware.cores),
    )


def _attention(a: AttentionLoad, hardware: Hardware, dtype: str, kernel: str) -> float:
    if kernel != SCORES:
        return hardware.rates.attention(a, dtype, kernel)
    forward = a.products <= 2
    products = (
        Product(a.queries, a.head_dim, a.keys, a.batch * a.heads),
        Product(a.queries, a.keys, a.head_dim, a.batch * a.heads),
    )
    time = sum(hardware.rates.product(p, dtype) for p in products) * (1 if forward else 2)
    time += hardware.rates.move(_SCORES[forward] * a.batch * a.heads * a.queries * a.keys)
    # Tensor cores take 16 bytes at a time: eight numbers. What is no multiple goes round them.
    return time * (1.0 if a.head_dim % 64 == 0 else 1.25 if a.head_dim % 8 == 0 else 6.0)


def _group(message: MessageLoad, cut: Layout) -> tuple[int, int]:
    """How many ranks share a message, and how far each is from the next."""
    if message.axis == "tp":
        return cut.tp, 1
    inner = cut.mesh.of("cp.ulysses") if message.axis in ("cp", "cp.ring") else 1
    inner *= cut.ep if message.axis != "ep" else 1
    return cut.mesh.of(message.axis), cut.tp * inner


def _messages(load: Load, hardware: Hardware, cut: Layout) -> tuple[float, float]:
    """Seconds of a ring's sends, and of the other messages."""
    ring = other = 0.0
    for message in load.messages:
        time = hardware.network.seconds(message.op, message.bytes, *_group(message, cut))
        if message.op == "send":
            ring += time
        else:
            other += time
    return ring, other


@dataclass(frozen=True)
class PieceParts:
    """One kind of piece at one microbatch on some hardware, before a profile."""

    ops: tuple[OpParts, OpParts, OpParts, OpParts]  # F, I, W, R
    cost: PieceCost
    scores: float  # bytes, where attention keeps them
    parts: tuple[PieceParts, ...] = ()  # of a block that is several pieces

    def under(self, profile: SoftwareProfile, piped: bool = False) -> PieceTimes:
        c = self.cost
        forward, inputs, weights, again = (op.under(profile, piped) for op in self.ops)
        return PieceTimes(
            forward,
            inputs,
            weights,
            again,
            kept=c.kept + self.scores,
            kept_after_i=c.kept_after_i,
            input=c.input,
            temporary=c.temporary + 2 * self.scores,
            weights=c.weights,
            frozen=c.frozen,
            experts=c.experts,
            edge=c.edge,
            selected=c.selected,
            parts=tuple(part.under(profile, piped) for part in self.parts),
        )


def piece_parts(
    cost: PieceCost,
    hardware: Hardware,
    profile: SoftwareProfile,
    cut: Layout,
    dtype: str,
    none: PieceCost | None = None,
) -> PieceParts:
    """A piece as software with the profile's facts runs it; the fitted numbers are not used yet. `none`
    is the same piece without a token: what it moves are gradients of its weights."""
    again, scores, fused = cost.again, 0.0, profile.fused_attention
    if not fused and cut.recompute == "selective":
        # What is worth computing again is then attention, scores and all, and nothing else.
        again = Load(attention=cost.forward.attention)
        cost = replace(cost, selected=cost.kept)
    if not fused:
        scores = KEPT_SCORES * sum(
            a.batch * a.heads * a.queries * a.keys for a in cost.forward.attention
        )
    loads = (cost.forward, cost.input_gradient, cost.weight_gradient, again)
    added = (
        (0.0, none.input_gradient.moved, none.weight_gradient.moved, 0.0) if none else (0.0,) * 4
    )
    forward, inputs, weights, repeated = (
        op_parts(load, hardware, cut, dtype, profile, more)
        for load, more in zip(loads, added, strict=True)
    )
    if fused and cut.recompute == "selective":
        more = profile.repeats * forward.products
        repeated = replace(repeated, products=repeated.products + more)
        width = DTYPES[cut.precision].bytes
        made = width * sum(p.batch * p.m * p.n for p in cost.forward.products)
        cost = replace(cost, selected=max(0.0, cost.selected - profile.repeats * made))
    if profile.regathers and cut.seq:
        # Kept in shards, and gathered while the gradient of a column's input is computed.
        taken = [m for m in cost.forward.messages if (m.axis, m.op) == ("tp", "all_gather")]
        less = sum(m.bytes for m in taken) * (1 - 1 / cut.tp)
        cost = replace(cost, kept=cost.kept - less, selected=max(0.0, cost.selected - less))
        gathers = sum(_messages(Load(messages=tuple(taken)), hardware, cut))
        inputs = replace(inputs, ring=inputs.ring + gathers)
    return PieceParts((forward, inputs, weights, repeated), cost, scores)
