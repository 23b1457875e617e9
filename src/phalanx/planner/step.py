"""Time and memory of one layout: its program's makespan and peak bytes.

Neither torch nor numpy is needed. Ranks that differ only along dp, cp or tp do the
same, so one represents all. Programs that differ only in these sizes are built once.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

from ..layout import Axis, Layout, Mesh, Shape, StagedPieces, piece_layout
from ..layout.choices import BF16, FP32, SCHEDULES
from ..layout.trainer_table import trainer_named
from ..layout.trainer_write import can_say
from ..program import (
    KINDS,
    Costs,
    Op,
    PieceKinds,
    Program,
    Sizes,
    StepOptions,
    Timeline,
    build,
    ops,
)
from ..program.memory import fullest
from ..program.program import uncollected
from ..program.simulate import (
    Compiled,
    Repeat,
    compiled,
    critical,
    repeating,
    shift,
    times,
)
from ..program.simulate import timeline as spans
from ..program.state import State
from .case import Case
from .corrections import costed_as
from .hardware import Hardware
from .piece_price import KindTimes, parts_of
from .plausible import refuse_impossible, refuse_no_numbers
from .price import Priced, nearest
from .profile import SoftwareProfile
from .routing import Routing

# Kinds of memory and parts of a step, in printed order.
_MEMORY = "weights gradients optimizer activations inputs gathered messages temporary other"
MEMORY = tuple(_MEMORY.split())
# kinds that are allocated and freed in every step
_COMES = ("activations", "inputs", "gathered", "messages", "temporary")
# share of those that torchtitan's runs reserve beyond their tensors, at most
_HOLES = 0.25
PARTS = ("compute", "tensor", "data", "pipe", "bubble", "update")
LIMIT = 0.85  # share of a device's memory that a search uses
# shares of a device's memory at which the allocator begins to thrash, and thrashes
# fully
FULL = (0.93, 0.99)
_BUILT = 48  # programs kept in the cache
# Lanes of collectives over units: a rank waits only for its own.
_OVER_UNITS = (ops.AGREE_SCALES, ops.GATHER, ops.REDUCE, ops.REDUCE_REPLICAS)
_UNIT_LANES = frozenset(KINDS[kind].lane for kind in _OVER_UNITS)


class CostFunction(Protocol):
    """Computes the cost of a shape's pieces for cuts of layouts; keys are the cuts.

    It is passed in, so that planning from cached costs never imports torch.
    """

    def __call__(
        self, model: Shape | str, layouts: Iterable[Layout], *, sequence: int
    ) -> Mapping[Layout, PieceKinds]: ...


@dataclass(frozen=True)
class Request:
    """A planning request: a model, hardware, and software."""

    shape: Shape
    hardware: Hardware
    profile: SoftwareProfile
    piece_costs: CostFunction
    sequence: int
    batch: int  # sequences per step
    precision: str = BF16
    # number format tried for products of blocks, besides the precision; "": none
    matmul: str = ""
    limit: float = LIMIT  # share of a device's memory that may be used
    model: str = ""  # FILE.py:Class of a custom model; empty: the shape's name
    cluster: str = ""  # its name; empty for a measured machine
    routing: Routing = Routing()
    # those of tp, pp, ep, seq, ring and ulysses that a custom model or the trainer does not
    # support
    without: frozenset[str] = frozenset()
    trainer: str = ""  # whose files must be able to say the layout

    def takes(self, layout: Layout) -> bool:
        """True if the model supports every way in which the layout divides it."""
        used = {"seq": layout.seq and layout.tp > 1}
        used |= {way: layout.mesh.of(way) > 1 for way in ("tp", "pp", "ep")}
        used |= {
            way: layout.mesh.of(f"cp.{way}") > 1 for way in ("ring", "ulysses")
        }
        return not any(used[way] for way in self.without)

    def says(self, layout: Layout) -> bool:
        """True if the trainer has options for all of a layout."""
        if not self.trainer:
            return True
        trainer = trainer_named(self.trainer)
        return can_say(layout, self.shape, trainer, self.batch)

    @property
    def room(self) -> float:
        """Bytes that a rank may hold."""
        return self.limit * self.hardware.memory

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def name(self) -> str:
        return self.model or self.shape.name


def case_of(
    shape: Shape, layout: Layout, *, batch: int = 0, sequence: int = 0
) -> Case:
    """The case of a layout in our engine: the rank with the most rows counts."""
    # The fullest rank has the rounded-up share of the batch.
    rows = -(-(batch or shape.batch) // layout.data) / layout.microbatches
    return Case(shape, layout, rows, sequence or shape.sequence)


@dataclass(frozen=True)
class Choice:
    """One layout with its prediction: parts of a step, and bytes of the fullest rank.

    It has no parts if it exceeds the memory of a search.
    """

    layout: Layout
    case: Case
    # of the rank that computes most; they sum to the step
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    # Bytes of every rank of a pipeline.
    stages: tuple[Mapping[str, float], ...] = ()

    @cached_property
    def step(self) -> float:
        return sum(self.parts.values())

    @cached_property
    def bytes(self) -> float:
        """Expected bytes, including the allocator's usual waste."""
        return sum(self.memory.values())

    def range(self, profile: SoftwareProfile) -> tuple[float, float]:
        """Bytes with a perfect allocator, and with the usual fragmentation."""
        # On a CPU nothing is reserved beside tensors.
        if not self.memory["other"]:
            return self.bytes, self.bytes
        least = self.bytes - self.memory["other"] + profile.context
        return least, max(
            self.bytes, least + _HOLES * sum(self.memory[k] for k in _COMES)
        )


