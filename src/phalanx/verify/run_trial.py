"""A run in small, trained by its own ranks and by one process, and compared number by number.

`Rank` and `make_step` are those of the run: its optimizer with all keys, limit of the norm, schedule of the
rate, precision, adapters, frozen pieces, kind of batches. The one process has the plain form of the model
and torch's optimizers. Its learning rate is computed here from the run's keys.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rank_watch import Positions

from ..comm import World
from ..layout import Layout, Shape
from ..layout.choices import FP64, THREADS
from ..layout.proportions import STEPS, TOKENS, small_run
from ..layout.run import OptimizerChoice, Run
from ..train.data.batches import Batches
from ..train.data.token_files import Corpus, DataError, Stream, open_corpus
from ..train.precision import precision_of
from ..train.program import maker_of
from ..train.rank import Rank, optimizer_of
from ..train.step import make_step
from .low_precision import sums_of
from .reference import PlainForward
from .trial import TOKEN, Observed, Seen, Setting, join, token_numbers
from .verify import Verdict, failed, judge, setting_for, truth_of, worlds_over

_DOCUMENTS = 40
# of documents whose own are not known, in sequences
_LENGTHS = (0.2, 0.5, 1.3, 0.1, 0.8)


@dataclass(frozen=True)
class RunTrial:
    """A run in small: `covered` and `left_out` say which of its traits the comparison has."""

    run: Run
    layout: Layout
    covered: tuple[str, ...]
    left_out: tuple[str, ...]


class NumberedBatches:
    """A run's batches, in which each token has its number in the whole batch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def batch(self, step: int, rows: slice) -> dict[str, Tensor]:
        numbers = token_numbers(self._batches.batch(step))
        return {**self._batches.batch(step, rows), TOKEN: numbers[rows]}


def run_trial(run: Run, shape: Shape, layout: Layout, out: str) -> RunTrial:
    """The small form of a run whose model is built in."""
    small = small_run(run, shape, layout, out)
    chosen = small.layout_of(small.shape)
    assert chosen is not None
    o = run.optimizer
    covered = [
        f"{o.name} with every key, {o.schedule} over {STEPS} steps"
        + f" with {small.optimizer.warmup_steps} of warmup" * bool(o.warmup_steps),
        "clipping that is at work in some steps" if o.clip else "no clipping",
        f"the layout as {chosen}",
        f"{small.shape.layers} of {shape.layers} blocks, every kind of them",
        "masks between documents" if run.document_masks else "text that flows on",
        f"packing {run.packing}" if run.packing else "the packing of its kind of data",
        "an epoch's end",
    ]
    covered += [f"z-loss {run.z_loss:g}"] * bool(run.z_loss)
    covered += ["LoRA"] * bool(run.lora.r) + [f"frozen {run.freeze}"] * bool(run.freeze)
    left_out = [
        "its own text and its order: documents of random tokens have their lengths",
        "weights that are loaded, saves and a resume, the log",
        f"widths, {shape.vocab:,} words, and sequences of {run.tokens(shape):,} tokens",
    ]
    left_out += ["its named stages"] * bool(layout.stages)
    return RunTrial(small, chosen, tuple(covered), tuple(left_out))


