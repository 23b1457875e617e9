"""Lower bounds of time and memory, for all candidates of a grid at once: what a search screens with.

A bound never exceeds what simulating the candidate's program gives. Time: some rank has to do its
work, after the first microbatch has come through the stages before it, and its last one has to go
back through them; a lane has to carry all its messages. Memory: what a rank always holds, and the
forwards that its schedule has open at once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout import ByKind, Layout, Shape
from ..layout.choices import traits
from ..layout.pieces import work_of_pieces
from ..layout.state_bytes import held_bytes
from ..program import KINDS, Op, ops, schedule
from ..program.state import IN_FLIGHT
from .hardware import SLOWED, lost_beside
from .piece_price import KindTimes, OpTime, PieceTimes
from .price import Units, distance
from .space import (
    ORDERS,
    Grid,
    Inner,
    Options,
    Pipeline,
    Space,
    Zero,
    blocks_of,
    ranks_of,
)
from .step import Pricer, joint_lanes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Of one grid's candidates, arrays over (ZeRO, microbatches, pipeline, inner choices): seconds
    of a step, bytes of the fullest rank."""

    step: Array
    bytes: Array
    units: tuple[Units, ...]  # of each way to shard
    priced: _Unit


@dataclass(frozen=True)
class _Stages:
    """Some ranks of pipelines, arrays (pipelines, 1, ranks): what they hold, and what comes before
    them. The first two, the last, and the first and last of those with the most work in blocks: of
    equal blocks others hold and do less."""

    ranks: NDArray[np.int_]  # (pipelines, ranks)
    blocks: tuple[Array, ...]  # of each kind
    embed: Array  # 1 where the embedding is
    head: Array
    # blocks of each kind, of the stages before the first of the rank
    before: tuple[Array, ...]
    # of each stage of the rank: the part of each kind
    shares: tuple[tuple[Array, ...], ...]


def bounds(
    space: Space, x: Options, pricer: Pricer, before: Bounds | None = None
) -> Bounds:
    """Of all candidates of a grid. What is not costed yet is bounded by what is: `before` are the bounds
    when less was costed. Numbers of weights, and so the times of units, are the same for all of them."""
    split = [traits(pipe.schedule).splits_backward for pipe in x.pipelines]
    step, held = np.zeros(x.sizes), np.zeros(x.sizes)
    layouts = (
        Layout(x.grid.mesh(z.shards), zero=z.stage, offload=space.offload)
        for z in x.zeros
    )
    hardware, profile = space.request.hardware, space.request.profile
    units = (
        before.units if before else tuple(Units(x, hardware, profile) for x in layouts)
    )
    priced = before.priced if before else None
    for way in sorted({*split}):
        times = [
            [
                _least(space, pricer, x.grid, inner, space.rows(x.grid, count), way)
                for inner in x.inners
            ]
            for count in x.counts
        ]
        numbers, kinds = (
            _Numbers(times, x.inners, space.request.shape),
            times[0][0].kinds,
        )
        priced = priced or _priced(units, numbers)
        mine = [p for p, parted in enumerate(split) if parted == way]
        pipes = [x.pipelines[p] for p in mine]
        stages = _stages(space.request.shape, kinds, x.grid.pp, tuple(pipes))
        step[:, :, mine] = _time(space, x, pipes, stages, numbers, priced, split=way)
        flight = _flights(space.request.shape, x.grid.pp, x.counts, tuple(pipes))
        held[:, :, mine] = _memory(space, x, stages, numbers, flight, units)
    assert priced
    return Bounds(step, held, units, priced)


def _least(
    space: Space, pricer: Pricer, grid: Grid, inner: Inner, rows: float, split: bool
) -> KindTimes:
    """The times of every kind of piece, exact when the cut is costed and else no slower than they are: a
    cut without context parallelism, without selective recomputation and with its backward whole
    computes as much, and what it leaves out only costs time."""
    exact, piped = space.cut(grid, inner, split=split), grid.pp > 1
    if exact in pricer.pieces:
        return pricer.times(exact, rows, piped)
    near = grid._replace(ring=1, ulysses=1)
    selective = inner.recompute == "selective"
    for kept, parted in (
        (inner, split),
        (inner, False),
        (inner._replace(recompute="none"), False),
    ):
        cut = space.cut(near, kept, split=parted)
        if cut in pricer.pieces:
            break
    times = pricer.times(cut, rows / grid.cp, piped)

    def least(block: PieceTimes) -> PieceTimes:
        # what a backward that is whole keeps after it says nothing
        if split and not parted:
            block = replace(block, cost=replace(block.cost, kept_after_i=0.0))
        if selective and kept.recompute != "selective":
            fewest = min(block.cost.input, block.cost.kept)
            cost = replace(block.cost, kept=fewest, kept_after_i=0.0, selected=fewest)
            block = replace(block, again=OpTime(), cost=cost)
        return block

    return ByKind((times.embed, *map(least, times.blocks), times.head), times.kinds)


