"""The picture of a run: timelines with a title, and the look of each kind of operation.

The four renderers (`text`, `svg`, `page`, `chrome`) read only this value. None of them
knows the dependencies or the order of operations.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..layout.numbers import bytes_text
from ..program import (
    KINDS,
    Costs,
    Op,
    Recorded,
    Sizes,
    Span,
    Timeline,
    check,
    ops,
)
from .words import number

PAINTS = {letter: kind.paint for letter, kind in KINDS.items()}
# The limit is drawn if it is at most this many times the peak: otherwise the areas
# would be too low to read.
_WITHIN = 3.0
LEGEND = {
    letter: kind.name
    for letter, kind in KINDS.items()
    if letter != ops.RECEIVE
}


class Track(NamedTuple):
    """One row of a picture: the spans of a lane that take time."""

    rank: int
    lane: str
    label: str
    source: int  # index into the picture's timelines
    spans: tuple[Span, ...]


def apart(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Divide spans into the fewest rows without overlap.

    A measured message is in flight until something waits for it, so messages of one
    lane can overlap.
    """
    rows: list[list[Span]] = [[]]
    # In the order of their starts, each into the first row that is free by
    # then.
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        free = next(
            (row for row in rows if not row or row[-1].end <= span.start), None
        )
        if free is None:
            rows.append(free := [])
        free.append(span)
    return [tuple(row) for row in rows]


