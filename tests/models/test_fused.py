"""The kernels of rotation and gating give what plain torch gives, under Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.models import fused, loss
from phalanx.models.rope import Rope, rotate

MODULE = "phalanx.models.fused_kernels"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that run on the CPU: Triton decides when they are defined."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton = pytest.importorskip("triton")
    if isinstance(triton.language.sum, triton.JITFunction):
        pytest.skip("Triton was imported before, without its interpreter")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    fused._kernels.cache_clear()
    yield
    sys.modules.pop(MODULE, None)
    fused._kernels.cache_clear()


def gradients_of(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(gradient.bfloat16().to(y.dtype))
    found = [x.grad for x in inputs]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def agree(found: Tensor, wanted: Tensor) -> None:
    """Asserts equality to a unit in the last place of bfloat16."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=2**-7, atol=1e-6
    )


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("width, heads", [(8, 3), (12, 1), (64, 33)])
def test_rotation(
    interpreted: None, pairs: str, width: int, heads: int
) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [900, 901, 902, 903, 904]])
    cos, sin = Rope(10_000.0).angles(positions, width, torch.bfloat16)
    whole = torch.randn(2, 5, heads, width + 4).bfloat16()
    # A part of each head's features, as of models that rotate some: strided.
    x = whole[..., :width].detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    wanted = rotate(exact, cos.double(), sin.double(), pairs)
    y: Any = fused.Rotated.call(x, cos, sin, pairs == "neighbours")
    agree(y.detach(), wanted.detach())
    agree(gradients_of(y, x)[0], gradients_of(wanted, exact)[0])


def test_gating(interpreted: None) -> None:
    # More elements than one program holds, and not a multiple of it.
    gate, up = (
        torch.randn(2, 3, 401).bfloat16().requires_grad_() for _ in range(2)
    )
    exact = [x.detach().double().requires_grad_() for x in (gate, up)]
    wanted = F.silu(exact[0]) * exact[1]
    y: Any = fused.Gated.call(gate, up)
    agree(y.detach(), wanted.detach())
    found = gradients_of(y, gate, up)
    for own, each in zip(found, gradients_of(wanted, *exact), strict=True):
        agree(own, each)


def test_loss(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of a head that makes its logits by chunks.

    More words than a program reads at once, and two chunks, the last of them shorter.
    """
    monkeypatch.setattr(loss, "fuses", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setitem(loss.CHUNK, "cpu", 3 * 5000)
    generator = torch.Generator().manual_seed(2)
    x, weight = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((5, 16), (5000, 16))
    )
    targets = torch.tensor([0, 4999, loss.IGNORED, 4095, 4096])
    into_weight = torch.zeros(5000, 16)

    def contribute(a: Tensor, b: Tensor) -> None:
        into_weight.add_(a.float() @ b.float())

    given = x.requires_grad_(), nn.Parameter(weight), contribute
    total = loss.token_loss(loss.ChunkedLogits(*given), targets)
    (3.0 * total).backward()
    # in 16 bits, as a head makes them
    wide = (x.detach() @ weight.mT).double().requires_grad_()
    wanted = F.cross_entropy(wide, targets, reduction="sum")
    (3.0 * wanted).backward()
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=0.0)
    assert wide.grad is not None
    assert x.grad is not None
    into_x = wide.grad @ weight.double()
    into = wide.grad.mT @ x.detach().double()
    torch.testing.assert_close(
        x.grad.double(), into_x, rtol=2**-6, atol=1e-2 * into_x.abs().max()
    )
    torch.testing.assert_close(
        into_weight.double(), into, rtol=2**-6, atol=1e-4
    )
    assert not x.grad[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_are_tried_before_they_are_used(
    interpreted: None, dtype: torch.dtype
) -> None:
    assert fused.kernels_agree.__wrapped__(torch.device("cpu"), dtype)


class WrongKernels:
    """Kernels with a mistake: a gate of the wrong input."""

    def rotated(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        neighbours: bool,
        forward: bool,
    ) -> Tensor:
        pairs = "neighbours" if neighbours else "halves"
        wide = x.float().requires_grad_()
        with torch.enable_grad():
            y = rotate(wide, cos, sin, pairs)
        if not forward:
            (y,) = torch.autograd.grad(y, wide, x.float())
        return y.detach().to(x.dtype)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(up) * gate

    def gate_gradients(
        self, gate: Tensor, up: Tensor, gradient: Tensor
    ) -> tuple[Tensor, ...]:
        own = [x.float().requires_grad_() for x in (gate, up)]
        with torch.enable_grad():
            y = F.silu(own[0]) * own[1]
        return torch.autograd.grad(y, own, gradient.float())

    def token_losses(
        self, logits: Tensor, targets: Tensor, gradient: Tensor, ignored: int
    ) -> Tensor:
        wide = logits.float().requires_grad_()
        with torch.enable_grad():
            losses = F.cross_entropy(
                wide, targets, ignore_index=ignored, reduction="none"
            )
        (into,) = torch.autograd.grad(losses.sum(), wide)
        logits.copy_(into * gradient)
        return losses.detach()


class FailingKernels(WrongKernels):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        raise RuntimeError("no compiler for this device\nmore")


class RightKernels(WrongKernels):
    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class FailingGradients(RightKernels):
    def gate_gradients(self, *factors: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no kernel of a backward")


class NeverBack(RightKernels):
    """Kernels that rotate a gradient forward."""

    def rotated(self, *tensors: Tensor, **order: bool) -> Tensor:
        return super().rotated(*tensors, **{**order, "forward": True})


class UnscaledLoss(RightKernels):
    def token_losses(
        self, logits: Tensor, targets: Tensor, gradient: Tensor, ignored: int
    ) -> Tensor:
        one = torch.ones_like(gradient)
        return super().token_losses(logits, targets, one, ignored)


class NeverNeighbours(RightKernels):
    def rotated(self, *tensors: Tensor, **order: bool) -> Tensor:
        return super().rotated(*tensors, **{**order, "neighbours": False})


@pytest.mark.parametrize(
    "kernels, reason",
    [
        (RightKernels(), ""),
        (WrongKernels(), "not close"),
        (FailingKernels(), "no compiler for this device"),
        (FailingGradients(), "no kernel of a backward"),
        (NeverBack(), "not close"),
        (NeverNeighbours(), "not close"),
        (UnscaledLoss(), "not close"),
    ],
)
def test_kernels_that_fail_or_differ_are_left_out_with_a_warning(
    kernels: WrongKernels,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fused, "_kernels", lambda: kernels)
    agreed = fused.kernels_agree.__wrapped__(
        torch.device("cpu"), torch.bfloat16
    )
    assert agreed == (not reason)
    assert reason in caplog.text
    assert "more" not in caplog.text
    assert bool(caplog.text) == bool(reason)
    # A rank with kernels would have other bits.
    assert ("rounds differently from ranks" in caplog.text) == bool(reason)


def test_plain_torch_runs_without_a_gpu() -> None:
    assert not fused.fuses(torch.ones(2, 2).bfloat16())
    assert not fused.fuses(torch.ones(2, 2))
