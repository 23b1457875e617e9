"""A run's own executor: it agrees on more than the norm, looks for what is not finite, validates.

How operations are carried out is in `executor.py`; which steps there are is in `loop.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..parallel import Unit
from ..parallel.local import Holding
from ..program import Op, Program
from .executor import Batch, Executor, StepResult

__all__ = ["Trainer", "Validator"]

Ranges = Callable[[str], Any]


class Trainer(Executor):
    """An executor that trains, with the norm, the loss of all ranks and whether any wants to stop.

    A loss that is not finite spoils the step as a gradient does: no rank updates anything.
    """

    wants_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    ranges: Ranges = nullcontext

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.total, self.stops = 0.0, False
        self.bad_units: list[int] = []
        return super().step(batches, lr)

    def _perform(self, op: Op) -> None:
        with self.ranges(str(op)):
            super()._perform(op)

    def _said(self) -> Sequence[float]:
        return self.loss, self.wants_to_stop()

    def _heard(self, sums: Sequence[float]) -> None:
        self.total, self.stops = sums[0] / self.count, bool(sums[1])
        if not math.isfinite(self.total):
            self.norm = math.nan

    def _update(self, op: Op) -> None:
        if self.norm is not None and not math.isfinite(self.norm):
            gradient = self.holding.units[op.piece].gradient
            if gradient is not None and not bool(gradient.isfinite().all()):
                self.bad_units.append(op.piece)
        super()._update(op)


class _Nothing:
    """The optimizer of a program that updates nothing."""

    def of(self, unit: Unit) -> Callable[[float, float], None]:
        return lambda lr, scale: None


class Validator(Executor):
    """Forward only: the loss of a batch over all ranks, and which pieces put out what is not finite."""

    def __init__(self, holding: Holding, program: Program, rank: int, **told: Any) -> None:
        super().__init__(holding, program, rank, _Nothing(), **told)
        self.watches = False
        self.bad_pieces: list[int] = []

    def mean_loss(self, batches: Iterable[Sequence[Batch]]) -> float | None:
        """The mean loss over all valid targets of these batches and all ranks; None without any."""
        losses, targets = 0.0, 0.0
        for own in batches:
            loss, count = self.loss_of(own)
            losses, targets = losses + loss, targets + count
        return losses / targets if targets else None

    def loss_of(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """The sum of the losses and the count of the targets, over all ranks."""
        result = self.step(batches, 0.0)
        wire = self.holding.wires.everyone
        total = torch.tensor([result.loss], dtype=torch.float64, device=wire.device)
        wire.all_reduce(total)
        return float(total), self.count

    def bad(self, batches: Sequence[Batch]) -> list[int]:
        """The pieces of this rank whose output is not finite on these microbatches."""
        self.watches, self.bad_pieces = True, []
        self.step(batches, 0.0)
        self.watches = False
        return self.bad_pieces

    def _pass_on(self, way: str, p: int, to: int, m: int, x: Tensor) -> None:
        self._watch(p, x)
        super()._pass_on(way, p, to, m, x)

    def _own_loss(self, y: Tensor) -> float:
        self._watch(self.program.pieces - 1, y)
        return super()._own_loss(y)

    def _watch(self, piece: int, x: Tensor) -> None:
        if self.watches and piece not in self.bad_pieces and not bool(x.isfinite().all()):
            self.bad_pieces.append(piece)
