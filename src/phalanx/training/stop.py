"""Requests to stop a run: signals to its processes, a file STOP in its folder, or
removal of that folder.

In each case the run finishes its step, saves and ends. A signal comes from a scheduler
that needs the machine, or from a terminal: the same command is expected to continue the
run. A STOP file ends the run for good. Launchers restart anything with a nonzero exit
code, so the two have different exit codes, and the journal records which of them it
was.

If the folder is removed or renamed while its run writes to it, the run has lost its
lock: another run could start there. The folder is created again for the last save,
unless another run has it.
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

STOP = "STOP"  # name of the file, and of a request by it
REMOVED = "REMOVED"  # name of a request by removal of the run's folder
FOR_GOOD = (STOP, REMOVED)  # take precedence over signals
_RESERVE = ".run.stop"
# prefix of a STOP file that the command wrote for its ranks
_SIGNAL = "signal "
# Maximum difference in seconds between two answers of one file server's clocks.
_SLACK = 2.0
_UNKNOWN = (-1, -1)  # identity of a file that cannot be examined


class StopError(ValueError):
    """Raised if a STOP file cannot be deleted: every start would end after one step."""


class FolderReplaced(ValueError):
    """Raised if another folder took the place of the run's: saving would mix the files
    of two runs."""

    exit_code = 1


class StopRequests:
    """The stop requests that have reached one rank. Rank 0 also checks the STOP
    file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.seen = ""  # the request made by the file
        self.received: list[int] = []
        # The lock of the folder at the start: another one means another
        # folder.
        self._lock = _identity(file.with_name(LOCK)) if file else None
        self._owner = owner_of(file.parent) if file else ""

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received.append(number)
        # The others are warnings, and may come more than once.
        if number in (signal.SIGTERM, signal.SIGINT):
            # a second signal ends the rank at once
            signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> bool:
        if self.file is not None and self.seen not in FOR_GOOD:
            self._look(self.file)
        return bool(self.seen or self.received)

    def _look(self, file: Path) -> None:
        """Check the STOP file, and that the folder still has the lock of this run."""
        # A broken link with this name counts, too.
        if os.path.lexists(file):
            self.seen = _asked_by(file)
        lock, folder = _identity(file.with_name(LOCK)), file.parent
        # The lock is the same, or the file server does not answer.
        if lock is not None and lock in (self._lock, _UNKNOWN):
            return
        # Some network file systems renumber their files, so the lock's content decides.
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
        """STOP or REMOVED, else the name of the first signal, else ""."""
        self()
        names = [signal.Signals(number).name for number in self.received]
        return self.seen if self.seen in FOR_GOOD or not names else names[0]


