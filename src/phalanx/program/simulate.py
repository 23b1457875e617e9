"""Simulates a program: starts every operation on its lane as soon as its needs are met."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from . import ops
from .graph import Graph, graph, possible
from .memory import Sizes, changes
from .program import Op, Program, ProgramError, uncollected
from .schedules import refuse_vast
from .state import State
from .timeline import Span, Timeline

_HALVES = (ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Costs:
    """Durations of operations by kind, with exceptions for pieces and ranks.

    `pieces[kind, piece]` replaces the kind's time, `ranks[rank]` multiplies a rank's
    computing time, and `share` is one piece's fraction of a stage. Unnamed kinds cost
    nothing. A missing B costs I plus W, and a missing R costs F.
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
            # The two ends of a message are one event. Its time is that of the sending
            # end.
            return self.pieces.get((ops.RECEIVE, op.piece), 0.0)
        time = self._time(kind, op.piece)
        return (
            time * self.ranks.get(rank, 1.0) if kind in ops.COMPUTES else time
        )

    def _time(self, kind: str, piece: int) -> float:
        """The time given for this piece, whole or in parts; otherwise its kind's time."""
        known = self._known
        if (kind, piece) not in known:
            known[kind, piece] = self._find(kind, piece)
        return known[kind, piece]

    @cached_property
    def _known(self) -> dict[tuple[str, int], float]:
        return dict(self.pieces)

    def _find(self, kind: str, piece: int) -> float:
        if kind == ops.SEND:
            return self.kinds.get("send", 0.0)
        # Times of this piece itself, whole or in halves.
        given = {
            k
            for k in (ops.FORWARD, *ops.BACKWARDS)
            if (k, piece) in self.pieces
        }
        if parts := _parts(kind, given):
            return sum(
                part * self._time(k, piece) for k, part in parts.items()
            )
        # Otherwise its kind's, scaled by the piece's share of a stage.
        parts = _parts(kind, self.kinds.keys())
        time = sum(part * self.kinds.get(k, 0.0) for k, part in parts.items())
        return time * (self.share.get(piece, 1.0) if piece >= 0 else 1.0)


def _parts(kind: str, known: Collection[str]) -> dict[str, float]:
    """The known kinds that a kind's time consists of, each with its factor."""
    if kind in known:
        return {kind: 1.0}
    # A whole backward is its two halves, and a half is half of it.
    if kind == ops.BACKWARD and any(half in known for half in _HALVES):
        return dict.fromkeys(_HALVES, 1.0)
    if kind in _HALVES and ops.BACKWARD in known:
        return {ops.BACKWARD: 0.5}
    return (
        {ops.FORWARD: 1.0}
        if kind == ops.RECOMPUTE and ops.FORWARD in known
        else {}
    )


class Compiled(NamedTuple):
    """A program's events in a possible order, ready to be timed under any costs."""

    program: Program
    graph: Graph
    # For each event, the places in this order of the events it waits for.
    before: list[tuple[int, ...]]
    place: list[int]  # each graph event's place in this order
    price: list[int]  # each event's index in `priced`
    # (rank, operation) pairs; the slowest gives the event's time
    priced: list[tuple[tuple[int, Op], ...]]
    # For each row, the operations it computes, with their places.
    computing: list[list[tuple[int, Op]]]

    def prices(self, costs: Costs) -> list[float]:
        """The seconds of each entry of `priced`."""
        return [
            max(costs.of(op, rank) for rank, op in each)
            for each in self.priced
        ]


