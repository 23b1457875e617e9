"""One rank of a run: its part of the model, its batches, its trainer, and what the log asks it for."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import Group, World, agreement
from ..comm.agree import exchange
from ..cost import step_flops
from ..layout import Layout, LayoutError, Shape
from ..layout.choices import FP16
from ..layout.run import Run
from ..parallel import (
    Model,
    Unit,
    UntriedPieces,
    described_whole,
    load_model,
    microbatches,
    on_device,
    refuse_mixing,
    share,
)
from ..parallel.experts import cut_blocks
from ..parallel.local import LocalModel, build_local
from ..parallel.low_precision import matmul_named, refuse_without_kernels
from ..plan import Machine, device_named
from ..program import Program, options_of
from ..program.build import forward_only
from ..program.memory import Sizes, peaks
from .agreement import facts_of
from .checkpoint_load import ModelIdentity
from .data.batches import Batches
from .data.token_files import open_corpus
from .executor import Executor, Validator
from .muon import Muon
from .optimizer import AdamW, Optimizer, Sgd
from .precision import LossScale, precision_of, refuse_bfloat16
from .program import fitting_program, maker_of, program_of, shape_of

GIB = float(1 << 30)
WINDOWS, SECONDS = 5, 0.06  # of measuring a device's peak


def optimizer_of(run: Run) -> Optimizer:
    """The optimizer that a run names."""
    o = run.optimizer
    if o.name == "sgd":
        return Sgd(o.momentum or 0.0, o.weight_decay)
    adamw = AdamW(*o.betas, eps=o.eps, decay=o.weight_decay)
    if o.name == "adamw":
        return adamw
    momentum, rate = 0.95 if o.momentum is None else o.momentum, (o.matrix_lr or o.lr) / o.lr
    return Muon(momentum, o.nesterov, o.adjust_lr, rate, o.weight_decay, adamw)


def batches_of(run: Run, shape: Shape) -> Batches:
    """The batches of a run; data that does not fit the model is refused here."""
    corpora = tuple(replace(open_corpus(path), weight=weight) for path, weight in run.sources)
    return Batches(
        corpora, run.tokens(shape), shape.batch,
        seed=run.seed, masks=run.document_masks, vocab=shape.vocab, packing=run.packing,
    )  # fmt: skip


def memory_limit(run: Run, world: World) -> float:
    """The bytes that a rank of a `recompute:fit` layout may hold, as far as this process can tell."""
    if run.memory:
        return run.memory * GIB
    if world.device.type != "cuda":
        raise LayoutError(
            "recompute:fit needs to know how much a rank may hold, and it computes on no GPU."
            " Write memory = 2.5 (GiB), or recompute:all."
        )
    # A fifth is left for what operations hold while they run, and for the allocator's gaps.
    whole: int = torch.cuda.get_device_properties(world.device).total_memory
    return 0.8 * whole / world.sharing


def keep_freed_memory() -> None:
    """Let the process keep what it frees, for the next step. Else the C library gives large tensors and
    the end of its heap back, and the kernel clears their pages anew: 2 to 6 % of a step of 1F1B."""
    with suppress(AttributeError):  # glibc has it
        adjust = ctypes.CDLL(None).mallopt
        adjust(-1, -1)  # M_TRIM_THRESHOLD
        _ = adjust(-3, 1 << 30) or adjust(-3, 1 << 25)  # M_MMAP_THRESHOLD; the most of older ones


class Rank:
    """One rank of a run in a layout. `batches` is put behind what was taken when a run goes on. Weights
    that are not `drawn` are zeros, to be read or drawn."""

    def __init__(self, world: World, run: Run, layout: Layout, *, drawn: bool = True) -> None:
        self.world, self.run, self.layout = world, run, layout
        self.notices: list[str] = []
        with agreement(world) as facts:
            self.shape = shape_of(run)
            self.batches = batches_of(run, self.shape)
            made = maker_of(run)()
            if run.own and not world.rank:
                self._refuse_other_forward()
                refuse_mixing(made, layout)
            self.identity = ModelIdentity.of(made, self.shape, run.own)
            self.model: Model = cut_blocks(made, layout)
            self.parameters = sum(weight.numel() for weight in self.model.weights.values())
            refuse_without_kernels(layout.matmul, world.device)
            matmul = matmul_named(layout.matmul)
            self.precision = replace(precision_of(layout.precision), matmul=matmul)
            refuse_bfloat16(self.precision, world.device)
            self.optimizer, fits = optimizer_of(run), layout.recompute == "fit"
            program = None if fits else program_of(self.model, layout, options_of(run))
            facts |= facts_of(run, layout, self.shape, self.model, program)
        self.program: Program = program or self._fitting_program()
        seed = run.seed if drawn and not run.hub else None
        self.local: LocalModel = build_local(
            world, layout, self.model, self.program, seed=seed, precision=self.precision
        )
        self.rows = share(self.batches.size, layout.data, self.local.coordinates["data"])
        clip, scaling = run.optimizer.clip, LossScale() if layout.precision == FP16 else None
        self.trainer = Executor(
            self.local, self.program, world.rank, self.optimizer, clip=clip, scaling=scaling
        )
        self.updates = self.trainer.updates
        self.validator = Validator(self.local, forward_only(self.program, layout), world.rank)
        self.flops = step_flops(self.shape, self.shape.batch, self.tokens, self.program)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.batches.sequence

    @property
    def names(self) -> list[str]:
        """Names of the model's pieces."""
        return [name for name, _ in self.model.pieces]

    def _refuse_other_forward(self) -> None:
        """Compares the pieces of the user's model with its own forward, as far as a CPU can run them."""
        try:
            described_whole(load_model(self.run.own))
        except UntriedPieces as error:
            if self.world.device.type == "cpu":
                raise
            self.notices.append(f"pieces and forward of {self.run.own} are not compared. {error}")

    def _fitting_program(self) -> Program:
        # One program for all ranks, so the least of their limits.
        group, own = self.world.split("limit", [range(self.world.size)]), self.run
        least = torch.tensor([memory_limit(own, self.world)], dtype=torch.float64).to(group.device)
        group.all_reduce(least, "min")
        rows, options = self.batches.batch(0), options_of(own)
        return fitting_program(
            maker_of(own), self.layout, rows, self.precision, lambda most: float(least), options
        )

    # ---- data

    def batch(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's microbatches of a step; only its own rows are read."""
        return self._cut(self.batches.batch(step, self.rows))

    def validation(self) -> float | None:
        """The loss per token of the held-out part, or of as many batches of it as the run says."""
        count = min(self.run.validation.batches, self.batches.validations)
        return self.validator.mean_loss(
            self._cut(self.batches.validation(index, self.rows)) for index in range(count)
        )

    def expert_tokens(self) -> list[list[int]]:
        """By layer, how often each expert was chosen in the last validation; on rank 0."""
        same = 1 if self.layout.seq else self.layout.tp  # ranks that see the same tokens
        own = {number: x.tolist() for number, x in self.validator.chosen.items()}
        layers: dict[int, list[int]] = {}
        for text in exchange(self.local.groups.everyone, json.dumps(own), 0):
            for number, counts in json.loads(text).items():
                before = layers.setdefault(int(number), [0] * len(counts))
                before[:] = (a + b for a, b in zip(before, counts, strict=True))
        return [[count // same for count in layers[number]] for number in sorted(layers)]

    def _cut(self, rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        own = microbatches(rows, self.layout, None, self.local.coordinates["cp"])
        return [on_device(each, self.world.device) for each in own]

    # ---- for the log

    def peak(self) -> tuple[float, str]:
        """FLOP/s of all ranks together, and where that is from."""
        file, precision = self.run.machine, self.layout.precision
        if file:
            machine = Machine.load(file)
            known = (
                machine.entry.peak(precision) if machine.entry else 0.0
            )  # as its maker states it
            best = machine.best(precision)  # the fastest product that was measured
            if known := known or (best.flops if best else 0.0):
                return known * self.world.size, f"{file} for each rank"
        device = self.world.device
        entry = device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if entry is not None and (known := entry.peak(precision)):
            return known * self.world.size / self.world.sharing, f"{entry.name} as its maker states"
        return _measured_peak(self.local.groups.everyone, self.precision.compute), "measured"

    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by kind on this rank: as the program promises, and as it was."""
        units = self.local.every_unit
        kept = {
            n: (x for s in u.state.values() for x in s.values()) for n, u in self.updates.items()
        }
        state = {n: sum(x.nbytes for x in each if x.dim()) for n, each in kept.items()}
        row = self.program.owner[self.world.rank]
        kinds = peaks(self.program, _sizes(units, state, self.program.pieces))[row].kinds
        promised = {kind: kinds.get(kind, 0.0) for kind in ("weights", "optimizer")}
        both = kinds.get("gathered", 0.0) + kinds.get("gradients", 0.0)
        pool = sum(n * size * dtype.itemsize for (size, dtype), n in self.local.pool.most.items())
        measured = {
            "weights": float(sum(u.home.nbytes + u.beside for u in units)),
            "optimizer": float(sum(state.values())),
            "gathered and gradients": float(pool),
        }
        return {"promised": promised | {"gathered and gradients": both}, "measured": measured}


def _measured_peak(group: Group, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks of a group together, each multiplying at the same time as the others.

    Together, because ranks on one CPU share its cores: a window is longer than a turn of theirs.
    The best of a few windows, since a peak is a ceiling.
    """
    size = 8192 if group.device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=group.device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=group.device, dtype=dtype)
    torch.mm(a, b, out=out)

    def settle() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    rates = list[float]()
    for _ in range(WINDOWS):
        settle()
        group.barrier()
        begun, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begun) < SECONDS:
            torch.mm(a, b, out=out)
            settle()
            count += 1
        rates.append(2.0 * count * size**3 / spent)
    rate = torch.tensor([max(rates)], dtype=torch.float64, device=group.device)
    group.all_reduce(rate)
    return float(rate)


def _sizes(units: Sequence[Unit], state: Mapping[int, int], pieces: int) -> Sizes:
    """Bytes of this rank's units; what activations take is not known here."""

    def each(bytes_of: Callable[[Unit], float]) -> tuple[float, ...]:
        return tuple(
            float(sum(bytes_of(unit) for unit in units if unit.piece == n)) for n in range(pieces)
        )

    def trained(unit: Unit, numbers: int) -> float:
        return 0 if unit.frozen else numbers * unit.precision.reduce.itemsize

    none = (0.0,) * pieces
    cut = any(unit.groups.reduce.size > 1 for unit in units)
    return Sizes(
        kept=none,
        input=none,
        home=each(lambda u: u.home.nbytes + u.beside),
        gathered=each(lambda u: 0 if u.same else u.numel * u.dtype.itemsize),
        gradient=each(lambda u: trained(u, u.numel)),
        gradient_shard=each(lambda u: trained(u, u.part)) if cut else (),
        optimizer=tuple(float(state.get(n, 0)) for n in range(pieces)),
    )