class _Numbers:
    """Times and sizes of every kind of piece, arrays (microbatches, 1, inner choices, 1). Lists have one for
    each kind, the embedding's first and the head's last, or one for each kind of block."""

    def __init__(
        self,
        times: Sequence[Sequence[KindTimes]],
        inners: Sequence[Inner],
        shape: Shape,
    ) -> None:
        first = times[0][0]
        every = range(len(first.values))
        blocks = every[1:-1]

        def array(kind: int, of: str) -> Array:
            each = [[_number(t.values[kind], of) for t in row] for row in times]
            return np.array(each)[:, None, :, None]

        def inner(each: Callable[[str], float]) -> Array:
            return np.array([each(inner.recompute) for inner in inners], float)[:, None]

        def numbers(of: str) -> list[float]:
            return [_number(kind, of) for kind in first.values]

        self.forward = [array(kind, "forward") for kind in every]
        self.backward = [array(kind, "backward") for kind in every]
        self.inputs = [array(kind, "input_gradient") for kind in blocks]
        self.kept = [array(kind, "kept") for kind in blocks]
        self.temporary = _lowest(array(kind, "temporary") for kind in every[1:])
        self.weights, self.frozen = numbers("weights"), numbers("frozen")
        for kind in {first.kinds[piece] for piece in shape.frozen}:
            # of blocks some hold less: the least
            self.frozen[kind] = self.weights[kind]
        self.trained = [
            w - still for w, still in zip(self.weights, self.frozen, strict=True)
        ]
        experts = zip(numbers("experts"), self.frozen, strict=True)
        self.experts = [e * (not still) for e, still in experts]
        part = inner(lambda name: name == "selective") > 0
        self.input = [
            np.where(part, array(kind, "selected"), array(kind, "input"))
            for kind in blocks
        ]
        # Of a block that is computed again; where a part of it is, one of its pieces after the other.
        self.repeated = [
            np.where(part, array(kind, "repeated"), array(kind, "kept"))
            for kind in blocks
        ]
        self.kept_after_i = [array(kind, "kept_after_i") for kind in blocks]
        repeats = inner(lambda name: name != "none")
        self.again = [array(kind, "again") * repeats for kind in blocks]
        self.segment = inner(_segment)
        self.whole = repeats > 0
        self.layers = [float(first.kinds.count(kind)) for kind in blocks]


def _lowest(each: Iterable[Array]) -> Array:
    return reduce(np.minimum, each)


def _highest(each: Iterable[Array]) -> Array:
    return reduce(np.maximum, each)


def _total(counts: Sequence[Array | float], each: Sequence[Array | float]) -> Array:
    """So many of each kind."""
    return np.asarray(reduce(operator.add, map(operator.mul, counts, each)))


def _number(piece: PieceTimes, name: str) -> float:
    """Seconds of an operation of a piece, or bytes that it holds."""
    if name == "backward":
        return piece.backward
    if name == "repeated":
        last = piece.parts[-1].cost if piece.parts else None
        return (
            piece.cost.selected + last.kept - last.selected if last else piece.cost.kept
        )
    value = getattr(piece, name, None)
    return (
        value.total if isinstance(value, OpTime) else float(getattr(piece.cost, name))
    )


def _segment(recompute: str) -> float:
    return float(recompute[6:]) if recompute.startswith("every=") else 1.0


@dataclass(frozen=True)
class _Unit:
    """Seconds of the collectives of every kind of piece, arrays (kinds, ways to shard)."""

    gather: Array
    reduce: Array
    replicas: Array
    lane: Array  # of the sums that follow gathers on one lane
    update: Array


def _priced(units: Sequence[Units], n: _Numbers) -> _Unit:
    kinds = zip(n.trained, n.frozen, n.experts, strict=True)
    each = np.array([[u.of(w - e, still, e) for u in units] for w, still, e in kinds])
    gather, _, reduce, replicas, _, update = np.moveaxis(each, -1, 0)
    alone = 1.0 / units[0].hardware.crowding
    joint = [
        KINDS[ops.REDUCE_REPLICAS].lane in joint_lanes(x.layout, x.hardware)
        for x in units
    ]
    lane = reduce + replicas * joint
    return _Unit(gather * alone, reduce * alone, replicas * alone, lane * alone, update)


def _ends(space: Space, x: Options, s: _Stages, u: _Unit, *, split: bool) -> Array:
    """Seconds of what stands around all computing: the embedding's weights are gathered before, and the
    last unit's gradient is summed behind it, which is the embedding's where the backward is whole; then
    a rank is updated. (ZeRO, 1, pipelines, 1)."""
    sharded = np.array([zero.stage > 0 for zero in x.zeros]) & (
        not space.request.profile.rolls
    )
    each = u.reduce + u.replicas
    last = each.min(axis=0) if split else each[0]
    around = np.where(sharded, u.gather[0], 0.0) + last
    update = _of_units(u.update, s).max(axis=-1)
    return np.asarray(around[:, None, None, None] + update[:, None, :, None])


