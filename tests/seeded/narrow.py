"""Seeded faults of mixed precision: computation in 16 bits, master weights in 32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from phalanx.comm import Work
from phalanx.parallel.data import Unit
from phalanx.parallel.pieces import Piece
from phalanx.program import Op, ops
from phalanx.training.executor import Executor
from phalanx.training.optimizer import Scale, Update

from .fault import HALVES, fault, swapped


def _stale_copy() -> AbstractContextManager[None]:
    right = Update.__call__

    def update(self: Update, lr: float, scale: Scale | None) -> None:
        self.unit.refresh = lambda: None  # type: ignore[method-assign]
        right(self, lr, scale)

    return swapped(Update, "__call__", update)


STALE = "updates reach the master weights but not the compute copy"
for where in ("dp2", "pp2 1f1b:3"):
    fault(
        STALE,
        "gqa",
        where,
        "step 2: the output of embed",
        dtypes=("bfloat16",),
    )(_stale_copy)
    # The only update before step 2 is that of step 0, too small for 16 bits; step 1 is
    # skipped.
    fault(STALE, "gqa", where, "the validation loss", dtypes=("float16",))(
        _stale_copy
    )


def _masters_not_kept() -> AbstractContextManager[None]:
    right = Update.__call__

    def update(self: Update, lr: float, scale: Scale | None) -> None:
        right(self, lr, scale)
        home = self.unit.home
        home.copy_(home.to(self.unit.precision.compute))
        self.unit.refresh()

    return swapped(Update, "__call__", update)


ROUNDED = "weights are rounded to 16 bits after each update"
fault(ROUNDED, "gqa", "dp2", "step 0: the update of", dtypes=HALVES)(
    _masters_not_kept
)
fault(ROUNDED, "gqa", "dp2 zero1", "step 0: the update of", dtypes=HALVES)(
    _masters_not_kept
)


@fault(
    "the norm includes the loss scale",
    "gqa",
    "tp2",
    "step 0: the norm",
    dtypes=("float16",),
)
def _() -> AbstractContextManager[None]:
    right = Executor._use_sums

    def use_sums(self: Executor, *sums: Tensor) -> None:
        right(self, *sums)
        assert self.norm is not None
        self.norm = self.norm * self._loss_scale

    return swapped(Executor, "_use_sums", use_sums)


@fault(
    "the last stage divides the loss by the number of microbatches",
    "gqa",
    "pp2 1f1b:3",
    "step 0: the gradient of head.output",
    dtypes=HALVES,
)
def _() -> AbstractContextManager[None]:
    right = Piece.seed
    return swapped(
        Piece, "seed", lambda self, m, scale: right(self, m, scale / 3)
    )


@fault(
    "gradients are divided by the number of microbatches where they cross stages",
    "gqa",
    "pp2 1f1b:3",
    "step 0: the gradient of layers.1",
    dtypes=HALVES,
)
def _() -> AbstractContextManager[None]:
    right = Executor._send

    def send(self: Executor, op: Op) -> Any:
        if op.of != ops.FORWARD:
            self.outgoing[ops.BACKWARD, op.piece, op.index]["x"].div_(3)
        return right(self, op)

    return swapped(Executor, "_send", send)


@fault(
    "the update includes the loss scale",
    "gqa",
    "dp2",
    "step 0: the update of",
    dtypes=HALVES,
)
def _() -> AbstractContextManager[None]:
    right = Update.__call__

    def update(self: Update, lr: float, scale: Scale | None) -> None:
        assert scale is not None
        right(
            self,
            lr,
            scale._replace(
                factor=scale.factor * 1024, divisor=scale.divisor / 1024
            ),
        )

    return swapped(Update, "__call__", update)


def _too_large_by_a_twentieth() -> AbstractContextManager[None]:
    right = Unit.reduce

    def reduce(self: Unit) -> Work:
        larger = self.parameters.get("layers.2.attn.wq.weight")
        if larger is not None and larger.grad is not None:
            larger.grad.mul_(1.05)
        return right(self)

    return swapped(Unit, "reduce", reduce)


# Perturbation bounds miss these faults; the replay of a layout's own roundings finds
# them.
TWENTIETH = "the gradient of one weight is 5 % too large"
for where in (
    "dp2 zero1",
    "pp2 1f1b:3",
    "dp2 zero3 accum:2",
    "tp2",
    "dp2 tp2 seq zero1",
    "cp2",
):
    fault(
        TWENTIETH,
        "gqa",
        where,
        "layers.2.attn.wq.weight",
        dtypes=("bfloat16",),
    )(_too_large_by_a_twentieth)
