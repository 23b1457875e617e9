"""Lower bounds of time and memory for all candidates of a grid, to screen them.

A bound never exceeds the result of simulating the candidate's program. Time: some rank
has to do its work, after the first microbatch has passed the stages before it, and its
last one has to return through them; a lane has to carry all its messages. Memory: what
a rank always holds, and the forwards that its schedule has open at once.

These are formulas rather than walks of the step's graph, because a search has 100,000
to 200,000 candidates, and building and walking one graph takes 20 to 200 ms. Each
formula is the length of one path, or the load of one lane, of that graph, for all
candidates of a grid at once. All of them prune. For 8B on 64 H100 the search simulates
39 programs: without the slowing by messages beside computation (`_lost`) 55, without
the walk over one schedule (`followed`) 93. For 405B on 16,384 it simulates 91 and walks
741 schedules: without `_lost` it walks 1,978, and without `followed` it simulates 413
and runs out of its budget. Two other bounds, of a rank that holds the whole model and
of weights that a rank uses twice in a row, spared no program of the first search and
four of the second, and were removed. Bounds of memory need the moment at which a
schedule has most open (`open_blocks`), which no time reveals.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, Shape
from ..layout.choices import traits
from ..layout.pieces import work_of_pieces
from ..layout.state_bytes import held_bytes
from ..program import KINDS, ops
from .case import ranks_of
from .hardware import SLOWED
from .open_blocks import in_flight
from .piece_price import OpTime, PieceTimes
from .price import Units, exchange_seconds
from .space import (
    ORDERS,
    Grid,
    Inner,
    Options,
    Pipeline,
    Space,
    Zero,
    blocks_of,
)
from .step import Pricer, Request, joint_lanes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Bounds of a grid's candidates: seconds of a step, bytes of the fullest rank.

    Arrays over (ZeRO, microbatches, pipeline, inner choices).
    """

    step: Array
    bytes: Array
    units: tuple[Units, ...]  # for each way to shard
    collectives: CollectiveTimes


def bounds(
    options: Options, least: LeastTimes, before: Bounds | None = None
) -> Bounds:
    """The bounds of all candidates of a grid.

    Cuts not costed yet are bounded by costed ones. `before` holds the bounds from when
    fewer were costed. The number of weights, and so the times of units, are the same
    for all of them.
    """
    space = least.space
    split = [
        traits(pipe.schedule).splits_backward for pipe in options.pipelines
    ]
    step, held = np.zeros(options.sizes), np.zeros(options.sizes)
    units = before.units if before else _units(space, options)
    collectives = before.collectives if before else None
    shape, pp = space.request.shape, options.grid.pp
    # Whole and split backwards take different times: bound each way's
    # pipelines together, and put the results into their columns.
    for way in sorted({*split}):
        numbers = _Numbers(least, options, split=way)
        collectives = collectives or _collectives(units, numbers)
        mine = [place for place, parted in enumerate(split) if parted == way]
        pipes = tuple(options.pipelines[place] for place in mine)
        stages = _stages(shape, numbers.kinds, pp, pipes)
        step[:, :, mine] = _time(
            space, options, pipes, stages, numbers, collectives, split=way
        )
        flight = _flights(shape, pp, options.counts, pipes)
        held[:, :, mine] = _memory(
            space, options, stages, numbers, flight, units
        )
    assert collectives
    return Bounds(step, held, units, collectives)


def _units(space: Space, options: Options) -> tuple[Units, ...]:
    hardware, profile = space.request.hardware, space.request.profile
    layouts = (
        Layout(
            options.grid.mesh(zero.shards),
            zero=zero.stage,
            offload=space.offload,
        )
        for zero in options.zeros
    )
    return tuple(Units(layout, hardware, profile) for layout in layouts)


# ---- times and sizes of pieces

# Seconds of a piece's operations, then the bytes that it holds.
_SECONDS = ("forward", "backward", "input_gradient", "recompute")
_HELD = (
    "kept", "kept_after_i", "temporary", "input", "selected", "repeated",
    "weights", "frozen", "routed",
)  # fmt: skip
_SENT = "exchanged"  # bytes of one exchange of tokens between ranks that share MLPs
_PLACE = {name: place for place, name in enumerate((*_SECONDS, *_HELD, _SENT))}


class _Source(NamedTuple):
    """The costed cut that bounds another one, and the differences between them."""

    cut: Layout
    whole: bool = False  # the other cut splits its backward
    unselected: bool = False  # the other cut recomputes selectively


