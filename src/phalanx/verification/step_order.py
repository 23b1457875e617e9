"""Claims about the order of a step that its result does not show: memory and waiting.

A schedule that holds one microbatch too many, a receive that is posted late, or a
reduction that waits too early trains the same weights. Here the order of each row is
compared with the formulas of the papers and of `docs/architecture.md`, computed from
the row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from ..layout import Layout
from ..layout.choices import (
    DUALPIPE_V,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    ZB_H2,
    ZB_V,
)
from ..program import Op, Program, ops
from ..program.schedules import schedule
from ..program.state import State

# reductions that a rank may have in flight, each with a whole gradient
IN_FLIGHT = 2
# computations between a forward and the use of what it kept, for a trip to the host
TRIP = 3


def order_faults(layout: Layout, program: Program) -> Iterator[str]:
    """Yield the rows of a program whose order differs from the formulas."""
    for number, row in enumerate(program.rows):
        rank = program.ranks(number)[0]
        stage = program.mesh.coordinates(rank).get("pp", 0)
        for wrong in (
            *_held(layout, row, stage),
            *_deferred(layout, row, stage),
            *_in_flight(program, number),
            *_receives(row),
            *_trips(row),
            *_gathers(layout, program, row),
        ):
            yield f"rank {rank} {wrong}"


# Stages and microbatches of a schedule whose idle time is compared: the formulas are for
# at least twice as many microbatches as stages.
STAGES, MICROBATCHES = 4, 12


def idle_faults(layout: Layout) -> Iterator[str]:
    """Compare a schedule's idle time with the formula of its paper.

    Forward, input gradient and weight gradient of a stage take one unit of time each,
    and messages none.
    """
    if layout.schedule not in _IDLE:
        return
    program = schedule(layout.schedule, STAGES, MICROBATCHES, layout.chunks)
    whole = _elapsed(program)
    if whole is None:
        yield f"{layout.schedule} on {STAGES} stages does not end"
        return
    chunks = program.pieces // STAGES
    idle = whole - 3 * MICROBATCHES * chunks
    wanted = _IDLE[layout.schedule](STAGES)
    if idle != wanted:
        yield f"{layout.schedule} on {STAGES} stages is idle for {idle} units of time; expected {wanted}"


# Units of time by the number of stages, in the papers that `_most_held` names. No schedule
# takes less than p - 1 units more: the last stage begins after as many forwards.
_IDLE: dict[str, Callable[[int], int]] = {
    GPIPE: lambda p: 3 * (p - 1),
    ONE_F_ONE_B: lambda p: 3 * (p - 1),
    INTERLEAVED: lambda p: 3 * (p - 1),
    ZB_H1: lambda p: p - 1,
    ZB_H2: lambda p: p - 1,
    ZB_V: lambda p: p - 1,
    DUALPIPE_V: lambda p: p - 1,
}


def _elapsed(program: Program) -> int | None:
    """The time at which the last rank finishes its list; None if the ranks deadlock."""
    ends: dict[tuple[bool, int, int], int] = {}
    clocks = [0] * len(program.rows)
    left = [[*row] for row in program.rows]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while (
                row
                and (arrived := _arrival(program, row[0], ends)) is not None
            ):
                op = row.pop(0)
                moved = True
                start = max(clocks[rank], arrived)
                clocks[rank] = start + (2 if op.kind == ops.BACKWARD else 1)
                if op.kind != ops.WEIGHT_GRADIENT:
                    forward = op.kind == ops.FORWARD
                    ends[forward, op.piece, op.index] = clocks[rank]
        if not moved:
            return None
    return max(clocks)


def _arrival(
    program: Program, op: Op, ends: Mapping[tuple[bool, int, int], int]
) -> int | None:
    """The time at which an operation's input from a neighbour arrives, if computed."""
    forward = op.kind == ops.FORWARD
    first = 0 if forward else program.pieces - 1
    if op.kind == ops.WEIGHT_GRADIENT or op.piece == first:
        return 0
    piece = op.piece - 1 if forward else op.piece + 1
    return ends.get((forward, piece, op.index))


