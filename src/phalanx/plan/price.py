"""Prices every operation of a layout's program on some hardware, under a software profile.

A cost describes an operation's work (products, bytes, messages); a price is its duration in
seconds: of a piece's operations (`piece_parts`), of the collectives over its weights (`Units`), and
of everything in a program, with its memory (`Priced`). `step.py` simulates the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import NamedTuple

from ..layout import (
    ByKind,
    Layout,
    PieceRow,
    Shape,
    StagedPieces,
    stage_pieces,
    staged_pieces,
)
from ..layout.choices import DTYPES, FP8, MATMULS
from ..program import (
    AttentionLoad,
    CostedPiece,
    Costs,
    Load,
    MessageLoad,
    PieceCost,
    PieceKinds,
    Product,
    Sizes,
    joined,
    ops,
)
from .hardware import OVERLAP, SLOWED, Hardware
from .matrices import Matrices, MatrixTimes, matrix_bytes, matrix_times, row_matrices
from .profile import SCORES, SoftwareProfile

# Bytes that attention which keeps its scores moves for each of them beside its products: one kernel
# scales, masks and softens them, one drops some out; and both again in the backward.
_SCORES = {True: 9.0, False: 11.0}
FUSED = 0.5  # of the bytes that operations move one by one, where neighbours are one kernel
_ADDING = 10.0  # bytes of a gradient in 16 bits that is added to one in 32, which costs have
_STARTS = 4.0  # operations that start as slowly as one message does
KEPT_SCORES = 5.0  # Korthikanti et al. 2022: two halves and a mask
_SCORE_GRADIENTS = 4.0  # bytes that a backward makes of them: of the softmax, and of what it took
_HOST = 40e9  # bytes a second of a host's memory for each of its devices: assumed, of 300 for eight
# For each logit of 16 bits, by what a loss makes of them: bytes kept beside the logits, bytes there for
# a while, bytes moved forward and backward. A float32 softmax is made from a float32 copy, with the
# logits still there ("wide-over"), or its gradient is made beside it. What is costed is ours, "over".
_LOSS = {
    "over": (0.0, 0.0, 10.0, 36.0),
    "beside": (0.0, 2.0, 2.0, 4.0),
    "wide-over": (2.0, 6.0, 38.0, 14.0),
    "wide": (2.0, 8.0, 14.0, 22.0),
}
_NUMBER = 8.0  # bytes of one number that ranks agree on
_CHOICE = 4.0  # bytes of how often an expert was chosen
_TOUCHED = 30.0  # bytes that an Adam update reads and writes for each parameter


@dataclass(frozen=True)
class Case:
    """One way to train: a shape, a layout, rows of a microbatch, tokens of a sequence."""

    shape: Shape
    layout: Layout
    rows: float
    sequence: int
    dtype: str = ""  # of products; "": the layout's

    @property
    def tokens(self) -> float:
        x = self.layout
        return self.rows * x.microbatches * x.data * self.sequence


# ---- one piece


@dataclass(frozen=True)
class OpTime:
    """One operation: what the device computes, the messages inside it that computing does not
    hide, and the least that starting its kernels takes."""

    device: float = 0.0
    messages: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Starting kernels is hidden as long as they last longer."""
        return max(self.device, self.host - self.messages) + self.messages


@dataclass(frozen=True)
class PieceTimes:
    """One kind of piece at one microbatch: times of its operations, and what it holds."""

    forward: OpTime
    input_gradient: OpTime  # I
    weight_gradient: OpTime  # W
    again: OpTime  # R
    cost: PieceCost
    parts: tuple[PieceTimes, ...] = ()  # of a block that is several pieces

    @property
    def backward(self) -> float:
        return self.input_gradient.total + self.weight_gradient.total

    @cached_property
    def computed(self) -> dict[str, float]:
        """Seconds of what it computes, by kind of operation."""
        return {
            ops.FORWARD: self.forward.total,
            ops.INPUT_GRADIENT: self.input_gradient.total,
            ops.WEIGHT_GRADIENT: self.weight_gradient.total,
            ops.RECOMPUTE: self.again.total,
        }


KindTimes = ByKind[PieceTimes]


