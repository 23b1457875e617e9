"""Products in 8 bits as one process computes them, for `verify`: linears of blocks in plain torch.

The formats are rounded to by arithmetic, not by torch's dtypes, and numbers that share a scale are
taken one slice after the other. Nothing of the engine is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout import Layout, Shape
from ..layout.choices import MATMULS, MatmulTraits
from ..models import ExpertMlps

# Of a format: digits behind the point, the exponent of its least normal and of its largest number.
_FORMS = {"float8_e4m3fn": (3, -6, 8, 448.0), "float8_e5m2": (2, -14, 15, 57344.0)}


def layout_keeps_scales(layout: Layout, shape: Shape | None) -> bool:
    """Whether every scale of a layout is that of one process: sums are cut by tp and cp alone."""
    return layout.tp == layout.cp == 1 and shape is not None and shape.kind == "decoder"


@dataclass
class Rounding:
    """Rounds a matrix whose last dim is summed over to an 8-bit format and back. With a `generator`
    scales are others than they are, as where ranks have parts of the numbers."""

    traits: MatmulTraits
    generator: torch.Generator | None = None

    def __call__(self, x: Tensor, form: str, *, weight: bool = False) -> Tensor:
        digits, least, last, most = _FORMS[form]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out = torch.zeros_like(wide)
        k = x.shape[-1]
        run = self.traits.run or k
        rows = run if weight and self.traits.square else 0
        of_rows = [slice(n, n + rows) for n in range(0, len(x), rows)] if rows else [slice(None)]
        for column in range(0, k, run):
            for row in of_rows:
                at = row, slice(column, column + run)
                part = wide[at]
                largest = part.abs().amax((0, 1) if rows else 1, keepdim=True)
                scale = self._scale(largest, last, most).float()
                # Kernels multiply by the inverse, which is a float32 as well.
                out[at] = _nearest((part * scale).float(), digits, least, most) * (1 / scale)
        return out

    def _scale(self, largest: Tensor, last: int, most: float) -> Tensor:
        shift = torch.ones_like(largest)
        if self.traits.power:
            if self.generator:
                shift = torch.randint(0, 2, largest.shape, generator=self.generator) * 0.5 + 0.5
            exponent = torch.frexp(largest.float())[1] - 1 - last
            return shift * torch.ldexp(torch.ones(largest.shape), -exponent.clamp(min=-127))
        if self.generator:  # a part of the numbers may have a smaller largest one
            shift = 1 / (1 + torch.rand(largest.shape, generator=self.generator))
        return shift * (most / largest.double().clamp(min=1e-12)).float()


def _nearest(x: Tensor, digits: int, least: int, most: float) -> Tensor:
    """The nearest number of a format, the even one of two: whole multiples of its last digit."""
    x = x.clamp(-most, most).double()
    step = torch.ldexp(torch.ones_like(x), (torch.frexp(x)[1] - 1).clamp(min=least) - digits)
    return torch.round(x / step) * step


class RoundedLinear(torch.autograd.Function):
    """A linear of x (B, T, in) with each product's factors rounded; the weight's gradient is that of one
    sequence after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        flat = rounding(x.flatten(0, -2), form)
        return _out(flat @ rounding(weight, form, weight=True).T, x).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        of_x, of_gradient = rounding.traits.forward, rounding.traits.gradient
        flat = rounding(gradient.flatten(0, -2), of_gradient)
        into = _out(flat @ rounding(weight.T, of_x, weight=True).T, x).view_as(x)
        each = zip(x, gradient, strict=True)
        parts = [rounding(g.T, of_gradient) @ rounding(y.T, of_x).T for y, g in each]
        return into, _out(sum(parts[1:], parts[0]), weight), None


class RoundedExpert(torch.autograd.Function):
    """A product of an expert's tokens x (n, in) with factors rounded, but for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounding, form = rounding, rounding.traits.forward
        return _out(rounding(x, form) @ rounding(weight, form, weight=True).T, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rounding: Rounding = ctx.rounding
        turned = rounding(weight.T, rounding.traits.forward, weight=True)
        into = rounding(gradient, rounding.traits.gradient) @ turned.T
        return _out(into, x), gradient.T @ x, None


def _out(y: Tensor, like: Tensor) -> Tensor:
    return y.to(like.dtype)


def install(
    pieces: Sequence[tuple[str, nn.Module]], word: str, generator: torch.Generator | None
) -> None:
    """From here on the linears of blocks, but for those of adapters, multiply so."""
    if not word:
        return
    rounding = Rounding(MATMULS[word], generator)
    for _, block in pieces[1:-1]:
        loras: list[Any] = [m.lora for m in block.modules() if getattr(m, "lora", None)]
        thin = {child for lora in loras for child in lora.modules()}
        for module in block.modules():
            if isinstance(module, ExpertMlps) and rounding.traits.experts:
                module.product = partial(_of_expert, rounding)
            if isinstance(module, nn.Linear) and module not in thin:
                own: Any = module
                adapted: Callable[..., Tensor] | None = getattr(module, "lora", None)
                own.forward = _forward(own, rounding, adapted)


def _of_expert(rounding: Rounding, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = RoundedExpert.apply(x, weight, rounding)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


def _forward(
    linear: nn.Linear, rounding: Rounding, adapted: Callable[..., Tensor] | None
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        y: Tensor = RoundedLinear.apply(x, linear.weight, rounding)  # type: ignore[no-untyped-call]
        y = y if linear.bias is None else y + linear.bias
        return y if adapted is None else y + adapted(x)

    return forward
