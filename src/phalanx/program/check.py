"""Proves, before anything runs, that a program ends and computes one training step.

`faults` lists everything that is wrong, each with the operation and the rank. `check`
raises an error with all faults, or returns the peak memory of every rank.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from . import ops
from .graph import Graph, graph, group_axes, possible
from .memory import Peak, Sizes, peaks
from .ops import COMPUTE
from .program import Op, Program, ProgramError, uncollected
from .shorten import Short, shortened
from .state import State, recomputed


@dataclass(frozen=True)
class Proof:
    """The peaks of a checked program, by row.

    Held microbatches (a chunk counts 1/V), pieces and units by kind, and bytes if sizes
    were given.
    """

    held: tuple[float, ...]
    counts: tuple[Peak, ...]
    bytes: tuple[Peak, ...] | None = None


@uncollected()
def check(program: Program, sizes: Sizes | None = None) -> Proof:
    """Prove that a program is right, or raise a ProgramError with every fault."""
    problems, short, walked = _proved(program)
    if problems:
        raise ProgramError("\n".join(problems))
    left = short.program if short else program
    counts = peaks(left, Sizes.counts(program.pieces), walked)
    sized = peaks(left, sizes) if sizes else None
    # Counts of the shortened program are those of the whole; only places in it differ.
    if short:
        counts = short.of_whole(counts, program)
        sized = short.of_whole(sized, program) if sized else None
    return Proof(held(left), counts, sized)


def held(program: Program) -> tuple[float, ...]:
    """The most microbatches between forward and (last) backward on each row."""
    most = []
    for row in program.rows:
        computed = {op.piece for op in row if op.kind == ops.FORWARD}
        # A rank with V chunks holds 1 / V of a microbatch for each of them.
        share = 1 / max(1, len(computed))
        # +1 at a forward and -1 at the operation that ends its activations.
        steps = (
            (op.kind == ops.FORWARD) - (op.kind in ops.CONTRIBUTES)
            for op in row
        )
        most.append(round(max(accumulate(steps, initial=0)) * share, 9))
    return tuple(most)


@uncollected()
def faults(program: Program) -> tuple[str, ...]:
    """Everything that is wrong with a program, the first cause first."""
    return _proved(program)[0]


def _proved(
    program: Program,
) -> tuple[tuple[str, ...], Short | None, Sequence[State]]:
    """Return a program's faults, its shortened form if valid, and final states."""
    # A repeating program is proved in a short form, if that form stands for the whole.
    if short := shortened(program):
        problems, walked, made = _faults(short.program)
        if not problems and made and short.proves(made):
            return (), short, walked
    problems, walked, _ = _faults(program)
    return problems, None, walked


def _faults(
    program: Program,
) -> tuple[tuple[str, ...], Sequence[State], Graph | None]:
    # 1. The form: which rank lists what. Without it nothing else can be asked.
    if problems := [*_one_line(program), *_names(program), *_homes(program)]:
        return tuple(problems), (), None
    # 2. Each rank's own list, from its first operation to its last.
    states = [State(program, number) for number in range(len(program.rows))]
    weights = [
        list(_weights(program, number, now))
        for number, now in enumerate(states)
    ]
    # 3. What crosses ranks: needs, messages, collectives.
    made = graph(program, states)
    problems = [*_needs(made), *_groups(made), *_collectives(made)]
    for number in range(len(program.rows)):
        problems += [*_left_over(program, number), *weights[number]]
    problems += _ties(program)
    # 4. Only a program without other faults is walked, to see that it ends.
    return (
        tuple(dict.fromkeys(problems)) or tuple(_deadlock(made)),
        states,
        made,
    )


def _rank(program: Program, row: int) -> str:
    ranks = program.ranks(row)
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"


def _one_line(program: Program) -> Iterator[str]:
    """Yield ranks of one row that compute, send or call with different rows."""
    # Ranks that share a stage along cp, tp and ep call the same collectives.
    inner = [a.name for a in program.mesh.axes if a.name in ("cp", "tp", "ep")]
    for group in program.mesh.groups(inner) if inner else ():
        rows = {program.owner[rank] for rank in group}
        if len(rows) > 1:
            what = f"compute the same pieces together ({', '.join(inner)})"
            yield f"ranks {', '.join(map(str, group))} {what} but follow {len(rows)} different lists."
    # Each rank of a row must find the same other rows in its pipeline.
    lines: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, row in enumerate(program.owner):
        line = tuple(
            program.owner[r] for r in program.mesh.group(rank, ("pp",))
        )
        first, known = lines.setdefault(row, (rank, line))
        if known != line:
            yield (
                f"ranks {first} and {rank} follow one list, but the other stages of their pipelines"
                f" follow different ones; give rank {rank} a 'ranks {rank}:' list of its own."
            )