def _time(
    space: Space,
    x: Options,
    pipes: Sequence[Pipeline],
    s: _Stages,
    n: _Numbers,
    u: _Unit,
    *,
    split: bool,
) -> Array:
    """Seconds, (ZeRO, microbatches, pipelines, inner choices)."""
    hardware = space.request.hardware
    m = np.array(x.counts, float)[:, None, None, None]
    (ef, *bf, hf), (eb, *bb, hb) = n.forward, n.backward
    # Of a block of each kind and a microbatch.
    one = [f + b + again for f, b, again in zip(bf, bb, n.again, strict=True)]
    ends = ef + eb + hf + hb
    # A segment that ends in the head is not recomputed: its forward was just now.
    spared = (n.segment - 1) * _highest(n.again)
    work = _total(s.blocks, one) - np.minimum(
        s.head * spared, _total(s.blocks, n.again)
    )
    # (microbatches, pipelines, inners, ranks).
    work = work + s.embed * (ef + eb) + s.head * (hf + hb)
    # then no stage waits for others to begin or to end
    rolls = space.request.profile.rolls
    later = ((sum(s.before) > 0) | (s.embed == 0)) & (not rolls)
    head = np.where(later, ef + _total(s.before, bf), 0.0)
    back = 0.0 if split else np.where(later, eb + _total(s.before, bb), 0.0)
    work = work + _total(s.blocks, _lost(space, x, n, u, m, split=split))
    path = (head + m * work + back).max(axis=-1)
    # Those of the units of a rank, (ZeRO, 1, pipelines, 1).
    update = _of_units(u.update, s).max(axis=-1)[:, None, :, None]
    sums = _of_units(u.reduce, s).max(axis=-1)[:, None, :, None]
    stage = np.array([zero.stage for zero in x.zeros])
    step = path + _ends(space, x, s, u, split=split)
    often = (stage >= 2)[:, None, None, None]  # summed after every microbatch
    m = m[..., 0]
    lane = m * _of_units(u.lane, s)[:, None]
    if not hardware.cores:
        # Beside them weights are gathered for each forward and backward, but where two that follow
        # each other use the same block.
        twice = _twice(space.request.shape, x.grid.pp, x.counts, tuple(pipes))
        gather = u.gather[1:-1]
        once = _total([each[:, 0] for each in s.blocks], list(gather[..., None, None]))
        fewer = (twice + rolls) * gather.max(axis=0)[:, None, None, None]
        each_use = np.array(
            [zero.gather == "micro" and zero.stage == 3 for zero in x.zeros]
        )
        gathers = np.maximum(2 * m * once[:, None] - fewer, 0.0)
        lane = lane + each_use[:, None, None, None] * gathers
    step = np.where(
        often, np.maximum(step, lane.max(axis=-1)[..., None] + update), step
    )
    if x.grid.pp == 1 and not rolls:
        met = np.array([pipe.overlap for pipe in pipes], float)[:, None]
        for z, zero in enumerate(x.zeros):
            alone = _alone(
                n, zero, u.gather[:, z].tolist(), float(sums[z].max()), m, met
            )
            step[z] = np.maximum(step[z], alone + update[z])
    cores = hardware.cores * x.grid.pp / hardware.ranks if hardware.cores else np.inf
    total = m * (_total(n.layers, one) - spared + ends)[..., 0]
    return np.asarray(np.maximum(step, total / cores))


def _lost(
    space: Space, x: Options, n: _Numbers, u: _Unit, m: Array, *, split: bool
) -> list[Array]:
    """Seconds that a block of each kind loses to messages beside a microbatch, (ZeRO, microbatches, 1,
    inners, 1); in its forward alone where the backward is split, the parts of which are not known before
    they are costed."""
    plain = np.array([not inner.matmul for inner in x.inners])[:, None]
    found = []
    for kind, (ahead, inputs) in enumerate(
        zip(n.forward[1:-1], n.inputs, strict=True), 1
    ):
        both = [_beside(space, zero, u, z, kind, m) for z, zero in enumerate(x.zeros)]
        forward, back = np.array(
            [np.broadcast_arrays(*each, m)[:2] for each in both]
        ).swapaxes(0, 1)
        lost = np.minimum(forward, ahead / (1 - SLOWED))
        lost = lost + (not split) * np.minimum(back, inputs / (1 - SLOWED))
        found.append(np.asarray(SLOWED * plain * lost))
    return found


