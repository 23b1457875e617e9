"""A scaled-down run, trained by its own ranks and by one process, and compared value by
value.

The ranks call `train`, the run's own loop, with its optimizer settings, gradient
clipping, learning rate schedule, precision, adapters, frozen pieces and kind of
batches. Halfway the run is stopped and resumes from its checkpoint in another layout.
The one process uses the plain form of the model and torch's optimizers, and is never
stopped. Its learning rate is computed here from the run's keys.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import CommError, World
from ..layout import Layout, LayoutError, Shape
from ..layout.adapters import ADAPTERS
from ..layout.choices import FP64, THREADS
from ..layout.exact import COVERED
from ..layout.families import hub_config
from ..layout.journal import read_journal
from ..layout.optimizers import OptimizerChoice
from ..layout.proportions import (
    STEPS,
    TOKENS,
    WORDS,
    small_run,
)
from ..layout.run import Run
from ..layout.shape import HUB
from ..layout.small_config import small_config
from ..parallel import Model, load_model
from ..training.data.batches import Batches
from ..training.lock import hold_run
from ..training.loop import Outcome, train
from ..training.optimizers import optimizer_of
from ..training.precision import precision_of
from ..training.program import maker_of, shape_of
from ..training.rank import Rank, batches_of
from ..training.step import CompletedStep
from ..training.stop import STOP
from .batch_rows import batch_faults
from .claims import false_claim
from .journal import LoggedStep, counted_flops, journal_faults
from .keys import key_faults
from .low_precision import sums_of
from .reference import Forward, PlainForward, Trace
from .refusals import refusal_faults
from .replay import can_be_replayed, replay, rounding_of
from .reports import Start, report_faults, straggler_faults
from .rows import rows_differ, shapes_differ
from .run_data import write_documents
from .saved import add_broken, kept_faults, saved_faults, undetected
from .trial import (
    TOKEN,
    Observed,
    Seen,
    Setting,
    join,
    long_program,
    program_in,
    token_numbers,
)
from .verify import (
    Verdict,
    Worlds,
    failed,
    judge,
    own_forward,
    setting_for,
    truth_of,
    with_overflow,
    worlds_over,
    wrong_transport,
)

STOPPED = 3  # steps before the run is stopped, to resume in another layout
BROKEN = STEPS + 1  # step of a damaged checkpoint that the second start finds


@dataclass(frozen=True)
class RunTrial:
    """A scaled-down run.

    `covered` and `left_out` list its properties that the comparison has or lacks.
    `resumed` is the layout in which it resumes from its checkpoint.
    """

    run: Run
    layout: Layout
    resumed: Layout
    covered: tuple[str, ...]
    left_out: tuple[str, ...]


class NumberedBatches:
    """A run's batches, with the number of each token in the whole batch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def batch(self, step: int, rows: slice) -> dict[str, Tensor]:
        # Numbers of the whole batch, of which the rank gets its rows.
        numbers = token_numbers(self._batches.batch(step))
        return {**self._batches.batch(step, rows), TOKEN: numbers[rows]}

    def validation(self, index: int, rows: slice) -> dict[str, Tensor]:
        numbers = token_numbers(self._batches.validation(index))
        return {**self._batches.validation(index, rows), TOKEN: numbers[rows]}


