"""Steps whose loss or gradient is not finite. All ranks skip them; the log names the
first bad piece."""

from __future__ import annotations

import math

from ..comm.agree import errors_of
from .log import RunLog
from .rank import Rank
from .step import CompletedStep, TrainError

IN_A_ROW = 3  # consecutive skipped steps that end a run


def overflowed(rank: Rank, step: CompletedStep) -> bool:
    """True if a step was skipped because its loss scale was too large: a finite loss has
    gradients that are not finite."""
    scaled = rank.part.trainer.scaling is not None
    return (
        scaled and not step.result.finite and math.isfinite(step.result.total)
    )


class SkippedSteps:
    """Logs the cause of each skipped step, and ends the run after a few in a row."""

    def __init__(self, rank: Rank, log: RunLog) -> None:
        self.rank, self.log = rank, log
        self.in_a_row = 0

    def after_step(self, step: CompletedStep) -> None:
        if step.result.finite:
            self.in_a_row = 0
            return
        # Expected: float16 finds its loss scale this way.
        if overflowed(self.rank, step):
            self.log.event(
                "skip", step=step.done, why="a float16 gradient overflowed"
            )
            return
        why = f"the loss or a gradient is not finite; {self._cause()}"
        text = f"step {step.done} was skipped on all ranks: {why}"
        self.log.event("skip", text, step=step.done, why=why)
        self.in_a_row += 1
        if self.in_a_row >= IN_A_ROW:
            raise TrainError(
                f"steps {step.done + 1 - IN_A_ROW} to {step.done}: {why}. The weights are those before"
                " them. Lower optimizer.lr, write optimizer.clip, or use bf16 or fp32."
            )

    def _cause(self) -> str:
        """Describe the piece whose values became non-finite first, and its ranks; the
        same on all ranks."""
        part = self.rank.part
        first = part.trainer.first_bad(part.names)
        # Padded, so that texts sort by their position along the step.
        own = "" if first is None else f"{first[0]:06} {first[1]}"
        # by position along the step and description
        ranks_of: dict[str, list[str]] = {}
        for text in errors_of(part.everyone, own):
            rank, _, what = text.partition(": ")
            ranks_of.setdefault(what, []).append(rank)
        if not ranks_of:
            return "every rank's own numbers were: it came of summing them"
        # The smallest position: the value that became bad first.
        what, ranks = min(ranks_of.items())
        description = what.partition(" ")[2]
        return f"first in {description} on {', '.join(ranks)}"
