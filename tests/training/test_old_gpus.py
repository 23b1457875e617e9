"""GPUs before Ampere, as in free notebooks: which kernels a run takes there, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.layout import Layout, LayoutError
from phalanx.models import kernels
from phalanx.parallel import Precision
from phalanx.training.precision import (
    device_notices,
    precision_of,
    refuse_bfloat16,
)

GPU = torch.device("cuda", 0)
T4, V100, A100 = (7, 5), (7, 0), (8, 0)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process see a GPU of a compute capability, and a version of cuDNN."""

    def choose(capability: tuple[int, int], cudnn: int = 91900) -> None:
        kernels._has_flash.cache_clear()
        kernels._prefers_cudnn.cache_clear()
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda *_: capability
        )
        monkeypatch.setattr(
            torch.cuda, "get_device_name", lambda *_: "the GPU"
        )

    yield choose
    kernels._has_flash.cache_clear()
    kernels._prefers_cudnn.cache_clear()


def queries(dtype: torch.dtype) -> Any:
    """What the choice of a kernel looks at: a tensor on a GPU cannot be made here."""
    return SimpleNamespace(
        shape=(2, 4, 64, 64),
        device=GPU,
        dtype=dtype,
    )


@pytest.mark.parametrize("capability", [T4, V100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_takes_no_flash_kernel_on_an_old_gpu(
    on: Any, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """Its flash kernels need compute capability 8.0: the first forward ended the run."""
    on(capability)
    assert kernels._kernels(queries(dtype)) is kernels.EFFICIENT
    on(A100)
    flash = dtype == torch.float16
    assert kernels._kernels(queries(dtype)) is (
        kernels.FLASH if flash else kernels.EFFICIENT
    )


def test_documents_take_no_kernel_for_lengths_on_an_old_gpu(on: Any) -> None:
    q, documents = (
        queries(torch.float16),
        torch.zeros(2, 64, dtype=torch.int64),
    )
    on(T4)
    assert not kernels._by_lengths(q, q, documents, 0, 0.0)
    on(A100)
    assert kernels._by_lengths(q, q, documents, 0, 0.0)


def test_bfloat16_is_refused_on_an_old_gpu_with_what_works(on: Any) -> None:
    on(T4)
    with pytest.raises(LayoutError, match=r"has 7\.5\. Write fp16 or fp32"):
        refuse_bfloat16(precision_of("bf16"), GPU)
    refuse_bfloat16(precision_of("fp16"), GPU)
    refuse_bfloat16(Precision(), GPU)
    refuse_bfloat16(precision_of("bf16"), torch.device("cpu"))
    on(A100)
    refuse_bfloat16(precision_of("bf16"), GPU)


def test_a_run_says_what_it_chose_for_an_old_gpu(on: Any) -> None:
    on(V100)
    _, notice = device_notices(Layout.parse("fp16"), GPU)
    assert "no flash attention (compute capability 7.0)" in notice
    on(A100)
    (notice,) = device_notices(Layout.parse("bf16"), GPU)
    assert notice.startswith(
        "attention takes flash attention (rows of one document), "
    )
    assert device_notices(Layout.parse("fp8"), torch.device("cpu")) == []


def test_eight_bits_without_compile_are_called_slow(on: Any) -> None:
    on((9, 0))
    _, notice = device_notices(Layout.parse("bf16 fp8"), GPU)
    assert "fp8 without compile is slower than bf16" in notice
    assert len(device_notices(Layout.parse("bf16 fp8 compile"), GPU)) == 1


BF16, FP16, FP32, FP64 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
)
CUDNN, FLASH, EFFICIENT, PLAIN = (
    getattr(kernels, name).name
    for name in ("CUDNN", "FLASH", "EFFICIENT", "PLAIN")
)
H100, B200, RTX5090 = (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("capability", "cudnn", "dtype", "size", "whole", "masked"),
    [
        (H100, 91900, BF16, 128, CUDNN, EFFICIENT),
        (B200, 91900, FP16, 64, CUDNN, EFFICIENT),
        # Before 9.15.1 torch prefers flash.
        (
            H100,
            91400,
            BF16,
            128,
            FLASH,
            EFFICIENT,
        ),
        (H100, 91900, BF16, 192, FLASH, EFFICIENT),
        (H100, 91900, BF16, 320, EFFICIENT, EFFICIENT),
        (H100, 91900, BF16, 60, PLAIN, PLAIN),
        (H100, 91900, FP32, 128, EFFICIENT, EFFICIENT),
        (H100, 91900, FP64, 128, PLAIN, PLAIN),
        (A100, 91900, BF16, 128, FLASH, EFFICIENT),
        (RTX5090, 91900, BF16, 128, FLASH, EFFICIENT),
        (T4, 91900, FP16, 64, EFFICIENT, EFFICIENT),
    ],
)
def test_kernels_of_attention_by_device_dtype_and_size(
    on: Any,
    capability: tuple[int, int],
    cudnn: int,
    dtype: torch.dtype,
    size: int,
    whole: str,
    masked: str,
) -> None:
    on(capability, cudnn)
    names = kernels.kernel_names(GPU, dtype, size)
    assert names["rows of one document"] == whole
    # Flash attention has windows of its own; other kernels take a mask.
    by_lengths = f"{FLASH} by lengths"
    flash = whole in (CUDNN, FLASH)
    assert names["windows"] == (by_lengths if flash else masked)
    assert kernels._kernels_of(GPU, dtype, size, masked=True).name == masked


def test_flash_attention_3_is_taken_on_hopper_where_its_package_is_installed(
    on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(
        torch.nn.attention, "activate_flash_attention_impl", activated.append
    )
    for capability, package in (
        (H100, None),
        (A100, "there"),
        (H100, "there"),
    ):
        on(capability)
        kernels.use_flash_3.cache_clear()
        monkeypatch.setattr(kernels, "find_spec", lambda name, p=package: p)
        assert kernels.use_flash_3(GPU) == (
            capability == H100 and package == "there"
        )
    assert activated == ["FA3"]
    kernels.use_flash_3.cache_clear()
    # An older torch cannot exchange its kernels.
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert not kernels.use_flash_3(GPU)
    kernels.use_flash_3.cache_clear()
