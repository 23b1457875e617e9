"""A run's remote folder: claimed at the start, given each checkpoint, waited for at the
end.

Rank 0 uploads in a thread (`checkpoint_remote.py`); the other ranks take part in
decisions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..comm.agree import broadcast_text
from ..layout.url import Url
from .checkpoint_load import Loaded, newest
from .checkpoint_remote import ENDING, Remote, Uploader, claim
from .log import RunLog
from .rank import Rank
from .remote_owner import Ownership, run_id
from .remote_task import ROUND
from .step import CompletedStep


class Uploads:
    """The uploads of a run. Without `checkpoint.remote` it does nothing.

    `run_id` is set on rank 0, whose manifests it goes into.
    """

    def __init__(self, rank: Rank, log: RunLog) -> None:
        run = rank.run
        self.rank, self.log = rank, log
        self.everyone = rank.part.everyone
        self.remote: Remote | None = None
        self.owner: Ownership | None = None
        self.uploader: Uploader | None = None
        self.asked = (
            False  # ranks were asked to stop before the end of the last step
        )
        self._run_id = ""
        url = run.checkpoint.remote
        # Rank 0 alone reads the folder and claims the URL.
        if rank.world.rank == 0:
            found = newest(run.checkpoints)
            local = found[1] if found else None
            out = Path(run.out)
            self._run_id = run_id(out, local)
            if url:
                self.owner = Ownership(url, out, local)
        if url:
            self.remote = Remote(
                Url(url), run.checkpoint.remote_timeout, self.owner
            )

    @property
    def run_id(self) -> str:
        return self.owner.run if self.owner else self._run_id

    @property
    def current(self) -> Path | None:
        """The checkpoint that is being uploaded, which must not be deleted."""
        return self.uploader.current if self.uploader else None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the folder before anything there is read or changed.

        If the block refuses the run, the claim is released.
        """
        self._claim()
        # The block reads a checkpoint, and may find that the run cannot begin.
        try:
            yield
        except ValueError:
            # otherwise other machines would wait until this heartbeat is stale
            if self.uploader:
                self.uploader.release().finished.wait(ENDING)
            raise

    def _claim(self) -> None:
        if self.remote is None:
            return
        answer = claim(self.remote, self.everyone)
        if answer.error:
            text = f"{self.remote.url} cannot be claimed yet: {answer.error}"
            self.log.event("remote", f"{text}. Each upload tries it again")
        if self.owner:
            # An upload claims the folder later, if that is impossible now.
            self.uploader = Uploader(
                self.remote, self.rank.run.checkpoint.keep
            )

    def resumed(self, loaded: Loaded) -> None:
        """Record that the run resumes from this checkpoint."""
        if self.owner and self.uploader:
            # The run's id is that of the checkpoint it resumes from.
            self.owner.resumed(loaded.progress)
            if loaded.path.parent == self.rank.run.checkpoints:
                # it may be uploaded already, or its upload was interrupted
                self.uploader.offer(loaded.path)

    def offer(self, path: Path) -> None:
        """Queue this checkpoint for upload."""
        if self.uploader:
            self.uploader.offer(path)

    def after_step(self, step: CompletedStep) -> None:
        self.asked = step.result.stops > 0
        self.report()

    def report(self) -> None:
        """Log the outcomes of uploads, and changes of the claim."""
        if self.uploader is None or self.owner is None:
            return
        for upload in self.uploader.taken():
            error = upload.error
            text = (
                f"step {upload.step}  not uploaded: {error}" if error else ""
            )
            if upload.notice:
                text = f"step {upload.step}  uploaded, but {upload.notice}"
            url = self.rank.run.checkpoint.remote
            values = {"step": upload.step, "url": url, "error": error}
            values |= {"notice": upload.notice} if upload.notice else {}
            self.log.event("upload", text, **values)
        while self.owner.notices:
            self.log.event("remote", self.owner.notices.pop(0))

    def finish(self) -> str:
        """Wait for the last upload while it progresses; return why the newest
        checkpoint is not uploaded.

        The result is the same on all ranks. A new signal or STOP file ends the wait.
        """
        if self.remote is None:
            return ""
        with self.log.positions.phase(
            "saving", f"the upload to {self.remote.url}"
        ):
            return self._finish()

    def _finish(self) -> str:
        uploader = self.uploader
        while self._wait_on(uploader.under_way(ROUND) if uploader else False):
            self.report()
        # What has not ended by now is given up.
        if uploader:
            # Only without hanging uploads, which could still write.
            uploader.stop("a signal, or a STOP file, ended the wait for it")
        release = (
            uploader.release() if uploader and not uploader.stuck else None
        )
        # Releasing must not hold the end of a run up for long.
        end = time.monotonic() + ENDING

        def releasing() -> bool:
            if release is None or release.finished.wait(ROUND):
                return False
            return time.monotonic() < end

        while self._wait_on(releasing()):
            pass
        self.report()
        return broadcast_text(
            self.everyone, uploader.missing if uploader else ""
        )

    def _wait_on(self, under_way: bool) -> bool:
        """True if rank 0 should keep waiting. The ranks meet repeatedly, so that none
        waits long."""
        # All ranks agreed in the last step, so a request that arrived since then is
        # new.
        asked = self.rank.part.trainer.wants_to_stop() and not self.asked
        flags = torch.tensor(
            [int(under_way), int(asked)], device=self.everyone.device
        )
        self.everyone.all_reduce(flags)
        # Rank 0 decides; any rank's new signal ends the wait.
        return bool(flags[0]) and not flags[1]

    def close(self) -> None:
        """Stop the heartbeat, however the run ends."""
        if self.uploader:
            self.uploader.close()
