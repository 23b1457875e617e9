"""The measured step in sentences: which rank waited for what, and for how long.

A rank's waits are the gaps between its computations. One thread makes all calls, so a
gap is divided among the calls that end in it, in the order in which they end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rank_watch.diagnosis import span as ranks_text

from ..drawing import Picture
from ..drawing.words import number
from ..program import KINDS, Op, Program, Recorded, Span, ops
from ..program.graph import group_axes

_RANKS = 8  # ranks with a sentence of their own
_LEAST = 1e-6  # seconds between operations that are worth a sentence
_CAUSES = 3  # causes in a sentence
_KINDS = 3  # kinds of operations whose difference is named


@dataclass(frozen=True)
class Wait:
    """Time in which a rank computes nothing, and the call for which it waits.

    Without a call, the rank was between two operations. `late` is the rank that was
    waited for: the sender of a message, or the last to begin a collective; -1 if all
    had begun before the wait.
    """

    rank: int
    start: float
    end: float
    op: Op | None = None
    late: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start


def waits(recorded: Recorded) -> list[Wait]:
    """The waits of all ranks in a measured step."""
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in recorded.timeline.spans:
        by_rank[span.rank].append(span)
    begun = {(s.rank, s.op): s.start for s in recorded.timeline.spans}
    found = []
    for rank, spans in sorted(by_rank.items()):
        # A send ends when its buffer is freed, and nothing waits for that.
        calls = [s for s in spans if s.op.kind != ops.SEND]
        if not calls:
            continue
        beside = sorted(
            (s for s in calls if s.lane != ops.COMPUTE), key=lambda s: s.end
        )
        ended = 0  # calls that ended before this place in the step
        for start, end in _gaps(recorded, rank, calls):
            at = start
            while ended < len(beside) and beside[ended].end <= end:
                span = beside[ended]
                ended += 1
                if span.end > at:
                    late = _late(recorded, span, begun, at)
                    found.append(Wait(rank, at, span.end, span.op, late))
                    at = span.end
            if end > at:
                found.append(Wait(rank, at, end))
    return found


def _gaps(
    recorded: Recorded, rank: int, calls: Sequence[Span]
) -> Iterator[tuple[float, float]]:
    """The times without computing, from the step's start to the rank's last call."""
    first = recorded.timeline.start
    last = max(s.end for s in calls)
    work = [(s.start, s.end) for s in recorded.timeline.computing[rank]]
    edges = [(first, first), *sorted(work), (last, last)]
    for (_, end), (start, _) in pairwise(edges):
        if start > end:
            yield end, start


def _late(
    recorded: Recorded,
    span: Span,
    begun: dict[tuple[int, Op], float],
    since: float,
) -> int:
    """The rank that a call waited for, as `Wait.late` says."""
    if span.op.kind == ops.RECEIVE:
        sent = recorded.other_end(span)
        return sent.rank if sent else -1
    group = _group(recorded.program, span)
    starts = {
        rank: begun[rank, span.op]
        for rank in group
        if (rank, span.op) in begun
    }
    last = max(starts, key=starts.__getitem__, default=-1)
    alone = last in (-1, span.rank)
    return -1 if alone or starts[last] <= since else last


def _group(program: Program, span: Span) -> tuple[int, ...]:
    """The ranks that take part in a collective."""
    axes = group_axes(span.op, program)
    # A tied sum runs among the stages that use the weight.
    axes = axes or ("pp",)
    wanted = tuple(axis for axis in axes if program.mesh.of(axis) > 1)
    return tuple(program.mesh.group(span.rank, wanted))


def shown_ranks(program: Program) -> str:
    """Says which ranks each shown rank represents; "" if each has its own list."""
    rows = [program.ranks(row) for row in range(len(program.rows))]
    shared = [ranks for ranks in rows if len(ranks) > 1]
    if not shared:
        return ""
    stands = [
        f"rank {ranks[0]} for {ranks_text(ranks)}" for ranks in shared[:_RANKS]
    ]
    if more := len(shared) - len(stands):
        stands.append(f"and {more} more")
    return (
        "One rank is shown for each list of operations. The other ranks run the same list on other"
        f" data or other shards: {'; '.join(stands)}."
    )


def with_shown_ranks(picture: Picture, program: Program) -> Picture:
    """The picture with the sentence of `shown_ranks` added to its notes."""
    shown = shown_ranks(program)
    return replace(picture, notes=(*picture.notes, *filter(None, [shown])))


def happened(
    recorded: Recorded,
    picture: Picture,
    step: int,
    *,
    launched: bool,
    planned: bool,
) -> list[str]:
    """The step in sentences; `picture` has its predicted and measured timelines.

    `launched`: times are those of launches on a GPU. `planned`: the prediction is a
    plan's. Otherwise it comes from this very step, and the sentences leave it out.
    """
    found = waits(recorded)
    took = recorded.measured(every=True).makespan
    predicted = picture.timeline.makespan if planned else 0.0
    lines = [_whole(step, 1e3 * took, predicted)]
    if launched:
        lines.append(
            "On a GPU, these are host times: a wait ends when the next operation is launched."
        )
    of_rank: dict[int, list[Wait]] = defaultdict(list)
    for wait in found:
        of_rank[wait.rank].append(wait)
    timeline = recorded.timeline
    # A rank that only sends has nothing to tell.
    busy = {
        rank: timeline.busy(rank)
        for rank in timeline.ranks
        if rank in of_rank or timeline.computing[rank]
    }
    if not busy:
        return lines
    busiest = max(busy, key=busy.__getitem__)
    others = sorted(
        (rank for rank in busy if rank != busiest),
        key=lambda rank: -_waited(of_rank[rank]),
    )
    named = [busiest, *others[: _RANKS - 1]]
    lines += (
        _of_rank(rank, busy[rank], of_rank[rank]) for rank in sorted(named)
    )
    if len(busy) > len(named):
        lines.append(
            f"These are {len(named)} of {len(busy)} ranks: rank {busiest}, which computed longest,"
            f" and the {len(named) - 1} others that waited longest."
        )
    called = [wait for wait in found if wait.op]
    if called:
        longest = max(called, key=lambda wait: wait.seconds)
        lines.append(_longest(longest, timeline.start))
    if planned:
        lines.append(_differences(picture))
    if spread := _spread(recorded):
        lines.append(spread)
    return [line for line in lines if line]


def _whole(step: int, took: float, predicted: float) -> str:
    """The time of all ranks in ms, beside the predicted time unless that is 0."""
    words = f"Step {step} took {number(took)} ms"
    if not predicted:
        return f"{words}."
    more = 100 * (took / predicted - 1)
    if abs(more) < 0.5:
        return f"{words}, as predicted ({number(predicted)} ms)."
    side = "longer" if more > 0 else "shorter"
    return f"{words}, {abs(more):.0f} % {side} than the predicted {number(predicted)} ms."


def _waited(own: Sequence[Wait]) -> float:
    """The time that a rank waited for calls."""
    return sum(wait.seconds for wait in own if wait.op)


def _of_rank(rank: int, busy: float, own: Sequence[Wait]) -> str:
    """One rank's sentence: its computing, its waiting, and what it waited for."""
    by_cause: dict[str, float] = defaultdict(float)
    for wait in own:
        if wait.op:
            by_cause[_cause(wait)] += wait.seconds
    waited = _waited(own)
    between = sum(wait.seconds for wait in own if not wait.op)
    words = (
        f"Rank {rank} computed for {_ms(busy)} and waited for {_ms(waited)}"
    )
    causes = sorted(by_cause.items(), key=lambda each: -each[1])
    parts = [f"{_ms(seconds)} {cause}" for cause, seconds in causes[:_CAUSES]]
    rest = sum(seconds for _, seconds in causes[_CAUSES:])
    if rest:
        parts.append(f"{_ms(rest)} for other calls")
    if parts:
        words += f": {', '.join(parts)}"
    if between < _LEAST:
        return f"{words}."
    return f"{words}. Between operations it spent {_ms(between)} on neither."


