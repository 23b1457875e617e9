"""Passes from the order of computing to the whole step: each inserts one operation.

Every pass takes a Program and returns one, and none knows of another. `build.py`
applies them in order.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise, zip_longest

from . import ops
from .memory import Sizes, peaks
from .program import DoesNotFit, Op, Program
from .state import State, recomputed, restarts


def _woven(
    row: Sequence[Op],
    before: Mapping[int, list[Op]],
    after: Mapping[int, list[Op]],
) -> list[Op]:
    """Insert operations before and after given positions (-1: the start of the row)."""
    # A stable merge: several operations at one position keep their order.
    out = list(before.get(-1, ()))
    done = 0
    for i in sorted({*before, *after} - {-1}):
        out += row[done:i]
        out += before.get(i, ())
        out.append(row[i])
        out += after.get(i, ())
        done = i + 1
    return [*out, *row[done:]]


def expand(
    program: Program,
    stages: Sequence[range],
    tied: tuple[tuple[int, int], ...] = (),
    frozen: Collection[int] = (),
) -> Program:
    """Replace operations on virtual stages by those on pieces; backward in reverse."""

    def pieces(op: Op) -> range:
        stage = stages[op.piece]
        # Forward runs a stage's pieces upwards, backward downwards.
        return stage[::-1] if op.kind in ops.BACKWARDS else stage

    expanded = program.with_rows(
        [Op(op.kind, piece, op.index) for op in row for piece in pieces(op)]
        for row in program.rows
    )
    return replace(expanded, tied=tied, frozen=tuple(sorted(frozen)))


def recompute(
    program: Program,
    stages: Sequence[range],
    mode: str,
    receivers: Collection[int] = (),
) -> Program:
    """Insert recomputation, by mode: `none`, `all`, `every=C`, `sqrt` or `selective`.

    With `all`, `every=C` and `sqrt`, pieces keep nothing but each segment's first
    input, and a segment is recomputed once, before its backward. A block with `receivers`
    counts as one piece. With `selective`, pieces keep what is expensive and recompute
    the rest; the first and the last piece, which are no blocks, keep everything.
    """
    if mode == "none":
        return program
    if mode == "selective":
        segments = [
            range(piece, piece + 1) for piece in range(1, program.pieces - 1)
        ]
        return _with_segments(
            program, [segments] * len(program.rows), ops.RECOMPUTE_PART
        )
    segments, inside = [], {*receivers, *(piece + 1 for piece in receivers)}
    for stage in stages:
        # Segments begin at every `length`-th piece that may begin one.
        begins = [piece for piece in stage if piece not in inside]
        # sqrt(n) segments of sqrt(n) pieces keep the least (Chen et al. 2016).
        root = max(1, round(math.sqrt(len(begins))))
        length = {"all": 1, "sqrt": root}.get(mode)
        length = length or int(mode.removeprefix("every="))
        borders = [*begins[::length], stage.stop]
        segments += [range(a, b) for a, b in pairwise(borders)]
    return _with_segments(program, [segments] * len(program.rows))


def _with_segments(
    program: Program,
    segments: Sequence[Sequence[range]],
    kind: str = ops.RECOMPUTE,
) -> Program:
    """Insert recomputation before the backward of each row's recomputed segments."""
    rows = []
    for row, chosen in zip(program.rows, segments, strict=True):
        # Backward reaches a segment at its last piece.
        top = {segment[-1]: segment for segment in chosen}
        before: dict[int, list[Op]] = {}
        last: Op | None = None
        for i, op in enumerate(row):
            # What was computed just now is still there, so its backward needs no
            # recomputation.
            fresh = last == Op(ops.FORWARD, op.piece, op.index)
            if op.kind in ops.PROPAGATES and op.piece in top and not fresh:
                before[i] = [
                    Op(kind, piece, op.index) for piece in top[op.piece]
                ]
            if op.kind in ops.COMPUTES:
                last = op
        rows.append(_woven(row, before, {}))
    return program.with_rows(rows)