class Pricer:
    """Costs and prices pieces when they are first needed, by cut and rows."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pieces: dict[Layout, PieceKinds] = {}
        self._times: dict[tuple[Layout, float, bool], KindTimes] = {}

    def cost(self, cuts: Iterable[Layout]) -> None:
        """Cost the cuts that are not costed yet, together."""
        r = self.request
        names = {
            # The cut may be costed as another one, where attention keeps its
            # scores.
            cut: costed_as(cut, r.profile)
            for cut in cuts
            if cut not in self.pieces
        }
        if names:
            made = r.piece_costs(
                r.model or r.shape, list(names.values()), sequence=r.sequence
            )
            self.pieces |= {cut: made[name] for cut, name in names.items()}

    def times(self, cut: Layout, rows: float, piped: bool) -> KindTimes:
        """The times of each kind of piece for so many rows, in a pipeline or not."""
        if (cut, rows, piped) not in self._times:
            # Known cuts are not costed again.
            self.cost([cut])
            r = self.request
            case, busy = (
                Case(r.shape, cut, rows, r.sequence),
                r.routing.busiest(cut.ep_ranks),
            )
            parts = parts_of(
                self.pieces[cut], case, r.hardware, r.profile, cut, busy
            )
            self._times[cut, rows, piped] = parts.map(
                lambda each: each.under(r.profile, piped)
            )
        return self._times[cut, rows, piped]

    def priced(self, layout: Layout) -> Priced:
        """A layout for the request's batch, with the times of its pieces."""
        r = self.request
        case = case_of(r.shape, layout, batch=r.batch, sequence=r.sequence)
        cut = piece_layout(layout)
        times = self.times(cut, case.rows, layout.pp > 1)
        return Priced(
            case, times, r.hardware, r.profile, self.pieces[cut].rows
        )

    def choose(self, layout: Layout, room: float = math.inf) -> Choice:
        """A layout's time and memory for the request; memory only if too large."""
        return choice(self.priced(layout), room)

    def costs(self, layout: Layout) -> Costs:
        """Seconds of a layout's operations, slowed by ranks that share cores."""
        alone, crowding = (
            self.priced(layout).costs(),
            self.request.hardware.crowding,
        )
        return replace(
            alone,
            pieces={of: time * crowding for of, time in alone.pieces.items()},
        )

    def timeline(self, layout: Layout, most: int) -> Timeline:
        """The timeline of a pipeline's ranks, in a step of at most `most` microbatches."""
        return predicted(self.priced(layout), most)


# ---- the program


def _representative(layout: Layout, count: int) -> Layout:
    """A small layout with the same operations per rank and so many microbatches.

    One rank along tp, cp and ep, and as few along dp as have the same operations.
    """
    # Two shards or replicas have the same operations as any larger number.
    shards = 2 if layout.shards > 1 else 1
    replicas = 2 if layout.mesh.of("dp.replicate") > 1 and shards > 1 else 1
    axes = [Axis("dp", (replicas, shards)), Axis("pp", (layout.pp,))]
    used = tuple(axis for axis in axes if axis.size > 1 or axis.name == "pp")
    return replace(
        layout, mesh=Mesh(used), seq=False, precision=FP32, microbatches=count
    )


