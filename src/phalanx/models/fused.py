"""Rotation, gating and the loss as one kernel each, on a GPU in 16 bits.

Plain torch computes them in several kernels, each of which reads and writes the whole
tensor, in float32 for the rotation and the loss. One kernel reads 16 bits, computes in float32 and
rounds once. Everywhere else, and in a compiled graph, plain torch runs.
"""

from __future__ import annotations

import logging
import shutil
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .function import FrequentFunction, is_transformed

_HALVES = torch.bfloat16, torch.float16
_NO_TARGET = -100  # in the samples
_LOG = logging.getLogger(__name__)


def fuses(x: Tensor) -> bool:
    """True if x is on a GPU for which Triton makes kernels, in 16 bits."""
    # A subclass, such as a fake tensor, has no memory that a kernel could read.
    usable = x.is_cuda and x.dtype in _HALVES and type(x) is Tensor
    if not usable or not x.numel() or is_transformed():
        return False
    # Triton starts kernels on the current device.
    return (
        x.get_device() == torch.cuda.current_device()
        and compiles_kernels()
        and kernels_agree(x.device, x.dtype)
    )


@cache
def compiles_kernels() -> bool:
    """True if this machine can compile Triton kernels."""
    from torch.utils._triton import has_triton

    # Triton compiles its launcher with the machine's C compiler.
    compilers = map(shutil.which, ("cc", "gcc", "clang"))
    return bool(has_triton()) and any(compilers)


@cache
def _kernels() -> Any:
    return import_module(".fused_kernels", __package__)


@cache
def kernels_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the kernels give what plain torch gives for a few elements.

    A compiler that fails on this machine must not end a run that plain torch can do.
    Each rank decides for itself. Kernels and plain torch round differently, so ranks that
    decide differently do not have equal bits, even with `exact`. The warning says so.
    """
    try:
        found, wanted = _samples(device, dtype)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                one.float(), other.float(), rtol=2**-6, atol=1e-2
            )
    except Exception as error:  # whatever a compiler or a driver raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _LOG.warning(
            "plain torch rotates, gates and computes the loss on %s, and rounds differently from ranks"
            " with kernels: %s",
            device,
            reason,
        )
        return False
    return True


def _samples(
    device: torch.device, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of the kernels on small inputs, and what plain torch computes for them."""
    numbers = torch.linspace(-2, 2, 96, device=device)
    first, second = numbers.to(dtype), numbers.flip(0).to(dtype)
    x = first.view(1, 3, 4, 8)  # (B, T, heads, head_dim)
    angles = torch.arange(3.0, device=device).view(1, 3, 1, 1)
    angles = angles.repeat(1, 1, 1, 8)  # (B, T, 1, head_dim)
    # The sines of the first half are negative: see `Rope.angles`.
    signs = torch.ones(8, device=device)
    signs[:4] = -1
    cos, sin = angles.cos(), angles.sin() * signs
    own: list[Tensor] = []
    wanted: list[Tensor] = []
    for neighbours, forward in product((False, True), repeat=2):
        order = {"neighbours": neighbours, "forward": forward}
        own.append(_kernels().rotated(x, cos, sin, **order))
        wanted.append(_rotated(x.float(), cos, sin, **order))
    gate, up = first.float(), second.float()
    # A gradient that is neither of the two.
    gradient = numbers.roll(7).to(dtype)
    wide = gradient.float()
    own.append(_kernels().gated(first, second))
    own += _kernels().gate_gradients(first, second, gradient)
    into_gate = torch.ops.aten.silu_backward(wide * up, gate)
    silu = functional.silu(gate)
    wanted += [silu * up, into_gate, wide * silu]
    # logits of 3 tokens, one of which has no target
    logits = first.view(3, 32).clone()
    targets = torch.tensor([5, _NO_TARGET, 31], device=device)
    losses, into_logits = _losses(logits.float(), targets)
    half = torch.full((1,), 0.5, device=device)
    own.append(_kernels().token_losses(logits, targets, half, _NO_TARGET))
    return [*own, logits], [*wanted, losses, 0.5 * into_logits]


def _losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of tokens and their gradient (tokens, words), by plain torch."""
    logs = logits.log_softmax(-1)
    losses = functional.nll_loss(
        logs, targets, ignore_index=_NO_TARGET, reduction="none"
    )
    valid = targets != _NO_TARGET
    index = targets.where(valid, 0).unsqueeze(-1)
    one = torch.ones_like(index, dtype=logits.dtype)
    into = logs.exp().scatter_add(-1, index, -one)
    return losses, into * valid.unsqueeze(-1)


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool, forward: bool
) -> Tensor:
    """x (B, T, heads, head_dim) rotated, or a gradient rotated back, by plain torch."""
    half = x.shape[-1] // 2
    if not forward:
        y = x * cos + (x * sin).roll(half, -1)
        halves = y.chunk(2, -1)
        return torch.stack(halves, -1).flatten(-2) if neighbours else y
    if neighbours:
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    return x * cos + x.roll(half, -1) * sin


class Rotated(FrequentFunction):
    """`rope.rotate` of x (B, T, heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        y: Tensor = _kernels().rotated(
            x, cos, sin, neighbours=neighbours, forward=True
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        into = _kernels().rotated(
            gradient, cos, sin, neighbours=ctx.neighbours, forward=False
        )
        return into, None, None, None


class Gated(FrequentFunction):
    """silu(gate) * up, which keeps nothing but its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        y: Tensor = _kernels().gated(gate, up)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        found: tuple[Tensor, Tensor] = _kernels().gate_gradients(
            gate, up, gradient.contiguous()
        )
        return found


def write_loss_gradient(
    logits: Tensor, targets: Tensor, gradient: Tensor, ignored: int
) -> Tensor:
    """Overwrite logits (tokens, words) with their gradient; return the losses.

    `gradient` (1) is that of every token's loss. A target that is `ignored` adds nothing.
    """
    assert logits.stride(-1) == 1
    losses: Tensor = _kernels().token_losses(
        logits, targets.contiguous(), gradient, ignored
    )
    return losses
