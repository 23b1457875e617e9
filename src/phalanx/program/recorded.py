"""A measured step: its program and the times of each operation, as one file.

It is compared with a prediction from the run's own costs, so that what differs is the
waiting.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from ..layout.files import parse_json
from .memory import Sizes
from .ops import COMPUTES, RECEIVE, SEND, UPDATE
from .program import Op, Program, ProgramError
from .simulate import Costs, memory_over, simulate
from .timeline import Span, Timeline

_BUSY = (*COMPUTES, UPDATE)  # these keep the processor busy while they last


@dataclass(frozen=True)
class Recorded:
    """A program with its measured timeline: spans in seconds for every rank."""

    program: Program
    timeline: Timeline

    def __str__(self) -> str:
        data = {
            "phalanx run": 1,
            "program": str(self.program),
            **self.timeline.to_json(),
        }
        return json.dumps(data) + "\n"

    @classmethod
    def parse(cls, text: str) -> Recorded:
        """Parse the file of a measured step, or raise an error with the reason."""
        data = parse_json(text, "the recorded step", ProgramError)
        if data.get("phalanx run") != 1 or not isinstance(
            data.get("program"), str
        ):
            what = "JSON with 'phalanx run': 1, a program and spans"
            raise ProgramError(f"this is not the file of a run: {what}.")
        program = Program.parse(data["program"], "the run's program")
        try:
            timeline = Timeline.from_json(text)
        except ValueError as error:
            raise ProgramError(
                f"the recorded step: {error}. Record it again."
            ) from None
        known = {op for row in program.rows for op in row}
        odd = [
            f"rank {rank}"
            for rank in timeline.ranks
            if not 0 <= rank < program.mesh.size
        ]
        odd += [str(s.op) for s in timeline.spans if s.op not in known]
        odd += ["no spans"] * (not timeline.spans)
        if odd:
            raise ProgramError(
                f"the run's spans and its program disagree: {odd[0]}."
            )
        return cls(program, timeline)

    def costs(self) -> Costs:
        """Measured costs by kind and piece.

        For computation the median; for a message the shortest time, because it ends
        only when a rank waits for it.
        """
        seen: dict[tuple[str, int], list[float]] = defaultdict(list)
        for span in self._spans:
            key = (
                (RECEIVE, -1)
                if span.op.kind == RECEIVE
                else (span.op.kind, span.op.piece)
            )
            # Both ends have the time of the transfer, and one of them counts.
            if span.op.kind != SEND:
                seen[key].append(span.end - span.start)
        times = {}
        for key, found in seen.items():
            kind, _ = key
            typical = median if kind in _BUSY else min
            times[key] = typical(found)
        kinds = {"send": times.pop((RECEIVE, -1), 0.0)}
        # Operations without a piece are known by their kind alone.
        exceptions = {}
        for key, time in times.items():
            kind, piece = key
            if piece < 0:
                kinds[kind] = time
            else:
                exceptions[key] = time
        return Costs(kinds, exceptions)

    def predicted(
        self, sizes: Sizes | None = None, costs: Costs | None = None
    ) -> Timeline:
        """Simulate the program, with this run's own costs if no others are given."""
        return simulate(self.program, costs or self.costs(), sizes)

    def measured(
        self, sizes: Sizes | None = None, *, every: bool = False
    ) -> Timeline:
        """The measured timeline of the ranks that a simulation shows.

        With `every`, it shows all ranks. Time 0 is the start of the whole step: its first
        call on any rank. A message lasts from its send to its receipt.
        The recorded calls last longer: the sender often completes its call at the end
        of the step, and the receiver posts its call long before the send.
        """
        rows = range(len(self.program.rows))
        shown = {self.program.owner.index(row) for row in rows}
        spans = [s for s in self._spans if every or s.rank in shown]
        zero = self.timeline.start
        timed = []
        for span in spans:
            start = span.start - zero
            end = span.end - zero
            timed.append(span._replace(start=start, end=end))
        moved = tuple(timed)
        return Timeline(
            moved, memory_over(self.program, sizes, moved) if sizes else None
        )

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        """All spans; both ends of a message are clipped to its transfer time."""
        spans = []
        for s in self.timeline.spans:
            other = self.other_end(s)
            # A send ends with its receive, and a receive starts with its send.
            if other and s.op.kind == SEND:
                s = s._replace(end=max(s.start, min(s.end, other.end)))
            elif other:
                s = s._replace(start=min(s.end, max(s.start, other.start)))
            spans.append(s)
        return tuple(spans)

    def other_end(self, span: Span) -> Span | None:
        """The receive of a sent message, or the send of a received one."""
        if not span.op.of:
            return None
        kind = SEND if span.op.kind == RECEIVE else RECEIVE
        # From the far end's view: the piece and the peer change places.
        far = span.op._replace(kind="", piece=span.op.peer, peer=span.op.piece)
        line = self._line(span.rank)
        return self._ends.get((kind, line, far))

    @cached_property
    def _ends(self) -> dict[tuple[str, tuple[int, ...], Op], Span]:
        """Both ends of all messages, by kind, pipeline, and the message itself."""
        ends = {}
        for span in self.timeline.spans:
            if not span.op.of:
                continue
            kind = span.op.kind
            line = self._line(span.rank)
            message = span.op._replace(kind="")
            ends[kind, line, message] = span
        return ends

    def _line(self, rank: int) -> tuple[int, ...]:
        """A rank's coordinates except pp: messages stay among ranks that share them."""
        at = self.program.mesh.coordinates(rank)
        return tuple(
            at[axis.name]
            for axis in self.program.mesh.axes
            if axis.name != "pp"
        )