@dataclass(frozen=True)
class _Built:
    """A program with results derived from it, each computed on first use."""

    program: Program
    in_place: bool  # gradients are not sharded
    blocking: Collection[str]
    joint: Collection[str]

    @cached_property
    def walked(self) -> list[State]:
        rows = range(len(self.program.rows))
        states = [State(self.program, n, in_place=self.in_place) for n in rows]
        # States are many small objects: a collection meanwhile would only take
        # time.
        with uncollected():
            for state in states:
                state.follow()
        return states

    @cached_property
    def compiled(self) -> Compiled:
        return compiled(self.program, self.blocking, self.walked, self.joint)

    @cached_property
    def _held(self) -> dict[Sizes, list[dict[str, float]]]:
        return {}

    def held(self, sizes: Sizes) -> list[dict[str, float]]:
        """Bytes that each rank holds at its peak, by kind."""
        if sizes not in self._held:
            self._held[sizes] = fullest(self.program, sizes, self.walked)
        return self._held[sizes]

    @cached_property
    def _repeats(self) -> dict[tuple[int, int], Repeat | None]:
        return {}

    def repeat(self, period: int, tail: int) -> Repeat | None:
        if (period, tail) not in self._repeats:
            self._repeats[period, tail] = repeating(
                self.compiled, period, tail
            )
        return self._repeats[period, tail]


@lru_cache(maxsize=_BUILT)
def _built(
    layout: Layout,
    pieces: StagedPieces,
    options: StepOptions,
    joint: frozenset[str],
) -> _Built:
    blocking = () if options.overlaps else _UNIT_LANES
    # With one shard, gradients are summed in place.
    return _Built(
        build(layout, pieces, options), layout.shards == 1, blocking, joint
    )


def joint_lanes(layout: Layout, hardware: Hardware) -> frozenset[str]:
    """Lanes of collectives over the same links.

    Those over one group share a communicator, which runs them in the order of issue.
    Replicas have links of their own if shards stay inside a server. On CPUs, messages
    were measured among ranks that share the cores.
    """
    if hardware.cores:
        return frozenset()
    # Shards inside a server and replicas between servers use different links.
    inside = nearest(layout) * layout.shards <= hardware.node < layout.ranks
    # Without shards there is no second sum, and layouts that differ in the order of
    # their axes have one program.
    second = layout.shards > 1 or layout.exact
    return (
        _UNIT_LANES - {KINDS[ops.REDUCE_REPLICAS].lane}
        if inside and second
        else _UNIT_LANES
    )


def _program(priced: Priced, count: int) -> _Built:
    """The program of a case with so many microbatches."""
    x, profile = priced.case.layout, priced.profile
    pieces, options = priced.staged, profile.options
    few, joint = _representative(x, count), joint_lanes(x, priced.hardware)
    if x.recompute != "fit":
        return _built(few, pieces, options, joint)
    # The bytes that `recompute:fit` may fill: what the allocator's reserve
    # leaves.
    limit = (priced.hardware.memory - profile.context) / profile.reserve
    options = replace(options, sizes=priced.sizes, limit=limit)
    # Not cached: it depends on sizes and limit, which few cases share.
    return _built.__wrapped__(few, pieces, options, joint)


def planned_program(priced: Priced, count: int) -> Program:
    """The program that is simulated for a case with so many microbatches."""
    return _program(priced, count).program


class _Stretch(NamedTuple):
    """A repeating stretch of a program.

    `period` microbatches that repeat, `tail` microbatches after them, and the number of
    repetitions left out.
    """

    period: int
    tail: int
    repeats: float