class OpParts(NamedTuple):
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

    def joined(self, other: OpParts) -> OpParts:
        """Both, one after the other."""
        sums = map(operator.add, self[:-1], other[:-1])
        return OpParts._make([*sums, self.serial])

    def under(self, profile: SoftwareProfile, piped: bool = False) -> OpTime:
        """Its times, in a pipeline or without one."""
        device = self.products / profile.speed + self.attention
        moved = self.moved * (FUSED if profile.fused else 1.0) + self.added
        device = (device + moved * profile.traffic) * profile.slower
        inside = 0.0 if profile.overlaps_tensor else self.messages
        beside = self.ring + self.messages - inside
        hidden = min(beside, OVERLAP * device)
        seen = inside + beside - hidden + (0.0 if self.serial else SLOWED * hidden)
        slower = profile.pipe_host if piped else 1.0
        calls = self.calls + self.members * piped  # in a pipeline over servers each rank is one
        host = self.host * profile.host * profile.slower * slower + calls * profile.call_host
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
    ring, messages = _messages(load.messages, hardware, cut)
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
    """Number of ranks that share a message, and the distance between neighbours."""
    if message.axis == "tp":
        return cut.tp, 1
    inner = cut.mesh.of("cp.ulysses") if message.axis in ("cp", "cp.ring") else 1
    inner *= cut.ep if message.axis != "ep" else 1
    return cut.mesh.of(message.axis), cut.tp * inner


def _messages(
    messages: Iterable[MessageLoad], hardware: Hardware, cut: Layout
) -> tuple[float, float]:
    """Seconds of a ring's sends, and of the other messages."""
    seconds = hardware.network.seconds
    took = [(m.op == "send", seconds(m.op, m.bytes, *_group(m, cut))) for m in messages]
    ring = sum((time for sent, time in took if sent), 0.0)
    return ring, sum((time for sent, time in took if not sent), 0.0)


@dataclass(frozen=True)
class PieceParts:
    """One kind of piece at one microbatch on some hardware, before a profile."""

    ops: tuple[OpParts, OpParts, OpParts, OpParts]  # F, I, W, R
    cost: PieceCost
    parts: tuple[PieceParts, ...] = ()  # of a block that is several pieces

    def under(self, profile: SoftwareProfile, piped: bool = False) -> PieceTimes:
        forward, inputs, weights, again = (op.under(profile, piped) for op in self.ops)
        parts = tuple(part.under(profile, piped) for part in self.parts)
        return PieceTimes(forward, inputs, weights, again, self.cost, parts)


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
    again, scores, taken = cost.again, 0.0, list[MessageLoad]()
    selective = cut.recompute == "selective"
    if profile.regathers and cut.seq:
        # Kept in shards, and gathered while the gradient of a column's input is computed.
        taken = [m for m in cost.forward.messages if (m.axis, m.op) == ("tp", "all_gather")]
        again = replace(again, messages=tuple(m for m in again.messages if m not in taken))
    if profile.ends_early and not selective:
        # Nobody asks for what a block's last product puts out, nor for its sum over tp.
        sums = again.messages[:-1] if cut.tp > 1 else again.messages
        again = replace(again, products=again.products[:-1], messages=sums)
    if not profile.fused_attention:
        attention = cost.forward.attention
        scores = sum(a.batch * a.heads * a.queries * a.keys for a in attention)
        if selective:
            # What is worth computing again is then attention, scores and all, and nothing else.
            again, cost = Load(attention=attention), replace(cost, selected=cost.kept)
    loads = (cost.forward, cost.input_gradient, cost.weight_gradient, again)
    added = (0.0, none.input_gradient.moved, none.weight_gradient.moved) if none else (0.0,) * 3
    forward, inputs, weights, repeated = (
        op_parts(load, hardware, cut, dtype, profile, more)
        for load, more in zip(loads, (*added, 0.0), strict=True)
    )
    if profile.fused_attention and selective:
        more = profile.repeats * forward.products
        repeated = repeated._replace(products=repeated.products + more)
        width = DTYPES[cut.precision].bytes
        made = width * sum(p.batch * p.m * p.n for p in cost.forward.products)
        cost = replace(cost, selected=max(0.0, cost.selected - profile.repeats * made))
    if taken:
        less = sum(m.bytes for m in taken) * (1 - 1 / cut.tp)
        # What is costed as selective keeps the shards alone.
        selected = cost.selected if profile.fused_attention else max(0.0, cost.selected - less)
        cost = replace(cost, kept=cost.kept - less, selected=selected)
        inputs = inputs._replace(ring=inputs.ring + sum(_messages(taken, hardware, cut)))
    if scores:
        kept = cost.kept + KEPT_SCORES * scores
        cost = replace(cost, kept=kept, temporary=cost.temporary + _SCORE_GRADIENTS * scores)
    return PieceParts((forward, inputs, weights, repeated), cost)


