"""A training step on an accelerator that does not exist: no operation mixes devices, and nothing waits
for the device before the last operation. `fake_accelerator.py` says how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long_file

LAYOUTS = (
    "", "accum:4", "dp2 zero1", "dp2 zero2 accum:2", "dp2 zero3", "dp2x2 zero3", "tp2", "tp2 seq",
    "cp2", "cp2:ulysses", "pp2 1f1b:2", "pp2 interleaved2:2", "pp2 zb-h1:2", "pp2 zb-v:2",
    "accum:2 recompute:all", "accum:2 recompute:selective", "accum:2 offload:activations",
    "dp2 zero1 offload:optimizer", "dp2 pp2 tp2 seq zero3 1f1b:2 recompute:all",
)  # fmt: skip
RUNS = [
    ("dp2 pp2 1f1b:2", precision, "Executor", optimizer)
    for precision in ("fp32", "fp16")
    for optimizer in ("adamw", "sgd", "muon")
]
WRONG = [
    ("accum:2", "fp32", wrong, "adamw") for wrong in ("Reading", "Mixing")
]
PACKED = [
    (layout, precision, "packed Executor", "adamw")
    for layout in ("", "tp2", "cp2", "cp2:ulysses", "recompute:selective")
    for precision in ("bf16", "fp32")
]
CASES = [
    *PACKED,
    *((layout, "bf16", "Executor", "adamw") for layout in LAYOUTS),
    *RUNS,
    *WRONG,
]
# of one tensor, whose numbers are counted one by one here
READ = ("a number is read", "step")


@pytest.fixture(scope="module")
def results() -> dict[tuple[str, ...], Any]:
    """What each case waited for and how many copies crossed, or its error."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "fake_accelerator.py"), json.dumps(CASES)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_host_waits_once_a_step_and_after_its_last_operation(
    layout: str, results: dict[tuple[str, ...], Any]
) -> None:
    waits, copies, *_ = results[layout, "bf16", "Executor", "adamw"]
    allowed = {READ}
    if "offload:optimizer" in layout:
        # The update runs on the host, so it waits for the gradient and for what all agreed on.
        copied = "a copy from fake to cpu blocks"
        allowed |= {(copied, "beside"), (copied, "on"), (copied, "<genexpr>")}
    assert {*map(tuple, waits)} <= allowed
    assert READ in map(tuple, waits)
    assert (copies > 0) == ("offload" in layout)


@pytest.mark.parametrize("case", RUNS, ids="-".join)
def test_a_run_waits_no_more(
    case: tuple[str, ...], results: dict[tuple[str, ...], Any]
) -> None:
    waits, copies, *_ = results[case]
    assert ({*map(tuple, waits)}, copies) == ({READ}, 0)


@pytest.mark.parametrize("case", PACKED, ids="-".join)
def test_documents_are_kept_apart_without_masks_or_waits(
    case: tuple[str, ...], results: dict[tuple[str, ...], Any]
) -> None:
    """In 16 bits all documents of a batch are one call of flash attention for variable lengths; a ring
    has other calls for the blocks that visit. In 32 bits no kernel for scores in memory is asked for."""
    waits, _, attention, _ = results[case]
    assert {*map(tuple, waits)} == {READ}
    ways = ("", "_backward")
    kernels = {f"_flash_attention_{way}" for way in ("forward", "backward")}
    if case[0] == "cp2":
        kernels |= {
            f"_scaled_dot_product_flash_attention{way}" for way in ways
        }
    if case[1] == "fp32":
        kernels = {
            f"_scaled_dot_product_efficient_attention{way}" for way in ways
        }
    assert {*attention} == kernels


@pytest.mark.parametrize("layout", ["", "accum:4", "pp2 zb-h1:2"])
def test_gradients_of_16_bits_are_added_in_float32_as_they_are_computed(
    layout: str, results: dict[tuple[str, ...], Any]
) -> None:
    products = (
        {"mm.dtype_out"}
        if layout == ""
        else {"mm.dtype_out", "addmm.dtype_out"}
    )
    assert {*results[layout, "bf16", "Executor", "adamw"][3]} == products


def test_a_read_and_a_mix_of_devices_would_be_seen(
    results: dict[tuple[str, ...], Any],
) -> None:
    reading, mixing = (results[case] for case in WRONG)
    assert reading[0].count(["a number is read", "_take_losses"]) == 2
    assert "devices" in mixing