def _identity(file: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if there is no such file."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # the file server does not answer at the moment
        return _UNKNOWN
    return status.st_dev, status.st_ino


def _asked_by(file: Path) -> str:
    """Return the signal that the command passed on in this STOP file, or STOP if a user
    made the file."""
    with (
        suppress(OSError),
        open_regular(file, os.O_RDONLY | os.O_NOFOLLOW) as opened,
    ):
        kind, _, name = opened.read(64).decode(errors="replace").partition(" ")
        if (
            kind == _SIGNAL.strip()
            and name.strip() in signal.Signals.__members__
        ):
            return name.strip()
    return STOP


@contextmanager
def stop_requests(file: Path, *, first: bool) -> Iterator[StopRequests]:
    """Collect stop requests to one rank while it trains.

    Rank 0 is `first`: it checks the STOP file and deletes it at the end. Ranks that are
    threads receive no signals; their command writes the file.
    """
    requests = StopRequests(file if first else None)
    with stop_signals(requests.receive):
        try:
            yield requests
        finally:
            if first:
                _remove(file)


@contextmanager
def stop_signals(
    receive: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Call `receive` for the signals that ask a run to save and end.

    These are SIGTERM, SIGINT (Ctrl-C), SIGHUP (the terminal closed; not under nohup)
    and SIGUSR1 (Slurm's warning). Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as before:
        for number in STOP_SIGNALS:
            # Ignored ones stay ignored: nohup ignores SIGHUP.
            if signal.getsignal(number) != signal.SIG_IGN:
                before.callback(
                    signal.signal, number, signal.signal(number, receive)
                )
        yield


# ---- on the side of the command


class PassedOn:
    """A STOP file with which a command passes a signal on to its ranks.

    The file is written in advance and only renamed on a signal, which works even on a
    disk without free blocks or inodes. `ask` may be called in a signal handler.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.reserve = file, file.with_name(_RESERVE)
        self.descriptor = -1
        _remove(self.reserve)  # left by a killed command
        # the disk may be full already; `ask` then returns False
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.descriptor = os.open(self.reserve, flags, 0o644)
            # Padded to one length, so that another name can take its place.
            os.write(self.descriptor, f"{_SIGNAL}{'SIGTERM':10}\n".encode())

    def ask(self, number: int) -> bool:
        """Ask the ranks to stop because of a signal; return False if the file cannot be
        made."""
        # Somebody has asked already.
        if os.path.lexists(self.file):
            return True
        if self.descriptor < 0:
            return False
        # Writing before the rename: ranks must not read half a text.
        text = f"{_SIGNAL}{signal.Signals(number).name:10}\n".encode()
        try:
            # the text keeps its length; on failure it still says SIGTERM
            with suppress(OSError):
                os.pwrite(self.descriptor, text, 0)
            self.reserve.rename(self.file)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Delete what is left of both files."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            _remove(self.reserve)
        _remove(self.file)


# ---- files of earlier runs


def remove_stale_stop(
    run: Run, begun: float, *, launched: bool = False
) -> str:
    """Delete a STOP file that is not meant for this start; return a notice, or "" if
    there was none.

    Only the process that has locked the folder may call this. A STOP file counts if it
    was made after this process began, at `begun`. `launched`: a launcher started the
    ranks, perhaps as an automatic restart. Then a file also counts if it is newer than
    the last record of an unfinished run.
    """
    file = Path(run.out, STOP)
    try:
        status = file.lstat()
    except OSError:
        return ""
    # File times come from the file server, whose clock may differ from ours by minutes.
    now = _server_time(file.parent)
    since = now - max(0.0, time.time() - begun)
    if launched:
        # A restart continues an unfinished run, for which the file may have
        # been meant.
        since = min(since, _last_write(run, since))
    # `mv` preserves the modification time, and `touch -d` sets it; ctime cannot be set.
    if made_between(since, now, status.st_mtime, status.st_ctime):
        return ""
    if why := _remove(file):
        raise StopError(
            f"{file} cannot be removed: {why}. A run ends where there is a file STOP: remove it."
        )
    return f"{file} was left by an earlier run, or meant for one: removed, the run continues"


def made_between(since: float, now: float, *times: float) -> bool:
    """True if all times lie in the interval.

    A time in the future counts like an old one: a clock was set back, or the file's
    time was set by hand.
    """
    return since <= min(times) and max(times) <= now + _SLACK


def _server_time(folder: Path) -> float:
    """Return the time of the clock that stamps files in a folder, or ours if nothing
    can be written."""
    # A new file, stamped by the server's clock.
    with suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".clock-")
        try:
            return os.fstat(descriptor).st_ctime
        finally:
            os.close(descriptor)
            os.unlink(name)
    return time.time()


def _last_write(run: Run, otherwise: float) -> float:
    """Return the time of the last record of an unfinished run, or `otherwise`."""
    journal = Path(run.out, "metrics.jsonl")
    with suppress(OSError):
        # "end" is the record of a run that was complete.
        if last_record(journal).get("event") not in (None, "end"):
            return journal.stat().st_mtime
    return otherwise


def _remove(file: Path) -> str:
    """Delete a file, link or empty folder. Return the error, or "" if nothing is
    left."""
    try:
        if file.is_dir() and not file.is_symlink():
            file.rmdir()
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        return reason(error)
    return ""
