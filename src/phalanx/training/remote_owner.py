"""Ownership of a remote folder: the run whose checkpoints it holds, and that run's
active start.

A run has a random id. It is stored in the run's own folder, in every manifest, and in
`owner.json` of the remote folder, beside an id of this start, its host and its process.
The start that owns the folder writes `owner.json` every `BEAT` seconds. Every start
reads it before it writes, renames or deletes anything else there:

- A folder of another run is refused.
- A folder of the same run is refused while another start of it is active: until `STALE`
  seconds have passed since it wrote `owner.json`, by the store's clock. Nobody waits for
  a start that has ended, that is known to be gone, or whose own folder on the disk this
  start has locked (`lock.py`).
- A start that finds another start's id in `owner.json` has lost the folder and changes
  nothing more.

If the store creates files exclusively, one of two starts that find no owner gets the
folder. If it does not, or if an owner is replaced, both may write; each then reads again
after `SETTLE` seconds, and the last writer keeps the folder. A start that took longer
than that between its two calls is noticed when the other one confirms its claim, which
it does before each manifest and each deletion.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rank_watch.moment import stamp
from rank_watch.processes import alive, started_at

from ..layout.codec import decode, key
from ..layout.files import parse_json, read_text, write_text
from ..layout.url import Url
from . import checkpoint_format as stored
from .checkpoint_format import CheckpointError, Manifest, Progress
from .folder import LARGEST
from .lock import RUN, RunLocked
from .remote_folder import RemoteFolder
from .remote_task import Task

OWNER = "owner.json"
LIMIT = 1 << 14  # maximum bytes of the file
BEAT = 30.0  # seconds between two heartbeats
# seconds without a heartbeat after which another start may take the folder
STALE = 180.0
SETTLE = 1.0  # seconds after which a start checks that it has kept the folder
POLL = 0.5  # seconds between two reads of an owner file without a known time
MARK = ".run.id"  # a file in the run's own folder
_LONGEST = 1000  # maximum length of a text in `owner.json`
_UNSTEADY = "does not stay what this start writes."


# ---- the run's own folder


@dataclass(frozen=True)
class RunMark:
    """The mark in a run's folder on the disk: the run's id, and its remote folder.

    `folder` is a random id of the folder itself. Together with the inode of the lock
    file it distinguishes the folder from a copy.
    """

    id: str = ""
    folder: str = ""
    remote: str = ""

    @classmethod
    def read(cls, out: Path) -> "RunMark":
        """Read the mark of a folder; empty if there is nothing usable."""
        try:
            text = read_text(out / MARK, "run id", CheckpointError, LIMIT)
            table = parse_json(text, str(out / MARK), CheckpointError)
        except CheckpointError:
            return cls()
        mark = cls(
            *(str(table.get(name, "")) for name in ("id", "folder", "remote"))
        )
        right = stored.is_run_id(mark.id) and stored.is_run_id(mark.folder)
        return mark if right else cls()

    def write(self, out: Path) -> None:
        with suppress(OSError):  # a full disk is reported by the saves
            write_text(out / MARK, json.dumps(asdict(self)), durable=True)


def new_id() -> str:
    return secrets.token_hex(16)


def run_id(out: Path, local: Manifest | None) -> str:
    """Return the id of the run in a folder, and record it there.

    It is the newest checkpoint's, else the folder's, else a new one.
    """
    mark = RunMark.read(out)
    own = (local.run_id if local else "") or mark.id or new_id()
    if own != mark.id:
        replace(mark, id=own, folder=mark.folder or new_id()).write(out)
    return own


def _lock_number(out: Path) -> int:
    """Return the inode of the run's lock file, which is never replaced; 0 if there is
    none."""
    with suppress(OSError):
        return (out / RUN).stat().st_ino
    return 0


def _machine() -> str:
    """Return an id of this boot of the machine and of its visible pid namespace."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{stamp()['boot']} {space}".strip()


# ---- the owner of a remote folder


