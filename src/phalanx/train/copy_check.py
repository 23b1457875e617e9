"""The comparison of a run's copies: when it is due, and the end of the run where they differ.

`copies.py` makes the comparison.
"""

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
    """Copies of a weight that were equal bit by bit and no longer are. A restart goes back to equal ones."""

    restart_helps = True


class CopyCheck:
    """Compares copies every `train.check_copies` steps, and before each save: a bad checkpoint must not
    follow a good one."""

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
            Copies(part.local, part.updates, part.names) if self.every else None
        )

    def after_step(self, step: CompletedStep) -> None:
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
        """Ends the run; what was saved before is good."""
        self.disk.finish()  # a save that was begun when the copies were equal
        self.uploads.report()
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
