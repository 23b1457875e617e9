"""A layout run with a fault in it: whether `verify` says so, and how far the losses alone are off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..comm.launch import workers
from ..layout.cases import SHAPES
from ..parallel import Precision, build_model
from . import faults_of_order as _enters_more  # noqa: F401
from .cases import batch_of
from .faults import Fault
from .trial import Setting, join, program_in, train_layout
from .verify import judge, truth_of

__all__ = ["Catch", "catch"]


@dataclass(frozen=True)
class Catch:
    """What became of a fault: what verify says, and how far the losses alone are off."""

    fault: str
    layout: str
    caught: bool
    named: bool
    first_difference: str
    first_loss_error: float
    loss_error: float


def catch(fault: Fault) -> Catch:
    """Run a layout with the fault in it."""
    shape = SHAPES[fault.shape]
    wide = Precision(torch.float64, torch.float64, torch.float64)
    noisy = fault.dropout > 0
    batches = partial(batch_of, shape, packed=fault.packed, noisy=noisy)
    setting = Setting(batches, precision=wide)
    make = partial(build_model, shape, dropout=fault.dropout)
    truth = truth_of(make, setting)
    with fault.patch(), workers(fault.layout.ranks, wire="threads") as run:
        program = program_in(fault.layout, make, setting)
        seen = run(train_layout, fault.layout, program, make, setting)
    got = join(seen, setting.steps)
    verdict = judge(fault.layout, got, truth, setting)
    losses = [abs(a.loss / b.loss - 1) for a, b in zip(got.steps, truth.trace.steps, strict=True)]
    return Catch(
        fault.name, verdict.layout, not verdict.passed, fault.names in verdict.first_difference,
        verdict.first_difference, losses[0], max(losses),
    )  # fmt: skip
