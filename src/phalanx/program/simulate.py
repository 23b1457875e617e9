"""How long a program takes: every operation laid on its lane as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .memory import Sizes, changes
from .needs import Graph, graph
from .op import Op, Program, ProgramError
from .timeline import Span, Timeline

__all__ = ["Costs", "repeat", "simulate"]


@dataclass(frozen=True)
class Costs:
    """How long operations take, by kind; a piece or a rank may differ.

    `pieces[kind, piece]` replaces the kind's time, `ranks[rank]` multiplies what that rank
    computes, `share` is the part of a stage that one piece is. A kind that is not named costs
    nothing; B left out costs what I and W cost together, R left out what F does.
    """

    kinds: Mapping[str, float] = field(default_factory=lambda: {"F": 1.0, "B": 2.0})
    pieces: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ranks: Mapping[int, float] = field(default_factory=dict)
    share: Mapping[int, float] = field(default_factory=dict)

    def of(self, op: Op, rank: int) -> float:
        kind = op.kind
        if (kind, op.piece) in self.pieces:
            time = self.pieces[kind, op.piece]
        elif kind in "<>":
            # The two ends of a message are one event; its time is told at the sending end.
            return self.kinds.get("send", 0.0) if kind == ">" else 0.0
        else:
            time = self._stage(kind) * (self.share.get(op.piece, 1.0) if op.piece >= 0 else 1.0)
        return time * self.ranks.get(rank, 1.0) if kind in "FBIWR" else time

    def _stage(self, kind: str) -> float:
        known = self.kinds
        if kind == "B" and "B" not in known:
            return known.get("I", 0.0) + known.get("W", 0.0)
        if kind in "IW" and kind not in known:
            return known.get("B", 0.0) / 2
        return known.get("F", 0.0) if kind == "R" and "R" not in known else known.get(kind, 0.0)


def simulate(program: Program, costs: Costs | None = None, sizes: Sizes | None = None) -> Timeline:
    """The timeline of a program. One that can never end is refused; `check` says why."""
    costs = costs or Costs()
    made = graph(program)
    starts, ends = _times(made, costs)
    firsts = [program.owner.index(row) for row in range(len(program.rows))]
    spans = tuple(
        Span(firsts[row], made.lanes[i], op, starts[i], ends[i])
        for i, (row, op) in enumerate(made.ops)
    )
    return Timeline(spans, _memory(program, sizes, spans) if sizes else None)


def _times(made: Graph, costs: Costs) -> tuple[list[float], list[float]]:
    """When each operation starts and ends: the longest path over events."""
    first = [made.program.owner.index(row) for row in range(len(made.program.rows))]
    time = [
        max(costs.of(made.ops[i][1], first[made.ops[i][0]]) for i in event.ops)
        for event in made.events
    ]
    waits = [0] * len(made.events)
    after: list[list[int]] = [[] for _ in made.events]
    for i, before in enumerate(made.before):
        for j in before:
            after[made.event[j]].append(made.event[i])
            waits[made.event[i]] += 1
    start, end = [0.0] * len(time), [0.0] * len(time)
    ready = [e for e, count in enumerate(waits) if not count]
    for event in ready:  # grows while it is walked
        end[event] = start[event] + time[event]
        for later in after[event]:
            start[later] = max(start[later], end[event])
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    if len(ready) < len(time):
        raise ProgramError(
            "this program never ends: operations wait on each other. Run check on it."
        )
    return [start[e] for e in made.event], [end[e] for e in made.event]


def _memory(
    program: Program, sizes: Sizes, spans: tuple[Span, ...]
) -> dict[int, tuple[tuple[float, dict[str, float]], ...]]:
    """What each row's first rank holds over time, by kind."""
    found = {}
    rest = iter(spans)
    for row in range(len(program.rows)):
        steps: list[tuple[float, int, str, float]] = []
        for op, change in changes(program, sizes, row):
            span = next(rest) if op else None
            began, ended = (span.start, span.end) if span else (0.0, 0.0)
            steps += [(began, 1, kind, amount) for kind, amount in change.takes]
            steps += [(ended, 0, kind, -amount) for kind, amount in change.gives]
        now: dict[str, float] = {}
        points: dict[float, dict[str, float]] = {}
        for time, _, kind, amount in sorted(steps, key=lambda s: s[:2]):
            now[kind] = now.get(kind, 0.0) + amount
            points[time] = dict(now)
        found[program.owner.index(row)] = tuple(points.items())
    return found


def repeat(program: Program, steps: int) -> Program:
    """The same step several times, one after the other, with nothing between: no step waits for
    another but where an operation needs it (an update, an agreement)."""
    width = program.microbatches
    per_row = [
        {(op.kind, op.piece): 1 + op.index for op in sorted(row, key=lambda o: o.index)}
        for row in program.rows
    ]

    def later(op: Op, row: int, step: int) -> Op:
        if op.of or op.kind in "FBIWROZ":
            return op._replace(index=op.index + step * width)
        return op._replace(index=op.index + step * per_row[row][op.kind, op.piece])

    return program.with_rows(
        [later(op, r, step) for step in range(steps) for op in row]
        for r, row in enumerate(program.rows)
    )
