"""Proof, before anything runs, that a program can end and computes one training step.

`faults` lists everything that is wrong, each naming the operation and the rank; `check` raises
with all of it, or returns what every rank holds at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .memory import Peak, Sizes, peaks
from .needs import Graph, graph, group_axes
from .op import Op, Program, ProgramError

__all__ = ["Proof", "check", "faults"]


@dataclass(frozen=True)
class Proof:
    """What a checked program holds at most, by row: microbatches (a chunk counts 1/V), then by
    kind in pieces and units, and in bytes when sizes were given."""

    held: tuple[float, ...]
    counts: tuple[Peak, ...]
    bytes: tuple[Peak, ...] | None = None


def check(program: Program, sizes: Sizes | None = None) -> Proof:
    """The proof that a program is right, or a ProgramError with every fault."""
    found = faults(program)
    if found:
        raise ProgramError("\n".join(found))
    return Proof(
        held(program),
        peaks(program, Sizes.counts(program.pieces)),
        peaks(program, sizes) if sizes else None,
    )


def held(program: Program) -> tuple[float, ...]:
    """The most microbatches between forward and (last) backward on each row."""
    found = []
    for row in program.rows:
        share = 1 / max(1, len({op.piece for op in row if op.kind == "F"}))
        now = most = 0
        for op in row:
            now += (op.kind == "F") - (op.kind in "BW")
            most = max(most, now)
        found.append(round(most * share, 9))
    return tuple(found)


def faults(program: Program) -> tuple[str, ...]:
    """Everything that is wrong with a program; the first cause first."""
    found = [*_names(program), *_groups_share_rows(program)]
    if found:
        return tuple(found)
    made = graph(program)
    found += _needs(made)
    found += _wires(made)
    found += _collectives(made)
    for number in range(len(program.rows)):
        found += _left_over(program, number)
        found += _weights(program, number)
    found += _ties(program)
    return tuple(found or _deadlock(made))


def _rank(program: Program, row: int) -> str:
    ranks = program.ranks(row)
    more = f" (and {len(ranks) - 1} more)" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{more}"


def _names(program: Program) -> Iterator[str]:
    """Every operation stands once, and what it names exists."""
    for number, row in enumerate(program.rows):
        who = _rank(program, number)
        for op, count in Counter(row).items():
            if count > 1:
                yield f"{who}: {op} stands {count} times; each operation stands once."
        for op in dict.fromkeys(row):
            if op.kind in "NA":
                continue
            host = program.host.get(op.piece)
            tied = op.kind in "GDSTU" and any(
                program.host.get(p) == number for p in program.users(op.piece)
            )
            if host is None and not tied:
                yield f"{who}: {op} names piece {op.piece}, of which no rank has a forward."
            elif host != number and not tied:
                yield f"{who}: {op} belongs to {_rank(program, host or 0)}, which holds piece {op.piece}."
            if op.of and abs(op.peer - op.piece) != 1:
                yield f"{who}: {op} is between pieces {op.piece} and {op.peer}, which are not neighbours."
            elif op.of and program.host.get(op.peer) in (None, number):
                yield f"{who}: {op} goes to piece {op.peer}, which is not on another rank."
            elif op.of and ((op.peer > op.piece) != (op.of == "F")) == (op.kind == ">"):
                yield f"{who}: {op} runs the wrong way: activations go up, gradients down."
    for piece in range(program.pieces):
        homes = [
            n
            for n, row in enumerate(program.rows)
            if any(o.kind == "F" and o.piece == piece for o in row)
        ]
        if len(homes) != 1:
            where = " and ".join(_rank(program, n) for n in homes) or "no rank"
            yield f"piece {piece} has its forward on {where}; each piece is on one stage."


def _groups_share_rows(program: Program) -> Iterator[str]:
    """Ranks that compute one piece together follow one row: the collectives inside F pair by it."""
    inner = [a.name for a in program.mesh.axes if a.name in ("cp", "tp", "ep")]
    for group in program.mesh.groups(inner) if inner else ():
        rows = {program.owner[rank] for rank in group}
        if len(rows) > 1:
            yield (
                f"ranks {', '.join(map(str, group))} compute the same pieces together"
                f" ({', '.join(inner)}) but follow {len(rows)} different lists."
            )


def _needs(made: Graph) -> Iterator[str]:
    """Every need is met, and by something that stands earlier in the list."""
    for i, what in made.lacks:
        row, op = made.ops[i]
        yield f"{_rank(made.program, row)}: {op} needs {what}, which is not there."
    for i, before in enumerate(made.before):
        for j in before:
            if j > i and made.ops[j][0] == made.ops[i][0]:
                row, op = made.ops[i]
                yield f"{_rank(made.program, row)}: {op} stands before {made.ops[j][1]}, which it needs."


def _wires(made: Graph) -> Iterator[str]:
    """Both ends of every flow list the same messages in the same order."""
    ends: dict[str, tuple[list[tuple[int, Op]], list[tuple[int, Op]]]] = {}
    for i, (row, op) in enumerate(made.ops):
        if op.of:
            sent, received = ends.setdefault(made.lanes[i], ([], []))
            (sent if op.kind == ">" else received).append((row, op))
    for sent, received in ends.values():
        there = [_message(op) for _, op in sent]
        here = [_message(op) for _, op in received]
        for row, op in sent:
            if _message(op) not in here:
                yield f"{_rank(made.program, row)}: {op} is sent and never received."
        for row, op in received:
            if _message(op) not in there:
                yield f"{_rank(made.program, row)}: {op} waits for a message that is never sent."
        if there != here and sorted(there) == sorted(here):
            k = next(k for k, (a, b) in enumerate(zip(there, here, strict=True)) if a != b)
            (a, x), (b, y) = sent[k], received[k]
            yield (
                f"{_rank(made.program, a)} sends {x} where {_rank(made.program, b)} receives {y}:"
                " both ends must list their messages in one order."
            )


def _message(op: Op) -> tuple[int, int, int]:
    """What travels, told alike at both ends: from piece, to piece, microbatch."""
    ends = (op.piece, op.peer) if op.kind == ">" else (op.peer, op.piece)
    return (*ends, op.index)


def _collectives(made: Graph) -> Iterator[str]:
    """The members of every group make the same calls. Another order of calls is a deadlock."""
    program = made.program
    calls = [Counter(op for op in row if op.kind in "NAGS") for row in program.rows]
    for row, mine in enumerate(calls):
        first = program.owner.index(row)
        for op in mine:
            axes = [a.name for a in program.mesh.axes if a.name in group_axes(op)]
            rows = {program.owner[rank] for rank in program.mesh.group(first, axes)}
            for other in sorted(rows - {row}):
                if op not in calls[other]:
                    yield (
                        f"{_rank(program, row)}: {op} is a call that {_rank(program, other)} of its"
                        " group never makes."
                    )


def _left_over(program: Program, number: int) -> Iterator[str]:
    """Every forward is used once, every gradient summed once, every unit updated once."""
    who, row = _rank(program, number), program.rows[number]
    have = set(row)
    trains = any(op.kind in "BI" for r in program.rows for op in r)
    for op in row:
        piece, m = op.piece, op.index
        back = {k for k in "BIW" if Op(k, piece, m) in have}
        if op.kind == "F" and trains and back not in ({"B"}, {"I", "W"}):
            got = ", ".join(f"{piece}{k}{m}" for k in sorted(back)) or "no backward"
            yield f"{who}: {op} is followed by {got}; it needs {piece}B{m}, or {piece}I{m} and {piece}W{m}."
        if op.kind in "RZ" and not back and Op("R", piece, m) not in have - {op}:
            yield f"{who}: {op} brings back what no backward uses."
        if op.kind == "O" and Op("Z", piece, m) not in have:
            yield f"{who}: {op} moves out what {piece}Z{m} never brings back."
        if op.kind == "<":
            user = [Op("F", piece, m)] if op.of == "F" else [Op("B", piece, m), Op("I", piece, m)]
            if not have.intersection(user):
                yield f"{who}: {op} receives what {user[0]} never uses."
    yield from _flows_out(program, number)


def _flows_out(program: Program, number: int) -> Iterator[str]:
    """What the next piece on another rank needs is sent there."""
    who, row = _rank(program, number), program.rows[number]
    sent = {(op.piece, op.peer, op.index) for op in row if op.kind == ">"}
    for op in row:
        if op.kind in "FBI":
            to = op.piece + (1 if op.kind == "F" else -1)
            if program.host.get(to, number) != number and (op.piece, to, op.index) not in sent:
                yield f"{who}: {op} makes what piece {to} needs, and {op}>{to} is missing."


def _weights(program: Program, number: int) -> Iterator[str]:
    """Gathers and drops pair up; each contribution is summed once and each unit updated once."""
    who, row = _rank(program, number), program.rows[number]
    drops = {op.piece for op in row if op.kind == "D"}
    present: set[int] = set()
    owed: Counter[int] = Counter()
    updates: Counter[int] = Counter()
    sums = any(op.kind in "SU" for r in program.rows for op in r)
    for op in row:
        unit = op.piece
        if op.kind == "G":
            if unit in present:
                yield f"{who}: {op} gathers unit {unit}, which is already there."
            present.add(unit)
        elif op.kind == "D":
            present.discard(unit)
        elif op.kind in "BW":
            owed.update(program.units(unit))
        elif op.kind == "S":
            owed[unit] = 0
        if op.kind in "FBIRW" and op.kind != "W":
            for used in program.units(unit):
                if updates[used]:
                    yield f"{who}: {op} uses unit {used} after its update {used}U in the same step."
        if op.kind == "U":
            updates[unit] += 1
    for unit in sorted(present & drops):
        yield f"{who}: unit {unit} is still gathered at the end; {unit}D is missing after its last use."
    for unit, count in sorted(owed.items()) if sums else ():
        if count:
            yield f"{who}: {count} gradients of unit {unit} are never summed: {unit}S is missing after them."
        if not updates[unit]:
            yield f"{who}: unit {unit} has gradients and no update {unit}U."
    for unit, count in sorted(updates.items()):
        if count > 1:
            yield f"{who}: unit {unit} is updated {count} times in one step."


def _ties(program: Program) -> Iterator[str]:
    """A weight that two stages hold has its gradients summed over both, once."""
    sums = any(op.kind == "S" for row in program.rows for op in row)
    for piece, unit in program.tied if sums else ():
        rows = {program.host[p] for p in (piece, unit) if p in program.host}
        for number in sorted(rows):
            times = sum(op.kind == "T" and op.piece == unit for op in program.rows[number])
            wanted = 1 if len(rows) > 1 else 0
            if times != wanted:
                yield (
                    f"{_rank(program, number)}: unit {unit} is tied to piece {piece};"
                    f" {unit}T must stand {wanted} times, not {times}."
                )


def _deadlock(made: Graph) -> Iterator[str]:
    """Walk as the ranks would; if they stop, say at which operation each one waits."""
    waits = [0] * len(made.events)
    after: list[list[int]] = [[] for _ in made.events]
    for i, before in enumerate(made.before):
        for j in before:
            after[made.event[j]].append(made.event[i])
            waits[made.event[i]] += 1
    ready = [e for e, count in enumerate(waits) if not count]
    for event in ready:
        for later in after[event]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    if len(ready) == len(waits):
        return
    done = set(ready)
    stuck: dict[int, Op] = {}
    for i, (row, op) in enumerate(made.ops):
        if made.event[i] not in done:
            stuck.setdefault(row, op)
    at = ", ".join(f"{_rank(made.program, row)} at {op}" for row, op in sorted(stuck.items()))
    yield f"deadlock. {at}: each waits for another."
