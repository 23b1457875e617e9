"""`phalanx train` as the first process of a container, and stop requests that arrive
before training.

Linux drops signals to process 1 that have no handler, and makes it the parent of every
orphan. So `phalanx train` as process 1 continues in a child: the first process forwards
signals and reaps ended processes, as `tini` does.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from ..layout.signals import HELD, STOP_SIGNALS, signals_held_back

# EX_TEMPFAIL of sysexits.h: try again later. Schedulers then requeue the job.
STOPPED = 75
# Variables that identify a launcher's rank. Its calls of torch's store wait in C++,
# where Python's handlers do not run: such a rank keeps the default action, which ends
# it at once.
_RANKS = ("RANK", "SLURM_PROCID")


class StoppedEarly(BaseException):
    """A signal that asked a run to stop before its ranks were started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


@contextmanager
def early_requests(environment: Mapping[str, str]) -> Iterator[None]:
    """Raise `StoppedEarly` on a stop signal, until the command installs handlers of its
    own.

    Ctrl-C remains a KeyboardInterrupt.
    """
    # A rank of a launcher keeps the default: see `_RANKS`.
    if any(name in environment for name in _RANKS):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedEarly(number)

    # Restored at the end: the command installs its own.
    replaced = {}
    for number in STOP_SIGNALS:
        # under nohup SIGHUP is ignored and stays so
        if signal.getsignal(number) == signal.SIG_DFL:
            replaced[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


def leave_first_process() -> None:
    """Continue in a child if this is process 1. No threads may have been started."""
    if sys.platform != "linux" or os.getpid() != 1:
        return
    # No signal may be lost between the fork and the parent's wait.
    with signals_held_back():  # pending signals are kept, also for process 1
        # The parent stays process 1; the child runs the command.
        if child := os.fork():
            os._exit(serve(child))
        _take_terminal()


def _take_terminal() -> None:
    """Move to the terminal's foreground, so that Ctrl-C reaches this process exactly
    once."""
    with suppress(OSError):
        if os.isatty(0):
            os.setpgid(0, 0)
            # Without a terminal in its group, Ctrl-C would reach both.
            os.tcsetpgrp(0, os.getpid())


def serve(child: int) -> int:
    """Forward signals to the child and reap every ended process until the child has
    ended.

    Returns its exit code. Signals must be blocked.
    """
    while True:
        # Blocked signals are taken one by one.
        number = signal.sigwait(HELD)
        if number == signal.SIGCHLD:
            code = _collect(child)
            if code is not None:
                return code
        else:
            with suppress(ProcessLookupError):
                # It may have ended between the signal and now.
                os.kill(child, number)


def _collect(child: int) -> int | None:
    """Reap ended processes; return the child's exit code if it is among them."""
    code = None
    with suppress(ChildProcessError):
        # One SIGCHLD may stand for several processes.
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    if code is None:
        return None
    # killed by a signal: the shells' convention
    return code if code >= 0 else 128 - code