def _names(program: Program) -> Iterator[str]:
    """Yield operations that occur twice, or name a piece not on their rank."""
    for number, row in enumerate(program.rows):
        who, homes = _rank(program, number), program.homes[number]
        counts = Counter(row)
        for op, count in counts.items():
            if count > 1:
                yield f"{who}: {op} stands {count} times; each operation stands once."
            if op.kind in ops.ON_STEP:
                continue
            host = homes.get(op.piece)
            # A tied unit may be gathered and summed on every stage that uses it.
            tied = (
                host != number
                and op.kind in ops.ON_UNIT
                and any(
                    homes.get(p) == number for p in program.users(op.piece)
                )
            )
            if host is None and not tied:
                yield f"{who}: {op} names piece {op.piece}, of which no rank has a forward."
            elif host is not None and host != number and not tied:
                yield f"{who}: {op} belongs to {_rank(program, host)}, which holds piece {op.piece}."
            elif op.of:
                yield from (
                    f"{who}: {op} {what}"
                    for what in _astray(program, number, op)
                )


def _astray(program: Program, number: int, op: Op) -> Iterator[str]:
    upwards = op.peer > op.piece
    if abs(op.peer - op.piece) != 1:
        yield f"is between pieces {op.piece} and {op.peer}, which are not neighbours."
    elif program.homes[number].get(op.peer) in (None, number):
        yield f"goes to piece {op.peer}, which is not on another rank."
    # Sends go up with activations and down with gradients; receives the reverse.
    elif (upwards != (op.of == ops.FORWARD)) == (op.kind == ops.SEND):
        yield "runs the wrong way: activations go up, gradients down."


def _homes(program: Program) -> Iterator[str]:
    """Yield pieces whose forward is not on exactly one stage of each pipeline."""
    holds = [
        {op.piece for op in row if op.kind == ops.FORWARD}
        for row in program.rows
    ]
    for line in dict.fromkeys(map(program.line, range(len(program.rows)))):
        for piece in range(program.pieces):
            homes = [row for row in line if piece in holds[row]]
            if len(homes) != 1:
                where = (
                    " and ".join(_rank(program, row) for row in homes)
                    or "no rank"
                )
                yield f"piece {piece} has its forward on {where}; each piece is on one stage."


def _needs(made: Graph) -> Iterator[str]:
    """Yield needs that no operation meets, or only one that is listed later."""
    for i, what in made.lacks:
        row, op = made.ops[i]
        yield f"{_rank(made.program, row)}: {op} needs {what}, which is missing."
    for i, (row, op) in enumerate(made.ops):
        for j in made.before[i]:
            # An operation of the own list that comes later cannot be waited for.
            if j > i and made.ops[j][0] == row:
                yield f"{_rank(made.program, row)}: {op} stands before {made.ops[j][1]}, which it needs."


def _groups(made: Graph) -> Iterator[str]:
    """Yield messages that the two ends of a flow do not list alike, in the same order."""
    # The two ends of each lane, that is, of each directed flow between two rows.
    ends: dict[str, tuple[list[tuple[int, Op]], list[tuple[int, Op]]]] = {}
    for i, (row, op) in enumerate(made.ops):
        if op.of:
            sent, received = ends.setdefault(made.lanes[i], ([], []))
            end = received if op.kind == ops.RECEIVE else sent
            end.append((row, op))
    for sent, received in ends.values():
        there = [_message(op) for _, op in sent]
        here = [_message(op) for _, op in received]
        lost = set(there) - set(here)
        never = set(here) - set(there)
        for (row, op), message in zip(sent, there, strict=True):
            if message in lost:
                yield f"{_rank(made.program, row)}: {op} is sent and never received."
        for (row, op), message in zip(received, here, strict=True):
            if message in never:
                yield f"{_rank(made.program, row)}: {op} waits for a message that is never sent."
        # All are there, but in another order: name the first pair that differs.
        if there != here and not lost and not never:
            k = next(
                k
                for k, (a, b) in enumerate(zip(there, here, strict=True))
                if a != b
            )
            (a, x), (b, y) = sent[k], received[k]
            what = f"sends {x} where {_rank(made.program, b)} receives {y}"
            yield f"{_rank(made.program, a)} {what}: both ends must list their messages in one order."


