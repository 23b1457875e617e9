"""The deep MLP of teaching examples: layers of gelu(x @ W) with square W, mean square as loss.

Pieces as in the decoder: `embed` passes its numbers on, `layers` are called
`x = layer(x, **shared)`, `head` is the loss. No width is read in a forward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RULES = "layers.*.weight : embed ffn"


class Identity(nn.Module):
    """The first piece: what goes in comes out; positions mean nothing to an MLP."""

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        return inputs


class Layer(nn.Module):
    """gelu(x @ weight), weight (in, out); what blocks share means nothing to it.

    `weight_product` is a method so that a layout with weight gradients of their own can put in another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def weight_product(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor, **shared: Tensor | None) -> Tensor:
        return F.gelu(self.weight_product(x))


class MeanSquare(nn.Module):
    """The sum over rows of a row's mean square distance to its target or to zero, in float32 or wider."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide if targets is None else wide - targets).square().mean(-1).sum()


class DeepMlp(nn.Module):
    """`layers` layers of `width`; forward gives the summed loss of rows (..., width)."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.width, self.embed = width, Identity()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = MeanSquare()
        for name, weight in self.named_parameters():
            self.draw(name, weight)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, **shared: Tensor | None
    ) -> Tensor:
        x = self.embed(inputs)
        for layer in self.layers:
            x = layer(x, **shared)
        loss: Tensor = self.head(x, targets)
        return loss

    @torch.no_grad()
    def draw(
        self, name: str, weight: Tensor, generator: torch.Generator | None = None
    ) -> None:
        """Fill the `weight` of that name, or a part, with its start (He et al. 2015: gelu halves too)."""
        weight.normal_(0.0, math.sqrt(2 / self.width), generator=generator)


def describe(model: DeepMlp) -> tuple[tuple[tuple[str, nn.Module], ...], str]:
    """The pieces and rules of the MLP, in the form of `decoder.describe`. A layer's output
    features, if cut, are gathered before the next layer."""
    layers = tuple((f"layers.{n}", layer) for n, layer in enumerate(model.layers))
    return (("embed", model.embed), *layers, ("head", model.head)), RULES