def _beside(
    space: Space, zero: Zero, u: _Unit, z: int, kind: int, count: Array | float
) -> tuple[Array | float, Array | float]:
    """Seconds of messages beside a forward and a backward of a kind of piece."""
    if not space.request.profile.overlaps_data or space.request.hardware.cores:
        return 0.0, 0.0
    gather, sums = u.gather[kind, z], u.reduce[kind, z] + u.replicas[kind, z]
    each = zero.gather == "micro"
    again = gather * (each and zero.stage == 3)
    return gather / (1 if each else count), again + sums / (
        1 if zero.stage > 1 else count
    )


def _alone(
    n: _Numbers, zero: Zero, gather: Sequence[float], sums: float, m: Array, met: Array
) -> Array:
    """Seconds without the update of a rank that has the whole model, (microbatches, pipelines, inners).
    Two microbatches use `met` blocks at once."""
    (ef, *bf, hf), (eb, *bb, hb) = (
        [a[..., 0] for a in each] for each in (n.forward, n.backward)
    )
    again, segment = [a[..., 0] for a in n.again], n.segment[..., 0]
    one = [f + b + a for f, b, a in zip(bf, bb, again, strict=True)]
    spared = np.minimum((segment - 1) * _highest(again), _total(n.layers, again))
    work = _total(n.layers, one) - spared
    work = work + ef + eb + hf + hb
    first = ef + _total(n.layers, bf) + hf + hb
    embed, *blocks, head = gather
    every = sum(map(operator.mul, n.layers, blocks))
    begin = embed if zero.stage else 0.0
    step = begin + first + (m * sums if zero.stage >= 2 else (m - 1) * work + sums)
    if zero.stage == 3 and zero.gather == "micro":
        each = 2 * (every - met * max(blocks)) + embed + head
        step = np.maximum(step, m * each + eb)
    elif zero.stage:
        after = hf + eb + hb + _total(n.layers, bb)
        once = every + embed + head
        step = np.maximum(step, once + after + (m - 1) * work)
    return np.asarray(step)


def _of_units(each: Array, s: _Stages) -> Array:
    """Summed over the units of a rank, (ZeRO, pipelines, ranks)."""
    embed, *blocks, head = each[:, :, None, None]
    held = s.embed[:, 0] * embed + _total([count[:, 0] for count in s.blocks], blocks)
    return np.asarray(held + s.head[:, 0] * head)


# ---- one candidate: its schedule alone, stage by stage


class _Node(NamedTuple):
    """An operation of a stage: the places of the one before it on its rank and of the one whose value
    it takes (0: none), which of the stages' times it takes, and if the value is a message, which of
    them the one before takes; else -1."""

    before: int
    value: int
    key: int
    beside: int


_NODES = 150_000  # of a schedule that is followed
_USES = 512  # forwards of one of which uses are counted