def _held(layout: Layout, row: Sequence[Op], stage: int) -> Iterator[str]:
    """Compare the forwards before the first backward, in microbatches of a chunk."""
    wanted = _most_held(layout, stage)
    if wanted is None:
        return
    own = {op.piece for op in row if op.kind == ops.FORWARD}
    firsts = {piece for piece in own if piece - 1 not in own}
    held = 0
    for op in row:
        if op.kind in ops.PROPAGATES:
            break
        held += op.kind == ops.FORWARD and op.piece in firsts
    if held != wanted:
        yield (
            f"computes {held} forwards before its first backward, and {layout.schedule} has"
            f" {wanted} on stage {stage}"
        )


def _most_held(layout: Layout, stage: int) -> int | None:
    """Return the forwards of chunks before the first backward; None if not known."""
    stages, count, chunks = layout.pp, layout.microbatches, layout.chunks
    if layout.overlap:
        return None
    behind = stages - 1 - stage
    # Huang et al. 2019
    if layout.schedule == GPIPE:
        return count
    # Narayanan et al. 2019; Qi et al. 2023, section 2
    if layout.schedule in (ONE_F_ONE_B, ZB_H1):
        return min(count, behind + 1)
    if layout.schedule == ZB_H2:
        return min(count, 2 * behind + 1)
    # Narayanan et al. 2021, section 2.2
    if layout.schedule == INTERLEAVED and count % stages == 0:
        warmup = (chunks - 1) * stages + 2 * behind
        return min(chunks * count, warmup + 1)
    # Qi et al. 2024: P microbatches, each of two chunks. The last stage has both
    # chunks in one run of pieces.
    if layout.schedule == ZB_V and behind and count >= 2 * stages - 1:
        return 2 * stages
    return None


def _deferred(layout: Layout, row: Sequence[Op], stage: int) -> Iterator[str]:
    """Compare the weight gradients that wait: r microbatches on stage r in ZB-H1, and
    twice as many in ZB-H2 (Qi et al. 2023)."""
    lag = {ZB_H1: stage, ZB_H2: 2 * stage}.get(layout.schedule)
    if lag is None or layout.overlap:
        return
    piece = max(op.piece for op in row if op.kind == ops.FORWARD)
    signs = {ops.INPUT_GRADIENT: 1, ops.WEIGHT_GRADIENT: -1}
    steps = (signs.get(op.kind, 0) for op in row if op.piece == piece)
    most = max(accumulate(steps, initial=0))
    wanted = min(layout.microbatches, lag + 1)
    if most != wanted:
        yield (
            f"defers {most} weight gradients of piece {piece}, and {layout.schedule} defers"
            f" {wanted} on stage {stage}"
        )


def _in_flight(program: Program, number: int) -> Iterator[str]:
    """Check that while gradients are still to begin, two reductions are in flight: none
    waits for the one before it, and none starts as the third."""
    row = program.rows[number]
    needed = State(program, number).follow().needed
    waited: set[Op] = set()
    started: list[Op] = []
    for place, (op, needs) in enumerate(zip(row, needed, strict=True)):
        now = {need for need in needs if isinstance(need, Op)}
        if op.kind == ops.REDUCE:
            running = [x for x in started if x not in waited]
            others = [x for x in running if x.piece != op.piece]
            begins = _begins_later(program, row, place)
            # A sum of the same unit is always waited for.
            same = len(running) - len(others)
            full = max(0, len(running) - IN_FLIGHT + 1 - same)
            wanted = full if begins else 0
            found = sum(x in now for x in others)
            if found != wanted and not same:
                yield (
                    f"waits for {found} other reductions at {op} with {len(running)} in flight,"
                    f" and should wait for {wanted}"
                )
            started.append(op)
        waited |= now


