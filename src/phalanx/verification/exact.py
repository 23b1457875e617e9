"""Compares the bits of layouts of `exact` with those of one process.

One process runs the same microbatches, one after the other, and adds them in the same
tree. Nothing has a tolerance: the first value with other bits is named, in the order of a
step, with its microbatch and the operation that makes it.

A mistake that the one process makes too changes no bit. So the one process is compared
with plain torch, within the bounds of rounding, as in `verify`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from ..comm.launch import Runner
from ..layout import Layout, Shape
from ..layout.choices import ACCUM, BF16, FP32, FP64, THREADS
from ..layout.exact import exact_batch
from ..layout.mesh import Mesh
from ..parallel import Model, build_model, refuse_unfit
from ..parallel.block_parts import cut_blocks
from ..program import Op, Program, ProgramError, ops
from ..training.precision import precision_of
from .cases import trial_batch
from .claims import false_claim
from .optimizers import OPTIMIZERS
from .reference import Mismatch, Trace, TracedStep
from .replay import can_be_replayed, replay, rounding_of
from .trial import Leaves, Seen, Setting, join, program_in, train_layout
from .verify import (
    Verdict,
    failed,
    judge,
    truth_of,
    verify,
    with_loss_scale,
    worlds_over,
    wrong_transport,
)

PRECISIONS = (FP32, BF16)
# one microbatch's gradient of each weight, by weight, piece's name, microbatch and part
# of time
Gradients = dict[tuple[str, str, int, int], Tensor]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bits:
    """Everything that is compared of a layout's steps."""

    program: Program
    trace: Trace
    # of each step
    leaves: tuple[Gradients, ...]
    microbatches: int  # of all ranks
    # of the pieces; a block with experts may be several
    names: tuple[str, ...]
    # the piece that adds to a weight, by weight and piece's name
    users: Mapping[tuple[str, str], int]

    @classmethod
    def of(
        cls,
        layout: Layout,
        program: Program,
        seen: Sequence[Seen],
        steps: int,
        names: Sequence[str],
    ) -> Bits:
        leaves: list[Gradients] = [{} for _ in range(steps)]
        users: dict[tuple[str, str], int] = {}
        for rank in seen:
            for step, own in enumerate(rank.leaves):
                # Only ranks of one tp have leaves of the same microbatch: parts of
                # them, or copies.
                _put(own, leaves[step], names)
                users |= {(w, names[p]): p for w, p, _, _ in own}
        count = layout.data * layout.microbatches
        trace = join(seen, steps)
        every = tuple(leaves)
        return cls(program, trace, every, count, tuple(names), users)


def _put(own: Leaves, whole: Gradients, names: Sequence[str]) -> None:
    """Put a rank's parts of gradients into whole ones, which begin as NaN."""
    for (name, piece, m, time), (weight, gradient) in own.items():
        key = name, names[piece], m, time
        if key not in whole:
            whole[key] = gradient.new_full(weight.shape, torch.nan)
        held = tuple(slice(cut.stop - cut.start) for cut in weight.cuts)
        whole[key][weight.box] = gradient[held]


