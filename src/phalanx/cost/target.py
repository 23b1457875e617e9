"""Operations that a target device runs differently from meta tensors.

On meta, attention decomposes into plain products and keeps its scores; every target has a kernel
that keeps q, k, v, the result and one value per row. On CUDA the root-mean-square norm is one
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..layout import LayoutError
from ..models import RMSNorm
from .scales import Scales

TARGETS = ("cuda", "cpu")


class Target(TorchFunctionMode):
    """While active, runs attention and norms on meta tensors as the target's kernels."""

    def __init__(self, target: str, scales: Scales) -> None:
        super().__init__()
        if target not in TARGETS:
            raise LayoutError(
                f"unknown target {target!r}. Targets are {', '.join(TARGETS)}."
            )
        self.scales, self.fused = scales, target == "cuda"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        # On a CPU the model's own norm runs, so only CUDA's is replaced.
        if func is F.rms_norm and self.fused:
            return _norm(self.scales, *args, **kwargs)
        return func(*args, **kwargs)


def fuse(modules: Iterable[nn.Module], target: str) -> None:
    """Replace the class of RMSNorm modules with the variant that runs on a GPU.

    On meta the norm cannot see that the target is a GPU.
    """
    for module in modules:
        if target == "cuda" and isinstance(module, RMSNorm):
            module.__class__ = _FusedNorm


class _FusedNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        if self.plus_one:
            return super().forward(x)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # as torch itself converts it
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
    # The CPU's flash kernel has the shapes of every target's: out, and lse per row.
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = op(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


def _norm(
    scales: Scales,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    result: Tensor = _RmsNorm.apply(
        input, weight, len(normalized_shape), scales
    )  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    """CUDA's fused norm: one kernel forward, and one backward for each gradient.

    It keeps x, the weight, and one number per row.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, dims: int, scales: Scales
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # scale: (..., 1), one number for each row
        y, scale = (
            torch.empty_like(x),
            x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=wide),
        )
        ctx.save_for_backward(x, weight, scale)
        ctx.scales = scales
        scales.kernel((x, weight), (y, scale))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        # One kernel reads everything and writes the input's gradient.
        into_x = torch.empty_like(x)
        ctx.scales.kernel((gradient, x, weight, scale), (into_x,))
        if weight is None:
            return into_x, None, None, None
        into_weight = torch.empty_like(weight)
        ctx.scales.kernel((gradient, x, scale), (into_weight,))
        return into_x, into_weight, None, None
