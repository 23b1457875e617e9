"""Training loops written by the user, on the executor that `train` uses.

    run = phalanx.prepare(model, optimizer, layout="dp2 zero3", loss=my_loss)
    for batch in run.shard(loader):
        result = run.step(batch)

`prepare` builds this rank's part of a torch module; a step runs the layout's program.
The run file, data, logs and restarts of `train` are left to the user's script.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import World, agreement, join
from ..comm.agree import exchange
from ..generate import Generator, Sampling
from ..layout import Layout, LayoutError, legal
from ..layout.choices import AUTO, FP16, FP32, FP64
from ..layout.host import available_memory
from ..layout.recipe import module_recipe
from ..layout.source import running_modules
from ..parallel import (
    Model,
    UntriedPieces,
    described_whole,
    refuse_mixing,
    refuse_unfit,
    share,
)
from ..parallel.batch import count_valid
from ..parallel.block_parts import cut_blocks
from ..parallel.own_apart import refuse_other_pieces
from ..parallel.own_loss import (
    LossFunction,
    Measure,
    OwnLoss,
    arguments_for,
    give_loss,
    make_head,
    make_whole,
)
from ..parallel.own_module import Describe, OwnModule
from ..parallel.own_tp import Plan
from ..program import Program
from ..training.checkpoint import Saver
from ..training.checkpoint_format import CheckpointError, Progress
from ..training.checkpoint_load import load
from ..training.own_optimizer import (
    OwnOptimizer,
    refuse_other_than_elementwise,
)
from ..training.parallelize import ModelPart, parallelize
from ..training.precision import precision_on
from ..training.program import program_of
from ..training.whole_weights import whole_weights
from ..verification.first import Subject, batches_like, refuse_unverified

Count = Callable[[Mapping[str, Tensor]], Any]
# A batch of a loader: named tensors, or an input with its targets.
GivenBatch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor


_LOG = logging.getLogger(__name__)
LOOP = "loop"  # key of the loop's entries in a checkpoint's `config`


class LoopError(ValueError):
    """Raised for a call of a user's loop that cannot be carried out; explains what to
    do."""

    exit_code = 1


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step, equal on all ranks.

    `loss` and `metrics` are means over the batch of all ranks. If the loss or gradient
    was not `finite`, nothing was updated.
    """

    step: int
    loss: float
    norm: float
    metrics: Mapping[str, float]
    finite: bool


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and metrics of a batch over all ranks."""

    loss: float
    metrics: Mapping[str, float]


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: str | Layout = "",
    *,
    loss: LossFunction | None = None,
    count: Count | None = None,
    metrics: Sequence[str] = (),
    clip: float = 0.0,
    describe: Describe | None = None,
    example: GivenBatch | None = None,
    tp_plan: Plan | None = None,
    world: World | None = None,
    verify: bool = True,
) -> PreparedRun:
    """Build this rank's part of a torch module, for a training loop of your own. Collective.

        run = phalanx.prepare(model, optimizer, layout="dp2 zero3", loss=my_loss)

    model: a module with its weights; all ranks start with those of rank 0
    optimizer: a torch optimizer over the module's parameters. Its options are read, but it is never
        stepped; you or torch's schedulers may change its learning rates
    layout: layout as text; by default dp over all ranks, and with "auto" the lowest ZeRO stage
        whose state fits in half of the memory, and with an example as many microbatches as fit
    loss: function loss(output, batch) that returns the summed loss of a microbatch, optionally with
        a dict of summed metrics; by default the model's own loss
    count: function count(batch) whose sum over all ranks divides losses and metrics; by default the
        number of targets other than -100, or of rows
    metrics: names of the metrics that the loss returns
    clip: maximum norm of the gradient of all weights; 0: no clipping
    describe: function that returns the pieces and the rule table of the module
        (docs/bring-your-model.md); by default `describe` in the module's file
    example: a batch on which a module without a description is run once to find its blocks.
        Without an example, or without blocks, such a module is a single piece, for dp and ZeRO
    tp_plan: which linears of the blocks tp shards, as torch's `parallelize_module` takes it:
        {"attn.wq": ColwiseParallel(), "attn.wo": RowwiseParallel()}. It needs an example
    world: this rank's connection to the others; by default `phalanx.join()`
    verify: before the first step in a layout, compare a step of a cut-down copy of the module with
        one process; a trial that passed is not repeated
    """
    world = world or join()
    with agreement(world) as facts:
        _refuse_other_types(layout, loss, metrics)
        facts["layout"] = str(layout).strip()
        auto = facts["layout"] == AUTO
        counts = auto and not world.rank
        kept = _KeptByRow.of(model, loss, example) if counts else _KeptByRow()
    if auto:
        layout = _auto(model, world, kept)
    # Whatever fails inside on one rank fails on all: otherwise the others
    # would wait for it in a later call.
    with agreement(world) as facts:
        chosen = _layout_of(layout, model, world.size)
        refuse_other_than_elementwise(optimizer)
        entries = None if example is None else _entries(example)
        own = OwnModule.of(model, describe, entries, tp_plan)
        if _needs_no_pieces(chosen):
            own = own.undivided()
        measure = Measure(_counted(count), tuple(metrics))
        # Once for the world: the other ranks hear of a failure when the block
        # ends.
        if not world.rank:
            _refuse_other_forward(own, chosen)
            _refuse_wrong_plan(own, chosen, loss, measure)
        made, names = own.model()
        _refuse_illegal(made, chosen)
        _give_loss(
            made, own, OwnLoss(loss, measure) if loss else None, measure
        )
        made = cut_blocks(made, chosen)
        program = program_of(made, chosen)
        # What must be equal on all ranks; compared when the block ends, before
        # any weight is sent.
        facts |= _facts(made, chosen, program, optimizer, measure, clip)
        first = (
            _FirstTrial(own, chosen, loss, measure, entries or {})
            if verify
            else None
        )
        # With an example the comparison can be made now, otherwise with the
        # first batch of the loop.
        if first and first.entries and not world.rank:
            first.refuse_different(first.entries)
    # Clipping and fp16's loss scale both multiply the gradient before the
    # update.
    scaled = clip > 0 or chosen.precision == FP16
    parameters = {name: own.names[theirs] for name, theirs in names.items()}
    updater = OwnOptimizer(optimizer, parameters, scaled=scaled)
    part = parallelize(
        world,
        chosen,
        made,
        program,
        updater,
        precision=precision_on(world.device, chosen),
        clip=clip,
        measure=measure,
        # a second run of this world has groups of its own
        prefix=world.unused_prefix("everyone"),
    )
    run = PreparedRun(world, part, own, names, updater)
    # Without an example, the first step compares its own batch.
    if first and not first.entries:
        run._first = first
    run._begin_alike()
    return run


class PreparedRun:
    """One rank of a user's training loop.

    Methods that communicate are collective: all ranks call them, in the same order.
    `steps` is the number of steps done.
    """

    def __init__(
        self,
        world: World,
        part: ModelPart,
        own: OwnModule,
        names: Mapping[str, str],
        updater: OwnOptimizer,
    ) -> None:
        self.world, self.part = world, part
        self.steps = 0
        self._own, self._names, self._updater = own, names, updater
        self._saver: Saver | None = None
        # the error that ended a step before its end; "": none
        self._broken = ""
        # compares the first step's batch with one process
        self._first: _FirstTrial | None = None

    def __repr__(self) -> str:
        parameters = sum(weight.numel() for weight in self._own.names.values())
        layout = str(self.part.layout) or "one rank"
        kind = type(self._own.module).__name__
        return f"<{kind} in {layout}: {parameters:,} parameters, step {self.steps}>"

    @property
    def layout(self) -> Layout:
        return self.part.layout

    @property
    def first(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.world.rank == 0

    # ---- batches

    def shard(
        self, loader: Iterable[GivenBatch]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's rows of each batch of a loader, by name.

        Every rank must iterate over the same batches. The first batch is compared
        across ranks, to catch loaders that shuffle with different seeds.
        """
        for number, batch in enumerate(loader):
            entries = _named(batch)
            if not number:
                self._refuse_other_batches(entries)
            # Whole batches come in here and rows of one rank go out; `step`
            # takes the latter.
            rows = _rows(entries)
            least = self.layout.data * self.layout.microbatches
            if rows < least:
                raise LoopError(
                    f"a batch of {rows} rows is too small: {self.layout.data} data-parallel ranks with"
                    f" {self.layout.microbatches} microbatches need at least {least}. Use larger batches, and"
                    " drop_last=True in the loader."
                )
            mine = share(
                rows, self.layout.data, self.part.local.coordinates["data"]
            )
            yield {name: x[mine] for name, x in entries.items()}

    def _refuse_other_batches(self, entries: Mapping[str, Tensor]) -> None:
        # Every byte of the batch enters, but only the digest is sent.
        digest = sha256()
        for name, x in entries.items():
            # As bytes, because numpy has no bfloat16.
            raw = x.detach().cpu().contiguous().view(torch.uint8)
            digest.update(name.encode() + raw.numpy().tobytes())
        seen = exchange(self.part.everyone, digest.hexdigest())
        other = [rank for rank, each in enumerate(seen) if each != seen[0]]
        if other:
            raise LoopError(
                f"the first batch of rank {other[0]} differs from that of rank 0, but all ranks must iterate"
                " over the same batches. Give the loader a seed:"
                " generator=torch.Generator().manual_seed(0)."
            )

    def _microbatches(self, batch: GivenBatch) -> list[dict[str, Tensor]]:
        entries = _entries(batch)
        if _rows(entries) < self.layout.microbatches:
            raise LoopError(
                f"{_rows(entries)} rows are fewer than the {self.layout.microbatches} microbatches of"
                f" {self.layout}. Use larger batches, and drop_last=True in the loader."
            )
        return self.part.microbatches(entries)

    # ---- steps

    def step(self, batch: GivenBatch) -> StepOutcome:
        """Run one step on this rank's rows of a batch: forward, backward, clipping and
        update."""
        if self._first:
            self._refuse_different(self._first, batch)
        own = self._microbatches(batch)
        self._refuse_broken()
        with self._whole_or_broken():
            return self._step(own)

    def _step(self, own: list[dict[str, Tensor]]) -> StepOutcome:
        # The rate is ignored: the user's optimizer holds its own learning
        # rates.
        result = self.part.trainer.step(own, 0.0, timed=False)
        # torch's schedulers warn unless a step was noted; `_updater` steps
        # copies of the instance.
        self._updater.stepped()
        self.steps += 1
        metrics = dict(zip(self._metrics, result.metrics, strict=True))
        # Every program of `prepare` computes the norm.
        assert result.norm is not None
        return StepOutcome(
            self.steps, result.total, result.norm, metrics, result.finite
        )

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """Note the error that ends a step before its end."""
        try:
            yield
        except BaseException as error:
            self._broken = type(error).__name__
            raise

    def _refuse_broken(self) -> None:
        # The gradients of such a step are still in the buffers, and its update may
        # have reached some weights only.
        if self._broken:
            raise LoopError(
                f"step {self.steps + 1} ended in a {self._broken}, so gradients and weights may be"
                " incomplete. Call prepare again, then run.load(folder) to continue from a checkpoint;"
                " or call model.load_state_dict(run.state_dict()) before it to keep the present weights."
            )

    def _refuse_different(self, first: _FirstTrial, batch: GivenBatch) -> None:
        # On rank 0 only, but all ranks meet here, as the trial may raise.
        with agreement(self.world):
            if not self.world.rank:
                first.refuse_different(_entries(batch))
        self._first = None

    def evaluate(self, batch: GivenBatch) -> Evaluation:
        """Return the loss and metrics over the rows of all ranks, without an update."""
        sums, count = self.part.validator.sums_over_ranks(
            self._microbatches(batch)
        )
        # Evaluation over no targets returns 0 rather than dividing by zero.
        loss, *metrics = (each / (count or 1.0) for each in sums)
        return Evaluation(loss, dict(zip(self._metrics, metrics, strict=True)))

    @property
    def _metrics(self) -> tuple[str, ...]:
        return self.part.trainer.measure.metrics

    # ---- weights

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """Copy rank 0's weights to all ranks, because each rank may have initialized
        its own."""
        group = self.part.everyone
        values = self._own.values(self._names)
        # Sorted: every rank must broadcast the same weight at the same time.
        for name in sorted(values):
            value = values[name]
            sent = value.to(group.device).contiguous()
            group.broadcast(sent, 0)
            if group.rank and not value.equal(sent.to(value.device)):
                value.copy_(sent)
        self.part.local.fill(values)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights on every rank, on the CPU, by the names in the
        module's `state_dict`."""
        wholes: dict[str, Tensor] = {}
        for name, whole in whole_weights(self.part):
            theirs = self._names[name]
            # The dtype of the module's own parameter: the master copy may be
            # wider.
            wholes[theirs] = whole.to("cpu", self._own.names[theirs].dtype)
        by_weight = {
            self._own.names[name]: whole for name, whole in wholes.items()
        }
        # Tied names share one parameter; `keep_vars` keeps its identity, which
        # `by_weight` looks up.
        every = self._own.module.state_dict(keep_vars=True)
        return {
            name: by_weight[x]
            # A buffer is not trained and is taken from the module as it is.
            if isinstance(x, nn.Parameter)
            else x.detach().cpu()
            for name, x in every.items()
        }

    @property
    def _master(self) -> torch.dtype:
        return next(iter(self.part.local.every_unit)).precision.master

    # ---- text

    def generate(
        self,
        tokens: Sequence[int] | Tensor,
        count: int = 32,
        sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
    ) -> list[int]:
        """Return the model's continuation of a sequence, on every rank.

        It works for a `phalanx.models.Decoder`, with a cache of keys and values. Other
        modules have a forward of their own to call, with the weights of `state_dict()`.
        """
        weights = self.state_dict()
        model, names = self._own.model()
        own = {name: weights[theirs] for name, theirs in names.items()}
        # A new model: this rank holds only its part of the trained one.
        generator = Generator.of(model, own, self._master)
        prompt = (
            tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        )
        drawn = generator.generate(prompt, count, sampling)
        return [token for (token,) in drawn]

    # ---- checkpoints

    def save(
        self, folder: str | Path, state: Mapping[str, Any] | None = None
    ) -> Path:
        """Save weights, optimizer state and the step count to a folder; return the
        checkpoint's path.

        Each rank writes its part. `state` is stored with it: values that JSON can
        represent, such as a scheduler's `state_dict`.
        """
        self._refuse_broken()
        scaling = self.part.trainer.scaling
        config = {
            "state": dict(state or {}),
            "groups": self._updater.stored_groups(),
            "loss_scale": [scaling.scale, scaling.steady] if scaling else None,
        }
        try:
            # Written and read once: a tuple becomes a list now, as it will be
            # after `load`.
            kept = json.loads(json.dumps(config))
        except TypeError as error:
            raise LoopError(
                f"state has a value that JSON cannot represent: {error}."
            ) from error
        # Kept between calls: its buffers in host memory are reused by every
        # save.
        if self._saver is None or self._saver.folder != Path(folder):
            self._saver = Saver(
                Path(folder), self.part.local, self.part.updates
            )
        progress = Progress(
            self.steps, layout=str(self.layout), config={LOOP: kept}
        )
        # Saves are synchronous here, so each call finishes exactly one.
        (saved,) = self._saver.save(progress)
        return saved.path

    def load(self, folder: str | Path) -> dict[str, Any] | None:
        """Resume from the newest intact checkpoint of a folder, saved in any layout.

        Restores weights, optimizer state, learning rates and the step count. Returns
        the `state` saved with them, or None if there is no checkpoint.
        """
        name = self._updater.name.lower()
        part = self.part
        loaded = load(Path(folder), part.local, part.updates, optimizer=name)
        if loaded is None:
            return None
        self.steps = loaded.progress.step
        kept = loaded.progress.config.get(LOOP)
        state = kept.get("state") if isinstance(kept, dict) else None
        if not isinstance(kept, dict) or not isinstance(state, dict):
            raise CheckpointError(
                f"{loaded.path} was saved by phalanx.train, not by a loop of your own: resume it with its"
                " run file."
            )
        # The optimizer's options, such as a learning rate that a scheduler has
        # changed.
        self._updater.restore_groups(kept.get("groups"), str(loaded.path))
        scale, scaling = kept.get("loss_scale"), part.trainer.scaling
        # A checkpoint of another precision may have no scale; training then
        # starts with the default.
        if scaling and isinstance(scale, list):
            scaling.scale, scaling.steady = scale
        return state

    def close(self) -> None:
        """Leave the world of ranks, and so end every other run that shares it."""
        self.world.close()


