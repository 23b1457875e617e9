"""The forward of a whole model on one process, piece by piece.

Its modules hold whole weights. Training does the same with the pieces of one rank
(`pieces.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .model import EVERY, Model


class Inputs:
    """The inputs of each piece in turn: what earlier pieces returned, and entries of
    the batch."""

    def __init__(self, model: Model, batch: Mapping[str, Tensor]) -> None:
        self.model, self.batch = model, batch
        self.bundle: dict[str, Tensor] = {}

    def of(self, number: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the arguments of a piece, by position and by name."""
        names = self._names(number)
        # From the bundle first, then from the batch.
        first = names[:1]
        mine = [self.bundle[name] for name in first if name in self.bundle]
        rest = names[len(mine) :]
        named = {n: x for n, x in self.bundle.items() if n in rest}
        unheld = [name for name in names if name not in self.bundle]
        entries = self.batch if EVERY in names else unheld
        named |= {n: self.batch[n] for n in entries if n in self.batch}
        return mine, named

    def gave(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Pass on the outputs of a piece, and what it has not taken."""
        taken = self._names(number)
        past = {n: x for n, x in self.bundle.items() if n not in taken}
        self.bundle = past | dict(tensors)

    def _names(self, number: int) -> tuple[str, ...]:
        # As in `Piece._taken`: the first argument is x unless the bundle has its name.
        takes = self.model.takes(number)
        if not number or takes[0] in self.bundle:
            return takes
        return ("x", *takes[1:])


def forward_loss(
    model: Model, batch: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the summed loss of a batch's targets, computed in `dtype`.

    Modules that predict later tokens do not run: the head computes the next token's
    loss alone.
    """
    # As training does: what depends on the batch alone is computed once.
    made = {name: make(batch, dtype) for name, make in model.derived.items()}
    derived = {name: x for name, x in made.items() if x is not None}
    inputs = Inputs(model, {**batch, **derived})
    given: dict[str, Tensor] = {}
    skipped = _modules(model)
    for number, (_, piece) in enumerate(model.pieces):
        if number in skipped:
            continue
        mine, named = inputs.of(number)
        given = tensors_of(piece(*mine, **named))
        inputs.gave(number, given)
    return next(iter(given.values()))


def _modules(model: Model) -> range:
    """The pieces that predict later tokens: those between the blocks and the head."""
    if model.shape is None or not model.shape.predictors:
        return range(0)
    last = len(model.pieces) - 1
    return range(1 + model.shape.layers, last)


def tensors_of(out: Any) -> dict[str, Tensor]:
    """The tensors of an output by name. A single tensor is named x."""
    if isinstance(out, Tensor):
        return {"x": out}
    items = (
        out.items()
        if isinstance(out, Mapping)
        else enumerate(out)
        if isinstance(out, tuple)
        else ()
    )
    return {str(key): x for key, x in items if isinstance(x, Tensor)}
