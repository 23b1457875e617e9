"""Runs of a few steps that save and go on, for the tests of checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.comm import World, launch
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.program import StepOptions
from phalanx.training.checkpoint import Saver
from phalanx.training.checkpoint_format import (
    Progress,
    raw_bytes,
    read_manifest,
)
from phalanx.training.checkpoint_load import TensorReader, load
from phalanx.training.executor import Executor
from phalanx.training.muon import Muon
from phalanx.training.optimizer import AdamW, Sgd
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

# Odd sizes that no tp divides: padding in the vocabulary and in the ffn; tied over stages.
SHAPE = dataclasses.replace(
    SHAPES["gpt"], layers=2, vocab=37, ffn=23, batch=6, sequence=6
)
WIDE = torch.float64
ADAM = AdamW()


class Run:
    """One rank of a run: steps, saves, goes on."""

    def __init__(
        self,
        world: World,
        layout: str,
        shape: Shape = SHAPE,
        *,
        optimizer: AdamW | Sgd | Muon = ADAM,
        seed: int = 0,
        compute: torch.dtype = WIDE,
    ) -> None:
        self.layout, self.shape = Layout.parse(f"{layout} fp64"), shape
        model = build_model(shape)
        whole = optimizer.whole_matrices
        program = program_of(
            model, self.layout, StepOptions(whole_matrices=whole)
        )
        precision = Precision(compute, WIDE, WIDE)
        self.local = build_local(
            world, self.layout, model, program, seed=seed, precision=precision
        )
        self.performer = Executor(
            self.local, program, world.rank, optimizer, clip=0.5,
        )  # fmt: skip
        self.updates: Any = self.performer.updates
        self.world, self.step = world, 0

    def steps(self, count: int) -> list[str]:
        """The losses of these steps over all ranks, every bit of them."""
        losses = []
        for _ in range(count):
            batch = batch_of(self.shape, self.step)
            place = self.local.coordinates
            own = microbatches(batch, self.layout, place["data"], place["cp"])
            done = self.performer.step(own, 1e-2)
            loss = torch.tensor([done.loss], dtype=WIDE)
            self.local.groups.everyone.all_reduce(loss)
            losses.append((float(loss) / done.count).hex())
            self.step += 1
        return losses

    @property
    def progress(self) -> Progress:
        return Progress(
            self.step, self.step * self.shape.batch, 7, "tokens", str(self.layout), self.shape,
            {"lr": 1e-2}, {"scale": 1.0},
        )  # fmt: skip

    def saver(self, folder: Path, **options: Any) -> Saver:
        return Saver(folder, self.local, self.updates, **options)

    def resume(self, folder: Path) -> Any:
        loaded = load(folder, self.local, self.updates)
        if loaded is not None:
            self.step = loaded.progress.step
        return loaded


def run(layout: str, what: Callable[[Run], Any], **options: Any) -> list[Any]:
    """What each rank of a new world returns."""

    def rank(world: World) -> Any:
        found = what(Run(world, layout, **options))
        world.clear()
        return found

    return launch(
        rank, Layout.parse(layout).ranks, backend="threads", timeout=30.0
    )


def trained(folder: Path, layout: str, steps: int = 2, **options: Any) -> None:
    """Train and save; nothing after it."""

    def work(each: Run) -> None:
        each.steps(steps)
        each.saver(folder).save(each.progress)

    run(layout, work, **options)


def resaved(source: Path, layout: str, folder: Path, **options: Any) -> None:
    """Go on in this layout, and save at once elsewhere."""

    def work(each: Run) -> None:
        assert each.resume(source) is not None
        each.saver(folder).save(each.progress)

    run(layout, work, **{"seed": 99, **options})


def saved_twice(folder: Path) -> Path:
    """Checkpoints of steps 1 and 2, in two files each."""

    def work(each: Run) -> None:
        saver = each.saver(folder)
        for _ in range(2):
            each.steps(1)
            saver.save(each.progress)

    run("dp2 zero3", work)
    return folder


def hash_tensors(path: Path) -> dict[str, str]:
    """The SHA-256 of every whole tensor, by title: equal for equal tensors, however they are cut."""
    manifest, sums = read_manifest(path), {}
    with TensorReader(path, manifest) as reader:
        for tensor in manifest.tensors:
            digest = hashlib.sha256(
                f"{tensor.dtype}{list(tensor.shape)}".encode()
            )
            digest.update(raw_bytes(reader.whole(tensor)))
            sums[tensor.title] = digest.hexdigest()
    return dict(sorted(sums.items()))


__all__ = [
    "SHAPE",
    "Run",
    "hash_tensors",
    "resaved",
    "run",
    "saved_twice",
    "trained",
]