def _programs(priced: Priced) -> Iterator[tuple[_Built, _Stretch | None]]:
    """Programs of a case with more and more microbatches, the last with all of them.

    The first ones suffice if the microbatches left out repeat those simulated. Once a
    pipeline is full, every further microbatch takes the same time.
    """
    layout = priced.case.layout
    known, pp, most = (
        SCHEDULES.get(layout.schedule),
        layout.pp,
        layout.microbatches,
    )
    # Interleaved schedules repeat in rounds of pp microbatches; an incomplete
    # round does not.
    rounds = known and layout.chunks > 1 and not known.v_shape
    if (
        known
        and not known.searched
        and not priced.hardware.cores
        and not (rounds and most % pp)
    ):
        # (microbatches, those at the end that nothing waits for when the pipeline
        # drains)
        first = (3 * pp, 2 * pp - 1) if known.v_shape else (2 * pp + 2, pp)
        for count, tail in (
            # Ever longer programs, for schedules that need more microbatches
            # to become regular.
            (4 * pp, 2 * pp) if rounds else first,
            (6 * pp, 2 * pp),
            (12 * pp, 2 * pp),
        ):
            period = pp if rounds else 1
            # It saves something only if at least a fifth of the step is left
            # out.
            if count > tail + period and 5 * count < 4 * most:
                yield (
                    _program(priced, count),
                    _Stretch(period, tail, (most - count) / period),
                )
    yield _program(priced, most), None


class _Played(NamedTuple):
    """A program's simulated events, and how often each occurs in the whole step."""

    made: Compiled
    starts: list[float]
    ends: list[float]
    weight: list[float]
    step: float  # seconds of the simulated part
    longer: float  # seconds that repetitions add
    last: int  # the event that the step ends with
    before: int  # the last event before the step begins; -1: none


def _played(
    priced: Priced, built: _Built, stretch: _Stretch | None, costs: Costs
) -> _Played | None:
    """Simulate a program; None if its stretch does not repeat."""
    part = built.repeat(stretch.period, stretch.tail) if stretch else None
    if stretch and not part:
        return None
    made, weight, longer = (
        built.compiled,
        [1.0] * len(built.compiled.before),
        0.0,
    )
    starts, ends = times(made, costs, _cores(priced))
    if stretch and part:
        weight = [1.0 + stretch.repeats * inside for inside in part.inside]
        # Each repetition shifts the end of the step by the same time.
        longer = stretch.repeats * shift(made, part, ends)
    if not priced.profile.no_step_barrier:
        last = max(range(len(ends)), key=ends.__getitem__)
        return _Played(
            made, starts, ends, weight, ends[last], longer, last, -1
        )
    # If stages begin their next step separately, a step is the time of the stage that
    # works longest, from its first computation to its last.
    found = []
    for row in filter(None, made.computing):  # a stage may hold no piece
        first, last = row[0][0], max((n for n, _ in row), key=ends.__getitem__)
        before = max(made.before[first], key=ends.__getitem__, default=-1)
        found.append((ends[last] - starts[first], last, before))
    step, last, before = max(found)
    return _Played(made, starts, ends, weight, step, longer, last, before)


def _cores(priced: Priced) -> float:
    """Cores available to the ranks of one pipeline."""
    hardware = priced.hardware
    if not hardware.cores:
        return math.inf
    return hardware.cores * priced.case.layout.pp / max(hardware.ranks, 1)


def choice(priced: Priced, room: float = math.inf) -> Choice:
    """Time and memory of a case: build its program, measure its memory, simulate it.

    Not simulated if it exceeds the room. An impossible prediction raises.
    """
    found = _choice(priced, room)
    refuse_impossible(found.case, priced.hardware, found.parts, found.memory)
    return found


def _choice(priced: Priced, room: float) -> Choice:
    case, hardware, profile = priced.case, priced.hardware, priced.profile
    costs: Costs | None = None
    for built, stretch in _programs(priced):
        held = [
            _held(kinds, hardware, profile)
            for kinds in built.held(priced.sizes)
        ]
        memory = max(held, key=lambda kinds: sum(kinds.values()))
        stages = tuple(held) if case.layout.pp > 1 else ()
        if sum(memory.values()) > room:  # more microbatches never hold less
            return Choice(case.layout, case, {}, memory, stages)
        # 0 where the allocator begins to thrash, 1 where it does so fully.
        full = (sum(memory.values()) / hardware.memory - FULL[0]) / (
            FULL[1] - FULL[0]
        )
        strained = profile.strain and full > 0
        costs = (
            # A strained step has slower computation; otherwise its costs are
            # kept for the next program.
            priced.costs(1 + profile.strain * min(1.0, full))
            if strained
            else costs or priced.costs()
        )
        if played := _played(priced, built, stretch, costs):
            parts = _parts(played, _inside(priced))
            # If the parts do not add up to the step, the stretch did not
            # repeat exactly: simulate more.
            if (
                not stretch
                or abs(sum(parts.values()) - played.step - played.longer)
                <= 1e-9 * played.step
            ):
                return Choice(case.layout, case, parts, memory, stages)
    raise AssertionError("a whole program is simulated")


