"""Requests to stop a run: signals to its processes, a file STOP in its folder, the removal of that folder.

In each case the run finishes its step, saves and ends. A signal comes from a scheduler that needs the
machine, or from a terminal: the same command is expected to continue the run. A STOP file means that
the run is to end for good. Launchers start again whatever ends with an exit code other than 0, so the
two have different exit codes, and the journal says which of them it was. A folder that is removed or
renamed while its run writes to it no longer has the run's lock: another run could begin there. It is made
again for the last save, unless another run has it.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from ..layout.files import open_regular, reason
from ..layout.journal import last_record
from ..layout.run import Run
from ..layout.signals import STOP_SIGNALS
from .lock import RUN as LOCK
from .lock import owner_of

STOP = "STOP"  # the file, and how a request by it is called
REMOVED = "REMOVED"  # how the removal of the run's folder is called
FOR_GOOD = (STOP, REMOVED)  # these count more than signals
_RESERVE = ".run.stop"
# what a STOP file begins with that a command has put there for its ranks
_SIGNAL = "signal "
# Seconds that clocks of one file server may differ by, from one of its answers to the next.
_SLACK = 2.0
_UNKNOWN = (-1, -1)  # the numbers of a file that cannot be looked at


class StopError(ValueError):
    """A STOP file that cannot be removed: every start would end after a step."""


class FolderReplaced(ValueError):
    """Another folder in the place of the run's: what is saved there would be among another run's files."""

    exit_code = 1


class StopRequests:
    """The requests that have reached one rank. Rank 0 also looks for the STOP file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.seen = ""  # what the file has asked for
        self.received: list[int] = []
        self._lock = _identity(file.with_name(LOCK)) if file else None
        self._owner = owner_of(file.parent) if file else ""

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        self.received.append(number)
        if number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # a second one ends the rank at once

    def __call__(self) -> bool:
        if self.file is not None and self.seen not in FOR_GOOD:
            self._look(self.file)
        return bool(self.seen or self.received)

    def _look(self, file: Path) -> None:
        """Look for the STOP file, and whether its folder still has the lock of this run."""
        if os.path.lexists(file):
            self.seen = _asked_by(file)
        lock, folder = _identity(file.with_name(LOCK)), file.parent
        if lock is not None and lock in (self._lock, _UNKNOWN):
            return
        # Some network file systems number their files anew: what is in the lock decides.
        owner = owner_of(folder)
        if not owner:
            self.seen = REMOVED
        elif owner != self._owner:
            raise FolderReplaced(
                f"{folder} was removed or renamed while the run was writing to it, and another run is"
                f" active in its place ({owner}). This run ends and saves nothing there."
            )

    @property
    def by(self) -> str:
        """STOP or REMOVED, else the name of the first signal; empty for none of them."""
        self()
        names = [signal.Signals(number).name for number in self.received]
        return self.seen if self.seen in FOR_GOOD or not names else names[0]


def _identity(file: Path) -> tuple[int, int] | None:
    """The numbers of a file in its file system; None if there is no such file."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # a file server that does not answer now
        return _UNKNOWN
    return status.st_dev, status.st_ino


def _asked_by(file: Path) -> str:
    """The signal that a command has passed on by this STOP file, or STOP if a user has made it."""
    with suppress(OSError), open_regular(file, os.O_RDONLY | os.O_NOFOLLOW) as opened:
        kind, _, name = opened.read(64).decode(errors="replace").partition(" ")
        if kind == _SIGNAL.strip() and name.strip() in signal.Signals.__members__:
            return name.strip()
    return STOP


@contextmanager
def stop_requests(file: Path, *, first: bool) -> Iterator[StopRequests]:
    """The requests to one rank while it trains. Rank 0 is `first`: it looks for the STOP file and
    removes it at the end. Ranks that are threads receive no signals; their command makes the file."""
    requests = StopRequests(file if first else None)
    with stop_signals(requests.receive):
        try:
            yield requests
        finally:
            if first:
                _remove(file)


@contextmanager
def stop_signals(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `receive` for the signals that ask a run to save and end: SIGTERM, SIGINT (Ctrl-C), SIGHUP
    (the terminal is gone; not under nohup) and SIGUSR1 (Slurm's warning). Nothing in a thread that is
    not the main one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as before:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                before.callback(signal.signal, number, signal.signal(number, receive))
        yield


# ---- the command's side


class PassedOn:
    """A STOP file that a command makes for its ranks when it receives a signal.

    A file is reserved beforehand and only renamed then: that also works on a disk that has no block
    and no inode left. `ask` may be called in a signal handler.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.reserve = file, file.with_name(_RESERVE)
        self.descriptor = -1
        _remove(self.reserve)  # of a killed command
        # a disk that is full already: `ask` says that it cannot
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.descriptor = os.open(self.reserve, flags, 0o644)
            os.write(self.descriptor, f"{_SIGNAL}{'SIGTERM':10}\n".encode())

    def ask(self, number: int) -> bool:
        """Ask the ranks to stop because of a signal; False if no file can be made."""
        if os.path.lexists(self.file):
            return True
        if self.descriptor < 0:
            return False
        text = f"{_SIGNAL}{signal.Signals(number).name:10}\n".encode()
        try:
            with suppress(OSError):  # it has the same length, and SIGTERM in it
                os.pwrite(self.descriptor, text, 0)
            self.reserve.rename(self.file)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Remove what is left of both files."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            _remove(self.reserve)
        _remove(self.file)


# ---- files of earlier runs


def remove_stale_stop(run: Run, begun: float, *, launched: bool = False) -> str:
    """Removes a STOP file that is not meant for this start; returns the notice, or "" if there was
    none. Only the process that holds the folder may call this.

    A STOP file counts if it was made after this process began, at `begun`. `launched`: a launcher has
    started the ranks, perhaps again without anybody's wish. Then it also counts if it was made after
    the last record of an unfinished run.
    """
    file = Path(run.out, STOP)
    try:
        status = file.lstat()
    except OSError:
        return ""
    # A file's times are those of the file server, whose clock may differ from ours by minutes.
    now = _server_time(file.parent)
    since = now - max(0.0, time.time() - begun)
    if launched:
        since = min(since, _last_write(run, since))
    # `mv` keeps the first, and `touch -d` sets it.
    if made_between(since, now, status.st_mtime, status.st_ctime):
        return ""
    if why := _remove(file):
        raise StopError(
            f"{file} cannot be removed: {why}. A run ends where there is a file STOP: remove it."
        )
    return f"{file} was left by an earlier run, or meant for one: removed, the run continues"


def made_between(since: float, now: float, *times: float) -> bool:
    """True if all times of a file lie between the two. A time in the future counts no more than an
    old one: a clock was set back, or somebody set the file's time."""
    return since <= min(times) and max(times) <= now + _SLACK


def _server_time(folder: Path) -> float:
    """The time by the clock that stamps the files of a folder; ours where nothing can be written."""
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".clock-")
        try:
            return os.fstat(descriptor).st_ctime
        finally:
            os.close(descriptor)
            os.unlink(name)
    return time.time()


def _last_write(run: Run, otherwise: float) -> float:
    """Time of the last record of an unfinished run."""
    journal = Path(run.out, "metrics.jsonl")
    with suppress(OSError):
        if last_record(journal).get("event") not in (None, "end"):
            return journal.stat().st_mtime
    return otherwise


def _remove(file: Path) -> str:
    """Removes a file, a link or an empty folder; why that failed, empty if nothing is there now."""
    try:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        return reason(error)
    return ""
