"""What is recorded of one rank while it runs an experiment: plain values, ready to be shown."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Figure", "Message", "Record", "Span", "Step", "Value", "value_of"]


@dataclass(frozen=True)
class Value:
    """A tensor or number that a rank had: its shape, its first numbers, a hash of all its bytes."""

    name: str
    shape: str
    first: str
    hash: str
    bytes: int


@dataclass(frozen=True)
class Message:
    """Bytes that this rank sent to another in one call, as if everyone sent to the receiver directly.

    Rings and trees pass parts on through others; the sum over all ranks is the same for a ring.
    """

    group: str
    kind: str
    to: int
    bytes: float


@dataclass(frozen=True)
class Span:
    """What a rank did from when to when, in seconds of the machine's clock."""

    lane: str  # compute or messages
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Figure:
    """A table, curves or bars that an experiment makes of its numbers."""

    kind: str
    title: str
    data: dict[str, Any]


@dataclass
class Step:
    """A part of an experiment, as one rank saw it."""

    title: str
    start: float
    values: list[tuple[str, Value]] = field(default_factory=list)  # when, what
    messages: list[Message] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


@dataclass
class Record:
    """One rank: its steps, and the bytes of its tensors over time."""

    rank: int
    steps: list[Step] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def value_of(name: str, x: Any) -> Value:
    """What is shown of a tensor, a list of tensors, or a plain value."""
    if isinstance(x, Tensor):
        x = [x]
    if isinstance(x, Sequence) and x and all(isinstance(each, Tensor) for each in x):
        shapes = list(dict.fromkeys(map(_shape, x)))
        count = f"{len(x)} x " if len(x) > 1 else ""
        size = sum(each.nbytes for each in x)
        return Value(name, count + ", ".join(shapes), _first(x[0]), _hash(x), size)
    if isinstance(x, Sequence) and not x:
        return Value(name, "nothing", "", "", 0)
    return Value(name, type(x).__name__, _plain(x), "", 0)


def _plain(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_plain, x)) + "]"
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _first(x: Tensor, count: int = 4) -> str:
    flat = x.detach().reshape(-1)
    count = flat.numel() if flat.numel() <= 8 else count  # a short tensor is shown whole
    numbers = " ".join(f"{number:.4g}" for number in flat[:count].tolist())
    return numbers if flat.numel() <= count else numbers + " ..."


def _hash(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for each in tensors:
        # A clone, since a single number may have any stride and still be called contiguous.
        plain = each.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
        digest.update(plain.to("cpu").view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