def recompute_to_fit(
    program: Program,
    sizes: Sizes,
    limits: Sequence[float],
    rest: Callable[[Program], Program] = lambda program: program,
) -> Program:
    """Recompute as few pieces per row as its memory allows, the largest first.

    `rest` applies the remaining passes, whose gathered weights and gradients count too.
    """
    # What recomputing a piece saves: all it keeps but its input.
    gain = [
        kept - input
        for kept, input in zip(sizes.kept, sizes.input, strict=True)
    ]
    left = []  # for each row, pieces not yet recomputed
    for row, homes in enumerate(program.homes):
        own = (p for p, home in homes.items() if home == row and gain[p] > 0)
        left.append(sorted(own, key=lambda p: (-gain[p], p)))
    chosen: list[list[range]] = [[] for _ in left]
    # One more piece on each rank over its limit, until all fit.
    while True:
        tried = _with_segments(program, chosen)
        all_peaks = enumerate(peaks(rest(tried), sizes))
        over = [
            (row, peak) for row, peak in all_peaks if peak.total > limits[row]
        ]
        if not over:
            return tried
        for row, peak in over:
            if not left[row]:
                raise DoesNotFit(
                    f"rank {program.owner.index(row)} holds {peak.total:.4g} bytes at {peak.at} with"
                    f" everything recomputed that frees memory; the limit is {limits[row]:.4g}."
                    " Use more stages, more shards or smaller microbatches."
                )
            piece = left[row].pop(0)
            chosen[row].append(range(piece, piece + 1))


def offload_activations(program: Program) -> Program:
    """Move each forward's activations to the host, and back just before their use."""
    rows = []
    for row in program.rows:
        at, again = {op: i for i, op in enumerate(row)}, recomputed(row)
        before: dict[int, list[Op]] = defaultdict(list)
        after: dict[int, list[Op]] = {}
        computes = [i for i, op in enumerate(row) if op.kind in ops.COMPUTES]
        turn = {i: n for n, i in enumerate(computes)}
        for i, op in enumerate(row):
            if op.kind != ops.FORWARD:
                continue
            if (op.piece, op.index) in again and not restarts(
                at, op.piece, op.index
            ):
                continue  # inside a recomputed segment nothing is kept
            # The use is the first recomputation or backward that needs them.
            uses = (
                op._replace(kind=kind)
                for kind in (*ops.RECOMPUTES, *ops.PROPAGATES)
            )
            use = min((turn[at[use]] for use in uses if use in at), default=0)
            if use - turn[i] < 3:
                continue  # the use is too near for a round trip
            after[i] = [op._replace(kind=ops.OFFLOAD)]
            # Back one computation before the use, so that the copy runs beside it.
            before[computes[use - 1]].append(op._replace(kind=ops.RELOAD))
        rows.append(_woven(row, before, after))
    return program.with_rows(rows)


def overlap(
    program: Program,
    stages: Sequence[range],
    receivers: Collection[int],
    *,
    forward_first: bool,
) -> Program:
    """Interleave one microbatch's forward with a following backward of another.

    They alternate at the points where tokens are sent and taken, so that one's tokens
    travel while the other computes. A rank holds a part of one microbatch more than
    without. `forward_first` says which one comes first in a pair, and requires
    different stages: in such a pipeline other pairs would wait for themselves.
    """
    stage_of = {
        piece: number for number, stage in enumerate(stages) for piece in stage
    }
    # Pieces that take tokens of other ranks, and those behind them.
    into = {*receivers, *(piece + 1 for piece in receivers)}
    wanted = (
        (ops.FORWARD, ops.BACKWARD)
        if forward_first
        else (ops.BACKWARD, ops.FORWARD)
    )
    ways = dict.fromkeys(ops.COMPUTES, ops.BACKWARD)
    ways |= {kind: kind for kind in (ops.FORWARD, ops.WEIGHT_GRADIENT)}
    rows = []
    for row in program.rows:
        # Runs of one microbatch on one stage in one direction.
        alike = groupby(
            row, lambda op: (ways[op.kind], stage_of[op.piece], op.index)
        )
        runs = [(*key, list(run)) for key, run in alike]
        out: list[Op] = []
        while runs:
            way, stage, m, run = runs.pop(0)
            # Weight gradients between the two come later.
            later = next(
                (i for i, x in enumerate(runs) if x[0] != ops.WEIGHT_GRADIENT),
                0,
            )
            other = runs[later] if runs else (ops.WEIGHT_GRADIENT, 0, 0, [])
            apart = stage != other[1] or not forward_first
            if (way, other[0]) == wanted and m != other[2] and apart:
                beside = runs.pop(later)[3]
                # Alternate the parts of the two runs, whose tokens travel in turn.
                both = _travels(run, into), _travels(beside, into)
                pairs: Iterable[tuple[list[Op], ...]] = zip_longest(
                    *both, fillvalue=[]
                )
                run = [op for pair in pairs for part in pair for op in part]
            out += run
        rows.append(out)
    return program.with_rows(rows)


