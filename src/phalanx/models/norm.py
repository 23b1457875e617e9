"""The two norms of a decoder: small modules that keep little for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _RootMeanSquare(torch.autograd.Function):
    """x / rms(x) * weight that keeps x as it is and one number per row.

    `F.rms_norm` does so on CUDA only: elsewhere it keeps two float32 copies, 8 bytes per element
    of a bf16 x where this keeps 2.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = torch.rsqrt(size.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, g = x * scale, gradient.to(scale.dtype)
        product = g * normed
        along = (product @ weight.to(scale.dtype)).unsqueeze(-1) / x.shape[-1]
        into_x = (g * weight - normed * along) * scale
        return into_x.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, in float32 or in x's dtype if that is wider.

    With `plus_one` it multiplies by 1 + weight, as Gemma does.
    """

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            # Added in float32: in 16 bits 1 + w has fewer digits than w.
            scale = 1.0 + self.weight.to(torch.promote_types(x.dtype, torch.float32))
            z: Tensor = _RootMeanSquare.apply(x, scale, self.eps)  # type: ignore[no-untyped-call]
            return z
        if x.is_cuda:  # one fused kernel, and it keeps the same three tensors
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y: Tensor = _RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


def norm_of(kind: str, size: int, eps: float) -> nn.Module:
    """By a shape's word for it: rms, rms1 (its weights count from one) or layer."""
    return (
        nn.LayerNorm(size, eps) if kind == "layer" else RMSNorm(size, eps, plus_one=kind == "rms1")
    )
