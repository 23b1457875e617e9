"""Low-rank adapters (Hu et al. 2021): two thin trained matrices beside a frozen one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Lora(nn.Module):
    """The adapter: b(a(x)) * alpha / r."""

    def __init__(self, linear: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.a = nn.Linear(linear.in_features, r, bias=False)
        self.b = nn.Linear(r, linear.out_features, bias=False)
        self.scale = alpha / r

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))  # (..., into) to (..., r) to (..., out)
        return y * self.scale


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
