"""Starting a world of ranks on this machine, for one run or for many.

Local processes meet through a file in a private folder and talk over loopback: no port is chosen,
so none can be taken. Functions and values of ours travel over the pipes of multiprocessing; nothing
from outside does. Joining the ranks that torchrun or Slurm have started is in `join.py`.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.wire.alone import AloneWorld
from phalanx.wire.base import RankFailed, Report, WireMisuse
from phalanx.wire.process import ProcessWorld, file_store
from phalanx.wire.threads import run_threads

WIRES = ("auto", "threads", "gloo", "nccl")
# Seconds in which the others may say how they ended once one rank has failed, so that the rank
# whose loss they suffered is named first; then they are ended.
HEARING = 0.5


class Run(Protocol):
    """A world that is kept: `run(fn, *args)` is what `fn(world, *args)` returns, by rank."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    wire: str = "auto",
    timeout: float = 300.0,
    threads_per_rank: int | None = None,
) -> list[Any]:
    """What `fn(world, *args)` returns on each of `ranks` new ranks, in rank order.

    A rank that raises, or is killed, ends the others; `RankFailed` shows its traceback first.
    `timeout` is how long a call may wait for a peer. Processes need `fn` at the top of a module.
    """
    with workers(ranks, wire=wire, timeout=timeout, threads_per_rank=threads_per_rank) as run:
        return run(fn, *args)


@contextlib.contextmanager
def workers(
    ranks: int,
    *,
    wire: str = "auto",
    timeout: float = 300.0,
    threads_per_rank: int | None = None,
) -> Iterator[Run]:
    """One world for many runs. Wires that a run leaves open are closed after it.

    After a run that failed, the next one starts new ranks.
    """
    kind = choose(wire, ranks)
    if kind == "alone":
        yield _run_alone
    elif kind == "threads":
        cuda = torch.cuda.is_available()
        yield lambda fn, *args: run_threads(fn, ranks, args, timeout, cuda)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = threads_per_rank or max(1, (cores or 1) // ranks)
        pool = _Pool(kind, ranks, timeout, threads)
        try:
            yield pool.run
        finally:
            pool.close()


def choose(wire: str, ranks: int) -> str:
    """The transport that will carry `ranks` local ranks, or one sentence why there is none."""
    if ranks < 1:
        raise WireMisuse(f"a world has at least 1 rank, not {ranks}.")
    if wire not in WIRES:
        raise WireMisuse(f"no wire is named {wire!r}; there are {', '.join(WIRES)}.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_nccl = dist.is_available() and dist.is_nccl_available()
    if wire == "nccl" and not (has_nccl and gpus >= ranks):
        why = f"{ranks} ranks need {ranks} GPUs and there are {gpus}"
        if not has_nccl:
            why = "this build of torch has no NCCL"
        raise WireMisuse(f"wire nccl cannot be used: {why}; use wire gloo or threads.")
    if ranks == 1:
        return "alone"
    if wire == "auto":
        wire = "nccl" if has_nccl and gpus >= ranks else "gloo"
    if wire == "gloo" and not (dist.is_available() and dist.is_gloo_available()):
        raise WireMisuse("this build of torch has no gloo; use wire threads.")
    return wire


def _run_alone(fn: Callable[..., Any], *args: Any) -> list[Any]:
    world = AloneWorld("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        return [fn(world, *args)]
    finally:
        world.close()


class _Pool:
    """The processes of one world, each waiting at its pipe for (fn, args) or for None, the end."""

    def __init__(self, backend: str, ranks: int, timeout: float, threads: int) -> None:
        self._terms = (backend, ranks, timeout, threads)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                # A rank that has died shows when it is heard.
                with contextlib.suppress(OSError):
                    pipe.send((fn, args))
            return self._collect()
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        _, ranks, _, _ = self._terms
        context = _context()
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-")
        meeting_point = os.path.join(self._folder.name, "store")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, meeting_point, *self._terms), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        reports: dict[int, Report] = {}
        deadline = None
        while len(results) + len(reports) < len(self._pipes):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            open_ = [i for i in range(len(self._pipes)) if i not in results and i not in reports]
            ready = wait([self._pipes[i] for i in open_], left)
            if not ready:
                break
            for rank in open_:
                if self._pipes[rank] in ready:
                    self._hear(rank, results, reports)
            if reports and deadline is None:
                deadline = time.monotonic() + HEARING
        if reports:
            raise RankFailed(list(reports.values()))
        return [results[rank] for rank in range(len(self._pipes))]

    def _hear(self, rank: int, results: dict[int, Any], reports: dict[int, Report]) -> None:
        try:
            said = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join(1.0)
            code = self._processes[rank].exitcode
            how = f"was killed by signal {-code}" if code and code < 0 else f"exited with {code}"
            reports[rank] = Report(rank, f"the process {how}", "", False)
            return
        if isinstance(said, Report):
            reports[rank] = said
        else:
            (results[rank],) = said

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def close(self) -> None:
        """Let every rank leave the world together, and end who does not within some seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()


def _context() -> Any:
    # A fork starts a rank in 0.05 s and a spawn in 1.6 (importing torch), but a forked process
    # hangs if threads of its parent, such as OpenMP's, held a lock: fork only a parent that has none.
    try:
        alone = len(os.listdir("/proc/self/task")) == 1
    except OSError:
        alone = False
    context: SpawnContext = multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork") if alone else context


def _serve(
    pipe: Connection,
    rank: int,
    meeting_point: str,
    backend: str,
    ranks: int,
    timeout: float,
    threads: int,
) -> None:
    """One rank's process: do what comes through the pipe until the end comes or the parent dies."""
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    try:
        store = file_store(meeting_point, ranks)
        world = ProcessWorld(backend, store, rank, ranks, local=rank, timeout=timeout)
        while (asked := pipe.recv()) is not None:
            fn, args = asked
            result = fn(world, *args)
            world.clear()
            pipe.send((result,))
        world.close()
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(Report.of(rank, error))
        # The others' sockets stay open until the launcher has heard this rank and ends it, so that
        # the loss of a peer is not what it hears first.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
