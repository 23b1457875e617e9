"""The one dependency rule: which operations must finish before this one.

`check`, `simulate` and the passes ask here; nothing else in the code knows it. Two parts:
*needs*, the values an operation consumes, and *order*, what issuing adds: operations of one lane
run in the order of the list, and what is issued beside the compute lane starts after the compute
operations that stand before it (a collective is issued from the compute stream's context).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .op import Op, Program

__all__ = ["COMPUTE", "Event", "Graph", "graph", "group_axes", "lane"]

COMPUTE = "compute"
_COMPUTES = frozenset("FBIWR")
_LANES = {
    "U": "update",
    "G": "gather",
    "S": "reduce",
    "T": "tie",
    "N": "agree",
    "A": "agree",
    "O": "out",
    "Z": "in",
}


def lane(op: Op, program: Program) -> str:
    """Where an operation runs: the compute lane, a link, or a copy to or from the host.

    Each directed flow between two stages has a lane of its own. A drop takes no time on any.
    """
    if op.kind in _COMPUTES or op.kind == "D":
        return COMPUTE
    if op.kind in "<>":
        here, there = program.host.get(op.piece, -1), program.host.get(op.peer, -1)
        source, target = (here, there) if op.kind == ">" else (there, here)
        return f"{'grad' if op.of in 'BI' else 'act'} {source}>{target}"
    return _LANES[op.kind]


def group_axes(op: Op) -> tuple[str, ...]:
    """The axes over which an operation is a collective, if it is one by itself."""
    if op.kind in "GS":
        return ("dp", "cp")
    if op.kind == "T":
        return ("pp",)
    return ("dp", "pp", "cp", "tp", "ep") if op.kind in "NA" else ()


class Lack(NamedTuple):
    """A need that nothing on the rank meets."""

    what: str


class Row:
    """One rank's list with the questions that `needs` puts to it answered from tables."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number, self.ops = program, number, program.rows[number]
        self.at = {op: i for i, op in reversed(list(enumerate(self.ops)))}
        self.last_piece = program.pieces - 1
        self.gathered = {op.piece for op in self.ops if op.kind == "G"}
        self.received = {(o.piece, o.of == "F", o.index): o for o in self.ops if o.kind == "<"}
        self.has = frozenset(op.kind for op in self.ops)
        # What the walk below knows of the operations before the present one.
        self.present: dict[int, Op] = {}  # unit -> the gather that brought its weights
        self.owed: dict[int, list[Op]] = {}  # unit -> contributions that no S has summed
        self.summed: dict[int, Op] = {}  # unit -> the last S or T
        self.updated: dict[int, Op] = {}
        self.agreed: Op | None = None

    def walk(self) -> Iterator[tuple[Op, list[Op | Lack]]]:
        """Every operation in order, with what it needs."""
        for op in self.ops:
            yield op, list(self._needs(op))
            self._note(op)

    def _needs(self, op: Op) -> Iterator[Op | Lack]:
        kind, piece, m = op.kind, op.piece, op.index
        if kind in "FRBI":
            yield from self._weights(piece)
        if kind in "FR":
            yield from self._input(op)
        elif kind in "BI":
            yield from self._kept(piece, m)
            yield from self._gradient(piece, m)
        elif kind == "W":
            yield self._one_of(Op("I", piece, m))
        elif kind == ">":
            first = ("F",) if op.of == "F" else ("B", "I")
            yield self._one_of(*(Op(k, piece, m) for k in first))
        elif kind == "O":
            yield self._one_of(Op("F", piece, m))
        elif kind == "Z":
            yield self._one_of(Op("O", piece, m))
        elif kind == "G" and piece in self.updated:
            yield self.updated[piece]
        elif kind == "D":
            yield self.present.get(piece, Lack(f"a gather of unit {piece} before it"))
        elif kind == "S":
            yield from self.owed.get(piece, [])
            if not self.owed.get(piece):
                yield Lack(f"a gradient of unit {piece} not yet summed")
        elif kind == "T":
            yield self.summed.get(piece, Lack(f"the sum {piece}S before it"))
        elif kind == "A":
            yield from self.summed.values()
        elif kind == "U":
            yield from self._update(piece)

    def _one_of(self, *choices: Op) -> Op | Lack:
        for choice in choices:
            if choice in self.at:
                return choice
        return Lack(" or ".join(map(str, choices)))

    def _weights(self, piece: int) -> Iterator[Op | Lack]:
        for unit in self.program.units(piece):
            if unit in self.present:
                yield self.present[unit]
            elif unit in self.gathered:
                yield Lack(
                    f"the weights of unit {unit}: {unit}G must stand before it, after any {unit}D"
                )
            elif unit in self.updated:
                yield self.updated[unit]

    def _input(self, op: Op) -> Iterator[Op | Lack]:
        before, m = op.piece - 1, op.index
        if op.kind == "R":
            # Within a recomputed segment the input is the recomputed output of the piece before.
            again = Op("R", before, m)
            if again in self.at and self.at[again] < self.at[op]:
                yield again
                return
            yield self._one_of(Op("F", op.piece, m))
            away = Op("O", op.piece, m)
            if away in self.at:
                yield self._one_of(Op("Z", op.piece, m))
            return
        if before >= 0:
            if Op("F", before, m) in self.at:
                yield Op("F", before, m)
            else:
                yield self.received.get((op.piece, True, m), Lack(f"{op.piece}F{m}<{before}"))

    def _kept(self, piece: int, m: int) -> Iterator[Op | Lack]:
        if Op("R", piece, m) in self.at:
            yield Op("R", piece, m)
            return
        yield self._one_of(Op("F", piece, m))
        if Op("O", piece, m) in self.at:
            yield self._one_of(Op("Z", piece, m))

    def _gradient(self, piece: int, m: int) -> Iterator[Op | Lack]:
        if piece == self.last_piece:
            counts = [op for op in self.ops if op.kind == "N"] if "N" in self.has else []
            yield from counts[-1:] if len(counts) == 1 else self._count_before(piece, m, counts)
            return
        after = (Op("B", piece + 1, m), Op("I", piece + 1, m))
        for op in after:
            if op in self.at:
                yield op
                return
        yield self.received.get((piece, False, m), Lack(f"{piece}B{m}<{piece + 1}"))

    def _count_before(self, piece: int, m: int, counts: list[Op]) -> list[Op]:
        use = min(self.at.get(Op(k, piece, m), len(self.ops)) for k in "BI")
        return [op for op in counts if self.at[op] < use][-1:]

    def _update(self, unit: int) -> Iterator[Op | Lack]:
        if self.agreed:
            yield self.agreed
        if unit in self.summed and not self.owed.get(unit):
            yield self.summed[unit]
        elif "S" in self.has:
            owed = ", ".join(map(str, self.owed.get(unit, [])[:2]))
            yield Lack(f"the sum {unit}S" + (f" of {owed}" if owed else ""))
        else:
            yield from self.owed.get(unit, [])

    def _note(self, op: Op) -> None:
        kind, unit = op.kind, op.piece
        if kind == "G":
            self.present[unit] = op
        elif kind == "D":
            self.present.pop(unit, None)
        elif kind in "BW":
            for used in self.program.units(unit):
                self.owed.setdefault(used, []).append(op)
        elif kind == "S":
            self.owed[unit] = []
            self.summed[unit] = op
        elif kind == "T":
            self.summed[unit] = op
        elif kind == "A":
            self.agreed = op
        elif kind == "U":
            self.updated[unit] = op
            self.summed.pop(unit, None)
            self.owed.pop(unit, None)
            if not self.summed:
                self.agreed = None


