"""LoRA on one process, from its paper (Hu et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..layout import Shape


def lora_output(
    shape: Shape, w: Mapping[str, Tensor], name: str, x: Tensor
) -> Tensor:
    """(alpha / r) B A x (section 4.1)."""
    narrow = x @ w[f"{name}.lora.a.weight"].T  # (B, T, r)
    wide = narrow @ w[f"{name}.lora.b.weight"].T
    return shape.lora_alpha / shape.lora_r * wide


def lora_start(
    name: str, size: torch.Size, generator: torch.Generator
) -> Tensor:
    """The initial value of a factor."""
    # B starts at zero, so that the adapter changes nothing at first.
    if name.endswith(".lora.b.weight"):
        return torch.zeros(size)
    # as in peft: Kaiming uniform with a slope of sqrt(5)
    return nn.init.kaiming_uniform_(
        torch.empty(size), a=math.sqrt(5), generator=generator
    )
