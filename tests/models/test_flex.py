"""Soft caps by flex attention, whose dense reference runs here, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from test_windows import dense
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models import flex, kernels
from phalanx.models.kernels import attention

CAP = 2.0
HEADS, KV_HEADS, SIZE = 4, 2, 8
KEYS = 300  # three blocks, the last of them not whole
RUNS = [[0] * 70 + [1] * 180 + [0] * 50, [3] * 300]
CPU = torch.device("cpu")


@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention as on a GPU, without the compiler, which knows no backward on a CPU."""
    monkeypatch.setattr(flex, "available", lambda device, dtype: True)
    monkeypatch.setattr(flex, "_compiled", lambda: flex._flex)
    monkeypatch.setattr(flex, "FEWEST_ROWS", 1)
    monkeypatch.setattr(of_torch, "_validate_device", lambda *given: None)
    monkeypatch.setattr(
        of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )
    # caches of its own
    tried = kernels._flex_agrees.__wrapped__
    monkeypatch.setattr(kernels, "_flex_agrees", cache(tried))


def drawn(rows: int) -> list[Any]:
    """Queries of the last times, keys, values and sinks."""
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (2, rows, HEADS, SIZE),
        (2, KEYS, KV_HEADS, SIZE),
        (2, KEYS, KV_HEADS, SIZE),
        (HEADS,),
    ]
    return [
        torch.randn(
            shape, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows, window", [(KEYS, 0), (200, 150), (KEYS, 20)])
def test_outputs_and_gradients_are_those_of_all_scores(
    on_this_device: None,
    rows: int,
    window: int,
    packed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "attend", None)  # no strips
    monkeypatch.setattr(kernels, "_flex_agrees", lambda *given: True)
    documents = torch.tensor(RUNS) if packed else None
    # Documents of equal numbers that do not touch are two.
    apart = torch.tensor([[0] * 70 + [1] * 180 + [2] * 50, [3] * 300])
    results = []
    for function, numbers in ((attention, documents), (dense, apart)):
        q, k, v, sinks = drawn(rows)
        of_call = numbers if packed else None
        y = function(q, k, v, of_call, sinks, window, CAP)
        weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()
        (y * weights).sum().backward()
        results.append([y.detach(), q.grad, k.grad, v.grad, sinks.grad])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


class _Looks(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("looks", [nullcontext, _Looks])
def test_gradients_without_sinks(on_this_device: None, looks: Any) -> None:
    """Also in a dispatch mode, as selective recomputation runs a forward."""
    results = []
    none = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for function, sinks in ((attention, None), (dense, none)):
        q, k, v, _ = drawn(KEYS)
        with looks():
            y = function(q, k, v, None, sinks, 0, CAP)
            y.square().sum().backward()
        results.append([y.detach(), q.grad, k.grad, v.grad])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows, window", [(KEYS, 0), (200, 150), (300, 20)])
def test_blocks_are_those_that_torch_finds_from_all_pairs(
    rows: int, window: int
) -> None:
    """Blocks of which every pair attends, blocks of which some do, and no others."""
    edges = ((0, 70, 250, KEYS), (0, KEYS), (0, 128, 256, KEYS))
    ours = flex.block_mask(edges, rows, window, CPU)
    theirs = of_torch.create_block_mask(
        ours.mask_mod, len(edges), 1, rows, KEYS, device="cpu"
    )
    # kv_num_blocks and kv_indices; both again of full blocks; the same of keys
    for name in ("kv", "full_kv", "q", "full_q"):
        found, wanted = (table_of(each, name) for each in (ours, theirs))
        assert found == wanted, name
    full = table_of(ours, "full_kv")
    assert any(map(len, full)) == (window == 0)


def table_of(mask: Any, name: str) -> list[set[int]]:
    """The blocks of each row of blocks, or of each column."""
    counts: Tensor = getattr(mask, f"{name}_num_blocks").flatten()
    indices: Tensor = getattr(mask, f"{name}_indices").flatten(0, -2)
    rows = zip(counts.tolist(), indices.tolist(), strict=True)
    return [set(row[:count]) for count, row in rows]


@pytest.mark.parametrize("fault", ["", "wrong", "fails"])
def test_flex_attention_is_tried_before_it_is_used(
    on_this_device: None,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = flex._flex

    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Any, cap: float) -> Any:
        return right(q, k, v, mask, 0.5 * cap)

    def fails(*given: Any) -> Any:
        raise RuntimeError("out of shared memory\nmore")

    chosen = {"": right, "wrong": wrong, "fails": fails}[fault]
    monkeypatch.setattr(flex, "_compiled", lambda: chosen)
    results = []
    for function in (attention, dense):
        q, k, v, sinks = drawn(KEYS)
        y = function(q, k, v, None, sinks, 0, CAP)
        y.sum().backward()
        results.append([y.detach(), q.grad])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    reason = {
        "": "",
        "wrong": "results differ by",
        "fails": "RuntimeError: out of shared memory",
    }[fault]
    assert reason in caplog.text
    assert bool(caplog.text) == bool(fault)
    assert "more" not in caplog.text


def test_a_cpu_32_bits_and_a_variable_of_the_environment_take_the_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "compiles_kernels", lambda: True)
    gpu, half = torch.device("cuda", 0), torch.bfloat16
    assert not flex.available(gpu, half)
    monkeypatch.setenv("PHALANX_FLEX", "1")
    assert flex.available(gpu, half)
    assert not flex.available(gpu, torch.float32)
    assert not flex.available(CPU, half)
    monkeypatch.setenv("PHALANX_FLEX", "0")
    assert not flex.available(gpu, half)