def _travels(run: Sequence[Op], into: Collection[int]) -> list[list[Op]]:
    """Split a run of one microbatch after operations whose result is sent away."""
    parts: list[list[Op]] = [[]]
    for op in run:
        parts[-1].append(op)
        taken = op.piece + 1 if op.kind == ops.FORWARD else op.piece
        if taken in into and op.kind in (ops.FORWARD, *ops.PROPAGATES):
            parts.append([])
    return parts


def exchange(program: Program, receivers: Collection[int]) -> Program:
    """Insert the exchanges of tokens to `receivers` and back, and of their gradients.

    Each follows the operation that produces its input. Before the first, ranks exchange
    token counts.
    """
    if not receivers:
        return program
    into = {*receivers, *(piece + 1 for piece in receivers)}
    rows = []
    for row in program.rows:
        out: list[Op] = []
        for op in row:
            out.append(op)
            if op.kind == ops.FORWARD and op.piece + 1 in into:
                # Into the receivers go counts and tokens, out of them tokens alone.
                kinds = [ops.COUNT_ROUTES] * (op.piece + 1 in receivers) + [
                    ops.EXCHANGE
                ]
                out += [Op(kind, op.piece + 1, op.index) for kind in kinds]
            elif op.kind in ops.PROPAGATES and op.piece in into:
                out.append(Op(ops.EXCHANGE_GRADIENT, op.piece, op.index))
        rows.append(out)
    return program.with_rows(rows)


def sum_choices(program: Program, pieces: Collection[int]) -> Program:
    """Insert the sums of choices after the forward of each of these pieces.

    Their backward needs the sums, for the losses of routers.
    """
    if not pieces:
        return program
    rows = []
    for row in program.rows:
        out: list[Op] = []
        for op in row:
            out.append(op)
            if op.kind == ops.FORWARD and op.piece in pieces:
                out.append(op._replace(kind=ops.SUM_CHOICES))
        rows.append(out)
    return program.with_rows(rows)


def messages(program: Program) -> Program:
    """Insert the messages between stages.

    A send follows the operation that produces its value. Its receive is posted one
    computation before the one that uses it, while the rank still works. Receives are in
    the order of the sends.
    """
    after: list[dict[int, list[Op]]] = [{} for _ in program.rows]
    flows: dict[int, dict[tuple[int, bool], list[Op]]] = defaultdict(
        lambda: defaultdict(list)
    )
    travels = (ops.FORWARD, *ops.PROPAGATES)
    for number, row in enumerate(program.rows):
        homes = program.homes[number]
        for i, op in enumerate(row):
            if op.kind in travels:
                # Values leave where the next piece is on another row of the pipeline.
                forward = op.kind == ops.FORWARD
                to = op.piece + (1 if forward else -1)
                if (target := homes.get(to, number)) != number:
                    after[number][i] = [
                        Op(ops.SEND, op.piece, op.index, op.kind, to)
                    ]
                    flows[target][number, forward].append(op)
    return program.with_rows(
        _woven(row, _receives(row, flows[n]) if n in flows else {}, after[n])
        for n, row in enumerate(program.rows)
    )


