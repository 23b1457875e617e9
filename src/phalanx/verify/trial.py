"""A few steps of one layout on a world of ranks, with every gradient and weight written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import World
from ..layout import Layout
from ..parallel import Entry, Model, Piece, Precision, Unit, microbatches
from ..parallel.local import Holding, hold
from ..parallel.tensor import Weight
from ..program import Timeline
from ..train.executor import Executor
from ..train.optimizer import AdamW, Sgd
from ..train.precision import LossScale
from ..train.program import fitting_program, program_of
from .reference import Mismatch, Step

__all__ = ["Part", "Setting", "join", "train_layout"]

Batch = Mapping[str, Tensor]
FIT = 0.7  # what recompute:fit must do with, of what a layout would hold


@dataclass(frozen=True)
class Setting:
    """What every layout of a comparison has in common."""

    batches: Callable[[int], Batch]
    steps: int = 3
    optimizer: AdamW | Sgd = AdamW()  # frozen
    lr: float = 1e-2
    clip: float = 0.25  # small enough to be at work in every step
    precision: Precision = Precision()  # frozen
    seed: int = 0


class Part(NamedTuple):
    """Some numbers of a weight, as one rank holds them after one step."""

    step: int
    entry: Entry
    gradient: Tensor
    weight: Tensor


class Seen(NamedTuple):
    """All that one rank tells of its steps."""

    losses: tuple[float, ...]
    counts: tuple[float, ...]
    norms: tuple[float | None, ...]
    parts: tuple[Part, ...]
    outputs: tuple[dict[str, float], ...]  # this rank's share of each piece's sum of squares
    timeline: Timeline  # of the last step


class _Recorder:
    """An optimizer that writes each gradient down before it is used."""

    def __init__(self, optimizer: AdamW | Sgd) -> None:
        self.optimizer = optimizer
        self.seen: dict[int, Tensor] = {}

    def of(self, unit: Unit) -> Callable[[float, float], None]:
        update = self.optimizer.of(unit)

        def recorded(lr: float, scale: float) -> None:
            assert unit.gradient is not None
            self.seen[unit.number] = unit.gradient.detach().clone()
            update(lr, scale)

        return recorded


class _Tracer:
    """Adds up what each piece puts out in a step. Recomputing does not count again."""

    def __init__(self, holding: Holding, model: Model) -> None:
        self.sums: dict[str, float] = {}
        self.done: set[tuple[int, int]] = set()
        for number, piece in holding.pieces.items():
            self._wrap(number, piece, model.pieces[number][0])

    def _wrap(self, number: int, piece: Piece, name: str) -> None:
        plain = piece.forward

        def forward(microbatch: int, x: Tensor | None, batch: Batch, *, keep: bool) -> Tensor:
            y = plain(microbatch, x, batch, keep=keep)
            if (number, microbatch) not in self.done and y.dim():
                self.done.add((number, microbatch))
                self.sums[name] = self.sums.get(name, 0.0) + float(y.double().square().sum())
            return y

        piece.forward = forward  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        sums, self.sums = self.sums, {}
        self.done.clear()
        return sums


def train_layout(
    world: World, layout: Layout, model: Callable[[], Model], setting: Setting
) -> Seen:
    """This rank's view of a few steps in a layout; every rank of the world calls it."""
    mine = model()
    fits = layout.recompute == "fit"
    program = (
        fitting_program(
            model, layout, setting.batches(0), setting.precision, lambda whole: FIT * whole
        )
        if fits
        else program_of(mine, layout, agree=True)
    )
    holding = hold(
        world, layout, mine, program,
        seed=setting.seed, precision=setting.precision, poison=True,
    )  # fmt: skip
    recorder = _Recorder(setting.optimizer)
    performer = Executor(
        holding, program, world.rank, recorder,
        width=mine.shape.hidden if mine.shape else 0,
        clip=setting.clip,
        time_cut=layout.tp if layout.seq else 1,
        scaling=LossScale(1024.0) if setting.precision.compute == torch.float16 else None,
    )  # fmt: skip
    tracer = _Tracer(holding, mine)
    results, parts, outputs = [], list[Part](), []
    for step in range(setting.steps):
        batch = {n: x.to(world.device) for n, x in setting.batches(step).items()}
        own = microbatches(batch, layout, holding.place["dp"], holding.place["cp"])
        results.append(performer.step(own, setting.lr))
        parts += _parts(holding, recorder, step)
        outputs.append(tracer.take() if _comparable(layout, holding, own, batch) else {})
    world.clear()
    return Seen(
        tuple(r.loss for r in results),
        tuple(r.count for r in results),
        tuple(r.norm for r in results),
        tuple(parts),
        tuple(outputs),
        results[-1].timeline,
    )


