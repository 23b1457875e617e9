"""The deep MLP of the teaching examples: layers of gelu(x @ W), mean-square loss.

Its pieces match the decoder's: `embed` passes its input on, `layers` are called `x =
layer(x, **shared)`, `head` is the loss. No width is read in a forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RULES = "layers.*.weight : embed ffn"


class Identity(nn.Module):
    """The first piece: returns its input. An MLP has no use for positions."""

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        return inputs


class Layer(nn.Module):
    """gelu(x @ weight) with weight (in, out). Ignores the tensors that blocks share.

    `weight_product` is a method, so that a layout that computes weight gradients apart
    can replace it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def weight_product(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor, **shared: Tensor | None) -> Tensor:
        return F.gelu(self.weight_product(x))


class MeanSquare(nn.Module):
    """Mean square distance of rows to targets (or 0), summed in float32 or wider."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # (..., width) to a scalar: the mean over width, the sum over rows
        return (
            (wide if targets is None else wide - targets)
            .square()
            .mean(-1)
            .sum()
        )


class DeepMlp(nn.Module):
    """`layers` layers of `width`. Forward returns the summed loss of rows (..., width)."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.embed = width, Identity()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = MeanSquare()
        for name, weight in self.named_parameters():
            self.draw(name, weight)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        **shared: Tensor | None,
    ) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x, **shared)
        loss: Tensor = self.head(x, targets)
        return loss

    @torch.no_grad()
    def draw(
        self,
        name: str,
        weight: Tensor,
        generator: torch.Generator | None = None,
    ) -> None:
        """Fill a weight, or a part of it, with its initial values (He et al. 2015: gelu
        halves the variance too).
        """
        weight.normal_(0.0, math.sqrt(2 / self.width), generator=generator)


def describe(model: DeepMlp) -> tuple[tuple[tuple[str, nn.Module], ...], str]:
    """The pieces and rules of the MLP, in the form of `decoder.describe`.

    If a layer's output features are sharded, they are gathered before the next layer.
    """
    layers = tuple(
        (f"layers.{n}", layer) for n, layer in enumerate(model.layers)
    )
    return (("embed", model.embed), *layers, ("head", model.head)), RULES
