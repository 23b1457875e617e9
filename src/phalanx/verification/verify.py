"""Compares every layout with one process, gradient by gradient.

In float64 a layout passes if nothing differs by more than 1e-10. In a narrower
precision it is compared with plain torch in that precision, and the allowed error of
each quantity is a multiple of its change by a unit in the last place there. The engine
does not influence these bounds.

A built-in model has a second, plain form (`plain.py`). In float64 it is the one
process. In any precision the model's own modules are compared with it first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..comm import RankFailed
from ..comm.devices import Devices
from ..comm.late import late_worlds
from ..comm.launch import Runner, workers
from ..layout import Layout, LayoutError, Shape, legal
from ..layout.choices import COMPARED, DTYPES, FP64, THREADS
from ..layout.files import read_text
from ..layout.source import running_modules
from ..parallel import (
    Model,
    Precision,
    build_model,
    described_whole,
    refuse_mixing,
    refuse_unfit,
)
from ..parallel.low_precision import matmul_named
from ..program import DoesNotFit, Program, ProgramError, Recorded, Timeline
from ..training.precision import precision_of
from ..training.program import with_z_loss
from .cases import trial_batch
from .claims import false_claim
from .compare import Bounds, bounds_of, compare
from .failing import failure_fault
from .low_precision import can_replay, install, padded, sums_of
from .optimizers import OPTIMIZERS
from .own_forward import OwnForward
from .reference import (
    Batch,
    Forward,
    Nudge,
    Pieces,
    PlainForward,
    Trace,
    passes,
    reference,
)
from .refusals import refusal_faults
from .replay import can_be_replayed, replay, replay_differences, rounding_of
from .rows import rows_differ, shapes_differ
from .transport import transport_fault
from .trial import Setting, join, long_program, program_in, train_layout

# opens a world of the given number of ranks
Worlds = Callable[[int], AbstractContextManager[Runner]]
LOG = 1 << 26  # maximum bytes of a log of verdicts
NUDGED = 6  # trainings with perturbations of a unit in the last place


@dataclass(frozen=True)
class Verdict:
    """The result for one layout.

    `cannot_fit`: no recomputation meets the limit of its `recompute:fit`, so nothing
    was compared. `of_allowed` is the largest error as a share of the allowed one.
    `against` says how one process computes a user's model: by its class's forward, or
    by its pieces. `covered` and `not_covered` name a case that the steps reached, or
    should have reached and did not.
    """

    layout: str
    ranks: int
    passed: bool
    max_rel_error: float
    first_difference: str = ""
    cannot_fit: bool = False
    of_allowed: float = 0.0
    against: str = ""
    covered: str = ""
    not_covered: str = ""


@dataclass(frozen=True)
class Truth:
    """The result of one process, and the allowed errors (`EXACT` in float64).

    `replay` is the result of one process with a layout's own roundings, if possible.
    """

    trace: Trace
    bounds: Bounds | None = None
    replay: Trace | None = None


def precision_named(dtype: str) -> Precision:
    """Return the precision that computes in a dtype with torch's name."""
    if dtype not in COMPARED:
        raise LayoutError(
            f"unknown dtype {dtype!r}; choose {', '.join(COMPARED)}."
        )
    return precision_of(COMPARED[dtype])


