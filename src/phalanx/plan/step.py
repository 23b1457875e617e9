"""What one layout takes: its step is the makespan of its program, its memory what the program holds.

Neither torch nor numpy is needed. Ranks that differ only along dp, cp or tp do the same, so that one
of them stands for all, and programs that differ only in these sizes are built once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Protocol

from ..layout import Axis, Layout, Mesh, Shape, piece_layout, program_pieces, stage_pieces
from ..layout.choices import BF16, DTYPES, FP8, FP32, SCHEDULES, traits
from ..layout.stages import frozen_pieces, partial_pieces, program_experts
from ..program import KINDS, Costs, Op, PieceCost, Program, Sizes, Timeline, build, joined, ops
from ..program.memory import peaks
from ..program.program import uncollected
from ..program.simulate import Compiled, Repeat, compiled, critical, repeating, shift, times
from ..program.simulate import timeline as spans
from ..program.state import State
from .hardware import Hardware
from .matrices import Matrices, MatrixTimes, matrix_bytes, matrix_times, program_matrices
from .price import PieceParts, PieceTimes, piece_parts
from .profile import SoftwareProfile
from .routing import Routing

# The kinds of memory and the parts of a step, in the order in which they are printed.
_MEMORY = "weights gradients optimizer activations inputs gathered messages temporary other"
MEMORY = tuple(_MEMORY.split())
_COMES = ("activations", "inputs", "gathered", "messages", "temporary")  # and goes, in every step
_HOLES = 0.25  # of it: what torchtitan's runs have reserved beyond their tensors, at most about
PARTS = ("compute", "tensor", "data", "pipe", "bubble", "update")
LIMIT = 0.85  # of a device's memory: what a search uses
FULL = (0.93, 0.99)  # of a device's memory: where an allocator begins to thrash, and does
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
_TOUCHED = 30.0  # bytes that an Adam update reads and writes for each parameter
_BUILT = 48  # programs that are kept
# Lanes of collectives over units, of which each rank waits for its own alone.
_UNIT_LANES = frozenset(KINDS[k].lane for k in (ops.GATHER, ops.REDUCE, ops.REDUCE_REPLICAS))


class PieceKinds(Protocol):
    """A model's pieces under one cut, each a function of a microbatch's rows."""

    @property
    def embed(self) -> Callable[[float], PieceCost]: ...

    @property
    def block(self) -> Callable[[float], PieceCost]: ...

    @property
    def head(self) -> Callable[[float], PieceCost]: ...

    @property
    def parts(self) -> tuple[Callable[[float], PieceCost], ...]:
        """Of a block that is several pieces; else none."""
        ...


class CostFunction(Protocol):
    """The cost of a shape's pieces under the cuts of layouts; keys are the cuts. It is handed in, so
    that planning from cached costs never loads torch."""

    def __call__(
        self, model: Shape | str, layouts: Iterable[Layout], *, sequence: int
    ) -> Mapping[Layout, PieceKinds]: ...


@dataclass(frozen=True)
class Request:
    """What is planned: a model, on which hardware, with which software."""

    shape: Shape
    hardware: Hardware
    profile: SoftwareProfile
    piece_costs: CostFunction
    sequence: int
    batch: int  # sequences of a step
    precision: str = BF16
    limit: float = LIMIT  # the part of a device's memory that may be used
    model: str = ""  # FILE.py:Class of somebody's own; the shape's if empty
    cluster: str = ""  # its name; empty for a measured machine
    routing: Routing = Routing()

    @property
    def room(self) -> float:
        """Bytes that a rank may hold."""
        return self.limit * self.hardware.memory

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.sequence

    @property
    def name(self) -> str:
        return self.model or self.shape.name


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
        """Of one step."""
        x = self.layout
        return self.rows * x.microbatches * x.data * self.sequence


def case_of(shape: Shape, layout: Layout, *, batch: int = 0, sequence: int = 0) -> Case:
    """A layout as our own engine runs it: its fullest rank has the most rows."""
    rows = -(-(batch or shape.batch) // layout.data) / layout.microbatches
    return Case(shape, layout, rows, sequence or shape.sequence)


@dataclass(frozen=True)
class Choice:
    """One layout with what it takes: seconds of a step in parts, bytes of the fullest rank. It has no
    parts where it holds more than a search has room for."""

    layout: Layout
    case: Case
    parts: Mapping[str, float]  # of the rank that computes most; they add up to the step
    memory: Mapping[str, float]
    stages: tuple[Mapping[str, float], ...] = ()  # bytes of every rank of a pipeline

    @cached_property
    def step(self) -> float:
        return sum(self.parts.values())

    @cached_property
    def bytes(self) -> float:
        """What it is expected to hold, with what an allocator usually wastes."""
        return sum(self.memory.values())

    def range(self, profile: SoftwareProfile) -> tuple[float, float]:
        """Bytes if an allocator wastes nothing, and if what comes and goes leaves as many holes as
        published runs show."""
        if not self.memory["other"]:
            return self.bytes, self.bytes
        least = self.bytes - self.memory["other"] + profile.context
        return least, max(self.bytes, least + _HOLES * sum(self.memory[k] for k in _COMES))


Three = tuple[PieceTimes, PieceTimes, PieceTimes]  # embedding, block, head


class Pricer:
    """Pieces by cut and rows, costed and priced when they are first needed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._pieces: dict[Layout, PieceKinds] = {}
        self._times: dict[tuple[Layout, float, bool], Three] = {}

    def known(self, cut: Layout) -> bool:
        return cut in self._pieces

    @property
    def costed(self) -> int:
        """How many cuts have been costed."""
        return len(self._pieces)

    def cost(self, cuts: Iterable[Layout]) -> None:
        """Cost those that are not, together."""
        r = self.request
        names = {cut: self._costed_as(cut) for cut in cuts if cut not in self._pieces}
        if names:
            made = r.piece_costs(r.model or r.shape, list(names.values()), sequence=r.sequence)
            self._pieces |= {cut: made[name] for cut, name in names.items()}

    def _costed_as(self, cut: Layout) -> Layout:
        """Where scores are kept, to be selective means to drop them alone: nothing else differs."""
        return cut if self.request.profile.fused_attention else replace(cut, recompute="none")

    def three(self, cut: Layout, rows: float, piped: bool) -> Three:
        """Embedding, block and head at so many rows, in a pipeline or without one."""
        if (cut, rows, piped) not in self._times:
            self.cost([cut])
            r, kinds = self.request, self._pieces[cut]
            case = Case(r.shape, cut, rows, r.sequence)
            busy = r.routing.busiest(cut.ep)
            e, b, h = parts_of(kinds, case, r.hardware, r.profile, cut, busy)
            self._times[cut, rows, piped] = (
                e.under(r.profile, piped),
                b.under(r.profile, piped),
                h.under(r.profile, piped),
            )
        return self._times[cut, rows, piped]

    def choose(self, layout: Layout, room: float = math.inf) -> Choice:
        """What a layout takes for the request's batch; its memory only if that is beyond the room."""
        r = self.request
        case = case_of(r.shape, layout, batch=r.batch, sequence=r.sequence)
        three = self.three(piece_layout(layout), case.rows, layout.pp > 1)
        return choice(case, three, r.hardware, r.profile, room)

    def costs(self, layout: Layout) -> Costs:
        """Seconds of every operation of a layout's step, as they take beside those of all ranks."""
        r = self.request
        case = case_of(r.shape, layout, batch=r.batch, sequence=r.sequence)
        three = self.three(piece_layout(layout), case.rows, layout.pp > 1)
        alone = costs_of(case, three, r.hardware, r.profile)
        crowding = r.hardware.crowding
        return replace(alone, pieces={of: time * crowding for of, time in alone.pieces.items()})

    def timeline(self, layout: Layout, most: int) -> Timeline:
        """When each rank of a pipeline does what, in a step of at most so many microbatches."""
        r = self.request
        case = case_of(r.shape, layout, batch=r.batch, sequence=r.sequence)
        three = self.three(piece_layout(layout), case.rows, layout.pp > 1)
        return predicted(case, three, r.hardware, r.profile, most=most)[0]