def _receives(
    row: Sequence[Op], flows: Mapping[tuple[int, bool], Sequence[Op]]
) -> dict[int, list[Op]]:
    """The positions at which a row receives the messages sent to it."""
    before: dict[int, list[Op]] = defaultdict(list)
    entries: set[int] = set()
    for (_, up), sent in flows.items():
        ahead = 1 if up else -1
        entries |= {piece + ahead for piece in {op.piece for op in sent}}
    at: dict[tuple[str, int, int], int] = {}
    # The last computation before each position, or else the first of the row.
    previous: list[int] = []
    computed = next(
        (i for i, op in enumerate(row) if op.kind in ops.COMPUTES), 0
    )
    for i, (kind, piece, m, _, _) in enumerate(row):
        previous.append(computed)
        if piece in entries:
            at[kind, piece, m] = i
        if kind in ops.COMPUTES:
            computed = i
    for (_, forward), sent in flows.items():
        # From the last send to the first: no receive is later than the one behind it.
        latest = len(row)
        kinds = [ops.FORWARD] if forward else ops.PROPAGATES
        ahead = 1 if forward else -1
        for op in reversed(sent):
            to = op.piece + ahead
            m = op.index
            for kind in kinds:
                if (kind, to, m) in at:
                    break
            else:
                continue  # `check` reports a value that is sent and never used
            first = at[kind, to, m]
            # A gradient is received before the recomputation in front of its backward.
            for repeat in () if forward else ops.RECOMPUTES:
                first = min(first, at.get((repeat, to, m), first))
            latest = min(latest, previous[first])
            # From the last to the first as well, and turned round below.
            before[latest].append(Op(ops.RECEIVE, to, m, kind, op.piece))
    return {place: each[::-1] for place, each in before.items()}


def gather(
    program: Program,
    *,
    each_use: bool,
    drop: bool,
    prefetch: int = 1,
    load: bool = False,
) -> Program:
    """Insert gathers of weights before their use, `prefetch` units ahead.

    Uses of a unit that follow each other directly are one use: the last block is not
    dropped between forward and backward, which begins with it. `load` copies weights
    from the host as far ahead, and they are gathered one unit later. Frozen weights
    that are never dropped stay whole at home, as they never become stale.
    """
    # Loads lead by one unit more than the gathers that follow them.
    gathers = (max(0, prefetch - load), ops.GATHER)
    leads = [(prefetch, ops.LOAD)] * load + [gathers]
    rows = []
    for row in program.rows:
        uses = _uses(program, row, each_use)
        uses = [use for use in uses if drop or use[0] not in program.frozen]
        before: dict[int, list[Op]] = defaultdict(list)
        after: dict[int, list[Op]] = defaultdict(list)
        times: dict[int, int] = defaultdict(int)
        dropped: dict[int, int] = defaultdict(lambda: -2)
        for n, (unit, first, last) in enumerate(uses):
            # No earlier than its own drop, or the pool would hold two copies of one
            # unit.
            for lead, kind in leads:
                # The start of the use `lead` uses ago, or of the row.
                earliest = uses[n - lead][1] if n >= lead else -1
                at = max(earliest, dropped[unit] + 1)
                before[min(at, first)].append(Op(kind, unit, times[unit]))
            if drop:
                after[last].append(Op(ops.DROP, unit, times[unit]))
                dropped[unit] = last
            times[unit] += 1
        rows.append(_woven(row, before, after))
    return program.with_rows(rows)


def agree_scales(program: Program, units: Collection[int]) -> Program:
    """Insert the agreements on the scales of units gathered in 8 bits.

    Once a step and before any computation: updates have changed the weights, and
    gathers need the scales.
    """
    if not units:
        return program
    rows = []
    for row in program.rows:
        gathered = dict.fromkeys(
            op.piece for op in row if op.kind == ops.GATHER
        )
        first = [
            Op(ops.AGREE_SCALES, unit) for unit in gathered if unit in units
        ]
        rows.append([*first, *row])
    return program.with_rows(rows)


def _uses(
    program: Program, row: Sequence[Op], each: bool
) -> list[tuple[int, int, int]]:
    """Each use of a unit's weights, as (unit, first position, last position)."""
    stretches: dict[tuple[int, int], list[int]] = {}
    stretch: dict[int, int] = defaultdict(int)
    last: tuple[int, ...] = ()
    for i, op in enumerate(row):
        if op.kind not in ops.USES_WEIGHTS:
            continue
        units = program.units(op.piece)
        for unit in units:
            # A new stretch begins where the operation before did not use the unit.
            if each and unit not in last:
                stretch[unit] += 1
            key = (unit, stretch[unit])
            ends = stretches.setdefault(key, [i, i])
            ends[1] = i
        last = units
    uses = ((unit, a, b) for (unit, _), (a, b) in stretches.items())
    return sorted(uses, key=lambda use: use[1:])


