"""The first process of a container, and requests to stop that come before training does.

Linux drops a signal for process 1 that has no handler yet, and gives it every process whose parent has
ended. So `phalanx train` as process 1 goes on in a child: the first process passes signals on and
collects what has ended, as `tini` does.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from ..layout.signals import HELD, STOP_SIGNALS, signals_held_back

# EX_TEMPFAIL of sysexits.h: try again later, which is what a scheduler then does
STOPPED = 75
# What names a rank of a launcher. Its calls of torch's store wait in C++, where no handler of Python's
# runs: such a rank keeps the system's own answer, which ends it at once.
_RANKS = ("RANK", "SLURM_PROCID")


class StoppedEarly(BaseException):
    """A signal that asked a run to stop before its ranks were started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


@contextmanager
def early_requests(environment: Mapping[str, str]) -> Iterator[None]:
    """Raise `StoppedEarly` for a signal that asks to stop, until the command has handlers of its own.
    Ctrl-C stays a KeyboardInterrupt."""
    if any(name in environment for name in _RANKS):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedEarly(number)

    replaced = {}
    for number in STOP_SIGNALS:
        # Under nohup SIGHUP is ignored, and stays so.
        if signal.getsignal(number) == signal.SIG_DFL:
            replaced[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, before in replaced.items():
            signal.signal(number, before)


def leave_first_process() -> None:
    """Goes on in a child if this is process 1. Threads must not have been started."""
    if sys.platform != "linux" or os.getpid() != 1:
        return
    with signals_held_back():  # those that come are kept, also for process 1
        if child := os.fork():
            os._exit(serve(child))
        _take_terminal()


def _take_terminal() -> None:
    """Leads the terminal's foreground: Ctrl-C reaches this process, and not twice."""
    with suppress(OSError):
        if os.isatty(0):
            os.setpgid(0, 0)
            os.tcsetpgrp(0, os.getpid())


def serve(child: int) -> int:
    """Passes signals on to the child and collects every process that ends, until the child has ended.
    Returns its exit code. Signals must be held back."""
    while True:
        number = signal.sigwait(HELD)
        if number == signal.SIGCHLD:
            code = _collect(child)
            if code is not None:
                return code
        else:
            with suppress(ProcessLookupError):
                os.kill(child, number)


def _collect(child: int) -> int | None:
    """Collects the processes that have ended; returns the child's exit code if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    if code is None:
        return None
    return code if code >= 0 else 128 - code  # of a signal, as shells have it
