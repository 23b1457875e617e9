"""Products with a module's weight, forward and into the input's gradient: torch's own, or in 8 bits.

Not here: how numbers are rounded (`low_precision.py`), and where a weight's gradient goes (`data.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional as F


class Matmul(Protocol):
    """A replacement of torch's product with the weights of blocks. x is (..., in), a weight (out,
    in) and a gradient (..., out)."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor: ...

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The weight's gradient, (out, in), in float32 or wider."""


class Narrow(NamedTuple):
    """A weight that is in 8 bits already: its numbers, and the scales of its squares."""

    numbers: Tensor  # (out, in)
    scales: Tensor  # (out / run, in / run)

    @property
    def mT(self) -> Narrow:
        return Narrow(self.numbers.mT, self.scales.mT)


class How(NamedTuple):
    """A module's way of multiplying by its weight."""

    transposed: bool  # the weight is (in, out) and not (out, in)
    matmul: Matmul | None
    scales: Tensor | None = None  # of a weight that is in 8 bits already

    def factor(self, weight: Tensor) -> Any:
        """The factor of the product, (out, in)."""
        whole = weight if self.scales is None else Narrow(weight, self.scales)
        return whole.mT if self.transposed else whole


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    """x (..., in) times a weight."""
    if how.matmul is None:
        return x @ weight if how.transposed else F.linear(x, weight, bias)
    y = how.matmul.forward(x, how.factor(weight))
    return y if bias is None else y + bias


def into_input(gradient: Tensor, weight: Tensor, how: How) -> Tensor:
    """The gradient of x in that product, from its output's (..., out)."""
    if how.matmul is None:
        return gradient @ (weight.mT if how.transposed else weight)
    return how.matmul.input_gradient(gradient, how.factor(weight))
