"""What pieces keep is found on meta tensors and is what a real step holds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from phalanx.layout import Layout, Shape
from phalanx.program.memory import peaks
from phalanx.split import Precision, build_model, microbatches
from phalanx.split.holding import hold
from phalanx.train import AdamW, Performer
from phalanx.train.program import program_of
from phalanx.verify import batch_of
from phalanx.weigh.live import Live
from phalanx.weigh.sizes import sizes_of
from phalanx.wire import World
from phalanx.wire.launch import launch

SHAPE = Shape(
    "deep", layers=8, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64, sequence=64, batch=8
)
BATCH = batch_of(SHAPE, 0, dtype=torch.float32)


def most_alive(world: World, layout: Layout) -> int:
    """The most bytes of activations between two operations of a step."""
    model = build_model(SHAPE)
    program = program_of(model, layout, agree=True)
    held = hold(world, layout, model, program)
    performer = Performer(held, program, world.rank, AdamW(), width=SHAPE.hidden, clip=1.0)
    own = microbatches(BATCH, layout, held.place["dp"], held.place["cp"])
    performer.step(own, 1e-3)  # flat buffers are made in the first step and used again
    live, seen = Live(), [0]
    plain = performer._perform

    def looked_at(op: object) -> None:
        plain(op)  # type: ignore[arg-type]
        seen.append(live.bytes())

    performer._perform = looked_at  # type: ignore[method-assign]
    with live:
        performer.step(own, 1e-3)
    world.clear()
    return max(seen)


@pytest.mark.parametrize(
    "text",
    [
        "", "recompute:all", "recompute:every=2", "recompute:every=4", "recompute:sqrt",
        "recompute:selective", "accum:2", "pp2 gpipe:4", "pp2 1f1b:4", "pp2 zb-h1:4", "dp2 zero3",
    ],
)  # fmt: skip
def test_peak_activation_memory_is_what_check_says_within_five_percent(text: str) -> None:
    layout = Layout.parse(text)
    program = program_of(build_model(SHAPE), layout, agree=True)
    sizes = sizes_of(partial(build_model, SHAPE), layout, program, BATCH, Precision())
    only = replace(sizes, home=(), gathered=(), gradient=(), gradient_shard=(), optimizer=())
    measured = launch(most_alive, layout.ranks, layout, wire="threads")
    for row, peak in enumerate(peaks(program, only)):
        assert measured[program.owner.index(row)] == pytest.approx(peak.total, rel=0.05)


def test_recomputing_keeps_less_and_selective_lies_between() -> None:
    def peak(text: str) -> float:
        layout = Layout.parse(text)
        program = program_of(build_model(SHAPE), layout, agree=True)
        sizes = sizes_of(partial(build_model, SHAPE), layout, program, BATCH, Precision())
        return peaks(program, sizes)[0].kinds["activations"]

    assert peak("recompute:all") < peak("recompute:selective") < peak("recompute:none")
    assert peak("recompute:sqrt") < peak("recompute:selective")


def test_live_counts_a_storage_once_and_forgets_what_is_gone() -> None:
    before = torch.ones(100)
    with Live() as live:
        a = torch.zeros(10)
        b = a.view(2, 5)
        before.add_(1)
        assert live.bytes() == 40
        c = b + 1
        assert live.bytes() == 80
        del a, b
        assert live.bytes() == 40
        assert c.sum() == 10
