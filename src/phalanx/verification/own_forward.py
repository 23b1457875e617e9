"""Computes a user's model on one process with its class's own forward instead of the
pieces."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel import Model
from ..parallel.whole import Whole
from .reference import Batch, Passed, Pieces, Weights, project


class OwnForward:
    """The forward of a class that was found to agree with its description.

    A batch with entries that this forward does not accept, such as documents, goes
    through the pieces. The pieces' outputs are compared where the class calls them as
    modules.
    """

    def __init__(self, whole: Whole, model: Model) -> None:
        self.whole, self.model = whole, model
        self.bound: Weights | None = None
        numbers = range(len(model.pieces))
        # Everything that some piece would read of a batch.
        self.entries = {
            name for number in numbers for name in model.takes(number)
        }
        self.pieces: Pieces | None = None

    @property
    def name(self) -> str:
        return self.whole.name

    def takes(self, batch: Batch) -> bool:
        """True if this forward would use everything in the batch."""
        if self.model.as_it_is:
            return True  # its pieces, too, get only what this forward names
        # An entry that the pieces read and the forward does not would change
        # the result.
        if self.whole.unread(self.entries & batch.keys()):
            return False
        positions = batch.get("positions")
        if positions is None or "positions" in self.whole.arguments.values():
            return True
        counted = torch.arange(positions.shape[1]).expand_as(positions)
        # the positions that the forward computes itself
        return torch.equal(positions, counted)

    def __call__(self, weights: Weights, batch: Batch) -> Passed:
        # Rebound only if the weights are other ones: a training uses the same
        # throughout.
        if self.bound is not weights:
            self.whole.bind(dict(weights))
            self.pieces, self.bound = Pieces(self.model, weights), weights
        assert self.pieces is not None
        if not self.takes(batch):
            return self.pieces(weights, batch)
        passed = Passed(torch.zeros(()))
        # Hooks are removed even if the forward raises.
        with ExitStack() as hooks:
            for number, module in self.whole.parts.items():
                hook = partial(
                    self._gave, passed, self.model.pieces[number][0]
                )
                hooks.callback(module.register_forward_hook(hook).remove)
            passed.loss = self.whole.loss(batch)
        return passed

    @staticmethod
    def _gave(
        passed: Passed, name: str, module: nn.Module, args: Any, out: Any
    ) -> None:
        # Blocks of transformers may return (hidden states, ...).
        x: Tensor = out[0] if isinstance(out, tuple) else out
        if x.dim():
            passed.outputs[name] = project(x)