def reduce(
    program: Program,
    *,
    each_microbatch: bool,
    replicas: bool = False,
    at_end: bool = False,
) -> Program:
    """Insert the sums of gradients over a unit's copies.

    A sum follows the unit's last contribution of the step, or of each microbatch, and
    the messages after it. A unit that two pieces of the rank use is summed after both,
    a frozen one never. With `replicas`, sums are over the shards first and then over
    the replicas; the second sum comes before the next unit's first one, by when the
    first may have arrived. With `at_end`, all sums follow everything that the rank
    computes and sends, as in software that does not overlap them.
    """
    rows = []
    for row in program.rows:
        # The last contribution of the step, or of each microbatch.
        last: dict[tuple[int, int], int] = {}
        for i, op in enumerate(row):
            if op.kind in ops.CONTRIBUTES:
                for unit in program.trained(op.piece):
                    last[unit, op.index if each_microbatch else 0] = i
        # Behind the sends that follow directly, as another rank waits for those.
        for key, i in last.items():
            ends = (
                n
                for n in range(i, len(row) - 1)
                if row[n + 1].kind != ops.SEND
            )
            last[key] = next(ends, len(row) - 1)
        if at_end:
            last = dict.fromkeys(
                sorted(last, key=last.__getitem__), len(row) - 1
            )
        sums: list[tuple[int, Op]] = []
        times: dict[int, int] = defaultdict(int)
        in_order = sorted(last.items(), key=lambda item: item[1])
        for (unit, _), i in in_order:
            op = Op(ops.REDUCE, unit, times[unit])
            sums.append((i, op))
            times[unit] += 1
        after: dict[int, list[Op]] = defaultdict(list)
        # The sum over replicas stands where the next unit's first sum does.
        for (i, op), (later, _) in pairwise([*sums, *sums[-1:]]):
            after[i].append(op)
            after[later] += [op._replace(kind=ops.REDUCE_REPLICAS)] * replicas
        rows.append(_woven(row, {}, after))
    return program.with_rows(rows)


def sum_in_tree(
    program: Program, *, replicas: bool, at_end: bool = False
) -> Program:
    """Insert additions of gradients in the order of the tree, and their exchange.

    An addition follows the last contribution of each microbatch and the messages after
    it. The exchange follows the last addition of the step. With `replicas`, the summed
    parts of the previous unit are shared after it.
    """
    rows = []
    for row in program.rows:
        last: dict[tuple[int, int, int], int] = {}
        for i, op in enumerate(row):
            if op.kind in ops.CONTRIBUTES:
                for unit in program.trained(op.piece):
                    last[unit, op.piece, op.index] = _behind_sends(row, i)
        after: dict[int, list[Op]] = defaultdict(list)
        ends: dict[tuple[int, int], int] = {}
        for (unit, user, m), i in last.items():
            after[i].append(program.tree_op(ops.ADD, unit, user, m))
            ends[unit, user] = max(i, ends.get((unit, user), i))
        waiting: list[Op] = []
        for (unit, user), i in sorted(ends.items(), key=lambda end: end[1]):
            place = len(row) - 1 if at_end else i
            after[place].append(
                program.tree_op(ops.EXCHANGE_PARTS, unit, user)
            )
            after[place] += waiting
            shared = program.tree_op(ops.SHARE_SUMS, unit, user)
            waiting = [shared] if replicas else []
        after[len(row) - 1] += waiting
        rows.append(_woven(row, {}, after))
    return program.with_rows(rows)


def _behind_sends(row: Sequence[Op], place: int) -> int:
    """The place of the last message that follows an operation directly, or its own."""
    while place + 1 < len(row) and row[place + 1].kind == ops.SEND:
        place += 1
    return place


def tie(program: Program) -> Program:
    """Insert the sum of a shared weight's gradients over its two stages."""
    if not program.tied:
        return program
    rows = []
    for number, row in enumerate(program.rows):
        homes = program.homes[number]
        after: dict[int, list[Op]] = {}
        for unit in sorted(
            {unit for _, unit in program.tied}.difference(program.frozen)
        ):
            holders = {homes[piece] for piece in program.users(unit)}
            if len(holders) > 1 and number in holders:
                sums = [
                    n for n, op in enumerate(row) if op.kind in ops.REDUCTIONS
                ]
                # After the last reduction of the unit, as it adds finished sums.
                last = max(n for n in sums if row[n].piece == unit)
                after[last] = [Op(ops.TIE, unit)]
        rows.append(_woven(row, {}, after))
    return program.with_rows(rows)


