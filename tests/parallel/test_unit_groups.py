"""Units with groups of their own: what they are derived from, and that gradients stay those of one
process whatever each unit is sharded and replicated over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, LayoutError, Rules, rules
from phalanx.parallel import (
    Model,
    Precision,
    build_model,
    groups,
    microbatches,
)
from phalanx.parallel.groups import UnitAxes, open_groups, unit_axes
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of
from phalanx.verification.reference import reference

GQA, GPT = SHAPES["gqa"], SHAPES["gpt"]
HALF = UnitAxes(("dp.shard",), ("dp.replicate",))
ALL = UnitAxes(("dp.replicate", "dp.shard"), ())
NONE = UnitAxes((), ("dp.replicate", "dp.shard"))


def trained(
    world: World, layout: Layout
) -> tuple[dict[int, tuple[int, int]], dict[str, Tensor]]:
    """By unit how many shards and replicas it has; the whole weights after two steps of AdamW."""
    model = build_model(GQA)
    program = program_of(model, layout)
    held = build_local(world, layout, model, program)
    executor = Executor(held, program, world.rank, AdamW(), clip=0.5)
    for step in range(2):
        batch = batch_of(GQA, step, dtype=torch.float32)
        executor.step(
            microbatches(batch, layout, held.coordinates["dp"]), 1e-2
        )
    weights = {}
    for unit in held.units.values():
        unit.gather().wait()
        weights |= {
            name: p.detach().clone() for name, p in unit.parameters.items()
        }
        unit.drop()
    sizes = {
        n: (u.groups.gather.size, u.groups.replica.size)
        for n, u in held.units.items()
    }
    world.clear()
    return sizes, weights


def one_process() -> dict[str, Tensor]:
    """The same two steps by plain autograd and torch's AdamW."""
    trace = reference(
        build_model(GQA),
        lambda step: batch_of(GQA, step, dtype=torch.float32),
        steps=2,
        optimizer=AdamW(),
        rate=lambda step: 1e-2,
        clip=lambda step: 0.5,
        precision=Precision(),
        seed=0,
    )
    return trace.steps[-1].weights


@pytest.mark.parametrize(
    "layout, chosen",
    [
        ("dp2x2 zero3", [ALL, HALF]),
        ("dp2x2 zero3", [HALF, NONE, ALL]),
        ("dp2x2 zero3 accum:2 reduce:micro", [NONE, ALL]),
    ],
)
def test_units_of_one_model_sharded_over_different_ranks_train_as_one_process(
    layout: str, chosen: list[UnitAxes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns(model: object, layout: Layout, unit: int) -> UnitAxes:
        return chosen[unit % len(chosen)]

    monkeypatch.setattr(groups, "unit_axes", turns)
    ranks = launch(trained, 4, Layout.parse(layout), backend="threads")
    sizes = {ALL: (4, 1), HALF: (2, 2), NONE: (1, 4)}
    want = one_process()
    for here, weights in ranks:
        assert here == {
            unit: sizes[chosen[unit % len(chosen)]] for unit in here
        }
        assert weights.keys() == want.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, want[name], rtol=1e-4, atol=2e-5, msg=name
            )


def test_a_unit_s_axes_are_the_layout_s_without_those_that_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As experts will be: what is cut over a part of dp is summed over the rest of it alone."""
    monkeypatch.setitem(rules.AXIS_OF, "ffn", "dp.shard")
    pieces = tuple(
        (name, nn.Linear(4, 4)) for name in ("dense", "expert", "mixed")
    )
    lines = [
        "dense.weight : - -",
        "dense.bias : -",
        "expert.weight : ffn embed",
    ]
    lines += [
        "expert.bias : ffn",
        "mixed.weight : ffn embed",
        "mixed.bias : -",
    ]
    model = Model(pieces, Rules.parse("\n".join(lines)))
    for text, dense, expert in (
        (
            "dp2x2 zero3",
            UnitAxes(("dp.shard", "cp", "ep"), ("dp.replicate",)),
            (("cp", "ep"), ("dp.replicate",)),
        ),
        (
            "dp2x2",
            UnitAxes((), ("dp.replicate", "dp.shard", "cp", "ep")),
            ((), ("dp.replicate", "cp", "ep")),
        ),
    ):
        layout = Layout.parse(text)
        assert unit_axes(model, layout, 0) == dense
        assert unit_axes(model, layout, 1) == expert
        with pytest.raises(
            LayoutError,
            match="weights of mixed are sharded over different axes",
        ):
            unit_axes(model, layout, 2)


def test_a_tied_unit_alone_has_a_group_over_the_stages_that_use_it() -> None:
    layout = Layout.parse("pp3")
    model = build_model(GPT)

    def ties(world: World) -> list[tuple[int, ...]]:
        opened = open_groups(world, layout, model, program_of(model, layout))
        ranks = [unit.tie.ranks for unit in opened.units]
        world.clear()
        return ranks

    for rank, (embedding, *others) in enumerate(
        launch(ties, 3, backend="threads")
    ):
        assert embedding == ((0, 2) if rank != 1 else (1,))
        assert {*others} == {(rank,)}
