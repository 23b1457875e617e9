"""What an experiment is run with, and what it claims at its end: sentences that can be false."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Claim", "Claims", "Values", "LabError", "Results", "Size", "equal", "every"]

# What one rank returns for the check: tensors, numbers, text, or lists of them.
Values = dict[str, Any]
Results = Sequence[Values]


class LabError(ValueError):
    """An experiment that cannot be run like this: what does not fit, and what would."""


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

    @property
    def bytes(self) -> int:
        """Of all weights, in float64."""
        return 8 * self.layers * self.width**2

    def part(self, name: str, index: int, parts: int) -> slice:
        """The range of `batch`, `width` or `layers` that is number `index` of so many equal parts."""
        whole: int = getattr(self, name)
        if whole % parts:
            near = max(parts, whole // parts * parts)
            raise LabError(
                f"{name} {whole} does not divide by {parts}; use --{name} {near}, or fewer ranks."
            )
        length = whole // parts
        return slice(index * length, (index + 1) * length)


@dataclass(frozen=True)
class Claim:
    """A sentence, whether it holds, and the numbers it was judged by."""

    says: str
    holds: bool
    detail: str = ""


Claims = Iterator[Claim]


def equal(says: str, got: Any, want: Any, *, within: float = 1e-10) -> Claim:
    """The claim that two things are the same: text exactly, numbers to `within` of the largest.

    Ranks add in another order than one process, which costs some 1e-16 of the largest number. A
    mistake in what is added costs at least 1e-3.
    """
    import torch

    if isinstance(got, str) or isinstance(want, str):
        return Claim(says, got == want, f"{got!r}" if got == want else f"{got!r}, not {want!r}")
    ours, theirs = _flat(got), _flat(want)
    if ours.shape != theirs.shape:
        return Claim(says, False, f"{ours.numel()} numbers, not {theirs.numel()}")
    if not ours.numel():
        return Claim(says, True, "nothing on either side")
    largest = max(theirs.abs().max().item(), torch.finfo(torch.float64).tiny)
    apart = (ours - theirs).abs().max().item()
    fits = apart <= within * largest  # false for a NaN
    if ours.numel() == 1:
        return Claim(says, fits, f"{ours.item():,.10g}; wanted {theirs.item():,.10g}")
    return Claim(says, fits, f"{ours.numel():,} numbers, at most {apart:.1e} apart")


def every(
    results: Results,
    name: str,
    says: str,
    want: Any | Callable[[int], Any],
    *,
    within: float = 1e-10,
) -> Claims:
    """For each rank: what it returned as `name` is `want`, or `want(rank)`."""
    for rank, values in enumerate(results):
        wanted = want(rank) if callable(want) else want
        yield equal(f"rank {rank}: {says}", values[name], wanted, within=within)


def _flat(x: Any) -> Tensor:
    """Any nest of numbers and tensors as one float64 vector."""
    import torch

    if isinstance(x, torch.Tensor):
        return x.detach().to("cpu", torch.float64).reshape(-1)
    if isinstance(x, Sequence):
        return torch.cat([_flat(part) for part in x]) if x else torch.empty(0, dtype=torch.float64)
    return torch.tensor([float(x)], dtype=torch.float64)
