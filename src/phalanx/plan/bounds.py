"""Lower bounds of time and memory, for all candidates of a grid at once: what a search screens with.

A bound never exceeds what simulating the candidate's program gives. Time: some rank has to do its
work, after the first microbatch has come through the stages before it, and its last one has to go
back through them; a lane has to carry all its messages. Memory: what a rank always holds, and the
forwards that its schedule has open at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, Shape
from ..layout.choices import traits
from ..program import ops, schedule
from .price import OpTime
from .space import ORDERS, Grid, Inner, Options, Pipeline, Space, Zero, blocks_of, ranks_of
from .step import Pricer, Three, Units

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bounds:
    """Of one grid's candidates, arrays over (ZeRO, microbatches, pipeline, inner choices): seconds
    of a step, bytes of the fullest rank."""

    step: Array
    bytes: Array


@dataclass(frozen=True)
class _Stages:
    """A pipeline's ranks, an array each: what they hold, and what comes before them."""

    blocks: Array
    embed: Array  # 1 where the embedding is
    head: Array
    before: Array  # blocks of the stages before the first of the rank


def bounds(space: Space, x: Options, pricer: Pricer) -> Bounds:
    """Of all candidates of a grid. What is not costed yet is bounded by what is."""
    split = [traits(pipe.schedule).splits_backward for pipe in x.pipelines]
    three = [[[None, None] for _ in x.inners] for _ in x.counts]
    for c, count in enumerate(x.counts):
        for q, inner in enumerate(x.inners):
            rows = space.rows(x.grid, count)
            for s in {*split}:
                three[c][q][s] = _least(space, pricer, x.grid, inner, rows, s)  # type: ignore[call-overload]
    step, held = np.zeros(x.sizes), np.zeros(x.sizes)
    units = [_units(space, x.grid, zero) for zero in x.zeros]
    priced: list[_Unit] = []
    for p, pipe in enumerate(x.pipelines):
        stages = _stages(space.request.shape, x.grid.pp, pipe)
        picked = [
            [three[c][q][split[p]] for q in range(len(x.inners))] for c in range(len(x.counts))
        ]
        numbers = _Numbers(picked, x.inners)  # type: ignore[arg-type]
        priced = priced or [_priced(unit, numbers.weights) for unit in units]
        time = _Time(space, x, pipe, stages, numbers, split[p])
        flight = _flights(space, x, pipe)
        for z, zero in enumerate(x.zeros):
            step[z, :, p] = time.of(zero, priced[z])
            held[z, :, p] = _memory(space, x, zero, stages, numbers, flight, units[z])
    return Bounds(step, held)


def _least(
    space: Space, pricer: Pricer, grid: Grid, inner: Inner, rows: float, split: bool
) -> Three:
    """Embedding, block and head, exact when the cut is costed and else no slower than they are: a
    cut without context parallelism, without selective recomputation and with its backward whole
    computes as much, and what it leaves out only costs time."""
    exact, piped = space.cut(grid, inner, split=split), grid.pp > 1
    if pricer.known(exact):
        return pricer.three(exact, rows, piped)
    near = grid._replace(ring=1, ulysses=1)
    selective = inner.recompute == "selective"
    for kept, parted in ((inner, split), (inner, False), (inner._replace(recompute="none"), False)):
        cut = space.cut(near, kept, split=parted)
        if pricer.known(cut):
            break
    embed, block, head = pricer.three(cut, rows / grid.cp, piped)
    if selective and kept.recompute != "selective":
        least = min(block.input, block.kept)
        block = replace(block, again=OpTime(), kept=least, kept_after_i=0.0, selected=least)
    return embed, block, head


class _Numbers:
    """Times and sizes of embedding, block and head, arrays over (microbatches, inner choices)."""

    def __init__(self, three: Sequence[Sequence[Three]], inners: Sequence[Inner]) -> None:
        def array(kind: int, of: str) -> Array:
            return np.array([[_number(t[kind], of) for t in row] for row in three])

        self.forward = [array(kind, "forward") for kind in range(3)]
        self.backward = [array(kind, "backward") for kind in range(3)]
        self.kept = [array(kind, "kept") for kind in range(3)]
        self.temporary = [array(kind, "temporary") for kind in range(3)]
        self.weights = [float(_number(three[0][0][kind], "weights")) for kind in range(3)]
        part = np.array([inner.recompute == "selective" for inner in inners])
        self.input = np.where(part, array(1, "selected"), array(1, "input"))
        self.kept_after_i = array(1, "kept_after_i")
        again = np.array([float(inner.recompute != "none") for inner in inners])
        self.again = array(1, "again") * again
        self.segment = np.array([_segment(inner.recompute) for inner in inners])
        self.whole = np.array([inner.recompute != "none" for inner in inners])


