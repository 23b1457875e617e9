"""What one rank of a run has in its hands: its part of the model, its batches, what it can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..layout import Layout, Mesh
from ..layout.run import Run
from ..program import Program, build, check
from ..program.build import forward_only
from ..program.memory import Sizes, peaks
from ..split import Model, Unit, build_model, microbatches, share
from ..split.holding import Holding, hold, model_stages
from ..weigh import step_flops
from ..wire import World
from .data import Batches, open_corpus
from .optimizer import AdamW, Optimizer, Sgd, Update
from .peak import measured_peak
from .precision import LossScale, precision_of
from .steps import Trainer, Validator

__all__ = ["Rank", "batches_of", "optimizer_of"]


def optimizer_of(run: Run) -> Optimizer:
    """The optimizer that a run names."""
    o = run.optimizer
    if o.kind == "sgd":
        return Sgd(o.momentum, o.decay)
    return AdamW(*o.betas, eps=o.eps, decay=o.decay)


def batches_of(run: Run) -> Batches:
    """The batches of a run; data that does not fit the model is refused here."""
    shape = run.shape
    return Batches(
        open_corpus(run.data), run.tokens, shape.batch,
        seed=run.seed, masks=run.masks, vocab=shape.vocab,
    )  # fmt: skip


class Rank:
    """One rank of a run in a layout. `batches` is put behind what was taken when a run goes on."""

    def __init__(self, world: World, run: Run, layout: Layout) -> None:
        self.world, self.run, self.layout = world, run, layout
        self.batches = batches_of(run)
        self.model: Model = build_model(run.shape)
        stages = model_stages(self.model, layout)
        self.program: Program = build(layout, stages, self.model.tied, agree=True)
        check(self.program)
        self.precision = precision_of(layout.precision)
        self.holding: Holding = hold(
            world, layout, self.model, self.program, seed=run.seed, precision=self.precision
        )
        told = {"width": run.shape.hidden, "time_cut": layout.tp if layout.seq else 1}
        self.trainer = Trainer(
            self.holding, self.program, world.rank, optimizer_of(run), **told,
            clip=run.optimizer.clip,
            scaling=LossScale() if layout.precision == "fp16" else None,
        )  # fmt: skip
        made = self.trainer.updates
        self.updates = {n: u for n, u in made.items() if isinstance(u, Update)}
        bare = forward_only(self.program, layout)
        self.validator = Validator(self.holding, bare, world.rank, **told)
        self.flops = step_flops(run.shape, run.shape.batch, run.tokens, self.program)

    # ---- data

    def batch(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's microbatches of a step; only its own rows are read."""
        return self._cut(self.batches.batch(step, self._rows))

    def validation(self) -> float | None:
        """The loss per token of the held-out part, or of as many batches of it as the run says."""
        count = min(self.run.validation.batches, self.batches.validations)
        losses, tokens = 0.0, 0.0
        for index in range(count):
            loss, valid = self.validator.loss_of(
                self._cut(self.batches.validation(index, self._rows))
            )
            losses, tokens = losses + loss, tokens + valid
        return losses / tokens if tokens else None

    @cached_property
    def _rows(self) -> slice:
        return share(self.batches.size, self.layout.dp, self.holding.place["dp"])

    @cached_property
    def _without_dp(self) -> Layout:
        """The layout as its ranks at one place on dp see it: their rows are cut no further."""
        axes = tuple(axis for axis in self.layout.mesh.axes if axis.name != "dp")
        return replace(self.layout, mesh=Mesh(axes), zero=0, gather="", reduce="", offload=())

    def _cut(self, rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        there = {name: x.to(self.world.device) for name, x in rows.items()}
        return microbatches(there, self._without_dp, 0, self.holding.place["cp"])

    # ---- what is told

    def first_bad(self, own: list[dict[str, Tensor]]) -> tuple[int, str] | None:
        """Where numbers stopped being finite in the step just done, of what this rank saw: how far
        along the step, and a sentence. Every rank calls it."""
        names = [name for name, _ in self.model.pieces]
        pieces = self.validator.bad(own)
        if pieces:
            return min(pieces), f"the output of piece {names[min(pieces)]}"
        units = self.trainer.bad_units
        if units:  # backward begins at the last piece
            return 2 * len(names) - max(units), f"the gradient of piece {names[max(units)]}"
        return None

    def peak(self) -> tuple[float, str]:
        """FLOP/s of all ranks together, and where that is from."""
        told = self.run.peak(self.layout.precision)
        if told is not None:
            return told * self.world.size, f"{self.run.machine} for each rank"
        return measured_peak(self.holding.wires.everyone, self.precision.compute), "measured"

    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by kind on this rank: as the program promises, and as it was."""
        units = self.holding.units
        state = {n: _state(self.updates[n].torch) for n in units}
        row = self.program.owner[self.world.rank]
        promised = peaks(self.program, _sizes(units, state, self.program.pieces))[row].kinds
        pool = sum(
            count * numel * dtype.itemsize
            for (numel, dtype), count in self.holding.pool.made.items()
        )
        measured = {
            "weights": float(sum(_bytes(u.home) for u in units.values())),
            "optimizer": float(sum(state.values())),
            "gathered and gradients": float(pool),
        }
        kinds = ("weights", "optimizer", "gathered", "gradients")
        found = {kind: promised.get(kind, 0.0) for kind in kinds}
        both = found.pop("gathered") + found.pop("gradients")
        return {"promised": {**found, "gathered and gradients": both}, "measured": measured}


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _state(optimizer: torch.optim.Optimizer | None) -> int:
    kept = optimizer.state.values() if optimizer else ()
    return sum(_bytes(x) for one in kept for x in one.values() if isinstance(x, Tensor) and x.dim())


def _sizes(units: Mapping[int, Unit], state: Mapping[int, int], pieces: int) -> Sizes:
    """Bytes of this rank's units; what activations take is not known here."""

    def each(bytes_of: Mapping[int, float]) -> tuple[float, ...]:
        return tuple(float(bytes_of.get(n, 0)) for n in range(pieces))

    none = (0.0,) * pieces
    compute = {n: 0 if u.same else u.numel * u.precision.compute.itemsize for n, u in units.items()}
    whole = {n: u.numel * u.precision.reduce.itemsize for n, u in units.items()}
    parts = {n: u.part * u.precision.reduce.itemsize for n, u in units.items()}
    cut = any(u.wires.reduce.size > 1 for u in units.values())
    return Sizes(
        kept=none, input=none,
        home=each({n: _bytes(u.home) for n, u in units.items()}),
        gathered=each(compute), gradient=each(whole),
        gradient_shard=each(parts) if cut else (),
        optimizer=each(state),
    )  # fmt: skip
