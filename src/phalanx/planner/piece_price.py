"""Prices one kind of piece: seconds of its operations on hardware, under a profile.

A piece's cost describes work: products, bytes and messages. `op_parts` converts the
work of one operation to the seconds that the hardware needs for each part.
`OpParts.under` combines them as the software does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..layout import ByKind, Layout
from ..layout.choices import MATMULS
from ..program import (
    AttentionLoad,
    CostedPiece,
    Load,
    MessageLoad,
    PieceCost,
    PieceKinds,
    Product,
    joined,
    ops,
)
from .case import Case
from .corrections import (
    ADDING,
    BLOCK,
    COMBINE,
    HEAD,
    ROUTED,
    WHOLE,
    Software,
    Tokens,
    corrected,
    of_tokens,
)
from .hardware import NARROW, SLOWED, Hardware
from .profile import STORED, SoftwareProfile

# share of elementwise traffic that remains if neighbouring operations are fused
FUSED = 0.5
_STARTS = (
    4.0  # starting a message takes as long as starting so many operations
)


@dataclass(frozen=True)
class OpTime:
    """Seconds of one operation."""

    device: float = 0.0  # computing on the device
    messages: float = 0.0  # messages that computing does not hide
    host: float = 0.0  # the least time to start its kernels

    @property
    def total(self) -> float:
        """Seconds of the operation; computing and messages hide the start of kernels."""
        return max(self.device, self.host - self.messages) + self.messages


@dataclass(frozen=True)
class PieceTimes:
    """Seconds of the operations of one kind of piece at one microbatch, and its cost."""

    forward: OpTime
    input_gradient: OpTime  # I
    weight_gradient: OpTime  # W
    recompute: OpTime  # R
    cost: PieceCost
    parts: tuple[PieceTimes, ...] = ()  # if a block consists of several pieces

    @property
    def backward(self) -> float:
        return self.input_gradient.total + self.weight_gradient.total

    @cached_property
    def computed(self) -> dict[str, float]:
        """Seconds of computation, by kind of operation."""
        return {
            ops.FORWARD: self.forward.total,
            ops.INPUT_GRADIENT: self.input_gradient.total,
            ops.WEIGHT_GRADIENT: self.weight_gradient.total,
            ops.RECOMPUTE: self.recompute.total,
        }


KindTimes = ByKind[PieceTimes]


# ---- one operation


@dataclass(frozen=True)
class MessageSeconds:
    """Seconds of the messages inside one operation, by what can hide them."""

    # sends of a ring: hidden by attention over the blocks received before
    ring: float = 0.0
    # of tp: hidden by their products, if the software overlaps them
    tensor: float = 0.0
    gathered: float = 0.0  # hidden by products that do not need them
    others: float = 0.0  # never hidden

    def __add__(self, other: MessageSeconds) -> MessageSeconds:
        return MessageSeconds(
            self.ring + other.ring,
            self.tensor + other.tensor,
            self.gathered + other.gathered,
            self.others + other.others,
        )


@dataclass(frozen=True)
class OpParts:
    """Seconds that the hardware needs for each part of one operation, before a profile.

    `ring` and `group` are the numbers of ranks that share the messages beside attention
    and products. Such a message arrives in as many parts, and one part's computation
    has no message to hide. 0 if there is no such message.
    """

    products: float
    attention: float
    moved: float
    added: float  # adding weight gradients to those of earlier microbatches
    host: float
    calls: float  # number of messages
    # sum of their groups' ranks, on several servers
    members: float
    messages: MessageSeconds = field(default_factory=MessageSeconds)
    ring: int = 0
    group: int = 0
    # the device is the host: starting kernels takes the time of computing
    serial: bool = False

    def under(self, profile: SoftwareProfile, piped: bool = False) -> OpTime:
        """The operation's times under a profile, in a pipeline or without one."""
        products = self.products / profile.speed
        moved = self.moved * (FUSED if profile.fused else 1.0) + self.added
        # Fusion spares elementwise traffic, but not the adding of gradients
        # into their buffer.
        device = (
            products + self.attention + moved * profile.traffic
        ) * profile.slower
        seen = self._seen(
            products * profile.slower, self.attention * profile.slower, profile
        )
        # In a pipeline on several servers, each rank of a message's group costs one
        # more call.
        calls = self.calls + (self.members if piped else 0.0)
        starts = (
            self.host
            * profile.host
            * profile.slower
            * (profile.pipe_host if piped else 1.0)
        )
        host = starts + calls * profile.call_host
        # On a CPU the thread that starts a kernel also computes it, so the
        # times add.
        return (
            OpTime(device + host, seen)
            if self.serial
            else OpTime(device, seen, host)
        )

    def _seen(
        self, products: float, attention: float, profile: SoftwareProfile
    ) -> float:
        """Seconds that messages add to the operation."""
        sent, overlaps = self.messages, profile.overlaps_tensor
        # Without overlap, tp's messages stand alone; with it, their own
        # products hide them.
        alone = sent.others + (0.0 if overlaps else sent.tensor)
        beside_products = sent.gathered + (sent.tensor if overlaps else 0.0)
        group = self.group if overlaps else 0
        return (
            alone
            + self._beside(products, beside_products, group)
            + self._beside(attention, sent.ring, self.ring)
        )

    def _beside(self, computing: float, messages: float, parts: int) -> float:
        """Seconds that messages add to computing they overlap with.

        Either the messages arrive late, or they slow computing down.
        """
        # Of equal parts, the one that arrived last is computed with no message
        # left to hide.
        part_alone = computing / parts if parts else 0.0
        late = messages - (computing - part_alone)
        lost = 0.0 if self.serial else SLOWED * messages
        return max(late, lost)


