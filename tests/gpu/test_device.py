"""What only a GPU can show, run by `make gpu`: the same losses as on a CPU, the kernels that are chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models.attention import Core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def trained(out: Path, layout: str, ranks: int, gpu: bool, *more: str) -> list[dict[str, Any]]:
    """The log lines of a short run, with the GPUs or without them."""
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    words = [
        "train", f"out={out}", f"layout={layout}", "steps=4", "checkpoint.every=2", *more,
        "--ranks", str(ranks), "--backend", "threads", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if line["event"] == "step"]


LAYOUTS = [
    "fp64",
    "dp2 zero3 fp64",
    "tp2 seq fp64",
    "pp2 1f1b:4 fp64",
    "dp2 zero3 offload:activations fp64",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_float64_has_the_losses_of_a_cpu(layout: str, tmp_path: Path) -> None:
    ranks = 1 if layout == "fp64" else 2
    there = losses(trained(tmp_path / "gpu", layout, ranks, True))
    here = losses(trained(tmp_path / "cpu", layout, ranks, False))
    assert there == pytest.approx(here, rel=1e-10)


def test_a_checkpoint_of_a_gpu_goes_on_without_one(tmp_path: Path) -> None:
    trained(tmp_path / "run", "fp64", 1, True)
    more = losses(trained(tmp_path / "run", "dp2 fp64", 2, False, "steps=6"))
    whole = losses(trained(tmp_path / "whole", "fp64", 1, False, "steps=6"))
    assert more == pytest.approx(whole, rel=1e-10)


class Kernels(TorchDispatchMode):
    """The attention operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name():
            self.seen.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "documents, dtype, kernel",
    [
        (False, torch.bfloat16, "_scaled_dot_product_flash_attention"),
        (False, torch.float32, "_scaled_dot_product_efficient_attention"),
        (True, torch.bfloat16, "_flash_attention_forward"),
        (True, torch.float32, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_takes_no_scores_to_memory(
    documents: bool, dtype: torch.dtype, kernel: str
) -> None:
    q, k, v = (torch.randn(2, 256, n, 64, device="cuda", dtype=dtype) for n in (8, 2, 2))
    positions = torch.arange(256, device="cuda").expand(2, -1)
    ids = torch.zeros(2, 256, dtype=torch.int64) if documents else None
    with Kernels() as kernels:
        Core()(q, k, v, positions, ids)
    # cuDNN's own flash kernel may be the choice of newer versions.
    assert kernels.seen & {kernel, "_scaled_dot_product_cudnn_attention"}


@pytest.mark.parametrize("packed, window", [(True, 0), (True, 20), (False, 20)])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.bfloat16, 2e-2), (torch.float32, 1e-3), (torch.float64, 1e-12)]
)
def test_documents_windows_and_their_gradients_are_those_of_a_cpu(
    dtype: torch.dtype, bound: float, packed: bool, window: int
) -> None:
    """By each of the kernels, with uneven documents, one of a single token among them."""
    draw = torch.Generator().manual_seed(0)
    documents = (torch.rand(3, 200, generator=draw) < 0.05).cumsum(1)
    documents[1] = 0
    documents[2, 17:] += 1
    documents[2, 18:] += 1
    qkv = [torch.randn(3, 200, n, 64, generator=draw, dtype=dtype) for n in (8, 2, 2)]
    seen = []
    for device, wide in (("cuda", dtype), ("cpu", torch.float64)):
        own = [x.to(device, wide).requires_grad_() for x in qkv]
        y = Core(window)(*own, torch.empty(0), documents if packed else None)
        y.backward(torch.ones_like(y).cumsum(1).cos())
        seen.append([x.detach().cpu().double() for x in (y, *(x.grad for x in own))])
    for here, there in zip(*seen, strict=True):
        assert (here - there).abs().max() <= bound * there.abs().max()


@pytest.mark.parametrize("layout", ["cp2 fp64", "cp2:ulysses fp64", "cp2 bf16"])
def test_a_ring_with_documents_has_the_losses_of_a_cpu(layout: str, tmp_path: Path) -> None:
    there = losses(trained(tmp_path / "gpu", layout, 2, True))
    here = losses(trained(tmp_path / "cpu", layout, 2, False))
    assert there == pytest.approx(here, rel=1e-10 if "fp64" in layout else 2e-2)