def run_trial(run: Run, shape: Shape, layout: Layout, out: str) -> RunTrial:
    """Return the scaled-down form of a run, with its data below `out`.

    A user's class keeps its sizes, and so does a model in transformers' code if
    transformers refuses a smaller configuration.
    """
    if run.loss:
        raise LayoutError(
            f"verify compares no run with loss = {run.loss!r} yet. tests/training/test_dpo.py compares"
            " it with the formula, in every kind of layout."
        )
    own = small_own(run, out)
    small = small_run(run, shape, layout, out, own)
    few = shape_of(small)
    size = few.batch
    path = Path(out, "documents")
    write_documents(path, run, run.tokens(shape), batch=size, words=few.vocab)
    # In place of the run's data, which may be large, private or elsewhere.
    small = replace(small, data=str(path))
    chosen = small.layout_of(few)
    assert chosen is not None
    resumed = resumed_layout(chosen)
    o = run.optimizer
    covered = [
        f"{o.name} with every key, {o.schedule} over {STEPS} steps"
        + f" with {small.optimizer.warmup_steps} of warmup"
        * bool(o.warmup_steps),
        "clipping that is at work in some steps" if o.clip else "no clipping",
        f"the layout as {chosen}",
        f"{run.own} in its own sizes"
        if run.own and not own
        else f"{few.layers} of {shape.layers} blocks, every kind of them",
        "masks between documents"
        if run.document_masks
        else "text that flows on",
        f"packing {run.packing}"
        if run.packing
        else "the packing of its kind of data",
        "batches with the documents they are cut from",
        "an epoch's end",
        f"a stop after step {STOPPED} and a resume as {str(resumed) or 'one rank'}",
        f"checkpoints of steps {STOPPED - 1} to {STEPS}, and damage to one of them",
        f"the journal's loss, norm, rate, tokens{', FLOPs' * (not run.own)} and validation",
    ]
    covered += [f"dropout {few.dropout:g}"] * bool(few.dropout)
    covered += [f"z-loss {run.z_loss:g}"] * bool(run.z_loss)
    covered += [row.name for row in ADAPTERS if row.rank_of(shape)]
    covered += [f"frozen {run.freeze}"] * bool(run.freeze)
    left_out = [
        "its own text and its order: documents of random tokens have their lengths",
        "weights that are loaded",
        f"sequences of {run.tokens(shape):,} tokens"
        if run.own and not own
        else f"widths, {shape.vocab:,} words, and sequences of {run.tokens(shape):,} tokens",
    ]
    left_out += ["its named stages"] * bool(layout.stages)
    return RunTrial(small, chosen, resumed, tuple(covered), tuple(left_out))


def small_own(run: Run, out: str) -> str:
    """Write a small form of a model in transformers' code below `out`, and return its
    name.

    Return "" for other models, and if transformers refuses the small configuration.
    """
    if not run.own.startswith(HUB):
        return ""
    table, _ = hub_config(run.own.removeprefix(HUB))
    folder = Path(out, "model")
    folder.mkdir(parents=True)
    config = small_config(table, WORDS, TOKENS)
    (folder / "config.json").write_text(json.dumps(config))
    name = f"{HUB}{folder}"
    try:
        # transformers may refuse sizes that its own code cannot have.
        load_model(name)
    except LayoutError:
        return ""
    return name


def resumed_layout(layout: Layout) -> Layout:
    """Return a different layout with the same arithmetic: two ranks that share the
    optimizer state, or one.

    With fp8 matmuls it splits the same sums, as the splits influence scales.
    """
    cuts = sums_of(layout) if layout.matmul else Layout()
    # dp2 zero1 also tests that the optimizer's parts are redistributed.
    two = Layout.parse(f"dp2 {cuts} zero1")
    other = two if two.mesh != layout.mesh else cuts
    return _computing(other, layout.precision, layout.matmul)


def _computing(layout: Layout, precision: str, matmul: str) -> Layout:
    """Return the layout in another precision."""
    exact = (layout.exact, layout.time_parts)
    parts, runs = exact if precision in COVERED else (0, 1)
    return replace(
        layout,
        precision=precision,
        matmul=matmul,
        exact=parts,
        time_parts=runs,
    )


def verify_run(
    trial: RunTrial, worlds: Worlds | None = None
) -> Iterator[Verdict]:
    """Yield the verdict in float64, then in the run's own precision. `worlds` opens the
    worlds of ranks."""
    worlds = worlds or worlds_over(THREADS)
    # Clipping depends on the model's gradients, so they are measured once.
    trial = replace(trial, run=_clipping_at_work(trial.run))
    # Once if the run is in float64 itself.
    for precision in dict.fromkeys((FP64, trial.layout.precision)):
        yield _verdict(trial, precision, worlds)