def together(parts: Sequence[OpParts]) -> OpParts:
    """Consecutive operations as one, no slower than their sum.

    Kernels of one may start while another computes, and messages of one may travel
    meanwhile.
    """
    return OpParts(
        products=sum(each.products for each in parts),
        attention=sum(each.attention for each in parts),
        moved=sum(each.moved for each in parts),
        added=sum(each.added for each in parts),
        host=sum(each.host for each in parts),
        calls=sum(each.calls for each in parts),
        members=sum(each.members for each in parts),
        messages=sum((each.messages for each in parts), MessageSeconds()),
        serial=parts[0].serial,
    )


def op_parts(
    load: Load,
    hardware: Hardware,
    cut: Layout,
    dtype: str,
    profile: SoftwareProfile,
    added: float = 0.0,
) -> OpParts:
    """The parts of one operation on one rank, with the profile's kernels.

    `added` bytes of its traffic are weight gradients, independent of the number of
    tokens.
    """
    rates, several_servers = hardware.rates, hardware.ranks > hardware.node
    messages = message_seconds(load.messages, hardware, cut)
    members = (
        float(sum(_group(m, cut)[0] for m in load.messages))
        if several_servers
        else 0.0
    )
    return OpParts(
        products=sum(rates.product(p, dtype) for p in load.products),
        attention=sum(
            _attention(a, hardware, dtype, profile.attention)
            for a in load.attention
        ),
        moved=rates.move(load.moved - added),
        # Added bytes are priced apart: some software fuses the addition into a
        # product.
        added=rates.move(added * profile.adding / ADDING),
        host=(load.launches + _STARTS * len(load.messages)) * rates.launch,
        calls=float(len(load.messages)),
        members=members,
        messages=messages,
        ring=cut.mesh.of("cp.ring") if messages.ring else 0,
        group=cut.tp if messages.tensor else 0,
        serial=bool(hardware.cores),
    )


def _attention(
    a: AttentionLoad, hardware: Hardware, dtype: str, kernel: str
) -> float:
    stored = STORED.get(kernel)
    if stored is None:
        return hardware.rates.attention(a, dtype, kernel)
    # The forward has two products, Q K^T and P V; the backward has more.
    forward = a.products <= 2
    products = (
        Product(a.queries, a.head_dim, a.keys, a.batch * a.heads),
        Product(a.queries, a.keys, a.head_dim, a.batch * a.heads),
    )
    # Each product of the forward has two in the backward.
    time = sum(hardware.rates.product(p, dtype) for p in products) * (
        1 if forward else 2
    )
    scores = a.batch * a.heads * a.queries * a.keys
    moved = stored.forward if forward else stored.backward
    time += hardware.rates.move(moved * scores)
    # Tensor cores read 16 bytes at a time, which are 8 numbers. Other head sizes do not
    # use them.
    if a.head_dim % 8:
        return time * 6.0
    return time * 1.25 if a.head_dim % 64 else time


def _group(message: MessageLoad, cut: Layout) -> tuple[int, int]:
    """The number of ranks that share a message, and the distance between neighbours."""
    if message.axis == "tp":
        return cut.tp, 1
    # Ranks of tp are neighbours. Those of ep lie outside them, then those of
    # cp.
    inner = (
        cut.mesh.of("cp.ulysses") if message.axis in ("cp", "cp.ring") else 1
    )
    inner *= cut.ep if message.axis != "ep" else 1
    return cut.mesh.of(message.axis), cut.tp * inner


def message_seconds(
    messages: Iterable[MessageLoad], hardware: Hardware, cut: Layout
) -> MessageSeconds:
    """Seconds of the messages of one operation."""
    ring = tensor = others = 0.0
    for message in messages:
        ranks, apart = _group(message, cut)
        seconds = hardware.network.seconds(
            message.op, message.bytes, ranks, apart
        )
        # The only sends inside a piece are those of ring attention.
        if message.op == "send":
            ring += seconds
        elif message.axis == "tp":
            tensor += seconds
        else:
            others += seconds
    if hardware.cores and hardware.ranks >= hardware.cores:
        # No core is left to carry a ring's messages, and each core carries both
        # directions. Messages were measured among ranks that share cores, and
        # `simulate` multiplies by crowding again.
        crowding = hardware.crowding
        return MessageSeconds(
            tensor=tensor / crowding, others=2 * ring + others / crowding
        )
    return MessageSeconds(ring, tensor, 0.0, others)