def _number(piece: object, name: str) -> float:
    value = getattr(piece, name)
    return value.total if isinstance(value, OpTime) else float(value)


def _segment(recompute: str) -> float:
    return float(recompute[6:]) if recompute.startswith("every=") else 1.0


@dataclass(frozen=True)
class _Unit:
    """Seconds of the collectives of embedding, block and head."""

    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    replicas: tuple[float, ...]
    update: tuple[float, ...]


def _units(space: Space, grid: Grid, zero: Zero) -> Units:
    r = space.request
    layout = Layout(mesh=grid.mesh(zero.shards), zero=zero.stage, offload=space.offload)
    return Units(layout, r.hardware, r.profile)


def _priced(units: Units, weights: Sequence[float]) -> _Unit:
    alone = 1.0 / units.hardware.crowding
    each = [units.of(n) for n in weights]
    return _Unit(
        tuple(u.gather * alone for u in each),
        tuple(u.reduce * alone for u in each),
        tuple(u.replicas * alone for u in each),
        tuple(u.update for u in each),
    )


class _Time:
    """Bounds of a pipeline's time on one grid, for each way to shard."""

    def __init__(
        self, space: Space, x: Options, pipe: Pipeline, s: _Stages, n: _Numbers, split: bool
    ) -> None:
        self.stages, self.numbers, self.pp = s, n, x.grid.pp
        self.counts = np.array(x.counts, float)[:, None]
        hardware = space.request.hardware
        self.cores = hardware.cores * x.grid.pp / hardware.ranks if hardware.cores else np.inf
        (ef, bf, hf), (eb, bb, hb) = n.forward, n.backward
        one = bb + n.again
        # Of one microbatch on each rank, (ranks, microbatches, inners).
        wide = (slice(None), None, None)
        # A segment that ends in the head is not recomputed: its forward was just now.
        spared = s.head[wide] * (n.segment - 1) * n.again
        self.work = s.blocks[wide] * (bf + one) - np.minimum(spared, s.blocks[wide] * n.again)
        self.work = self.work + s.embed[wide] * (ef + eb) + s.head[wide] * (hf + hb)
        later = (s.before > 0)[wide] | (s.embed == 0)[wide]
        self.head = np.where(later, ef + s.before[wide] * bf, 0.0)
        back = 0.0 if split else np.where(later, eb + s.before[wide] * bb, 0.0)
        self.path = (self.head + self.counts * self.work + back).max(axis=0)
        self.total = (self.counts * self.work).sum(axis=0)
        self.first = ef + s.blocks.sum() * bf + hf + hb if x.grid.pp == 1 else None
        self.split = split

    def of(self, zero: Zero, u: _Unit) -> Array:
        s, n, m = self.stages, self.numbers, self.counts
        update = float(
            (s.blocks * u.update[1] + s.embed * u.update[0] + s.head * u.update[2]).max()
        )
        ends = [a + b for a, b in zip(u.reduce, u.replicas, strict=True)]
        last = min(ends) if self.split else ends[0]
        gathers = zero.stage > 0
        begin = u.gather[0] if gathers else 0.0
        found = [self.path + begin + last + update]
        every = s.blocks * u.reduce[1] + s.embed * u.reduce[0] + s.head * u.reduce[2]
        if zero.stage >= 2:  # summed after every microbatch
            found.append(m * every.max() + update)
        if self.first is not None:
            (work,) = self.work
            sums = float(every.sum())
            if zero.stage >= 2:
                found.append(begin + self.first + m * sums + update)
            else:
                found.append(begin + (m - 1) * work + self.first + sums + update)
            blocks = float(s.blocks.sum())
            if zero.stage == 3 and zero.gather == "micro":
                once = 2 * blocks * u.gather[1] + u.gather[0] + u.gather[2]
                found.append(m * once + n.backward[0] + update)
            elif gathers:
                once = blocks * u.gather[1] + u.gather[0] + u.gather[2]
                after = n.forward[2] + n.backward[0] + n.backward[2] + blocks * n.backward[1]
                found.append(once + after + (m - 1) * work + update)
        step = np.maximum.reduce([np.broadcast_to(each, self.path.shape) for each in found])
        return np.asarray(np.maximum(step, self.total / self.cores))