def parts_of(
    kinds: PieceKinds,
    case: Case,
    hardware: Hardware,
    profile: SoftwareProfile,
    cut: Layout,
    busy: float = 1.0,
) -> tuple[PieceParts, PieceParts, PieceParts]:
    """Embedding, block and head of a case as software with the profile's facts runs them, on a rank
    whose experts have `busy` times as many tokens as those of a rank in the mean."""
    head = kinds.head(case.rows)
    if profile.loss != "over":
        logits = case.rows * case.sequence / cut.cp * case.shape.vocab / cut.tp
        theirs, ours = _LOSS[profile.loss], _LOSS["over"]
        kept, temporary, forward, backward = (
            logits * (a - b) for a, b in zip(theirs, ours, strict=True)
        )
        head = replace(
            head,
            kept=head.kept + kept * (DTYPES[cut.precision].bytes < 4),
            temporary=head.temporary + temporary,
            forward=replace(head.forward, moved=head.forward.moved + forward),
            input_gradient=replace(head.input_gradient, moved=head.input_gradient.moved + backward),
        )
    rows = case.rows, case.rows * busy, case.rows
    parts = [part(n) for part, n in zip(kinds.parts, rows, strict=True)] if kinds.parts else []
    block = joined(parts) if parts else kinds.block(case.rows)
    numbers, s = 0.0, case.shape  # kept of a block for each token, beside what ours keeps
    if profile.fused and s.gated:  # one kernel makes gate and product, and keeps nothing between
        numbers -= 0 if s.experts else s.ffn
    if profile.joint and s.positions == "rope":  # the value is a view: what was rotated stays too
        numbers += (s.heads + s.kv_heads) * s.head_dim
    tokens = case.rows * case.sequence / cut.cp / cut.tp
    more = numbers * tokens * DTYPES[cut.precision].bytes
    block = replace(block, kept=block.kept + more)
    # Narrower products than the layout's are those of blocks: the head keeps its precision.
    dtype = case.dtype or (FP8 if cut.matmul and not hardware.cores else cut.precision)
    e, h = (
        piece_parts(cost, hardware, profile, cut, cut.precision, none)
        for cost, none in ((kinds.embed(case.rows), kinds.embed(0.0)), (head, kinds.head(0.0)))
    )
    b = piece_parts(block, hardware, profile, cut, dtype, kinds.block(0.0))
    if parts:
        each = zip(parts, kinds.parts, strict=True)
        inside = tuple(piece_parts(n, hardware, profile, cut, dtype, p(0.0)) for n, p in each)
        b = replace(b, parts=inside)
    return e, b, h