# ---- one piece


@dataclass(frozen=True)
class PieceParts:
    """The parts of a piece's operations at one microbatch, before a profile."""

    forward: OpParts
    input_gradient: OpParts
    weight_gradient: OpParts
    recompute: OpParts
    cost: PieceCost
    parts: tuple[PieceParts, ...] = ()  # if a block consists of several pieces

    def under(
        self, profile: SoftwareProfile, piped: bool = False
    ) -> PieceTimes:
        return PieceTimes(
            self.forward.under(profile, piped),
            self.input_gradient.under(profile, piped),
            self.weight_gradient.under(profile, piped),
            self.recompute.under(profile, piped),
            self.cost,
            tuple(part.under(profile, piped) for part in self.parts),
        )


def piece_parts(
    cost: PieceCost,
    hardware: Hardware,
    profile: SoftwareProfile,
    cut: Layout,
    dtype: str,
    none: PieceCost | None = None,
) -> PieceParts:
    """A piece as software with the profile's facts runs it, before its fitted numbers.

    `none` is the cost of the same piece for 0 tokens: the bytes it moves are weight
    gradients.
    """
    work = corrected(cost, Software(profile, cut))
    cost = work.cost

    def parts(load: Load, weights_alone: Load | None = None) -> OpParts:
        added = weights_alone.moved if weights_alone else 0.0
        return op_parts(load, hardware, cut, dtype, profile, added)

    forward = parts(cost.forward)
    recompute = parts(cost.recompute)
    inputs = parts(cost.input_gradient, none.input_gradient if none else None)
    # Inputs gathered again travel beside the products of the input gradient.
    if work.gathered:
        sent = message_seconds(work.gathered, hardware, cut)
        beside = MessageSeconds(gathered=sent.ring + sent.tensor + sent.others)
        inputs = replace(inputs, messages=inputs.messages + beside)
    return PieceParts(
        forward,
        inputs,
        parts(cost.weight_gradient, none.weight_gradient if none else None),
        replace(
            recompute,
            products=recompute.products + work.repeats * forward.products,
        ),
        cost,
    )


def parts_of(
    kinds: PieceKinds,
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    cut: Layout,
    busy: float = 1.0,
) -> ByKind[PieceParts]:
    """The kinds of a case's pieces as software with the profile's facts runs them.

    The routed MLPs of this rank receive `busy` times the mean number of tokens.
    """
    # The layout's narrower products are those of blocks. The head keeps its precision.
    dtype = case.dtype or (
        cut.precision if hardware.cores else cut.fastest_format
    )
    software = Software(profile, cut)
    narrow = case.dtype in NARROW or bool(cut.matmul)
    narrow_routed = case.dtype in NARROW or (
        bool(cut.matmul) and MATMULS[cut.matmul].routed
    )

    def priced(
        cost: PieceCost, dtype: str, kind: Callable[[float], PieceCost]
    ) -> PieceParts:
        return piece_parts(cost, hardware, profile, cut, dtype, kind(0.0))

    def head_cost(rows: float) -> PieceCost:
        of = Tokens.of(replace(case, rows=rows), cut)
        return of_tokens(HEAD, kinds.head(rows), software, of)

    def block(kind: CostedPiece) -> PieceParts:
        if len(kind.parts) == 1:
            cost = kind(case.rows)
            sparse = cost.routed > 0
            tokens = Tokens.of(case, cut, sparse=sparse, narrow=narrow)
            cost = of_tokens(
                WHOLE if sparse else BLOCK, cost, software, tokens
            )
            return priced(cost, dtype, kind)
        tokens = Tokens.of(case, cut, sparse=True, narrow=narrow)
        arrived = Tokens.of(
            case, cut, sparse=True, narrow=narrow_routed, busy=busy
        )
        # Only the routed MLPs, the second of three parts, receive more tokens than on other
        # ranks.
        rows = case.rows, case.rows * busy, case.rows
        attention, inside, combine = (
            part(n) for part, n in zip(kind.parts, rows, strict=True)
        )
        costs = (
            of_tokens(BLOCK, attention, software, tokens),
            of_tokens(ROUTED, inside, software, arrived),
            of_tokens(COMBINE, combine, software, tokens),
        )
        parts = (
            priced(cost, dtype, part)
            for cost, part in zip(costs, kind.parts, strict=True)
        )
        return _whole(tuple(parts))

    embed = priced(kinds.embed(case.rows), cut.precision, kinds.embed)
    head = priced(head_cost(case.rows), cut.precision, head_cost)
    blocks = map(block, kinds.blocks)
    return ByKind((embed, *blocks, head), kinds.kinds)


def _whole(parts: tuple[PieceParts, ...]) -> PieceParts:
    """The block that consists of these parts."""
    return PieceParts(
        together([part.forward for part in parts]),
        together([part.input_gradient for part in parts]),
        together([part.weight_gradient for part in parts]),
        together([part.recompute for part in parts]),
        joined([part.cost for part in parts]),
        parts,
    )
