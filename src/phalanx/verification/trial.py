"""Trains a few steps of one layout on a world of ranks, recording every gradient and
weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import Work, World
from ..layout import Layout
from ..layout.choices import SCHEDULES, SEARCHED
from ..models import RoutingPart
from ..parallel import Entry, Model, Piece, Precision, microbatches, on_device
from ..parallel.block_parts import cut_blocks
from ..parallel.exchange import in_runs
from ..parallel.local import LocalModel, build_local, own_time_parts
from ..parallel.pieces import Bundle
from ..parallel.tensor import Weight
from ..program import Op, Program, StepOptions, Timeline, ops
from ..program.build import forward_only
from ..training.executor import Executor, StepResult, Validator
from ..training.optimizer import AdamW, Optimizer
from ..training.precision import LossScale
from ..training.program import fitting_program, program_of
from .claims import LONG
from .reference import (
    Mismatch,
    Trace,
    TracedStep,
    project,
    routers,
    validation_of,
)
from .wide import looked_at, unrounded

Batch = Mapping[str, Tensor]
FIT = 0.7  # share of a layout's bytes that recompute:fit has to fit into
# batch entry with each token's number in the batch, from 1; padding has 0
TOKEN = "token"


def rate(step: int) -> float:
    """Return the learning rate: first too small for a 16-bit weight, then large."""
    # 1e-5 is below the last bit of most weights in 16 bits: masters must keep
    # the update.
    return 1e-2 if step else 1e-5


def clip(step: int) -> float:
    """Return the clipping limit: effective in step 0, too large in step 1, and none in
    step 2."""
    return (0.25, 1e3, 0.0)[step % 3]


@dataclass(frozen=True)
class Setting:
    """The settings that all layouts of a comparison share.

    Adam's eps is as large as a gradient, so that an update does not depend on the sign
    of a gradient near zero. `scaling` is the loss scale of float16: its initial value,
    and the number of steps after which it doubles. It doubles after step 0, and the
    single target of step 1 then overflows.
    """

    batches: Callable[[int], Batch]
    steps: int = 3
    optimizer: Optimizer = AdamW(eps=1e-3)  # frozen
    rate: Callable[[int], float] = rate
    clip: Callable[[int], float] = clip
    precision: Precision = Precision()  # frozen
    seed: int = 0
    scaling: tuple[float, int] = (2.0**16, 1)
    # Factors by which the loss scale is multiplied by hand before a step.
    raised: Mapping[int, float] = field(default_factory=dict)
    # batches of the validation after the last step; None: those of `validation_of`
    validations: tuple[Batch, ...] | None = None


class Part(NamedTuple):
    """A part of a weight as one rank has it, before the first step (-1) or after a
    step.

    Frozen weights, and all weights before the first step, have no gradient.
    """

    step: int
    entry: Entry
    gradient: Tensor | None
    weight: Tensor

    def tensors(self) -> list[tuple[str, Tensor]]:
        if self.step < 0:
            return [("start", self.weight)]
        gradient = (
            [] if self.gradient is None else [("gradient", self.gradient)]
        )
        return [*gradient, ("weight", self.weight)]


# parts of a unit's gradient, by their places in its shard
Gradients = dict[int, Tensor]


class Leaf(NamedTuple):
    """One microbatch's gradient of a rank's part of a weight."""

    weight: Weight
    gradient: Tensor


# by weight, piece, microbatch of the step and part of time
Leaves = dict[tuple[str, int, int, int], Leaf]
# tokens of a piece's output, and one number (or the experts) for each of them
Output = tuple[Tensor, Tensor]


@dataclass
class Seen:
    """Observations of one rank's steps."""

    parts: list[Part]
    losses: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    # Mean losses over all ranks.
    logged: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    outputs: list[dict[str, list[Output]]] = field(default_factory=list)
    routes: list[dict[str, list[Output]]] = field(default_factory=list)
    # of a layout of `exact`, before they are added
    leaves: list[Leaves] = field(default_factory=list)
    # of the batch, in tokens or rows
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    # 16-bit results that should be wider, see `wide.py`
    breaches: list[str] = field(default_factory=list)
    validation: float | None = None
    timeline: Timeline = Timeline(())  # of the last step