# ---- checks before training


def _refuse_other_types(layout: object, loss: object, metrics: object) -> None:
    """Refuse arguments of another type, before they are used as what they are not."""
    if not isinstance(layout, str | Layout):
        raise LayoutError(
            f"layout must be text such as 'dp2 zero3', not a {type(layout).__name__}."
            " Pass a loss function by its name: prepare(..., loss=my_loss)."
        )
    if loss is not None and not callable(loss):
        raise LayoutError(
            f"loss must be a function loss(output, batch), not {loss!r}. Write one that returns the sum"
            " over the rows."
        )
    if isinstance(metrics, str):
        raise LayoutError(
            f"metrics must be a list of names: metrics=[{metrics!r}]."
        )


@dataclass(frozen=True)
class _KeptByRow:
    """The rows of a batch, and the bytes that each keeps until its backward; 0 if unknown."""

    rows: int = 0
    kept: float = 0.0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss: LossFunction | None,
        example: GivenBatch | None,
    ) -> _KeptByRow:
        """Run the module on one row of the example, and count what autograd saves."""
        if example is None or type(model).forward is nn.Module.forward:
            return cls()
        entries = _entries(example)
        weights = list(model.parameters())
        device = weights[0].device if weights else torch.device("cpu")
        row = {name: x[:1].clone().to(device) for name, x in entries.items()}
        weight_storages = {x.untyped_storage().data_ptr() for x in weights}
        saved: dict[int, int] = {}

        def note(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in weight_storages:
                saved[storage.data_ptr()] = storage.nbytes()
            return x

        noting = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
        doing = "when it runs on one row of the example"
        with running_modules(doing, LayoutError), noting:
            # kept alive, so that no storage takes the place of another
            output = model(**arguments_for(model.forward, row))
            kept_loss = loss(output, row) if loss else None
        del output, kept_loss
        return cls(_rows(entries), float(sum(saved.values())))


def _auto(model: nn.Module, world: World, batch: _KeptByRow) -> Layout:
    """Return the layout that `auto` chooses, by the least memory that a rank has. Collective.

    Rank 0 decides, since ranks may know other sizes.
    """
    if world.device.type == "cuda":
        memory: float = torch.cuda.get_device_properties(
            world.device
        ).total_memory
        # Ranks that share a GPU, or the host's memory, divide it.
        memory /= world.sharing
    else:
        memory = available_memory() / world.size
    # A group for one reduction: all ranks must choose the same layout.
    everyone = world.split("auto", [range(world.size)])
    least = torch.tensor([memory], dtype=torch.float64, device=everyone.device)
    everyone.all_reduce(least, "min")
    weights = list(model.parameters())
    double = any(x.dtype == torch.float64 for x in weights)
    numbers = sum(x.numel() for x in weights)
    precision = FP64 if double else FP32
    own = module_recipe(
        numbers,
        world.size,
        float(least),
        precision,
        rows=batch.rows,
        kept=batch.kept,
    )
    chosen = exchange(everyone, str(own))[0]
    # Released, so that a second run of this world can choose as well.
    world.release("auto")
    return Layout.parse(chosen)


def _layout_of(given: str | Layout, model: nn.Module, ranks: int) -> Layout:
    """Return the layout for this world, in float64 if the model has float64 weights."""
    text = given if isinstance(given, str) else str(given)
    layout = Layout.parse(text.strip() or (f"dp{ranks}" if ranks > 1 else ""))
    if layout.ranks != ranks:
        raise LayoutError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks, but there are {ranks}. Start"
            f" {layout.ranks}: torchrun --nproc-per-node {layout.ranks}, or phalanx.launch."
        )
    if layout.recompute == "fit":
        raise LayoutError(
            "recompute:fit needs the sizes of a run's batches. Write recompute:all, or"
            " recompute:every=2."
        )
    dtypes = (
        {x.dtype for x in model.parameters()}
        if isinstance(model, nn.Module)
        else ()
    )
    if torch.float64 in dtypes and layout.precision == FP32:
        return replace(layout, precision=FP64)
    # fp32 is the default of a layout that names no precision; any other was
    # asked for.
    return layout