def verify_exact(
    shape: Shape,
    layouts: Iterable[Layout],
    *,
    precisions: Sequence[str] = PRECISIONS,
    backend: str = THREADS,
    steps: int = 3,
    seed: int = 0,
    packed: bool = False,
    dropout: float = 0.0,
    optimizer: str = "adamw",
    make: Callable[[], Model] | None = None,
) -> Iterator[Verdict]:
    """Yield a verdict for each layout in each precision, as it is made."""
    shape = replace(shape, dropout=dropout)
    given = make is not None
    make = make or partial(build_model, shape)
    chosen = [
        replace(x, precision=name, exact=max(1, x.exact))
        for x in layouts
        for name in precisions
    ]
    for layout in chosen:
        refuse_unfit(make(), layout)

    @cache
    def setting_of(one: Layout) -> Setting:
        precision = precision_of(one.precision)
        sized = replace(shape, batch=exact_batch(one))
        batches = partial(
            trial_batch,
            sized,
            seed=seed,
            dtype=precision.compute,
            packed=packed,
            noisy=dropout > 0,
        )
        setting = Setting(
            batches,
            steps=steps,
            precision=precision,
            seed=seed,
            optimizer=OPTIMIZERS[optimizer],
        )
        return with_loss_scale(make, setting)

    @cache
    def alone(one: Layout) -> Bits:
        with worlds_over(THREADS)(1) as run:
            return _bits(run, one, make, setting_of(one))

    @cache
    def apart(one: Layout) -> str:
        return _wrong_alone(one, alone(one).trace, make, setting_of(one))

    def wrong_alone(one: Layout) -> str:
        wrong = apart(one)
        if wrong:
            return wrong
        # Bounds of 16 bits are wide, so the same process is compared in float32, too.
        wide = apart(replace(one, precision=FP32))
        return f"in float32 {wide}" if wide else wrong_modules()

    @cache
    def wrong_modules() -> str:
        # Below float64 plain torch computes with the model's own modules.
        plain = Layout(precision=FP64)
        sized = replace(shape, batch=exact_batch(plain))
        (verdict,) = verify(
            sized,
            [plain],
            steps=steps,
            seed=seed,
            packed=packed,
            dropout=dropout,
            optimizer=optimizer,
            make=make if given else None,
        )
        found = verdict.first_difference
        return f"in float64, without exact, {found}" if found else ""

    by_size: dict[int, list[Layout]] = {}
    for layout in chosen:
        by_size.setdefault(layout.ranks, []).append(layout)
    for size, group in sorted(by_size.items()):
        with worlds_over(backend)(size) as run:
            wrong = wrong_transport(size, run)
            for layout in group:
                if wrong:
                    yield _verdict(layout, wrong)
                    continue
                one = one_process(layout)
                setting, known = setting_of(one), partial(alone, one)
                verdict = _compared(run, layout, make, setting, known)
                if verdict.passed:
                    verdict = _verdict(layout, wrong_alone(one))
                yield verdict


def one_process(layout: Layout) -> Layout:
    """The layout of one process that runs all microbatches, in the same parts."""
    return Layout(
        Mesh(),
        schedule=ACCUM,
        microbatches=layout.data * layout.microbatches,
        precision=layout.precision,
        compile=layout.compile,
        exact=layout.exact,
        time_parts=layout.time_parts,
    )


def _wrong_alone(
    one: Layout, trace: Trace, make: Callable[[], Model], setting: Setting
) -> str:
    """The first difference between the one process and plain torch, or ""."""
    known = truth_of(make, setting)
    # Sums of parts are not replayed.
    whole = one.exact == one.time_parts == 1
    if whole and can_be_replayed(one, make(), setting):
        replayed = replay(make, setting, rounding_of(one))
        known = replace(known, replay=replayed)
    found = judge(one, trace, known, setting).first_difference
    return f"one process differs from plain torch: {found}" if found else ""


def _verdict(layout: Layout, wrong: str) -> Verdict:
    error = math.inf if wrong else 0.0
    return Verdict(str(layout), layout.ranks, not wrong, error, wrong)


def _bits(
    run: Runner, layout: Layout, make: Callable[[], Model], setting: Setting
) -> Bits:
    program = program_in(layout, make, setting)
    if wrong := false_claim(layout, program, None):
        raise ProgramError(wrong)
    seen = run(train_layout, layout, program, make, setting)
    names = [name for name, _ in cut_blocks(make(), layout).pieces]
    return Bits.of(layout, program, seen, setting.steps, names)


def _compared(
    run: Runner,
    layout: Layout,
    make: Callable[[], Model],
    setting: Setting,
    known: Callable[[], Bits],
) -> Verdict:
    try:
        got, truth = _bits(run, layout, make, setting), known()
    # any error of the engine is this layout's verdict
    except Exception as error:
        return failed(layout, error)
    return _verdict(layout, next(differences(got, truth), ""))


