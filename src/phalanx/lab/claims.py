"""What an experiment is run with, and what it claims at its end: sentences that can be false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Claim", "Held", "LabError", "Size", "equal", "holds"]

# What one rank hands to the check: tensors, numbers, words, or lists of them.
Held = dict[str, Any]


class LabError(ValueError):
    """An experiment that cannot be run so: what does not fit, and what would."""


@dataclass(frozen=True)
class Size:
    """How large the deep MLP is and how long it trains."""

    batch: int = 128
    width: int = 1024
    layers: int = 4
    steps: int = 5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise LabError(f"{name} is {value}; it must be 1 or more.")

    def part(self, what: str, place: int, parts: int) -> slice:
        """The equal run of `batch`, `width` or `layers` that belongs to one of `parts` places."""
        whole: int = getattr(self, what)
        if whole % parts:
            near = max(parts, whole // parts * parts)
            raise LabError(
                f"{what} {whole} does not divide by {parts}; use --{what} {near}, or fewer ranks."
            )
        each = whole // parts
        return slice(place * each, (place + 1) * each)


@dataclass(frozen=True)
class Claim:
    """A sentence, whether it holds, and the numbers it was judged by."""

    says: str
    holds: bool
    detail: str = ""


def holds(says: str, true: bool, detail: str = "") -> Claim:
    """A claim that is simply true or not."""
    return Claim(says, bool(true), detail)


def equal(says: str, got: Any, want: Any, *, within: float = 1e-10) -> Claim:
    """The claim that two things are the same: words exactly, numbers to `within` of the largest.

    Ranks add in another order than one process, which costs some 1e-16 of the largest number. A
    mistake in what is added costs at least 1e-3.
    """
    if isinstance(got, str) or isinstance(want, str):
        return Claim(says, got == want, f"{got!r}" if got == want else f"{got!r}, not {want!r}")
    ours, theirs = _flat(got), _flat(want)
    if ours.shape != theirs.shape:
        return Claim(says, False, f"{ours.numel()} numbers, not {theirs.numel()}")
    if not ours.numel():
        return Claim(says, True, "nothing on either side")
    largest = max(theirs.abs().max().item(), torch.finfo(torch.float64).tiny)
    apart = (ours - theirs).abs().max().item()
    # Written so that a NaN fails.
    fits = apart <= within * largest
    if ours.numel() == 1:
        return Claim(says, fits, f"{ours.item():,.10g}; wanted {theirs.item():,.10g}")
    return Claim(says, fits, f"{ours.numel():,} numbers, at most {apart:.1e} apart")


def _flat(x: Any) -> Tensor:
    """Any nest of numbers and tensors as one float64 vector."""
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64).reshape(-1)
    if isinstance(x, Sequence):
        return torch.cat([_flat(each) for each in x]) if x else torch.empty(0, dtype=torch.float64)
    return torch.tensor([float(x)], dtype=torch.float64)