# ---- prices of what concerns whole units


def distance(layout: Layout, part: str) -> int:
    """How far neighbours along a part of the mesh are from each other, in ranks."""
    stride = 1
    for axis in reversed(layout.mesh.axes):
        for name, size in reversed(list(zip(axis.part_names, axis.parts, strict=True))):
            if part in (name, axis.name):
                return stride
            stride *= size
    return stride


def _nearest(layout: Layout, *, experts: bool = False) -> int:
    """How far the nearest ranks with copies of a weight are from each other."""
    axes = (axis for axis in ("cp", "ep")[: 1 if experts else 2] if layout.mesh.of(axis) > 1)
    return min((distance(layout, axis) for axis in axes), default=distance(layout, "dp.shard"))


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of the collectives over one unit, and of its update. Sums are of units together."""

    def __add__(self, other: UnitTimes) -> UnitTimes:
        return UnitTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    gather: float
    load: float  # from the host
    reduce: float
    replicas: float
    tie: float
    update: float


class Units:
    """The times of a layout's units, by their numbers of weights."""

    def __init__(
        self,
        layout: Layout,
        hardware: Hardware,
        profile: SoftwareProfile,
        *,
        experts: bool = False,  # that ep cuts, and so does not share
    ) -> None:
        x, mesh = layout, layout.mesh
        self.hardware, self.profile, self.zero = hardware, profile, x.zero
        self.shards = float(mesh.of("dp.shard") * x.cp * (1 if experts else x.ep))
        self.replicas, self.near = mesh.of("dp.replicate"), _nearest(x, experts=experts)
        if profile.one_port:  # as far from each other as if none shared a server
            self.near = max(self.near, hardware.node)
        self.far = distance(x, "dp.replicate")
        # Two halves of a pipeline are as far from each other as its ends.
        self.ends = distance(x, "pp") * x.pp / 2
        self.on_host = "optimizer" in x.offload
        self.weights_on_host = "weights" in x.offload or self.on_host

    def of(self, numbers: float, frozen: float = 0.0) -> UnitTimes:
        """Of so many weights, and of so many that are frozen beside them. What they need not takes no
        time."""
        seconds, p, n = self.hardware.network.seconds, self.profile, self.shards
        cut = self.zero == 3 or self.weights_on_host
        gathered = (numbers + frozen * cut) * p.gathered_bytes
        size, part = numbers * p.reduce_bytes, n if self.zero else 1.0
        gather = seconds("all_gather", gathered, n, self.near) if self.zero and gathered else 0.0
        load = gathered / part / self.hardware.host if self.weights_on_host else 0.0
        reduce = replicas = 0.0
        if not size:
            return UnitTimes(gather, load, reduce, replicas, tie=0.0, update=0.0)
        if not self.zero:
            reduce = seconds("all_reduce", size, self.replicas * n, self.near)
        elif n > 1:
            reduce = seconds("reduce_scatter", size, n, self.near)
            replicas = seconds("all_reduce", size / n, self.replicas, self.far)
        else:
            reduce = seconds("all_reduce", size, self.replicas, self.far)
        return UnitTimes(
            gather,
            load,
            reduce,
            replicas,
            tie=seconds("all_reduce", size / part, 2.0, self.ends),
            update=self._update() * numbers / part,
        )

    def _update(self) -> float:
        """Adam for one number; with its averages on the host, there and back, with its memory."""
        p = self.profile
        if self.on_host:
            # Its gradient goes there; the weights come back in operations of their own.
            return _TOUCHED / _HOST + p.gradient_bytes / self.hardware.host
        return self.hardware.rates.move(_TOUCHED)