def differences(got: Bits, truth: Bits) -> Iterator[str]:
    """Yield every value with other bits, in the order of a step."""
    for name, weight in truth.trace.start.items():
        if not same_bits(weight, got.trace.start[name]):
            yield f"before the first step {name} starts with other bits"
    steps = zip(got.trace.steps, truth.trace.steps, strict=True)
    for number, (mine, known) in enumerate(steps):
        leaves = got.leaves[number], truth.leaves[number]
        for found in (
            *_outputs(got, mine, known),
            *_scalar("the mean loss", got, mine.logged, known.logged),
            *_scalar("the loss scale", got, mine.scale, known.scale),
            *_leaves(got, *leaves),
            *_sums(got, mine, known),
            *_scalar("the gradient norm", got, mine.norm, known.norm),
            *_weights(got, mine, known),
            *map(_mismatch, mine.mismatches),
        ):
            yield f"step {number}: {found}"
    if got.trace.validation != truth.trace.validation:
        yield (
            f"the validation loss is {got.trace.validation!r}, on one process"
            f" {truth.trace.validation!r}"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare the bits of two tensors; zeros of different sign differ."""
    bits = _BITS[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def _mismatch(found: Mismatch) -> str:
    """Copies of a value that differ between two ranks."""
    first, second = found.ranks
    of = f" of {found.name}" if found.name else ""
    element = [*found.element] if found.element else ""
    return f"the {found.what}{of}{element} differs between ranks {first} and {second}"


def _at(got: Bits, kind: str, piece: int, microbatch: int) -> str:
    """The operation of a microbatch, and the rank of dp that runs it."""
    own = got.program.microbatches
    rank, m = divmod(microbatch, own)
    op = Op(kind, piece, m)
    over = f" of dp rank {rank}" if got.microbatches > own else ""
    return f"microbatch {microbatch} ({op}{over})"


def _outputs(got: Bits, mine: TracedStep, known: TracedStep) -> Iterator[str]:
    # The last piece of a block has its output.
    last = {name: piece for piece, name in enumerate(got.names)}
    for name, piece in last.items():
        if name not in known.outputs:
            continue
        here, there = mine.outputs[name], known.outputs[name]
        rows = here.shape[0] // got.microbatches
        for m in range(got.microbatches):
            part = slice(m * rows, (m + 1) * rows)
            if not same_bits(
                here[part].contiguous(), there[part].contiguous()
            ):
                yield f"the output of {name} for {_at(got, ops.FORWARD, piece, m)}"


def _leaves(got: Bits, mine: Gradients, known: Gradients) -> Iterator[str]:
    kinds = {op.kind for row in got.program.rows for op in row}
    whole = ops.BACKWARD in kinds
    kind = ops.BACKWARD if whole else ops.WEIGHT_GRADIENT
    places = {name: place for place, name in enumerate(got.names)}
    order = sorted(known, key=lambda leaf: (leaf[2], -places[leaf[1]]))
    for key in order:
        name, user, m, _ = key
        there = known[key]
        here = mine.get(key)
        piece = got.users.get((name, user), places[user])
        if here is None:
            yield f"{_at(got, kind, piece, m)} adds no gradient of {name}"
        elif not same_bits(here, there):
            yield f"the gradient of {name} from {_at(got, kind, piece, m)}"


def _sums(got: Bits, mine: TracedStep, known: TracedStep) -> Iterator[str]:
    kinds = ops.ADD, ops.EXCHANGE_PARTS
    for name, there in known.gradients.items():
        if not same_bits(mine.gradients[name], there):
            text = " or ".join(kinds)
            yield f"the sum of the gradient of {name} over microbatches ({text})"


def _weights(got: Bits, mine: TracedStep, known: TracedStep) -> Iterator[str]:
    for name, there in known.weights.items():
        if not same_bits(mine.weights[name], there):
            yield f"{name} after its update ({ops.UPDATE})"


def _scalar(what: str, got: Bits, mine: float, known: float) -> Iterator[str]:
    if mine != known and not (math.isnan(mine) and math.isnan(known)):
        yield f"{what} is {mine!r}, on one process {known!r} ({ops.AGREE})"
