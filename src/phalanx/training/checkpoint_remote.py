"""Checkpoints in object storage, or in any other file system that fsspec supports.

A checkpoint is first written to the disk. A thread of rank 0 then uploads it during
training, and retries after failures. An upload without progress is abandoned and
reported. `remote_folder.py` defines the files at the URL, `remote_owner.py` which run
may change them.
"""

import json
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..comm import Group
from ..layout.url import Url
from . import checkpoint_format as stored
from .checkpoint import Saved, why
from .checkpoint_format import MANIFEST
from .lock import RunLocked
from .remote_folder import ForeignCheckpoint, RemoteFolder
from .remote_owner import FolderLost, Ownership
from .remote_task import Answer, Task, on_first_rank, try_often

MOST_STUCK = (
    4  # maximum number of hanging uploads; beyond it no further one is started
)
ENDING = (
    10.0  # seconds to wait at the end of a run until the folder is released
)


@dataclass(frozen=True)
class Remote:
    """A run's remote folder, and the time without progress after which work there is
    abandoned.

    `owner` is this start's claim to the folder, on rank 0.
    """

    url: Url
    timeout: float
    owner: Ownership | None = None

    def describe(self, error: Exception) -> str:
        """Describe an error of the store without the URL's secrets."""
        return self.url.masked(why(error))


def claim(remote: Remote, group: Group) -> Answer:
    """Claim the remote folder for this run, on rank 0. Collective.

    All ranks raise `RunLocked` if the folder belongs to another run, or another start
    of this one is using it. The answer's error explains why it cannot be claimed yet.
    """

    def work(task: Task) -> str:
        assert remote.owner is not None
        take = partial(remote.owner.take, task)
        # Another owner does not go away by trying again.
        return try_often(task, take, remote.describe, final=(RunLocked,))

    answer = on_first_rank(
        group, work, remote.timeout, remote.describe, (RunLocked,)
    )
    if answer.refused:
        raise RunLocked(answer.error)
    return Answer(error=answer.error or answer.result)