@lru_cache(maxsize=4096)
def _blocks(shape: Shape, pp: int, pipe: Pipeline) -> tuple[int, ...]:
    mesh = Grid(1, pp, 1, 1, 1, ORDERS[0]).mesh(1)
    plain = Layout(mesh=mesh, schedule=pipe.schedule, chunks=pipe.chunks, microbatches=1)
    return pipe.stages or blocks_of(plain, shape)


@lru_cache(maxsize=4096)
def _stages(shape: Shape, pp: int, pipe: Pipeline) -> _Stages:
    blocks = _blocks(shape, pp, pipe)
    before = np.concatenate([[0.0], np.cumsum(blocks)])
    held = ranks_of(len(blocks), pp, pipe.schedule)
    return _Stages(
        np.array([float(sum(blocks[s] for s in each)) for each in held]),
        np.array([float(0 in each) for each in held]),
        np.array([float(len(blocks) - 1 in each) for each in held]),
        np.array([float(before[min(each)]) for each in held]),
    )


@lru_cache(maxsize=4096)
def in_flight(
    name: str, pp: int, chunks: int, count: int, blocks: tuple[int, ...]
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each rank, what its schedule has open at four moments: blocks whose forwards wait for
    their backward, and blocks whose input gradient waits for the weights'.

    The moments with the most of the first and of both; then the same once every stage of the rank
    has begun a gradient.
    """
    found = []
    for row in schedule(name, pp, count, chunks).rows:
        split = any(op.kind == ops.WEIGHT_GRADIENT for op in row)
        missing = {op.piece for op in row}
        opened = waiting = 0
        most: list[tuple[float, float]] = [(0.0, 0.0)] * 4
        for op in row:
            size = blocks[op.piece]
            if op.kind == ops.FORWARD:
                opened += size
            elif op.kind in ops.PROPAGATES:
                opened -= size
                waiting += size * split
                missing.discard(op.piece)
            else:
                waiting -= size
            now = float(opened), float(waiting)
            for n in (0, 1) if missing else (0, 1, 2, 3):
                more = now[0] - most[n][0] if n % 2 == 0 else sum(now) - sum(most[n])
                if more > 0:
                    most[n] = now
        found.append(tuple(most))
    return tuple(found)


def _flights(space: Space, x: Options, pipe: Pipeline) -> Array:
    """`in_flight` as an array (moments, two kinds, ranks, microbatches, 1). More microbatches never
    have less open."""
    pp = x.grid.pp
    blocks = _blocks(space.request.shape, pp, pipe)
    counts = [2 * pp if c >= 2 * pp else min(c, pp) for c in x.counts]
    each = [in_flight(pipe.schedule, pp, pipe.chunks, c, blocks) for c in counts]
    return np.array(each).transpose(2, 3, 1, 0)[..., None]


def _memory(
    space: Space, x: Options, zero: Zero, s: _Stages, n: _Numbers, flight: Array, units: Units
) -> Array:
    """Bytes of the fullest rank."""
    p, part = space.request.profile, units.shards if zero.stage else 1.0
    wide = (slice(None), None, None)
    numbers = s.blocks * n.weights[1] + s.embed * n.weights[0] + s.head * n.weights[2]
    optimizer = 0.0 if space.offload else p.optimizer_bytes / part
    always = numbers * (optimizer + (0.0 if zero.stage == 3 else p.weight_bytes))
    micro = zero.stage >= 2 and part > 1
    gradients = numbers * p.gradient_bytes / (part if micro else 1.0)
    if zero.stage == 3:
        least = min(n.weights)
        gathered = numbers if zero.gather == "step" and x.grid.pp == 1 else least
        always = always + gathered * p.gathered_bytes
    shards = (numbers * p.gradient_bytes / part)[wide]
    used = [shards]
    for moment, (opened, waiting) in enumerate(flight):
        # Kept whole; or the inputs of segments, one of which has been computed again.
        inputs = np.maximum(opened / n.segment - 1, 0.0) * n.input + n.segment * n.kept[1]
        kept = np.where(n.whole, np.where(opened > 0, inputs, 0.0), opened * n.kept[1])
        kept = kept + waiting * n.kept_after_i
        begun = (opened + waiting > 0) * (moment >= 2)  # every unit has a gradient
        used.append(kept + np.minimum(*n.temporary[1:]) + begun * gradients[wide])
    most = always[wide] + np.maximum.reduce(np.broadcast_arrays(*used))
    if space.request.hardware.cores:
        return np.asarray(most.max(axis=0))
    return np.asarray((p.context + p.reserve * most).max(axis=0))