def kind_of(piece: int, last: int) -> int:
    """Which of the three a piece is: embedding, block or head."""
    return 0 if piece == 0 else 2 if piece == last else 1


def times_of(case: Case, three: Three) -> list[tuple[int, PieceTimes]]:
    """For each piece of a case's program the shape's piece and its times."""
    pieces = program_pieces(case.layout, case.shape)
    last, cut = case.shape.pieces - 1, {piece for piece, part in pieces if part}
    found = []
    for piece, part in pieces:
        t = three[kind_of(piece, last)]
        found.append((piece, t.parts[part] if piece in cut else t))
    return found


def computed(t: PieceTimes) -> dict[str, float]:
    """Seconds of what a piece computes, by kind of operation; a whole backward is both its parts."""
    return {
        ops.FORWARD: t.forward.total,
        ops.INPUT_GRADIENT: t.inputs.total,
        ops.WEIGHT_GRADIENT: t.weights_.total,
        ops.RECOMPUTE: t.again.total,
    }


def costs_of(
    case: Case, three: Three, hardware: Hardware, profile: SoftwareProfile, *, slower: float = 1.0
) -> Costs:
    """Seconds of every operation of a case's program."""
    x, every = case.layout, times_of(case, three)
    network, of = hardware.network, Units(x, hardware, profile).of
    routed = Units(x, hardware, profile, experts=True).of
    # Messages were measured among ranks that share the cores, as `times` has it again.
    alone = 1.0 / hardware.crowding
    pieces: dict[tuple[str, int], float] = {}
    # Ranks of tp have parts of the gradients of norms: two to a block.
    numbers = 2 * case.shape.hidden
    if r := case.shape.lora_r:  # or of the factor of each adapter that is whole
        both = case.shape.adapters.items()
        numbers = r * sum(out if name in ("wo", "down") else into for name, (into, out) in both)
    parts = network.seconds("all_reduce", numbers * profile.reduce_bytes, x.tp, 1) * alone
    edge, gathered = three[1].edge, 0.0
    if profile.scatters_sends and not x.seq and x.tp > 1:
        edge, gathered = edge / x.tp, network.seconds("all_gather", edge, x.tp, 1)
    sent = (network.seconds("send", edge, x.pp, distance(x, "pp")) + gathered) * alone
    alike: dict[tuple[int, float], dict[str, float]] = {}  # by times of a piece and what is frozen
    for piece, t in every:
        still = _frozen(case.shape, piece, t)
        if (id(t), still) in alike:
            continue
        # Experts are a unit of their own. Of a piece with frozen weights all are said to be others.
        apart = 0.0 if still else t.experts
        unit = of(t.weights - still - apart, still)
        unit = unit + routed(apart) if apart else unit
        part = x.recompute == "selective" and t not in (three[0], three[2])
        kept = t.selected if part else t.kept if x.recompute in ("none", "selective") else t.input
        alike[id(t), still] = {
            **{kind: time * slower for kind, time in computed(t).items()},
            ops.RECOMPUTE_PART: t.again.total * slower,
            ops.GATHER: unit.gather * alone,
            ops.LOAD: unit.load,
            ops.SUM_PARTS: parts,
            ops.REDUCE: unit.reduce * alone,
            ops.REDUCE_REPLICAS: unit.replicas * alone,
            ops.TIE: unit.tie * alone,
            ops.UPDATE: unit.update,
            ops.RECEIVE: sent,
            ops.OFFLOAD: kept / hardware.host,
            ops.RELOAD: kept / hardware.host,
        }
    for n, (piece, t) in enumerate(every):
        known = alike[id(t), _frozen(case.shape, piece, t)]
        pieces |= {(kind, n): time for kind, time in known.items()}
    owned: dict[Matrices, MatrixTimes] = {}
    for n, matrices in enumerate(program_matrices(case.shape, x)) if profile.muon else ():
        took = owned.get(matrices) or matrix_times(matrices, x, hardware)
        owned[matrices] = took
        pieces[ops.UPDATE, n] += took.update
        pieces[ops.TO_OWNERS, n] = took.to_owners * alone
        pieces[ops.FROM_OWNERS, n] = took.from_owners * alone
    near = distance(x, "ep")
    for n in program_experts(x, case.shape):
        told = network.seconds("all_to_all", _NUMBER * case.shape.experts, x.ep, near)
        pieces[ops.COUNT_ROUTES, n] = told * alone
        # What comes to the experts goes back: of a busy rank it is more than what it sends itself.
        exchanged = network.seconds("all_to_all", every[n][1].edge, x.ep, near) * alone
        for to in (n, n + 1):
            pieces[ops.EXCHANGE, to] = pieces[ops.EXCHANGE_GRADIENT, to] = exchanged
    if not profile.overlaps_sends and x.pp > 1:
        # The device sends and then goes on: at the ends of virtual stages.
        for stage in filter(None, stage_pieces(x, case.shape)):
            pieces[ops.FORWARD, stage[-1]] += sent * (stage[-1] < len(every) - 1)
            pieces[ops.INPUT_GRADIENT, stage[0]] += sent * (stage[0] > 0)
    copies, near = x.copies, _nearest(x)
    count = network.seconds("all_reduce", _NUMBER, copies, near) * alone
    agree = network.seconds("all_reduce", _NUMBER, x.ranks, 1) * alone
    return Costs({}, pieces | {(ops.COUNT, -1): count, (ops.AGREE, -1): agree})


