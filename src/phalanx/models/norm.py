"""The norms of a decoder: small modules that save little for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .function import FrequentFunction


class _RootMeanSquare(FrequentFunction):
    """x / rms(x) * weight, saving only x and one number per row.

    Outside CUDA, `F.rms_norm` saves two float32 copies: 8 bytes per element of a bf16
    x, where this saves 2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # (..., 1)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        # (..., 1): 1 / rms
        mean: Tensor = size.square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        # Intermediate results are overwritten, which is faster than new memory.
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # dx = (g * w - normed * mean(g * w * normed)) / rms
        normed, g = x * scale, gradient.to(scale.dtype)  # (..., size)
        product = g * normed
        # (..., 1): the component along x
        along = product @ weight.to(scale.dtype)
        along = along.unsqueeze(-1) / x.shape[-1]
        into_x = (g * weight).sub_(normed.mul_(along)).mul_(scale)
        into_weight = product.flatten(0, -2).sum(0)
        return into_x.to(x.dtype), into_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32 or wider.

    With `plus_one` it multiplies by 1 + weight, as Gemma does.
    """

    def __init__(
        self, size: int, eps: float, *, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.weight = nn.Parameter(
            torch.zeros(size) if plus_one else torch.ones(size)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            # Added in float32: in 16 bits, 1 + w has fewer digits than w.
            scale = 1.0 + self.weight.to(
                torch.promote_types(x.dtype, torch.float32)
            )
            z: Tensor = _RootMeanSquare.call_or_apply(x, scale, self.eps)
            return z
        if x.is_cuda:  # one fused kernel that saves the same three tensors
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y: Tensor = _RootMeanSquare.call_or_apply(x, self.weight, self.eps)
        return y


class _LayerNormalized(FrequentFunction):
    """`F.layer_norm` with its statistics and its sums over tokens in float32.

    On a CPU torch computes both in x's dtype: a bias gradient in bfloat16 is off by 5 %
    at 2,048 tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        wide = weight.float(), bias.float()
        y, mean, scale = torch.native_layer_norm(x, weight.shape, *wide, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        op, wide = (
            torch.ops.aten.native_layer_norm_backward,
            (weight.float(), bias.float()),
        )
        into = op(
            gradient.float(),
            x.float(),
            weight.shape,
            mean,
            scale,
            *wide,
            [True] * 3,
        )
        return *(part.to(x.dtype) for part in into), None


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with float32 sums over tokens for bfloat16 on a CPU too."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu and x.dtype == torch.bfloat16:
            given = x, self.weight, self.bias, self.eps
            y: Tensor = _LayerNormalized.call_or_apply(*given)
            return y
        return super().forward(x)


def norm_of(kind: str, size: int, eps: float) -> nn.Module:
    """The norm for a shape's word: rms, rms1 (multiplies by 1 + weight) or layer."""
    return (
        LayerNorm(size, eps)
        if kind == "layer"
        else RMSNorm(size, eps, plus_one=kind == "rms1")
    )
