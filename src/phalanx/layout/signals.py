"""Signals by what they are for."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# These ask a run to save and end: a scheduler, Ctrl-C, a terminal that is gone, Slurm's warning.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# What a fault of the thread itself raises, which nobody can hold back.
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}
HELD = signal.valid_signals() - FAULTS


@contextmanager
def signals_held_back() -> Iterator[None]:
    """No signal reaches this thread in the block; those that come are kept. A thread or a process that
    is started in the block begins so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