class LeastTimes:
    """Seconds and bytes of each kind of piece: exact if costed, else a lower bound.

    Grids that differ only in data parallelism share them.
    """

    def __init__(self, space: Space, pricer: Pricer) -> None:
        self.space, self.pricer = space, pricer
        self._found: dict[tuple[_Source, bool], dict[float, Array]] = {}

    def kinds(self, grid: Grid, inner: Inner) -> tuple[int, ...]:
        """The kind of every piece, the same for all candidates."""
        return self.pricer.pieces[
            self._source(grid, inner, split=False).cut
        ].kinds

    def of(self, options: Options, *, split: bool) -> Array:
        """An array over (microbatches, inner choices, kinds, `_PLACE`)."""
        grid, piped = options.grid, options.grid.pp > 1
        columns = []
        for inner in options.inners:
            source = self._source(grid, inner, split=split)
            known = self._found.setdefault((source, piped), {})
            exact = source.cut == self.space.cut(grid, inner, split=split)
            column = []
            for count in options.counts:
                # The cut that stands in has no cp, so a rank's part of each
                # sequence is expressed as fewer rows.
                rows = self.space.rows(grid, count) / (1 if exact else grid.cp)
                if rows not in known:
                    known[rows] = self._least(source, rows, piped)
                column.append(known[rows])
            columns.append(column)
        return np.array(columns).swapaxes(0, 1)

    def sources(self, options: Options) -> tuple[_Source, ...]:
        """The costed cuts that a grid's bounds follow from."""
        ways = {
            traits(pipe.schedule).splits_backward for pipe in options.pipelines
        }
        return tuple(
            self._source(options.grid, inner, split=split)
            for split in sorted(ways)
            for inner in options.inners
        )

    def _source(self, grid: Grid, inner: Inner, *, split: bool) -> _Source:
        """The costed cut that bounds this one.

        A cut without context parallelism, selective recomputation and a split backward
        computes as much, and what it leaves out only costs time.
        """
        known, cut = self.pricer.pieces, self.space.cut
        exact = cut(grid, inner, split=split)
        if exact in known:
            return _Source(exact)
        near = grid._replace(ring=1, ulysses=1)
        # The nearest costed cut first: without cp, then with a whole backward
        # too.
        for kept, parted in ((inner, split), (inner, False)):
            other = cut(near, kept, split=parted)
            if other in known:
                return _Source(other, whole=split and not parted)
        plain = cut(near, inner._replace(recompute="none"), split=False)
        return _Source(plain, split, inner.recompute == "selective")

    def _least(self, source: _Source, rows: float, piped: bool) -> Array:
        times = self.pricer.times(source.cut, rows, piped)
        embed, *blocks, head = times.values
        least = [embed, *(_without(source, block) for block in blocks), head]
        return np.array([_numbers(piece) for piece in least])


def _without(source: _Source, block: PieceTimes) -> PieceTimes:
    """A block of a source, without what may differ in the cut that it stands for."""
    cost = block.cost
    if source.whole:
        # A whole backward says nothing about what is kept after it.
        cost = replace(cost, kept_after_i=0.0)
    if not source.unselected:
        return replace(block, cost=cost)
    # What selective recomputation keeps is not known yet: the least of the
    # input and everything.
    fewest = min(cost.input, cost.kept)
    cost = replace(cost, kept=fewest, kept_after_i=0.0, selected=fewest)
    return replace(block, recompute=OpTime(), cost=cost)


def _numbers(piece: PieceTimes) -> list[float]:
    """The seconds and bytes of a piece, in the order of `_PLACE`."""
    cost = piece.cost
    seconds = [
        piece.forward.total,
        piece.backward,
        piece.input_gradient.total,
        piece.recompute.total,
    ]
    # For a recomputed block. If it is several pieces, one is recomputed after the
    # other.
    last = piece.parts[-1].cost if piece.parts else None
    repeated = cost.selected + last.kept - last.selected if last else cost.kept
    held = [
        repeated if name == "repeated" else float(getattr(cost, name))
        for name in _HELD
    ]
    return [*seconds, *held, exchanged_bytes(piece)]


def exchanged_bytes(piece: PieceTimes) -> float:
    """Bytes of one exchange of a block's tokens; 0 if they stay on their rank."""
    # The routed MLPs are the second of three pieces.
    return piece.parts[1].cost.edge if piece.parts else 0.0