def _frozen(shape: Shape, piece: int, t: PieceTimes) -> float:
    """Numbers of a piece that are not trained: blocks are costed as if all were alike."""
    return t.weights if piece in shape.frozen else t.frozen


def frozen_bytes(layout: Layout, profile: SoftwareProfile, part: float) -> float:
    """What a frozen weight takes where it lies between its uses, over so many shards."""
    if {"weights", "optimizer"} & {*layout.offload}:
        return 0.0
    return profile.gathered_bytes / (part if layout.zero == 3 else 1.0)


def sizes_of_case(case: Case, three: Three, profile: SoftwareProfile) -> Sizes:
    """Bytes of every piece and unit of a case's program."""
    x, every = case.layout, times_of(case, three)
    all_ = [t for _, t in every]
    part = x.shards
    whole = x.zero == 3 or "weights" in x.offload  # weights come and go
    home = 0.0 if whole else profile.weight_bytes
    # With a sum after every microbatch the whole gradient is there only until it is sent.
    gradient = profile.reduce_bytes if x.reduce == "micro" and part > 1 else profile.gradient_bytes
    held = 0.0 if "optimizer" in x.offload else profile.optimizer_bytes / part
    most = profile.bucket if x.zero == 3 and profile.bucket else math.inf

    def each(size: Callable[[PieceTimes], float]) -> tuple[float, ...]:
        return tuple(map(size, all_))

    still = [_frozen(case.shape, p, t) for p, t in every]

    def trained(size: float, frozen: float = 0.0, *, cut: bool = False) -> tuple[float, ...]:
        """`cut` over shards, of which experts, that ranks of ep do not share, have fewer."""
        more = x.ep - 1 if cut and x.zero else 0
        both = zip(all_, still, strict=True)
        return tuple(
            size * (t.weights - apart + more * (0.0 if apart else t.experts)) + frozen * apart
            for t, apart in both
        )

    flat = profile.flat_gradients and x.zero < 2
    return Sizes(
        kept=each(lambda t: t.kept),
        input=each(lambda t: t.input),
        kept_after_i=each(lambda t: t.kept_after_i),
        temporary=each(lambda t: t.temporary),
        home=trained(home, frozen_bytes(x, profile, part)),
        gathered=each(lambda t: profile.gathered_bytes * min(t.weights, most) * whole),
        gradient=() if flat else tuple(min(size, gradient * most) for size in trained(gradient)),
        gradient_shard=trained(profile.gradient_bytes / part, cut=True)
        if part > 1 and not flat
        else (),
        gradient_home=trained(gradient) if flat else (),
        optimizer=trained(held, cut=True),
        edge=each(lambda t: t.edge),
        selected=each(lambda t: t.selected),
        matrices=tuple(
            matrix_bytes(matrices, x, profile.gathered_bytes)
            for matrices in (program_matrices(case.shape, x) if profile.muon else ())
        ),
    )


