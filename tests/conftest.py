"""The order of the tests, when garbage is looked for, and what ranks that are processes start with."""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver

import pytest

# Files with tests of ten seconds and more, which come first: all workers then end together.
SPREAD = ("test_verify.py", "test_narrow.py")
LONG = (
    "test_what_is_compared.py", "test_nccl_start.py", "test_fake_accelerator.py", "test_kills.py",
    "test_ranks_agree.py", "test_make_gpu.py", "test_experiments.py", "test_common_mistakes.py",
    "test_top_command.py", "test_docs.py",
)  # fmt: skip


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
    longest = [item for item in items if item.path.name in SPREAD]
    rest = [item for item in items if item.path.name not in SPREAD]
    rest.sort(key=lambda item: item.path.name not in LONG)
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
