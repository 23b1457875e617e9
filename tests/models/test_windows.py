"""Attention in windows and with soft caps, against scores of all pairs written down in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.models import kernels
from phalanx.models.kernels import attention

KEYS, ROWS, HEADS, KV_HEADS, SIZE = 40, 17, 4, 2, 8
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 20 + [2] * 13, [0] * 40, [0] * 40])


def dense(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor, window: int,
    softcap: float,
) -> Tensor:  # fmt: skip
    """Every score, masked by the times of its query and its key."""
    before = k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    apart = torch.arange(before, k.shape[1])[:, None] - torch.arange(
        k.shape[1]
    )
    sees = (apart >= 0) & (apart < (window or k.shape[1]))
    sees = sees.expand(len(q), -1, -1)
    if documents is not None:
        sees = sees & (documents[:, before:, None] == documents[:, None, :])
    scores = scores.masked_fill(~sees[:, None], -math.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", shares, v)


def leaves() -> list[Any]:
    """Rows that are the last of the keys' times, keys, values and sinks."""
    torch.manual_seed(0)
    shapes = [
        (3, ROWS, HEADS, SIZE),
        *[(3, KEYS, KV_HEADS, SIZE)] * 2,
        (HEADS,),
    ]
    return [
        torch.randn(shape, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("strip", [3, 512])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "window, softcap",
    [(1, 0.0), (5, 0.0), (13, 0.0), (0, 2.0), (6, 2.0), (40, 0.0)],
)
def test_outputs_and_gradients_are_those_of_all_scores(
    window: int, softcap: float, packed: bool, strip: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels, "STRIP", strip)
    documents = DOCUMENTS if packed else None
    results = []
    for function in (attention, dense):
        q, k, v, sinks = leaves()
        y = function(q, k, v, documents, sinks, window, softcap)
        (
            y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()
        ).sum().backward()
        results.append([y.detach(), *(x.grad for x in (q, k, v, sinks))])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(
                    self.numbers,
                    x.untyped_storage().nbytes() // x.element_size(),
                )
        return out


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_no_tensor_has_a_number_for_each_pair(softcap: float) -> None:
    length = 4096
    q, k, v = (
        torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3)
    )
    with _Largest() as largest:
        attention(q, k, v, window=64, softcap=softcap).sum().backward()
    assert largest.numbers <= 2 * q.numel() < length**2 / 100


def test_flash_attention_is_given_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On meta, where its operators have shapes. A window of n are the n - 1 tokens before a token."""
    monkeypatch.setattr(kernels, "_kernels", lambda *_: kernels.FLASH)
    forward, calls = (
        torch.ops.aten._flash_attention_forward.default,
        list[tuple[bool, Any]](),
    )

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "_flash_attention" in func.name():
                calls.append((func is forward, kwargs))
            return func(*args, **(kwargs or {}))

    q = torch.empty(2, KEYS, HEADS, SIZE, device="meta", dtype=torch.bfloat16)
    with Calls():
        out, lse = kernels.attend_own(q, q, q, None, None, 6)
        into = kernels.own_gradients(q, (q, q, q), None, out, lse, 6)
    within = {"window_size_left": 5, "window_size_right": 0}
    assert calls == [(True, within), (False, within)]
    assert [x.shape for x in (out, *into)] == [q.shape] * 4
    assert lse.shape == q.shape[:3]


def test_documents_are_cut_once_for_all_layers_and_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was numpy, a loop and a copy to the device for each layer, microbatch and direction."""
    reads = []
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(
        np, "flatnonzero", lambda x: reads.append(1) or flatnonzero(x)
    )
    documents = DOCUMENTS.clone()
    x = torch.randn(3, KEYS, HEADS, SIZE, requires_grad=True)
    y = x
    for _ in range(3):
        y = attention(y, y[:, :, :KV_HEADS], y[:, :, :KV_HEADS], documents)
    y.sum().backward()
    assert len(reads) == len(documents)  # its rows


def test_documents_that_are_written_anew_are_cut_anew() -> None:
    documents = DOCUMENTS.clone()
    before = kernels._edges(documents)
    documents[1, 5:] = 7
    after = kernels._edges(documents)
    assert (before[1], after[1]) == ([0, 40], [0, 5, 40])
    starts, longest = kernels._starts(documents, documents)
    assert (starts.tolist(), longest) == ([0, 7, 27, 40, 45, 80, 120], 40)
