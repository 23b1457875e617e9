"""Rotation and gating as one kernel each, on a GPU in 16 bits.

Plain torch computes them in several kernels, each of which reads and writes the whole
tensor, in float32 for the rotation. One kernel reads 16 bits, computes in float32 and
rounds once. Everywhere else, and in a compiled graph, plain torch runs.
"""

from __future__ import annotations

import shutil
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .function import FrequentFunction, is_transformed

_HALVES = torch.bfloat16, torch.float16


def fuses(x: Tensor) -> bool:
    """True if x is on a GPU for which Triton makes kernels, in 16 bits."""
    # A subclass, such as a fake tensor, has no memory that a kernel could read.
    usable = x.is_cuda and x.dtype in _HALVES and type(x) is Tensor
    if not usable or not x.numel() or is_transformed():
        return False
    # Triton starts kernels on the current device.
    return x.get_device() == torch.cuda.current_device() and _has_kernels()


@cache
def _has_kernels() -> bool:
    from torch.utils._triton import has_triton

    # Triton compiles its launcher with the machine's C compiler.
    compilers = map(shutil.which, ("cc", "gcc", "clang"))
    return bool(has_triton()) and any(compilers)


@cache
def _kernels() -> Any:
    return import_module(".fused_kernels", __package__)


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