def _setting(run: Run, precision: str) -> Setting:
    """Return the run's settings for the one process."""
    batches = batches_of(run, shape_of(run))
    count = min(run.validation.batches, batches.validations)
    return Setting(
        batches.batch,
        steps=STEPS,
        optimizer=optimizer_of(run),
        rate=partial(plain_rate, run.optimizer, STEPS),
        clip=lambda step: run.optimizer.clip,
        precision=precision_of(precision),
        seed=run.seed,
        scaling=(2.0**16, 2000),
        validations=tuple(map(batches.validation, range(count))),
    )


def _alone(run: Run) -> Forward | None:
    """Return the forward on one process in float64: the plain form, or the class, whose
    forward has no z-loss."""
    if not run.own:
        return PlainForward(run.shape, run.z_loss)
    # A class computes its own loss, without the z-loss.
    return None if run.z_loss else own_forward(maker_of(run))


def _clipping_at_work(run: Run) -> Run:
    """Return the run with a clipping limit between the gradient norms of its steps.

    So clipping takes effect in some steps and not in others.
    """
    if not run.optimizer.clip:
        return run
    free = replace(run, optimizer=replace(run.optimizer, clip=0.0))
    truth = truth_of(
        maker_of(free), _setting(free, FP64), forward=_alone(free)
    )
    norms = [step.norm for step in truth.trace.steps]
    # The median: about half of the steps are clipped.
    return replace(
        run, optimizer=replace(run.optimizer, clip=statistics.median(norms))
    )


def real_seconds(run: Run, shape: Shape) -> float:
    """Estimate the seconds of a step with the real sizes on one core.

    It takes six operations for each token and active weight, at a matmul rate measured
    here.
    """
    size = 256
    a = torch.randn(size, size)
    best = math.inf
    for _ in range(5):
        begun = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begun)
    # 2 n^3 FLOPs for an n x n product; 6 FLOPs for each token and weight.
    rate = 2.0 * size**3 / best
    return 6.0 * shape.active * shape.batch * run.tokens(shape) / rate


def _verdict(trial: RunTrial, precision: str, worlds: Worlds) -> Verdict:
    """Return the verdict on both starts of the run in this precision."""
    matmul = trial.layout.matmul if precision == trial.layout.precision else ""
    first = _computing(trial.layout, precision, matmul)
    second = _computing(trial.resumed, precision, matmul)
    # Each precision in a folder of its own, with its own checkpoint.
    run = replace(trial.run, out=str(Path(trial.run.out, precision)))
    setting = setting_for(first, _setting(run, precision))
    cuts = sums_of(first) if matmul else Layout()
    make = maker_of(run)
    setting = with_overflow(make, setting)
    truth = truth_of(make, setting, matmul, cuts, _alone(run))
    if can_be_replayed(first, make(), setting):
        known = replay(make, setting, rounding_of(first))
        truth = replace(truth, replay=known)
    program = program_in(first, make, setting)
    long = long_program(first, make, setting)
    # The rows of a user's own model come from its modules alone.
    own_rows = "" if run.own else rows_differ(first, shape_of(run), make())
    wrong_row = own_rows or shapes_differ()
    wrong_row = wrong_row or next(_batch_faults(run), "")
    # Once: the keys are those of both precisions.
    if precision == FP64:
        wrong_row = wrong_row or next(refusal_faults(first, shape_of(run)), "")
        wrong_row = wrong_row or next(key_faults(run), "")
    if claim := wrong_row or false_claim(first, program, long):
        return Verdict(str(first), first.ranks, False, math.inf, claim)
    wrong: list[str] = []
    try:
        # The first start ends at STOPPED, the second resumes there.
        stopped = _start(run, first, worlds, setting)
        before = join([rank.seen for rank in stopped], STOPPED)
        wrong += _saved(run, before, STOPPED, damaged=precision == FP64)
        add_broken(run.checkpoints, STOPPED, BROKEN)
        ended = _start(run, second, worlds, setting)
        after = join([rank.seen for rank in ended], STEPS - STOPPED)
        wrong += _saved(run, after, STEPS)
    except Exception as error:  # any error of the ranks is the verdict
        return failed(first, error)
    verdict = judge(first, _one_training(before, after), truth, setting)
    # Faults that equal values of both starts would not show.
    wrong += [
        *_resume_faults(before, after),
        *_skip_faults(before, after),
        *_journal_faults(run, before, after),
        *_report_faults(run, first, second, make),
        *_outcome_faults(stopped, before, steps=STOPPED, by=STOP),
        *_outcome_faults(ended, after, steps=STEPS, by=""),
    ]
    if verdict.passed and wrong:
        return replace(verdict, passed=False, first_difference=wrong[0])
    return verdict