class Exchanges(NamedTuple):
    """Seconds of a block's exchanges of tokens, in a forward and in a backward."""

    forward: float = 0.0
    backward: float = 0.0


def exchanges(
    layout: Layout, request: Request, edge: float, beside: float
) -> Exchanges:
    """A lower bound of what a block's exchanges of tokens add to its computation.

    A forward counts tokens, sends them, and gets them back; a backward sends both
    gradients. `beside` is recomputation that may run meanwhile.
    """
    if not edge or layout.ep_ranks == 1:
        return Exchanges()
    routes, exchanged = exchange_seconds(
        layout, request.shape, request.hardware, request.profile, edge
    )
    # Where pieces are frozen, some gradients need not be sent.
    back = 0.0 if request.shape.frozen else max(0.0, 2 * exchanged - beside)
    return Exchanges(routes + 2 * exchanged, back)


def waits_for_tokens(pipe: Pipeline) -> bool:
    """True if nothing is computed while tokens travel."""
    return not (pipe.overlap or traits(pipe.schedule).forward_first)


class _Numbers:
    """Times and sizes of each kind of piece, as arrays (microbatches, 1, inners, 1).

    Lists have one entry for each kind, the embedding's first and the head's last, or
    one for each kind of block.
    """

    def __init__(
        self, least: LeastTimes, options: Options, *, split: bool
    ) -> None:
        shape = least.space.request.shape
        table = least.of(options, split=split)[:, None, :, None]
        every = range(table.shape[-2])
        blocks = every[1:-1]
        recomputes = [inner.recompute for inner in options.inners]

        def array(kind: int, name: str) -> Array:
            return table[..., kind, _PLACE[name]]

        # Broadcasts over kinds, as an array (inners, 1).
        def of_inners(each: Callable[[str], float]) -> Array:
            return np.array([each(name) for name in recomputes], float)[
                :, None
            ]

        # Numbers of elements are the same for every microbatch size and inner
        # choice: take the first.
        def numbers(name: str) -> list[float]:
            return [float(array(kind, name).flat[0]) for kind in every]

        self.kinds = least.kinds(options.grid, options.inners[0])
        self.forward = [array(kind, "forward") for kind in every]
        self.backward = [array(kind, "backward") for kind in every]
        self.inputs = [array(kind, "input_gradient") for kind in blocks]
        self.kept = [array(kind, "kept") for kind in blocks]
        self.temporary = _lowest(
            array(kind, "temporary") for kind in every[1:]
        )
        self.weights, self.frozen = numbers("weights"), numbers("frozen")
        for kind in {self.kinds[piece] for piece in shape.frozen}:
            # Some blocks of the kind may hold less: use the least.
            self.frozen[kind] = self.weights[kind]
        self.trained = [
            weights - frozen
            for weights, frozen in zip(self.weights, self.frozen, strict=True)
        ]
        # Routed MLPs are trained or frozen as their block is; frozen ones
        # take no sums.
        routed = zip(numbers("routed"), self.frozen, strict=True)
        self.routed = [count * (not frozen) for count, frozen in routed]
        part = of_inners(lambda name: name == "selective") > 0
        self.input = [
            np.where(part, array(kind, "selected"), array(kind, "input"))
            for kind in blocks
        ]
        # For a recomputed block. If only a part is recomputed, one of its pieces after
        # the other.
        self.repeated = [
            np.where(part, array(kind, "repeated"), array(kind, "kept"))
            for kind in blocks
        ]
        self.kept_after_i = [array(kind, "kept_after_i") for kind in blocks]
        # Zero for inner choices that recompute nothing.
        repeats = of_inners(lambda name: name != "none")
        self.recompute = [
            array(kind, "recompute") * repeats for kind in blocks
        ]
        self.segment = of_inners(segment_blocks)
        self.whole = repeats > 0
        self.layers = [float(self.kinds.count(kind)) for kind in blocks]
        self.exchanges = [
            self._exchanges(least.space, options, table[:, 0, :, 0, kind])
            for kind in blocks
        ]

    def _exchanges(
        self, space: Space, options: Options, table: Array
    ) -> tuple[Array, Array]:
        """Seconds of a kind of block's exchanges, forward and backward, like `forward`."""
        edges = table[..., _PLACE[_SENT]]
        found = np.zeros((2, *edges.shape))
        if edges.any():
            repeated = table[..., _PLACE["recompute"]]
            for q, inner in enumerate(options.inners):
                layout = space.layout(options, 0, 0, 0, q)
                # Whole recomputation of a block ends before its gradient is sent.
                part = inner.recompute == "selective"
                for c, edge in enumerate(edges[:, q]):
                    beside = float(repeated[c, q]) * part
                    found[:, c, q] = exchanges(
                        layout, space.request, float(edge), beside
                    )
        forward, backward = found[:, :, None, :, None]
        return forward, backward


