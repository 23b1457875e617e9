"""The log's step lines, and the stragglers since the previous line."""

from __future__ import annotations

import math

import torch

from .log import RunLog, memory_of
from .rank import Rank
from .step import CompletedStep
from .stragglers import OwnTime, Stragglers


class StepLines:
    """Logs loss, norm, learning rate and memory every `metrics.every` steps, and at the
    end of the run.

    With each line every rank sends its memory and its own working time. Rank 0 reports
    stragglers.
    """

    def __init__(self, rank: Rank, log: RunLog) -> None:
        self.rank, self.log = rank, log
        self.own = OwnTime(queued=rank.world.device.type == "cuda")
        self.stragglers = Stragglers(
            rank.run.hang.straggler, rank.part.program.owner
        )
        self.seconds: list[float] = []  # of each step since the last line

    def after_step(self, step: CompletedStep) -> None:
        # From the common start of all ranks, if this step had one.
        self.seconds.append(step.ended - step.begun)
        whole = step.ended - step.started
        reading = step.loaded - step.started
        spans = step.result.timeline.spans
        if (
            spans
        ):  # without spans, the GPU's compute time in this step is unknown
            self.own.add(whole, reading, spans, step.waits, step.ahead)
        if step.ends or step.due(self.rank.run.metrics.every):
            # Counted as part of the step: here a rank may wait for others that are
            # still in it.
            with self.log.positions.phase("in a step"):
                self._log(step)

    def _log(self, step: CompletedStep) -> None:
        table = self._numbers_of_ranks()
        # A program without a norm has none to log.
        norm = math.nan if step.result.norm is None else step.result.norm
        numbers = {"loss": step.result.total, "norm": norm, "lr": step.lr}
        names = self.rank.part.trainer.measure.metrics
        numbers |= dict(zip(names, step.result.metrics, strict=True))
        seconds, self.seconds = self.seconds, []
        self.log.step(
            # The fullest rank: a run ends when the first one is out of memory.
            step.done,
            seconds,
            numbers | {"memory": float(table[:, 0].max())},
        )
        if self.log.active:
            for slow in self.stragglers.look(
                table[:, 1:].tolist(), len(seconds)
            ):
                self.log.event(
                    "straggler", str(slow), step=step.done, **slow._asdict()
                )

    def _numbers_of_ranks(self) -> torch.Tensor:
        """Return a row for each rank: its peak memory, then its own time, total and by
        kind of operation."""
        everyone, world = self.rank.part.everyone, self.rank.world
        most = memory_of(world.device, world.sharing)
        # Bytes, then seconds by kind of operation.
        own = torch.tensor([most, *self.own.taken()], dtype=torch.float64)
        own = own.to(everyone.device)
        table = own.new_empty(everyone.size, len(own))
        everyone.all_gather(table, own)
        with everyone.reading():
            return table.cpu()