def verify(
    shape: Shape,
    layouts: Iterable[Layout],
    *,
    backend: str = THREADS,
    steps: int = 3,
    dtype: str = DTYPES[FP64].torch,
    seed: int = 0,
    packed: bool = False,
    dropout: float = 0.0,
    optimizer: str = "adamw",
    z_loss: float = 0.0,
    log: Path | None = None,
    record: Path | None = None,
    make: Callable[[], Model] | None = None,
    worlds: Worlds | None = None,
) -> Iterator[Verdict]:
    """Yield a verdict for each layout as it is made; layouts in the log are not run
    again.

    One world of ranks serves all layouts of its size; after a layout that raises, new
    ranks start. `record` receives the last step of the last layout, for `phalanx draw
    run`. `make` builds the model, if it is not the built-in one of the shape. `worlds`
    opens worlds instead of `backend`. `z_loss` adds z_loss * log(Z)^2 to each token's
    loss.
    """
    worlds = worlds or worlds_over(backend)
    shape = replace(shape, dropout=dropout)
    plain = None if make else PlainForward(shape, z_loss)
    make, layouts = make or partial(build_model, shape), tuple(layouts)
    # A description that computes something else is refused before anything is
    # trained.
    own = own_forward(make)
    make = partial(with_z_loss, make, z_loss) if z_loss else make
    known, model = logged(log), make()
    for layout in layouts:
        _refuse_illegal(layout, shape)
        refuse_unfit(model, layout)
        refuse_mixing(model, layout)
    precision = precision_named(dtype)
    setting = Setting(
        partial(
            trial_batch, shape,
            seed=seed, dtype=precision.compute, packed=packed, noisy=dropout > 0,
        ),
        steps=steps, precision=precision, seed=seed, optimizer=OPTIMIZERS[optimizer],
    )  # fmt: skip
    # checked first: a fault here affects every layout
    if wrong := modules_differ(make, setting, plain):
        yield from (
            Verdict(str(x), x.ranks, False, math.inf, wrong) for x in layouts
        )
        return
    setting = with_loss_scale(make, setting)
    # The forward of a class has no z-loss.
    alone = plain or (None if z_loss else own)
    # Once for each fp8 format and division of sums; without fp8 once in all.
    known_truth = cache(partial(truth_of, make, setting, forward=alone))
    against = model_alone(model, own if alone is own else None, setting)

    # keyed by the division of rows
    known_replay = cache(partial(replay, make, setting))

    def terms(layout: Layout) -> tuple[Setting, Truth]:
        cuts = sums_of(layout) if layout.matmul else Layout()
        known = known_truth(layout.matmul, cuts)
        if can_be_replayed(layout, model, setting):
            known = replace(known, replay=known_replay(rounding_of(layout)))
        return setting_for(layout, setting), known

    def claim(layout: Layout) -> str:
        wrong = ""
        # A model of the user's own has no shape that says its rows.
        if plain:
            wrong = rows_differ(layout, shape, model)
            wrong = wrong or next(refusal_faults(layout, shape), "")
        return wrong or shapes_differ()

    case = _LayoutCases(make, terms, claim)
    # By size, so that a world of ranks is started once for each.
    by_size: dict[int, list[Layout]] = {}
    for layout in layouts:
        by_size.setdefault(layout.ranks, []).append(layout)
    for size, group in sorted(by_size.items()):
        yield from (known[str(x)] for x in group if str(x) in known)
        new = [x for x in group if str(x) not in known]
        for verdict in _world(size, new, worlds, case, record) if new else ():
            verdict = replace(verdict, against=against)
            # Written at once: a long comparison can be stopped and continued.
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
            yield verdict


def _refuse_illegal(layout: Layout, shape: Shape) -> None:
    """Raise with every rule that a layout breaks: kernels may end the process."""
    if wrong := legal(layout, shape):
        reasons = "\n".join(map(str, wrong))
        raise LayoutError(f"{layout} does not fit {shape.name}:\n{reasons}")


def own_forward(make: Callable[[], Model]) -> OwnForward | None:
    """Return the forward of the class that a model describes; None if it has none.

    Raises if the description computes something else.
    """
    whole = described_whole(make())
    return OwnForward(whole, make()) if whole else None


def model_alone(model: Model, own: OwnForward | None, setting: Setting) -> str:
    """Return the name of what computes a user's model as one process in every step; ""
    for a built-in one."""
    if model.whole is None:
        return ""
    exact = setting.precision.compute == torch.float64
    if (
        own
        and exact
        and all(
            own.takes(setting.batches(step)) for step in range(setting.steps)
        )
    ):
        return own.name
    return "its pieces"


def worlds_over(backend: str) -> Worlds:
    """Return a function that opens worlds of a transport.

    Ranks that are threads on a CPU receive every result as late as allowed, and are
    refused forbidden uses of tensors meanwhile.
    """
    late = backend == THREADS and not Devices().gpus

    def world(size: int) -> AbstractContextManager[Runner]:
        return (
            late_worlds(size)
            if late and size > 1
            else workers(size, backend=backend)
        )

    return world


def setting_for(layout: Layout, setting: Setting) -> Setting:
    """Return the settings for a layout, which may have fp8 matmuls."""
    matmul = matmul_named(layout.matmul)
    return replace(
        setting, precision=replace(setting.precision, matmul=matmul)
    )


def with_loss_scale(make: Callable[[], Model], setting: Setting) -> Setting:
    """Return the settings with an initial loss scale that does not overflow in step 0.

    Some models overflow even with torch's default. Only float16 has a loss scale.
    """
    first, patience = setting.scaling
    if setting.precision.compute != torch.float16:
        return setting
    # Each try is a training of one step, so the scale falls in large steps.
    while first > 1.0 and not math.isfinite(_first_norm(make, setting, first)):
        first /= 8.0
    return replace(setting, scaling=(first, patience))


OVERFLOW = "a step of float16 that overflows and is skipped"
# Factors of the loss scale by step: 2^16 times a scale that is safe for one step
# overflows in another, however a layout cuts the batch. The overflow halves it, and
# 2^-15 then gives the scale from before.
_RAISED = {1: 2.0**16, 2: 2.0**-15}
# The first scale is this share of the largest that step 0 allows: it doubles after
# each of a few steps, and their gradients vary.
_SAFE = 1 / 32