def _lowest(each: Iterable[Array]) -> Array:
    return reduce(np.minimum, each)


def _highest(each: Iterable[Array]) -> Array:
    return reduce(np.maximum, each)


def _total(
    counts: Sequence[Array | float], each: Sequence[Array | float]
) -> Array:
    """The sum over kinds, weighted by their counts."""
    return np.asarray(reduce(operator.add, map(operator.mul, counts, each)))


def segment_blocks(recompute: str) -> float:
    """The number of blocks for which one input is kept."""
    return float(recompute[6:]) if recompute.startswith("every=") else 1.0


# ---- collectives of units


@dataclass(frozen=True)
class CollectiveTimes:
    """Seconds of the collectives of each kind of piece: (kinds, ways to shard)."""

    gather: Array
    reduce: Array
    replicas: Array
    lane: Array  # the sums that share a lane with gathers
    update: Array

    def shares_lane(self, way: int) -> bool:
        """True if sums over replicas share the lane of those over shards."""
        lane, alone = self.lane[:, way], self.reduce[:, way]
        return bool((lane > alone).any())


def _collectives(units: Sequence[Units], numbers: _Numbers) -> CollectiveTimes:
    kinds = zip(numbers.trained, numbers.frozen, numbers.routed, strict=True)
    each = np.array(
        [
            [unit.of(trained - routed, frozen, routed) for unit in units]
            for trained, frozen, routed in kinds
        ]
    )
    gather, _, reduced, replicas, _, update = np.moveaxis(each, -1, 0)
    alone = 1.0 / units[0].hardware.crowding
    joint = [
        KINDS[ops.REDUCE_REPLICAS].lane
        in joint_lanes(unit.layout, unit.hardware)
        for unit in units
    ]
    # Where replicas use the same links, their sums follow the others on one
    # lane.
    lane = reduced + replicas * joint
    return CollectiveTimes(
        gather * alone, reduced * alone, replicas * alone, lane * alone, update
    )


def beside_computing(
    space: Space,
    zero: Zero,
    collectives: CollectiveTimes,
    way: int,
    kind: int,
    count: Array | float,
) -> tuple[Array | float, Array | float]:
    """Seconds of messages beside a forward and a backward of a kind of piece."""
    if not space.request.profile.overlaps_data or space.request.hardware.cores:
        return 0.0, 0.0
    gather = collectives.gather[kind, way]
    sums = collectives.reduce[kind, way] + collectives.replicas[kind, way]
    # ZeRO-3 gathers a second time, for the backward.
    gathers_often = zero.gather == "micro"
    again = gather * (gathers_often and zero.stage == 3)
    # What happens once a step is spread over its microbatches.
    forward = gather / (1 if gathers_often else count)
    return forward, again + sums / (1 if zero.stage > 1 else count)


# ---- time


