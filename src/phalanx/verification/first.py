"""The trial of a user's model before its first step in a layout.

A cut-down copy of the model makes one step in the layout, on ranks that are threads of
this process, and one step on one process. Loss, gradients and updates must agree. The
copy has one piece of each form, or as many as the stages need, its own widths, and
random weights. A trial that passed is recorded (`first_known.py`), and not repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..comm.late import late_worlds
from ..layout import Layout, LayoutError, Shape
from ..layout.choices import FP32, FP64
from ..layout.host import available_memory
from ..layout.proportions import small_layout
from ..parallel import Model
from ..program import ProgramError
from ..training.optimizer import Sgd
from ..training.precision import precision_of
from .cases import batch_of
from .compare import Difference, compare
from .first_known import is_known, remember, trial_key
from .reference import Batch, Trace, reference
from .trial import Setting, join, program_in, train_layout

TOKENS = 16  # of a sequence
_RANKS = 8  # layouts with more ranks, or more microbatches, are tried smaller
_WIDE = 1e7  # copies with at least as many weights are tried in float32
# Relative errors. A user's modules may compute in float32 whatever their weights are.
_APART = 1e-3
_FLOOR = (
    1e-4  # of the gradient norm: the scale for gradients that are almost zero
)
_SECONDS = 300.0  # time limit for a rank that waits for another
# Whole tensors that are held at once for each weight: by one process with its record,
# and by each rank that holds a copy of the weight.
_HELD_ALONE, _HELD_BY_RANK = 7, 7


class FirstStepDiffers(LayoutError):
    """Raised for a model that computes something else in its layout than on one process."""

    exit_code = 1


class _Untried(Exception):
    """Raised with the reason why a model cannot be tried here."""


@dataclass(frozen=True)
class Subject:
    """A user's model and the batches on which it is tried.

    `make` returns a new Model on the meta device. `batch(rows)` returns a batch with so
    many rows. `code` holds the objects, besides the pieces, whose source decides what
    the model computes: its class, its description, its loss.
    """

    make: Callable[[], Model]
    batch: Callable[[int], Batch]
    code: tuple[object, ...] = ()


def batches_like(example: Batch) -> Callable[[int], Batch]:
    """Return batches of any number of rows, made of the rows of an example."""

    def batch(rows: int) -> Batch:
        entries = dict(example)
        first = next(iter(entries.values()))
        # Rows repeat in turn if more are wanted than the example has.
        chosen = torch.arange(rows) % first.shape[0]
        if "tokens" in entries:
            size = entries["tokens"].shape[:2]
            for name, x in entries.items():
                # Only entries with a column for each token are cut.
                if x.shape[:2] == size:
                    entries[name] = x[:, :TOKENS]
        return {name: x.detach().cpu()[chosen] for name, x in entries.items()}

    return batch


def batches_of_shape(shape: Shape) -> Callable[[int], Batch]:
    """Return batches of random tokens for a model of these sizes."""
    sequence = min(TOKENS, shape.sequence)

    def batch(rows: int) -> Batch:
        few = replace(shape, batch=rows, sequence=sequence)
        return batch_of(few, 0)

    return batch


def is_verified(subject: Subject, layout: Layout) -> bool:
    """True if there is nothing to try, or an earlier trial has passed. Nothing runs."""
    try:
        return _trial(subject, layout) is None
    except _Untried:
        return False


def refuse_unverified(subject: Subject, layout: Layout) -> str:
    """Raise FirstStepDiffers if the model computes something else in this layout.

    Return "" if it agrees or is built in, and otherwise the reason why it cannot be
    tried.
    """
    try:
        trial = _trial(subject, layout)
        if trial is None:
            return ""
        # On the CPU, whatever default device the user's script has set.
        with torch.device("cpu"):
            different = _first_difference(
                trial.model, trial.layout, subject.batch
            )
    except _Untried as error:
        return str(error)
    if different:
        # "" is the layout of one rank.
        name = str(layout) or "one rank"
        raise FirstStepDiffers(
            f"{name} differs from one process: {different}. Nothing was trained. Correct the model's"
            " description or its plan for tp, or use another layout."
        )
    remember(trial.key, str(trial.layout))
    return ""


@dataclass(frozen=True)
class _NewTrial:
    """A trial that has not passed yet."""

    model: Model
    layout: Layout
    key: str


def _trial(subject: Subject, layout: Layout) -> _NewTrial | None:
    tried = trial_layout(layout)
    # A layout of one rank and one microbatch is the reference itself.
    if tried.ranks == 1 and tried.microbatches == 1:
        return None
    with torch.device("cpu"):
        model = cut_down(subject.make(), tried.pp * tried.chunks)
    if all(_is_built_in(piece) for _, piece in model.pieces):
        return None
    key = trial_key(model, tried, subject.code)
    return None if is_known(key) else _NewTrial(model, tried, key)


def trial_layout(layout: Layout) -> Layout:
    """Return the layout in which a model is tried: in float64 and with few ranks."""
    large = layout.ranks > _RANKS or layout.microbatches > _RANKS
    few = small_layout(layout) if large else layout
    # `fit` depends on bytes of the whole model, which the copy does not have.
    recompute = "all" if few.recompute == "fit" else few.recompute
    # `stages` counts pieces of the whole model, of which the copy has fewer.
    return replace(
        few,
        precision=FP64,
        matmul="",
        compile="",
        # The trial is in float64, which `exact` does not cover.
        exact=0,
        time_parts=1,
        recompute=recompute,
        stages=(),
    )


def cut_down(model: Model, stages: int) -> Model:
    """Return a separate model with the first piece of every form, and at least as many
    pieces as there are stages."""
    seen: set[object] = set()
    chosen: list[int] = []
    spare: list[int] = []
    for number, (_, piece) in enumerate(model.pieces):
        form = _form(piece)
        # One of each form, in the model's order; equal ones are spare.
        (spare if form in seen else chosen).append(number)
        seen.add(form)
    missing = max(0, stages - len(chosen))
    # a model with equal blocks shows with two of them what passes between blocks
    chosen += spare[: max(1, missing)]
    pieces = tuple(model.pieces[number] for number in sorted(chosen))
    # The caller's model, which will train, keeps its own pieces.
    try:
        pieces = copy.deepcopy(pieces)
    except Exception as error:  # a user's module may refuse it in any way
        raise _Untried(f"its modules cannot be copied: {error}") from error
    for _, piece in pieces:
        _buffers_to_cpu(piece)
    shape = model.shape
    if shape is not None:
        fewer = len(model.pieces) - len(pieces)
        shape = replace(shape, layers=shape.layers - fewer)
    return replace(model, pieces=pieces, own_start=None, shape=shape)


def _buffers_to_cpu(piece: nn.Module) -> None:
    # A module that was built on a GPU keeps its buffers there.
    for module in piece.modules():
        for name, x in module._buffers.items():
            if x is not None and not x.is_meta:
                module._buffers[name] = x.cpu()


def _form(piece: nn.Module) -> object:
    # Form: names and shapes of weights, names and types of modules. Values do
    # not matter.
    weights = ((name, tuple(x.shape)) for name, x in piece.named_parameters())
    modules = ((name, type(x)) for name, x in piece.named_modules())
    return tuple(weights), tuple(modules)


def _is_built_in(piece: nn.Module) -> bool:
    return type(piece).__module__.startswith("phalanx.models.")


def _first_difference(
    model: Model, layout: Layout, batch: Callable[[int], Batch]
) -> str:
    """Describe the first difference of a step in the layout, or return ""."""
    # float64 up to 10 million weights; the allowed error is the same.
    elements = sum(weight.numel() for weight in model.weights.values())
    precision = FP64 if elements < _WIDE else FP32
    layout = replace(layout, precision=precision)
    _refuse_large(elements, layout)
    compute = precision_of(precision).compute
    # one row more than ranks and microbatches divide
    rows = layout.data * layout.microbatches + 1
    given = {
        # Integers, such as tokens, keep their dtype.
        name: x.to(compute) if x.is_floating_point() else x
        for name, x in batch(rows).items()
    }
    setting = Setting(
        lambda step: given,
        steps=1,
        optimizer=Sgd(momentum=0.0),
        precision=precision_of(precision),
        validations=(given,),
    )

    def make() -> Model:
        # Ranks change modules in place, so each rank gets its own copy.
        return replace(model, pieces=copy.deepcopy(model.pieces))

    # A model that fails on one process cannot be compared: that is not the
    # layout's fault.
    alone = _alone(make(), setting)
    try:
        program = program_in(layout, make, setting)
    except (ProgramError, LayoutError) as error:
        raise _Untried(f"its copy has no program: {error}") from error
    with late_worlds(layout.ranks, _SECONDS) as ranks:
        try:
            seen = ranks(train_layout, layout, program, make, setting)
        except MemoryError as error:
            raise _Untried("its copies do not fit into memory") from error
        except (
            Exception
        ) as error:  # any other error of the ranks is a difference
            return " ".join(str(error).split()).rstrip(".")
    found = join(seen, setting.steps)
    # On a higher floor than for built-in models: a user's modules may compute
    # in float32.
    differences = compare(found, alone, setting.rate, floor=_FLOOR)
    wrong = next(filter(_is_wrong, differences), None)
    return str(replace(wrong, allowed=_APART)).rstrip(".") if wrong else ""


def _is_wrong(difference: Difference) -> bool:
    return not difference.agrees and difference.error > _APART


def _alone(model: Model, setting: Setting) -> Trace:
    """Return the step of one process."""
    try:
        trace = reference(
            model,
            setting.batches,
            steps=setting.steps,
            optimizer=setting.optimizer,
            rate=setting.rate,
            clip=setting.clip,
            precision=setting.precision,
            seed=setting.seed,
            validations=setting.validations,
            own_losses=True,
        )
    except Exception as error:  # a user's code may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise _Untried(
            f"a cut-down copy does not run on one process: {text[:300]}"
        ) from error
    if not torch.tensor(trace.steps[0].norm).isfinite():
        raise _Untried("a cut-down copy has a gradient that is not finite")
    return trace


def _refuse_large(elements: int, layout: Layout) -> None:
    itemsize = precision_of(layout.precision).compute.itemsize
    copies = layout.copies
    held = _HELD_ALONE + _HELD_BY_RANK * copies
    need = float(itemsize) * elements * held
    have = available_memory() / 2
    if need > have:
        gib = 2.0**30
        raise _Untried(
            f"the trial of {elements:,} weights takes {need / gib:,.0f} GiB, and half of the free memory"
            f" is {have / gib:,.0f} GiB"
        )
