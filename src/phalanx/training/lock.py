"""Allows one run at a time in a folder, by a lock that the kernel releases when its
holder dies.

Each folder that a run writes contains two lock files. `.run.lock` is locked by the
process that started the run: the command that started local ranks, or rank 0 under
torchrun or Slurm. Its text is used for messages only. `.ranks.lock` is locked by every
rank in shared mode: a rank that outlived its launcher may still write, so the next
start waits for it.

The locks are flock's. They end with the process, even after SIGKILL, so a leftover file
has no effect. On NFS, Linux applies them across hosts. On file systems without locks,
`.run.held` is created instead and deleted at the end. A leftover of a killed run is
ignored if its host is this one and its process is gone; otherwise it has to be deleted
by hand.
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
# Seconds within which the ranks of a killed launcher notice its death and end.
ENDING = 10.0
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLocked(ValueError):
    """Raised if another run is using the folder: names the process, its start, and a
    way out."""


@dataclass(frozen=True)
class Owner:
    """The process that started the run in a folder."""

    host: str = ""
    pid: int = 0
    since: str = ""

    @classmethod
    def me(cls) -> "Owner":
        return cls(
            socket.gethostname(),
            os.getpid(),
            time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    @classmethod
    def read(cls, path: Path) -> "Owner":
        """Read the owner from a file; empty if there is nothing usable (its writer has
        just begun)."""
        try:
            with open_regular(path) as file:
                owner = json.loads(file.read(4096))
            return cls(
                str(owner["host"])[:100],
                int(owner["pid"]),
                str(owner["since"])[:40],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    @property
    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def gone(self) -> bool:
        """True if the process has ended, as far as this host can tell."""
        # A process of another host cannot be examined: it counts as alive.
        if self.host != socket.gethostname():
            return not self.host
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        # It exists, and belongs to another user.
        except OSError:
            return False
        return not started_at(self.pid)  # a zombie holds no locks

    def __str__(self) -> str:
        return f"host {self.host!r}, process {self.pid}, since {self.since!r}"


@contextmanager
def hold_run(*folders: Path) -> Iterator[None]:
    """Lock the folders that a run writes, or raise at once if another run has locked
    one."""
    with ExitStack() as stack:
        # `out` and the checkpoint folder may be one: lock it once.
        for folder in dict.fromkeys(each.resolve() for each in folders):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_held(folder))
        yield


@contextmanager
def hold_as_rank(*folders: Path) -> Iterator[None]:
    """Hold shared locks while a rank works, so that no other run starts in its
    folders."""
    with ExitStack() as stack:
        for folder in dict.fromkeys(each.resolve() for each in folders):
            # another host's folder, or no locks: `.run.lock` must suffice
            with suppress(OSError):
                descriptor = stack.enter_context(_opened(folder / RANKS))
                # Shared: all ranks hold it at once, and only a new start is
                # kept out.
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def owner_of(folder: Path) -> str:
    """Return the owner recorded in a folder, or "" if it cannot be read."""
    owner = Owner.read(folder / RUN)
    return str(owner) if owner.host else ""


def unshared(folder: Path, owner: str, seconds: float = ENDING) -> str:
    """Explain why this rank's folder is not the one that rank 0 has locked, or return
    "".

    Another host's writes may take some seconds to appear.
    """
    end = time.monotonic() + seconds
    # Network file systems show other hosts' writes late.
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
            # The run's lock first: whoever has it may write the owner.
            _lock(folder, RUN, descriptor)
            # Forked ranks inherit the descriptor, so closing it would not release the
            # lock.
            stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                # Another error is one of the disk, not a lack of locks.
                raise
            locks = False
            _create(folder)
            stack.callback((folder / HELD).unlink, missing_ok=True)
        # Written in place: a new file would be a different lock.
        os.ftruncate(descriptor, 0)
        # on a full disk the lock still holds; only its message is less informative
        with suppress(OSError):
            os.pwrite(descriptor, Owner.me().text, 0)
            os.fsync(descriptor)  # other hosts check that they see it
        # Ranks of an earlier launcher get time to end before this start
        # begins.
        if locks:
            with _opened(folder / RANKS) as ranks:
                _lock(folder, RANKS, ranks)
        yield


@contextmanager
def _opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    # A link could lead to a file that is locked by another program.
    with open_regular(path, flags | os.O_CREAT | os.O_NOFOLLOW) as file:
        yield file.fileno()


def _lock(folder: Path, name: str, descriptor: int) -> None:
    """Take a lock. Ranks whose launcher is gone get `ENDING` seconds to end."""
    end = time.monotonic() + ENDING
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever holds `.run.lock` knows that ranks holding `.ranks.lock` have lost
            # their launcher.
            owner, late = Owner.read(folder / RUN), time.monotonic() > end
            # A living owner is refused at once; after a dead one, its ranks
            # may still be ending.
            if name == RUN and (late or not owner.gone):
                raise RunLocked(_refusal(folder, owner)) from None
            if late:
                raise RunLocked(_outlived(folder)) from None
        time.sleep(0.05)


def _create(folder: Path) -> None:
    """Claim the folder by creating a file, on file systems without locks."""
    path = folder / HELD
    # A second try after a leftover of a dead process was removed.
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
    holders = (
        ", ".join(map(str, _holders(folder))) or "not to be seen from here"
    )
    return (
        f"{folder}: ranks of an earlier run are alive though the process that started them is gone, and"
        f" may still write here: process {holders}. End them (kill -9), or write another `out`."
    )


def _holders(folder: Path) -> list[int]:
    """List the processes of this host that have one of the folder's locks open, as far
    as permissions allow."""
    wanted = set()
    for name in (RUN, RANKS):
        # A lock belongs to the file, whatever path leads to it.
        with suppress(OSError):
            status = (folder / name).stat()
            wanted.add((status.st_dev, status.st_ino))
    holders = set()
    # Descriptors of all processes that may be read.
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            status = opened.stat()
            if (status.st_dev, status.st_ino) in wanted:
                holders.add(int(opened.parts[2]))
    return sorted(holders - {os.getpid()})
