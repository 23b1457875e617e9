"""The dependency graph over all ranks, which `check` and `simulate` read.

An operation waits for three things: its inputs (`state.py`), the previous operation on
its lane, and everything its rank has waited for so far. A rank issues its list from one
thread (on a GPU, from one stream). Computation runs there, and an operation that must
wait for another lane blocks the thread, and with it everything listed later.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from . import ops
from .ops import COMPUTE, KINDS
from .program import Op, Program
from .state import State


def lane(op: Op, program: Program, row: int) -> str:
    """The lane of an operation: computing, a link, or a copy to or from the host.

    Each directed flow between two stages has its own lane.
    """
    if not op.of:
        return KINDS[op.kind].lane
    there = program.homes[row].get(op.peer, -1)
    source, target = (row, there) if op.kind == ops.SEND else (there, row)
    return f"{'act' if op.of == ops.FORWARD else 'grad'} {source}>{target}"


def group_axes(op: Op, program: Program) -> tuple[str, ...]:
    """The axes over which an operation is a collective; () if it is none."""
    if op.kind == ops.REDUCE and program.replicated:
        # the sum over replicas is an operation of its own
        return KINDS[ops.GATHER].axes
    return KINDS[op.kind].axes


class Graph(NamedTuple):
    """All operations of a program, with what must finish before each."""

    program: Program
    ops: list[tuple[int, Op]]  # (row, operation)
    lanes: list[str]
    before: list[list[int]]  # indices of the operations that must finish first
    event: list[int]  # each operation's event
    # operations that happen at one time: a computation, a message, a collective
    events: list[list[int]]
    lacks: list[tuple[int, str]]  # operations, and needs that nothing meets


def graph(program: Program, walked: Sequence[State] = ()) -> Graph:
    """Build the dependency graph over all rows.

    `walked` are the rows' final states, if they have been computed. The ends of a
    message and the calls of a collective are one event, which starts when all of them
    have been issued. They are matched in the order of their lanes; `check` reports a
    mismatch.
    """
    made = Graph(program, [], [], [], [], [], [])
    of_kind = {kind: row.lane for kind, row in KINDS.items()}
    for number in range(len(program.rows)):
        base, lanes = len(made.ops), made.lanes
        state = walked[number] if walked else State(program, number).follow()
        at = state.at
        last: dict[str, int] = {}  # each lane's last operation so far
        waited: list[int] = []  # the thread's waits since its last computation
        flows: dict[tuple[str, str, int], str] = {}  # lanes of messages
        for i, (op, needs) in enumerate(
            zip(state.ops, state.needed, strict=True), base
        ):
            kind, _, _, of, peer = op
            if of:
                flow = kind, of, peer
                if flow not in flows:
                    flows[flow] = lane(op, program, number)
                where = flows[flow]
            else:
                where = of_kind[kind]
            first: list[int] = []
            waits: list[int] = []
            for need in needs:
                if isinstance(need, str):
                    made.lacks.append((i, need))
                    continue
                j = base + at[need]
                # A need listed later stays an edge, so that `check` can name it.
                if j >= i:
                    first.append(j)
                # on the compute lane, the last computation implies it
                elif lanes[j] != COMPUTE:
                    first.append(j)
                    waits.append(j)
            if where in last:
                first.append(last[where])
            if where != COMPUTE and COMPUTE in last:
                first.append(last[COMPUTE])
            if waited:
                first += waited
            # A computation has waited for all of these, and later operations wait for
            # the computation.
            if where == COMPUTE:
                waited = []
            elif waits:
                waited = waited + waits
            last[where] = i
            lanes.append(where)
            made.before.append(first)
        made.ops.extend(zip(repeat(number), state.ops))
    _pair(made)
    return made


def _pair(made: Graph) -> None:
    """Join the operations that are one event."""
    joint: dict[tuple[object, ...], int] = {}
    seen: Counter[tuple[str, str]] = Counter()
    events = made.events
    event = made.event
    collectives = frozenset(ops.COLLECTIVES)
    # The group of a kind's collectives, by row.
    groups: dict[tuple[int, str], tuple[int, ...]] = {}
    for i, (row, op) in enumerate(made.ops):
        number = len(events)
        kind = op.kind
        if op.of:
            # Both ends count their messages on the flow; equal counts are the same
            # message.
            end = (made.lanes[i], kind)
            number = joint.setdefault((made.lanes[i], seen[end]), number)
            seen[end] += 1
        # Collectives match by kind, unit and count among the rows of the group.
        elif kind in collectives:
            group = groups.get((row, kind))
            if group is None:
                group = _group(made.program, row, op)
                # The group of a tied sum depends on its unit.
                if kind != ops.TIE:
                    groups[row, kind] = group
            number = joint.setdefault((op[:3], group), number)
        if number == len(events):
            events.append([i])
        else:
            events[number].append(i)
        event.append(number)


def possible(made: Graph) -> list[int]:
    """The events in a possible order, without those that can never start."""
    # Kahn's algorithm: an event is ready when all that it waits for are done.
    waits = [0] * len(made.events)
    of = made.event
    after: list[list[int]] = [[] for _ in made.events]
    for event, before in zip(of, made.before, strict=True):
        waits[event] += len(before)
        for j in before:
            after[of[j]].append(event)
    ready = [e for e, count in enumerate(waits) if not count]
    for event in ready:  # grows while it is walked
        for later in after[event]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return ready


def _group(program: Program, row: int, op: Op) -> tuple[int, ...]:
    """The rows that take part in a collective of this row."""
    # A tied sum runs among the stages that use the unit, whatever the mesh axes.
    if op.kind == ops.TIE:
        homes = program.homes[row]
        users = program.users(op.piece)
        return tuple(sorted({homes[user] for user in users if user in homes}))
    return program.members(row, group_axes(op, program))
