"""A layout trained as `verify` does it, with or without a fault in it, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

from phalanx.comm.launch import workers
from phalanx.layout import Layout, Shape
from phalanx.layout.choices import COMPARED
from phalanx.parallel import build_model
from phalanx.verify import SHAPES, Trace, Verdict, batch_of
from phalanx.verify.low_precision import sums_of
from phalanx.verify.trial import Setting, join, program_in, train_layout
from phalanx.verify.verify import OPTIMIZERS, Truth, judge, precision_named, setting_for, truth_of

from .fault import Fault


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


def setting_of(
    shape: Shape,
    dtype: str = "float64",
    *,
    steps: int = 3,
    optimizer: str = "adamw",
    packed: bool = False,
    noisy: bool = False,
) -> Setting:
    """What `verify` trains with in this dtype. `noisy` batches have what dropout draws from."""
    precision = precision_named(dtype)
    return Setting(
        partial(batch_of, shape, dtype=precision.compute, packed=packed, noisy=noisy),
        steps=steps, precision=precision, optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip


@cache
def truth(
    name: str,
    dtype: str = "float64",
    optimizer: str = "adamw",
    packed: bool = False,
    dropout: float = 0.0,
    matmul: str = "",
    cuts: Layout | None = None,
) -> Truth:
    """What one process does with one of `verify`'s shapes; trained once."""
    shape = SHAPES[name]
    setting = setting_of(shape, dtype, optimizer=optimizer, packed=packed, noisy=dropout > 0)
    return truth_of(partial(build_model, shape, dropout=dropout), setting, matmul, cuts)


def trained(layout: Layout, shape: Shape, setting: Setting, dropout: float = 0.0) -> Trace:
    """What a layout does, on ranks that are threads."""
    make = partial(build_model, shape, dropout=dropout)
    program = program_in(layout, make, setting)
    with workers(layout.ranks, backend="threads") as run:
        return join(run(train_layout, layout, program, make, setting), setting.steps)


def verdict_of(layout: str, shape: Shape, setting: Setting, known: Truth) -> Verdict:
    where = Layout.parse(layout)
    return judge(where, trained(where, shape, setting), known, setting)


def catch(fault: Fault, dtype: str) -> Catch:
    """Run the fault's layout with the fault in it, and compare."""
    shape, dropout = SHAPES[fault.shape], fault.dropout
    layout = replace(fault.layout, precision=COMPARED[dtype])
    noisy, by = dropout > 0, fault.optimizer
    setting = setting_of(shape, dtype, optimizer=by, packed=fault.packed, noisy=noisy)
    setting = setting_for(layout, setting)
    cuts = sums_of(layout) if layout.matmul else None
    known = truth(fault.shape, dtype, by, fault.packed, dropout, layout.matmul, cuts)
    with fault.patch():
        got = trained(layout, shape, setting, dropout)
    verdict = judge(layout, got, known, setting)
    losses = [abs(a.loss / b.loss - 1) for a, b in zip(got.steps, known.trace.steps, strict=True)]
    return Catch(
        fault.name, verdict.layout, not verdict.passed, fault.names in verdict.first_difference,
        verdict.first_difference, losses[0], max(losses),
    )  # fmt: skip