def with_overflow(make: Callable[[], Model], setting: Setting) -> Setting:
    """The setting with one step that overflows and is skipped, and with a loss scale
    that doubles after every other step. Only float16 has one."""
    if setting.precision.compute != torch.float16:
        return setting
    largest = with_loss_scale(
        make, replace(setting, scaling=(2.0**24, 1))
    ).scaling[0]
    if largest * _SAFE < 1.0:
        return setting
    return replace(setting, scaling=(largest * _SAFE, 1), raised=_RAISED)


def _first_norm(
    # The norm is infinite if any gradient overflows.
    make: Callable[[], Model],
    setting: Setting,
    scale: float,
) -> float:
    scaler = torch.amp.GradScaler("cpu", scale)
    trace = _reference(make(), replace(setting, steps=1), scaler=scaler)
    return trace.steps[0].norm


def _reference(model: Model, setting: Setting, **more: Any) -> Trace:
    with running_modules("when one process trains the model", LayoutError):
        return reference(
            model, setting.batches,
            steps=setting.steps, optimizer=setting.optimizer, rate=setting.rate,
            clip=setting.clip, precision=setting.precision, seed=setting.seed,
            raised=setting.raised, validations=setting.validations, **more,
        )  # fmt: skip


@dataclass(frozen=True)
class _LayoutCases:
    """A model; for each layout its settings, the expected results, and the first
    false claim about its rows."""

    make: Callable[[], Model]
    terms: Callable[[Layout], tuple[Setting, Truth]]
    wrong_rows: Callable[[Layout], str]

    def program(self, layout: Layout, setting: Setting) -> tuple[Program, str]:
        """Return a layout's program, and the first claim about it that does not
        hold."""
        program = program_in(layout, self.make, setting)
        wrong = self.wrong_rows(layout)
        if not wrong:
            long = long_program(layout, self.make, setting)
            wrong = false_claim(layout, program, long)
        return program, wrong


def _world(
    size: int,
    layouts: list[Layout],
    worlds: Worlds,
    case: _LayoutCases,
    record: Path | None,
) -> Iterator[Verdict]:
    with worlds(size) as run:
        # A fault in a transport would appear as one of every layout.
        if wrong := wrong_transport(size, run):
            yield from (
                Verdict(str(x), size, False, math.inf, wrong) for x in layouts
            )
            return
        for layout in layouts:
            setting, truth = case.terms(layout)
            try:
                program, wrong = case.program(layout, setting)
            # a refused program is a mistake of ours
            except ProgramError as error:
                fits = not isinstance(error, DoesNotFit)
                yield Verdict(
                    str(layout),
                    size,
                    False,
                    math.inf,
                    _line(error),
                    cannot_fit=not fits,
                )
                continue
            if wrong:
                yield Verdict(str(layout), size, False, math.inf, wrong)
                continue
            try:
                seen = run(train_layout, layout, program, case.make, setting)
            # any error of the engine is this layout's verdict
            except Exception as error:
                yield failed(layout, error)
                continue
            if record:
                spans = tuple(
                    span for rank in seen for span in rank.timeline.spans
                )
                record.write_text(str(Recorded(program, Timeline(spans))))
            yield judge(layout, join(seen, setting.steps), truth, setting)


def wrong_transport(size: int, run: Runner) -> str:
    """Return the first call of a world's groups with a wrong result, or ""."""
    if size == 1:
        return ""
    # Rank by rank: the first that is not empty.
    try:
        wrong = next(filter(None, run(transport_fault)), "")
        return wrong or failure_fault(size, run)
    # a call that raises is wrong, too
    except Exception as error:
        return _line(error)


def failed(layout: Layout, error: Exception) -> Verdict:
    """Return the verdict on a layout whose ranks raised."""
    return Verdict(str(layout), layout.ranks, False, math.inf, _line(error))


def _line(error: Exception) -> str:
    """Format an error on one line with its type; for ranks, that of the first one that
    failed."""
    text = str(error).strip().partition("\n")[0]
    return (
        text
        if isinstance(error, RankFailed)
        else f"{type(error).__name__}: {text}"
    )


def judge(
    layout: Layout, got: Trace, truth: Truth, setting: Setting
) -> Verdict:
    """Return the verdict on the trace of a layout."""
    differences = compare(got, truth.trace, setting.rate, truth.bounds)
    if truth.replay and truth.bounds:
        differences += replay_differences(
            layout, got, truth.replay, setting, truth.bounds
        )
    unequal = [str(d) for d in differences if not d.agrees]
    # Values with too few bits are the likely cause of differences, and may be the only
    # finding.
    first = "; ".join((*unequal[:1], *got.breaches[:1]))
    worst = max(d.error for d in differences)
    # Exact quantities have no allowed error to compare with.
    share = max(d.error / d.allowed for d in differences if d.allowed)
    covered, missing = _overflow(truth.trace, setting)
    return Verdict(
        str(layout),
        layout.ranks,
        not first,
        worst,
        first,
        of_allowed=share,
        covered=covered,
        not_covered=missing,
    )


