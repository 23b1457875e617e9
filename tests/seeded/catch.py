"""Training of a layout as in `verify`, with or without a seeded fault, and the
verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import nan

from phalanx.comm import RankFailed
from phalanx.layout import Layout, Shape
from phalanx.layout.choices import COMPARED
from phalanx.parallel import Model, build_model
from phalanx.training.program import with_z_loss
from phalanx.verification import SHAPES, Trace, Verdict
from phalanx.verification.cases import trial_batch
from phalanx.verification.low_precision import sums_of
from phalanx.verification.optimizers import OPTIMIZERS
from phalanx.verification.reference import PlainForward
from phalanx.verification.replay import can_be_replayed, replay, rounding_of
from phalanx.verification.trial import Setting, join, program_in, train_layout
from phalanx.verification.verify import (
    Truth,
    judge,
    precision_named,
    setting_for,
    truth_of,
    with_loss_scale,
    worlds_over,
)

from .fault import Fault


@dataclass(frozen=True)
class Catch:
    """Outcome of a fault: the finding of verify, and the errors of the losses.

    A fault is caught by a difference or by one of our refusals. An accident of the
    patched code, such as a NameError, does not count.
    """

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
    """Return the settings with which `verify` trains in this dtype. `noisy` batches
    include dropout noise."""
    precision = precision_named(dtype)
    setting = Setting(
        partial(trial_batch, shape, dtype=precision.compute, packed=packed, noisy=noisy),
        steps=steps, precision=precision, optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip
    return with_loss_scale(partial(build_model, shape), setting)


@cache
def truth(
    name: str,
    dtype: str = "float64",
    optimizer: str = "adamw",
    packed: bool = False,
    dropout: float = 0.0,
    matmul: str = "",
    cuts: Layout | None = None,
    z_loss: float = 0.0,
) -> Truth:
    """Return the reference run of one process on a shape of `verify`, trained once."""
    shape = SHAPES[name]
    setting = setting_of(
        shape, dtype, optimizer=optimizer, packed=packed, noisy=dropout > 0
    )
    plain = PlainForward(replace(shape, dropout=dropout), z_loss)
    return truth_of(
        _maker(shape, dropout, z_loss), setting, matmul, cuts, plain
    )


def _maker(shape: Shape, dropout: float, z_loss: float) -> Callable[[], Model]:
    plain = partial(build_model, replace(shape, dropout=dropout))
    return partial(with_z_loss, plain, z_loss) if z_loss else plain


def trained(
    layout: Layout,
    shape: Shape,
    setting: Setting,
    dropout: float = 0.0,
    z_loss: float = 0.0,
) -> Trace:
    """Train a layout on ranks that are threads."""
    make = _maker(shape, dropout, z_loss)
    program = program_in(layout, make, setting)
    with worlds_over("threads")(layout.ranks) as run:
        return join(
            run(train_layout, layout, program, make, setting), setting.steps
        )


def verdict_of(
    layout: str, shape: Shape, setting: Setting, known: Truth
) -> Verdict:
    where = Layout.parse(layout)
    return judge(where, trained(where, shape, setting), known, setting)


def catch(fault: Fault, dtype: str) -> Catch:
    """Train the fault's layout with the fault in place, and compare."""
    shape, dropout = SHAPES[fault.shape], fault.dropout
    layout = replace(fault.layout, precision=COMPARED[dtype])
    noisy, by = dropout > 0, fault.optimizer
    setting = setting_of(
        shape, dtype, optimizer=by, packed=fault.packed, noisy=noisy
    )
    setting = setting_for(layout, setting)
    cuts = sums_of(layout) if layout.matmul else None
    known = truth(
        fault.shape,
        dtype,
        by,
        fault.packed,
        dropout,
        layout.matmul,
        cuts,
        fault.z_loss,
    )
    make = _maker(shape, dropout, fault.z_loss)
    if can_be_replayed(layout, make(), setting):
        known = replace(
            known, replay=replay(make, setting, rounding_of(layout))
        )
    try:
        with fault.patch():
            got = trained(layout, shape, setting, dropout, fault.z_loss)
    except Exception as error:
        says = refusal_of(error)
        caught, said = (
            bool(says),
            says or f"an accident: {_first_error(error)}",
        )
        return Catch(
            fault.name,
            str(layout),
            caught,
            caught and fault.names in says,
            said,
            nan,
            nan,
        )
    verdict = judge(layout, got, known, setting)
    pairs = [
        (a.loss, b.loss)
        for a, b in zip(got.steps, known.trace.steps, strict=True)
    ]
    # a step may have no targets
    losses = [abs(a / b - 1) if b else abs(a) for a, b in pairs]
    return Catch(
        fault.name, verdict.layout, not verdict.passed, fault.names in verdict.first_difference,
        verdict.first_difference, losses[0], max(losses),
    )  # fmt: skip


def refusal_of(error: Exception) -> str:
    """Return the text of an error that phalanx raises after detecting something wrong,
    else "".

    An accident, such as a NameError or mismatched shapes, says nothing about the faults
    that `verify` can detect.
    """
    text = _first_error(error)
    kind = text.partition(":")[0]
    packages = ("phalanx.", "torch_shm.")
    ours = {
        each.__name__
        for each in _below(Exception)
        if each.__module__.startswith(packages)
    }
    return text if kind in ours else ""


def _below(error: type[Exception]) -> Iterator[type[Exception]]:
    """Yield all subclasses of an error."""
    for each in error.__subclasses__():
        yield each
        yield from _below(each)


def _first_error(error: Exception) -> str:
    """Return an error as one line that begins with its type; for failed ranks, that of
    the first."""
    if isinstance(error, RankFailed):
        return error.reports[0].error.partition("\n")[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]
