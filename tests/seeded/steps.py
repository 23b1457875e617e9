"""Seeded faults that depend on the step, or on numbers that every rank must know.

Clipping that does not apply, steps without targets, and steps that float16 skips.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from phalanx.comm import Work
from phalanx.models import loss
from phalanx.parallel import Unit, count_valid
from phalanx.parallel.pool import BufferPool
from phalanx.parallel.works import ChainedWork
from phalanx.program import Op
from phalanx.training.executor import Executor
from phalanx.training.matrices import MatrixUpdate
from phalanx.training.muon import MuonUpdate
from phalanx.training.optimizer import Scale
from phalanx.training.precision import LossScale

from .fault import counted_by, fault, swapped

HALF = ("float16",)


def _of_scale(
    wrong: Callable[[Scale, Tensor, float, float], Scale],
) -> AbstractContextManager[None]:
    right = Scale.of

    def of(norm: Tensor, clip: float, loss_scale: float) -> Scale:
        return wrong(right(norm, clip, loss_scale), norm, clip, loss_scale)

    return swapped(Scale, "of", staticmethod(of))


# ---- clipping


def _with_factor(scale: Scale, factor: Tensor) -> Scale:
    return scale._replace(factor=factor, divisor=factor.reciprocal().float())


@fault(
    "gradients below the limit are scaled up to it",
    "gqa",
    "dp2",
    "step 1: the weight of head",
)
def _() -> AbstractContextManager[None]:
    def unclamped(
        right: Scale, norm: Tensor, clip: float, loss_scale: float
    ) -> Scale:
        return (
            _with_factor(right, clip / (norm + 1e-6) / loss_scale)
            if clip
            else right
        )

    return _of_scale(unclamped)


@fault(
    "gradients are clipped although no limit is set",
    "mlp",
    "dp2",
    "step 2: the weight of layers",
)
def _() -> AbstractContextManager[None]:
    right = Scale.of

    def of(norm: Tensor, clip: float, loss_scale: float) -> Scale:
        return right(norm, clip or 0.1, loss_scale)

    return swapped(Scale, "of", staticmethod(of))


# ---- steps without targets


@fault(
    "a step without a target divides by zero",
    "gqa",
    "dp2",
    "step 2: the gradient of head",
)
def _() -> AbstractContextManager[None]:
    right = Executor._backward

    def backward(self: Executor, op: Op) -> None:
        if float(self.count) == 0.0:
            self.divisor = torch.full_like(self.count, float("nan"))
        right(self, op)

    return swapped(Executor, "_backward", backward)


@fault(
    "ranks without a target take no part in the count",
    "gqa",
    "dp4",
    "step 1: the loss",
)
def _() -> AbstractContextManager[None]:
    def count(batch: Any) -> Tensor:
        return count_valid(batch).clamp(min=1)

    return counted_by(count)


# ---- numbers that every rank knows


@fault(
    "the logged loss is divided by the ranks of tp",
    "gqa",
    "tp2",
    "step 0: the logged loss",
)
def _() -> AbstractContextManager[None]:
    right = Executor._use_sums

    def use_sums(self: Executor, *sums: Tensor) -> None:
        right(self, *sums)
        self.sums["total"] = self.sums["total"] / self.local.groups.tp.size

    return swapped(Executor, "_use_sums", use_sums)


@fault("the last rank logs its own loss", "gqa", "dp2", "the logged loss is")
def _() -> AbstractContextManager[None]:
    right = Executor._use_sums

    def use_sums(self: Executor, *sums: Tensor) -> None:
        right(self, *sums)
        if self.rank:
            self.sums["total"] = self.loss / self.count.clamp(min=1.0)

    return swapped(Executor, "_use_sums", use_sums)


@fault(
    "the norm counts every replica", "gqa", "dp2x2 zero2", "step 0: the norm"
)
def _() -> AbstractContextManager[None]:
    right = Executor._agree

    class First:
        rank = 0

        def __init__(self, group: Any) -> None:
            self.group = group

        def __getattr__(self, name: str) -> Any:
            return getattr(self.group, name)

    def agree(self: Executor, op: Op) -> Work:
        units = self.local.units.values()
        kept = [unit.groups for unit in units]
        for unit in units:
            first: Any = First(unit.groups.replica)
            unit.groups = replace(unit.groups, replica=first)
        work = right(self, op)
        for unit, groups in zip(units, kept, strict=True):
            unit.groups = groups
        return work

    return swapped(Executor, "_agree", agree)


@fault(
    "a tied weight is in the norm of both stages",
    "gpt",
    "pp2 1f1b:3",
    "step 0: the norm",
)
def _() -> AbstractContextManager[None]:
    right = Executor._agree

    class Anywhere(dict[int, int]):
        """Mapping that hosts every piece here."""

        def __init__(self, stage: int) -> None:
            self.stage = stage

        def __getitem__(self, piece: int) -> int:
            return self.stage

    def agree(self: Executor, op: Op) -> Work:
        program = self.program
        here = Anywhere(program.owner[self.rank])
        self.program = SimpleNamespace(owner=program.owner, host=here)  # type: ignore[assignment]
        work = right(self, op)
        self.program = program
        return work

    return swapped(Executor, "_agree", agree)


@fault(
    "z-loss covers only a rank's part of the vocabulary",
    "gqa",
    "tp2",
    "step 0: the loss",
    z_loss=0.1,
)
def _() -> AbstractContextManager[None]:
    def token_sums(
        logits: Tensor, targets: Tensor, terms: loss._Terms
    ) -> loss._TokenSums:
        sums = loss._shared_sums(logits, targets, terms)
        assert sums.own is not None
        of_z = terms.z * sums.own[:, 0].square() * (targets != -100)
        return sums._replace(losses=sums.losses + of_z)

    return swapped(loss, "_token_sums", token_sums)


# ---- uninitialized memory


@fault(
    "gradients are added to uninitialised memory",
    "gqa",
    "dp2 zero1",
    " is nan, one process has",
)
def _() -> AbstractContextManager[None]:
    """Reuse memory without zeroing it.

    Fresh pages are zeros, so without poison the first step does not show the fault.
    """
    right = BufferPool.take

    class Unwritten(Tensor):
        def zero_(self) -> Tensor:
            return self.as_subclass(Tensor)

    def take(self: BufferPool, numel: int, dtype: torch.dtype) -> Tensor:
        return right(self, numel, dtype).as_subclass(Unwritten)

    return swapped(BufferPool, "take", take)


@fault(
    "the first gather is skipped",
    "gqa",
    "dp2 zero3",
    " is nan, one process has",
)
def _() -> AbstractContextManager[None]:
    right = Unit.gather

    def gather(self: Unit) -> Work:
        if self.number != 1 or vars(self).setdefault("gathers", 0):
            return right(self)
        vars(self)["gathers"] = 1
        self._take()
        return Work()

    return swapped(Unit, "gather", gather)


@fault(
    "matrices that an owner did not receive are uninitialised memory",
    "gqa",
    "dp2 zero1",
    "step 0: the weight of layers.",
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    right = MatrixUpdate._exchange

    def exchange(
        self: MatrixUpdate, sent: Tensor, *parts: Any
    ) -> tuple[Tensor, Work]:
        came, work = right(self, sent, *parts)
        work.wait()
        return torch.empty_like(came), Work()

    return swapped(MatrixUpdate, "_exchange", exchange)


# ---- steps that float16 skips

SKIPPED = "step 1: the update of"
AFTER = "step 2: the update of"


@fault(
    "a step that overflows is not skipped", "gqa", "dp2", SKIPPED, dtypes=HALF
)
def _() -> AbstractContextManager[None]:
    def never(
        right: Scale, norm: Tensor, clip: float, loss_scale: float
    ) -> Scale:
        return right._replace(skip=right.skip * 0, done=right.done * 0 + 1)

    return _of_scale(never)


@fault(
    "a rank without an overflow does not skip the step",
    "gqa",
    "dp2",
    "on rank 0 and",
    dtypes=HALF,
)
def _() -> AbstractContextManager[None]:
    right = Executor._agree

    def agree(self: Executor, op: Op) -> Work:
        def own() -> None:
            if self.rank and self.scale:
                self.scale = self.scale._replace(skip=self.scale.skip * 0)

        return ChainedWork(right(self, op), own)

    return swapped(Executor, "_agree", agree)


def _counted(
    right: Scale, norm: Tensor, clip: float, loss_scale: float
) -> Scale:
    return right._replace(done=torch.ones_like(right.done))


@fault("Adam counts a skipped step", "gqa", "dp2", AFTER, dtypes=HALF)
def _() -> AbstractContextManager[None]:
    return _of_scale(_counted)


@fault(
    "Adam counts a skipped step", "gqa", "pp2 1f1b:3 zero1", AFTER, dtypes=HALF
)
def _() -> AbstractContextManager[None]:
    return _of_scale(_counted)


@fault(
    "muon: weights decay in a skipped step",
    "gqa",
    "dp2",
    SKIPPED,
    dtypes=HALF,
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    right = MatrixUpdate._apply

    def apply(self: MatrixUpdate, came: Tensor) -> None:
        if self.scale is not None and float(self.scale.skip):
            for _, view in self.matrix_runs:
                view.mul_(
                    1.0 - self.lr * self.settings.rate * self.settings.decay
                )
        right(self, came)

    return swapped(MatrixUpdate, "_apply", apply)


@fault(
    "muon: momentum decays in a skipped step",
    "gqa",
    "dp2",
    AFTER,
    dtypes=HALF,
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    right = MuonUpdate.contribution

    def momentum(
        self: MuonUpdate, view: Tensor, gradient: Tensor, scale: Scale | None
    ) -> Tensor:
        if scale is not None and float(scale.skip):
            kept = self.state.get(view, {})
            for buffer in [kept["momentum_buffer"]] if kept else ():
                buffer.mul_(self.muon.momentum)
        return right(self, view, gradient, scale)

    return swapped(MuonUpdate, "contribution", momentum)


@fault(
    "the loss scale is not halved",
    "gqa",
    "dp2",
    "step 2: the loss scale",
    dtypes=HALF,
)
def _() -> AbstractContextManager[None]:
    right = LossScale.saw

    def saw(self: LossScale, *, finite: bool) -> None:
        if finite:
            right(self, finite=True)

    return swapped(LossScale, "saw", saw)
