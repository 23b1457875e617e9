"""Order of the tests, garbage collection, settings of chosen examples, and modules
preloaded for ranks that are processes."""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver

import pytest
from hypothesis import HealthCheck, settings

# No test of chosen examples may depend on the speed of the machine.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Modules that every rank of a test would load, up to a second each. The process from
# which ranks are forked loads them once.
LOADED = (
    "phalanx.verification",
    "phalanx.training.loop",
    "torch.fx.experimental.symbolic_shapes",
)


def pytest_configure() -> None:
    plain = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda names: plain([*names, *LOADED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reorder the tests for workers.

    A worker starts with a contiguous stretch of the list, and takes tests from the ends
    of others' stretches when it is done. Each stretch has its share of the longest
    tests, followed by the rest file by file, because tests of one file share fixtures.
    The first stretch has the other long files, and the others take tests from its end.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = [item for item in items if item.get_closest_marker("long_tests")]
    rest = [
        item for item in items if not item.get_closest_marker("long_tests")
    ]
    rest.sort(key=lambda item: item.get_closest_marker("long_file") is None)
    share = -(-len(rest) // workers)
    stretches = [
        longest[n::workers] + rest[n * share : (n + 1) * share]
        for n in range(workers)
    ]
    items[:] = [item for stretch in stretches for item in stretch]


def pytest_collection_finish() -> None:
    """Exempt the objects of torch and the test modules from garbage collection.

    Scanning them repeatedly took a sixth of the time of tests that build programs.
    """
    gc.collect()
    gc.freeze()