def costed_as(cut: Layout, profile: SoftwareProfile) -> Layout:
    """The cut that is costed: where scores are kept, to be selective means to drop them alone."""
    return cut if profile.fused_attention else replace(cut, recompute="none")


def parts_of(
    kinds: PieceKinds,
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    cut: Layout,
    busy: float = 1.0,
) -> ByKind[PieceParts]:
    """The kinds of a case's pieces as software with the profile's facts runs them, on a rank whose experts
    have `busy` times as many tokens as those of a rank in the mean."""
    # Narrower products than the layout's are those of blocks: the head keeps its precision.
    dtype = case.dtype or (FP8 if cut.matmul and not hardware.cores else cut.precision)

    def priced(cost: PieceCost, dtype: str, kind: Callable[[float], PieceCost]) -> PieceParts:
        return piece_parts(cost, hardware, profile, cut, dtype, kind(0.0))

    def block(kind: CostedPiece) -> PieceParts:
        if len(kind.parts) == 1:
            cost = kind(case.rows)
            return priced(_kept_by(profile, cost, case, cut, sparse=cost.experts > 0), dtype, kind)
        # Only the experts, the second of the three, are busier than those of other ranks.
        rows = case.rows, case.rows * busy, case.rows
        attention, *others = (part(n) for part, n in zip(kind.parts, rows, strict=True))
        costs = _kept_by(profile, attention, case, cut, sparse=True), *others
        parts = (priced(cost, dtype, part) for cost, part in zip(costs, kind.parts, strict=True))
        return _whole(tuple(parts))

    embed = priced(kinds.embed(case.rows), cut.precision, kinds.embed)
    head = _with_loss_of(profile, kinds.head(case.rows), case, cut)
    blocks = map(block, kinds.blocks)
    return ByKind((embed, *blocks, priced(head, cut.precision, kinds.head)), kinds.kinds)


def _with_loss_of(profile: SoftwareProfile, head: PieceCost, case: Case, cut: Layout) -> PieceCost:
    """The head's cost with the profile's loss in place of ours."""
    if profile.loss == "over":
        return head
    logits = case.rows * case.sequence / cut.cp * case.shape.vocab / cut.tp
    theirs, ours = _LOSS[profile.loss], _LOSS["over"]
    kept, temporary, forward, backward = (
        logits * (a - b) for a, b in zip(theirs, ours, strict=True)
    )
    return replace(
        head,
        kept=head.kept + kept * (DTYPES[cut.precision].bytes < 4),
        temporary=head.temporary + temporary,
        forward=replace(head.forward, moved=head.forward.moved + forward),
        input_gradient=replace(head.input_gradient, moved=head.input_gradient.moved + backward),
    )


def _whole(parts: tuple[PieceParts, ...]) -> PieceParts:
    """A block of these parts. It takes no longer than they do one after the other: kernels may start
    while another part computes."""
    every = zip(*(part.ops for part in parts), strict=True)
    forward, inputs, weights, again = (reduce(OpParts.joined, each) for each in every)
    cost = joined([part.cost for part in parts])
    return PieceParts((forward, inputs, weights, again), cost, parts)


