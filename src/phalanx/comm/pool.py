"""The processes of local ranks: how they start, get work, report, and end.

They meet in shared memory or through a file in a private folder, and communicate
through memory or over loopback. No port is chosen, so none can be taken. Only our own
functions and values travel over the pipes of multiprocessing.
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
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed

from phalanx.comm.alone import AloneWorld
from phalanx.comm.base import CommMisuse, RankFailed, Report, World
from phalanx.comm.process import ProcessWorld
from phalanx.comm.shm import ShmWorld
from phalanx.layout.choices import NCCL, SHM
from torch_shm.arena import Extent, Reserved

# Seconds in which other ranks may report their end once one has failed, so that the
# rank whose loss they suffered is named first. Then they are killed.
GRACE = 0.5
# Seconds between two looks at signals while waiting for ranks. A signal delivered to a
# library's thread does not end the wait of the main thread, and only there Python calls
# handlers.
LOOKS = 1.0
_dist: Any = torch.distributed  # its stubs lack the stores
_PR_SET_PDEATHSIG = 1  # an option of Linux's prctl
# An environment variable: ranks over NCCL may share GPUs, to test their calls.
SHARE_GPUS = "PHALANX_SHARE_GPUS"
ALONE = "alone"  # the backend that `choose` returns for a world of one rank
# Where ranks meet: a file's path, or an arena's path and extent.
Meeting = str | tuple[str, Extent]


class Pool:
    """A world's processes, each waiting at its pipe for (fn, args), or None to end."""

    def __init__(
        self, backend: str, ranks: int, timeout: float, threads: int
    ) -> None:
        self._terms = (backend, ranks, timeout, threads)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._remove = contextlib.ExitStack()
        self._imports = (
            False  # True if processes must import the functions they call
        )

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        if (
            getattr(fn, "__module__", "") == "__main__"
            and self._imports
            and not _main_is_a_file()
        ):
            raise CommMisuse(
                f"{fn.__name__} is defined in a notebook or on standard input, which processes cannot"
                " import. Write backend='threads', or put it into a file and import it from there."
            )
        try:
            for pipe in self._pipes:
                # A rank that has died shows in `_collect`.
                with contextlib.suppress(OSError):
                    pipe.send((fn, args))
            return self._collect()
        # Ranks of a failed run may be in any state, so the next run starts new ones.
        except BaseException:
            self._end()
            raise

    def _start(self) -> None:
        backend, ranks, _, _ = self._terms
        context = _context(backend)
        self._imports = context.get_start_method() != "fork"
        # The kernel kills a child when the thread that spawned it ends, but ranks may
        # be kept longer.
        main = threading.current_thread() is threading.main_thread()
        outlasts = context.get_start_method() == "spawn" and not main
        meeting: Meeting
        if backend == ALONE:
            meeting = ""
        elif backend == SHM:
            arena = Reserved(ranks)
            self._remove.callback(arena.close)
            meeting = arena.path, arena.extent
        else:
            folder = self._remove.enter_context(
                tempfile.TemporaryDirectory(prefix="phalanx-")
            )
            meeting = os.path.join(folder, "store")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    theirs,
                    rank,
                    meeting,
                    dict(os.environ),
                    outlasts,
                    *self._terms,
                ),
                daemon=True,
            )
            with _main_of_its_own():
                process.start()
            # Closed here, so that a rank's death ends its pipe.
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        reports: list[Report] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = None
        while waiting:
            # Wait for all; after the first failure, only until the deadline.
            left = (
                LOOKS
                if deadline is None
                else max(0.0, deadline - time.monotonic())
            )
            ready = [
                pipe
                for pipe in wait(list(waiting), left)
                if isinstance(pipe, Connection)
            ]
            for pipe in ready:
                rank = waiting.pop(pipe)
                # A rank killed by a signal sends nothing: its pipe ends.
                answer = self._answer(rank)
                if isinstance(answer, Report):
                    reports.append(answer)
                else:
                    (results[rank],) = answer
            if not ready and deadline is not None:
                break
            if reports and deadline is None:
                deadline = time.monotonic() + GRACE
        if reports:
            raise RankFailed(reports)
        return [results[rank] for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Report | tuple[Any]:
        try:
            answer: Report | tuple[Any] = self._pipes[rank].recv()
            return answer
        except (EOFError, OSError):
            # The pipe has ended without an answer: the exit code tells how.
            self._processes[rank].join(1.0)
            code = self._processes[rank].exitcode
            end = (
                f"was killed by signal {-code}"
                if code and code < 0
                else f"exited with {code}"
            )
            return Report(rank, f"the process {end}", "", False)

    def _end(self) -> None:
        # Kill all at once: failed ranks have reported, a checkpoint is atomic, and a
        # rank that is asked to end may be waiting for one that cannot.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._remove.close()

    def close(self) -> None:
        """Let all ranks leave together, and kill those that take over 5 seconds."""
        # None ends a rank's loop in `_serve`.
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()


def _context(backend: str) -> Any:
    """The start method: a fork takes 0.05 s, a spawn 1.6 s to import torch."""
    # Processes that may use GPUs are not forked from one that may have initialized
    # CUDA.
    if sys.platform != "linux" or backend == NCCL:
        return multiprocessing.get_context("spawn")
    # A forked process hangs if threads of its parent, such as OpenMP's, held a lock. So
    # fork this process only if it has no other threads; otherwise fork a server process
    # that never has any.
    if (
        len(os.listdir("/proc/self/task")) == 1
        and not torch.cuda.is_available()
    ):
        return multiprocessing.get_context("fork")
    prepare()
    return multiprocessing.get_context("forkserver")


def _main_is_a_file() -> bool:
    return os.path.exists(
        getattr(sys.modules["__main__"], "__file__", None) or ""
    )


@contextlib.contextmanager
def _main_of_its_own() -> Iterator[None]:
    """Hide a `__file__` that is not a file: a spawned process would run it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_is_a_file():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def prepare() -> None:
    """Start the server that ranks are forked from, without waiting for it.

    That takes as long as importing torch. `workers` calls this when it needs the
    server; an earlier call saves that time.
    """
    if sys.platform != "linux":
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [__name__]
    )
    # No threads of OpenMP's in the server, so that it can be forked.
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = dict(os.environ)
    os.environ.update(dict.fromkeys(threads, "1"))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    pipe: Connection,
    rank: int,
    meeting: Meeting,
    environment: dict[str, str],
    outlasts: bool,
    *terms: Any,
) -> None:
    """Run one rank's process: work until the end, or until the launcher dies."""
    # Ctrl-C in a terminal reaches all processes; the launcher decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not outlasts:
        be_killed_with_parent()
    # A launcher that dies without closing the pipe is noticed by a thread.
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    # The server process that it was forked from has an older environment, with one
    # thread everywhere.
    os.environ.clear()
    os.environ.update(environment)
    world: World | None = None
    try:
        world = _world(meeting, rank, *terms)
        while (work := pipe.recv()) is not None:
            fn, args = work
            result = fn(world, *args)
            # Groups that the function left open are closed before its result is sent.
            world.clear()
            pipe.send((result,))
        world.close()
    except BaseException as error:
        report = Report.of(rank, error)
        if isinstance(world, ShmWorld):
            world.fail(f"rank {rank} raised {report.error.splitlines()[0]};")
        with contextlib.suppress(OSError):
            pipe.send(report)
        # Keep the sockets open until the launcher has read this report and kills the
        # rank. Otherwise it might first read another rank's report that a peer was
        # lost.
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


def _world(
    meeting: Meeting,
    rank: int,
    backend: str,
    ranks: int,
    timeout: float,
    threads: int,
) -> World:
    torch.set_num_threads(threads)
    if backend == ALONE:
        return AloneWorld("cuda:0" if torch.cuda.is_available() else "cpu")
    if not isinstance(meeting, str):
        return ShmWorld(*meeting, rank, timeout=timeout)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = (
        loopback
    )
    gpu = rank
    if backend == NCCL and SHARE_GPUS in os.environ:
        gpu = rank % torch.cuda.device_count()
        os.environ.update(_as_if_on_a_host_of_its_own(rank))
    store = _dist.FileStore(meeting, ranks)
    return ProcessWorld(backend, store, rank, ranks, gpu=gpu, timeout=timeout)


def _as_if_on_a_host_of_its_own(rank: int) -> dict[str, str]:
    """Environment variables that make NCCL accept two ranks on one GPU.

    It refuses them only if their hosts are equal. Messages then use sockets, which is
    slow but shows that a layout's calls match.
    """
    return {
        "NCCL_HOSTID": f"phalanx-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def be_killed_with_parent() -> None:
    """Make the kernel kill this process when its parent dies.

    This works even if no thread of the process can run: it is stopped, or something
    holds the interpreter lock. Only on Linux.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server ends when nobody has the launcher's end of this pipe open any
    # more. Each rank inherits it, so a stopped rank would keep both alive.
    server: Any = forkserver
    if (pipe := server._forkserver._forkserver_alive_fd) is not None:
        os.close(pipe)
        server._forkserver._forkserver_alive_fd = None


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)
