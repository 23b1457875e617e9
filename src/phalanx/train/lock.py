"""One run at a time in a folder: a lock that the kernel releases when its holder dies.

Two files lie in each folder that a run writes. `.run.lock` is locked by the process that started the
run: the command that has started local ranks, or rank 0 where torchrun or Slurm has. Its text is for
the message only. `.ranks.lock` is locked, shared, by every rank: a rank that has outlived its
launcher may still write, so the next start waits for it.

Locks are flock's: they end with the process, also by SIGKILL, so a file that is left means nothing.
On NFS, Linux makes them hold between hosts. Where a file system has none, `.run.held` is created
instead and removed at the end; one that a killed run has left is passed over when its host is this
one and its process is gone, and has to be removed by hand otherwise.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rank_watch.processes import started_at

from ..layout.files import open_regular

RUN, RANKS, HELD = ".run.lock", ".ranks.lock", ".run.held"
# Seconds in which the ranks of a launcher that was killed notice it and end.
ENDING = 10.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLocked(ValueError):
    """Another run is at work in the folder: where, which process, since when, and the way out."""


@dataclass(frozen=True)
class Owner:
    """The process that started the run of a folder."""

    host: str = ""
    pid: int = 0
    since: str = ""

    @classmethod
    def me(cls) -> "Owner":
        return cls(
            socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        )

    @classmethod
    def read(cls, path: Path) -> "Owner":
        """The owner that wrote the file; an empty one if the file has nothing usable (its writer
        has just begun)."""
        try:
            with open_regular(path) as file:
                owner = json.loads(file.read(4096))
            return cls(
                str(owner["host"])[:100], int(owner["pid"]), str(owner["since"])[:40]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    @property
    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def gone(self) -> bool:
        """True if the process has ended, as far as this host can tell."""
        if self.host != socket.gethostname():
            return not self.host
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return not started_at(self.pid)  # a zombie holds nothing more

    def __str__(self) -> str:
        return f"host {self.host!r}, process {self.pid}, since {self.since!r}"


@contextmanager
def hold_run(*folders: Path) -> Iterator[None]:
    """Hold the folders that a run writes, or refuse at once if another run has one of them."""
    with ExitStack() as stack:
        for folder in dict.fromkeys(each.resolve() for each in folders):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_held(folder))
        yield


@contextmanager
def hold_as_rank(*folders: Path) -> Iterator[None]:
    """While a rank works, nobody else begins a run in the folders. Its run holds them already."""
    with ExitStack() as stack:
        for folder in dict.fromkeys(each.resolve() for each in folders):
            # another host's folder, or no locks: `.run.lock` has to do
            with suppress(OSError):
                descriptor = stack.enter_context(_opened(folder / RANKS))
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def owner_of(folder: Path) -> str:
    """The owner of the folder by its own record; empty if it cannot be read."""
    owner = Owner.read(folder / RUN)
    return str(owner) if owner.host else ""


def unshared(folder: Path, owner: str, seconds: float = ENDING) -> str:
    """Why this rank's folder is not the one that rank 0's process holds; empty when it is. What another
    host has written may take some seconds to be seen."""
    end = time.monotonic() + seconds
    while owner and owner_of(folder) != owner:
        if time.monotonic() > end:
            return (
                f"{folder} on {socket.gethostname()} is not the folder that rank 0 writes to ({owner})."
                " Ranks save together: put it on a file system that all hosts share."
            )
        time.sleep(0.1)
    return ""


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        descriptor = stack.enter_context(_opened(folder / RUN))
        locks = True
        try:
            _lock(folder, RUN, descriptor)
            # Ranks that were forked have this descriptor too, so closing it would not do.
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            locks = False
            _create(folder)
            stack.callback((folder / HELD).unlink, missing_ok=True)
        # Written in place: a new file would be another lock.
        os.ftruncate(descriptor, 0)
        # a full disk: the lock holds, and only its message is poorer
        with suppress(OSError):
            os.pwrite(descriptor, Owner.me().text, 0)
            os.fsync(descriptor)  # other hosts look whether they see it
        if locks:
            with _opened(folder / RANKS) as ranks:
                _lock(folder, RANKS, ranks)
        yield


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    with open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW) as file:
        yield file.fileno()


def _lock(folder: Path, name: str, descriptor: int) -> None:
    """Take a lock. Ranks whose launcher is gone are given time to end."""
    end = time.monotonic() + ENDING
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Who has `.run.lock` knows that whoever has `.ranks.lock` has lost its launcher.
            owner, late = Owner.read(folder / RUN), time.monotonic() > end
            if name == RUN and (late or not owner.gone):
                raise RunLocked(_refusal(folder, owner)) from None
            if late:
                raise RunLocked(_outlived(folder)) from None
        time.sleep(0.05)


def _create(folder: Path) -> None:
    """Hold the folder by a file's name, where there are no locks."""
    path = folder / HELD
    for last in (False, True):
        try:
            with _opened(path, os.O_WRONLY | os.O_EXCL) as descriptor:
                os.write(descriptor, Owner.me().text)
            return
        except FileExistsError:
            owner = Owner.read(path)
            if last or not owner.host or not owner.gone:
                raise RunLocked(
                    _refusal(folder, owner)
                    + f" If it has ended, remove {path}: this file system"
                    " has no locks that end with a process."
                ) from None
            path.unlink(missing_ok=True)


def _refusal(folder: Path, owner: Owner) -> str:
    if owner.host and owner.gone:
        return _outlived(folder)
    who = str(owner) if owner.host else "which has just begun"
    return (
        f"{folder}: another run is active here ({who}). Two would remove each other's checkpoints."
        " Wait until it ends, stop it (SIGTERM, or a file STOP in its folder: it saves and ends), or"
        " write another `out`."
    )


def _outlived(folder: Path) -> str:
    holders = ", ".join(map(str, _holders(folder))) or "not to be seen from here"
    return (
        f"{folder}: ranks of an earlier run are alive though the process that started them is gone, and"
        f" may still write here: process {holders}. End them (kill -9), or write another `out`."
    )


def _holders(folder: Path) -> list[int]:
    """The processes of this host that have one of the folder's locks open, as far as we may look."""
    wanted = set()
    for name in (RUN, RANKS):
        with suppress(OSError):
            status = (folder / name).stat()
            wanted.add((status.st_dev, status.st_ino))
    holders = set()
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            status = opened.stat()
            if (status.st_dev, status.st_ino) in wanted:
                holders.add(int(opened.parts[2]))
    return sorted(holders - {os.getpid()})
