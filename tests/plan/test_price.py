"""Loads in seconds: against rooflines by hand, links' rates, and programs that are simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_hand import pieces

from phalanx.layout import Layout, Shape
from phalanx.plan import MachineError, cluster, device
from phalanx.plan.columns import Case, columns_of
from phalanx.plan.estimate import estimate
from phalanx.plan.hardware import Chip, hardware_of
from phalanx.plan.price import trio
from phalanx.plan.profile import Profile, profile, profile_named, profiles
from phalanx.program import Costs, Product, build, simulate

SHAPE = Shape(
    name="small", layers=8, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32000, sequence=2048
)
BARE = Profile(speed=1, attention=1, traffic=1, host=0, hides_data=0, context=0, reserve=1)


def _one(text: str, *, rows: float = 1.0, what: Profile = BARE, name: str = "h100x8"):
    layout = Layout.parse(text)
    case = Case(SHAPE, layout, rows, SHAPE.sequence)
    hardware = hardware_of(cluster(name))
    three = tuple(
        trio(w, hardware, what, layout, layout.precision)
        for w in pieces(SHAPE, layout, SHAPE.sequence, rows)
    )
    return estimate(columns_of([case], [0]), [three], hardware, what), three


def test_a_large_square_product_runs_near_the_best_rate_that_was_measured() -> None:
    chip = Chip(device("h100-sxm"))
    p = Product(16384, 16384, 16384)
    assert 0.9 < p.flops / chip.product(p, "bf16") / 794.5e12 <= 1.0


def test_a_product_with_one_row_is_bound_by_reading_its_weights() -> None:
    chip = Chip(device("h100-sxm"))
    p = Product(1, 8192, 8192)
    assert chip.product(p, "bf16") >= 2 * 8192 * 8192 / device("h100-sxm").memory.bandwidth


def test_a_tile_too_many_costs_a_whole_wave() -> None:
    chip = Chip(device("a100-80"))
    full = chip.product(Product(128 * 12, 4096, 256 * 9), "bf16")  # 108 tiles: one wave
    more = chip.product(Product(128 * 12, 4096, 256 * 9 + 256), "bf16")
    assert more > 1.2 * full * 10 / 9


@pytest.mark.parametrize(("apart", "ranks"), [(1, 8), (8, 8), (1, 64)])
def test_a_collective_is_never_faster_than_its_link(apart: int, ranks: int) -> None:
    whole = cluster("h100x64")
    group = hardware_of(whole).network
    size = 4e9
    time = group.seconds(
        "all_gather", np.array([size]), np.array([float(ranks)]), np.array([float(apart)])
    )
    port = whole.level(ranks, apart).bandwidth * (8 if apart == 1 and ranks > 8 else 1)
    assert size * (ranks - 1) / ranks / time[0] <= port


def test_a_group_across_servers_drives_a_port_for_each_of_its_members() -> None:
    group = hardware_of(cluster("h100x64")).network
    ones = np.ones(1)
    packed = group.seconds("all_reduce", 1e9 * ones, 64 * ones, 1 * ones)
    spread = group.seconds("all_reduce", 1e9 * ones, 8 * ones, 8 * ones)
    assert packed[0] < spread[0] / 4


@pytest.mark.parametrize("schedule", ["gpipe:8", "1f1b:8", "1f1b:16"])
def test_the_closed_form_of_a_pipeline_is_what_its_program_takes(schedule: str) -> None:
    found, (embed, block, head) = _one(f"pp4 {schedule} bf16")
    layout = Layout.parse(f"pp4 {schedule}")
    stages = [[embed, block, block], [block] * 2, [block] * 2, [block, block, head]]
    costs = {}
    for number, stage in enumerate(stages):
        costs["F", number] = sum(t.forward.total for t in stage)
        costs["B", number] = sum(t.backward for t in stage)
    program = build(layout, [range(i, i + 1) for i in range(4)])
    took = max(span.end for span in simulate(program, Costs(kinds={}, pieces=costs)).spans)
    plain = float((found.compute + found.tensor + found.bubble)[0])
    assert plain == pytest.approx(took, rel=0.02)


def test_memory_is_what_zero_promises() -> None:
    numbers = SHAPE.total
    for zero, each in ((0, 2 + 4 + 12), (1, 2 + 4 + 12 / 8), (2, 2 + 4 / 8 + 12 / 8)):
        found, _ = _one(f"dp8 zero{zero} bf16" if zero else "dp8 bf16")
        held = found.held(0)
        states = held["weights"] + held["gradients"] + held["optimizer"]
        slack = 4.0 * SHAPE.vocab * SHAPE.hidden * 1.6 if zero == 2 else 0.01 * numbers
        assert states == pytest.approx(each * numbers, abs=slack + 0.02 * each * numbers)


@pytest.mark.parametrize(
    ("text", "part"),
    [("reduce:micro", 1), ("zero1 reduce:micro", 8), ("zero2", 8), ("zero3", 8),
     ("zero1", 1), ("zero2 reduce:step", 1), ("zero3 reduce:step", 1)],
)  # fmt: skip
def test_gradients_are_in_parts_where_each_microbatch_ends_in_a_sum_over_those_who_share(
    text: str, part: int
) -> None:
    found, three = _one(f"dp8 {text} bf16")
    embed, block, head = (t.weights for t in three)
    under_way = 4.0 * (block + embed) if part > 1 else 0.0
    whole = 4.0 * (embed + SHAPE.layers * block + head)
    assert found.held(0)["gradients"] == pytest.approx(whole / part + under_way)


def test_recomputing_saves_memory_and_costs_time() -> None:
    plain, _ = _one("dp8 bf16", rows=4)
    again, _ = _one("dp8 bf16 recompute:all", rows=4)
    assert again.bytes[0] < plain.bytes[0]
    assert 1.15 < again.compute[0] / plain.compute[0] < 1.4


@pytest.mark.parametrize(
    ("text", "sums"),
    [("pp2 1f1b:4", True), ("pp8 1f1b:8", True), ("pp2 zb-v:4", False), ("tp2", False)],
)
def test_a_tied_weight_is_summed_between_the_two_ends_of_a_pipeline(text: str, sums: bool) -> None:
    layout = Layout.parse(text)
    name = f"h100x{layout.ranks}"
    place = hardware_of(cluster(name))
    found, three = _one(text, name=name)
    case = Case(replace(SHAPE, tied=True), layout, 1.0, SHAPE.sequence)
    tied = estimate(columns_of([case], [0]), [three], place, BARE)
    size = three[0].weights * BARE.reduce_bytes
    pair = float(place.network.seconds("all_reduce", *map(np.array, (size, 2.0, 1.0))))
    assert tied.data - found.data == pytest.approx(pair if sums else 0.0)


def test_what_can_be_hidden_is_not_seen() -> None:
    seen, _ = _one("dp8 zero3 bf16", name="h100x8")
    hidden, _ = _one("dp8 zero3 bf16", what=replace(BARE, hides_data=1.0))
    assert hidden.data[0] < seen.data[0]
    assert hidden.compute[0] == seen.compute[0]


@pytest.mark.parametrize("faster", [1, 50])
def test_columns_that_gather_again_keep_a_part_and_wait_for_what_products_do_not_hide(
    faster: int,
) -> None:
    plain = replace(BARE, speed=faster, attention=faster, traffic=1 / faster)
    again = replace(plain, regathers=True)
    whole, part = (_one("tp8 seq", what=each)[1][1] for each in (plain, again))
    size = 2 * SHAPE.sequence * SHAPE.hidden  # what each of two columns takes, in 16 bits
    assert whole.kept - part.kept == pytest.approx(2 * size * 7 / 8)
    assert part.forward == whole.forward
    one = hardware_of(cluster("h100x8")).network.seconds(
        "all_gather", *map(np.array, (size, 8.0, 1.0))
    )
    late = max(0.0, 2 * float(one) - 0.9 * whole.inputs.device)
    assert part.inputs.messages - whole.inputs.messages == pytest.approx(late)
    assert (late > 0) == (faster > 1)
    without = (_one("tp8", what=each)[1][1] for each in (plain, again))
    assert len({each.kept for each in without}) == 1


def test_what_selective_recomputation_repeats_of_the_products_is_the_stacks() -> None:
    text = "recompute:selective"
    none, half = (_one(text, what=replace(BARE, repeats=part))[1][1] for part in (0.0, 0.5))
    chip = Chip(device("h100-sxm"))
    layout = Layout.parse(text)
    forward = pieces(SHAPE, layout, SHAPE.sequence, 1.0)[1].forward
    products = sum(chip.product(p, layout.precision) for p in forward.products)
    assert half.again.device - none.again.device == pytest.approx(products / 2)
    assert half.forward == none.forward
    whole = (_one("recompute:all", what=replace(BARE, repeats=part))[1][1] for part in (0.0, 0.5))
    assert len({each.again for each in whole}) == 1


def test_a_stack_is_named_by_what_tables_call_it() -> None:
    assert profile_named("nanotron v0.5").name == "nanotron"
    assert profile_named("Megatron-LM 2021").name == "megatron-2021"
    assert profile_named("Megatron-LM zero-bubble fork").name == "zero-bubble"
    assert profile_named("something new").name == "default"


def test_an_unknown_stack_is_refused_with_the_nearest() -> None:
    with pytest.raises(MachineError, match="nanotron"):
        profile("nanotrn")
    assert all(each.source for each in profiles().values())