# ---- the program


def _representative(layout: Layout) -> Layout:
    """The layout with one rank along tp, cp and ep and as few along dp as need the same operations."""
    mesh = layout.mesh
    shards = 2 if layout.shards > 1 else 1
    replicas = 2 if mesh.of("dp.replicate") > 1 and shards > 1 else 1
    axes = [Axis("dp", (replicas, shards)), Axis("pp", (layout.pp,))]
    used = tuple(axis for axis in axes if axis.size > 1 or axis.name == "pp")
    return replace(layout, mesh=Mesh(used), seq=False, precision=FP32)


@dataclass(frozen=True)
class _Built:
    """A program with what is read of it, each when it is first asked for."""

    program: Program
    in_place: bool  # gradients have no shards
    blocking: Collection[str]
    joint: Collection[str]

    @cached_property
    def walked(self) -> list[State]:
        rows = range(len(self.program.rows))
        states = [State(self.program, n, in_place=self.in_place) for n in rows]
        with uncollected():
            for state in states:
                state.follow()
        return states

    @cached_property
    def compiled(self) -> Compiled:
        return compiled(self.program, self.blocking, self.walked, self.joint)

    @cached_property
    def peaks(self) -> dict[Sizes, tuple[Mapping[str, float], ...]]:
        return {}

    def held(self, sizes: Sizes) -> tuple[Mapping[str, float], ...]:
        """What each rank holds at its peak, by kind."""
        if sizes not in self.peaks:
            followed = [state.steps for state in self.walked]
            self.peaks[sizes] = tuple(p.then for p in peaks(self.program, sizes, followed))
        return self.peaks[sizes]

    @cached_property
    def repeats(self) -> dict[tuple[int, int], Repeat | None]:
        return {}

    def repeat(self, period: int, tail: int) -> Repeat | None:
        if (period, tail) not in self.repeats:
            self.repeats[period, tail] = repeating(self.compiled, period, tail)
        return self.repeats[period, tail]


@lru_cache(maxsize=_BUILT)
def _built(
    layout: Layout,
    stages: tuple[range, ...],
    tied: tuple[tuple[int, int], ...],
    parts: tuple[int, ...],
    frozen: tuple[int, ...],
    experts: tuple[int, ...],
    overlaps: bool,
    whole: tuple[int, ...],
    joint: frozenset[str],
    agree: bool,
) -> _Built:
    step = partial(build, layout, stages, tied, agree=agree, overlaps=overlaps)
    program = step(parts=parts, frozen=frozen, experts=experts, whole=whole)
    return _Built(program, layout.shards == 1, () if overlaps else _UNIT_LANES, joint)


def joint_lanes(layout: Layout, hardware: Hardware) -> frozenset[str]:
    """Lanes of collectives over the same links. Those over one group are on one communicator, which
    runs them in the order in which they are issued; replicas have links of their own where shards
    stay in a server. On a CPU messages were measured among ranks that share its cores."""
    if hardware.cores:
        return frozenset()
    inside = _nearest(layout) * layout.shards <= hardware.node < layout.ranks
    return _UNIT_LANES - {KINDS[ops.REDUCE_REPLICAS].lane} if inside else _UNIT_LANES


def _program(case: Case, three: Three, hardware: Hardware, profile: SoftwareProfile) -> _Built:
    layout, shape = _representative(case.layout), case.shape
    stages = stage_pieces(case.layout, shape)
    tied = ((stages[-1][-1], 0),) if shape.tied else ()
    parts, frozen = partial_pieces(case.layout, shape), frozen_pieces(case.layout, shape)
    experts = program_experts(case.layout, shape)
    matrices = program_matrices(shape, case.layout) if profile.muon else []
    whole = tuple(n for n, each in enumerate(matrices) if any(each) and n not in frozen)
    joint = joint_lanes(case.layout, hardware)
    if not traits(layout.schedule).searched and layout.recompute != "fit":
        overlaps = profile.overlaps_data
        agree = not profile.rolls
        return _built(layout, stages, tied, parts, frozen, experts, overlaps, whole, joint, agree)
    program = build(
        layout,
        stages,
        tied,
        agree=not profile.rolls,
        parts=parts,
        frozen=frozen,
        experts=experts,
        overlaps=profile.overlaps_data,
        whole=whole,
        costs=costs_of(case, three, hardware, profile),
        sizes=sizes_of_case(case, three, profile),
        limit=(hardware.memory - profile.context) / profile.reserve,
    )
    blocking = () if profile.overlaps_data else _UNIT_LANES
    return _Built(program, layout.shards == 1, blocking, joint)