def _needs_no_pieces(layout: Layout) -> bool:
    """True for dp, ZeRO and accumulation, which take a module in one piece."""
    return (
        layout.ranks == layout.dp
        and layout.recompute == "none"
        and not layout.offload
    )


def _refuse_other_forward(own: OwnModule, layout: Layout) -> None:
    """Compare the pieces with the module's own forward.

    The pieces of a description are compared as in `train`, those found by running it on
    the example.
    """
    # Without a description and an example there is one piece, the module
    # itself: nothing to compare.
    if own.describe is None and own.example is None:
        return
    model, names = own.model()
    if own.describe is None:
        refuse_unfit(model, layout)
        weights = {name: own.names[theirs] for name, theirs in names.items()}
        refuse_other_pieces(own.module, model, weights, own.example or {})
        return
    refuse_mixing(model, layout)
    try:
        described_whole(model)
    except UntriedPieces:
        # A module on a GPU may have kernels that do not run on the CPU; there
        # the comparison is left out.
        if next(own.module.parameters()).device.type == "cpu":
            raise


def _refuse_wrong_plan(
    own: OwnModule, layout: Layout, loss: LossFunction | None, measure: Measure
) -> None:
    """Compares ranks of tp with one process on the example."""
    # Only a plan for tp, guessed or given, can be wrong here: a description
    # was compared above.
    if own.describe is None and own.example is not None and layout.tp > 1:
        model, _ = own.model()
        _give_loss(
            model, own, OwnLoss(loss, measure) if loss else None, measure
        )
        refuse_mixing(model, layout, own.example)


