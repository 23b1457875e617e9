"""GPUs before Ampere, as in free notebooks: which kernels a run takes there, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.layout import Layout, LayoutError
from phalanx.models import kernels
from phalanx.parallel import Precision
from phalanx.train.precision import device_notices, precision_of, refuse_bfloat16

GPU = torch.device("cuda", 0)
T4, V100, A100 = (7, 5), (7, 0), (8, 0)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process see a GPU of a compute capability."""

    def choose(capability: tuple[int, int]) -> None:
        kernels._has_flash.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "the GPU")

    yield choose
    kernels._has_flash.cache_clear()


def queries(dtype: torch.dtype) -> Any:
    """What the choice of a kernel looks at: a tensor on a GPU cannot be made here."""
    return SimpleNamespace(
        shape=(2, 4, 64, 64),
        device=GPU,
        dtype=dtype,
        element_size=lambda: dtype.itemsize,
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
    q, documents = queries(torch.float16), torch.zeros(2, 64, dtype=torch.int64)
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
    (notice,) = device_notices(Layout.parse("fp16"), GPU)
    assert "no flash attention (compute capability 7.0)" in notice
    on(A100)
    assert device_notices(Layout.parse("bf16"), GPU) == []
    assert device_notices(Layout.parse("fp8"), torch.device("cpu")) == []


def test_eight_bits_without_compile_are_called_slow(on: Any) -> None:
    on((9, 0))
    (notice,) = device_notices(Layout.parse("bf16 fp8"), GPU)
    assert "fp8 without compile is slower than bf16" in notice
    assert device_notices(Layout.parse("bf16 fp8 compile"), GPU) == []