def _message(op: Op) -> tuple[int, int, int]:
    """The identity of a message, equal at both ends: from piece, to piece, microbatch."""
    ends = (op.piece, op.peer) if op.kind == ops.SEND else (op.peer, op.piece)
    return (*ends, op.index)


def _collectives(made: Graph) -> Iterator[str]:
    """Yield calls that a member of their group never makes."""
    program = made.program
    # The stages that call a tied sum are checked in `_ties`.
    kinds = [kind for kind in ops.COLLECTIVES if kind != ops.TIE]
    calls = [{op for op in row if op.kind in kinds} for row in program.rows]
    for row, mine in enumerate(calls):
        # Only rows that share a group are compared, so stages may differ.
        for op in sorted(mine):
            for other in program.members(row, group_axes(op, program)):
                if op not in calls[other]:
                    never = f"{_rank(program, other)} of its group never makes"
                    yield f"{_rank(program, row)}: {op} is a call that {never}."


def _left_over(program: Program, number: int) -> Iterator[str]:
    """Yield values that nothing uses: outputs not sent, forwards without a backward."""
    who, row = _rank(program, number), program.rows[number]
    have = set(row)
    homes = program.homes[number]
    named = {op[:3] for op in row if not op.of}
    again = recomputed(row)
    # Only a program with backwards must use what its forwards keep.
    trains = not program.kinds.isdisjoint(ops.PROPAGATES)
    for op in row:
        kind, piece, m, of, _ = op
        if kind == ops.SEND or (kind not in ops.ON_MICROBATCH and not of):
            continue
        back = [k for k in ops.BACKWARDS if (k, piece, m) in named]
        if kind == ops.FORWARD and trains and back not in _WHOLE_BACKWARDS:
            got = ", ".join(f"{piece}{k}{m}" for k in back) or "no backward"
            wanted = (
                " and ".join(f"{piece}{k}{m}" for k in way)
                for way in _WHOLE_BACKWARDS
            )
            yield f"{who}: {op} is followed by {got}; it needs {', or '.join(wanted)}."
        unused = not back and (
            kind in ops.RECOMPUTES or (piece, m) not in again
        )
        if unused and kind in (*ops.RECOMPUTES, ops.RELOAD):
            yield f"{who}: {op} brings back what no backward uses."
        if kind in ops.RECOMPUTES and (ops.FORWARD, piece, m) not in named:
            forward = Op(ops.FORWARD, piece, m)
            yield f"{who}: {op} computes again what no {forward} has computed."
        used = (ops.FORWARD, piece, m) in named if of == ops.FORWARD else back
        if kind == ops.RECEIVE and not used:
            yield f"{who}: {op} receives what no {piece}{op.of}{m} uses."
        if kind == ops.OFFLOAD and (ops.RELOAD, piece, m) not in named:
            yield f"{who}: {op} moves out what {Op(ops.RELOAD, piece, m)} never brings back."
        if kind in (ops.FORWARD, *ops.PROPAGATES):
            to = piece + (1 if kind == ops.FORWARD else -1)
            ways = (ops.FORWARD,) if kind == ops.FORWARD else ops.PROPAGATES
            sent = homes.get(to, number) == number
            if not sent and not any(
                (ops.SEND, piece, m, way, to) in have for way in ways
            ):
                missing = Op(ops.SEND, piece, m, kind, to)
                yield f"{who}: {op} makes what piece {to} needs, and {missing} is missing."


_WHOLE_BACKWARDS = ([ops.BACKWARD], [ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT])