def _begins_later(program: Program, row: Sequence[Op], place: int) -> bool:
    """True if the gradient of a later reduction begins after this place."""
    opened: set[int] = set()
    for at, op in enumerate(row):
        if op.kind == ops.REDUCE:
            opened.discard(op.piece)
        begins = op.kind in (*ops.CONTRIBUTES, ops.INPUT_GRADIENT)
        if not begins or (op.kind == ops.INPUT_GRADIENT and not op.piece):
            continue
        for unit in program.trained(op.piece):
            if unit not in opened and at > place:
                return True
            opened.add(unit)
    return False


def _receives(row: Sequence[Op]) -> Iterator[str]:
    """Check that each receive is posted one computation before its first use, or earlier
    if a later message of its flow is used before it."""
    computes = [op for op in row if op.kind in ops.COMPUTES]
    uses: dict[tuple[int, bool, int], int] = {}
    for turn, op in enumerate(computes):
        forward = op.kind == ops.FORWARD
        uses.setdefault((op.piece, forward, op.index), turn)
        # a recomputation receives nothing, but its backward's gradient is there before
        if op.kind in ops.RECOMPUTES:
            uses[op.piece, False, op.index] = turn
    flows: dict[tuple[int, str], list[tuple[Op, int]]] = {}
    turn = 0
    for op in row:
        turn += op.kind in ops.COMPUTES
        if op.kind == ops.RECEIVE:
            flows.setdefault((op.peer, op.of), []).append((op, turn))
    for posted in flows.values():
        latest = len(computes)
        for op, turn in reversed(posted):
            use = uses[op.piece, op.of == ops.FORWARD, op.index]
            latest = min(latest, max(0, use - 1))
            if turn != latest:
                yield f"posts {op} before computation {turn}, and should before {latest}"


def _trips(row: Sequence[Op]) -> Iterator[str]:
    """Check which activations go to the host, and when they return."""
    if not any(op.kind == ops.OFFLOAD for op in row):
        return
    computes = [op for op in row if op.kind in ops.COMPUTES]
    turns = {op: turn for turn, op in enumerate(computes)}
    done = 0
    for op in row:
        done += op.kind in ops.COMPUTES
        if op.kind not in (ops.OFFLOAD, ops.RELOAD):
            continue
        made = turns[Op(ops.FORWARD, op.piece, op.index)]
        kinds = (*ops.RECOMPUTES, *ops.PROPAGATES)
        uses = (Op(kind, op.piece, op.index) for kind in kinds)
        use = min(turns[use] for use in uses if use in turns)
        if use - made < TRIP:
            yield f"sends to the host what it uses {use - made} computations later: {op}"
        wanted = made + 1 if op.kind == ops.OFFLOAD else use - 1
        if done != wanted:
            yield f"has {op} after {done} computations, and should after {wanted}"


def _gathers(
    layout: Layout, program: Program, row: Sequence[Op]
) -> Iterator[str]:
    """Check that weights which are gathered for each use are gathered `prefetch` units
    ahead: no later, unless the unit is still in use, and no earlier."""
    if layout.zero != 3 or layout.gather != "micro":
        return
    ahead = max(0, layout.prefetch - layout.weights_on_host)
    gathers = [op for op in row if op.kind == ops.GATHER]
    # units that are gathered and not yet dropped, and the gathers used so far
    there: dict[int, bool] = {}
    issued = used = 0
    for op in row:
        if op.kind == ops.GATHER:
            there[op.piece] = False
            issued += 1
        elif op.kind == ops.DROP:
            there.pop(op.piece, None)
        elif op.kind in ops.USES_WEIGHTS:
            new = [
                u for u in program.units(op.piece) if not there.get(u, True)
            ]
            for unit in new:
                there[unit] = True
            used += len(new)
            wanted = min(len(gathers), used + ahead)
            rest = gathers[issued : issued + 1]
            busy = any(gather.piece in there for gather in rest)
            if new and (issued > wanted or (issued < wanted and not busy)):
                yield f"has gathered {issued} units at {op}, and should have gathered {wanted}"
