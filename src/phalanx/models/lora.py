"""Low-rank adapters (Hu et al. 2021): two thin trained matrices beside a frozen one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Lora(nn.Module):
    """The adapter: b(a(x)) * alpha / r."""

    def __init__(self, into: int, out: int, r: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Linear(into, r, bias=False)
        self.b = nn.Linear(r, out, bias=False)
        self.scale = alpha / r

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))  # (..., into) to (..., r) to (..., out)
        return y * self.scale


class LoraLinear(nn.Linear):
    """A linear with an adapter. Its own weight and bias keep their names."""

    lora: Lora

    def weight_product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lora(x)
        return self.weight_product(x, self.bias) + y


def adapt(linear: nn.Linear, r: int, alpha: float) -> None:
    """Give a linear an adapter by changing its class; its weights keep their names."""
    linear.lora = Lora(linear.in_features, linear.out_features, r, alpha)
    linear.__class__ = LoraLinear


@torch.no_grad()
def draw_lora(
    name: str, weight: Tensor, generator: torch.Generator | None = None
) -> None:
    """Initialize a factor as peft does: `a` uniform within 1 / sqrt(columns), `b` zero."""
    # With b = 0 the adapted model starts as the model itself.
    if name.endswith("lora.b.weight"):
        weight.zero_()
    else:
        bound = 1 / math.sqrt(weight.shape[1])
        weight.uniform_(-bound, bound, generator=generator)