def _kept_by(
    profile: SoftwareProfile, block: PieceCost, case: Case, cut: Layout, *, sparse: bool
) -> PieceCost:
    """The cost of a block, or of its attention, with the bytes that the profile's software keeps in place
    of ours."""
    shape, width = case.shape, DTYPES[cut.precision].bytes
    tokens = case.rows * case.sequence / cut.cp
    numbers = 0.0  # kept for each token, beside what ours keeps
    if profile.fused and shape.gated:  # a kernel makes gate and product, and keeps nothing between
        numbers -= 0 if sparse else shape.ffn
    if profile.joint and shape.positions == "rope":  # the value is a view: what was rotated stays
        numbers += (shape.heads + shape.kv_heads) * shape.head_dim
    return replace(block, kept=block.kept + numbers * (tokens / cut.tp) * width)


# ---- what concerns whole units


def distance(layout: Layout, part: str) -> int:
    """Distance in ranks between neighbours along a part of the mesh."""
    stride = 1
    for axis in reversed(layout.mesh.axes):
        for name, size in reversed(list(zip(axis.part_names, axis.parts, strict=True))):
            if part in (name, axis.name):
                return stride
            stride *= size
    return stride


def nearest(layout: Layout, *, experts: bool = False) -> int:
    """Distance between the nearest ranks with copies of a weight."""
    apart = layout.expert_axes if experts else ()
    axes = (axis for axis in ("cp", "ep") if layout.mesh.of(axis) > 1 and axis not in apart)
    return min((distance(layout, axis) for axis in axes), default=distance(layout, "dp.shard"))


class UnitTimes(NamedTuple):
    """Seconds of the collectives over one unit, and of its update."""

    gather: float = 0.0
    load: float = 0.0  # from the host
    reduce: float = 0.0
    replicas: float = 0.0
    tie: float = 0.0
    update: float = 0.0


class Units:
    """The times of a layout's units, by their numbers of weights."""

    def __init__(self, layout: Layout, hardware: Hardware, profile: SoftwareProfile) -> None:
        x, mesh = layout, layout.mesh
        self.layout, self.hardware, self.profile = layout, hardware, profile
        self.shards = float(mesh.of("dp.shard") * x.cp * x.ep)
        self.replicas = mesh.of("dp.replicate")
        self.near = [nearest(x), nearest(x, experts=True)]
        self.far = distance(x, "dp.replicate")
        # Two halves of a pipeline are as far from each other as its ends.
        self.ends = distance(x, "pp") * x.pp / 2
        self.on_host = "optimizer" in x.offload
        self.weights_on_host = "weights" in x.offload or self.on_host

    def of(
        self, numbers: float, frozen: float = 0.0, experts: float = 0.0, narrow: float = 0.0
    ) -> UnitTimes:
        """Of so many weights, of so many that are frozen beside them, and of so many of experts, which
        are on fewer ranks: these are a unit of their own. What they need not takes no time. Of the first
        two so many are `narrow`: they are gathered in 8 bits."""
        found = self._of(numbers, frozen, narrow, self.shards, self.near[0])
        if experts:
            n = self.shards / self.layout.copies_sharing
            routed = self._of(experts, 0.0, 0.0, n, self.near[1])
            found = UnitTimes(*(a + b for a, b in zip(found, routed, strict=True)))
        return found

    def _seconds(self, op: str, size: float, ranks: float, apart: float) -> float:
        """Time of a collective over copies of a weight. With `one_port`, ranks of a group that leaves
        its server are priced as if each were in a server of its own: they share one port."""
        leaves_server = apart * ranks > self.hardware.node
        if self.profile.one_port and leaves_server:
            apart = max(apart, self.hardware.node)
        return self.hardware.network.seconds(op, size, ranks, apart)

    def _of(self, numbers: float, frozen: float, narrow: float, n: float, near: int) -> UnitTimes:
        seconds, p = self._seconds, self.profile
        cut = self.layout.zero == 3 or self.weights_on_host
        gathered = (numbers + frozen * cut) * p.gathered_bytes - narrow * (p.gathered_bytes - 1)
        size, part = numbers * p.reduce_bytes, n if self.layout.zero else 1.0
        gather = seconds("all_gather", gathered, n, near) if self.layout.zero and gathered else 0.0
        load = gathered / part / self.hardware.host if self.weights_on_host else 0.0
        if not size:
            return UnitTimes(gather, load)
        replicas = 0.0
        if not self.layout.zero:
            reduce = seconds("all_reduce", size, self.replicas * n, near)
        elif n > 1:
            reduce = seconds("reduce_scatter", size, n, near)
            replicas = seconds("all_reduce", size / n, self.replicas, self.far)
        else:
            reduce = seconds("all_reduce", size, self.replicas, self.far)
        # Only the ends of a pipeline share a weight by messages.
        tie = seconds("all_reduce", size / part, 2.0, self.ends) if self.layout.pp > 1 else 0.0
        return UnitTimes(gather, load, reduce, replicas, tie, self._update() * numbers / part)

    def agree_scales(self, others: float, narrow: float) -> float:
        """Seconds of agreeing on the scales of `narrow` weights, and on `others` that travel with them."""
        if not narrow:
            return 0.0
        squares = narrow / MATMULS[self.layout.matmul].run ** 2
        size = (others + squares) * self.profile.gathered_bytes
        return self._seconds("all_reduce", size, self.shards, self.near[0])

    def _update(self) -> float:
        """Adam for one number; with its averages on the host, there and back, with its memory."""
        if self.on_host:
            # Its gradient goes there; the weights come back in operations of their own.
            return _TOUCHED / _HOST + self.profile.gradient_bytes / self.hardware.host
        return self.hardware.rates.move(_TOUCHED)