def _time(
    space: Space,
    options: Options,
    pipes: Sequence[Pipeline],
    stages: _Stages,
    numbers: _Numbers,
    collectives: CollectiveTimes,
    *,
    split: bool,
) -> Array:
    """Seconds, (ZeRO, microbatches, pipelines, inner choices)."""
    hardware = space.request.hardware
    counts = np.array(options.counts, float)[:, None, None, None]
    embed_forward, *forwards, head_forward = numbers.forward
    embed_backward, *backwards, head_backward = numbers.backward
    # for a block of each kind and one microbatch
    block = [
        sum(each)
        for each in zip(forwards, backwards, numbers.recompute, strict=True)
    ]
    embed, head = embed_forward + embed_backward, head_forward + head_backward
    # A segment that ends in the head is not recomputed: its forward has just run.
    spared = (numbers.segment - 1) * _highest(numbers.recompute)
    repeated = _total(stages.blocks, numbers.recompute)
    # (microbatches, pipelines, inners, ranks)
    work = _total(stages.blocks, block) - np.minimum(
        stages.head * spared, repeated
    )
    work = work + stages.embed * embed + stages.head * head
    lost = _lost(space, options, numbers, collectives, counts, split=split)
    work = work + _total(stages.blocks, lost)
    # The rank waits for tokens, unless the tokens of another microbatch are computed.
    sent, returned = zip(*numbers.exchanges, strict=True)
    waits = np.array([waits_for_tokens(pipe) for pipe in pipes])
    moved = [sum(each) for each in numbers.exchanges]
    work = work + waits[:, None, None] * _total(stages.blocks, moved)
    # If steps roll, no stage waits for others to begin or to end.
    no_step_barrier = space.request.profile.no_step_barrier
    later = ((sum(stages.before) > 0) | (stages.embed == 0)) & (
        not no_step_barrier
    )
    begin = np.where(
        later,
        embed_forward
        + _total(stages.before, forwards)
        + _total(stages.before, sent),
        0.0,
    )
    end = np.where(
        later,
        embed_backward
        + _total(stages.before, backwards)
        + _total(stages.before, returned),
        0.0,
    )
    # A split backward may end in a weight gradient, which no earlier stage
    # waits for: no way back.
    path = (begin + counts * work + (0.0 if split else end)).max(axis=-1)
    step = path + _ends(space, options, stages, collectives, split=split)
    # If gradients are summed after every microbatch, a lane has to carry them.
    often = np.array([zero.stage >= 2 for zero in options.zeros])[
        :, None, None, None
    ]
    lane = _lane(space, options, pipes, stages, collectives)
    update = _of_units(collectives.update, stages).max(axis=-1)[
        :, None, :, None
    ]
    step = np.where(often, np.maximum(step, lane[..., None] + update), step)
    if not hardware.cores:
        return np.asarray(step)
    # The cores that the ranks of one pipeline have together, which carry the
    # work of all its blocks.
    cores = hardware.cores * options.grid.pp / hardware.ranks
    total = (_total(numbers.layers, block) - spared + embed + head)[..., 0]
    return np.asarray(np.maximum(step, counts[..., 0] * total / cores))


def _ends(
    space: Space,
    options: Options,
    stages: _Stages,
    collectives: CollectiveTimes,
    *,
    split: bool,
) -> Array:
    """Seconds before and after all computation, (ZeRO, 1, pipelines, 1).

    The embedding's weights are gathered before. The last unit's gradient, the
    embedding's if the backward is whole, is summed after it. Then a rank is updated.
    """
    sharded = np.array([zero.stage > 0 for zero in options.zeros]) & (
        not space.request.profile.no_step_barrier
    )
    sums = collectives.reduce + collectives.replicas
    # A split backward may sum any unit last, so take the shortest sum.
    last = sums.min(axis=0) if split else sums[0]
    around = np.where(sharded, collectives.gather[0], 0.0) + last
    update = _of_units(collectives.update, stages).max(axis=-1)
    return np.asarray(around[:, None, None, None] + update[:, None, :, None])


def _lane(
    space: Space,
    options: Options,
    pipes: Sequence[Pipeline],
    stages: _Stages,
    collectives: CollectiveTimes,
) -> Array:
    """Seconds of the messages of one lane, (ZeRO, microbatches, pipelines).

    A sum after every microbatch and, under ZeRO-3, a gather for each forward and
    backward.
    """
    counts = np.array(options.counts, float)[:, None, None]
    lane = counts * _of_units(collectives.lane, stages)[:, None]
    if space.request.hardware.cores:
        return np.asarray(lane.max(axis=-1))
    # Two consecutive computations of the same block share a gather: at most at both
    # ends of a stage, and once more for each two microbatches side by side.
    chunks = np.array(
        [pipe.chunks * (1 + pipe.overlap) for pipe in pipes], float
    )
    twice = 2.0 * counts * chunks[:, None]
    gather = collectives.gather[1:-1]
    blocks = [each[:, 0] for each in stages.blocks]
    once = _total(blocks, list(gather[..., None, None]))[:, None]
    most = gather.max(axis=0)[:, None, None, None]
    # Each block's forward and backward gather once, except those that share a
    # gather.
    spared = (twice + space.request.profile.no_step_barrier) * most
    gathers = np.maximum(2 * counts * once - spared, 0.0)
    each_use = [
        zero.gather == "micro" and zero.stage == 3 for zero in options.zeros
    ]
    lane = lane + np.array(each_use)[:, None, None, None] * gathers
    return np.asarray(lane.max(axis=-1))