class _Recorder:
    """Records each gradient of an executor, without the loss scale, before it is used
    or skipped."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.seen: dict[int, Gradients] = {}
        self.plain = executor.handlers[ops.UPDATE]
        executor.handlers[ops.UPDATE] = self._update
        self.leaves: Leaves = {}
        self.add = executor.handlers[ops.ADD]
        executor.handlers[ops.ADD] = self._add

    def _update(self, op: Op) -> Work | None:
        executor = self.executor
        for number, unit in executor.local.units.items():
            if unit.piece == op.piece:
                runs = [
                    slice(e.offset, e.offset + e.stop - e.start)
                    for e in unit.entries()
                ]
                parts = unit.gradients(runs)
                self.seen[number] = {
                    run.start: part.detach() / executor._loss_scale
                    for run, part in zip(runs, parts, strict=True)
                }
        return self.plain(op)

    def _add(self, op: Op) -> Work | None:
        executor = self.executor
        local, program = executor.local, executor.program
        user, m = program.tree_of(op)
        data, own = local.coordinates["data"], program.microbatches
        for unit in executor._exact_units(op):
            weights = {weight.name: weight for weight in unit.order}
            # Ranks of ep are neighbours, and the first of them is the first sender.
            first = data // unit.senders * unit.senders
            time = local.coordinates["cp"] * unit.times
            for slot, gradients in enumerate(unit.leaf(user, m)):
                sender, part = divmod(slot, unit.times)
                microbatch = (first + sender) * own + m
                at = microbatch, time + part
                for name, gradient in gradients.items():
                    leaf = Leaf(weights[name], gradient.cpu().clone())
                    self.leaves[name, user, *at] = leaf
        return self.add(op)


class _Tracer:
    """Records the output of each piece in a step. Recomputation is not recorded
    again."""

    def __init__(
        self, layout: Layout, local: LocalModel, model: Model
    ) -> None:
        self.outputs: dict[str, list[Output]] = {}
        self.routes: dict[str, list[Output]] = {}
        self.done: set[tuple[int, int]] = set()
        self.breaches: list[str] = []
        self.parts = layout.tp if layout.seq else 1
        self.times = max(1, own_time_parts(layout))
        self.ep_ranks = layout.ep_ranks
        self.tp = local.coordinates["tp"]
        # Under tp without seq every rank has the same outputs, and the first rank
        # records them.
        if self.parts > 1 or self.tp == 0:
            for number, piece in local.pieces.items():
                name = model.pieces[number][0]
                last = (
                    number + 1 == len(model.pieces)
                    or model.pieces[number + 1][0] != name
                )
                self._wrap(number, piece, name, last=last)

    def _wrap(
        self, number: int, piece: Piece, name: str, *, last: bool
    ) -> None:
        """Record the outputs of a piece.

        `last`: it is the last of several pieces of a block, whose output is compared.
        """
        plain = piece.forward
        chosen: list[Tensor] = []
        # a RoutingPart returns its choices, even from a compiled graph
        if not isinstance(piece.module, RoutingPart):
            for _, router in routers([(name, piece.module)]):
                router.register_forward_hook(
                    lambda m, args, out: chosen.append(out[1])
                )

        def forward(
            microbatch: int, bundle: Bundle, batch: Batch, **how: Any
        ) -> Bundle:
            # At most one breach in all: the first is enough.
            self.breaches += islice(
                unrounded(piece.units), 1 - len(self.breaches)
            )
            out = plain(microbatch, bundle, batch, **how)
            y = out["x"]
            if "counts" in out:
                whole = out["gates"].shape[1] > y.shape[1]
                for each in self._chosen(out):
                    # otherwise they are the tokens of all tp ranks
                    own = each.chunk(self.parts, 1)[self.tp]
                    chosen.append(own if whole else each)
            # Recomputation runs the forward again: only the first counts.
            if (number, microbatch) not in self.done and y.dim() > 1:
                self.done.add((number, microbatch))
                tokens = batch[TOKEN]
                # With seq, tp ranks have parts of the sequence.
                if tokens.dim() > 1:
                    runs = tokens.chunk(self.times, 1)
                    here = [run.chunk(self.parts, 1)[self.tp] for run in runs]
                    tokens = torch.cat(here, 1)
                numbers = project(y)
                valid = tokens > 0
                seen = tokens[valid].cpu() - 1, numbers[valid].cpu()
                if last:
                    self.outputs.setdefault(name, []).append(seen)
                if chosen:
                    # Sorted, as the order of a token's experts has no meaning.
                    parts = chosen[-self.times :]
                    experts = torch.cat(parts, 1).sort(-1).values
                    self.routes.setdefault(name, []).append(
                        (seen[0], experts[valid].cpu())
                    )
            chosen.clear()
            return out

        piece.forward = forward  # type: ignore[method-assign]

    def _chosen(self, out: Bundle) -> tuple[Tensor, ...]:
        """The experts (B, T, top_k) of each token that is sent, by part of time."""
        # Rows are sorted by rank, part of time and expert, as counts travel.
        counts = out["counts"].view(-1, out["counts"].shape[-1])
        experts = torch.arange(counts.shape[1], device=counts.device)
        experts = experts.expand_as(counts)
        by_rank = (
            in_runs(x, self.ep_ranks).flatten() for x in (experts, counts)
        )
        # Entry i of `order` is the source of the i-th row; its inverse gives each
        # token's expert.
        sorted_by = torch.repeat_interleave(*by_rank)[out["order"].argsort()]
        rows, tokens, top_k = out["gates"].shape
        parts = sorted_by.view(len(counts), rows, -1, top_k)
        assert parts.shape[2] * len(counts) == tokens
        return parts.unbind()

    def take(self, seen: Seen) -> None:
        seen.outputs.append(self.outputs)
        seen.routes.append(self.routes)
        self.outputs, self.routes = {}, {}
        self.done.clear()


def program_in(
    layout: Layout, model: Callable[[], Model], setting: Setting
) -> Program:
    """Return the program of a layout for this model; raise if `recompute:fit` cannot be
    met."""
    options = StepOptions(whole_matrices=setting.optimizer.whole_matrices)
    if layout.recompute != "fit":
        return program_of(model(), layout, options)
    return fitting_program(
        model,
        layout,
        setting.batches(0),
        setting.precision,
        lambda most: FIT * most,
        options,
    )


def long_program(
    layout: Layout, model: Callable[[], Model], setting: Setting
) -> Program | None:
    """Return the layout's program with `LONG` microbatches.

    None if it has only one microbatch, or if the program takes long to search. A user's own
    schedule may not exist for other numbers of microbatches.
    """
    if layout.microbatches == 1 or layout.recompute == "fit" or layout.stages:
        return None
    if layout.schedule == SEARCHED or layout.schedule not in SCHEDULES:
        return None
    return program_in(replace(layout, microbatches=LONG), model, setting)


class _PoisonedMemory(AbstractContextManager[None]):
    """Fills new memory with NaN while any rank of this process is inside.

    torch's switch for it is process-wide. It is used on CPUs only: on a GPU the switch
    also changes which kernels run.
    """

    def __init__(self) -> None:
        self.lock, self.inside = Lock(), 0

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = torch.are_deterministic_algorithms_enabled()
                self.warned = (
                    torch.is_deterministic_algorithms_warn_only_enabled()
                )
                # warn_only: operations without a deterministic form still run.
                torch.use_deterministic_algorithms(True, warn_only=True)
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                torch.use_deterministic_algorithms(
                    self.before, warn_only=self.warned
                )


_poisoned_memory = _PoisonedMemory()


def train_layout(
    world: World,
    layout: Layout,
    program: Program,
    model: Callable[[], Model],
    setting: Setting,
) -> Seen:
    """Train a few steps in a layout and return this rank's observations. Collective.

    Uninitialized memory is NaN.
    """
    with _poisoned_memory if world.device.type == "cpu" else nullcontext():
        return _train_layout(world, layout, program, model, setting)


def _train_layout(
    world: World,
    layout: Layout,
    program: Program,
    model: Callable[[], Model],
    setting: Setting,
) -> Seen:
    mine = cut_blocks(model(), layout)
    local = build_local(
        world,
        layout,
        mine,
        program,
        seed=setting.seed,
        precision=setting.precision,
        poison=True,
    )
    half = setting.precision.compute == torch.float16
    executor = Executor(
        local, program, world.rank, setting.optimizer,
        scaling=LossScale(*setting.scaling) if half else None,
    )  # fmt: skip
    observed = Observed(layout, mine, executor)
    watch = (
        None
        if layout.compile
        # Compiled code has no operations to look at one by one.
        else looked_at(mine, setting.precision, world.device)
    )
    # Every step has the same operations, so the first one is examined. Optimizers of
    # whole matrices may only prepare their state in it, so there it is the first two.
    # Examining all of them took half the time of a comparison in 16 bits.
    examined = 2 if setting.optimizer.whole_matrices else 1
    for step in range(setting.steps):
        batch = setting.batches(step)
        own = _own(batch, layout, local, world)
        executor.clip = setting.clip(step)
        if executor.scaling is not None:
            executor.scaling.scale *= setting.raised.get(step, 1.0)
        observed.before_step(batch)
        with watch if watch and step < examined else nullcontext():
            result = executor.step(own, setting.rate(step))
        observed.after_step(result)
    validator = Validator(local, forward_only(program, layout), world.rank)
    observed.validate(validator, setting, world)
    breaches = [*observed.tracer.breaches, watch.found if watch else ""]
    observed.seen.breaches = [breach for breach in breaches if breach]
    world.clear()
    return observed.seen


class Observed:
    """Records the steps of an executor.

    After each operation the rank's state is checked against the program.
    """

    def __init__(
        self, layout: Layout, model: Model, executor: Executor
    ) -> None:
        self.layout, self.executor, self.local = (
            layout,
            executor,
            executor.local,
        )
        executor.checked = True
        self.recorder = _Recorder(executor)
        # The start, before any step.
        self.seen = Seen([*_parts(self.local, {}, -1)])
        self.tracer = _Tracer(layout, self.local, model)

    def before_step(self, batch: Batch) -> None:
        """Record the size of the whole batch, and the loss scale."""
        scaling = self.executor.scaling
        self.seen.sizes.append(token_numbers(batch).shape)
        self.seen.scales.append(scaling.scale if scaling else 1.0)

    def after_step(self, result: StepResult) -> None:
        seen, step = self.seen, len(self.seen.losses)
        seen.losses.append(result.loss)
        seen.counts.append(result.count)
        seen.norms.append(result.norm)
        seen.logged.append(result.total)
        self.tracer.take(seen)
        seen.leaves.append(self.recorder.leaves)
        self.recorder.leaves = {}
        seen.parts += _parts(self.local, self.recorder.seen, step)
        seen.timeline = result.timeline

    def validate(
        self, validator: Validator, setting: Setting, world: World
    ) -> None:
        """Record the mean loss of the setting's validation batches."""
        batches: Sequence[Batch] | None = setting.validations
        if batches is None:
            batches = validation_of(setting.batches, setting.steps)
        self.seen.validation = validator.mean_loss(
            # A generator: one batch at a time is on the device.
            _own(batch, self.layout, self.local, world)
            for batch in batches
        )