@uncollected()
def compiled(
    program: Program,
    blocking: Collection[str] = (),
    walked: Sequence[State] = (),
    joint: Collection[str] = (),
) -> Compiled:
    """Prepare a program for timing; raises if it can never end.

    `blocking` names lanes that do not overlap: a rank's next computation waits for
    them. `joint` names lanes that share a link: their operations follow each other in
    the order of the list. `walked` are the rows' final states, if they have been
    computed.
    """
    made = graph(program, walked)
    waiting: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    # A lane that does not overlap: the next computation waits for what it did before.
    for i, lane in enumerate(made.lanes) if blocking or joint else ():
        if lane in blocking:
            waiting.setdefault(made.ops[i][0], []).append(i)
        elif waiting and lane == ops.COMPUTE:
            made.before[i].extend(waiting.pop(made.ops[i][0], ()))
        if lane in joint:
            row = made.ops[i][0]
            made.before[i].extend([last[row]] if row in last else [])
            last[row] = i
    order = possible(made)
    if len(order) < len(made.events):
        what = "this program never ends: operations wait on each other"
        raise ProgramError(f"{what}. Run check on it.")
    first = [program.owner.index(row) for row in range(len(program.rows))]
    place = [0] * len(order)
    for n, event in enumerate(order):
        place[event] = n
    # The same event at the same rows and pieces has one price.
    known: dict[object, int] = {}
    result = Compiled(
        program=program,
        graph=made,
        before=[],
        place=place,
        price=[],
        priced=[],
        computing=[[] for _ in program.rows],
    )
    before = result.before
    price = result.price
    priced = result.priced
    all_ops = made.ops
    waits_of = made.before
    events = made.events
    at = [place[event] for event in made.event]
    for event in order:
        members = events[event]
        # All microbatches of a piece take the same time.
        key: object
        if len(members) == 1:
            i = members[0]
            waits = waits_of[i]
            before.append(
                (at[waits[0]],)
                if len(waits) == 1
                else tuple({at[j] for j in waits})
            )
            row, op = all_ops[i]
            key = row, op[0], op[1]
        else:
            before.append(tuple({at[j] for i in members for j in waits_of[i]}))
            own = [all_ops[i] for i in members]
            key = tuple((row, *op[:2]) for row, op in own)
        number = known.get(key)
        if number is None:
            number = known[key] = len(priced)
            own = [all_ops[i] for i in members]
            priced.append(tuple((first[row], op) for row, op in own))
        price.append(number)
    for place_of, lane, (row, op) in zip(at, made.lanes, all_ops, strict=True):
        if lane == ops.COMPUTE:
            result.computing[row].append((place_of, op))
    return result


def times(
    made: Compiled, costs: Costs, cores: float = math.inf
) -> tuple[list[float], list[float]]:
    """The start and end of each event: the longest path over the graph's edges.

    With `cores`, all rows share that many cores: while more rows are busy, each is
    slower. Costs are then those of a row with a core to itself.
    """
    prices = made.prices(costs)
    if cores < math.inf:
        return _sharing(made, prices, cores)
    # One pass in a possible order: all that an event waits for has its end already.
    starts: list[float] = []
    ends: list[float] = []
    for waits, price in zip(made.before, made.price, strict=True):
        begin = 0.0
        for j in waits:
            if ends[j] > begin:
                begin = ends[j]
        starts.append(begin)
        ends.append(begin + prices[price])
    return starts, ends


def _sharing(
    made: Compiled, prices: list[float], cores: float
) -> tuple[list[float], list[float]]:
    count = len(made.before)
    starts, ends = [0.0] * count, [0.0] * count
    waits = [len(before) for before in made.before]
    after: list[list[int]] = [[] for _ in range(count)]
    for n, before in enumerate(made.before):
        for j in before:
            after[j].append(n)
    # the rows at work in an event
    size = [len(made.priced[made.price[n]]) for n in range(count)]
    left: dict[int, float] = {}
    ready = [n for n in range(count) if not waits[n]]
    now = 0.0
    busy = 0
    # Processor sharing: until the next event ends, all progress at one rate.
    while ready or left:
        for n in ready:
            starts[n] = now
            left[n] = prices[made.price[n]]
            busy += size[n]
        ready = []
        slower = max(1.0, busy / cores)
        step = min(left.values())
        now += step * slower
        # Those that end now, up to rounding.
        for n in [n for n, rest in left.items() if rest <= step * (1 + 1e-9)]:
            del left[n]
            ends[n] = now
            busy -= size[n]
            for later in after[n]:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
        for n in left:
            left[n] -= step
    return starts, ends


