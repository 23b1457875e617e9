"""Tries a plan for tp before the first step: whole, and on ranks that are threads of this process.

A plan may shard a linear that the code of its module uses otherwise than it seems. Then every rank
computes something, without an error. Therefore one block of each kind runs forward and backward with
random weights, whole and in parts. The loss and every gradient must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import RankFailed, World
from ..comm.threads import run_threads
from ..layout import Layout, LayoutError
from .kinds import one_of_each
from .model import Model
from .probe import bind_part, bind_weights, loss_of, random_weight, run_pieces
from .tensor import cut_weights, install_regions

Batch = Mapping[str, Tensor]
_SECONDS = 120.0  # that a rank waits for another one
# Of the largest value; sums in another order differ by less.
_APART = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass(frozen=True)
class _PlanRun:
    """The loss of a trial, and the gradient of each weight or of a rank's part of it."""

    loss: float
    gradients: Mapping[str, Tensor]


def refuse_wrong_plan(model: Model, layout: Layout, batch: Batch) -> None:
    """Raise a LayoutError if a plan for tp makes a module without a description compute something else."""
    # The smallest factor of tp: a trial on fewer ranks costs less.
    size = next(n for n in range(2, layout.tp + 1) if layout.tp % n == 0)
    trial = _PlanTrial.of(model, Layout.parse(f"tp{size}"), batch)
    with torch.device("cpu"):
        if wrong := trial.wrong():
            raise LayoutError(
                f"{wrong}. Leave out of the plan for tp what the module uses otherwise than as q, k, v or the"
                " width of an MLP, or use no tp."
            )


@dataclass(frozen=True)
class _PlanTrial:
    """One piece of each kind with random weights, and a batch."""

    model: Model
    layout: Layout
    weights: Mapping[str, Tensor]
    batch: Batch

    @classmethod
    def of(cls, model: Model, layout: Layout, batch: Batch) -> _PlanTrial:
        few = one_of_each(model)
        dtype = next(iter(few.weights.values())).dtype
        # At least float32, so that rounding cannot pass for a mistake.
        dtype = torch.promote_types(dtype, torch.float32)
        weights = {
            n: random_weight(n, x.shape, dtype) for n, x in few.weights.items()
        }
        cast = {
            n: x.to(dtype) if x.is_floating_point() else x
            for n, x in batch.items()
        }
        return cls(few, layout, weights, cast)

    def wrong(self) -> str:
        """The first difference between one process and ranks of tp, in a sentence; "" if there is none."""
        whole = self._alone()
        try:
            ranks = run_threads(_on_rank, self.layout.tp, (self,), _SECONDS, 0)
        except RankFailed as failed:
            return f"a trial of {self.layout} fails: {failed.reports[0].error}"
        for rank, run in enumerate(ranks):
            if found := self._difference(whole, run, rank):
                return found
        return ""

    def _difference(self, whole: _PlanRun, run: _PlanRun, rank: int) -> str:
        within = _APART[next(iter(self.weights.values())).dtype]
        if abs(run.loss - whole.loss) > within * max(abs(whole.loss), 1e-30):
            return (
                f"with this plan the loss of a trial in {self.layout} is {run.loss:.10g}, and on one"
                f" process {whole.loss:.10g}"
            )
        held = cut_weights(self.model, self.layout, {"tp": rank})
        for name, gradient in run.gradients.items():
            want = whole.gradients[name]
            part = want[held[name].box]
            # A rank's gradient may be padded behind its part of the weight.
            inside = tuple(slice(0, n) for n in part.shape)
            apart = (gradient[inside] - part).abs().max()
            if apart > within * want.abs().max().clamp_min(1e-30):
                return f"with this plan the gradient of {name} is another one in {self.layout}"
        return ""

    def _alone(self) -> _PlanRun:
        model = one_of_each(self.model)
        weights = {n: nn.Parameter(x.clone()) for n, x in self.weights.items()}
        bind_weights(model, weights)
        loss = loss_of(run_pieces(model, self.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return _PlanRun(float(loss.detach()), _gradients(weights))

    def on_rank(self, world: World) -> _PlanRun:
        model, at = one_of_each(self.model), {"tp": world.rank}
        group = world.split("plan trial", [range(world.size)])
        held = cut_weights(model, self.layout, at)
        groups: Any = SimpleNamespace(tp=group)
        # The same calls as in `build_local`, without units.
        install_regions(model, self.layout, groups)
        parts = bind_part(
            model, self.layout, held, self.weights, at, trained=True
        )
        loss = loss_of(run_pieces(model, self.batch))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = _gradients(parts)
        # Copies that saw other heads or features have parts of the gradient.
        for name, weight in held.items():
            if weight.adds:
                group.all_reduce(gradients[name])
        return _PlanRun(float(loss.detach()), gradients)


def _gradients(weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in weights.items()
    }


def _on_rank(world: World, trial: _PlanTrial) -> _PlanRun:
    return trial.on_rank(world)