def _lost(
    space: Space,
    options: Options,
    numbers: _Numbers,
    collectives: CollectiveTimes,
    counts: Array,
    *,
    split: bool,
) -> list[Array]:
    """Seconds that each kind of block loses to messages: (ZeRO, counts, 1, inners, 1).

    If the backward is split, only in its forward: the parts are unknown before they are
    costed.
    """
    # Gathers in 8 bits are shorter than those in `collectives`: such blocks
    # lose nothing here.
    plain = np.array([not inner.matmul for inner in options.inners])[:, None]
    found = []
    blocks = zip(numbers.forward[1:-1], numbers.inputs, strict=True)
    for kind, (forward, input_gradient) in enumerate(blocks, 1):
        each_zero = [
            beside_computing(space, zero, collectives, way, kind, counts)
            for way, zero in enumerate(options.zeros)
        ]
        beside = [np.broadcast_arrays(*each, counts)[:2] for each in each_zero]
        beside_forward, beside_back = np.array(beside).swapaxes(0, 1)
        # `lost_beside` over arrays, with SLOWED taken out of the minimum.
        lost = np.minimum(beside_forward, forward / (1 - SLOWED))
        if not split:
            lost = lost + np.minimum(
                beside_back, input_gradient / (1 - SLOWED)
            )
        found.append(np.asarray(SLOWED * plain * lost))
    return found


def _of_units(each: Array, stages: _Stages) -> Array:
    """The sum over the units of a rank, (ZeRO, pipelines, ranks)."""
    embed, *blocks, head = each[:, :, None, None]
    counts = [count[:, 0] for count in stages.blocks]
    held = stages.embed[:, 0] * embed + _total(counts, blocks)
    return np.asarray(held + stages.head[:, 0] * head)


# ---- memory


def _memory(
    space: Space,
    options: Options,
    stages: _Stages,
    numbers: _Numbers,
    flight: Array,
    units: Sequence[Units],
) -> Array:
    """Bytes of the fullest rank, (ZeRO, microbatches, pipelines, inner choices)."""
    profile = space.request.profile
    # The fields of `Moment`, each over (moments, microbatches, pipelines, 1,
    # ranks).
    opened, waiting, there, whole, summing = flight.swapaxes(0, 1)
    activations = _activations(stages, numbers, opened, waiting)
    begun = opened[3:] + waiting[3:] > 0  # every unit has a gradient by then
    trained, frozen, every, routed = (
        _total(stages.blocks, each[1:-1])
        + stages.embed * each[0]
        + stages.head * each[-1]
        for each in (
            numbers.trained,
            numbers.frozen,
            numbers.weights,
            numbers.routed,
        )
    )
    # A frozen embedding has no backward, and is dropped after its last forward.
    dropped = stages.embed * numbers.weights[0] * (numbers.trained[0] == 0)
    used = every - dropped
    block = min(numbers.trained[1:-1])
    held = []
    for zero, unit in zip(options.zeros, units, strict=True):
        shards = unit.shards if zero.stage else 1.0
        # Ranks of ep hold different MLPs, so these have fewer shards.
        routed_shards = shards / options.grid.ep if zero.stage else 1.0
        # `held_bytes` divides by all shards, so elements of routed MLPs, in fewer
        # shards, count several times.
        cut = trained + (shards / routed_shards - 1) * routed
        each = held_bytes(unit.layout, profile.state)
        always = (
            cut * each.optimizer + trained * each.weight + frozen * each.frozen
        )
        gradient_shards = cut * (each.gradient_shard or each.gradient)
        reduced = zero.stage >= 2 and shards > 1
        gradients = gradient_shards if reduced else trained * each.gradient
        then = activations
        bucket = (
            profile.bucket if zero.stage == 3 and profile.bucket else np.inf
        )
        if reduced:
            # In addition to the shards, which exist from a unit's first sum.
            fewest = routed_shards if any(numbers.routed) else shards
            beside = profile.reduce_bytes - profile.gradient_bytes / fewest
            sums = (
                np.maximum(summing - 1, 0.0) if unit.replicas > 1 else summing
            )
            open_gradients = whole * min(block, bucket)
            under_way = sums * min(*numbers.trained, bucket)
            then = then + (open_gradients + under_way) * max(0.0, beside)
        if zero.stage == 3:
            # At least one unit is gathered at any moment.
            smallest = min(*numbers.weights, bucket)
            always = always + smallest * profile.gathered_bytes
            if zero.gather == "step" and bucket == np.inf:
                # Gathered once a step: every unit is present, and the smallest
                # one is counted already.
                others = used - min(numbers.weights)
                then = then + there * others * profile.gathered_bytes
        # In the last three moments every stage has begun a gradient, so all
        # gradient shards exist.
        late = (then[3:] + begun * gradients).max(axis=0)
        most = np.maximum(then[:3].max(axis=0), late)
        # When the step ends, only the gradients are left beside what is
        # permanent.
        held.append((always + np.maximum(most, gradient_shards)).max(axis=-1))
    fullest = np.array(held)
    if space.request.hardware.cores:
        return fullest
    return np.asarray(profile.context + profile.reserve * fullest)