def _comparable(layout: Layout, holding: Holding, own: Sequence[Batch], batch: Batch) -> bool:
    """Whether this rank's outputs are a share of the whole: under tp without seq every rank has the
    same ones and the first tells them; padding would add to the sum."""
    tokens = batch.get("tokens")
    if layout.tp > 1 and not layout.seq and holding.place["tp"]:
        return False
    return tokens is None or own[0]["tokens"].shape[1] * layout.cp == tokens.shape[1]


def _parts(holding: Holding, recorder: _Recorder, step: int) -> Iterable[Part]:
    for number, unit in holding.units.items():
        gradient, home = recorder.seen[number], unit.home
        for entry in unit.entries():
            run = slice(entry.offset, entry.offset + entry.stop - entry.start)
            yield Part(step, entry, gradient[run].cpu(), home[run].detach().cpu().clone())


class _Whole:
    """One tensor put together from the parts that ranks hold; NaN where nobody holds it."""

    def __init__(self, what: str, weight: Weight, dtype: torch.dtype) -> None:
        self.what, self.name = what, weight.name
        self.numbers = torch.full(weight.shape, float("nan"), dtype=dtype)
        self.rank = torch.full(weight.shape, -1)  # the first rank that holds a number
        self.mismatch: Mismatch | None = None

    def add(self, rank: int, entry: Entry, part: Tensor) -> None:
        """Add a rank's part, and compare it with the copies that are here already."""
        weight = entry.weight
        # Fill a mask of the local part, then look at it as a box of the whole.
        local = torch.zeros(weight.local, dtype=part.dtype)
        held = torch.zeros(weight.local, dtype=torch.bool)
        local.view(-1)[entry.start : entry.stop] = part
        held.view(-1)[entry.start : entry.stop] = True
        inside = tuple(slice(0, cut.stop - cut.start) for cut in weight.cuts)
        local, held = local[inside], held[inside]
        numbers, ranks = self.numbers[weight.box], self.rank[weight.box]
        new = held & (ranks < 0)
        differ = held & ~new & ~_same_bits(numbers, local)
        numbers[new] = local[new]
        ranks[new] = rank
        if self.mismatch is None and differ.any():
            at = tuple(differ.nonzero()[0].tolist())
            self.mismatch = Mismatch(
                self.what,
                self.name,
                tuple(i + cut.start for i, cut in zip(at, weight.cuts, strict=True)),
                (int(ranks[at]), rank),
                (float(numbers[at]), float(local[at])),
            )


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Zeros of different sign differ; NaN is equal to NaN, whose bits mean nothing."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())


def join(seen: list[Seen], steps: int) -> list[Step]:
    """The whole tensors of every step, from what all ranks hold. Ranks that hold the same part
    must hold the same bits; where they do not, the step has a mismatch."""
    return [_join_step(seen, step) for step in range(steps)]


def _join_step(seen: list[Seen], step: int) -> Step:
    wholes: dict[str, dict[str, _Whole]] = {"gradient": {}, "weight": {}}
    for rank, one in enumerate(seen):
        for part in (p for p in one.parts if p.step == step):
            weight = part.entry.weight
            for what, numbers in (("gradient", part.gradient), ("weight", part.weight)):
                if weight.name not in wholes[what]:
                    wholes[what][weight.name] = _Whole(what, weight, numbers.dtype)
                wholes[what][weight.name].add(rank, part.entry, numbers)
    outputs: dict[str, float] = {}
    for name, square in (item for rank in seen for item in rank.outputs[step].items()):
        outputs[name] = outputs.get(name, 0.0) + square
    norm = seen[0].norms[step]
    both = [*wholes["gradient"].values(), *wholes["weight"].values()]
    return Step(
        sum(rank.losses[step] for rank in seen) / seen[0].counts[step],
        -1.0 if norm is None else norm,
        {name: whole.numbers for name, whole in wholes["gradient"].items()},
        {name: whole.numbers for name, whole in wholes["weight"].items()},
        outputs,
        tuple(whole.mismatch for whole in both if whole.mismatch is not None),
    )
