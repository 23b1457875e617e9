"""Matmuls with a module's weight, and their input's gradient: torch's or in fp8.

Not here: rounding (`low_precision.py`), and where a weight gradient goes (`data.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import functional as F


class Matmul(Protocol):
    """A replacement of torch's matmul with the weights of blocks.

    x is (..., in), a weight (out, in), a gradient (..., out).
    """

    def forward(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor: ...

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The weight's gradient (out, in), in float32 or wider."""


class Narrow(NamedTuple):
    """A weight already in 8 bits: its values, and the scales of its square tiles."""

    numbers: Tensor  # (out, in)
    scales: Tensor  # (out / run, in / run)

    @property
    def mT(self) -> Narrow:
        return Narrow(self.numbers.mT, self.scales.mT)


# The slices of a weight that a product uses, if it is computed in parts.
Place = tuple[slice, ...]


class MatmulSpec(NamedTuple):
    """The way in which a module multiplies by its weight."""

    transposed: bool  # the weight is (in, out) and not (out, in)
    matmul: Matmul | None
    scales: Tensor | None = None  # of a weight that is already in 8 bits
    place: Place | None = None  # see `parts.py`
    slot: int | None = (
        None  # the part of a leaf for its gradient: see `time_parts.py`
    )
    expert: int | None = None  # of a stack of experts' weights, the one in use

    def factor(self, weight: Tensor) -> Any:
        """The weight as the factor of a matmul, (out, in), with scales if in 8 bits."""
        whole = weight if self.scales is None else Narrow(weight, self.scales)
        return whole.mT if self.transposed else whole


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, spec: MatmulSpec
) -> Tensor:
    """Multiply x (..., in) by a weight."""
    weight = _used(weight, spec)
    if spec.matmul is None:
        # Only a linear has a bias, and its weight is (out, in).
        return x @ weight if spec.transposed else F.linear(x, weight, bias)
    y = spec.matmul.forward(x, spec.factor(weight))
    return y if bias is None else y + bias


def into_input(gradient: Tensor, weight: Tensor, spec: MatmulSpec) -> Tensor:
    """The gradient of x in that product, given the gradient (..., out) of its output."""
    # (..., out) times (out, in)
    weight = _used(weight, spec)
    if spec.matmul is None:
        return gradient @ (weight.mT if spec.transposed else weight)
    return spec.matmul.input_gradient(gradient, spec.factor(weight))


def _used(weight: Tensor, spec: MatmulSpec) -> Tensor:
    """The weight, or the part of it that a product uses."""
    if spec.expert is not None:
        return weight[spec.expert]
    if spec.place is not None:
        # With the same strides on every rank.
        return weight[spec.place].contiguous()
    return weight
