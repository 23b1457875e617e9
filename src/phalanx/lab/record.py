"""What is written down of one rank while it runs an experiment: plain values, ready to be shown."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Figure", "Message", "Moment", "Record", "Span", "Value", "value_of"]


@dataclass(frozen=True)
class Value:
    """One thing that a rank holds: its shape, its first numbers, and a hash of all of it."""

    name: str
    shape: str
    first: str
    hash: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """What a rank holds at some point of a step."""

    step: int
    when: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Message:
    """Bytes from one rank to another for one call of a collective.

    As if everyone sent straight to whom it concerns. Rings and trees pass parts on through others;
    the sum over all ranks is the same for a ring.
    """

    step: int
    wire: str
    kind: str
    source: int
    to: int
    bytes: float
    time: float


@dataclass(frozen=True)
class Span:
    """What a rank did from when to when, in seconds of the machine's clock; lane compute or wire."""

    step: int
    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Figure:
    """A picture an experiment asks for besides the usual ones; `kind` says which drawing."""

    step: int
    kind: str  # table, curves, segments or groups
    title: str
    data: dict[str, Any]


@dataclass
class Record:
    """Everything written down of one rank."""

    rank: int
    steps: list[tuple[str, float]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sentences: list[tuple[int, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def value_of(name: str, x: Any) -> Value:
    """What is said of a tensor, a list of tensors, or a plain value."""
    if isinstance(x, Tensor):
        return Value(name, _shape(x), _first(x), _hash([x]), x.numel() * x.element_size())
    if isinstance(x, Sequence) and x and all(isinstance(each, Tensor) for each in x):
        size = sum(each.numel() * each.element_size() for each in x)
        shapes = list(dict.fromkeys(map(_shape, x)))
        shape = shapes[0] if len(shapes) == 1 else ", ".join(shapes)
        return Value(name, f"{len(x)} x {shape}", _first(x[0]), _hash(x), size)
    if isinstance(x, Sequence) and not isinstance(x, str) and not len(x):
        return Value(name, "nothing", "", "", 0)
    return Value(name, type(x).__name__, _plain(x), "", 0)


def _plain(x: Any) -> str:
    if isinstance(x, float):
        return f"{x:.6g}"
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(_plain, x)) + "]"
    return str(x)


def _shape(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _first(x: Tensor, count: int = 4) -> str:
    flat = x.detach().reshape(-1)
    # Sixteen numbers fit a line when they are short; a long tensor shows its beginning.
    count = flat.numel() if flat.numel() <= 8 else count
    said = " ".join(f"{number:.4g}" for number in flat[:count].tolist())
    return said if flat.numel() <= count else said + " ..."


def _hash(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for each in tensors:
        # A clone, since a single number may have any stride and still be called contiguous.
        plain = each.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
        raw = plain.to("cpu").view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