def documents_like(run: Run, shape: Shape, sequences: int) -> Corpus:
    """Random tokens in documents that are as long beside a sequence as those of the run's data."""
    draw = np.random.default_rng(run.seed)
    lengths, answers = _lengths(run, run.tokens(shape))
    sizes = [max(2, round(length * TOKENS)) for length in lengths]
    # So few that an epoch ends within the steps.
    most = max(2 * TOKENS, sequences * TOKENS * 3 // 5)
    kept = [
        n for n, total in zip(sizes, np.cumsum(sizes), strict=True) if total <= most
    ] or [most]
    starts = np.concatenate(([0], np.cumsum(kept))).astype(np.int64)
    count = int(starts[-1])
    tokens = draw.integers(0, 250, count).astype(np.uint16)
    mask = (np.arange(count) % 5 > 1).astype(np.uint8) if answers else None
    stream = Stream(tokens, starts, answers=mask)
    return Corpus("random documents", stream, stream, 0, "random", weight=1)


def _lengths(run: Run, sequence: int) -> tuple[list[float], bool]:
    """Lengths of documents, in sequences, and if only answers are trained on."""
    for path, _ in run.sources:
        try:
            stream = open_corpus(path).train
        except DataError:  # text that is not tokens yet
            continue
        ends = np.minimum(np.diff(stream.starts[: _DOCUMENTS + 1]), 2 * sequence)
        return [float(n) / sequence for n in ends if n > 1], stream.answers is not None
    return [*_LENGTHS] * (_DOCUMENTS // len(_LENGTHS)), False


def verify_run(trial: RunTrial, lengths_of: tuple[Run, Shape]) -> Iterator[Verdict]:
    """The verdict in float64, then in the run's own precision."""
    trial = replace(trial, run=_clipping_at_work(trial.run, lengths_of))
    for precision in dict.fromkeys((FP64, trial.layout.precision)):
        layout = replace(trial.layout, precision=precision)
        matmul = layout.matmul if precision == trial.layout.precision else ""
        layout = replace(layout, matmul=matmul)
        yield _verdict(replace(trial.run, layout=str(layout)), layout, lengths_of)


def _batches(run: Run, lengths_of: tuple[Run, Shape]) -> Batches:
    shape = run.shape
    corpus = documents_like(*lengths_of, shape.batch * STEPS)
    return Batches(
        (corpus,),
        run.tokens(shape),
        shape.batch,
        seed=run.seed,
        masks=run.document_masks,
        vocab=shape.vocab,
        packing=run.packing,
    )


def _setting(run: Run, precision: str, batches: Batches) -> Setting:
    """The run's terms for the one process."""
    return Setting(
        batches.batch,
        steps=STEPS,
        optimizer=optimizer_of(run),  # type: ignore[arg-type]
        rate=partial(plain_rate, run.optimizer, STEPS),
        clip=lambda step: run.optimizer.clip,
        precision=precision_of(precision),
        seed=run.seed,
        scaling=(2.0**16, 2000),
    )


def _clipping_at_work(run: Run, lengths_of: tuple[Run, Shape]) -> Run:
    """The run with a limit between the gradient norms of its small steps, so that clipping is at work in
    some of them and not in others."""
    if not run.optimizer.clip:
        return run
    free = replace(run, optimizer=replace(run.optimizer, clip=0.0))
    setting = _setting(free, FP64, _batches(free, lengths_of))
    forward = PlainForward(free.shape, 0.0, free.z_loss)
    truth = truth_of(maker_of(free), setting, forward=forward)
    norms = [step.norm for step in truth.trace.steps]
    return replace(run, optimizer=replace(run.optimizer, clip=statistics.median(norms)))


def real_seconds(run: Run, shape: Shape) -> float:
    """Seconds that one core takes for a step of the real sizes, by the products of its weights: six
    operations for each token and active weight, at the rate of a product measured here."""
    size = 256
    a = torch.randn(size, size)
    best = math.inf
    for _ in range(5):
        begun = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - begun)
    rate = 2.0 * size**3 / best
    return 6.0 * shape.active * shape.batch * run.tokens(shape) / rate


def _verdict(run: Run, layout: Layout, lengths_of: tuple[Run, Shape]) -> Verdict:
    shape = run.shape
    batches = _batches(run, lengths_of)
    setting = setting_for(layout, _setting(run, layout.precision, batches))
    cuts = sums_of(layout) if layout.matmul else Layout()
    forward = PlainForward(shape, 0.0, run.z_loss)
    truth = truth_of(maker_of(run), setting, layout.matmul, cuts, forward)
    try:
        with worlds_over(THREADS)(layout.ranks) as ranks:
            seen = ranks(_on_rank, run, layout, batches, setting)
    except Exception as error:  # what the ranks of a run raise is its verdict
        return failed(layout, error)
    return judge(layout, join(seen, STEPS), truth, setting)


def _on_rank(
    world: World, run: Run, layout: Layout, batches: Batches, setting: Setting
) -> Seen:
    """The steps of the run on one rank, written down."""
    positions = Positions(world.rank)
    rank = Rank(world, run, layout)
    rank.batches = NumberedBatches(batches)  # type: ignore[assignment]
    observed = Observed(layout, rank.part.model, rank.part.trainer)
    for step in range(run.steps):
        observed.before_step(batches.batch(step))
        observed.after_step(make_step(rank, positions, step).result)
    observed.validate(rank.part.validator, setting, world)
    positions.close("ended")
    world.clear()
    return observed.seen


def plain_rate(choice: OptimizerChoice, steps: int, step: int) -> float:
    """The learning rate of a step, as docs/training.md says it: a rise, then a level or a fall to min_lr."""
    lowest = choice.lr / 10 if choice.min_lr is None else choice.min_lr
    number, warmup = step + 1, choice.warmup_steps
    if number <= warmup:
        return choice.lr * number / warmup
    if choice.schedule == "constant":
        return choice.lr
    begin = warmup
    if choice.schedule == "wsd":
        fall = choice.decay_steps or math.ceil(steps / 10)
        begin = max(warmup, steps - fall)
    if number <= begin:
        return choice.lr
    share = (number - begin) / (steps - begin)
    if choice.schedule == "cosine":
        return lowest + (choice.lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * share))
    return choice.lr + (lowest - choice.lr) * share