class Repeat(NamedTuple):
    """A stretch of a program that further microbatches would repeat."""

    before: list[int]  # events that ended before it and are waited for later
    after: list[int]  # the same events, one period later
    inside: bytearray  # 1 for the events of the stretch


def repeating(made: Compiled, period: int, tail: int) -> Repeat | None:
    """Find the repeated stretch: the last `period` microbatches before the last `tail`.

    None unless the same events are waited for, and the same are unfinished, before and
    after it, and every piece is computed `period` times in it.
    """
    last, graph = made.program.microbatches - 1 - tail, made.graph
    first = last - period
    place = [made.place[event] for event in graph.event]
    # The ends of the first piece's backward, which close a microbatch.
    ends = {
        op.index: place[i]
        for i, (_, op) in enumerate(graph.ops)
        if op.piece == 0
        and op.kind in ops.PROPAGATES
        and op.index in (first, last)
    }
    if first < 0 or len(ends) < 2:
        return None
    before, after = (
        _cut(made, place, ends[index], index) for index in (first, last)
    )
    if before[:2] != after[:2]:
        return None
    # Everything between the two cuts.
    flags = zip(before[3], after[3], strict=True)
    inside = bytearray(is_now and not was for was, is_now in flags)
    each: Counter[tuple[int, str, int]] = Counter()
    for i, (row, op) in enumerate(graph.ops):
        if op.kind in ops.COMPUTES:
            each[row, op.kind, op.piece] += inside[place[i]]
    if set(each.values()) != {period}:
        return None
    return Repeat(before[2], after[2], inside)


_Key = tuple[int, str, int, str, int, int]


def _cut(
    made: Compiled, place: list[int], end: int, index: int
) -> tuple[list[_Key], list[_Key], list[int], bytearray]:
    """The cut of the graph at an event.

    Returns the finished events that others still wait for, the unfinished events up to
    it, the positions of the former, and a byte per event that is 1 if it is finished.
    """
    # All that leads to this event, by walking the edges backwards.
    done = bytearray(len(made.before))
    stack = [end]
    done[end] = 1
    while stack:
        for j in made.before[stack.pop()]:
            if not done[j]:
                done[j] = 1
                stack.append(j)
    graph_ops = made.graph.ops
    counts: Counter[tuple[int, str, int]] = Counter()
    reached = [0] * len(made.program.rows)
    for i, (row, op) in enumerate(graph_ops):
        if done[place[i]]:
            reached[row] = i
            if op.kind in ops.ON_UNIT:
                counts[row, op.kind, op.piece] += 1

    # Numbers count from the cut, so that two cuts can be compared.
    def key(i: int) -> _Key:
        row, (kind, piece, number, of, peer) = graph_ops[i]
        since = counts[row, kind, piece] if kind in ops.ON_UNIT else index
        return (
            row,
            kind,
            piece,
            of,
            peer,
            number - since * (kind not in ops.ON_STEP),
        )

    # The finished events that unfinished ones wait for: the state that is carried on.
    waited = {
        j
        for n, before in enumerate(made.before)
        if not done[n]
        for j in before
        if done[j]
    }
    open_ = sorted(
        key(i)
        for i, (row, _) in enumerate(graph_ops)
        if i < reached[row] and not done[place[i]]
    )
    first: dict[int, int] = {}
    for i, n in enumerate(place):
        if n in waited:
            first.setdefault(n, i)
    known = sorted((key(i), n) for n, i in first.items())
    return [k for k, _ in known], open_, [n for _, n in known], done