def _cause(wait: Wait) -> str:
    """The call that a rank waited for, without the microbatch."""
    assert wait.op
    if wait.op.of:
        value = "activations" if wait.op.of == ops.FORWARD else "gradients"
        sender = f" from rank {wait.late}" if wait.late >= 0 else ""
        return f"for {value}{sender}"
    words = f'in "{KINDS[wait.op.kind].name}"'
    return (
        f"{words} (rank {wait.late} began last)" if wait.late >= 0 else words
    )


def _longest(wait: Wait, zero: float) -> str:
    """The longest single wait, with its operation."""
    assert wait.op
    times = f"from {_ms(wait.start - zero)} to {_ms(wait.end - zero)}"
    at = f"{wait.op}" + f", microbatch {wait.op.index}" * bool(wait.op.of)
    return (
        f"The longest single wait: rank {wait.rank}, {_ms(wait.seconds)}, {times}, {_cause(wait)}"
        f" ({at})."
    )


def _differences(picture: Picture) -> str:
    """The kinds of operation whose time differs most from the prediction."""
    ordered = sorted(picture.times, key=lambda row: -abs(row[2] - row[1]))
    clock = picture.clock
    parts = [
        f'"{name}" {number(second)}{clock} (predicted {number(first)}{clock})'
        for name, first, second in ordered[:_KINDS]
    ]
    return (
        f"The largest differences, over the ranks shown: {'; '.join(parts)}."
    )


def _spread(recorded: Recorded) -> str:
    """The largest difference of computing among ranks with the same operations."""
    program, timeline = recorded.program, recorded.timeline
    widest, words = 0.0, ""
    for row in range(len(program.rows)):
        busy = {
            rank: timeline.busy(rank)
            for rank in program.ranks(row)
            if rank in timeline.computing
        }
        if len(busy) < 2:
            continue
        least = min(busy, key=busy.__getitem__)
        most = max(busy, key=busy.__getitem__)
        if busy[most] - busy[least] > widest:
            widest = busy[most] - busy[least]
            words = (
                f"Among ranks with the same operations, compute time differed most between rank {least}"
                f" ({_ms(busy[least])}) and rank {most} ({_ms(busy[most])})."
            )
    return words


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"
