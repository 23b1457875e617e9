"""The one dependency rule: which operations must finish before this one.

`check`, `simulate` and the passes ask here; nothing else in the code knows it. Two parts:
*needs*, the values an operation consumes, and *order*, what issuing adds: operations of one lane
run in the order of the list, and what is issued beside the compute lane starts after the compute
operations that stand before it (a collective is issued from the compute stream's context).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .program import Op, Program

__all__ = ["COMPUTE", "Graph", "graph", "group_axes", "lane", "possible"]

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


def lane(op: Op, program: Program, row: int) -> str:
    """Where an operation of a row runs: the compute lane, a link, or a copy to or from the host.

    Each directed flow between two stages has a lane of its own. A drop takes no time on any.
    """
    if op.kind in _COMPUTES or op.kind == "D":
        return COMPUTE
    if op.of:
        there = program.homes[row].get(op.peer, -1)
        source, target = (row, there) if op.kind == ">" else (there, row)
        return f"{'act' if op.of == 'F' else 'grad'} {source}>{target}"
    return _LANES[op.kind]


def group_axes(op: Op) -> tuple[str, ...]:
    """The axes over which an operation is a collective, if it is one by itself."""
    if op.kind in "GS":
        return ("dp", "cp")
    if op.kind == "T":
        return ("pp",)
    return ("dp", "pp", "cp", "tp", "ep") if op.kind in "NA" else ()


_NO_WEIGHTS = (
    "the weights of unit {unit}: a {unit}G must stand before it, after the last {unit}D and {unit}U"
)


class Lack(NamedTuple):
    """A need that nothing on the rank meets."""

    what: str


class _Row:
    """One rank's list, walked once; knows at each operation what those before it have done."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.ops = program, program.rows[number]
        self.at = {op: i for i, op in reversed(list(enumerate(self.ops)))}
        self.last_piece = program.pieces - 1
        self.gathers = any(op.kind == "G" for op in self.ops)
        self.received = {(o.piece, o.of == "F", o.index): o for o in self.ops if o.kind == "<"}
        self.has = {op.kind for op in self.ops}
        self.present: dict[int, Op] = {}  # unit -> the gather that brought its weights
        self.stale: set[int] = set()  # units updated since their gather
        self.owed: dict[int, list[Op]] = {}  # unit -> contributions that no S has summed
        self.summed: dict[int, Op] = {}  # unit -> the last S or T
        self.updated: dict[int, Op] = {}
        self.counted: Op | None = None
        self.agreed: Op | None = None

    def walk(self) -> Iterator[tuple[Op, list[Op | Lack]]]:
        """Every operation in order, with what it needs."""
        for op in self.ops:
            yield op, self._needs(op)
            self._note(op)

    def _needs(self, op: Op) -> list[Op | Lack]:
        kind, piece, m = op.kind, op.piece, op.index
        if kind == "F":
            return [*self._weights(piece), *self._input(piece, m)]
        if kind in "BI":
            return [*self._weights(piece), *self._kept(piece, m), *self._gradient(piece, m)]
        if kind == "W":
            return [self._one_of(Op("I", piece, m))]
        if kind == ">":
            kinds = "F" if op.of == "F" else "BI"
            return [self._one_of(*(Op(k, piece, m) for k in kinds))]
        if kind == "R":
            return [*self._weights(piece), *self._segment(op)]
        if kind == "O":
            return [self._one_of(Op("F", piece, m))]
        if kind == "Z":
            return [self._one_of(Op("O", piece, m))]
        return self._on_unit(kind, piece)

    def _on_unit(self, kind: str, unit: int) -> list[Op | Lack]:
        if kind == "G":
            return [self.updated[unit]] if unit in self.updated else []
        if kind == "D":
            return [self.present.get(unit, Lack(f"a gather of unit {unit} before it"))]
        if kind == "S":
            none = Lack(f"a gradient of unit {unit} not yet summed")
            return list(self.owed[unit]) if unit in self.owed else [none]
        if kind == "T":
            return [
                self.summed[unit] if unit in self.summed else Lack(f"the sum {unit}S before it")
            ]
        if kind == "A":
            return [*self.summed.values()]
        return self._update(unit) if kind == "U" else []

    def _one_of(self, *choices: Op) -> Op | Lack:
        for choice in choices:
            if choice in self.at:
                return choice
        return Lack(" or ".join(map(str, choices)))

    def _weights(self, piece: int) -> list[Op | Lack]:
        found: list[Op | Lack] = []
        for unit in self.program.units(piece):
            if unit in self.present and unit not in self.stale:
                found.append(self.present[unit])
            elif self.gathers:
                # Where weights are gathered, no unit is whole at home.
                found.append(Lack(_NO_WEIGHTS.format(unit=unit)))
            elif unit in self.updated:
                found.append(self.updated[unit])
        return found

    def _input(self, piece: int, m: int) -> list[Op | Lack]:
        if not piece:
            return []
        before = Op("F", piece - 1, m)
        if before in self.at:
            return [before]
        return [self.received.get((piece, True, m), Lack(f"{piece}F{m}<{piece - 1}"))]

    def _segment(self, op: Op) -> list[Op | Lack]:
        """What a recomputation starts from: the recomputed piece before it, or its kept input."""
        again = Op("R", op.piece - 1, op.index)
        if self.at.get(again, len(self.ops)) < self.at[op]:
            return [again]
        return self._held(op.piece, op.index)

    def _kept(self, piece: int, m: int) -> list[Op | Lack]:
        again = Op("R", piece, m)
        return [again] if again in self.at else self._held(piece, m)

    def _held(self, piece: int, m: int) -> list[Op | Lack]:
        """What the forward kept, back from the host if it went there."""
        found = [self._one_of(Op("F", piece, m))]
        if Op("O", piece, m) in self.at:
            found.append(self._one_of(Op("Z", piece, m)))
        return found

    def _gradient(self, piece: int, m: int) -> list[Op | Lack]:
        if piece == self.last_piece:
            # The loss is a sum over tokens divided by their number over all ranks.
            return [self.counted or Lack("N before it")] if "N" in self.has else []
        for op in (Op("B", piece + 1, m), Op("I", piece + 1, m)):
            if op in self.at:
                return [op]
        return [self.received.get((piece, False, m), Lack(f"{piece}B{m}<{piece + 1}"))]

    def _update(self, unit: int) -> list[Op | Lack]:
        found: list[Op | Lack] = []
        if "A" in self.has:
            # A sum after the agreement undoes it: what was agreed on is not what would be applied.
            found.append(self.agreed or Lack("A before it, after every sum"))
        owed = self.owed.get(unit, [])
        if unit in self.summed and not owed:
            found.append(self.summed[unit])
            return found
        if "S" in self.has:
            of = " of " + ", ".join(map(str, owed[:2])) if owed else ""
            found.append(Lack(f"the sum {unit}S{of} before it"))
        else:
            found += owed or [Lack(f"a gradient of unit {unit}")]
        return found

    def _note(self, op: Op) -> None:
        kind, unit = op.kind, op.piece
        if kind in "BW":
            for used in self.program.units(unit):
                self.owed.setdefault(used, []).append(op)
        elif kind == "G":
            self.present[unit] = op
            self.stale.discard(unit)
        elif kind == "D":
            self.present.pop(unit, None)
        elif kind in "ST":
            self.owed.pop(unit, None)
            self.summed[unit] = op
            self.agreed = None
        elif kind == "N":
            self.counted = op
        elif kind == "A":
            self.agreed = op
        elif kind == "U":
            self.updated[unit] = op
            self.stale.add(unit)
            self.summed.pop(unit, None)
            self.owed.pop(unit, None)


