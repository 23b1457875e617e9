"""Records of one rank while it runs an experiment: plain values, ready for display."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Claim:
    """A sentence, its truth, and the values it was judged by."""

    says: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True)
class Value:
    """A tensor or number on a rank: its shape, first elements, and a hash of all its
    bytes."""

    name: str
    shape: str
    first: str
    hash: str
    bytes: int


@dataclass(frozen=True)
class Interval:
    """One activity of a rank, with its start and end in seconds of the machine's
    clock."""

    lane: str  # compute or messages
    name: str
    start: float
    end: float


@dataclass
class LabStep:
    """A part of an experiment, as recorded by one rank."""

    title: str
    start: float
    line: int = 0  # line of the experiment's function at which the step began
    # (before or after, value)
    values: list[tuple[str, Value]] = field(default_factory=list)
    # Bytes to each rank by call, such as "all_reduce on everyone", as if every rank
    # sent to the receiver directly. Rings and trees forward data; the sum over all
    # ranks is the same for a ring.
    sent: dict[str, dict[int, float]] = field(default_factory=dict)
    spans: list[Interval] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # (title, header, rows)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(
        default_factory=list
    )


@dataclass
class RankRecord:
    """One rank's steps, its claims, and the bytes of its tensors over time."""

    rank: int
    steps: list[LabStep] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def value_of(name: str, x: Any) -> Value:
    """Return the display form of a tensor, a list of tensors, or a plain value."""
    xs = [x] if isinstance(x, Tensor) else x
    if (
        isinstance(xs, Sequence)
        and xs
        and all(isinstance(each, Tensor) for each in xs)
    ):
        shapes = dict.fromkeys(
            f"{[*t.shape]} {str(t.dtype).removeprefix('torch.')}" for t in xs
        )
        shape = (f"{len(xs)} x " if len(xs) > 1 else "") + ", ".join(shapes)
        return Value(
            name,
            shape,
            _first(xs[0]),
            _hash(xs),
            sum(each.nbytes for each in xs),
        )
    if isinstance(x, Sequence) and not x:
        return Value(name, "nothing", "", "", 0)
    return Value(
        name,
        type(x).__name__,
        f"{x:.6g}" if isinstance(x, float) else str(x),
        "",
        0,
    )


def _first(x: Tensor) -> str:
    flat = x.detach().reshape(-1)
    shown = flat if flat.numel() <= 8 else flat[:4]
    return " ".join(f"{n:.4g}" for n in shown.tolist()) + " ..." * (
        len(shown) < len(flat)
    )


def _hash(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for each in tensors:
        # A clone, since a tensor of one element may have any stride and still count as
        # contiguous.
        plain = (
            each.detach()
            .reshape(-1)
            .clone(memory_format=torch.contiguous_format)
        )
        digest.update(plain.to("cpu").view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def compared(says: str, got: Any, want: Any, within: float = 1e-10) -> Claim:
    """Compare two values: text exactly, numbers within `within` of the largest.

    Ranks add in a different order than one process, which costs some 1e-16 of the
    largest value. A mistake in the terms costs at least 1e-3.
    """
    if isinstance(want, bool | str):
        return Claim(
            says,
            got == want,
            f"{got!r}" if got == want else f"{got!r}, not {want!r}",
        )
    ours, theirs = _flat(got), _flat(want)
    if ours.shape != theirs.shape:
        return Claim(
            says, False, f"{ours.numel()} numbers, not {theirs.numel()}"
        )
    if not ours.numel():
        return Claim(says, True, "nothing on either side")
    least = torch.finfo(torch.float64).tiny
    largest = max(theirs.abs().max().item(), least)
    apart = (ours - theirs).abs().max().item()
    fits = apart <= within * largest  # false for NaN
    if ours.numel() == 1:
        return Claim(
            says, fits, f"{ours.item():,.10g}; wanted {theirs.item():,.10g}"
        )
    return Claim(
        says, fits, f"{ours.numel():,} numbers, at most {apart:.1e} apart"
    )


def _flat(x: Any) -> Tensor:
    """Flatten nested numbers and tensors into one float64 vector."""
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64).reshape(-1)
    if isinstance(x, Sequence):
        return (
            torch.cat([_flat(part) for part in x])
            if x
            else torch.empty(0, dtype=torch.float64)
        )
    return torch.tensor([float(x)], dtype=torch.float64)
