"""Lower ZeRO stages that send less: held against the gathers and sums of the programs themselves."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from phalanx.layout import Layout, LayoutError, Shape, recipe, staged_pieces
from phalanx.layout.sharding import less_text, sends_less
from phalanx.program import build, ops

TINY = Shape.load("tiny")
MESSAGES = (ops.GATHER, ops.REDUCE)
MESHES = (
    "dp4 accum:1",
    "dp4 accum:3",
    "dp2x2 accum:2",
    "dp2 pp2 1f1b:4",
    "dp2 tp2 seq accum:2",
)
WORDS = (
    "",
    "gather:step",
    "gather:micro",
    "reduce:step",
    "gather:step reduce:step",
)


def sent(layout: Layout) -> Counter[str]:
    """How many gathers and sums the busiest rank of a step's program has."""
    program = build(layout, staged_pieces(layout, TINY))
    rows = [
        Counter(op.kind for op in row if op.kind in MESSAGES)
        for row in program.rows
    ]
    return max(rows, key=lambda row: row.total())


def layouts() -> list[Layout]:
    found = []
    for mesh, zero, words in product(MESHES, (1, 2, 3), WORDS):
        text = f"{mesh} zero{zero} {words}"
        if zero == 3 or "gather" not in words:
            found.append(Layout.parse(text))
    return found


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_a_lower_stage_that_sends_less_has_fewer_messages_in_its_program(
    layout: Layout,
) -> None:
    mine = sent(layout)
    for other in sends_less(layout):
        its = sent(other)
        assert other.zero < layout.zero
        assert its.total() < mine.total()
        assert all(its[kind] <= mine[kind] for kind in MESSAGES)
        gathers, sums = (its[kind] < mine[kind] for kind in MESSAGES)
        text = less_text(layout, other)
        assert ("gathers weights" in text, "sums gradients" in text) == (
            gathers,
            sums,
        )


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_no_lower_stage_with_fewer_messages_is_left_out(
    layout: Layout,
) -> None:
    """Of those that have as many messages, the highest stage is enough: it holds least."""
    named = {
        tuple(sorted(sent(other).items())) for other in sends_less(layout)
    }
    mine = sent(layout)
    for zero in range(1, layout.zero):
        try:
            other = replace(layout, zero=zero, gather="", reduce="")
        except LayoutError:
            continue
        its = sent(other)
        never_more = all(its[kind] <= mine[kind] for kind in MESSAGES)
        if never_more and its.total() < mine.total():
            assert tuple(sorted(its.items())) in named


def test_weights_on_the_host_are_fetched_for_each_use_under_every_stage() -> (
    None
):
    assert sends_less(Layout.parse("dp2 zero3 accum:4 offload:weights")) == ()


def test_the_recipe_shards_no_more_than_memory_asks_for() -> None:
    """8b in bf16: 2 bytes of weights, 4 of gradients and 12 of the optimizer for each parameter, of
    which ZeRO-1 shards the last and ZeRO-2 the last two, in half the memory."""
    shape = Shape.load("8b")
    whole = {1: 2 + 4 + 12 / 8, 2: 2 + 16 / 8}
    for zero, each in whole.items():
        needed = 2 * each * shape.total
        enough, less = (
            recipe(shape, 8, batch=32, memory=part * needed, precision="bf16")
            for part in (1.001, 0.999)
        )
        assert (enough.zero, less.zero) == (zero, zero + 1)
    # Memory unknown.
    assert recipe(shape, 8, batch=32, precision="bf16").zero == 3
    # In a pipeline ZeRO-3 gathers as rarely as ZeRO-2 and holds less.
    staged = [
        recipe(Shape.load("70b"), 64, batch=64, memory=m * 1e9).zero
        for m in (40, 80, 800)
    ]
    assert set(staged) == {1, 3}
