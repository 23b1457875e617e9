"""The code for CUDA, on a device that computes on the CPU; `emulated_cuda` says how."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from emulated_cuda import environment
from gpu import cases

TREE = Path(__file__).parent.parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
# Its graph asks for strides that the CPU's 8-bit product does not have.
NOT_EMULATED = "four blocks of 8b, fp8"


def emulated(gpus: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=environment(gpus),
        cwd=TREE,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_list_of_make_gpu_runs_to_its_end(
    gpus: int, tmp_path: Path
) -> None:
    out = tmp_path / "gpu.md"
    words = [
        "benchmarks/gpu.py",
        "--small",
        "--limit=3000",
        "--case-limit=600",
        f"--out={out}",
    ]
    done = emulated(gpus, *words)
    found = json.loads(out.with_suffix(".json").read_text())["cases"]
    assert len(found) == len(cases("cuda", gpus, tmp_path, small=True)), (
        done.stderr[-2000:]
    )
    assert {row["case"] for row in found if not row["met"]} <= {
        NOT_EMULATED
    }, done.stdout


@pytest.mark.parametrize("backend", ["threads", "nccl"])
def test_layouts_on_the_device_agree_with_one_process(backend: str) -> None:
    layouts = "dp2 zero1 offload:optimizer; dp2 zero3 offload:activations; cp2 recompute:selective"
    words = [
        "verify",
        "--dtype=float64",
        f"--backend={backend}",
        f"--layouts={layouts}",
    ]
    done = emulated(2, "-m", "phalanx", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cublas_finds_a_context_on_the_thread_of_the_backward(
    tmp_path: Path,
) -> None:
    """The first kernel of that thread was the matmul of the loss, and torch warned."""
    model = (
        "model={layers=1,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=256,"
        "sequence=32,batch=2}"
    )
    words = ("train", model, "steps=1", "validation.batches=0", "layout=bf16")
    out = f"out={tmp_path}/run"
    done = emulated(1, "-m", "phalanx", *words, out, "--ranks", "1")
    assert done.returncode == 0, done.stderr
    assert "no current CUDA context" not in done.stdout + done.stderr


def test_host_and_device_do_not_mix_and_memory_is_pinned() -> None:
    code = """
import torch
x = torch.arange(6.0, device="cuda", requires_grad=True)
x.view(2, 3).t().square().sum().backward()
assert x.is_cuda and x.grad.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
assert torch.empty(3, pin_memory=True).is_pinned() and not torch.empty(3).is_pinned()
try:
    x + torch.ones(6)
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("a tensor of the host was added to one of the device")
"""
    done = emulated(1, "-c", code)
    assert done.returncode == 0, done.stderr
