"""The processes of local ranks: how they start, are handed work, report, and end.

They meet in memory or through a file in a private folder and talk through memory or over loopback:
no port is chosen, so none can be taken. Functions and values of ours travel over the pipes of
multiprocessing; nothing from outside does.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from phalanx.comm.base import RankFailed, Report, World
from phalanx.comm.process import ProcessWorld, file_store
from phalanx.comm.shm.arena import Extent, Reserved
from phalanx.comm.shm.local import ShmWorld

# Seconds in which the others may say how they ended once one rank has failed, so that the rank
# whose loss they suffered is named first; then they are ended.
HEARING = 0.5
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
# Where ranks meet: a file's path, or an arena's.
Meeting = str | tuple[str, Extent]


class Pool:
    """The processes of one world, each waiting at its pipe for (fn, args) or for None, the end."""

    def __init__(self, backend: str, ranks: int, timeout: float, threads: int) -> None:
        self._terms = (backend, ranks, timeout, threads)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._arena: Reserved | None = None

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
        backend, ranks, _, _ = self._terms
        context = _context(backend)
        meeting: Meeting
        if backend == "shm":
            self._arena = Reserved(ranks)
            meeting = self._arena.path, self._arena.extent
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="phalanx-")
            meeting = os.path.join(self._folder.name, "store")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, meeting, dict(os.environ), *self._terms),
                daemon=True,
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
        # One second for all of them together.
        deadline = time.monotonic() + 1.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
        if self._arena is not None:
            self._arena.close()

    def close(self) -> None:
        """Let every rank leave the world together, and end who does not within some seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()


def _context(backend: str) -> Any:
    """How processes start. A fork starts a rank in 0.05 s and a spawn in 1.6 (importing torch)."""
    # Processes that may use GPUs are not forked from one that may have.
    if sys.platform != "linux" or backend == "nccl":
        return multiprocessing.get_context("spawn")
    # A forked process hangs if threads of its parent, such as OpenMP's, held a lock: fork this
    # process only if it has none, else one that is kept for that and has never had any.
    if len(os.listdir("/proc/self/task")) == 1 and not torch.cuda.is_available():
        return multiprocessing.get_context("fork")
    prepare()
    return multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the process that ranks are forked from, which takes as long as importing torch, without
    waiting for it. `workers` calls this when it needs one; who knows earlier saves that time."""
    if sys.platform != "linux":
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {name: os.environ.get(name) for name in single}
    os.environ.update(single)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _serve(
    pipe: Connection,
    rank: int,
    meeting: "Meeting",
    environment: dict[str, str],
    *terms: Any,
) -> None:
    """One rank's process: do what comes through the pipe until the end comes or the parent dies."""
    # A spawned rank may be the child of a thread of the launcher, and would go with that.
    if sys.platform == "linux" and terms[0] != "nccl":
        _be_killed_with_parent()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # The process that it was forked from has an older environment, with one thread for everything.
    os.environ.clear()
    os.environ.update(environment)
    world: World | None = None
    try:
        world = _world(meeting, rank, *terms)
        while (asked := pipe.recv()) is not None:
            fn, args = asked
            result = fn(world, *args)
            world.clear()
            pipe.send((result,))
        world.close()
    except BaseException as error:
        report = Report.of(rank, error)
        if isinstance(world, ShmWorld):
            world.fail(f"rank {rank} raised {report.error.splitlines()[0]};")
        with contextlib.suppress(OSError):
            pipe.send(report)
        # The others' sockets stay open until the launcher has heard this rank and ends it, so that
        # the loss of a peer is not what it hears first.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


def _world(
    meeting: "Meeting", rank: int, backend: str, ranks: int, timeout: float, threads: int
) -> World:
    torch.set_num_threads(threads)
    if not isinstance(meeting, str):
        return ShmWorld(*meeting, rank, timeout=timeout)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback
    store = file_store(meeting, ranks)
    return ProcessWorld(backend, store, rank, ranks, gpu=rank, timeout=timeout)


def _be_killed_with_parent() -> None:
    """Have the kernel kill this process when its parent goes, also where no thread of it can run: it
    was stopped, or something holds the interpreter's lock."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