@lru_cache(maxsize=64)
def _stage_nodes(
    name: str, pp: int, chunks: int, count: int
) -> tuple[tuple[_Node, ...], tuple[tuple[str, int], ...]]:
    """The operations of a schedule in an order in which they can happen, and (kind, stage) of each
    key."""
    rows = _rows(name, pp, count, chunks)
    last, keys = pp * chunks - 1, dict[tuple[str, int], int]()
    rank = {op.piece: r for r, row in enumerate(rows) for op in row}
    place: dict[tuple[bool, int, int], int] = {}  # forward or not, stage, microbatch
    nodes, at, latest = [_Node(0, 0, 0, -1)], [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                op = row[at[r]]
                forward, value, source = op.kind == ops.FORWARD, 0, op.piece
                if op.kind == ops.FORWARD or op.kind in ops.PROPAGATES:
                    source += -1 if forward else 1
                    if 0 <= source <= last:
                        value = place.get((forward, source, op.index), -1)
                    if value < 0:
                        break
                    place[forward, op.piece, op.index] = len(nodes)
                key = keys.setdefault((op.kind, op.piece), len(keys))
                sent = value > 0 and rank[source] != r
                nodes.append(
                    _Node(latest[r], value, key, nodes[latest[r]].key if sent else -1)
                )
                latest[r] = len(nodes) - 1
                at[r] += 1
                moved = True
    return tuple(nodes), tuple(keys)


def _stage_times(
    times: KindTimes,
    messages: Sequence[tuple[Array | float, Array | float]],
    keys: Sequence[tuple[str, int]],
    stages: Sequence[Sequence[int]],
    inner: Inner,
) -> tuple[list[tuple[float, float]], list[float]]:
    """Seconds of every (kind, stage): of what needs no gradient and of the rest, and of its last piece; with
    what is lost to the messages beside a forward and a backward of each kind of piece. `stages` are the
    kinds of their pieces."""

    def slowed(
        t: PieceTimes, beside: tuple[Array | float, Array | float]
    ) -> dict[str, float]:
        times = dict(t.computed)
        for op, took in zip((ops.FORWARD, ops.INPUT_GRADIENT), beside, strict=True):
            times[op] += lost_beside(times[op], float(took))
        return times | {
            ops.BACKWARD: times[ops.INPUT_GRADIENT] + times[ops.WEIGHT_GRADIENT]
        }

    computed = list(map(slowed, times.values, messages))
    repeats = inner.recompute != "none"
    again = [t.again.total * repeats for t in times.values]
    again[0] = again[-1] = 0.0  # the embedding and the head are never recomputed
    most = max(again)
    segment = _segment(inner.recompute)
    counts = [Counter(stage) for stage in stages]

    def seconds(op: str, stage: int) -> tuple[float, float]:
        """Of what needs no gradient, and of the rest."""
        held = counts[stage].items()
        time = sum(n * computed[kind][op] for kind, n in held)
        if op not in ops.PROPAGATES:
            return 0.0, time
        # What a segment with the head computed just now is not computed again.
        final = stage == len(stages) - 1
        repeated = max(
            0.0, sum(n * again[kind] for kind, n in held) - final * segment * most
        )
        return min(repeated, segment * most), time + max(0.0, repeated - segment * most)

    def ending(op: str, stage: int) -> float:
        """Of its last piece."""
        last = stages[stage][-1 if op == ops.FORWARD else 0]
        return computed[last][op]

    return [seconds(*key) for key in keys], [ending(*key) for key in keys]


def followed(
    space: Space,
    x: Options,
    at: tuple[int, int, int, int],
    pricer: Pricer,
    priced: _Unit,
) -> float:
    """Seconds that one candidate takes by its own schedule, with its first gathers and its last sums: no
    program of it is faster. 0 where that is not looked at: without a pipeline, too long, with frozen
    pieces, where steps roll or two microbatches are computed in turn."""
    (z, c, p, q), pp = at, x.grid.pp
    pipe, inner, count, zero = x.pipelines[p], x.inners[q], x.counts[c], x.zeros[z]
    request = space.request
    other = request.profile.rolls or request.hardware.cores
    other = other or pipe.overlap or traits(pipe.schedule).forward_first
    if pp == 1 or other or 3 * pp * pipe.chunks * count > _NODES:
        return 0.0
    layout = space.layout(x, *at)
    cut = space.cut(x.grid, inner, split=layout.splits_backward)
    pieces = pricer.times(cut, space.rows(x.grid, count), True)
    if request.shape.frozen or any(kind.cost.frozen for kind in pieces.values):
        return 0.0
    stages = _kinds_of_stages(_blocks(request.shape, pp, pipe), pieces.kinds)

    def whole(each: Array) -> list[float]:
        """Of the units of each stage together, from those of each kind of piece."""
        return [
            sum(n * float(each[kind]) for kind, n in Counter(s).items()) for s in stages
        ]

    nodes, keys = _stage_nodes(pipe.schedule, pp, pipe.chunks, count)
    # Gathers in 8 bits are shorter than those of `priced`.
    messages = [
        (0.0, 0.0) if inner.matmul else _beside(space, zero, priced, z, kind, count)
        for kind in range(len(pieces.values))
    ]
    times, tails = _stage_times(pieces, messages, keys, stages, inner)
    far = distance(layout, "pp")
    hop = request.hardware.network.seconds("send", pieces[1].cost.edge, pp, far)
    hop *= not request.profile.scatters_sends
    held = ranks_of(len(stages), pp, pipe.schedule)
    # When a stage's weights have been gathered, one unit after the other, if once a step.
    there = [0.0] * len(keys)
    if zero.stage and zero.gather == "step" and not (space.offload or inner.matmul):
        gathers = whole(priced.gather[:, z])
        for key, (kind, stage) in enumerate(keys):
            if kind == ops.FORWARD:
                before = sum(
                    gathers[s]
                    for mine in held
                    if stage in mine
                    for s in mine
                    if s < stage
                )
                there[key] = before + gathers[stage]
    held_by = {stage: rank for rank, mine in enumerate(held) for stage in mine}
    ranks = [held_by[stage] for _, stage in keys]
    # Sums after every microbatch, one unit of a rank after the other, and when its lane is free again.
    lane, free = whole(priced.lane[:, z]), [0.0] * pp
    each = [lane[s] * (zero.stage >= 2 and kind in ops.CONTRIBUTES) for kind, s in keys]
    earliest = [a + b for a, b in zip(there, tails, strict=True)]
    latest = [0.0] * len(keys)
    ends = [float(priced.gather[0, z]) if zero.stage else 0.0]
    # Comparisons in place of `max`, which took half of the time.
    for before_, value, key, beside in nodes[1:]:
        begin, made = ends[before_], ends[value]
        if beside >= 0:
            # It is asked for beside the piece that is computed before, and not earlier.
            asked = begin - tails[beside]
            made = (made if made > asked else asked) + hop
        alone, rest = times[key]
        begin += alone
        if made > begin:
            begin = made
        latest[key] = begin
        end = begin + rest
        ends.append(end if end > earliest[key] else earliest[key])
        if each[key]:
            free[ranks[key]] = max(free[ranks[key]], begin) + each[key]
    # A unit is summed behind its last contribution, the units of a rank one after the other.
    sums, last = whole(priced.reduce[:, z]), max(*ends, *free)
    summed = {
        stage: latest[key]
        for key, (kind, stage) in enumerate(keys)
        if kind in ops.CONTRIBUTES
    }
    for mine in held:
        taken = 0.0
        for stage in sorted(mine, key=lambda s: -summed[s]):
            taken += sums[stage]
            last = max(last, summed[stage] + taken + priced.replicas[:, z].min())
    return float(
        last
        + max(sum(map(whole(priced.update[:, z]).__getitem__, mine)) for mine in held)
    )


@lru_cache(maxsize=64)
def _rows(name: str, pp: int, count: int, chunks: int) -> tuple[tuple[Op, ...], ...]:
    return schedule(name, pp, count, chunks).rows


@lru_cache(maxsize=4096)
def _blocks(shape: Shape, pp: int, pipe: Pipeline) -> tuple[int, ...]:
    mesh = Grid(1, pp, 1, 1, 1, 1, ORDERS[0]).mesh(1)
    plain = Layout(
        mesh=mesh, schedule=pipe.schedule, chunks=pipe.chunks, microbatches=1
    )
    return pipe.stages or blocks_of(plain, shape)


def _kinds_of_stages(
    blocks: Sequence[int], kinds: Sequence[int]
) -> list[tuple[int, ...]]:
    """The kinds of the pieces of each virtual stage, which holds so many blocks."""
    # piece 0 is the embedding
    ends = [1 + count for count in accumulate(blocks, initial=0)]
    ends[0], ends[-1] = 0, len(kinds)
    return [tuple(kinds[a:b]) for a, b in pairwise(ends)]


@lru_cache(maxsize=64)
def _work_before(shape: Shape) -> tuple[int, ...]:
    """Forward work of all blocks before each block."""
    return tuple(accumulate(work_of_pieces(shape)[1:-1], initial=0))


@lru_cache(maxsize=4096)
def _some_ranks(shape: Shape, pp: int, pipe: Pipeline) -> tuple[int, ...]:
    """The ranks of a pipeline that are looked at; see `_Stages`."""
    blocks, work = _blocks(shape, pp, pipe), _work_before(shape)
    ends = list(accumulate(blocks, initial=0))
    each = [work[b] - work[a] for a, b in pairwise(ends)]
    held = ranks_of(len(blocks), pp, pipe.schedule)
    whole = [sum(each[stage] for stage in mine) for mine in held]
    most = [rank for rank, amount in enumerate(whole) if amount == max(whole)]
    return 0, min(1, pp - 1), most[0], most[-1], pp - 1


@lru_cache(maxsize=4096)
def _stages(
    shape: Shape, kinds: tuple[int, ...], pp: int, pipes: tuple[Pipeline, ...]
) -> _Stages:
    held = [_held_by_ranks(shape, kinds, pp, pipe) for pipe in pipes]
    slots = max(len(each.shares) for some in held for each in some)

    def array(of: Callable[[_Held], object]) -> Array:
        """Of every rank, (..., pipelines, 1, ranks)."""
        found = np.array([[of(each) for each in some] for some in held], float)
        return np.moveaxis(found, (0, 1), (-2, -1))[..., None, :]

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
    """What one rank of a pipeline holds: blocks of each kind, and the parts of them in its stages."""

    blocks: tuple[int, ...]
    embed: bool
    head: bool
    before: tuple[int, ...]
    shares: list[tuple[float, ...]]


def _held_by_ranks(
    shape: Shape, kinds: tuple[int, ...], pp: int, pipe: Pipeline
) -> list[_Held]:
    stages = _kinds_of_stages(_blocks(shape, pp, pipe), kinds)
    of_blocks = range(1, max(kinds))
    counts = [[stage.count(kind) for kind in of_blocks] for stage in stages]
    every = ranks_of(len(stages), pp, pipe.schedule)
    found = []
    for mine in (every[rank] for rank in _some_ranks(shape, pp, pipe)):
        shares = [
            tuple(n / sum(counts[s]) for n in counts[s]) for s in mine if sum(counts[s])
        ]
        nothing = [tuple(float(kind == 1) for kind in of_blocks)]  # of no block
        blocks = tuple(
            sum(counts[stage][n] for stage in mine) for n in range(len(of_blocks))
        )
        earlier = counts[: min(mine)]
        before = tuple(
            sum(stage[n] for stage in earlier) for n in range(len(of_blocks))
        )
        ends = 0 in mine, len(stages) - 1 in mine
        found.append(_Held(blocks, *ends, before, shares or nothing))
    return found


@lru_cache(maxsize=1024)
def _twice(
    shape: Shape, pp: int, counts: tuple[int, ...], pipes: tuple[Pipeline, ...]
) -> Array:
    """Upper bound on how often a rank uses a block's weights twice in a row: (microbatches,
    pipelines, ranks)."""
    found = []
    for count, pipe in product(counts, pipes):
        blocks, some = _blocks(shape, pp, pipe), _some_ranks(shape, pp, pipe)
        turns = pipe.overlap or traits(pipe.schedule).forward_first
        if turns or pipe.chunks == 1 or pp * pipe.chunks * count > _USES:
            # Two microbatches that stand beside each other meet in a block once more.
            found.append([2.0 * pipe.chunks * (1 + pipe.overlap) * count] * len(some))
            continue
        rows = _rows(pipe.schedule, pp, count, pipe.chunks)
        found.append([float(_used_twice(rows[rank], blocks)) for rank in some])
    return np.array(found).reshape(len(counts), len(pipes), -1)


def _used_twice(row: Sequence[Op], blocks: Sequence[int]) -> int:
    uses = (
        (op.piece, op.kind == ops.FORWARD) for op in row if op.kind in ops.USES_WEIGHTS
    )
    # A forward ends with the block that a backward begins with, and the other way round.
    return sum(
        a == b and (x != y or blocks[a] < 2) for (a, x), (b, y) in pairwise(uses)
    )


class Moment(NamedTuple):
    """Blocks that a rank's schedule has open at once."""

    opened: float = 0.0  # their forwards wait for their backward
    waiting: float = 0.0  # their input gradient waits for the weights'
    there: bool = False  # weights that are gathered once a step, of all stages
    whole: float = 0.0  # gradients that further contributions will be added to
    # units whose gradient is used or on its way, if summed every microbatch
    summing: float = 0.0


@lru_cache(maxsize=4096)
def in_flight(
    name: str,
    pp: int,
    chunks: int,
    count: int,
    blocks: tuple[int, ...],
    ranks: tuple[int, ...],
) -> tuple[tuple[Moment, ...], ...]:
    """For each of the ranks the moments with the most blocks opened, with the most opened or waiting, and
    with the most waiting; then the same once every stage of the rank has begun a gradient."""
    found = {}
    rows = _rows(name, pp, count, chunks)
    for rank in {*ranks}:
        row = _freed_first(rows[rank]) if traits(name).forward_first else rows[rank]
        split = any(op.kind == ops.WEIGHT_GRADIENT for op in row)
        uses = Counter(op.piece for op in row if op.kind in ops.USES_WEIGHTS)
        unused, missing, whole = set(uses), set(uses), set[int]()
        ended, latest = False, -1
        opened = waiting = under_way = 0
        most = [Moment()] * 6
        for op in row:
            size, current = blocks[op.piece], 0
            if op.kind in ops.USES_WEIGHTS:
                uses[op.piece] -= 1
            # In a pipeline the head's are dropped before the last backward of its stage's blocks.
            left = uses[op.piece] - (op.kind == ops.FORWARD)
            dropped = pp > 1 and op.piece == len(blocks) - 1 and left < 1
            begun = not missing
            if op.kind == ops.FORWARD:
                opened += size
                unused.discard(op.piece)
            elif op.kind in ops.PROPAGATES:
                # Before it gives back what its forward kept; or, if split, after it.
                opened -= size * split
                waiting += size * split
                current = int(not split)
                missing.discard(op.piece)
                whole |= {op.piece} if split else set()
                begun = begun if not split else not missing
            else:
                waiting -= size
                whole.discard(op.piece)
            there = not (unused or ended or dropped)
            gradients = float(sum(blocks[piece] for piece in whole))
            now = Moment(opened, waiting, there, gradients, under_way + current)
            # then nothing is computed again
            factored = split and op.kind in ops.PROPAGATES
            for n, size_ in enumerate((opened, opened + waiting, waiting)):
                if factored and n < 2:
                    continue
                for at in (n, n + 3) if begun else (n,):
                    m = most[at]
                    other = (m.opened, m.opened + m.waiting, m.waiting)[n]
                    if (size_, *now[2:]) > (other, *m[2:]):
                        most[at] = now
            if op.kind in ops.PROPAGATES and not split:
                opened -= size
            if op.kind in ops.CONTRIBUTES:
                # The third sum waits for the first, and one of the same unit for that before it.
                under_way = min(
                    IN_FLIGHT, max(size, 1) + (latest not in (-1, op.piece))
                )
                latest = op.piece
            ended = ended or not uses[op.piece]
        found[rank] = tuple(most)
    return tuple(found[rank] for rank in ranks)


def _freed_first(row: Sequence[Op]) -> list[Op]:
    """A row in which a forward that a backward stands beside comes after it: part by part, they never
    have less open than this."""
    out: list[Op] = []
    for op in row:
        last = out[-1] if out else op
        if (
            last.kind == ops.FORWARD
            and op.kind in ops.PROPAGATES
            and op.piece != last.piece
        ):
            out.insert(-1, op)
        else:
            out.append(op)
    return out


@lru_cache(maxsize=1024)
def _flights(
    shape: Shape, pp: int, counts: tuple[int, ...], pipes: tuple[Pipeline, ...]
) -> Array:
    """`in_flight` as an array (moments, its five fields, microbatches, pipelines, 1, ranks). More
    microbatches never have less open."""
    counts = tuple(2 * pp if c >= 2 * pp else min(c, pp) for c in counts)
    each = []
    for pipe in pipes:
        blocks, some = _blocks(shape, pp, pipe), _some_ranks(shape, pp, pipe)
        each.append(
            [in_flight(pipe.schedule, pp, pipe.chunks, m, blocks, some) for m in counts]
        )
    return np.array(each).transpose(3, 4, 1, 0, 2)[..., None, :]


def _memory(
    space: Space,
    x: Options,
    s: _Stages,
    n: _Numbers,
    flight: Array,
    units: Sequence[Units],
) -> Array:
    """Bytes of the fullest rank, (ZeRO, microbatches, pipelines, inner choices)."""
    p, cores = space.request.profile, space.request.hardware.cores
    # Kept whole; or the inputs of segments, one of which has been computed again.
    opened, waiting, there, whole, summing = flight.swapaxes(0, 1)
    again = np.array([1.0, 1.0, 0.0] * 2).reshape(-1, *[1] * (opened.ndim - 1))
    input_, kept_whole = _per_block(n.input, s), _per_block(n.kept, s)
    inputs = np.maximum(opened / n.segment - 1, 0.0) * input_
    inputs = (
        inputs + again * n.segment * _lowest(n.repeated) - (_highest(n.input) - input_)
    )
    kept = np.where(n.whole, np.where(opened > 0, inputs, 0.0), opened * kept_whole)
    kept = kept + waiting * _per_block(n.kept_after_i, s) + n.temporary
    begun = opened[3:] + waiting[3:] > 0  # every unit has a gradient
    numbers, still, every, routed = (
        _total(s.blocks, each[1:-1]) + s.embed * each[0] + s.head * each[-1]
        for each in (n.trained, n.frozen, n.weights, n.experts)
    )
    # A frozen embedding has no backward, and is dropped after its last forward.
    used = every - s.embed * n.weights[0] * (n.trained[0] == 0)
    block = min(n.trained[1:-1])
    experts = any(n.experts)
    held = []
    for zero, unit in zip(x.zeros, units, strict=True):
        part = unit.shards if zero.stage else 1.0
        # Ranks of ep do not share experts: their shards are so many fewer.
        few = part / x.grid.ep if zero.stage else 1.0
        cut = numbers + (part / few - 1) * routed
        each = held_bytes(unit.layout, p.state)
        always = cut * each.optimizer + numbers * each.weight + still * each.frozen
        shards = cut * (each.gradient_shard or each.gradient)
        gradients = shards if zero.stage >= 2 and part > 1 else numbers * each.gradient
        then = kept
        bucket = p.bucket if zero.stage == 3 and p.bucket else np.inf
        if zero.stage >= 2 and part > 1:
            # Beside the shards, which are there from a unit's first sum.
            beside = max(
                0.0, p.reduce_bytes - p.gradient_bytes / (few if experts else part)
            )
            sums = np.maximum(summing - 1, 0.0) if unit.replicas > 1 else summing
            whole_ = whole * min(block, bucket)
            then = then + (whole_ + sums * min(*n.trained, bucket)) * beside
        if zero.stage == 3:
            always = always + min(*n.weights, bucket) * p.gathered_bytes
            if zero.gather == "step" and bucket == np.inf:
                then = then + there * (used - min(n.weights)) * p.gathered_bytes
        late = (then[3:] + begun * gradients).max(axis=0)
        most = np.maximum(then[:3].max(axis=0), late)
        held.append((always + np.maximum(most, shards)).max(axis=-1))
    fullest = np.array(held)
    return fullest if cores else np.asarray(p.context + p.reserve * fullest)


def _per_block(each: Sequence[Array], s: _Stages) -> Array:
    """Bytes of a block in the mean of a stage, from those of each kind: of a rank's stages the least."""
    if len(each) == 1:
        return each[0]
    return _lowest(_total(shares, each) for shares in s.shares)