def choice(
    case: Case,
    three: Three,
    hardware: Hardware,
    profile: SoftwareProfile,
    room: float = math.inf,
) -> Choice:
    """What a case takes: its program built, measured and simulated; only measured if it holds more
    bytes than there is room for.

    Once a pipeline is full, further microbatches take the same time each. Where fewer of them show
    exactly this, the others are not simulated.
    """
    layout = case.layout
    for count, period, tail in _fewer(layout) if not hardware.cores else ():
        few = replace(case, layout=replace(layout, microbatches=count))
        if found := _simulated(few, three, hardware, profile, room, (period, tail, layout)):
            return found
    whole = _simulated(case, three, hardware, profile, room)
    assert whole
    return whole


def _fewer(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """So many microbatches that a pipeline is full for a while, after how many more of them its order
    repeats, and of how many its end consists; few first."""
    traits_ = SCHEDULES.get(layout.schedule)
    if not traits_ or traits_.searched:
        return
    pp, most = layout.pp, layout.microbatches
    rounds = layout.chunks > 1 and not traits_.v_shape
    if rounds and most % pp:
        return
    period = pp if rounds else 1
    for count, tail in ((2 * pp + 2, pp), (4 * pp, 2 * pp), (6 * pp, 2 * pp), (12 * pp, 2 * pp)):
        if count > 2 * tail + period and 4 * count < 3 * most:
            yield count, period, tail


def _simulated(
    case: Case,
    three: Three,
    hardware: Hardware,
    profile: SoftwareProfile,
    room: float,
    more: tuple[int, int, Layout] | None = None,
) -> Choice | None:
    """A case with all its microbatches; with `more`, that of a layout with more of them, if these
    repeat what is simulated."""
    sizes = sizes_of_case(case, three, profile)
    layout = more[2] if more else case.layout
    built = _program(case, three, hardware, profile)
    held = [_held(kinds, hardware, profile) for kinds in built.held(sizes)]
    memory = max(held, key=lambda kinds: sum(kinds.values()))
    stages = tuple(held) if layout.pp > 1 else ()
    if sum(memory.values()) > room:  # more microbatches never hold less
        return Choice(layout, replace(case, layout=layout), {}, memory, stages)
    part = built.repeat(*more[:2]) if more else None
    if more and not part:
        return None
    made, costs = built.compiled, costs_of(case, three, hardware, profile)
    full = (sum(memory.values()) / hardware.memory - FULL[0]) / (FULL[1] - FULL[0])
    if profile.strain and full > 0:
        slower = 1 + profile.strain * min(1.0, full)
        costs = costs_of(case, three, hardware, profile, slower=slower)
    starts, ends = times(made, costs, _cores(case.layout, hardware))
    weight, longer = [1.0] * len(ends), 0.0
    if more and part:
        again = (layout.microbatches - case.layout.microbatches) / more[0]
        weight = [1.0 + again * inside for inside in part.inside]
        longer = again * shift(made, part, ends)
    took = _longest_span(made, starts, ends, profile)[0]
    parts = _parts(made, starts, ends, _inside(case, three), weight, took)
    if part and abs(sum(parts.values()) - took - longer) > 1e-9 * took:
        return None
    return Choice(layout, replace(case, layout=layout), parts, memory, stages)


def _cores(layout: Layout, hardware: Hardware) -> float:
    """Cores for the ranks of one pipeline."""
    if not hardware.cores:
        return float("inf")
    return hardware.cores * layout.pp / max(hardware.ranks, 1)


def _held(
    kinds: Mapping[str, float], hardware: Hardware, profile: SoftwareProfile
) -> dict[str, float]:
    """Bytes of a rank, with what no tensor holds."""
    held = {kind: kinds.get(kind, 0.0) for kind in MEMORY}
    if not hardware.cores:
        held["other"] = profile.context + (profile.reserve - 1) * sum(held.values())
    return held


def _inside(case: Case, three: Three) -> dict[tuple[str, int], float]:
    """The part of each operation's time that is messages inside it."""
    part: dict[tuple[str, int], float] = {}
    for piece, (_, t) in enumerate(times_of(case, three)):
        of = {
            ops.FORWARD: [t.forward], ops.RECOMPUTE: [t.again], ops.RECOMPUTE_PART: [t.again],
            ops.INPUT_GRADIENT: [t.inputs], ops.WEIGHT_GRADIENT: [t.weights_],
            ops.BACKWARD: [t.inputs, t.weights_],
        }  # fmt: skip
        for kind, times_ in of.items():
            total = sum(x.total for x in times_)
            part[kind, piece] = sum(x.messages for x in times_) / total if total else 0.0
    return part


def _longest_span(
    made: Compiled, starts: list[float], ends: list[float], profile: SoftwareProfile
) -> tuple[float, int, int]:
    """Seconds of a step, the event that it ends with, and the last before it begins (-1: none). Where
    steps roll it is that of the stage that is longest at work, from its first computation to its last."""
    if not profile.rolls:
        last = max(range(len(ends)), key=ends.__getitem__)
        return ends[last], last, -1
    spans = []
    for row in made.computing:
        first, last = row[0][0], max((n for n, _ in row), key=ends.__getitem__)
        before = max(made.before[first], key=ends.__getitem__, default=-1)
        spans.append((ends[last] - starts[first], last, before))
    return max(spans)


def _parts(
    made: Compiled,
    starts: list[float],
    ends: list[float],
    inside: Mapping[tuple[str, int], float],
    weight: list[float],
    step: float,
) -> dict[str, float]:
    """The step of the rank that computes most: what it computes, and what it waits for. An event
    counts as often as `weight` says. The rank begins with the step, or where it ends sooner than that
    with its first computation."""
    busiest = max(
        made.computing, key=lambda row: sum((ends[n] - starts[n]) * weight[n] for n, _ in row)
    )
    parts = dict.fromkeys(PARTS, 0.0)
    now = 0.0 if step >= max(ends) else starts[busiest[0][0]]
    makespan = now + step

    def waited(since: float, until: float, cause: int, times: float) -> None:
        kind = made.priced[made.price[cause]][0][1].kind if cause >= 0 else ""
        if kind in ops.MESSAGES:
            sent = min(until - since, ends[cause] - starts[cause])
            parts["pipe"] += sent * times
            parts["bubble"] += (until - since - sent) * times
        else:
            part = "data" if kind and kind not in ops.COMPUTES else "bubble"
            part = "tensor" if kind in ops.EXCHANGES else part
            parts[part] += (until - since) * times

    for n, op in busiest:
        if starts[n] > now:
            cause = max(made.before[n], key=ends.__getitem__, default=-1)
            waited(now, starts[n], cause, weight[n])
        took, now = (ends[n] - starts[n]) * weight[n], max(now, ends[n])
        if op.kind == ops.UPDATE:
            parts["update"] += took
        else:
            messages = took * inside.get((op.kind, op.piece), 0.0)
            parts["tensor"] += messages
            parts["compute"] += took - messages
    waited(now, makespan, -1, 1.0)
    return parts


def predicted(
    case: Case, three: Three, hardware: Hardware, profile: SoftwareProfile, *, most: int = 0
) -> tuple[Timeline, Costs]:
    """The timeline of a case's step, of at most so many microbatches, with its costs."""
    layout = case.layout
    if most and layout.microbatches > most:
        case = replace(case, layout=replace(layout, microbatches=most))
    costs = costs_of(case, three, hardware, profile)
    made = _program(case, three, hardware, profile).compiled
    return spans(made, *times(made, costs, _cores(layout, hardware))), costs


def longest(
    case: Case, three: Three, hardware: Hardware, profile: SoftwareProfile
) -> dict[tuple[int, Op], float]:
    """How often each (rank, operation) stands on the path that the step is the length of."""
    costs, layout = costs_of(case, three, hardware, profile), case.layout
    for count, period, tail in (*_fewer(layout), (layout.microbatches, 0, 0)):
        few = replace(case, layout=replace(layout, microbatches=count))
        built = _program(few, three, hardware, profile)
        part = built.repeat(period, tail) if period else None
        if period and not part:
            continue
        made = built.compiled
        starts, ends = times(made, costs)
        weight = [1.0] * len(ends)
        whole, last, first = _longest_span(made, starts, ends, profile)
        if part:
            again = (layout.microbatches - count) / period
            weight = [1.0 + again * inside for inside in part.inside]
            whole += again * shift(made, part, ends)
        path, prices = critical(made, ends, weight, last), made.prices(costs)
        for n, often in critical(made, ends, weight, first).items():
            path[n] = path.get(n, 0.0) - often
        if abs(sum(prices[n] * often for n, often in path.items()) - whole) > 1e-9 * whole:
            continue
        slowest = [max(each, key=lambda at: costs.of(at[1], at[0])) for each in made.priced]
        return {slowest[n]: often for n, often in path.items() if prices[n]}
    raise AssertionError("the path of a whole step is as long as the step")
