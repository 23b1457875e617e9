"""The order of the tests, when garbage is looked for, and what ranks that are processes start with."""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver

import pytest

# What every rank of a test would load again, up to a second for each: the process from which they are
# forked has it beside what it loads itself.
LOADED = (
    "phalanx.verify",
    "phalanx.train.loop",
    "torch.fx.experimental.symbolic_shapes",
)


def pytest_configure() -> None:
    plain = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda names: plain([*names, *LOADED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker begins with a stretch of the list, and takes from the ends of others' when it is done.
    Each stretch has its share of the longest tests, and then of the rest, file by file, as tests of
    one file share what is made once: the first has the other long files, and the others take its end."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [item for item in items if item.get_closest_marker("long_tests")]
    rest = [item for item in items if not item.get_closest_marker("long_tests")]
    rest.sort(key=lambda item: item.get_closest_marker("long_file") is None)
    share = -(-len(rest) // workers)
    stretches = [
        longest[n::workers] + rest[n * share : (n + 1) * share] for n in range(workers)
    ]
    items[:] = [item for stretch in stretches for item in stretch]


def pytest_collection_finish() -> None:
    """What torch and the test modules have made stays. Looking through it for garbage again and again
    took a sixth of the time of tests that build programs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
