"""How long a program takes: every operation laid on its lane as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from . import ops
from .graph import Graph, graph, possible
from .memory import Sizes, changes
from .program import Op, Program, ProgramError
from .schedules import refuse_vast
from .timeline import Span, Timeline

__all__ = ["Costs", "repeat", "simulate"]


_HALVES = (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Costs:
    """How long operations take, by kind; a piece or a rank may differ.

    `pieces[kind, piece]` replaces the kind's time, `ranks[rank]` multiplies what that rank
    computes, `share` is the part of a stage that one piece is. A kind that is not named costs
    nothing; B left out costs what I and W cost together, R left out what F does.
    """

    kinds: Mapping[str, float] = field(
        default_factory=lambda: {ops.FORWARD: 1.0, ops.BACKWARD: 2.0}
    )
    pieces: Mapping[tuple[str, int], float] = field(default_factory=dict)
    ranks: Mapping[int, float] = field(default_factory=dict)
    share: Mapping[int, float] = field(default_factory=dict)

    def of(self, op: Op, rank: int) -> float:
        kind = op.kind
        if kind == ops.RECEIVE:
            # The two ends of a message are one event; its time is told at the sending end.
            return self.pieces.get((ops.RECEIVE, op.piece), 0.0)
        time = self._time(kind, op.piece)
        return time * self.ranks.get(rank, 1.0) if kind in ops.COMPUTES else time

    def _time(self, kind: str, piece: int) -> float:
        """What was said of this piece, whole or in parts; else what its kind costs."""
        known = self._known
        if (kind, piece) not in known:
            known[kind, piece] = self._find(kind, piece)
        return known[kind, piece]

    @cached_property
    def _known(self) -> dict[tuple[str, int], float]:
        return dict(self.pieces)

    def _find(self, kind: str, piece: int) -> float:
        said = {k for k in (ops.FORWARD, *ops.BACKWARDS) if (k, piece) in self.pieces}
        if kind == ops.BACKWARD and said & {*_HALVES}:
            return self._time(ops.INPUT_GRADIENT, piece) + self._time(ops.WEIGHT_GRADIENT, piece)
        if kind in _HALVES and ops.BACKWARD in said:
            return self._time(ops.BACKWARD, piece) / 2
        if kind == ops.RECOMPUTE and ops.FORWARD in said:
            return self._time(ops.FORWARD, piece)
        if kind == ops.SEND:
            return self.kinds.get("send", 0.0)
        return self._stage(kind) * (self.share.get(piece, 1.0) if piece >= 0 else 1.0)

    def _stage(self, kind: str) -> float:
        known = self.kinds
        if kind == ops.BACKWARD and ops.BACKWARD not in known:
            return known.get(ops.INPUT_GRADIENT, 0.0) + known.get(ops.WEIGHT_GRADIENT, 0.0)
        if kind in _HALVES and kind not in known:
            return known.get(ops.BACKWARD, 0.0) / 2
        return (
            known.get(ops.FORWARD, 0.0)
            if kind == ops.RECOMPUTE and ops.RECOMPUTE not in known
            else known.get(kind, 0.0)
        )


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
    time = [costs.of(op, first[row]) for row, op in made.ops]
    start, end = [0.0] * len(time), [0.0] * len(time)
    order = possible(made)
    if len(order) < len(made.events):
        raise ProgramError(
            "this program never ends: operations wait on each other. Run check on it."
        )
    for event in order:
        members = made.events[event]
        begin = max([end[j] for i in members for j in made.before[i]], default=0.0)
        finish = begin + max([time[i] for i in members])
        for i in members:
            start[i], end[i] = begin, finish
    return start, end


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
    refuse_vast(steps * sum(map(len, program.rows)) // 2)
    width = program.microbatches
    per_row = [
        {(op.kind, op.piece): 1 + op.index for op in sorted(row, key=lambda o: o.index)}
        for row in program.rows
    ]

    def later(op: Op, row: int, step: int) -> Op:
        if op.of or op.kind in ops.ON_MICROBATCH:
            return op._replace(index=op.index + step * width)
        return op._replace(index=op.index + step * per_row[row][op.kind, op.piece])

    return program.with_rows(
        [later(op, r, step) for step in range(steps) for op in row]
        for r, row in enumerate(program.rows)
    )