def frozen_bytes(layout: Layout, profile: SoftwareProfile) -> float:
    """Bytes per element of a frozen weight between its uses."""
    if {"weights", "optimizer"} & {*layout.offload}:
        return 0.0
    return profile.gathered_bytes / (layout.shards if layout.zero == 3 else 1.0)


# ---- a whole program


class PricedPiece(NamedTuple):
    """One piece of a program: its row, its times, and how many of its weights are not trained."""

    row: PieceRow
    times: PieceTimes
    frozen: float


@dataclass(frozen=True)
class Priced:
    """A case on some hardware under a profile: seconds of every operation of its program, however many
    microbatches that has, and bytes of every piece and unit."""

    case: Case
    times: KindTimes
    hardware: Hardware
    profile: SoftwareProfile
    rows: tuple[PieceRow, ...] = ()  # of a model that no shape describes

    @cached_property
    def staged(self) -> StagedPieces:
        """The pieces of the program, and the run of them that each virtual stage holds."""
        layout, shape = self.case.layout, self.case.shape
        if not self.rows:
            return staged_pieces(layout, shape)
        return StagedPieces(self.rows, stage_pieces(layout, shape))

    @cached_property
    def pieces(self) -> list[PricedPiece]:
        """The pieces of the program, each with the times of its kind."""
        times = (part for piece in self.times for part in piece.parts or (piece,))
        found = []
        for row, time in zip(self.staged.rows, times, strict=True):
            frozen = time.cost.weights if row.frozen else time.cost.frozen
            found.append(PricedPiece(row, time, frozen))
        return found

    def _narrow(self, piece: PricedPiece) -> float:
        """Number of a piece's weights that are gathered in fp8; see `parallel/narrow.py`."""
        x, row, cost = self.case.layout, piece.row, piece.times.cost
        if not x.gathers_in_8_bits or (piece.frozen and x.zero < 3):
            return 0.0
        numbers = sum(weight.numel for weight in row.weights if weight.narrow)
        return min(numbers / x.tp, cost.weights - cost.experts)

    def _at_an_end(self, row: PieceRow) -> bool:
        """True for the embedding and the head."""
        return row.piece in (0, len(self.times) - 1)

    def costs(self, slower: float = 1.0) -> Costs:
        """Seconds of every operation, where computing is so much slower."""
        x, shape, profile, hardware = self.case.layout, self.case.shape, self.profile, self.hardware
        network = hardware.network.seconds
        # Messages were measured among ranks that share the cores, as `times` has it again.
        alone = 1.0 / hardware.crowding
        edge, gathered = self.times[1].cost.edge, 0.0
        if profile.scatters_sends and not x.seq and x.tp > 1:
            edge, gathered = edge / x.tp, network("all_gather", edge, x.tp, 1)
        sent = (network("send", edge, x.pp, distance(x, "pp")) + gathered) * alone
        shared = {ops.SUM_PARTS: self._sum_of_parts() * alone, ops.RECEIVE: sent}
        units = Units(x, hardware, profile)
        # By times of a piece and what is frozen.
        alike: dict[tuple[int, float], dict[str, float]] = {}
        pieces: dict[tuple[str, int], float] = {}
        for n, piece in enumerate(self.pieces):
            key = id(piece.times), piece.frozen
            if key not in alike:
                alike[key] = shared | self._of_piece(piece, units, alone, slower)
            pieces |= {(kind, n): time for kind, time in alike[key].items()}
        owned: dict[Matrices, MatrixTimes] = {}
        for n, matrices in enumerate(map(row_matrices, self.staged.rows)) if profile.muon else ():
            took = owned.get(matrices) or matrix_times(matrices, x, hardware)
            owned[matrices] = took
            pieces[ops.UPDATE, n] += took.update
            pieces[ops.TO_OWNERS, n] = took.to_owners * alone
            pieces[ops.FROM_OWNERS, n] = took.from_owners * alone
        # Apart by the nearest of those axes.
        near = min((distance(x, a) for a in x.expert_axes if x.mesh.of(a) > 1), default=1)
        for n in self.staged.experts:
            routes = network("all_to_all", _NUMBER * shape.experts, x.expert_ranks, near)
            pieces[ops.COUNT_ROUTES, n] = routes * alone
            # What comes to the experts goes back: of a busy rank it is more than what it sends itself.
            edge = self.pieces[n].times.cost.edge
            exchanged = network("all_to_all", edge, x.expert_ranks, near) * alone
            for to in (n, n + 1):
                pieces[ops.EXCHANGE, to] = pieces[ops.EXCHANGE_GRADIENT, to] = exchanged
        for n in self.staged.sums_choices:
            pieces[ops.SUM_CHOICES, n] = self._sum_of_choices(self.staged.rows[n]) * alone
        if not profile.overlaps_sends and x.pp > 1:
            # The device sends and then goes on: at the ends of virtual stages.
            for stage in filter(None, self.staged.stages):
                pieces[ops.FORWARD, stage[-1]] += sent * (stage[-1] < len(self.pieces) - 1)
                pieces[ops.INPUT_GRADIENT, stage[0]] += sent * (stage[0] > 0)
        pieces[ops.COUNT, -1] = network("all_reduce", _NUMBER, x.copies, nearest(x)) * alone
        pieces[ops.AGREE, -1] = network("all_reduce", _NUMBER, x.ranks, 1) * alone
        return Costs({}, pieces)

    def _sum_of_choices(self, row: PieceRow) -> float:
        """Ranks with other tokens of the same sequences, or of the batch, add up their choices of experts."""
        x, shape, seconds = self.case.layout, self.case.shape, self.hardware.network.seconds
        over_tp = x.tp if x.seq else 1
        near = 1 if over_tp > 1 else nearest(x)
        total = 0.0
        if row.sequence_loss:
            size = _CHOICE * self.case.rows * shape.experts
            total += seconds("all_reduce", size, x.cp * over_tp, near)
        if row.batch_loss:
            total += seconds("all_reduce", _CHOICE * shape.experts, x.copies * over_tp, near)
        return total

    def _sum_of_parts(self) -> float:
        """Ranks of tp have parts of the gradients of norms, two to a block; or of the factor of each
        adapter that is whole."""
        x, shape = self.case.layout, self.case.shape
        numbers = 2 * shape.hidden
        if shape.lora_r:
            both = shape.adapters.items()
            numbers = shape.lora_r * sum(
                b if name in ("wo", "down") else a for name, (a, b) in both
            )
        size = numbers * self.profile.reduce_bytes
        return self.hardware.network.seconds("all_reduce", size, x.tp, 1)

    def _of_piece(
        self, piece: PricedPiece, units: Units, alone: float, slower: float
    ) -> dict[str, float]:
        x, host = self.case.layout, self.hardware.host
        t, still = piece.times, piece.frozen
        # Of a piece with frozen weights all are said to be others than those of experts.
        apart = 0.0 if still else t.cost.experts
        own, narrow = t.cost.weights - still - apart, self._narrow(piece)
        unit = units.of(own, still, apart, narrow)
        part = x.recompute == "selective" and not self._at_an_end(piece.row)
        whole = x.recompute in ("none", "selective")
        kept = t.cost.selected if part else t.cost.kept if whole else t.cost.input
        beside: dict[str, float] = {}  # seconds of messages, with every microbatch or once a step
        if self.profile.overlaps_data and not self.hardware.cores:
            each, sums = {"micro": 1.0, "step": 1.0 / x.microbatches}, unit.reduce + unit.replicas
            again = unit.gather * (x.gather == "micro" and x.zero == 3)
            beside[ops.FORWARD] = unit.gather * each[x.gather]
            beside[ops.INPUT_GRADIENT] = again + sums * each[x.reduce]
        return {
            **{
                kind: time * slower + SLOWED * min(beside.get(kind, 0.0), OVERLAP * time)
                for kind, time in t.computed.items()
            },
            ops.RECOMPUTE_PART: t.again.total * slower,
            ops.AGREE_SCALES: units.agree_scales(max(0.0, own - narrow), narrow) * alone,
            ops.GATHER: unit.gather * alone,
            ops.LOAD: unit.load,
            ops.REDUCE: unit.reduce * alone,
            ops.REDUCE_REPLICAS: unit.replicas * alone,
            ops.TIE: unit.tie * alone,
            ops.UPDATE: unit.update,
            ops.OFFLOAD: kept / host,
            ops.RELOAD: kept / host,
        }

    @cached_property
    def sizes(self) -> Sizes:
        """Bytes of every piece and unit."""
        x, profile, part = self.case.layout, self.profile, self.case.layout.shards
        costs = [(piece.times.cost, piece.frozen) for piece in self.pieces]
        whole = x.zero == 3 or "weights" in x.offload  # weights come and go
        home = 0.0 if whole else profile.weight_bytes
        # With a sum after every microbatch the whole gradient is there only until it is sent.
        brief = x.reduce == "micro" and part > 1
        gradient = profile.reduce_bytes if brief else profile.gradient_bytes
        held = 0.0 if "optimizer" in x.offload else profile.optimizer_bytes / part
        most = profile.bucket if x.zero == 3 and profile.bucket else math.inf

        def each(size: Callable[[PieceCost], float]) -> tuple[float, ...]:
            return tuple(size(cost) for cost, _ in costs)

        def trained(size: float, frozen: float = 0.0, *, cut: bool = False) -> tuple[float, ...]:
            """`cut` over shards, of which experts have fewer: other ranks have others."""
            more = x.copies_sharing - 1 if cut and x.zero else 0
            return tuple(
                size * (c.weights - still + more * (0.0 if still else c.experts)) + frozen * still
                for c, still in costs
            )

        flat = profile.flat_gradients and x.zero < 2
        sharded = part > 1 and not flat
        matrices = map(row_matrices, self.staged.rows) if profile.muon else ()
        narrow, less = [*map(self._narrow, self.pieces)], profile.gathered_bytes - 1
        return Sizes(
            kept=each(lambda c: c.kept),
            input=each(lambda c: c.input),
            kept_after_i=each(lambda c: c.kept_after_i),
            temporary=each(lambda c: c.temporary),
            home=tuple(
                size - n * less * (not whole)
                for size, n in zip(trained(home, frozen_bytes(x, profile)), narrow, strict=True)
            ),
            gathered=tuple(
                min(profile.gathered_bytes * c.weights - less * n, profile.gathered_bytes * most)
                * whole
                for (c, _), n in zip(costs, narrow, strict=True)
            ),
            gradient=()
            if flat
            else tuple(min(size, gradient * most) for size in trained(gradient)),
            gradient_shard=trained(profile.gradient_bytes / part, cut=True) if sharded else (),
            gradient_home=trained(gradient) if flat else (),
            optimizer=trained(held, cut=True),
            edge=each(lambda c: c.edge),
            selected=each(lambda c: c.selected),
            derived=each(lambda c: c.derived),
            matrices=tuple(matrix_bytes(m, x, profile.gathered_bytes) for m in matrices),
        )