class Event(NamedTuple):
    """What happens at one time: a computation, a message with its two ends, a collective's calls."""

    ops: tuple[int, ...]  # numbers of the operations, counted over all rows


class Graph(NamedTuple):
    """All operations of a program with what must finish before each; computed once, read by all."""

    program: Program
    ops: list[tuple[int, Op]]  # (row, operation)
    lanes: list[str]
    before: list[list[int]]  # numbers of the operations that must finish first
    event: list[int]  # the event that each operation is part of
    events: list[Event]
    lacks: list[tuple[int, str]]  # needs that nothing meets


def graph(program: Program) -> Graph:
    """What must finish before what, over all rows.

    The ends of a message and the calls of a collective are one event: it starts when all of them
    have been issued. They are matched in the order of their lanes; `check` says whether they agree.
    """
    ops: list[tuple[int, Op]] = []
    lanes: list[str] = []
    before: list[list[int]] = []
    lacks: list[tuple[int, str]] = []
    for number, row in enumerate(program.rows):
        base = len(ops)
        index = {op: base + i for i, op in enumerate(row)}
        last: dict[str, int] = {}  # lane -> its last operation so far
        for i, (op, needs) in enumerate(Row(program, number).walk(), base):
            where = lane(op, program)
            first = [index[n] for n in needs if isinstance(n, Op)]
            lacks += [(i, n.what) for n in needs if isinstance(n, Lack)]
            if where in last:
                first.append(last[where])
            if where != COMPUTE and COMPUTE in last:
                first.append(last[COMPUTE])
            last[where] = i
            ops.append((number, op))
            lanes.append(where)
            before.append(first)
    event, events = _events(program, ops, lanes)
    return Graph(program, ops, lanes, before, event, events, lacks)


def _events(
    program: Program, ops: list[tuple[int, Op]], lanes: list[str]
) -> tuple[list[int], list[Event]]:
    joint: dict[tuple[object, ...], list[int]] = {}
    seen: dict[tuple[object, ...], int] = {}
    for i, (row, op) in enumerate(ops):
        if op.kind in "<>":
            # Both ends count their messages on the flow; equal counts meet.
            end = (lanes[i], op.kind)
            key: tuple[object, ...] = (lanes[i], seen.get(end, 0))
            seen[end] = seen.get(end, 0) + 1
        elif op.kind in "GSTNA":
            call = (op.kind, op.piece, _group(program, row, op))
            key = (*call, op.index)
        else:
            key = (i,)
        joint.setdefault(key, []).append(i)
    events = [Event(tuple(members)) for members in joint.values()]
    event = [0] * len(ops)
    for number, members in enumerate(events):
        for i in members.ops:
            event[i] = number
    return event, events


def _group(program: Program, row: int, op: Op) -> tuple[int, ...]:
    """The rows that take part in a collective of this row."""
    if op.kind == "T":
        return tuple(
            sorted({program.host[p] for p in program.users(op.piece) if p in program.host})
        )
    first = program.owner.index(row)
    group = program.mesh.group(
        first, [a.name for a in program.mesh.axes if a.name in group_axes(op)]
    )
    return tuple(sorted({program.owner[rank] for rank in group}))
