"""Linears with an adapter beside them, and the table of adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lora import Lora, draw_lora


class AdapterKind(NamedTuple):
    """The module of an adapter, and the initial values of its weights."""

    module: Callable[..., nn.Module]  # from the linear and its settings
    draw: Callable[[str, Tensor, torch.Generator | None], None]


# By the name of the module in its linear.
ADAPTERS = {"lora": AdapterKind(Lora, draw_lora)}


class AdaptedLinear(nn.Linear):
    """A linear with an adapter, its only child. Its own weight and bias keep their
    names."""

    def weight_product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        (adapter,) = self.children()
        y: Tensor = adapter(x)
        return self.weight_product(x, self.bias) + y


def adapt(linear: nn.Linear, kind: str, rank: int, **settings: float) -> None:
    """Give a linear an adapter by changing its class; its weights keep their names."""
    linear.add_module(kind, ADAPTERS[kind].module(linear, rank, **settings))
    linear.__class__ = AdaptedLinear


def in_adapters(module: nn.Module) -> set[nn.Module]:
    """The modules inside all adapters of a module."""
    return {
        inside
        for linear in module.modules()
        for kind in ADAPTERS.keys() & linear._modules.keys()
        for inside in linear.get_submodule(kind).modules()
    }


def draw_adapter(
    name: str, weight: Tensor, generator: torch.Generator | None = None
) -> None:
    """Initialize a weight of an adapter."""
    kind = next(kind for kind in ADAPTERS if f".{kind}." in name)
    ADAPTERS[kind].draw(name, weight, generator)
