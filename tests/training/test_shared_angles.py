"""Angles of rope are computed once for each microbatch on a rank, and change no bit."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape
from phalanx.models.rope import Rope
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

GQA = replace(SHAPES["gqa"], batch=8)
# Every second block has a window and a theta of its own.
LOCAL = replace(GQA, windows=(4, 0), rope_local_theta=100.0)
LAYOUTS = (
    "", "accum:4", "dp2 zero3 accum:2", "tp2 seq", "cp2", "cp2:ulysses", "pp2 1f1b:4", "pp2 zb-v:4",
    "recompute:all", "accum:2 recompute:selective", "pp2 1f1b:2 offload:activations",
)  # fmt: skip


class Watched(Executor):
    """Notes for how many microbatches something is derived at a time."""

    most = 0

    def _perform(self, op: Any) -> None:
        super()._perform(op)
        self.most = max(self.most, len(self.completed))


def executor_of(
    world: World, shape: Shape, layout: Layout, dtype: torch.dtype
) -> tuple[Watched, list[dict[str, Tensor]]]:
    wide = torch.promote_types(dtype, torch.float32)
    model = build_model(shape)
    program = program_of(model, layout)
    local = build_local(
        world, layout, model, program, precision=Precision(dtype, wide, wide)
    )
    batch, at = batch_of(shape, 0, dtype=dtype), local.coordinates
    own = microbatches(batch, layout, at["data"], at["cp"])
    return Watched(local, program, world.rank, AdamW()), own


@pytest.mark.parametrize(
    "shape", [GQA, LOCAL], ids=["one theta", "two thetas"]
)
@pytest.mark.parametrize("text", LAYOUTS)
def test_a_rank_computes_angles_once_for_each_microbatch_and_theta(
    text: str, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[int] = Counter()
    plain = Rope.at

    def counting(self: Rope, *args: Any) -> tuple[Tensor, Tensor]:
        calls[threading.get_ident()] += 1
        return plain(self, *args)

    layout = Layout.parse(text)

    def step(world: World) -> int:
        executor, own = executor_of(world, shape, layout, torch.float64)
        before = calls[threading.get_ident()]
        executor.step(own, 1e-3)
        assert not executor.completed  # nothing outlives its microbatch
        return calls[threading.get_ident()] - before

    monkeypatch.setattr(Rope, "at", counting)
    counts = launch(step, layout.ranks, backend="threads")
    assert (
        counts
        == [layout.microbatches * (2 if shape is LOCAL else 1)] * layout.ranks
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "text", ["accum:2", "tp2 seq", "cp2", "pp2 zb-v:4 offload:activations"]
)
def test_shared_angles_give_the_bits_that_every_block_gave_by_itself(
    text: str, dtype: torch.dtype
) -> None:
    layout = Layout.parse(text)

    def trained(world: World, *, shared: bool) -> list[Tensor]:
        executor, own = executor_of(world, LOCAL, layout, dtype)
        if not shared:
            executor.local = replace(executor.local, derived={})
        losses = [
            torch.tensor(executor.step(own, 1e-2).loss) for _ in range(2)
        ]
        return losses + [
            unit.home.clone() for unit in executor.local.units.values()
        ]

    def shares(world: World) -> list[Tensor]:
        return trained(world, shared=True)

    def alone(world: World) -> list[Tensor]:
        return trained(world, shared=False)

    both = (
        launch(each, layout.ranks, backend="threads")
        for each in (shares, alone)
    )
    for with_them, without in zip(*both, strict=True):
        assert all(map(torch.equal, with_them, without))


def test_angles_of_a_16_bit_model_are_of_32_bits() -> None:
    def derived(world: World) -> torch.dtype:
        executor, own = executor_of(world, GQA, Layout(), torch.bfloat16)
        return executor.local.complete(own[0])["angles"].dtype

    assert launch(derived, 1, backend="threads") == [torch.float32]


def test_only_microbatches_under_way_have_their_angles() -> None:
    def most(world: World) -> int:
        executor, own = executor_of(
            world, GQA, Layout.parse("pp2 1f1b:4"), torch.float64
        )
        executor.step(own, 1e-3)
        return executor.most

    # As many as 1F1B has under way.
    assert launch(most, 2, backend="threads") == [
        2,
        1,
    ]