@dataclass(frozen=True)
class Picture:
    """One timeline, or a prediction and its measurement, with notes.

    `names` are the names of two timelines. `held` are microbatches in flight by rank.
    `notes` are sentences below the picture. `unit` is the unit of memory, `clock` that
    of time. `limit` is the memory that a rank may use, 0 if unknown.
    """

    title: str
    timeline: Timeline
    other: Timeline | None = None
    names: tuple[str, str] = ("predicted", "measured")
    held: Sequence[float] = ()
    notes: tuple[str, ...] = ()
    labels: Mapping[int, str] = field(default_factory=dict)
    unit: str = "bytes"
    clock: str = ""
    limit: float = 0.0

    def __repr__(self) -> str:
        return f"<Picture of {self.title!r}: {self.timeline!r}>"

    def __str__(self) -> str:
        from .text import text

        return text(self)

    def _repr_svg_(self) -> str:
        """The picture in a notebook."""
        from .svg import svg

        return svg(self)

    def save(self, path: str | Path) -> None:
        """Write a file: .svg, .html with zoom, or .json, a trace for Perfetto."""
        from . import FORMATS

        Path(path).write_text(
            FORMATS[Path(path).suffix](self), encoding="utf-8"
        )

    @cached_property
    def timelines(self) -> tuple[Timeline, ...]:
        return (
            (self.timeline,)
            if self.other is None
            else (self.timeline, self.other)
        )

    @cached_property
    def start(self) -> float:
        return min(t.start for t in self.timelines)

    @cached_property
    def end(self) -> float:
        return max(t.start + t.makespan for t in self.timelines)

    def amount(self, count: float) -> str:
        """An amount of memory with its unit."""
        if self.unit == "bytes":
            return bytes_text(count)
        return f"{number(count)} {self.unit}"

    @cached_property
    def most(self) -> float:
        """The most memory that any rank holds; 0 if unknown."""
        points = [
            sum(held.values())
            for timeline in self.timelines
            for of_rank in (timeline.memory or {}).values()
            for _, held in of_rank
        ]
        return max(points, default=0.0)

    @property
    def limit_shown(self) -> float:
        """The memory limit if the axis can show it beside the peak; otherwise 0."""
        return self.limit if self.limit <= _WITHIN * self.most else 0.0

    @property
    def most_words(self) -> str:
        """The memory of the fullest rank in a sentence, with the limit if known."""
        words = f"The fullest rank holds {self.amount(self.most)}"
        if not self.limit:
            return f"{words}."
        share = f"{100 * self.most / self.limit:.3g} %"
        words += (
            f", {share} of the {self.amount(self.limit)} that a rank may use"
        )
        return (
            f"{words} (the dashed line)." if self.limit_shown else f"{words}."
        )

    @cached_property
    def tracks(self) -> tuple[Track, ...]:
        """Every rank's compute lane, then its other lanes with spans that take time.

        Each lane of a second timeline is right below that of the first. A message is
        shown where it is sent, because its two ends are one event.
        """
        shown: dict[tuple[int, str, int], list[Span]] = {}
        for source, timeline in enumerate(self.timelines):
            for span in timeline.spans:
                where = (span.rank, span.lane, source)
                # Its other end, the receive, is the same event and is not
                # shown again.
                if span.end > span.start and span.op.kind != ops.RECEIVE:
                    shown.setdefault(where, []).append(span)
                elif span.lane == "compute":
                    shown.setdefault(where, [])
        ranks = {
            rank: i for i, t in enumerate(self.timelines) for rank in t.ranks
        }
        order = {rank: i for i, rank in enumerate(sorted(ranks))}
        keys = sorted(
            # Compute lanes first, then by name; the measured lane below the
            # predicted one.
            shown,
            key=lambda k: (order[k[0]], k[1] != "compute", k[1], k[2]),
        )
        return tuple(
            Track(
                *key[:2], "  " if layer else self._label(*key), key[2], spans
            )
            for key in keys
            for layer, spans in enumerate(apart(shown[key]))
        )

    def _label(self, rank: int, lane: str, source: int) -> str:
        if lane == "compute":
            return f"  {self.names[1]}" if source else self.name_of(rank)
        return f"  {lane} ({self.names[1]})" if source else f"  {lane}"

    def name_of(self, rank: int) -> str:
        return self.labels.get(rank, f"rank {rank}")

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that occur, in the order of the legend."""
        seen = {s.op.kind for track in self.tracks for s in track.spans}
        return tuple(kind for kind in LEGEND if kind in seen)

    @cached_property
    def pieces_of(self) -> dict[int, tuple[int, ...]]:
        """The pieces that each rank computes, lowest first."""
        pieces: dict[int, set[int]] = defaultdict(set)
        for timeline in self.timelines:
            for rank, spans in timeline.computing.items():
                pieces[rank].update(s.op.piece for s in spans)
        return {rank: tuple(sorted(each)) for rank, each in pieces.items()}

    @cached_property
    def several(self) -> bool:
        """True if a rank computes more than one piece, so that labels must name the piece."""
        return any(len(pieces) > 1 for pieces in self.pieces_of.values())

    def tint(self, rank: int, op: Op) -> float:
        """Lightness of an operation's colour, 0 to 1, rising with its piece."""
        pieces = self.pieces_of.get(rank, ())
        # Messages and units have no tint, nor does a rank with one piece.
        if op.of or op.piece not in pieces or len(pieces) < 2:
            return 0.0
        return pieces.index(op.piece) / (len(pieces) - 1)

    def names_of(self, op: Op) -> tuple[str, ...]:
        """Possible labels of a cell, longest first; a narrow cell uses a short one."""
        if op.piece < 0:
            return (op.kind,)
        if op.kind in ops.ON_MICROBATCH:
            # Without the piece where a rank has only one.
            short = (f"{op.kind}{op.index}", str(op.index))
            return (str(op), *short) if self.several else short
        if op.of:
            # A message is named by what it carries.
            return (f"{op.of}{op.index}", str(op.index))
        return (str(op), str(op.piece))

    def explain(self, op: Op) -> str:
        """Explain an operation in words."""
        what = KINDS[op.kind].does
        if op.of:
            way = "to" if op.kind == ops.SEND else "from"
            value = "output" if op.of == ops.FORWARD else "gradient"
            return f"{what} the {value} of piece {op.piece}, microbatch {op.index}, {way} piece {op.peer}"
        if op.piece < 0:
            return what
        if op.kind in ops.ON_MICROBATCH:
            return f"{what}: piece {op.piece}, microbatch {op.index}"
        # A unit's second collective of a step is its time 2.
        return f"{what}: unit {op.piece}" + (
            f", time {op.index + 1}" if op.index else ""
        )

    @cached_property
    def summary(self) -> tuple[str, ...]:
        """Makespan, ideal and bubble of each timeline, then microbatches in flight."""
        lines = []
        for name, t in zip(self.names, self.timelines, strict=False):
            words = (
                f"makespan {number(t.makespan)}{self.clock}, ideal {number(t.ideal)}{self.clock},"
                f" bubble {100 * t.bubble_fraction:.1f} %"
            )
            # Messages that computation does not hide.
            exposed = max((t.exposed(rank) for rank in t.ranks), default=0.0)
            if exposed > 1e-12:
                words += f", exposed communication up to {number(exposed)}{self.clock}"
            lines.append(words if self.other is None else f"{name}: {words}")
        if self.held:
            lines.append(
                f"microbatches in flight by stage: {' '.join(map(number, self.held))}"
            )
        return tuple(lines)

    @cached_property
    def times(self) -> tuple[tuple[str, float, float], ...]:
        """Kinds of operation with their time over all ranks in each timeline."""
        rows = []
        parts = [
            [t.breakdown(rank) for rank in t.ranks] for t in self.timelines
        ]
        for kind in (*LEGEND, ""):
            sums = [
                sum(of_rank.get(kind, 0.0) for of_rank in of_ranks)
                for of_ranks in parts
            ]
            if any(sums):
                rows.append((named(kind), sums[0], sums[-1]))
        return tuple(rows)

    @cached_property
    def differences(self) -> tuple[tuple[str, str, str, str], ...]:
        """Time by kind of operation over all ranks, as cells of a table.

        Name, time in the first timeline, time in the second, and the difference as a
        share of the first step.
        """
        rows = []
        whole = self.timeline.makespan * len(self.timeline.ranks) or 1.0
        for name, first, second in self.times:
            more = f"{100 * (second - first) / whole:+.1f} %"
            rows.append((name, number(first), number(second), more))
        return tuple(rows)