class Uploader:
    """Uploads a run's checkpoints one after the other, in a thread of rank 0.

    During an upload only the newest further checkpoint is queued, so that a slow
    network delays no step.
    """

    def __init__(self, remote: Remote, keep: int) -> None:
        assert remote.owner is not None
        self.remote, self.keep, self.owner = remote, keep, remote.owner
        self.work = threading.Condition()
        self.waiting: Path | None = None
        self.current: Path | None = None
        self.missing = (
            ""  # the reason why the newest checkpoint is not uploaded
        )
        self._newest: Path | None = None
        # The upload in progress, and those that were abandoned but still hang.
        self._task: Task | None = None
        self._stuck: list[Task] = []
        self._results: list[Saved] = []
        # A heartbeat of its own connection: a stuck upload must not stop it.
        self.owner.begin_beating(lambda: RemoteFolder(remote.url, fresh=True))

    def offer(self, path: Path) -> None:
        """Queue a checkpoint as the next upload."""
        with self.work:
            # Only the newest waits: an older one that was waiting is not
            # uploaded.
            self.waiting = self._newest = path
            self.missing = "its upload has not ended"
            if self.current is None:
                self._next()

    def _next(self) -> None:
        """Start the queued upload."""
        self.current, self.waiting = self.waiting, None
        if self.current is None:
            return
        # Uploads that hung may have ended meanwhile.
        self._stuck = [task for task in self._stuck if task.thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            path, self.current = self.current, None
            self._decide(
                path, f"{len(self._stuck)} earlier uploads are still hanging"
            )
            return
        self._task = Task(partial(self._upload, self.current))
        # `on_end` needs the task itself, to recognise an abandoned one.
        self._task.on_end = partial(self._ended, self._task, self.current)
        self._task.start()

    def _upload(self, path: Path, task: Task) -> str:
        step = stored.step_of(path.name)

        def once() -> None:
            folder = RemoteFolder(
                self.remote.url, task, fresh=bool(self._stuck)
            )
            # Confirmed before and after: another run may take the folder over
            # meanwhile.
            confirm = partial(self.owner.confirm, folder)
            confirm()
            folder.upload(path, self.owner.owns, confirm)
            # From here on the checkpoint is complete, even if pruning fails.
            task.there = True
            confirm()
            folder.prune(step, self.keep, self.owner.owns)

        def in_vain() -> bool:
            # superseded by a newer one, or deleted
            return self.waiting is not None or not path.exists()

        final = (FolderLost, ForeignCheckpoint)
        return try_often(task, once, self.remote.describe, in_vain, final)

    def _ended(self, task: Task, path: Path) -> None:
        with self.work:
            # An abandoned task that ends late decides nothing.
            if task is self._task:
                error = (
                    self.remote.describe(task.raised)
                    if task.raised
                    else task.result
                )
                self._decide(path, error, there=task.there)
                self._next()
            self.work.notify_all()

    def _decide(self, path: Path, error: str, *, there: bool = False) -> None:
        step = stored.step_of(path.name)
        # Complete, but old ones remain: a notice, no error.
        if there:
            error, notice = (
                "",
                error and f"old ones could not be removed: {error}",
            )
            self._results.append(Saved(step, path, notice=notice))
        else:
            self._results.append(Saved(step, path, error))
        if path == self._newest:
            self.missing = error

    def _give_up(self, reason: str) -> None:
        """Abandon the current upload and start the queued one."""
        task, path = self._task, self.current
        # Finished between the look and now: its end is on the way.
        if task is None or path is None or task.finished.is_set():
            return
        task.abandoned = True
        self._stuck.append(task)
        self._decide(path, reason, there=task.there)
        self._next()
        self.work.notify_all()

    def _look(self) -> None:
        if self._task and (text := self._task.stands(self.remote.timeout)):
            self._give_up(text)

    def taken(self) -> list[Saved]:
        """Return the outcomes of uploads since the last call."""
        # Called once a step, so it also finds uploads that stand still.
        with self.work:
            self._look()
            results, self._results = self._results, []
            return results

    def under_way(self, seconds: float) -> bool:
        """Wait up to `seconds` for the current upload; return True if it is still in
        progress."""
        with self.work:
            self.work.wait_for(lambda: self.current is None, seconds)
            self._look()
            return self.current is not None

    def stop(self, reason: str) -> None:
        """Abandon the current upload and the queued one."""
        with self.work:
            if self.waiting is not None:
                self._decide(self.waiting, reason)
                self.waiting = None
            self._give_up(reason)

    def release(self) -> Task:
        """Start recording in the folder that this start has ended."""
        return Task(self._release).start()

    def _release(self, task: Task) -> str:
        self.owner.release(RemoteFolder(self.remote.url, task))
        return ""

    @property
    def stuck(self) -> bool:
        """True if abandoned uploads still hang."""
        return any(task.thread.is_alive() for task in self._stuck)

    def close(self) -> None:
        """Stop writing heartbeats, however the run ends."""
        self.owner.stop_beating()
        with self.work:
            if self._task is not None:
                self._task.abandoned = True


def fetch_newer(
    remote: Remote, folder: Path, at: int, known: set[int], group: Group
) -> tuple[bool, str]:
    """Download the newest remote checkpoint after step `at` that is not in `known`.
    Collective.

    Rank 0 downloads. Returns True if there was such a checkpoint, and the error.
    """

    def work(task: Task) -> str:
        wanted, foreign = -1, ""

        def look() -> None:
            nonlocal wanted
            steps = RemoteFolder(remote.url, task).steps()
            # Steps are listed newest first.
            wanted = next(
                (step for step in steps if step > at and step not in known), -1
            )

        def fetch() -> None:
            nonlocal foreign
            there = RemoteFolder(remote.url, task)
            # Another run's checkpoint is not resumed from.
            run = there.run_of(wanted, {MANIFEST})
            if (
                run is not None
                and remote.owner
                and not remote.owner.resumable(run, wanted)
            ):
                foreign = f"{stored.name_of(wanted)} there is another run's"
                return
            folder.mkdir(parents=True, exist_ok=True)
            there.download(wanted, folder)

        error = try_often(task, look, remote.describe)
        if wanted >= 0:
            # Known even if it fails: it is not tried in this start again.
            known.add(wanted)
            error = try_often(task, fetch, remote.describe)
        return json.dumps([wanted, error or foreign])

    answer = on_first_rank(group, work, remote.timeout, remote.describe)
    wanted, error = (
        json.loads(answer.result) if answer.result else (-1, answer.error)
    )
    return wanted >= 0, error and f"{remote.url}: {error}"
