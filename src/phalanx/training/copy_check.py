"""Schedules the comparison of weight copies (`copies.py`), and ends the run if they
differ."""

from __future__ import annotations

from ..comm.agree import broadcast_text
from .checkpoint import steps
from .copies import Copies
from .log import RunLog
from .rank import Rank
from .saves import DiskSaves, MemorySaves
from .step import CompletedStep, TrainError
from .uploads import Uploads


class CopiesDiffer(TrainError):
    """Raised when copies of a weight that were bit-equal differ. A restart returns to
    equal copies."""

    restart_helps = True


class CopyCheck:
    """Compares copies every `train.check_copies` steps and before each save.

    A save of corrupt weights must not replace a good checkpoint.
    """

    def __init__(
        self,
        rank: Rank,
        log: RunLog,
        disk: DiskSaves,
        memory: MemorySaves,
        uploads: Uploads,
    ) -> None:
        self.rank, self.log, self.uploads = rank, log, uploads
        self.disk, self.memory = disk, memory
        self.every = rank.run.train.check_copies
        part = rank.part
        self.copies = (
            Copies(part.local, part.updates, part.names)
            if self.every
            else None
        )

    def after_step(self, step: CompletedStep) -> None:
        # Between steps, when all updates have been made.
        if self.copies is None or not self.copies.any:
            return
        saves = self.memory.due(step) or self.disk.due(step)
        if not saves and not step.due(self.every):
            return
        with self.log.positions.phase("comparing copies"):
            differences = self.copies.differences()
        if differences:
            self._end(step.done, differences)

    def _end(self, done: int, differences: str) -> None:
        """End the run. Checkpoints saved before are good."""
        self.disk.finish()  # a save that began while the copies were equal
        self.uploads.report()
        # Named so that a user knows where the run continues.
        saved = steps(self.disk.folder) if self.rank.world.rank == 0 else []
        last = str(saved[0]) if saved else "the beginning"
        last = broadcast_text(self.rank.part.everyone, last)
        text = (
            f"step {done}: copies that were equal bit by bit differ. {differences}. Memory or a"
            " processor has changed a bit, or ranks do not compute alike. This state is not saved."
            f" The same command continues from {last}; if it names the same rank, replace its device."
        )
        self.log.event("copies", text, step=done, differences=differences)
        raise CopiesDiffer(text)
