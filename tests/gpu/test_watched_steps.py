"""What steps ask of a GPU, seen on one that computes on the CPU (`emulated_cuda`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated_cuda import environment
from phalanx.layout import Layout
from phalanx.program import ops
from phalanx.training.host_threads import threads_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]


def asked(environ: dict[str, str], *words: str) -> Any:
    """What a script of this folder prints."""
    done = subprocess.run(
        [sys.executable, *words], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Four steps on the device and the same on the CPU; lines are logged for every second one."""
    words = [
        str(Path(__file__).parent / "watched_steps.py"),
        str(tmp_path_factory.mktemp("run")),
    ]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    return asked(environment(1, own), *words), asked(own, *words)


def test_a_batch_is_read_and_copied_while_the_device_computes_the_step_before(
    watched: tuple[Any, Any],
) -> None:
    found, on_cpu = watched
    notes = [note for note, _ in groupby(found["order"])]
    between = ["operation", "all queued"]
    first = ["read 0", *between, "read 1 beside"]
    then = [["wait", *between, f"read {n} beside"] for n in (2, 3)]
    # The last step has no next one; what cannot be read ahead is an error of its own step.
    end = ["wait", *between, "read 7 beside", "read 7", "no such file"]
    assert notes == [*first, *chain(*then), *end]
    # Every tensor of a batch but the documents, which stay on the host.
    assert [step["kept"] for step in found["steps"]] == [0, 3, 3, 3]
    losses = [[step["loss"] for step in each["steps"]] for each in watched]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not any("beside" in note for note in on_cpu["order"])


def test_events_are_used_again_and_read_for_logged_steps_alone(
    watched: tuple[Any, Any],
) -> None:
    found, _ = watched
    steps, operations = found["steps"], found["row"]
    # One for the start of the step, one after each operation.
    assert [step["made"] for step in steps] == [operations + 1, 0, 0, 0]
    # A start and an end of each.
    assert [step["read"] for step in steps] == [
        0,
        2 * operations,
        0,
        2 * operations,
    ]


def test_updates_on_the_host_of_a_gpu_use_all_its_cores(
    watched: tuple[Any, Any],
) -> None:
    """A launcher gives each process one thread; a rank whose weights are on a CPU keeps it."""
    cores = len(os.sched_getaffinity(0))
    assert [found["threads"] for found in watched] == [[1, cores], [1, 1]]


@pytest.mark.parametrize(
    ("homes", "threads"),
    [
        ([("a", [*range(96)])] * 8, 12),
        ([("a", [*range(96)])] * 7 + [("b", [*range(96)])], 13),
        # Bound to cores of their own.
        (
            [("a", [0, 1]), ("a", [2, 3, 4, 5])],
            2,
        ),
        ([("a", [0, 1, 2, 3]), ("a", [2, 3])], 3),
        ([("a", [0])] * 3, 1),
    ],
)
def test_ranks_divide_the_cores_that_they_share(
    homes: list[tuple[str, list[int]]], threads: int
) -> None:
    assert threads_of(homes[0], homes) == threads


def test_experts_read_from_the_device_once_a_layer_and_microbatch_or_never() -> (
    None
):
    """Only ranks that exchange tokens read: how many go to each. Recomputing reads nothing again."""
    layers, microbatches = 2, 2
    step = {"step": 1}
    exchanged = {ops.EXCHANGE: layers * microbatches} | step
    reads = {
        "": step,
        "accum:2 recompute:all": step,
        "ep2 accum:2": exchanged,
        "ep2 accum:2 recompute:all": exchanged,
    }
    script = str(Path(__file__).parent / "watched_reads.py")
    found = asked(environment(2), script, *reads)
    assert found == {
        text: [counts] * Layout.parse(text).ranks
        for text, counts in reads.items()
    }


def test_each_case_of_attention_takes_its_kernel_and_is_right() -> None:
    """Against the CPU's kernels in float64. Sinks need the log-sum-exp of every kernel."""
    script = str(Path(__file__).parent / "watched_attention.py")
    found = asked(environment(1), script)
    by_lengths = ["_flash_attention_backward", "_flash_attention_forward"]
    kernels = {
        "whole": ["_cudnn_attention", "_cudnn_attention_backward"],
        "cut": by_lengths,
        "window": by_lengths,
        "capped": [],
        "long, capped": [],
        "32 bits": ["_efficient_attention", "_efficient_attention_backward"],
    }
    assert {
        case: names for case, (names, _) in found["cases"].items()
    } == kernels
    for case, (_, apart) in found["cases"].items():
        assert apart < (1e-5 if case == "32 bits" else 2e-2), case
    assert found["names"] == {
        "rows of one document": "cuDNN",
        "documents": "flash attention by lengths",
        "windows": "flash attention by lengths",
        "soft caps": "products in strips of rows",
    }
