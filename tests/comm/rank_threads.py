"""Ranks that are threads."""

from phalanx.comm.threads import run_threads


def threads_of(size, timeout=30.0):
    """Threads even for one rank, for which `workers` would choose to be alone."""
    return lambda fn, *args: run_threads(fn, size, args, timeout, gpus=0)
