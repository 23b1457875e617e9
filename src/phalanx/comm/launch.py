"""Starts a world of ranks on this machine, for one run or for many."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import CommMisuse
from phalanx.comm.devices import Devices, cores, name_unused
from phalanx.comm.pool import ALONE, SHARE_GPUS, Pool
from phalanx.comm.threads import run_threads
from phalanx.layout.choices import BACKENDS, GLOO, NCCL, SHM, THREADS
from phalanx.layout.device_environment import set_up
from torch_shm.arena import why_not

# Runs `fn(world, *args)` on every rank of a persistent world; returns the results by
# rank.
Runner = Callable[..., list[Any]]


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    backend: str = "auto",
    timeout: float = 300.0,
    threads_per_rank: int | None = None,
    apart: bool = False,
) -> list[Any]:
    """Run `fn(world, *args)` on new ranks and return the results in rank order.

    A rank that raises or is killed ends the others; `RankFailed` shows its traceback
    first. `timeout` limits a call's wait for a peer. For processes, `fn` must be at the
    top level of a module. With `apart`, even a single rank is a process: it may die
    while the launcher lives.
    """
    terms: dict[str, Any] = {
        "backend": backend,
        "timeout": timeout,
        "apart": apart,
    }
    with workers(ranks, threads_per_rank=threads_per_rank, **terms) as run:
        return run(fn, *args)


@contextlib.contextmanager
def workers(
    ranks: int,
    *,
    backend: str = "auto",
    timeout: float = 300.0,
    threads_per_rank: int | None = None,
    apart: bool = False,
) -> Iterator[Runner]:
    """A context with one world for many runs; groups left open are closed after each.

    After a run that failed, the next one starts new ranks.
    """
    set_up(os.environ)
    kind = choose(backend, ranks)
    if backend == "auto":
        name_unused(Devices())
    logging.getLogger(__name__).debug("%d ranks over %s", ranks, kind)
    # Said once, as gloo is chosen only where shared memory is not possible.
    if backend == "auto" and kind == GLOO and (why := why_not(ranks)):
        print(f"ranks talk over gloo, which is slower: {why}", file=sys.stderr)
    # A single rank runs here, unless it may die while this process lives on.
    if kind == ALONE and not apart:
        yield _run_alone
    # Threads are started anew for each run; nothing of them is worth keeping.
    elif kind == THREADS:
        gpus = used_gpus(kind, ranks)
        yield lambda fn, *args: run_threads(fn, ranks, args, timeout, gpus)
    # Processes are slow to start, so a pool keeps them between runs.
    else:
        pool = Pool(
            kind, ranks, timeout, threads_per_rank or max(1, cores() // ranks)
        )
        try:
            yield pool.run
        finally:
            pool.close()


def choose(backend: str, ranks: int, devices: Devices | None = None) -> str:
    """The backend of `ranks` local ranks. Raises an error if there is none.

    `auto` uses GPUs if there are any: over NCCL if each rank has one, else as threads
    that share them, since NCCL allows one rank per GPU. Without GPUs, ranks use shared
    memory or, if limits of the process forbid it, gloo.
    """
    devices = devices or Devices()
    if ranks < 1:
        raise CommMisuse(f"a world has at least 1 rank, not {ranks}.")
    if backend not in BACKENDS:
        renamed = "; it is now called shm" if backend == "shared" else ""
        raise CommMisuse(
            f"no backend is named {backend!r}{renamed}; choose one of {', '.join(BACKENDS)}."
        )
    # Tests of NCCL's calls let several ranks share a GPU.
    enough = devices.gpus >= (1 if SHARE_GPUS in os.environ else ranks)
    if backend == NCCL and not (devices.has(NCCL) and enough):
        why = f"{ranks} ranks need {ranks} GPUs, and this machine has {devices.gpus}"
        if not devices.has(NCCL):
            why = "this build of torch has no NCCL"
        raise CommMisuse(
            f"backend nccl cannot be used: {why}; use backend gloo or threads."
        )
    if ranks == 1:
        return ALONE
    # NCCL takes one rank per GPU; threads may share them.
    if backend == "auto" and devices.gpus:
        backend = (
            NCCL if devices.has(NCCL) and devices.gpus >= ranks else THREADS
        )
    elif backend == "auto":
        backend = GLOO if devices.has(GLOO) and why_not(ranks) else SHM
    if backend == SHM and os.name != "posix":
        backend = GLOO
    if backend == GLOO and not devices.has(GLOO):
        raise CommMisuse(
            "this build of torch has no gloo; use backend threads."
        )
    return backend


def used_gpus(kind: str, ranks: int, devices: Devices | None = None) -> int:
    """The number of GPUs of `ranks` local ranks on a chosen backend; 0: the CPU."""
    return (
        min(ranks, (devices or Devices()).gpus)
        if kind in (ALONE, THREADS, NCCL)
        else 0
    )


def _run_alone(fn: Callable[..., Any], *args: Any) -> list[Any]:
    world = AloneWorld("cuda:0" if used_gpus(ALONE, 1) else "cpu")
    try:
        return [fn(world, *args)]
    finally:
        world.close()
