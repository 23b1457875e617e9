"""Signals by their purpose."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# Requests to save and end: from a scheduler, Ctrl-C, a closed terminal, Slurm's
# warning.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# Raised by a fault of the thread itself. They cannot be blocked.
FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
}
HELD = signal.valid_signals() - FAULTS


@contextmanager
def signals_held_back() -> Iterator[None]:
    """A context in which signals stay pending for this thread.

    A thread or process started in it also starts with signals blocked.
    """
    # Blocked, not ignored: a signal that arrives meanwhile is delivered
    # afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
