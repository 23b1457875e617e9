"""Flat units: memory is what ZeRO promises, replicas stay equal to the bit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from phalanx.comm import World
from phalanx.comm.base import Work
from phalanx.comm.late import late
from phalanx.comm.launch import launch
from phalanx.comm.shm import ShmWorld
from phalanx.layout import Layout, Shape
from phalanx.parallel import (
    Precision,
    build_model,
    cut_weights,
    microbatches,
    share,
)
from phalanx.parallel.data import PlainUnit
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of

GQA = SHAPES["gqa"]


def train(
    world: World,
    layout: Layout,
    precision: Precision,
    steps: int,
    shape: Shape = GQA,
) -> dict[str, object]:
    """A few steps; what the rank holds afterwards, and at most while it worked."""
    model = build_model(shape)
    program = program_of(model, layout)
    held = build_local(
        world, layout, model, program, precision=precision, poison=True
    )
    performer = Executor(held, program, world.rank, AdamW(), clip=1.0)
    losses = []
    for step in range(steps):
        batch = batch_of(shape, step, dtype=precision.compute)
        result = performer.step(
            microbatches(batch, layout, held.coordinates["dp"]), 1e-3
        )
        losses.append(result.loss)
    optimizer = sum(
        state.numel() * state.itemsize
        for update in performer.updates.values()
        for per in update.state.values()
        for name, state in per.items()
        if name != "step"
    )
    whole = (
        torch.cat([u.buffer for u in held.units.values()])
        if layout.zero < 3
        else torch.empty(0)
    )
    told = {
        "losses": losses,
        "home": sum(
            u.home.numel() * u.home.itemsize for u in held.units.values()
        ),
        "optimizer": optimizer,
        "made": dict(held.pool.made),
        "block": held.units[1].numel,
        "padding": sum(
            u.numel - sum(torch.Size(w.local).numel() for w in u.order)
            for u in held.units.values()
        ),
        "hash": hashlib.sha256(
            whole.detach().float().numpy().tobytes()
        ).hexdigest(),
    }
    world.clear()
    return told


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_per_rank_are_the_formula_to_within_padding(zero: int) -> None:
    # Rajbhandari et al. 2020, section 3, with float32 throughout: 4 bytes of weight, 8 of Adam.
    layout = Layout.parse(f"dp4 zero{zero}")
    ranks = launch(train, 4, layout, Precision(), 2, backend="threads")
    parameters = GQA.total
    shards = 4 if zero else 1
    for told in ranks:
        spare = told["padding"]
        assert 0 <= told["home"] - 4 * parameters / shards <= 4 * spare
        assert 0 <= told["optimizer"] - 8 * parameters / shards <= 8 * spare


@pytest.mark.parametrize(
    "text", ["", "accum:3", "tp2", "recompute:all accum:2"]
)
def test_a_gradient_that_is_nobody_elses_leaves_its_memory_to_the_next_forward(
    text: str,
) -> None:
    layout = Layout.parse(text)
    for told in launch(
        train, layout.ranks, layout, Precision(), 2, backend="threads"
    ):
        # In place the weights are no buffers of the pool; of the gradients none is left.
        assert set(told["made"].values()) == {0}


def test_stage_3_holds_a_few_gathered_units_and_not_the_model() -> None:
    deep = replace(GQA, layers=12)
    for told in launch(
        train,
        4,
        Layout.parse("dp4 zero3"),
        Precision(),
        2,
        deep,
        backend="threads",
    ):
        # Two gathered blocks (one ahead) and three whole gradients (two on their way), of twelve.
        assert told["made"][told["block"], torch.float32] <= 5


@pytest.mark.parametrize("layout", ["dp4", "dp4 zero1", "dp2x2 zero2"])
def test_losses_differ_across_replicas_and_weights_do_not_in_bf16_too(
    layout: str,
) -> None:
    bf16 = Precision(torch.bfloat16, torch.float32, torch.float32)
    ranks = launch(train, 4, Layout.parse(layout), bf16, 20, backend="threads")
    assert len({tuple(r["losses"]) for r in ranks}) == 4
    # Sharded weights are as old as the last gather, and equal all the same.
    assert len({r["hash"] for r in ranks}) == 1


def test_shares_differ_by_one_at_most_and_are_everything() -> None:
    for size in range(20):
        for parts in range(1, 9):
            taken = [share(size, parts, p) for p in range(parts)]
            assert [i for s in taken for i in range(s.start, s.stop)] == list(
                range(size)
            )
            assert (
                max(s.stop - s.start for s in taken)
                - min(s.stop - s.start for s in taken)
                <= 1
            )


def test_cut_weights_tile_the_whole_of_every_weight() -> None:
    for shape in SHAPES.values():
        make = partial(build_model, shape)
        for tp in (1, 2, 4):
            places = [
                cut_weights(make(), Layout.parse(f"tp{tp}"), {"tp": p})
                for p in range(tp)
            ]
            for name, parameter in make().weights.items():
                seen = torch.zeros(parameter.shape, dtype=torch.int)
                for place in places:
                    seen[place[name].box] += 1
                whole = set(seen.flatten().tolist())
                assert len(whole) == 1, name
                counted = sum(place[name].counted for place in places)
                assert counted == tp // whole.pop(), name


def of_shared_memory(world: World, text: str) -> list[bool]:
    layout, model = Layout.parse(text), build_model(GQA)
    program = program_of(model, layout)
    held = build_local(world, layout, model, program)
    performer = Executor(held, program, world.rank, AdamW())
    performer.step(
        microbatches(
            batch_of(GQA, 0, dtype=torch.float32),
            layout,
            held.coordinates["dp"],
        ),
        1e-3,
    )
    assert isinstance(world, ShmWorld)
    flat = [u.home for u in held.units.values()]
    flat += [
        buffer for waiting in held.pool.free.values() for buffer in waiting
    ]
    return [world._shared.arena.place(buffer) >= 0 for buffer in flat]


@pytest.mark.parametrize("text", ["dp2", "dp2 zero1", "dp2 zero3"])
def test_flat_buffers_lie_in_what_ranks_share(text: str) -> None:
    for told in launch(of_shared_memory, 2, text, backend="shm"):
        assert len(told) > 6
        assert all(told)


def summed_in_turn(world: World) -> list[float]:
    """Two gradients of one unit, of which the second is still on its way over the shards when the first is
    summed over the replicas: this rank's gradient after each of the two sums."""
    layout, model = (
        Layout.parse("dp2x2 zero2 accum:2 reduce:micro"),
        build_model(SHAPES["mlp"]),
    )
    held = build_local(world, layout, model, program_of(model, layout))
    unit = held.units[1]

    def begun(value: float) -> Work:
        unit.open()
        assert unit.full is not None
        unit.full.fill_(value)
        unit.fresh.clear()
        return unit.reduce()

    begun(1.0).wait()
    second = begun(10.0)
    unit.reduce_replicas().wait()
    assert unit.gradient is not None
    after = [float(unit.gradient[0])]
    second.wait()
    unit.reduce_replicas().wait()
    assert (unit.gradient == unit.gradient[0]).all()
    after.append(float(unit.gradient[0]))
    world.clear()
    return after


def test_replicas_sum_the_parts_of_a_shard_in_the_order_in_which_these_were_begun() -> (
    None
):
    # The groups' results are NaN until they are waited for.
    assert late(4)(summed_in_turn) == [[4.0, 44.0]] * 4


def kinds(world: World, layout: Layout, precision: Precision) -> set[bool]:
    model = build_model(GQA)
    held = build_local(
        world, layout, model, program_of(model, layout), precision=precision
    )
    return {isinstance(unit, PlainUnit) for unit in held.units.values()}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("", True), ("recompute:all", True), ("tp2", True), ("pp2 gpipe:1", True),
        ("accum:2", False), ("dp2", False), ("pp2 zb-h1:2", False), ("offload:weights", False),
    ],
)  # fmt: skip
def test_gradients_that_come_once_and_go_nowhere_are_left_to_autograd(
    text: str, plain: bool
) -> None:
    layout = Layout.parse(text)
    for found in launch(
        kinds, layout.ranks, layout, Precision(), backend="threads"
    ):
        assert found == {plain}


def test_gradients_in_another_dtype_than_the_weights_are_not() -> None:
    narrow = Precision(compute=torch.bfloat16)
    assert launch(kinds, 1, Layout(), narrow, backend="threads") == [{False}]