def _start(
    run: Run, layout: Layout, worlds: Worlds, setting: Setting
) -> list[_EndedRank]:
    """Run one start of the run: from its checkpoint, if there is one, to the stop or
    the end. The setting has the loss scales of float16."""
    run = replace(run, layout=str(layout))
    with (
        hold_run(Path(run.out), run.checkpoints),
        # Held as `phalanx train` does, so that a run of the same folder is
        # refused.
        worlds(layout.ranks) as ranks,
    ):
        if wrong := wrong_transport(layout.ranks, ranks):
            raise CommError(wrong)
        return ranks(_on_rank, run, layout, setting)


class _EndedRank(NamedTuple):
    """The observed steps of a rank, and the outcome that it reports."""

    seen: Seen
    outcome: Outcome


def _on_rank(
    world: World, run: Run, layout: Layout, setting: Setting
) -> _EndedRank:
    """Run and record one rank."""
    notes = _Notes(layout, setting)
    outcome = train(
        world, run, str(layout), quiet=True, held=True, observe=notes.begin
    )
    # Added after the last step, when the listener is not called again.
    notes.observed.seen.validation = outcome.validation
    world.clear()
    return _EndedRank(notes.observed.seen, outcome)


class _Notes:
    """Observes one rank of a run, from its first step. A STOP file ends the first
    start."""

    def __init__(self, layout: Layout, setting: Setting) -> None:
        self.layout, self.setting = layout, setting
        self.observed: Observed

    def begin(self, rank: Rank, start: int) -> Any:
        """Return the listener of the run's steps."""
        self.rank, self.batches = rank, rank.batches
        rank.batches = NumberedBatches(rank.batches)  # type: ignore[assignment]
        scale = rank.part.trainer.scaling
        if scale is not None:
            first, scale.patience = self.setting.scaling
            # Later it is the checkpoint's.
            scale.scale = scale.scale if start else first
        self.observed = Observed(
            self.layout, rank.part.model, rank.part.trainer
        )
        self._before_step(start)
        return self.after_step

    def _before_step(self, step: int) -> None:
        """Raise the loss scale where the trial says so, and record the step's batch."""
        scale = self.rank.part.trainer.scaling
        if scale is not None:
            scale.scale *= self.setting.raised.get(step, 1.0)
        self.observed.before_step(self.batches.batch(step))

    def after_step(self, step: CompletedStep) -> None:
        self.observed.after_step(step.result)
        if step.ends:
            return
        self._before_step(step.done)
        if step.done + 1 == STOPPED and self.rank.world.rank == 0:
            Path(
                self.rank.run.out, STOP
            ).touch()  # takes effect in the next step


def _one_training(before: Trace, after: Trace) -> Trace:
    """Join the steps of both starts to one training."""
    steps = [*before.steps, *after.steps]
    return Trace(before.start, steps, after.validation)


def _resume_faults(before: Trace, after: Trace) -> Iterator[str]:
    """Yield resumed weights that differ from the saved ones."""
    for name, saved in before.steps[-1].weights.items():
        # To the bit, as nothing is computed between saving and loading.
        if not torch.equal(after.start[name], saved):
            yield f"step {STOPPED}: the resumed {name} is not the one that was saved"


def _saved(
    run: Run, trace: Trace, step: int, *, damaged: bool = False
) -> Iterator[str]:
    """Describe mistakes in the checkpoints of a start that ends at `step`. Each start
    saves in its middle and at its end.

    With `damaged`, the last one is also damaged in many ways.
    """
    folder = run.checkpoints
    kept = [step - 1, step]
    yield from kept_faults(folder, kept, set_aside=[BROKEN] * (step == STEPS))
    for number, each in zip(kept, trace.steps[-len(kept) :], strict=True):
        path = folder / f"step-{number:08}"
        if path.exists():
            yield from saved_faults(path, number, each.weights)
    if damaged:
        yield from undetected(folder / f"step-{step:08}")