def _own(
    batch: Batch, layout: Layout, local: LocalModel, world: World
) -> list[dict[str, Tensor]]:
    numbered = {**batch, TOKEN: token_numbers(batch)}
    own = microbatches(
        numbered,
        layout,
        local.coordinates["data"],
        local.coordinates["cp"],
        ahead=local.ahead,
    )
    return [on_device(each, world.device) for each in own]


def token_numbers(batch: Batch) -> Tensor:
    """Return the number of each token in the batch, or of each row without tokens."""
    first = next(iter(batch.values()))
    size = batch["tokens"].shape if "tokens" in batch else first.shape[:1]
    # From 1: padding has 0.
    return torch.arange(1, size.numel() + 1).view(size)


def _parts(
    local: LocalModel, gradients: Mapping[int, Gradients], step: int
) -> Iterable[Part]:
    for unit in local.every_unit:
        gradient, home = (
            None if unit.frozen else gradients.get(unit.number),
            unit.home,
        )
        for entry in unit.entries():
            # The elements of the rank's flat shard that belong to this weight.
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            part = None if gradient is None else gradient[run.start].cpu()
            yield Part(step, entry, part, home[run].detach().cpu().clone())


class _Whole:
    """One tensor joined from the parts of all ranks; NaN where no rank has it."""

    def __init__(self, what: str, weight: Weight, dtype: torch.dtype) -> None:
        self.what, self.name = what, weight.name
        self.numbers = torch.full(weight.shape, float("nan"), dtype=dtype)
        # the first rank that has each element
        self.rank = torch.full(weight.shape, -1, dtype=torch.int16)
        self.mismatch: Mismatch | None = None

    def add(self, rank: int, entry: Entry, part: Tensor) -> None:
        """Add a rank's part, comparing it with copies that were added before."""
        weight = entry.weight
        # Fill a mask of the local part, then view it as a box of the whole.
        local = torch.zeros(weight.local, dtype=part.dtype)
        mask = torch.zeros(weight.local, dtype=torch.bool)
        local.view(-1)[entry.start : entry.stop] = part
        mask.view(-1)[entry.start : entry.stop] = True
        # The last rank's part may be padded: what is beyond the cut is not
        # part of the weight.
        inside = tuple(slice(0, cut.stop - cut.start) for cut in weight.cuts)
        local, mask = local[inside], mask[inside]
        numbers, ranks = self.numbers[weight.box], self.rank[weight.box]
        # Elements that no earlier rank had; the others must be equal to those.
        new = mask & (ranks < 0)
        differ = mask & ~new & ~_same_bits(numbers, local)
        # takes a third of the time of indexing by a mask
        numbers.copy_(local.where(new, numbers))
        ranks.masked_fill_(new, rank)
        if self.mismatch is None and differ.any():
            at = tuple(differ.nonzero()[0].tolist())
            element = tuple(
                i + cut.start for i, cut in zip(at, weight.cuts, strict=True)
            )
            ends, values = (
                (int(ranks[at]), rank),
                (float(numbers[at]), float(local[at])),
            )
            self.mismatch = Mismatch(
                self.what, self.name, element, ends, values
            )


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Compare bits: zeros of different sign differ; NaN equals NaN, whose bits are
    arbitrary."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())