def _activations(
    stages: _Stages, numbers: _Numbers, opened: Array, waiting: Array
) -> Array:
    """Bytes of activations at each moment of `in_flight`.

    Blocks are kept whole, or only the inputs of segments, one of which has been
    recomputed.
    """
    # Moments with only weight gradients waiting recompute nothing, so their
    # factor is 0.
    again = np.array([1.0, 1.0, 0.0] * 2).reshape(-1, *[1] * (opened.ndim - 1))
    input_bytes = _per_block(numbers.input, stages)
    # The inputs of all open segments but the one that is being recomputed.
    inputs = np.maximum(opened / numbers.segment - 1, 0.0) * input_bytes
    repeated = again * numbers.segment * _lowest(numbers.repeated)
    inputs = inputs + repeated - (_highest(numbers.input) - input_bytes)
    kept = opened * _per_block(numbers.kept, stages)
    kept = np.where(numbers.whole, np.where(opened > 0, inputs, 0.0), kept)
    factors = waiting * _per_block(numbers.kept_after_i, stages)
    return np.asarray(kept + factors + numbers.temporary)


def _per_block(each: Sequence[Array], stages: _Stages) -> Array:
    """Mean bytes per block, from each kind's: the least of a rank's stages."""
    if len(each) == 1:
        return each[0]
    return _lowest(_total(shares, each) for shares in stages.shares)


@lru_cache(maxsize=1024)
def _flights(
    shape: Shape, pp: int, counts: tuple[int, ...], pipes: tuple[Pipeline, ...]
) -> Array:
    """`in_flight` as an array (moments, fields, microbatches, pipelines, 1, ranks).

    Capped counts suffice, as more microbatches never have less open.
    """
    fewer = [2 * pp if count >= 2 * pp else min(count, pp) for count in counts]
    each = []
    for pipe in pipes:
        blocks, some = (
            blocks_of_pipeline(shape, pp, pipe),
            _some_ranks(shape, pp, pipe),
        )
        each.append(
            [
                in_flight(pipe.schedule, pp, pipe.chunks, count, blocks, some)
                for count in fewer
            ]
        )
    # From (pipelines, microbatches, ranks, moments, fields).
    return np.array(each).transpose(3, 4, 1, 0, 2)[..., None, :]


# ---- stages of pipelines


@dataclass(frozen=True)
class _Stages:
    """The ranks of pipelines that can bound them, as arrays (pipelines, 1, ranks).

    What they hold, and what comes before them. These are the first two ranks, the last,
    and the first and last of those with the most work in blocks: with equal blocks,
    others hold and do less.
    """

    ranks: NDArray[np.int_]  # (pipelines, ranks)
    blocks: tuple[Array, ...]  # blocks of each kind
    embed: Array  # 1 for the rank with the embedding
    head: Array  # 1 for the rank with the head
    # Blocks of each kind in the stages before the rank's first.
    before: tuple[Array, ...]
    # For each stage of the rank, the share of each kind.
    shares: tuple[tuple[Array, ...], ...]


@lru_cache(maxsize=4096)
def blocks_of_pipeline(
    shape: Shape, pp: int, pipe: Pipeline
) -> tuple[int, ...]:
    """The number of blocks on each virtual stage."""
    # The division of blocks depends on the pipeline alone, so any layout with
    # it will do.
    mesh = Grid(1, pp, 1, 1, 1, 1, ORDERS[0]).mesh(1)
    plain = Layout(
        mesh=mesh, schedule=pipe.schedule, chunks=pipe.chunks, microbatches=1
    )
    return pipe.stages or blocks_of(plain, shape)


