"""What only a GPU can show, run by `make gpu`: the same losses as on a CPU, the kernels that are chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_runs import attention_operators, losses
from torch.nn import functional

from phalanx.models.attention import Core
from phalanx.models.fused import Gated, fuses, kernels_agree
from phalanx.models.rope import Rope, rotate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch sees no GPU"
    ),
]

LAYOUTS = [
    "fp64",
    "dp2 zero3 fp64",
    "tp2 seq fp64",
    "pp2 1f1b:4 fp64",
    "dp2 zero3 offload:activations fp64",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_float64_has_the_losses_of_a_cpu(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = losses(tmp_path / "gpu", layout, monkeypatch, gpu=True)
    here = losses(tmp_path / "cpu", layout, monkeypatch, gpu=False)
    assert there == pytest.approx(here, rel=1e-10)


def test_graphs_of_blocks_have_the_losses_of_compiled_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # From the third microbatch on, blocks are graphs.
    compiled, graphs = (
        losses(
            tmp_path / word,
            f"accum:3 bf16 {word}",
            monkeypatch,
            "document_masks=false",
            gpu=True,
        )
        for word in ("compile", "compile:graphs")
    )
    assert graphs == pytest.approx(compiled, rel=1e-6)


def test_a_run_resumes_on_a_cpu_from_the_checkpoint_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(tmp_path / "run", "fp64", monkeypatch, gpu=True)
    more = losses(
        tmp_path / "run", "dp2 fp64", monkeypatch, "steps=6", gpu=False
    )
    whole = losses(
        tmp_path / "whole", "fp64", monkeypatch, "steps=6", gpu=False
    )
    assert more == pytest.approx(whole, rel=1e-10)


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
    q, k, v = (
        torch.randn(2, 256, n, 64, device="cuda", dtype=dtype)
        for n in (8, 2, 2)
    )
    positions = torch.arange(256, device="cuda").expand(2, -1)
    ids = (
        torch.arange(256).div(100, rounding_mode="floor").expand(2, -1)
        if documents
        else None
    )
    seen = attention_operators(lambda: Core()(q, k, v, positions, ids))
    # cuDNN's own flash kernel may be the choice of newer versions.
    assert seen & {kernel, "_scaled_dot_product_cudnn_attention"}, seen


@pytest.mark.parametrize(
    "packed, window", [(True, 0), (True, 20), (False, 20)]
)
@pytest.mark.parametrize(
    "dtype, bound",
    [(torch.bfloat16, 2e-2), (torch.float32, 1e-3), (torch.float64, 1e-12)],
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
    qkv = [
        torch.randn(3, 200, n, 64, generator=draw, dtype=dtype)
        for n in (8, 2, 2)
    ]
    seen = []
    for device, wide in (("cuda", dtype), ("cpu", torch.float64)):
        own = [x.to(device, wide).requires_grad_() for x in qkv]
        y = Core(window)(*own, torch.empty(0), documents if packed else None)
        y.backward(torch.ones_like(y).cumsum(1).cos())
        seen.append(
            [x.detach().cpu().double() for x in (y, *(x.grad for x in own))]
        )
    for here, there in zip(*seen, strict=True):
        assert (here - there).abs().max() <= bound * there.abs().max()


@pytest.mark.parametrize(
    "layout", ["cp2 fp64", "cp2:ulysses fp64", "cp2 bf16"]
)
def test_a_ring_with_documents_has_the_losses_of_a_cpu(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = losses(tmp_path / "gpu", layout, monkeypatch, gpu=True)
    here = losses(tmp_path / "cpu", layout, monkeypatch, gpu=False)
    assert there == pytest.approx(
        here, rel=1e-10 if "fp64" in layout else 2e-2
    )


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_rotations_gives_what_float64_gives(
    pairs: str, dtype: torch.dtype
) -> None:
    assert kernels_agree(torch.device("cuda"), dtype)
    draw = torch.Generator().manual_seed(0)
    positions = torch.arange(50).repeat(3, 1)
    cos, sin = (x.cuda() for x in Rope(10_000.0).angles(positions, 64, dtype))
    # A part of a larger tensor, as products side by side leave it.
    whole = torch.randn(3, 50, 12, 64, generator=draw)
    x = whole.to("cuda", dtype)[:, :, :8].requires_grad_()
    gradient = torch.randn(3, 50, 8, 64, generator=draw).to("cuda", dtype)
    assert fuses(x)
    y = rotate(x, cos, sin, pairs)
    y.backward(gradient)
    exact = x.detach().double().requires_grad_()
    wanted = rotate(exact, cos.double(), sin.double(), pairs)
    wanted.backward(gradient.double())
    for found, other in ((y, wanted), (x.grad, exact.grad)):
        assert found is not None
        assert other is not None
        torch.testing.assert_close(
            found.double(), other, rtol=2**-7, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_gates_gives_what_float64_gives(
    dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(0)
    first, second, gradient = (
        torch.randn(3, 50, 96, generator=draw).to("cuda", dtype)
        for _ in range(3)
    )
    gate, up = (x.requires_grad_() for x in (first, second))
    y = Gated.call(gate, up)
    y.backward(gradient)
    wide_gate, wide_up = (
        x.detach().double().requires_grad_() for x in (gate, up)
    )
    wanted = functional.silu(wide_gate) * wide_up
    wanted.backward(gradient.double())
    pairs = (y, wanted), (gate.grad, wide_gate.grad), (up.grad, wide_up.grad)
    for found, other in pairs:
        assert found is not None
        assert other is not None
        torch.testing.assert_close(
            found.double(), other, rtol=2**-7, atol=1e-5
        )
