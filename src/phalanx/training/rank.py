"""One rank of a run: its part of the model, and its batches."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from rank_watch import Positions

from ..comm import World, agreement
from ..cost import step_flops
from ..layout import Layout, LayoutError, Shape
from ..layout.host import limited_memory
from ..layout.run import DPO, Run, RunError
from ..layout.run_checks import mistakes_of
from ..parallel import (
    Model,
    UntriedPieces,
    described_whole,
    load_model,
    refuse_mixing,
)
from ..parallel.block_parts import cut_blocks
from ..parallel.own_loss import BY_TARGETS
from ..parallel.preference import BY_PAIRS
from ..program import Program, options_of
from .agreement import facts_of
from .checkpoint_load import ModelIdentity
from .data.batches import Batches
from .data.token_files import DataError, open_corpus
from .host_threads import use_threads_of_host
from .next_batch import NextBatch
from .optimizers import optimizer_of
from .parallelize import parallelize
from .precision import precision_on
from .program import fitting_program, maker_of, program_of, shape_of
from .text import refuse_long_sample, refuse_unknown_vocabulary
from .watched import tell_compilations

GIB = float(1 << 30)


def batches_of(run: Run, shape: Shape) -> Batches:
    """Return the batches of a run; raise if the data does not fit the model."""
    corpora = tuple(
        replace(open_corpus(path), weight=weight)
        for path, weight in run.sources
    )
    pairs = any(corpus.pairs for corpus in corpora)
    if pairs and run.loss != DPO:
        raise DataError(
            f"{corpora[0].name} holds pairs of answers, of which one is preferred. Write loss = {DPO!r}."
        )
    if run.loss == DPO and not pairs:
        raise DataError(
            f"loss = {DPO!r} needs rows with chosen and rejected (and prompt), and {corpora[0].name} has"
            " none. Prepare such rows: phalanx data prepare."
        )
    return Batches(
        corpora, run.tokens(shape), shape.batch,
        seed=run.seed, masks=run.document_masks, vocab=shape.vocab, packing=run.packing,
        noisy=shape.dropout > 0,
    )  # fmt: skip


def counted_steps(run: Run) -> Run:
    """Return the run with the number of steps that its epochs take. A run without
    epochs is unchanged."""
    if not run.epochs:
        return run
    shape = shape_of(run)
    sequences = batches_of(run, shape).sequences
    # The last step of an epoch may begin the next one.
    steps = max(1, math.ceil(run.epochs * sequences / shape.batch))
    counted = replace(run, epochs=0.0, steps=steps)
    # Keys that depend on the number of steps were not checked before.
    if wrong := list(mistakes_of(counted)):
        raise RunError("run", wrong)
    return counted


def memory_limit(run: Run, world: World) -> float:
    """Return the bytes that a rank of a `recompute:fit` layout may hold, as far as this
    process can tell."""
    if run.memory:
        return run.memory * GIB
    if world.device.type != "cuda":
        raise LayoutError(
            "recompute:fit needs to know how much a rank may hold, and it computes on no GPU."
            " Write memory = 2.5 (GiB), or recompute:all."
        )
    # A fifth is reserved for temporary buffers of operations and for allocator
    # fragmentation.
    whole: int = torch.cuda.get_device_properties(world.device).total_memory
    return 0.8 * whole / world.sharing


def device_memory(
    run: Run, world: World, environment: Mapping[str, str]
) -> float:
    """The most bytes that a rank may use: the run's limit, or its share of the device.

    Ranks on a CPU have equal shares of their host's memory, or of the least limit of the
    control groups that they run in. torchrun gives the number
    of ranks on a host. With other launchers, all ranks are assumed to share one host.
    """
    if run.memory:
        return run.memory * GIB
    if world.device.type == "cuda":
        device = torch.cuda.get_device_properties(world.device)
        return float(device.total_memory) / world.sharing
    local = int(environment.get("LOCAL_WORLD_SIZE", world.size))
    return limited_memory() / local


def keep_freed_memory(device: torch.device) -> None:
    """Make the C library keep freed memory for the next step, on the CPU.

    Otherwise it returns large tensors and the top of its heap to the kernel, which
    clears their pages again: 2 to 6 % of a step of 1F1B.
    """
    if device.type != "cpu":
        return
    with suppress(AttributeError):  # only glibc has mallopt
        adjust = ctypes.CDLL(None).mallopt
        # -1: never trim the heap's top.
        adjust(-1, -1)  # M_TRIM_THRESHOLD
        # M_MMAP_THRESHOLD; older versions accept at most 32 MiB
        _ = adjust(-3, 1 << 30) or adjust(-3, 1 << 25)


class Rank:
    """One rank of a run in a layout: its part of the model, and its rows of each batch.

    When a run resumes, `batches` is moved to its position. Weights are zeros unless
    `drawn`, to be loaded or drawn later.
    """

    def __init__(
        self, world: World, run: Run, layout: Layout, *, drawn: bool = True
    ) -> None:
        self.world, self.run = world, run
        self.notices: list[str] = []  # about the model
        with agreement(world) as facts:
            self.shape = shape_of(run)
            self.batches = batches_of(run, self.shape)
            refuse_unknown_vocabulary(run)
            refuse_long_sample(run, self.shape)
            made = maker_of(run)()
            # One rank is enough to compare the user's code with its
            # description.
            if run.own and not world.rank:
                self._refuse_other_forward()
                refuse_mixing(made, layout)
            self.identity = ModelIdentity.of(made, self.shape, run.own)
            model: Model = cut_blocks(made, layout)
            self.parameters = sum(
                weight.numel() for weight in model.weights.values()
            )
            self.precision = precision_on(world.device, layout)
            fits = layout.recompute == "fit"
            program = (
                None if fits else program_of(model, layout, options_of(run))
            )
            # What must be equal on all ranks before groups are opened.
            facts |= facts_of(run, layout, self.shape, model, program)
        program = program or self._fitting_program(layout)
        self.part = parallelize(
            world,
            layout,
            model,
            program,
            optimizer_of(run),
            precision=self.precision,
            clip=run.optimizer.clip,
            measure=BY_PAIRS if run.loss == DPO else BY_TARGETS,
            # A folder's weights are read later; otherwise all ranks draw the
            # same ones.
            seed=run.seed if drawn and not run.hub else None,
        )
        # Updates on the host use cores that would be idle.
        if layout.weights_on_host and world.device.type != "cpu":
            use_threads_of_host(self.part.everyone)
        self.rows = self.part.rows_of(self.batches.size)
        self.next_batch = NextBatch(self.batch, world.device)
        self.flops = step_flops(
            self.shape, self.shape.batch, self.batches.sequence, program
        )

    def _refuse_other_forward(self) -> None:
        """Compare the pieces of the user's model with its own forward, as far as a CPU
        can run them."""
        try:
            described_whole(load_model(self.run.own))
        except UntriedPieces as error:
            if self.world.device.type == "cpu":
                raise
            self.notices.append(
                f"pieces and forward of {self.run.own} are not compared. {error}"
            )

    def _fitting_program(self, layout: Layout) -> Program:
        # All ranks use one program, so take the smallest limit.
        group, own = (
            self.world.split("limit", [range(self.world.size)]),
            self.run,
        )
        least = torch.tensor(
            [memory_limit(own, self.world)], dtype=torch.float64
        ).to(group.device)
        group.all_reduce(least, "min")
        return fitting_program(
            maker_of(own),
            layout,
            # The first batch stands for all: shapes are those of every step.
            self.batches.batch(0),
            self.precision,
            lambda most: float(least),
            options_of(own),
            own.optimizer,
        )

    def batch(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's microbatches of a step; only its own rows are read."""
        return self.part.microbatches(self.batches.batch(step, self.rows))

    def write_to(self, positions: Positions) -> None:
        """From now on, record in `positions` which operation this rank is at."""
        for executor in (self.part.trainer, self.part.validator):
            executor.write_to(positions, self.part.names)
        # Compiling may take minutes, which the watcher must not take for a
        # hang.
        if self.part.layout.compile:
            tell_compilations(positions)