def named(kind: str) -> str:
    """The name of a part of a step."""
    return LEGEND[kind] if kind else "idle"


def every_rank(recorded: Recorded, costs: Costs | None = None) -> Picture:
    """The measured timeline of all ranks, over the prediction of one of each list."""
    measured = recorded.measured(every=True)
    predicted = recorded.predicted(costs=costs)
    return Picture("", _in_ms(predicted), _in_ms(measured), clock=" ms")


def recorded_picture(
    recorded: Recorded,
    sizes: Sizes | None = None,
    costs: Costs | None = None,
    title: str = "",
) -> Picture:
    """The measured timeline of a real step with the predicted one, in milliseconds.

    `costs` are those of a plan. Without them, the prediction uses the medians of the
    step itself.
    """
    predicted, measured = (
        recorded.predicted(sizes, costs),
        recorded.measured(sizes),
    )
    note = (
        f"bubble: {predicted.bubble_fraction:.1%} predicted, {measured.bubble_fraction:.1%} measured;"
        f" step: {predicted.makespan:.4g} s predicted, {measured.makespan:.4g} s measured."
    )
    medians = "the medians of this very step: what differs is waiting"
    source = "what a plan counts" if costs else medians
    return Picture(
        title
        or f"a step on {recorded.program.mesh.size} ranks, predicted and measured",
        _in_ms(predicted),
        _in_ms(measured),
        held=check(recorded.program).held,
        notes=(note, f"Predicted from {source}."),
        clock=" ms",
    )


def _in_ms(timeline: Timeline) -> Timeline:
    spans = (
        s._replace(start=1e3 * s.start, end=1e3 * s.end)
        for s in timeline.spans
    )
    memory = timeline.memory and {
        rank: tuple((1e3 * time, held) for time, held in points)
        for rank, points in timeline.memory.items()
    }
    return Timeline(tuple(spans), memory)
