"""Worlds that are kept for all tests of the groups."""

from contextlib import ExitStack

import pytest
from rank_threads import threads_of

from phalanx.comm import workers
from phalanx.comm.late import late

WORLDS = (
    "alone-1",
    "threads-1",
    "threads-2",
    "threads-3",
    "threads-4",
    "threads-8",
)
LATE = ("late-1", "late-2", "late-3", "late-4", "late-8")
PROCESSES = ("shm-2", "shm-3", "shm-4", "shm-8", "gloo-2", "gloo-4")


@pytest.fixture(scope="session")
def kept():
    """(world's name) -> run; each world of processes is started once."""
    with ExitStack() as stack:
        runs = {}

        def run_of(name):
            kind, size = name.split("-")
            if name not in runs:
                over_threads = {"threads": threads_of, "late": late}.get(kind)
                runs[name] = (
                    over_threads(int(size))
                    if over_threads
                    else stack.enter_context(
                        workers(
                            int(size),
                            backend="auto" if kind == "alone" else kind,
                            timeout=30.0,
                        )
                    )
                )
            return runs[name], int(size)

        yield run_of


@pytest.fixture(params=(*WORLDS, *LATE, *PROCESSES))
def world(request, kept):
    """(run, size, exact): exact where results must equal one process bit for bit."""
    run, size = kept(request.param)
    return run, size, not request.param.startswith("gloo")