# Reserved bytes follow the tensors; a CPU has no driver context.
def _held(
    kinds: Mapping[str, float], hardware: Hardware, profile: SoftwareProfile
) -> dict[str, float]:
    """Bytes of a rank by kind, including memory outside tensors."""
    held = {kind: kinds.get(kind, 0.0) for kind in MEMORY}
    if not hardware.cores:
        held["other"] = profile.context + (profile.reserve - 1) * sum(
            held.values()
        )
    return held


def _inside(priced: Priced) -> dict[tuple[str, int], float]:
    """The share of each operation's time that is messages inside it."""
    part: dict[tuple[str, int], float] = {}
    for piece, each in enumerate(priced.pieces):
        t = each.times
        of = {
            ops.FORWARD: [t.forward], ops.RECOMPUTE: [t.recompute], ops.RECOMPUTE_PART: [t.recompute],
            ops.INPUT_GRADIENT: [t.input_gradient], ops.WEIGHT_GRADIENT: [t.weight_gradient],
            ops.BACKWARD: [t.input_gradient, t.weight_gradient],
        }  # fmt: skip
        for kind, times_ in of.items():
            total = sum(x.total for x in times_)
            part[kind, piece] = (
                sum(x.messages for x in times_) / total if total else 0.0
            )
    return part


def _parts(
    played: _Played, inside: Mapping[tuple[str, int], float]
) -> dict[str, float]:
    """Parts of the step on the busiest rank: computing, and waiting by cause.

    The rank's time begins with the step, or with its first computation if stages begin
    steps separately.
    """
    made, starts, ends, weight = played[:4]
    busiest = max(
        # The rank that computes longest, repetitions included.
        made.computing,
        key=lambda row: sum((ends[n] - starts[n]) * weight[n] for n, _ in row),
    )
    parts = dict.fromkeys(PARTS, 0.0)
    # Where stages begin separately, a step is shorter than its program.
    now = 0.0 if played.step >= max(ends) else starts[busiest[0][0]]
    makespan = now + played.step

    def waited(since: float, until: float, cause: int, times: float) -> None:
        # The operation that ended last before this one could start is what it
        # waited for.
        kind = made.priced[made.price[cause]][0][1].kind if cause >= 0 else ""
        if kind in ops.MESSAGES:
            # Of a wait for a message only its own duration is sending; the
            # rest is the sender's lateness.
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
    # Until the end of the step the rank waits for others.
    waited(now, makespan, -1, 1.0)
    return parts


def predicted(priced: Priced, most: int = 0) -> Timeline:
    """The timeline of a case's step, of at most `most` microbatches."""
    count = priced.case.layout.microbatches
    made = _program(priced, min(count, most or count)).compiled
    timeline = spans(made, *times(made, priced.costs(), _cores(priced)))
    makespan = {"makespan": timeline.makespan}
    refuse_no_numbers(priced.case, priced.hardware, "timeline", makespan)
    return timeline


def longest(priced: Priced) -> dict[tuple[int, Op], float]:
    """Number of times that each (rank, operation) occurs on the step's critical path."""
    costs = priced.costs()
    for built, stretch in _programs(priced):
        if not (played := _played(priced, built, stretch, costs)):
            continue
        made, ends, weight = played.made, played.ends, played.weight
        # A path that begins with a wait also contains the previous step's:
        # subtract it.
        path, prices = (
            critical(made, ends, weight, played.last),
            made.prices(costs),
        )
        for n, often in critical(made, ends, weight, played.before).items():
            path[n] = path.get(n, 0.0) - often
        whole = played.step + played.longer
        # A path as long as the step is complete; otherwise take a longer
        # program.
        if (
            abs(sum(prices[n] * often for n, often in path.items()) - whole)
            <= 1e-9 * whole
        ):
            # Several operations may share a price: name the slowest.
            slowest = [
                max(each, key=lambda at: costs.of(at[1], at[0]))
                for each in made.priced
            ]
            return {
                slowest[n]: often for n, often in path.items() if prices[n]
            }
    raise AssertionError("the path of a whole step is as long as the step")
