"""A run's own executor: it agrees on more than the norm, knows what was not finite first,
validates.

How operations are carried out is in `executor.py`; which steps there are is in `loop.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..models import Router
from ..parallel.local import LocalModel
from ..parallel.pieces import Bundle
from ..program import Op, Program, ops
from .executor import Batch, Executor, StepResult


class Trainer(Executor):
    """An executor that trains, with the norm, the loss of all ranks and whether any wants to stop.

    A loss that is not finite spoils the step as a gradient does: no rank updates anything.
    """

    wants_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    ranges: Callable[[str], Any] = nullcontext

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        self.sums_of: dict[tuple[str, int], Tensor] = {}  # of all that pieces put out, by way
        self.sums: tuple[Tensor, ...] = ()
        result = super().step(batches, lr)
        self.total, self.stops = self.read.get("total", 0.0), bool(self.read.get("stops"))
        return result

    def _numbers(self) -> dict[str, Tensor]:
        return super()._numbers() | dict(zip(("total", "stops"), self.sums, strict=False))

    def _perform(self, op: Op) -> None:
        if self.ranges is nullcontext:
            super()._perform(op)
            return
        with self.ranges(str(op)):
            super()._perform(op)

    def _summed_too(self) -> Sequence[Tensor]:
        return self.loss, torch.full_like(self.loss, float(self.wants_to_stop()))

    def _use_sums(self, sums: Tensor) -> None:
        total = sums[:1] / self.count.clamp(min=1.0)
        self.sums = total, sums[1:]
        assert self.norm is not None
        self.norm = self.norm.where(total.isfinite(), math.nan)

    # ---- where numbers stopped being finite

    def _pass_on(self, way: str, p: int, to: int, m: int, bundle: Bundle) -> None:
        for x in bundle.values():
            self._watch(way, p, x)
        super()._pass_on(way, p, to, m, bundle)

    def _add_loss(self, y: Tensor) -> None:
        self._watch(ops.FORWARD, self.program.pieces - 1, y)
        super()._add_loss(y)

    def _watch(self, way: str, piece: int, x: Tensor) -> None:
        # A sum is finite only if all its terms are. It is read after a bad step and never before: a
        # number that is bad once could not be found by computing the step again.
        total = x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32))
        known = self.sums_of.get((way, piece))
        self.sums_of[way, piece] = total if known is None else known + total

    def first_bad(self, names: Sequence[str]) -> tuple[int, str] | None:
        """What was the first that was not finite in the step just done, of what this rank made: how far
        along the step, and what it is, by the pieces' names. A gradient that ranks have summed is
        nobody's own."""
        pieces, units = self.program.pieces, self.local.units
        bad = {key for key, total in self.sums_of.items() if not math.isfinite(float(total))}
        causes = [(p, f"the output of piece {names[p]}") for way, p in bad if way == ops.FORWARD]
        gradients = [(p, 1) for way, p in bad if way == ops.BACKWARD]
        summed = (units[n] for n, norms in self.norms.items() if not norms.isfinite().all())
        gradients += ((u.piece, u.groups.reduce.size * u.groups.replica.size) for u in summed)
        for p, ranks in gradients:  # backward begins at the last piece
            several = f", a sum over {ranks} ranks of which any may have made it,"
            text = f"the gradient of piece {names[p]}{several if ranks > 1 else ''}"
            causes.append((3 * pieces - 2 * p + (ranks > 1), text))
        return min(causes, default=None)


class Validator(Executor):
    """Forward only: the loss of a batch over all ranks."""

    def __init__(self, local: LocalModel, program: Program, rank: int) -> None:
        super().__init__(local, program, rank, None)

    def mean_loss(self, batches: Iterable[Sequence[Batch]]) -> float | None:
        """The mean loss over all valid targets of these batches and all ranks; None without any."""
        losses, targets = 0.0, 0.0
        device, routers = self.local.groups.everyone.device, dict(self._routers())
        for router in routers.values():
            router.tally = torch.zeros(router.experts, dtype=torch.int64, device=device)
        for own in batches:
            loss, count = self.loss_of(own)
            losses, targets = losses + loss, targets + count
        # By piece, how often this rank's tokens chose each expert.
        self.chosen = {n: x.tally for n, x in routers.items() if x.tally is not None}
        for router in routers.values():
            router.tally = None
        return losses / targets if targets else None

    def _routers(self) -> Iterator[tuple[int, Router]]:
        for number, piece in self.local.pieces.items():
            yield from ((number, x) for x in piece.module.modules() if isinstance(x, Router))

    def loss_of(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """The sum of the losses and the count of the targets, over all ranks."""
        result = self.step(batches, 0.0)
        group = self.local.groups.everyone
        total = torch.tensor([result.loss], dtype=torch.float64, device=group.device)
        group.all_reduce(total)
        return float(total), result.count