@dataclass(frozen=True)
class RemoteOwner:
    """The contents of `owner.json`: a start of a run, and a sign that it is alive."""

    run: str
    start: str
    host: str
    pid: int = key(maximum=LARGEST)
    # start time of the process, in clock ticks of its machine
    born: int = key(maximum=LARGEST)
    machine: str = ""
    out: str = ""
    folder: str = ""
    lock: int = key(0, maximum=LARGEST)
    since: str = ""
    heartbeat: str = ""
    # makes each text different, whatever the clock says
    beats: int = key(0, maximum=LARGEST)
    ended: bool = False
    # steps without a run id that existed when the run claimed the folder
    adopted: tuple[int, ...] = ()

    @classmethod
    def parse(cls, raw: bytes, where: str) -> "RemoteOwner":
        """Parse an owner; raise a `CheckpointError` for anything else."""
        if len(raw) > LIMIT:
            raise CheckpointError(f"{where} has more than {LIMIT:,} bytes.")
        table = parse_json(
            raw.decode(errors="replace"), where, CheckpointError
        )
        known = {
            name: table[name]
            for name in cls.__dataclass_fields__
            if name in table
        }
        owner: RemoteOwner = decode(cls, known, where, CheckpointError)
        texts = [value for value in known.values() if isinstance(value, str)]
        if any(len(text) > _LONGEST for text in texts) or not stored.is_run_id(
            owner.run
        ):
            raise CheckpointError(f"{where} names no run.")
        return owner

    @property
    def raw(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        how = "ended" if self.ended else "last heartbeat"
        return (
            f"run {self.run[:8]}, folder {self.out!r} on host {self.host!r}, process {self.pid},"
            f" since {self.since}, {how} {self.heartbeat}"
        )


def gone(owner: RemoteOwner, mine: RemoteOwner) -> bool:
    """True if a start is known to be inactive.

    It said so, its process is gone, or this start holds the lock of the folder that it
    needs.
    """
    if owner.ended or owner.start == mine.start:
        return True
    if owner.folder and (owner.folder, owner.lock) == (mine.folder, mine.lock):
        return True
    same = bool(owner.machine) and owner.machine == mine.machine
    return same and not alive(owner.pid, owner.born)


def run_for(
    owner: str | None, there: str | None, own: str | None, *, akin: bool
) -> str | None:
    """Return the run id under which a start may use a remote folder; "" for a new one,
    None to refuse.

    `owner` is the id in `owner.json`, None without such a file. `there` is the id of
    the newest remote checkpoint, `own` of the newest local one; None without a
    checkpoint, "" for one of an earlier version, which has no id. `akin`: both appear
    to be of the same run.
    """
    folder = there if owner is None else owner
    if there is None:
        return own or folder or ""  # nothing there can be lost
    if own is None:
        return folder or ""  # the run resumes from there
    if own and own == folder:
        return own
    if own and folder:
        return None
    return (own or folder or "") if akin else None


def are_akin(local: Manifest | None, body: Mapping[str, Any] | None) -> bool:
    """True if two checkpoints appear to be of one run, by seed, model and the folder in
    the run file.

    The data may change from start to start.
    """
    if local is None or body is None:
        return False
    mine = json.loads(str(local))["body"]

    def of(table: Mapping[str, Any]) -> list[Any]:
        config = table.get("config")
        config = config if isinstance(config, dict) else {}
        run = config.get("run")
        out = run.get("out") if isinstance(run, dict) else None
        return [table.get("seed"), config.get("model"), out]

    if mine.get("step") == body.get("step"):
        return bool(mine.get("files") == body.get("files"))
    return of(mine) == of(body)


class FolderLost(CheckpointError):
    """Raised if another start has taken over the remote folder; this one changes
    nothing more there."""


class Ownership:
    """This start's claim to a remote folder.

    It lives on rank 0 and is used by several threads; each has its own `RemoteFolder`.
    """

    def __init__(self, url: str, out: Path, local: Manifest | None) -> None:
        self.url, self.out = Url(url), out
        # An imported model was not trained here, so it ties the run to no remote
        # folder.
        self.local = local if local is not None and local.step else None
        self.run = run_id(out, local)
        self.mark = RunMark.read(out)
        self.me = RemoteOwner(
            run=self.run,
            start=new_id(),
            host=socket.gethostname()[:_LONGEST],
            pid=os.getpid(),
            born=started_at(os.getpid()),
            machine=_machine(),
            out=str(out.resolve())[:_LONGEST],
            folder=self.mark.folder,
            lock=_lock_number(out),
            since=_now(),
        )
        self.claimed = False
        self.lost = ""  # the reason why this start changes nothing more there
        self.notices: list[str] = []
        # An owner of whom no time is known, since when.
        self._watched: tuple[bytes, float] = (
            b"",
            0.0,
        )
        self._ends = threading.Event()

    def owns(self, run: str, step: int) -> bool:
        """True if this start may change a checkpoint with this id."""
        return run == self.run or (not run and step in self.me.adopted)

    # ---- claiming the folder

    def take(self, task: Task) -> str:
        """Claim the folder, waiting as long as the owner's state is unknown. Raises
        `RunLocked`."""
        folder, end = (
            RemoteFolder(self.url, task),
            time.monotonic() + 3 * STALE,
        )
        while not self.claim(folder):
            if time.monotonic() > end:
                raise CheckpointError(f"{self.url}/{OWNER}: {_UNSTEADY}")
            time.sleep(POLL)
            task.last = time.monotonic()
        return ""

    def resumed(self, loaded: Progress) -> None:
        """Record that the run resumes from this checkpoint. Before a claim it
        determines the run's id."""
        if not self.claimed and loaded.step and isinstance(loaded, Manifest):
            self.local = loaded
            self.run = loaded.run_id or self.run

    def resumable(self, run: str, step: int) -> bool:
        """True if this run may resume from a checkpoint with this id."""
        if self.claimed:
            return self.owns(run, step)
        return self.local is None or run in ("", self.run)

    def claim(self, folder: RemoteFolder) -> bool:
        """Claim the folder; return False if it is not known yet whether its owner is
        active.

        Raises `RunLocked` if the folder belongs to another run, or another start is
        active.
        """
        raw = folder.read(OWNER, LIMIT)
        owner = self._readable(raw)
        if owner is None and raw is not None:
            # A start that died while writing leaves half a text. Unless this run is
            # known to have used the folder, an active owner gets time to write again.
            ours = self.mark.remote == str(self.url)
            if not self._unchanged(raw, 2 * SETTLE if ours else STALE):
                return False
        steps = folder.steps()
        run = self._run_for(owner, folder, steps)
        if run is None:
            raise RunLocked(self._belongs(owner))
        if owner is not None and not gone(owner, self.me):
            age = folder.age(OWNER, self.me.start)
            if age is not None and 0 <= age < STALE:
                raise RunLocked(self._at_work(owner, age))
            unknown = age is None or age < 0
            if unknown and not self._unchanged(raw or b"", STALE):
                return False
        self._claim_as(folder, run or self.run, owner, steps)
        return self._write_first(folder, raw, owner)

    def _run_for(
        self, owner: RemoteOwner | None, folder: RemoteFolder, steps: list[int]
    ) -> str | None:
        own = None
        if self.local is not None:
            known_here = (
                self.mark.id if self.mark.remote == str(self.url) else ""
            )
            own = self.local.run_id or known_here
        body = None
        if owner is None or not own:
            body = next(
                (body for step in steps if (body := folder.body(step))), None
            )
        there = None
        if steps:
            there = stored.run_id_of(body.get("config")) if body else ""
        known = owner.run if owner else None
        return run_for(known, there, own, akin=are_akin(self.local, body))

    def _readable(self, raw: bytes | None) -> RemoteOwner | None:
        if raw is None:
            return None
        try:
            return RemoteOwner.parse(raw, f"{self.url}/{OWNER}")
        except CheckpointError:
            return None

    def _unchanged(self, raw: bytes, seconds: float) -> bool:
        """True if the owner's text has not changed for `seconds`. An owner that writes
        is active."""
        before, since = self._watched
        if not since:
            self._watched = raw, time.monotonic()
            return False
        if raw != before:
            if owner := self._readable(raw):
                raise RunLocked(self._at_work(owner, 0.0))
            self._watched = raw, time.monotonic()
            return False
        return time.monotonic() - since >= seconds

    def _claim_as(
        self,
        folder: RemoteFolder,
        run: str,
        owner: RemoteOwner | None,
        steps: list[int],
    ) -> None:
        """Adopt the folder's run id, and what its earlier owner has adopted."""
        adopted = owner.adopted if owner and owner.run == run else ()
        if owner is None:
            bodies = {step: folder.body(step) for step in steps}
            adopted = tuple(
                step
                for step, body in bodies.items()
                if body is not None
                and not stored.run_id_of(body.get("config"))
            )
            if adopted:
                self.notices.append(
                    f"{self.url}: step {', '.join(map(str, adopted))} has no run id, as it was made by"
                    " an earlier version; this run owns it from now on"
                )
        elif owner.run == run and owner.out != self.me.out:
            self.notices.append(
                f"{self.url}: this start continues with {owner}"
            )
        self.run = run
        self.me = replace(self.me, run=run, adopted=adopted)
        self.mark = replace(self.mark, id=run, remote=str(self.url))
        self.mark.write(self.out)

    def _write_first(
        self,
        folder: RemoteFolder,
        raw: bytes | None,
        owner: RemoteOwner | None,
    ) -> bool:
        """Write `owner.json` and read it again; return False if somebody else was
        first."""
        text = self._beaten()
        folder.make()
        if raw is None:
            try:
                settled = folder.create(OWNER, text)
            except FileExistsError:
                return False
        else:
            folder.write(OWNER, text)
            # Nobody else can take over from a start that needs the local folder, which
            # this start has locked.
            settled = owner is not None and owner.folder == self.me.folder
        if not settled:
            time.sleep(SETTLE)
        now = self._readable(folder.read(OWNER, LIMIT))
        if now is None or now.start != self.me.start:
            return False
        self.claimed = True
        return True

    # ---- keeping it

    def confirm(self, folder: RemoteFolder) -> None:
        """Raise if the folder does not belong to this start. Retries a claim that was
        impossible before."""
        if self.lost:
            raise FolderLost(self.lost)
        if not self.claimed:
            try:
                if self.claim(folder):
                    return
            except RunLocked as refused:
                raise self._losing(str(refused)) from None
            raise CheckpointError(
                f"{self.url}: it is not known yet whether another start of this run is active."
            )
        for last in (False, True):
            owner = self._readable(folder.read(OWNER, LIMIT))
            if owner is not None and owner.start == self.me.start:
                return
            if owner is not None:
                raise self._losing(
                    f"{self.url} has been taken over ({owner}). This start uploads and removes nothing"
                    " more there."
                )
            if not last:  # deleted, or half written by somebody
                time.sleep(SETTLE)
        folder.write(OWNER, self._beaten())
        time.sleep(SETTLE)
        now = self._readable(folder.read(OWNER, LIMIT))
        if now is None or now.start != self.me.start:
            raise CheckpointError(f"{self.url}/{OWNER}: {_UNSTEADY}")

    def _losing(self, why: str) -> FolderLost:
        if not self.lost:
            self.lost = why
            self.notices.append(why)
        return FolderLost(why)

    def _beaten(self) -> bytes:
        self.me = replace(self.me, beats=self.me.beats + 1, heartbeat=_now())
        return self.me.raw

    def begin_beating(self, connect: Callable[[], RemoteFolder]) -> None:
        """Write a heartbeat every `BEAT` seconds, in a thread with its own
        connection."""

        def beat() -> None:
            folder: RemoteFolder | None = None
            while not self._ends.wait(BEAT) and not self.lost:
                # Uploads report a store's errors; the heartbeat only retries.
                with suppress(Exception):
                    folder = folder or connect()
                    if self.claimed:
                        self.confirm(folder)
                        folder.write(OWNER, self._beaten())

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def stop_beating(self) -> None:
        self._ends.set()

    def release(self, folder: RemoteFolder) -> None:
        """Record that this start has ended, so that nobody waits for it."""
        self.stop_beating()
        if self.claimed and not self.lost:
            owner = self._readable(folder.read(OWNER, LIMIT))
            if owner is not None and owner.start == self.me.start:
                self.me = replace(self.me, ended=True)
                folder.write(OWNER, self._beaten())

    # ---- messages

    def _belongs(self, owner: RemoteOwner | None) -> str:
        whose = (
            f"another run's ({owner})"
            if owner
            else "not known to be this run's"
        )
        return (
            f"{self.url} has checkpoints that are {whose}, and this run has its own in {self.out}. Two"
            " runs would remove each other's checkpoints. Write another checkpoint.remote; or remove"
            " the folder there if nobody needs it."
        )

    def _at_work(self, owner: RemoteOwner, age: float) -> str:
        same = self.local is not None and owner.run == self.run
        what = "another start of this run" if same else "another run"
        return (
            f"{self.url}: {what} is active there ({owner}, {age:.0f} s ago). Two would remove each"
            " other's checkpoints. Wait until it ends, stop it, or write another checkpoint.remote. If"
            f" its machine is lost, start again when {STALE:.0f} s have passed since its heartbeat."
        )


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