class Graph(NamedTuple):
    """All operations of a program with what must finish before each; computed once, read by all."""

    program: Program
    ops: list[tuple[int, Op]]  # (row, operation)
    lanes: list[str]
    before: list[list[int]]  # numbers of the operations that must finish first
    event: list[int]  # the event that each operation is part of
    events: list[list[int]]  # what happens at one time: a computation, a message, a collective
    lacks: list[tuple[int, str]]  # needs that nothing meets


def graph(program: Program) -> Graph:
    """What must finish before what, over all rows.

    The ends of a message and the calls of a collective are one event: it starts when all of them
    have been issued. They are matched in the order of their lanes; `check` says whether they agree.
    """
    made = Graph(program, [], [], [], [], [], [])
    for number, row in enumerate(program.rows):
        base = len(made.ops)
        index = {op: i for i, op in reversed(list(enumerate(row, base)))}
        last: dict[str, int] = {}  # lane -> its last operation so far
        for i, (op, needs) in enumerate(_Row(program, number).walk(), base):
            where = lane(op, program, number)
            first = []
            for need in needs:
                if isinstance(need, Op):
                    first.append(index[need])
                else:
                    made.lacks.append((i, need.what))
            if where in last:
                first.append(last[where])
            if where != COMPUTE and COMPUTE in last:
                first.append(last[COMPUTE])
            last[where] = i
            made.ops.append((number, op))
            made.lanes.append(where)
            made.before.append(first)
    _pair(made)
    return made


def _pair(made: Graph) -> None:
    """Join the operations that are one event."""
    joint: dict[tuple[object, ...], int] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for i, (row, op) in enumerate(made.ops):
        if op.of:
            # Both ends count their messages on the flow; equal counts meet.
            end = (made.lanes[i], op.kind)
            key: tuple[object, ...] = (made.lanes[i], seen[end])
            seen[end] += 1
        elif op.kind in "GSTNA":
            key = (op.kind, op.piece, op.index, _group(made.program, row, op))
        else:
            key = (i,)
        number = joint.setdefault(key, len(made.events))
        if number == len(made.events):
            made.events.append([])
        made.events[number].append(i)
        made.event.append(number)


def possible(made: Graph) -> list[int]:
    """The events in an order in which they can happen; those that wait for ever are left out."""
    waits = [0] * len(made.events)
    after: list[list[int]] = [[] for _ in made.events]
    for event, before in zip(made.event, made.before, strict=True):
        waits[event] += len(before)
        for j in before:
            after[made.event[j]].append(event)
    ready = [e for e, count in enumerate(waits) if not count]
    for event in ready:  # grows while it is walked
        for later in after[event]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return ready


def _group(program: Program, row: int, op: Op) -> tuple[int, ...]:
    """The rows that take part in a collective of this row."""
    if op.kind == "T":
        homes = program.homes[row]
        return tuple(sorted({homes[p] for p in program.users(op.piece) if p in homes}))
    return program.members(row, group_axes(op))
