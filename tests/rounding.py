"""Rounding bounds: how far a result may be from the exact one, given its roundings."""

from __future__ import annotations

import torch
from torch import Tensor

# the largest relative error of one rounding to float32
SINGLE = torch.finfo(torch.float32).eps / 2


def assert_rounded_once(
    result: Tensor, exact: Tensor, slack: Tensor | float = 0.0
) -> None:
    """Assert that a 16-bit result is the exact value, in float64, rounded once to its
    dtype.

    `slack` bounds the error of the float32 arithmetic before that rounding. It must be
    much smaller than a 16-bit rounding; otherwise the comparison would accept a second
    one.
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