def _weights(program: Program, number: int, now: State) -> Iterator[str]:
    """Yield mistakes with weights and gradients.

    Gathers and drops must pair up. Each contribution is summed once, and each unit
    updated once in a step. A second N begins the next step.
    """
    who = _rank(program, number)
    drops = ops.DROP in now.has
    yield from _pairs(program, number)
    unused: dict[
        int, None
    ] = {}  # units with gradients that no update has used
    for op, _ in now.walk():
        kind, unit = op.kind, op.piece
        if kind == ops.COUNT:
            yield from _step_ends(who, now)
        # Neither dropped nor updated since: it brings nothing new.
        elif (
            kind == ops.GATHER
            and unit in now.gathered
            and unit not in now.stale
        ):
            yield f"{who}: {op} gathers unit {unit}, which is already there."
        elif kind in ops.FIRST_SUMS and unit in now.tied:
            tie = Op(ops.TIE, unit)
            yield f"{who}: {op} stands after {tie}, which adds finished sums of two stages."
        elif kind == ops.UPDATE:
            unused.pop(unit, None)
        elif now.updates and kind in ops.USES_WEIGHTS:
            for used in program.units(unit):
                if now.updates[used]:
                    update = Op(ops.UPDATE, used)
                    yield f"{who}: {op} uses unit {used} after its update {update} in the same step."
        if kind in ops.CONTRIBUTES:
            unused.update(dict.fromkeys(program.trained(unit)))
    for unit in sorted(now.gathered) if drops else ():
        drop = Op(ops.DROP, unit)
        yield f"{who}: unit {unit} is still gathered at the end; {drop} is missing after its last use."
    yield from _step_ends(who, now)
    # A program without sums and updates is no training step.
    if not program.kinds.isdisjoint((*ops.FIRST_SUMS, ops.UPDATE)):
        for unit, left in sorted(
            (u, left) for u, left in now.open.items() if left
        ):
            sum_of = ops.ADD if program.exact else ops.REDUCE
            missing = f"{Op(sum_of, unit)} is missing after them."
            yield f"{who}: {len(left)} gradients of unit {unit} are never summed: {missing}"
        for unit in sorted(unused):
            yield f"{who}: unit {unit} has gradients and no update {Op(ops.UPDATE, unit)} after them."


def _pairs(program: Program, number: int) -> Iterator[str]:
    """Yield operations whose counterpart is missing from the step.

    With replicas, a sum over shards needs one over replicas. Matrices sent to owners
    must return.
    """
    who, row = _rank(program, number), program.rows[number]
    have = set(row)
    pairs = [
        (ops.TO_OWNERS, ops.FROM_OWNERS),
        (ops.FROM_OWNERS, ops.TO_OWNERS),
    ]
    if program.replicated:
        sums, shares = ops.FIRST_SUMS, ops.REPLICA_SUMS
        pairs.append((sums[program.exact], shares[program.exact]))
    for kind, other in pairs:
        for op in row if kind in program.kinds else ():
            if op.kind != kind:
                continue
            partner = op._replace(kind=other)
            if partner not in have:
                yield f"{who}: {op} needs {partner} in the same step, which is missing."


def _step_ends(who: str, now: State) -> Iterator[str]:
    for unit, count in sorted(now.updates.items()):
        if count > 1:
            yield f"{who}: unit {unit} is updated {count} times in one step."


def _ties(program: Program) -> Iterator[str]:
    """Yield weights on two stages whose gradients are not summed once per step."""
    if program.kinds.isdisjoint(ops.FIRST_SUMS):
        return
    for number, row in enumerate(program.rows):
        homes = program.homes[number]
        steps = max(1, sum(op.kind == ops.COUNT for op in row))
        for unit in sorted(
            {unit for _, unit in program.tied}.difference(program.frozen)
        ):
            rows = {homes[p] for p in program.users(unit) if p in homes}
            times = sum(op.kind == ops.TIE and op.piece == unit for op in row)
            # As often as steps, on the stages that use the unit, and nowhere else.
            wanted = steps if len(rows) > 1 and number in rows else 0
            if times != wanted:
                used = f"pieces {' and '.join(map(str, program.users(unit)))} use unit {unit}"
                must = f"{Op(ops.TIE, unit)} must occur {wanted} times, not {times}."
                yield f"{_rank(program, number)}: {used}; {must}"


def _deadlock(made: Graph) -> Iterator[str]:
    """Walk as the ranks would. If they stop, yield where each one waits, and for what."""
    done = set(possible(made))
    if len(done) == len(made.events):
        return
    stuck: dict[int, list[int]] = {}
    for i, (row, _) in enumerate(made.ops):
        if made.event[i] not in done:
            stuck.setdefault(row, []).append(i)
    waits = []
    for row, left in sorted(stuck.items()):
        # The computation that waits says more than a transfer that waits with it.
        at = next((i for i in left if made.lanes[i] == COMPUTE), left[0])
        needs = (j for j in made.before[at] if made.event[j] not in done)
        what = next((f" for {made.ops[j][1]}" for j in needs), "")
        waits.append(
            f"{_rank(made.program, row)} waits at {made.ops[at][1]}{what}"
        )
    yield f"deadlock. {', '.join(waits)}."
