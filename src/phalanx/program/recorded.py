"""A step that was carried out: its program and when each operation ran, as one file.

Laid over it is a prediction made with the costs of that very run, so what differs is the waiting.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from ..layout.files import parse_json
from .ops import COMPUTES, RECEIVE, UPDATE
from .program import Program, ProgramError
from .simulate import Costs, simulate
from .timeline import Timeline

_BUSY = (*COMPUTES, UPDATE)  # the processor works as long as they last


@dataclass(frozen=True)
class Recorded:
    """A program and its measured timeline, in seconds, with a row of spans for every rank."""

    program: Program
    timeline: Timeline

    def __str__(self) -> str:
        data = {"phalanx run": 1, "program": str(self.program), **self.timeline.to_json()}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str) -> Recorded:
        """The run that a file tells; whatever is not one is refused with the reason."""
        data = parse_json(text, "the recorded step", ProgramError)
        if data.get("phalanx run") != 1 or not isinstance(data.get("program"), str):
            raise ProgramError(
                "this is not the file of a run: JSON with 'phalanx run': 1, a program and spans."
            )
        program = Program.parse(data["program"], "the run's program")
        try:
            timeline = Timeline.from_json(text)
        except ValueError as error:
            raise ProgramError(f"the recorded step: {error}. Record it again.") from None
        strangers = sorted(set(timeline.ranks) - set(range(program.mesh.size)))
        known = {op for row in program.rows for op in row}
        odd = [str(s.op) for s in timeline.spans if s.op not in known]
        if strangers or odd or not timeline.spans:
            what = f"rank {strangers[0]}" if strangers else f"{odd[0]}" if odd else "no spans"
            raise ProgramError(f"the run's spans and its program disagree: {what}.")
        return cls(program, timeline)

    def costs(self) -> Costs:
        """What operations took: of what computes the median for each kind and piece; of a message
        the shortest, as its span ends only when somebody waits for it."""
        seen: dict[tuple[str, int], list[float]] = defaultdict(list)
        sent: list[float] = []
        for span in self.timeline.spans:
            if span.op.of:
                sent += [span.end - span.start] * (span.op.kind == RECEIVE)
            else:
                seen[span.op.kind, span.op.piece].append(span.end - span.start)
        pieces = {
            key: median(times) if key[0] in _BUSY else min(times) for key, times in seen.items()
        }
        kinds = {key[0]: time for key, time in pieces.items() if key[1] < 0}
        kinds["send"] = min(sent, default=0.0)
        return Costs(kinds, {key: time for key, time in pieces.items() if key[1] >= 0})

    def predicted(self) -> Timeline:
        """The program simulated with this run's own costs."""
        return simulate(self.program, self.costs())

    def measured(self) -> Timeline:
        """The ranks that a simulation shows, one for each row, from time zero."""
        shown = {self.program.owner.index(row) for row in range(len(self.program.rows))}
        spans = [s for s in self.timeline.spans if s.rank in shown]
        zero = min(s.start for s in spans)
        return Timeline(tuple(s._replace(start=s.start - zero, end=s.end - zero) for s in spans))
