"""Bounds of rounding: how far a result may be from the exact one, by how often it is rounded."""

from __future__ import annotations

import torch
from torch import Tensor

# the largest relative error of one rounding to float32
SINGLE = torch.finfo(torch.float32).eps / 2


def assert_rounded_once(
    result: Tensor, exact: Tensor, slack: Tensor | float = 0.0
) -> None:
    """Asserts that a 16-bit result is the exact one, in float64, rounded once to the result's dtype.

    `slack` bounds the error of the float32 arithmetic before that rounding. It is to be much smaller than
    a rounding to 16 bits, else the comparison would accept a second one.
    """
    once = torch.finfo(result.dtype).eps / 2
    allowed = once * exact.abs() + (1 + once) * torch.as_tensor(slack)
    apart = (result.double() - exact).abs()
    worst = int((apart - allowed).argmax())
    assert bool((apart <= allowed).all()), (
        f"{float(result.reshape(-1)[worst]):.9g} is {float(apart.reshape(-1)[worst]):.3g} off"
        f" {float(exact.reshape(-1)[worst]):.9g}; a rounding to {result.dtype} allows"
        f" {float(allowed.expand_as(apart).reshape(-1)[worst]):.3g}"
    )
