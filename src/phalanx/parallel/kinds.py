"""Kinds of pieces: pieces of one kind are equal, and have equal costs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import nn

from .model import Model


def alike(model: Model) -> tuple[int, ...]:
    """The kind of each piece, numbered in the order in which kinds first occur."""
    kinds: dict[Any, int] = {}
    # setdefault numbers a new signature with the count of the ones before it.
    return tuple(
        kinds.setdefault(signature, len(kinds))
        for signature in signatures(model)
    )


def signatures(model: Model) -> list[tuple[Any, ...]]:
    """A hashable value for each piece, equal for pieces with equal costs."""
    names = {parameter: name for name, parameter in model.weights.items()}
    return [
        _signature(model, number, names) for number in range(len(model.pieces))
    ]


def _signature(
    model: Model, number: int, names: Mapping[nn.Parameter, str]
) -> tuple[Any, ...]:
    """Everything a piece's cost depends on: modules, attributes, weights, buffers.

    Attributes that begin with _ are private to a module: our blocks keep their number
    in one.
    """
    module = model.pieces[number][1]
    parts = []
    for path, child in module.named_modules():
        # Sizes, words and functions; weights and buffers follow below.
        facts = tuple(
            (key, _hashable(value))
            for key, value in sorted(vars(child).items())
            if not key.startswith("_") and _plain(value)
        )
        weights = tuple(
            (
                key,
                tuple(p.shape),
                p.dtype,
                p.requires_grad,
                model.rules.dims(names[p], p.dim()),
            )
            for key, p in child.named_parameters(recurse=False)
        )
        buffers = tuple(
            (key, tuple(b.shape))
            for key, b in child.named_buffers(recurse=False)
        )
        parts.append((path, type(child), facts, weights, buffers))
    # The first and the last piece have edges of their own, whatever their modules.
    edge = number == 0, number == len(model.pieces) - 1
    tied = tuple(unit for piece, unit in model.tied if piece == number)
    return (*edge, tied, tuple(parts))


def _plain(value: object) -> bool:
    """True for a value that can distinguish modules: sizes, or an activation."""
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | FunctionType | None)


def _hashable(value: Any) -> Any:
    """A hashable value that is equal for values with the same effect.

    A function created anew for each module, such as a lambda in a constructor, is known
    by its code and its closure.
    """
    if isinstance(value, tuple | list):
        return tuple(map(_hashable, value))
    if not isinstance(value, FunctionType):
        return value
    # Two lambdas of one line have the same code; what they captured tells them apart.
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return value.__code__, tuple(
        _hashable(x) if _plain(x) else id(x) for x in cells
    )


def one_of_each(model: Model) -> Model:
    """A separate model with the first piece of every kind."""
    kinds = alike(model)
    firsts = [kinds.index(kind) for kind in range(max(kinds) + 1)]
    # Copied, because a trial changes modules; the copies of a tied weight stay one.
    pieces = copy.deepcopy(tuple(model.pieces[n] for n in firsts))
    return replace(model, pieces=pieces)
