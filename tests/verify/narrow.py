"""Narrow precision: mistakes of mixed precision put into the engine, and what `verify` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.launch import workers
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, Unit, build_model
from phalanx.parallel.pieces import Piece
from phalanx.program import Op
from phalanx.train.executor import Executor
from phalanx.train.optimizer import Update
from phalanx.train.precision import LossScale
from phalanx.verify import Trace, Verdict, batch_of
from phalanx.verify.faults import swapped
from phalanx.verify.trial import Setting, join, program_in, train_layout
from phalanx.verify.verify import OPTIMIZERS, Truth, judge, precision_named

Patch = Callable[[], AbstractContextManager[None]]


def setting_of(shape: Shape, dtype: str, *, steps: int = 3, optimizer: str = "adamw") -> Setting:
    precision = precision_named(dtype)
    return Setting(
        partial(batch_of, shape, dtype=precision.compute),
        steps=steps, precision=precision, optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip


def trained(layout: str, shape: Shape, setting: Setting) -> Trace:
    where, make = Layout.parse(layout), partial(build_model, shape)
    program = program_in(where, make, setting)
    with workers(where.ranks, wire="threads") as run:
        return join(run(train_layout, where, program, make, setting), setting.steps)


def verdict_of(layout: str, shape: Shape, setting: Setting, truth: Truth) -> Verdict:
    return judge(Layout.parse(layout), trained(layout, shape, setting), truth, setting)


# ---- mistakes. Those of the first group show in any layout, those of the second in a scenario.


def stale_copy() -> AbstractContextManager[None]:
    """Updates reach the master weights, and the copy to compute with stays the first one."""
    right = Update.__call__

    def update(self: Update, lr: float, scale: float) -> None:
        self.unit.refresh = lambda: None  # type: ignore[method-assign]
        right(self, lr, scale)

    return swapped(Update, "__call__", update)


def masters_not_kept() -> AbstractContextManager[None]:
    """After each update the weights are rounded to what is computed in."""
    right = Update.__call__

    def update(self: Update, lr: float, scale: float) -> None:
        right(self, lr, scale)
        home = self.unit.home
        home.copy_(home.to(self.unit.precision.compute))
        self.unit.refresh()

    return swapped(Update, "__call__", update)


def norm_not_unscaled() -> AbstractContextManager[None]:
    """The norm, and with it clipping, is that of the gradient times the loss scale."""
    right = Executor._agree

    def agree(self: Executor, op: Op) -> None:
        right(self, op)
        assert self.norm is not None
        self.norm *= self._loss_scale
        self.scale = min(1.0, self.clip / (self.norm + 1e-6)) / self._loss_scale

    return swapped(Executor, "_agree", agree)


def stage_divides() -> AbstractContextManager[None]:
    """A loss that is divided by the count of tokens is divided by the number of microbatches too."""
    right = Piece.seed
    return swapped(Piece, "seed", lambda self, m, scale: right(self, m, scale / 3))


def middle_stage_divides() -> AbstractContextManager[None]:
    """What comes back to the first stage has been divided by the number of microbatches."""
    right = Executor._send

    def send(self: Executor, op: Op) -> Any:
        if op.of != "F":
            self.outgoing["B", op.piece, op.index].div_(3)
        return right(self, op)

    return swapped(Executor, "_send", send)


def scale_doubles_every_step() -> AbstractContextManager[None]:
    def saw(self: LossScale, *, finite: bool) -> None:
        self.scale *= 2 if finite else 0.5

    return swapped(LossScale, "saw", saw)


def gradients_not_unscaled() -> AbstractContextManager[None]:
    """The update takes the gradient times the loss scale."""
    right = Update.__call__

    def update(self: Update, lr: float, scale: float) -> None:
        right(self, lr, scale * 1024)

    return swapped(Update, "__call__", update)


def added_in_compute_dtype() -> AbstractContextManager[None]:
    """Gradients of microbatches are added up in what is computed in."""
    right = Unit.__init__

    def init(
        self: Unit,
        number: int,
        weights: Any,
        wires: Any,
        pool: Any,
        precision: Precision,
        **more: Any,
    ) -> None:
        narrow = replace(precision, reduce=precision.compute)
        right(self, number, weights, wires, pool, narrow, **more)

    return swapped(Unit, "__init__", init)


@contextmanager
def none() -> Iterator[None]:
    yield


# ---- the scenario in which adding up in 16 bits shows

ACCUMULATED = 512  # microbatches
DEEP = Shape("deep", kind="mlp", layers=3, hidden=16, batch=ACCUMULATED)


def one_large_many_small(step: int, *, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Rows of which the first has a gradient that is large enough for each of the others to be
    rounded away beside it, though together they are a good part of the sum."""
    row = torch.randn(1, DEEP.hidden, generator=torch.Generator().manual_seed(step))
    rows = row.repeat(ACCUMULATED, 1)
    # The gradient grows with the square; half a unit in the last place is eps / 2.
    rows[0] *= (3 / torch.finfo(dtype).eps) ** 0.5
    return {"inputs": rows.to(dtype)}


def accumulation_setting(dtype: str) -> Setting:
    precision = precision_named(dtype)
    batches = partial(one_large_many_small, dtype=precision.compute)
    return Setting(batches, steps=1, precision=precision, scaling=(1.0, 2))