def join(seen: Sequence[Seen], steps: int) -> Trace:
    """Join the parts of all ranks to the whole tensors of every step.

    Copies of a part must have the same bits; otherwise the step has a mismatch.
    """
    wholes: dict[tuple[int, str], dict[str, _Whole]] = {
        (step, what): {}
        for step in range(-1, steps)
        for what in ("start", "gradient", "weight")
    }
    for rank, one in enumerate(seen):
        for part in one.parts:
            weight = part.entry.weight
            for what, numbers in part.tensors():
                tensors = wholes[part.step, what]
                if weight.name not in tensors:
                    tensors[weight.name] = _Whole(what, weight, numbers.dtype)
                tensors[weight.name].add(rank, part.entry, numbers)

    def numbers_of(step: int, what: str) -> dict[str, Tensor]:
        return {
            name: whole.numbers for name, whole in wholes[step, what].items()
        }

    def joined(step: int) -> TracedStep:
        first, norm = seen[0], seen[0].norms[step]
        # What differed before the first step counts for the first.
        kinds = [(step, "gradient"), (step, "weight")] + [(-1, "start")] * (
            step == 0
        )
        mismatches = [
            whole.mismatch for kind in kinds for whole in wholes[kind].values()
        ]
        mismatches += [
            _unequal("norm", [rank.norms[step] for rank in seen]),
            _unequal("loss scale", [rank.scales[step] for rank in seen]),
            _unequal("logged loss", [rank.logged[step] for rank in seen]),
        ]
        if step == steps - 1:
            mismatches.append(
                _unequal("validation loss", [rank.validation for rank in seen])
            )
        return TracedStep(
            # Sums over ranks, divided by the tokens of all.
            sum(rank.losses[step] for rank in seen)
            / max(1.0, first.counts[step]),
            -1.0 if norm is None else norm,
            numbers_of(step, "gradient"),
            numbers_of(step, "weight"),
            # NaN where no rank has the output, so that a missing one is a
            # difference.
            _outputs(
                seen, step, [rank.outputs[step] for rank in seen], math.nan
            ),
            first.scales[step],
            tuple(mismatch for mismatch in mismatches if mismatch is not None),
            _outputs(seen, step, [rank.routes[step] for rank in seen], -1),
            logged=first.logged[step],
        )

    every = [*map(joined, range(steps))]
    breaches = [
        f"rank {rank}: {x}"
        for rank, one in enumerate(seen)
        for x in one.breaches
    ]
    return Trace(
        numbers_of(-1, "start"), every, seen[0].validation, tuple(breaches)
    )


def _unequal(what: str, values: Sequence[float | None]) -> Mismatch | None:
    """Return the first rank whose value differs from rank 0's, for a value that all
    ranks agree on."""
    numbers = [math.nan if value is None else value for value in values]
    first = numbers[0]
    for rank, number in enumerate(numbers):
        if number != first and not (math.isnan(number) and math.isnan(first)):
            return Mismatch(what, "", (), (0, rank), (first, number))
    return None


def _outputs(
    seen: Sequence[Seen],
    step: int,
    ranks: Iterable[dict[str, list[Output]]],
    nobody: float,
) -> dict[str, Tensor]:
    wholes: dict[str, Tensor] = {}
    for name, outputs in (item for rank in ranks for item in rank.items()):
        for tokens, numbers in outputs:
            if name not in wholes:
                size = *seen[0].sizes[step], *numbers.shape[1:]
                wholes[name] = torch.full(size, nobody, dtype=numbers.dtype)
            # Tokens are numbered over the flattened batch.
            wholes[name].view(-1, *numbers.shape[1:])[tokens] = numbers
    return wholes