def _skip_faults(before: Trace, after: Trace) -> Iterator[str]:
    """Describe weights that a skipped step has changed, even by a single bit."""
    steps = [*before.steps, *after.steps]
    for number, (last, step) in enumerate(pairwise(steps), 1):
        if math.isfinite(step.norm):
            continue
        for name, weight in step.weights.items():
            if not torch.equal(weight, last.weights[name]):
                yield f"step {number}: {name} has changed in a skipped step"


def _batch_faults(run: Run) -> Iterator[str]:
    """Describe mistakes in the batches that both sides read."""
    batches = batches_of(run, shape_of(run))
    ((folder, _),) = run.sources  # a trial has one
    return batch_faults(Path(folder), batches, STEPS, chats=batches.chats)


def _outcome_faults(
    ranks: Sequence[_EndedRank], trace: Trace, *, steps: int, by: str
) -> Iterator[str]:
    """Describe what a rank says of its end and what was not so: it made `steps` steps,
    stopped by the file `by` if one is named, and saved its checkpoint."""
    loss = trace.steps[-1].logged
    wanted = Outcome(steps, loss, trace.validation, bool(by), by=by)
    for number, rank in enumerate(ranks):
        for part in fields(Outcome):
            said = getattr(rank.outcome, part.name)
            value = getattr(wanted, part.name)
            if said != value:
                yield (
                    f"rank {number} ends after {steps} steps and reports {part.name} = {said!r};"
                    f" expected {value!r}"
                )


def _journal_faults(run: Run, before: Trace, after: Trace) -> Iterator[str]:
    shape = shape_of(run)
    traced = [*before.steps, *after.steps]
    steps = [
        LoggedStep(
            step.logged, step.norm, plain_rate(run.optimizer, STEPS, number)
        )
        for number, step in enumerate(traced)
    ]
    sequence = run.tokens(shape)
    yield from journal_faults(
        read_journal(Path(run.out, "metrics.jsonl")),
        steps,
        shape.batch * sequence,
        None if run.own else counted_flops(shape, shape.batch, sequence),
        after.validation,
    )


def _report_faults(
    run: Run, first: Layout, second: Layout, make: Callable[[], Model]
) -> Iterator[str]:
    """Describe mistakes in what the run reports of itself."""
    starts = [
        Start(str(first), first.ranks, 0, STOPPED),
        Start(str(second), second.ranks, STOPPED, STEPS),
    ]
    sizes = [weight.numel() for weight in make().weights.values()]
    # The last start wrote the file of the run.
    resumed = replace(run, layout=str(second))
    records = read_journal(Path(run.out, "metrics.jsonl"))
    shape = asdict(shape_of(run))
    yield from report_faults(resumed, records, starts, sum(sizes), shape)
    yield from straggler_faults()


def plain_rate(choice: OptimizerChoice, steps: int, step: int) -> float:
    """Return the learning rate of a step by docs/training.md: a warm-up, then constant
    or a decay to min_lr."""
    # A tenth of the peak, if min_lr is not set.
    lowest = choice.lr / 10 if choice.min_lr is None else choice.min_lr
    # The first step has number 1, so that warm-up never has a rate of 0.
    number, warmup = step + 1, choice.warmup_steps
    if number <= warmup:
        return choice.lr * number / warmup
    if choice.schedule == "constant":
        return choice.lr
    begin = warmup
    # wsd: constant, and a decay in the last steps, by default a tenth of them.
    if choice.schedule == "wsd":
        fall = choice.decay_steps or math.ceil(steps / 10)
        begin = max(warmup, steps - fall)
    if number <= begin:
        return choice.lr
    # From 0 at the beginning of the decay to 1 at its last step.
    share = (number - begin) / (steps - begin)
    if choice.schedule == "cosine":
        return lowest + (choice.lr - lowest) * 0.5 * (
            1.0 + math.cos(math.pi * share)
        )
    return choice.lr + (lowest - choice.lr) * share
