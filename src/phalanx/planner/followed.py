"""A lower bound of one candidate's time from its own schedule, walked stage by stage.

A search asks for it before it builds the candidate's program. Here a stage is one
operation, where the program has one for each piece, message, gather and sum: a tenth of
the operations, and no passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..layout import Shape
from ..program import ops, schedule
from .bounds import (
    Array,
    CollectiveTimes,
    Exchanges,
    beside_computing,
    blocks_of_pipeline,
    exchanged_bytes,
    exchanges,
    kinds_of_stages,
    segment_blocks,
    waits_for_tokens,
)
from .case import ranks_of
from .hardware import lost_beside
from .piece_price import KindTimes, PieceTimes
from .price import distance
from .space import Inner, Options, Pipeline, Space
from .step import Pricer

_NODES = 150_000  # the most in a schedule that is followed


class _Nodes(NamedTuple):
    """Operations of stages as columns, fast to walk; place 0 is the step's start."""

    before: list[int]  # the place of the previous operation on the rank
    # The place of the operation whose value it takes; 0: none.
    value: list[int]
    key: list[int]  # the index of its times
    # if the value is a message, the key of the previous operation; otherwise -1
    beside: list[int]


_Key = tuple[str, int]  # a kind of operation, and its stage


@lru_cache(maxsize=64)
def _stage_nodes(
    name: str, pp: int, chunks: int, count: int
) -> tuple[_Nodes, tuple[_Key, ...]]:
    """A schedule's operations in a possible order, and each key's (kind, stage)."""
    rows = schedule(name, pp, count, chunks).rows
    last_stage, keys = pp * chunks - 1, dict[_Key, int]()
    rank_of = {op.piece: rank for rank, row in enumerate(rows) for op in row}
    # by (forward or not, stage, microbatch)
    place: dict[tuple[bool, int, int], int] = {}
    nodes = _Nodes([0], [0], [0], [-1])
    # In rounds, run each rank's list up to the first operation whose value
    # does not exist yet.
    at, latest = [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                op = row[at[rank]]
                forward, value, source = op.kind == ops.FORWARD, 0, op.piece
                if forward or op.kind in ops.PROPAGATES:
                    # A forward takes its value from the stage before, an input
                    # gradient from the one after.
                    source += -1 if forward else 1
                    if 0 <= source <= last_stage:
                        value = place.get((forward, source, op.index), -1)
                    if value < 0:
                        break
                    place[forward, op.piece, op.index] = len(nodes.key)
                key = keys.setdefault((op.kind, op.piece), len(keys))
                before = latest[rank]
                # A value from the same rank needs no message; place 0 is the
                # step's start.
                sent = value > 0 and rank_of[source] != rank
                latest[rank] = len(nodes.key)
                nodes.beside.append(nodes.key[before] if sent else -1)
                nodes.before.append(before)
                nodes.value.append(value)
                nodes.key.append(key)
                at[rank] += 1
                moved = True
    return nodes, tuple(keys)


class _FollowedStages(NamedTuple):
    """The stages of a pipeline: pieces of each kind, and the kinds at the ends."""

    counts: tuple[Counter[int], ...]
    table: Array  # the same as (stages, kinds)
    first: tuple[int, ...]
    last: tuple[int, ...]
    held: tuple[tuple[int, ...], ...]  # the stages of each rank
    like: tuple[
        int, ...
    ]  # the first stage with the same pieces; the last is its own


@lru_cache(maxsize=512)
def _stages_of(
    shape: Shape, kinds: tuple[int, ...], pp: int, pipe: Pipeline
) -> _FollowedStages:
    stages = kinds_of_stages(blocks_of_pipeline(shape, pp, pipe), kinds)
    every = range(max(kinds) + 1)
    final = len(stages) - 1
    table = [[stage.count(kind) for kind in every] for stage in stages]
    return _FollowedStages(
        counts=tuple(map(Counter, stages)),
        table=np.array(table, float),
        first=tuple(stage[0] for stage in stages),
        last=tuple(stage[-1] for stage in stages),
        held=ranks_of(len(stages), pp, pipe.schedule),
        like=(*map(stages.index, stages[:final]), final),
    )


class _StageTimes(NamedTuple):
    """Seconds of every key: work that needs no gradient, the rest, and its last piece."""

    alone: list[float]
    rest: list[float]
    ending: list[float]


def _stage_times(
    times: KindTimes,
    messages: Sequence[tuple[Array | float, Array | float]],
    tokens: Sequence[Exchanges],
    keys: Sequence[_Key],
    stages: _FollowedStages,
    inner: Inner,
) -> _StageTimes:
    """The times of every key, including losses to messages beside each kind of piece."""

    def slowed(
        piece: PieceTimes, beside: tuple[Array | float, Array | float]
    ) -> dict[str, float]:
        # Only forwards and input gradients compute beside gathers and sums.
        seconds = dict(piece.computed)
        for kind, took in zip(
            (ops.FORWARD, ops.INPUT_GRADIENT), beside, strict=True
        ):
            seconds[kind] += lost_beside(seconds[kind], float(took))
        backward = seconds[ops.INPUT_GRADIENT] + seconds[ops.WEIGHT_GRADIENT]
        return seconds | {ops.BACKWARD: backward}

    # One table of seconds for each kind of piece.
    computed = list(map(slowed, times.values, messages))
    repeats = inner.recompute != "none"
    recompute = [piece.recompute.total * repeats for piece in times.values]
    recompute[0] = recompute[-1] = (
        0.0  # embedding and head are never recomputed
    )
    segment = segment_blocks(inner.recompute) * max(recompute)
    final = len(stages.counts) - 1

    def of(op: str, stage: int) -> tuple[float, float, float]:
        held = stages.counts[stage].items()
        seconds = sum(number * computed[kind][op] for kind, number in held)
        repeated = 0.0
        if op == ops.FORWARD:
            seconds += sum(
                number * tokens[kind].forward for kind, number in held
            )
        if op in ops.PROPAGATES:
            seconds += sum(
                number * tokens[kind].backward for kind, number in held
            )
            # A segment with the head is not recomputed, as it has just been computed.
            repeated = sum(number * recompute[kind] for kind, number in held)
            repeated = max(0.0, repeated - (stage == final) * segment)
        # Recomputing one segment needs no gradient, so it may begin before the
        # gradient arrives.
        alone = min(repeated, segment)
        rest = seconds + max(0.0, repeated - segment)
        # A forward ends in the stage's last piece, a backward in its first.
        end = stages.last if op == ops.FORWARD else stages.first
        return alone, rest, computed[end[stage]][op]

    # Most stages hold the same pieces, so each kind of stage is timed once.
    known: dict[tuple[str, int], tuple[float, float, float]] = {}
    found = []
    for op, stage in keys:
        key = op, stages.like[stage]
        if key not in known:
            known[key] = of(op, stage)
        found.append(known[key])
    return _StageTimes(*map(list, zip(*found, strict=True)))


def followed(
    space: Space,
    options: Options,
    at: tuple[int, int, int, int],
    pricer: Pricer,
    collectives: CollectiveTimes,
) -> float:
    """Seconds of a candidate by its own schedule, with its first gathers and last sums.

    No program of it is faster. 0 if its schedule is not followed: without a pipeline,
    too long, with frozen pieces, or if steps roll or two microbatches are computed in
    turn.
    """
    way, counted, piped, chosen = at
    pipe, inner = options.pipelines[piped], options.inners[chosen]
    zero, count = options.zeros[way], options.counts[counted]
    request, pp = space.request, options.grid.pp
    if not _looked_at(space, pipe, pp, count):
        return 0.0
    layout = space.layout(options, *at)
    cut = space.cut(options.grid, inner, split=layout.splits_backward)
    pieces = pricer.times(cut, space.rows(options.grid, count), True)
    if request.shape.frozen or any(kind.cost.frozen for kind in pieces.values):
        return 0.0
    stages = _stages_of(request.shape, pieces.kinds, pp, pipe)
    held = stages.held
    nodes, keys = _stage_nodes(pipe.schedule, pp, pipe.chunks, count)
    # Gathers in 8 bits are shorter than those of `collectives`.
    messages = [
        (0.0, 0.0)
        if inner.matmul
        else beside_computing(space, zero, collectives, way, kind, count)
        for kind in range(len(pieces.values))
    ]
    part = inner.recompute == "selective"
    tokens = [
        exchanges(
            layout,
            request,
            exchanged_bytes(piece),
            piece.recompute.total * part,
        )
        for piece in pieces.values
    ]
    times = _stage_times(pieces, messages, tokens, keys, stages, inner)
    far = distance(layout, "pp")
    hop = request.hardware.network.seconds(
        "send", pieces[1].cost.edge, pp, far
    )
    # Ranks of tp that send only their share need less: this bounds it by 0.
    hop *= not request.profile.scatters_sends
    units = _of_stages(stages.table, collectives, way)
    first_gather = float(collectives.gather[0, way]) if zero.stage else 0.0
    once = zero.stage and zero.gather == "step"
    # Weights from the host or in 8 bits are gathered in other times than
    # `collectives` has.
    whole = once and not (space.offload or inner.matmul)
    gathered = (
        _gathered(keys, held, units.gather) if whole else [0.0] * len(keys)
    )
    often = zero.stage >= 2
    # ZeRO-2 and 3 sum after every contribution, ZeRO-0 and 1 once at the end.
    lanes = [
        units.lane[stage] * (often and kind in ops.CONTRIBUTES)
        for kind, stage in keys
    ]
    walked = _walk(
        nodes, keys, times, held, gathered, lanes, hop, first_gather
    )
    last = _summed(walked, keys, held, units, collectives, way)
    return float(
        last + max(sum(units.update[stage] for stage in mine) for mine in held)
    )


def _looked_at(space: Space, pipe: Pipeline, pp: int, count: int) -> bool:
    """True if schedules like this one are followed."""
    request = space.request
    other = request.profile.no_step_barrier or request.hardware.cores
    other = other or not waits_for_tokens(pipe)
    # Three operations for each microbatch and virtual stage: F, I and W.
    return pp > 1 and not other and 3 * pp * pipe.chunks * count <= _NODES


class _StageUnits(NamedTuple):
    """Seconds of the collectives and the updates of each stage's units together."""

    gather: list[float]
    reduce: list[float]
    lane: list[float]
    update: list[float]


def _of_stages(
    stages: Array, collectives: CollectiveTimes, way: int
) -> _StageUnits:
    every = (
        collectives.gather,
        collectives.reduce,
        collectives.lane,
        collectives.update,
    )
    return _StageUnits(*((stages @ each[:, way]).tolist() for each in every))


_Held = Sequence[Sequence[int]]  # the stages of each rank


def _gathered(
    keys: Sequence[_Key], held: _Held, gathers: Sequence[float]
) -> list[float]:
    """Seconds until a stage's weights are gathered, unit by unit, if once per step."""
    rank_of = {stage: mine for mine in held for stage in mine}
    found = [0.0] * len(keys)
    # Units are gathered in the order of the rank's stages, one after the
    # other.
    for key, (kind, stage) in enumerate(keys):
        if kind == ops.FORWARD:
            earlier = (other for other in rank_of[stage] if other <= stage)
            found[key] = sum(gathers[other] for other in earlier)
    return found


class _Walked(NamedTuple):
    """The end of a schedule and of its sums, and the last start of each key."""

    end: float
    latest: list[float]


def _walk(
    nodes: _Nodes,
    keys: Sequence[_Key],
    times: _StageTimes,
    held: _Held,
    gathered: Sequence[float],
    lanes: Sequence[float],
    hop: float,
    first: float,
) -> _Walked:
    """Start every operation as soon as its rank, its value and its weights are ready.

    `lanes` are sums after every microbatch, one unit of a rank after the other.
    """
    held_by = {stage: rank for rank, mine in enumerate(held) for stage in mine}
    ranks, free = [held_by[stage] for _, stage in keys], [0.0] * len(held)
    alone, rest, ending = times
    # No stage's last piece can start before all its weights are gathered.
    earliest = [
        there + took for there, took in zip(gathered, ending, strict=True)
    ]
    latest, ends = [0.0] * len(keys), [first]
    # Comparisons instead of `max`, which took half of the time.
    for before, value, key, beside in islice(
        zip(*nodes, strict=True), 1, None
    ):
        begin, made = ends[before], ends[value]
        if beside >= 0:
            # The message is requested beside the piece computed before, and not
            # earlier.
            asked = begin - ending[beside]
            made = (made if made > asked else asked) + hop
        # Recomputation first: it waits for the rank alone, not for the value.
        begin += alone[key]
        if made > begin:
            begin = made
        latest[key] = begin
        end = begin + rest[key]
        ends.append(end if end > earliest[key] else earliest[key])
        # One lane of a rank carries its sums in turn; none begins before its
        # contribution.
        if lanes[key]:
            rank = ranks[key]
            free[rank] = max(free[rank], begin) + lanes[key]
    return _Walked(max(*ends, *free), latest)


def _summed(
    walked: _Walked,
    keys: Sequence[_Key],
    held: _Held,
    units: _StageUnits,
    collectives: CollectiveTimes,
    way: int,
) -> float:
    """The end of the last sum; units are summed in turn after their contributions."""
    # Sums over replicas may share a lane with other sums and queue there. Otherwise the
    # last of them follows the last sum over shards.
    replicas = float(collectives.replicas[:, way].min())
    after = 0.0 if collectives.shares_lane(way) else replicas
    begun = {
        stage: walked.latest[key]
        for key, (kind, stage) in enumerate(keys)
        if kind in ops.CONTRIBUTES
    }
    last = walked.end
    for mine in held:
        # From the stage that ends last: the units seen so far are all summed
        # after this one's end.
        taken = 0.0
        for stage in sorted(mine, key=lambda stage: -begun[stage]):
            taken += units.lane[stage]
            last = max(last, begun[stage] + taken + after)
    return last