def shift(made: Compiled, part: Repeat, ends: list[float]) -> float:
    """Seconds that one more repetition of the stretch adds to the step; 0 if unknown.

    It holds for many more repetitions too. No event that is waited for after the
    stretch is later than its counterpart before it by more than this, so no step is
    longer. And the events that the end has waited for are later by exactly this: the
    same operation before and after the stretch, the second by way of the first.
    """
    # Walk back from the end along the latest event, to where it crosses each cut.
    path = max(range(len(ends)), key=ends.__getitem__)
    crossed = []
    for places in (part.after, part.before):
        known = {place: n for n, place in enumerate(places)}
        while path not in known:
            if not made.before[path]:
                return 0.0
            path = max(made.before[path], key=ends.__getitem__)
        crossed.append(known[path])
    a, b = crossed
    longer = ends[part.after[a]] - ends[part.before[a]]
    most = longer + 1e-12 * max(ends)
    pairs = zip(part.before, part.after, strict=True)
    return (
        longer
        if a == b and all(ends[y] - ends[x] <= most for x, y in pairs)
        else 0.0
    )


def critical(
    made: Compiled, ends: list[float], weight: Sequence[float], at: int
) -> dict[int, float]:
    """The summed `weight` of each entry of `priced` on the path to event `at`."""
    path: dict[int, float] = {}
    while at >= 0:
        price = made.price[at]
        path[price] = path.get(price, 0.0) + weight[at]
        # Always to the one that ended last: the path that made the event late.
        at = max(made.before[at], key=ends.__getitem__, default=-1)
    return path


def simulate(
    program: Program, costs: Costs | None = None, sizes: Sizes | None = None
) -> Timeline:
    """The timeline of a program. One that can never end is refused; `check` says why."""
    made = compiled(program)
    return timeline(made, *times(made, costs or Costs()), sizes)


def timeline(
    made: Compiled,
    starts: list[float],
    ends: list[float],
    sizes: Sizes | None = None,
) -> Timeline:
    """The timeline of all operations, from their events' times."""
    program, graph = made.program, made.graph
    first = [program.owner.index(row) for row in range(len(program.rows))]
    at = [made.place[event] for event in graph.event]
    rows = zip(graph.ops, graph.lanes, at, strict=True)
    spans = tuple(
        Span(first[row], lane, op, starts[n], ends[n])
        for (row, op), lane, n in rows
    )
    return Timeline(
        spans, memory_over(program, sizes, spans) if sizes else None
    )


def memory_over(
    program: Program, sizes: Sizes, spans: Iterable[Span]
) -> dict[int, tuple[tuple[float, dict[str, float]], ...]]:
    """Each row's memory over time by kind, on its first rank."""
    found = {}
    times = {(span.rank, span.op): (span.start, span.end) for span in spans}
    for row in range(len(program.rows)):
        steps: list[tuple[float, int, str, float]] = []
        began = ended = 0.0
        for op, takes, gives in changes(program, sizes, row):
            if op:
                began, ended = times.get(
                    (program.owner.index(row), op), (ended, ended)
                )
            steps += [(began, 1, kind, amount) for kind, amount in takes]
            steps += [(ended, 0, kind, -amount) for kind, amount in gives]
        now: dict[str, float] = {}
        points: dict[float, dict[str, float]] = {}
        # At one time, first what is freed, then what is taken.
        for time, _, kind, amount in sorted(steps, key=lambda s: s[:2]):
            now[kind] = now.get(kind, 0.0) + amount
            points[time] = dict(now)
        found[program.owner.index(row)] = tuple(points.items())
    return found


def repeat(program: Program, steps: int) -> Program:
    """A program that repeats the step, back to back.

    No step waits for another unless an operation needs it (an update, an agreement).
    """
    refuse_vast(steps * sum(map(len, program.rows)) // 2)
    rows, of_microbatches = [], (*ops.ON_MICROBATCH, *ops.MESSAGES)
    for row in program.rows:
        # how often each operation occurs in one step
        by_index = sorted(row, key=lambda op: op.index)
        times = {op[:2]: 1 + op.index for op in by_index}
        times |= {
            op[:2]: program.microbatches
            for op in row
            if op.kind in of_microbatches
        }
        # In step n an operation's number grows by n times its count in a step.
        each = [(op, op.index, times[op[:2]]) for op in row]
        rows.append(
            [
                op._replace(index=i + n * by)
                for n in range(steps)
                for op, i, by in each
            ]
        )
    return program.with_rows(rows)
