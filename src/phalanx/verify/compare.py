"""Two accounts of the same steps laid side by side, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .reference import Mismatch, Step

__all__ = ["Difference", "compare"]

# A gradient below this share of the model's largest is compared against that floor: some true
# gradients are zero (a key's bias without rotation), and what is left of them is rounding.
FLOOR = 1e-6


@dataclass(frozen=True)
class Difference:
    """One quantity of one step that differs, by how much, and where most."""

    step: int
    what: str  # an output, the loss, the norm, gradient or weight
    name: str  # the parameter; empty for what is one number
    element: tuple[int, ...]
    got: float
    want: float
    error: float
    hint: str = ""
    ranks: tuple[int, ...] = ()  # two that hold copies which differ: `got` and `want` are theirs

    def __str__(self) -> str:
        if self.ranks:
            (a, b), x, y = self.ranks, self.want, self.got
            return (
                f"step {self.step}: the {self.what} of {self.name}{list(self.element)} is {x:.17g}"
                f" on rank {a} and {y:.17g} on rank {b}; copies must be equal bit by bit"
            )
        where = f" of {self.name}{list(self.element)}" if self.name else ""
        what = f"the {self.what}" if self.name else self.what
        hint = f" ({self.hint})" if self.hint else ""
        return (
            f"step {self.step}: {what}{where} is {self.got:.9g}, one process has"
            f" {self.want:.9g}{hint}; relative error {self.error:.2e}"
        )


def compare(got: Sequence[Step], want: Sequence[Step], lr: float) -> list[Difference]:
    """Every quantity with its error, in the order in which a step makes them.

    Adam moves a weight by about `lr` a step, also one whose true gradient is zero: a weight is
    compared on that scale at least.
    """
    return [d for i, (a, b) in enumerate(zip(got, want, strict=True)) for d in _step(i, a, b, lr)]


def _step(number: int, got: Step, want: Step, lr: float) -> Iterator[Difference]:
    """In the order in which a fault would show: forward, loss, backward from the last weight to the
    first, norm, update. The first difference is then the nearest to its cause."""
    for piece, square in want.outputs.items():
        if piece in got.outputs:
            yield _scalar(
                number, f"the output of {piece}, squared and summed,", got.outputs[piece], square
            )
    yield _scalar(number, "the loss", got.loss, want.loss)
    floor = FLOOR * max(float(whole.abs().max()) for whole in want.gradients.values())
    apart = {(m.what, m.name): m for m in got.mismatches}
    yield from _tensors(number, "gradient", got.gradients, want.gradients, floor, apart)
    yield _scalar(number, "the norm", got.norm, want.norm)
    yield from _tensors(number, "weight", got.weights, want.weights, lr, apart)


def _tensors(
    step: int,
    what: str,
    got: dict[str, Tensor],
    want: dict[str, Tensor],
    floor: float,
    apart: dict[tuple[str, str], Mismatch],
) -> Iterator[Difference]:
    for name, whole in reversed(want.items()):
        yield _tensor(step, what, name, got.get(name), whole, floor)
        if (what, name) in apart:
            _, _, element, ranks, (a, b) = apart[what, name]
            yield Difference(step, what, name, element, b, a, math.inf, ranks=ranks)


def _scalar(step: int, what: str, got: float, want: float) -> Difference:
    error = abs(got - want) / max(abs(want), 1e-30)
    hint = _hint(got / want) if want else ""
    return Difference(step, what, "", (), got, want, _or_infinite(error), hint)


def _tensor(
    step: int, what: str, name: str, got: Tensor | None, want: Tensor, floor: float
) -> Difference:
    """max |a - b| / max(max |b|, floor), and the element where it is largest."""
    if got is None:
        return Difference(step, what, name, (), math.nan, math.nan, math.inf, "no rank holds it")
    want = want.to(torch.float64)
    apart = (got.to(torch.float64) - want).abs().nan_to_num(nan=math.inf)
    at = int(apart.argmax())
    scale = max(float(want.abs().max()), floor, 1e-300)
    element = tuple(int(i) for i in np.unravel_index(at, want.shape))
    a, b = float(got.reshape(-1)[at]), float(want.reshape(-1)[at])
    hint = _hint(a / b) if b else ""
    return Difference(step, what, name, element, a, b, float(apart.max()) / scale, hint)


def _or_infinite(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _hint(ratio: float) -> str:
    """What a wrong factor looks like: a whole number or its inverse is an axis summed once too
    often, or not at all."""
    if math.isnan(ratio):
        return "not a number: no rank holds it, or a dropped weight was used"
    for k in range(2, 17):
        if abs(ratio - k) < 1e-3:
            return f"{k} times as much: summed over an axis of {k} once too often?"
        if abs(ratio * k - 1) < 1e-3:
            return f"1/{k} of it: not summed over an axis of {k}, or divided by it?"
    return ""