def sum_parts(program: Program, units: Collection[int]) -> Program:
    """Insert the sums over tp for weights whose copies did different work.

    The shards are summed once a step and after all other reductions, so that no rank
    waits for one of these early.
    """
    if not units:
        return program
    rows = []
    for row in program.rows:
        summed = {
            op.piece: None
            for op in row
            if op.kind in ops.REDUCTIONS and op.piece in units
        }
        rows.append([*row, *(Op(ops.SUM_PARTS, unit) for unit in summed)])
    return program.with_rows(rows)


def matrices(program: Program, units: Collection[int]) -> Program:
    """Insert the exchanges for an optimizer that needs whole matrices.

    The matrices of these units go to an owner before the unit's update, the next unit's
    while this one is updated, and the updates return to the shards.
    """
    if not units:
        return program
    rows = []
    for row in program.rows:
        updates = [
            i
            for i, op in enumerate(row)
            if op.kind == ops.UPDATE and op.piece in units
        ]
        agreements = (i for i, op in enumerate(row) if op.kind == ops.AGREE)
        agreed = next(agreements, len(row))
        before: dict[int, list[Op]] = defaultdict(list)
        after = {}
        for n, i in enumerate(updates):
            # While one unit is updated, the next one's matrices travel to their owners.
            # None leaves before the agreement.
            early = updates[n - 1] if n and updates[n - 1] > agreed else i
            before[early].append(row[i]._replace(kind=ops.TO_OWNERS))
            after[i] = [row[i]._replace(kind=ops.FROM_OWNERS)]
        rows.append(_woven(row, before, after))
    return program.with_rows(rows)


_ALL_SUMS = (*ops.REDUCTIONS, ops.TIE, ops.SUM_PARTS)


def _updates(row: Sequence[Op]) -> dict[Op, Op]:
    """The update of each unit, by the last sum of its gradient."""
    last: dict[int, Op] = {}
    # Backwards through the list, so the first sum found for a unit is its last.
    for op in reversed(row):
        if op.kind in _ALL_SUMS:
            last.setdefault(op.piece, op)
    return {op: Op(ops.UPDATE, unit) for unit, op in reversed(last.items())}


def finish(program: Program, *, agree: bool) -> Program:
    """Insert the count of tokens at the start, and the updates.

    If ranks `agree` on the norm first, all units are updated after that. Otherwise each
    one is updated as soon as another operation has waited for its reduction: an update
    right behind the reduction would make the rank wait for it and compute nothing.
    """
    each = [_updates(row) for row in program.rows]
    if agree:
        return program.with_rows(
            [Op(ops.COUNT), *row, Op(ops.AGREE), *updates.values()]
            for row, updates in zip(program.rows, each, strict=True)
        )
    rows, short = [], []
    # Before the first reduction none is in flight, so only the gradients begun by then
    # matter.
    begins = [
        next((i for i, op in enumerate(r) if op.kind in _ALL_SUMS), len(r))
        for r in program.rows
    ]
    for row, begin in zip(program.rows, begins, strict=True):
        firsts = {op[:2]: op for op in reversed(row[:begin])}
        short.append((*firsts.values(), *row[begin:]))
    few = program.with_rows(short)
    for number, (row, begin, updates) in enumerate(
        zip(program.rows, begins, each, strict=True)
    ):
        # Without an agreement, follow the state to see which sums were waited for.
        out, state = [Op(ops.COUNT), *row[:begin]], State(few, number)
        left = len(row) - begin
        for n, op in enumerate(state.ops, left - len(state.ops)):
            waiting = list(state.under_way)
            state.apply(op, state.needs(op))
            out += [op] * (n >= 0)
            # Some operation has waited for the sum, so the update costs no wait.
            out += [
                updates.pop(o)
                for o in waiting
                if o in updates and o not in state.under_way
            ]
        rows.append([*out, *updates.values()])
    return program.with_rows(rows)