def kinds_of_stages(
    blocks: Sequence[int], kinds: Sequence[int]
) -> list[tuple[int, ...]]:
    """The kinds of the pieces on each virtual stage, given its number of blocks."""
    # Piece 0 is the embedding.
    ends = [1 + count for count in accumulate(blocks, initial=0)]
    # The first stage also holds the embedding, and the last one the head.
    ends[0], ends[-1] = 0, len(kinds)
    return [tuple(kinds[begin:end]) for begin, end in pairwise(ends)]


@lru_cache(maxsize=64)
def _work_before(shape: Shape) -> tuple[int, ...]:
    """The forward work of all blocks before each block."""
    return tuple(accumulate(work_of_pieces(shape)[1:-1], initial=0))


@lru_cache(maxsize=4096)
def _some_ranks(shape: Shape, pp: int, pipe: Pipeline) -> tuple[int, ...]:
    """The ranks of a pipeline that are examined; see `_Stages`."""
    blocks, work = blocks_of_pipeline(shape, pp, pipe), _work_before(shape)
    ends = list(accumulate(blocks, initial=0))
    each = [work[end] - work[begin] for begin, end in pairwise(ends)]
    held = ranks_of(len(blocks), pp, pipe.schedule)
    whole = [sum(each[stage] for stage in mine) for mine in held]
    # Two ranks may tie for the most work: the first and the last of them are
    # bounded.
    most = [rank for rank, amount in enumerate(whole) if amount == max(whole)]
    return 0, min(1, pp - 1), most[0], most[-1], pp - 1


@lru_cache(maxsize=4096)
def _stages(
    shape: Shape, kinds: tuple[int, ...], pp: int, pipes: tuple[Pipeline, ...]
) -> _Stages:
    held = [_held_by_ranks(shape, kinds, pp, pipe) for pipe in pipes]
    slots = max(len(rank.shares) for ranks in held for rank in ranks)

    def array(of: Callable[[_Held], object]) -> Array:
        """Values of all ranks, (..., pipelines, 1, ranks)."""
        found = np.array(
            [[of(rank) for rank in ranks] for ranks in held], float
        )
        return np.moveaxis(found, (0, 1), (-2, -1))[..., None, :]

    # Ranks with fewer stages repeat their first share, which changes no
    # minimum over stages.
    def padded(rank: _Held) -> list[tuple[float, ...]]:
        return [*rank.shares, *[rank.shares[0]] * (slots - len(rank.shares))]

    return _Stages(
        ranks=np.array([_some_ranks(shape, pp, pipe) for pipe in pipes]),
        blocks=tuple(array(lambda rank: rank.blocks)),
        embed=array(lambda rank: rank.embed),
        head=array(lambda rank: rank.head),
        before=tuple(array(lambda rank: rank.before)),
        shares=tuple(map(tuple, array(padded))),
    )


class _Held(NamedTuple):
    """The pieces on one rank: blocks of each kind, and their shares in its stages."""

    blocks: tuple[int, ...]
    embed: bool
    head: bool
    before: tuple[int, ...]
    shares: list[tuple[float, ...]]


def _held_by_ranks(
    shape: Shape, kinds: tuple[int, ...], pp: int, pipe: Pipeline
) -> list[_Held]:
    stages = kinds_of_stages(blocks_of_pipeline(shape, pp, pipe), kinds)
    # Kind 0 is the embedding and the highest kind is the head.
    of_blocks = range(1, max(kinds))
    counts = [[stage.count(kind) for kind in of_blocks] for stage in stages]
    every = ranks_of(len(stages), pp, pipe.schedule)
    # for stages without blocks
    nothing = [tuple(float(kind == 1) for kind in of_blocks)]

    def summed(some: Iterable[int]) -> tuple[int, ...]:
        """Blocks of each kind in these stages."""
        return tuple(
            map(sum, zip(*[counts[stage] for stage in some], strict=True))
        )

    found = []
    for mine in (every[rank] for rank in _some_ranks(shape, pp, pipe)):
        shares = [
            tuple(number / sum(counts[stage]) for number in counts[stage])
            for stage in mine
            if sum(counts[stage])
        ]
        # The blocks that a microbatch passes before it reaches the rank's
        # first stage.
        before = summed(range(min(mine))) or tuple(0 for _ in of_blocks)
        ends = 0 in mine, len(stages) - 1 in mine
        found.append(_Held(summed(mine), *ends, before, shares or nothing))
    return found
