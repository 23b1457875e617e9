"""The saves of a run: decides when a checkpoint is due, on the disk or in memory, and
logs its outcome."""

from __future__ import annotations

from collections.abc import Callable

from ..comm.agree import errors_of
from .checkpoint import Saved, Saver
from .checkpoint_format import Progress
from .checkpoint_memory import MemoryCheckpoints, memory_folder
from .log import RunLog
from .rank import Rank
from .step import CompletedStep
from .uploads import Uploads

ProgressAt = Callable[[int], Progress]  # argument: the number of steps done


class DiskSaves:
    """Saves to the run's folder every `checkpoint.every` steps, at the end, and at a
    stop.

    `unsaved` is the reason why the newest save failed, if the run continues without it.
    """

    def __init__(
        self, rank: Rank, log: RunLog, progress: ProgressAt, uploads: Uploads
    ) -> None:
        kept = rank.run.checkpoint
        self.rank, self.log, self.progress, self.uploads = (
            rank,
            log,
            progress,
            uploads,
        )
        self.folder = rank.run.checkpoints
        self.saver = Saver(
            self.folder,
            rank.part.local,
            rank.part.updates,
            keep=kept.keep,
            asynchronous=kept.asynchronous,
            on_failure="stop" if kept.on_disk_full == "stop" else "go on",
            # The checkpoint that is being uploaded must not be deleted.
            spare=lambda: uploads.current,
        )
        self.unsaved = ""

    def due(self, step: CompletedStep) -> bool:
        kept = self.rank.run.checkpoint
        # A stopped run always saves.
        at_end = step.last and kept.at_end
        return at_end or step.stopped or step.due(kept.every)

    def after_step(self, step: CompletedStep) -> None:
        if not self.due(step):
            # An asynchronous save may have been written meanwhile.
            self._log(self.saver.poll())
            return
        with self.log.positions.phase("saving", str(self.folder)):
            self._log(self.saver.save(self.progress(step.done)))

    def finish(self) -> None:
        """Wait for a save in progress."""
        with self.log.positions.phase("saving", str(self.folder)):
            self._log(self.saver.finish())

    def _log(self, saves: tuple[Saved, ...]) -> None:
        for saved in saves:
            self.unsaved = saved.error
            text = (
                f"not saved: {saved.error}"
                if saved.error
                else f"saved {saved.path}"
            )
            text += (
                f"; it is there and sound, but {saved.notice}"
                if saved.notice
                else ""
            )
            values = {
                "step": saved.step,
                "path": str(saved.path),
                "error": saved.error,
            }
            values |= {"notice": saved.notice} if saved.notice else {}
            # What is on the disk can be uploaded.
            if not saved.error:
                self.uploads.offer(saved.path)
            self.log.event(
                "checkpoint", f"step {saved.step}  {text}", **values
            )


class MemorySaves:
    """Saves to the hosts' memory every `train.in_memory` steps, if something there
    outlives the ranks.

    The end of the run and a stop save to the disk instead.
    """

    def __init__(self, rank: Rank, log: RunLog, progress: ProgressAt) -> None:
        self.log, self.progress = log, progress
        self.every = rank.run.train.in_memory
        self.checkpoints: MemoryCheckpoints | None = None
        if not self.every:
            return
        part, folder = rank.part, memory_folder(rank.run)
        # All ranks must have such a folder, or none keeps anything.
        if errors_of(part.everyone, "" if folder else "none"):
            text = "no checkpoints in memory: they need ranks that are processes, or torchrun's"
            log.event("not kept", text)
        elif folder:
            host = log.positions.host
            self.checkpoints = MemoryCheckpoints(
                folder, host, part.local, part.updates
            )

    def due(self, step: CompletedStep) -> bool:
        return (
            self.checkpoints is not None
            and not step.ends
            and step.due(self.every)
        )

    def after_step(self, step: CompletedStep) -> None:
        if self.checkpoints is None or not self.due(step):
            return
        with self.log.positions.phase("saving", str(self.checkpoints.folder)):
            if errors := self.checkpoints.save(self.progress(step.done)):
                text = f"step {step.done}  not kept in memory: {errors[0]}"
                self.log.event(
                    "not kept", text, step=step.done, error=errors[0]
                )

    def close(self) -> None:
        """Free the memory, as the run has ended well."""
        if self.checkpoints:
            self.checkpoints.close()