def _overflow(trace: Trace, setting: Setting) -> tuple[str, str]:
    """Return what is covered, and what is not: in float16 a step that overflows."""
    if setting.precision.compute != torch.float16:
        return "", ""
    if all(math.isfinite(step.norm) for step in trace.steps):
        return "", f"{OVERFLOW}, since no step of the one process overflowed"
    return OVERFLOW, ""


def modules_differ(
    make: Callable[[], Model], setting: Setting, plain: PlainForward | None
) -> str:
    """Describe the first difference between a model's modules and its plain form, in
    float64 on one batch."""
    if plain is None:
        return ""
    # In float64, whatever precision is compared later: formulas are compared
    # here, not roundings.
    batch = {
        n: x.double() if x.is_floating_point() else x
        for n, x in setting.batches(0).items()
    }
    model = make()
    try:
        known, found = passes(
            model,
            batch,
            setting.seed,
            lambda weights: (plain, Pieces(model, weights)),
        )
    except RuntimeError as error:  # raised by torch for weights of other sizes
        return f"the model's weights do not fit its formulas (verification/plain.py): {error}"
    differences = compare(found, known, setting.rate)
    first = next((str(each) for each in differences if not each.agrees), "")
    return (
        f"the model's modules are not its formulas (verification/plain.py): {first}"
        if first
        else ""
    )


def truth_of(
    make: Callable[[], Model],
    setting: Setting,
    matmul: str = "",
    cuts: Layout | None = None,
    forward: Forward | None = None,
) -> Truth:
    """Train on one process in this precision; return the result, with bounds unless it
    is float64.

    `forward` computes the model in float64: the plain form of a built-in model, or the
    user's own class. `matmul` is a layout's fp8 format, and `cuts` the layout if it
    splits sums and so has separate scales. If one process cannot split a model so, the
    bounds come from other scales.
    """
    precision, cuts = setting.precision, cuts or Layout()
    model = make()
    shape = model.shape
    # which is not a sum over microbatches
    whole = shape is not None and shape.batch_loss > 0
    exact, half = (
        precision.compute == torch.float64,
        precision.compute == torch.float16,
    )
    replayed = not matmul or can_replay(model, cuts)
    # In float64, too, fp8 needs bounds if one process cannot split the sums as
    # the ranks do.
    exact = exact and replayed
    own = cuts if matmul and replayed else Layout()
    # the modules' own roundings count
    narrow = matmul or precision.compute != torch.float64

    def batches(step: int) -> Batch:
        batch = setting.batches(step)
        return padded(batch, own) if own.ranks > 1 else batch

    def train(nudge: Nudge | None = None) -> Trace:
        first, patience = setting.scaling
        model = make()
        if nudge and not replayed:
            # Random splits stand for those of the ranks, which one process
            # cannot make.
            install(model, matmul, cuts, nudge.generator)
        else:
            install(model, matmul, own)
        scaler = (
            torch.amp.GradScaler("cpu", first, growth_interval=patience)
            if half
            else None
        )
        # Three microbatches add a rounding of gradients, as ranks'
        # microbatches do.
        parts = 1 if exact or whole else 3
        terms = replace(setting, batches=batches)
        more = {"nudge": nudge, "scaler": scaler}
        return _reference(
            model,
            terms,
            forward=None if narrow else forward,
            cut=lambda rows: torch.arange(rows).chunk(parts),
            **more,
        )

    trace = train()
    # float16 may skip a later step; its loss is then not finite, which is fine
    for number, step in enumerate(trace.steps[:1] if half else trace.steps):
        if not math.isfinite(step.loss):
            raise LayoutError(
                f"one process has a loss of {step.loss} in step {number}, so there is nothing to"
                " compare with. Check the model's forward and how its weights start."
            )
    if exact:
        return Truth(trace)
    # A generator: one training at a time is held beside the first.
    nudged = (
        train(Nudge(torch.Generator().manual_seed(n))) for n in range(NUDGED)
    )
    bounds = bounds_of(trace, nudged, setting.rate, precision.compute)
    return Truth(trace, bounds)


def logged(log: Path | None) -> dict[str, Verdict]:
    """Return the verdicts in a log by layout; empty without a log."""
    if log is None or not log.exists():
        return {}
    known: dict[str, Verdict] = {}
    for number, line in enumerate(
        read_text(log, "log", LayoutError, LOG).splitlines(), 1
    ):
        try:
            # Fields by name; a line of another version fails.
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise LayoutError(
                f"{log} line {number} is not a verdict. Remove the line, or name another log."
            ) from None
        known[verdict.layout] = verdict
    return known