@dataclass(frozen=True)
class _FirstTrial:
    """The comparison of a user's module with one process before its first step."""

    own: OwnModule
    layout: Layout
    loss: LossFunction | None
    measure: Measure
    # the batch to compare on; empty: that of the first step
    entries: Mapping[str, Tensor]

    def refuse_different(self, entries: Mapping[str, Tensor]) -> None:
        # A trial that passed is recorded under this code; changed code is
        # tried again.
        code = (type(self.own.module), self.own.describe, self.loss)
        subject = Subject(
            self._model,
            batches_like(entries),
            tuple(filter(None, code)),
        )
        untried = refuse_unverified(subject, self.layout)
        if untried:
            kind = type(self.own.module).__name__
            _LOG.warning(
                "%s is not compared with one process before its first step: %s",
                kind,
                untried,
            )

    def _model(self) -> Model:
        """A new Model whose loss returns no metrics."""
        model, _ = self.own.model()
        # The trial compares gradients and weights, for which metrics are not
        # needed.
        measure = replace(self.measure, metrics=())
        loss = OwnLoss(self._sum, measure) if self.loss else None
        _give_loss(model, self.own, loss, measure)
        return model

    def _sum(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        assert self.loss is not None
        returned = self.loss(output, batch)
        # A loss with metrics returns a tuple; the loss is its first entry.
        loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return loss


def _refuse_illegal(model: Model, layout: Layout) -> None:
    if model.shape is not None:
        # A row for each microbatch of each data-parallel rank is the smallest
        # legal batch.
        rows = layout.data * layout.microbatches
        wrong = legal(layout, model.shape, batch=rows)
        if wrong:
            raise LayoutError("\n".join(map(str, wrong)))
        return
    if model.as_it_is:
        refuse_unfit(model, layout)
        return
    # Without a description no rule says how to cut weights; dp, ZeRO and pp
    # need none.
    cut = [axis for axis in ("tp", "cp", "ep") if layout.mesh.of(axis) > 1]
    if cut:
        raise LayoutError(
            f"{' and '.join(cut)} of {layout}: this module has no description of how to shard its weights."
            " Describe it (docs/bring-your-model.md), or use dp, ZeRO and pp."
        )


def _give_loss(
    model: Model, own: OwnModule, loss: OwnLoss | None, measure: Measure
) -> None:
    last = model.pieces[-1][1]
    if own.describe is None and own.example is not None:
        make_head(last, loss, measure)
    elif own.describe is None:
        make_whole(last, loss, measure)
    elif loss is not None:
        give_loss(model, loss)
    elif measure.metrics:
        raise LayoutError(
            "metrics need a loss function that returns them: prepare(..., loss=my_loss)."
        )


def _counted(count: Count | None) -> Callable[[Mapping[str, Tensor]], Tensor]:
    if count is None:
        return count_valid

    def counted(batch: Mapping[str, Tensor]) -> Tensor:
        device = next(iter(batch.values())).device
        # A count may be a number, a tensor, or a tensor of a count per row.
        counts = torch.as_tensor(count(dict(batch)), device=device)
        return counts.sum(dtype=torch.float64)

    return counted


def _facts(
    model: Model,
    layout: Layout,
    program: Program,
    optimizer: torch.optim.Optimizer,
    measure: Measure,
    clip: float,
) -> dict[str, str]:
    """Return all facts that must be equal on every rank."""
    # Names, sizes and dtypes; the values need not agree, as rank 0's are
    # copied.
    weights = [
        f"{n} {list(w.shape)} {w.dtype}" for n, w in model.weights.items()
    ]
    groups = [
        # Options of the groups, such as `lr` and `weight_decay`, without the
        # tensors.
        {key: str(x) for key, x in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "layout": str(layout),
        "the model's weights": "; ".join(weights),
        "optimizer": f"{type(optimizer).__name__} {groups}",
        "metrics": str(measure.metrics),
        "clip": str(clip),
        # A program may have a million operations: its digest stands for it.
        "program": sha256(str(program).encode()).hexdigest(),
    }


# ---- batches and tensors


def _named(batch: GivenBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name."""
    if isinstance(batch, Mapping):
        entries = {
            name: x for name, x in batch.items() if isinstance(x, Tensor)
        }
    elif isinstance(batch, Tensor):
        entries = {_input_name(batch): batch}
    # (x) or (x, y): the loader of a `TensorDataset` yields such lists.
    else:
        tensors = [x for x in batch if isinstance(x, Tensor)]
        # `for x, y in run.shard(loader)` unpacks the names of a dict.
        if batch and all(isinstance(x, str) for x in batch):
            raise LoopError(
                f"a batch must hold tensors, not the names {', '.join(map(str, batch))}. run.shard yields"
                " dicts: write `for batch in run.shard(loader)`, and run.step(batch)."
            )
        if len(tensors) != len(batch) or not 1 <= len(tensors) <= 2:
            raise LoopError(
                f"a batch must be a dict of tensors, or an input with its targets, not {len(batch)} values."
                " Give the loader a collate_fn that returns a dict."
            )
        names = (_input_name(tensors[0]), "targets")
        entries = dict(zip(names, tensors, strict=False))
    # 0-dimensional tensors have no rows, so they count as 0 and differ from
    # the rest.
    sizes = {x.shape[0] if x.dim() else 0 for x in entries.values()}
    if len(sizes) != 1:
        shapes = ", ".join(
            f"{name} {list(x.shape)}" for name, x in entries.items()
        )
        raise LoopError(
            f"the tensors of a batch must have one row for each sample; their shapes: {shapes or 'none'}."
        )
    return entries


def _entries(batch: GivenBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name, including the positions of its tokens."""
    entries = _named(batch)
    if "tokens" in entries and "positions" not in entries:
        tokens = entries["tokens"]
        counted = torch.arange(tokens.shape[1], device=tokens.device)
        # Every sequence starts at position 0.
        entries["positions"] = counted.expand(tokens.shape[:2]).contiguous()
    return entries


def _input_name(x: Tensor) -> str:
    # (batch, sequence) of integers are tokens; everything else is passed on as
    # it is.
    return "tokens" if x.dim() == 2 and not x.is_floating_point() else "inputs"


def _rows(entries: Mapping[str, Tensor]) -> int:
    return next(iter(entries.values())).shape[0]
