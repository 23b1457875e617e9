"""The measured machine as hardware: against its own curves, and against cores that are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.api.request import request_for
from phalanx.layout import ByKind, Layout, Shape
from phalanx.planner import Curve, Machine, MachineError, Rate, Store
from phalanx.planner.case import Case
from phalanx.planner.hardware import Hardware
from phalanx.planner.local import hardware_of_machine, local_profile
from phalanx.planner.piece_price import OpTime, PieceTimes, op_parts
from phalanx.planner.price import Priced
from phalanx.planner.profile import SoftwareProfile
from phalanx.planner.step import Choice, Pricer, choice
from phalanx.program import (
    AttentionLoad,
    Load,
    MessageLoad,
    PieceCost,
    Product,
)

SLOW = Curve(
    "all_reduce", "gloo", 2, "ring", 1e-3, 1e8, 0.0, 1, 1 << 20, apart=2
)
MACHINE = Machine(
    name="small", date="2026-01-31", method="by hand", device="CPU", kind="cpu", count=1, cores=4,
    memory=8e9, threads=2, launch=1e-6, stores=(Store("copy", 1e10),),
    rates=(Rate("fp32", 128, 128, 128, 1e10), Rate("fp32", 1024, 1024, 1024, 4e10)),
    curves=(
        replace(SLOW, latency=1e-4, bandwidth=1e9, apart=1), SLOW, replace(SLOW, ranks=4, apart=1),
        Curve("send", "gloo", 2, "ring", 1e-4, 1e9, 0.0, 1, 1 << 20),
    ),
)  # fmt: skip
NOTHING = PieceTimes(*[OpTime()] * 4, PieceCost(*[Load()] * 4, *[0.0] * 5))


def test_a_measured_product_takes_what_it_took_and_one_between_has_a_rate_between() -> (
    None
):
    rates = hardware_of_machine(MACHINE, 2).rates
    known = Product(1024, 1024, 1024)
    assert rates.product(known, "fp32") == pytest.approx(known.flops / 4e10)
    between = Product(362, 362, 362)  # halfway in logarithms
    assert between.flops / rates.product(between, "fp32") == pytest.approx(
        2e10, rel=1e-2
    )
    beyond = Product(1 << 14, 1 << 14, 1 << 14)
    assert beyond.flops / rates.product(beyond, "fp32") <= 4e10


H100 = replace(
    MACHINE, kind="cuda", device="NVIDIA H100 80GB HBM3", catalogue="h100-sxm", cores=16,
    memory=85e9, threads=16, launch=7.6e-6, stores=(Store("copy", 2.946e12),), curves=(),
    rates=(
        Rate("bf16", 512, 512, 512, 22.1e12), Rate("bf16", 1024, 1024, 1024, 104.9e12),
        Rate("bf16", 4096, 4096, 4096, 772.2e12), Rate("bf16", 8192, 50257, 768, 120.8e12),
        Rate("bf16", 8192, 8192, 8192, 742e12),
    ),
)  # fmt: skip


def test_a_product_on_a_catalogued_gpu_takes_what_was_measured() -> None:
    """The profiler of an H100 showed 2.41 ms; a mean of all measured rates gave 3.45."""
    rates = hardware_of_machine(H100).rates
    seconds = rates.product(Product(16384, 14336, 4096), "bf16")
    assert seconds == pytest.approx(2.41e-3, rel=0.1)
    assert rates.move(2.946e12) == 1.0


@pytest.mark.slow  # it costs 4 blocks
def test_a_step_on_a_catalogued_gpu_takes_what_was_measured() -> None:
    """Four blocks of 8B took 219 ms; a mean of all measured rates gave 317."""
    shape = Shape(
        name="blocks", layers=4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32768,
        sequence=4096, batch=4,
    )  # fmt: skip
    request = request_for(shape, hardware_of_machine(H100), precision="bf16")
    step = Pricer(request).choose(Layout.parse("bf16")).step
    assert step == pytest.approx(0.219, rel=0.15)


def test_a_dtype_that_nobody_measured_is_refused_with_the_command_that_measures_it() -> (
    None
):
    with pytest.raises(MachineError, match=r"bf16.*doctor"):
        hardware_of_machine(MACHINE, 2).rates.product(Product(8, 8, 8), "bf16")


def test_messages_take_what_their_curve_says_and_one_rank_alone_sends_none() -> (
    None
):
    group = hardware_of_machine(MACHINE, 4).network
    assert group.seconds("all_reduce", 1e6, 4, 1) == MACHINE.curve(
        "all_reduce", 4
    ).seconds(1e6)
    assert group.seconds("all_reduce", 1e6, 1, 1) == 0.0


def test_a_pair_among_four_ranks_of_a_cpu_is_as_slow_as_it_was_beside_another_pair() -> (
    None
):
    def pair(ranks: int) -> float:
        group = hardware_of_machine(MACHINE, ranks).network
        return group.seconds("all_reduce", 1e6, 2, 1)

    assert pair(4) == pytest.approx(SLOW.seconds(1e6))
    assert pair(2) == pytest.approx(MACHINE.curves[0].seconds(1e6))


def test_ranks_share_the_cores_that_the_measuring_process_did_not_use_and_all_the_memory() -> (
    None
):
    hardware = hardware_of_machine(MACHINE)
    assert (hardware.cores, hardware.ranks, hardware.memory) == (2, 2, 4e9)
    assert hardware_of_machine(MACHINE, 8).memory == 1e9
    with pytest.raises(MachineError, match="2 devices, not 4"):
        hardware_of_machine(replace(MACHINE, kind="cuda", count=2), 4)


def _shared_gpipe(
    stages: int, cores: int, count: int, forward: float, backward: float
) -> float:
    """A GPipe step played through: whoever is at work has an even part of the cores."""
    order = [
        [("F", i) for i in range(count)] + [("B", i) for i in range(count)]
    ] * stages
    done: set[tuple[int, str, int]] = set()
    at, left, clock = [0] * stages, {}, 0.0

    def ready(s: int) -> bool:
        kind, i = order[s][at[s]]
        before = (s - 1, "F", i) if kind == "F" else (s + 1, "B", i)
        return before in done or not 0 <= before[0] < stages

    while any(x < 2 * count for x in at):
        for s in range(stages):
            if s not in left and at[s] < 2 * count and ready(s):
                left[s] = forward if order[s][at[s]][0] == "F" else backward
        speed = min(1.0, cores / len(left))
        spent = min(left.values()) / speed
        clock += spent
        left = {s: x - spent * speed for s, x in left.items()}
        for s in [s for s, x in left.items() if x < 1e-9]:
            done.add((s, *order[s][at[s]]))
            at[s] += 1
            del left[s]
    return clock


@pytest.mark.parametrize(
    ("stages", "cores"), [(2, 1), (4, 2), (4, 1), (8, 2), (4, 4)]
)
def test_a_pipeline_on_shared_cores_lasts_as_long_as_playing_it_through(
    stages: int, cores: int
) -> None:
    found = _pipeline(stages, replace(MACHINE, threads=1, cores=cores))
    assert found.step == pytest.approx(
        _shared_gpipe(stages, cores, 8, 1.0, 2.0), rel=1e-6
    )


def _of_blocks(case: Case, block: PieceTimes, hardware: Hardware) -> Priced:
    times = ByKind.equal_blocks(NOTHING, block, NOTHING, case.shape.layers)
    return Priced(case, times, hardware, local_profile())


def _pipeline(stages: int, machine: Machine) -> Choice:
    """GPipe over stages of one block that takes 1 and 2 seconds; messages take no time."""
    shape = Shape(
        name="even", layers=stages, hidden=8, heads=1, vocab=8, sequence=8
    )
    curves = tuple(
        replace(x, latency=0.0, bandwidth=1e30) for x in machine.curves
    )
    hardware = hardware_of_machine(replace(machine, curves=curves), stages)
    block = replace(NOTHING, forward=OpTime(1.0), input_gradient=OpTime(2.0))
    case = Case(shape, Layout.parse(f"pp{stages} gpipe:8 fp32"), 1.0, 8)
    return choice(_of_blocks(case, block, hardware))


def test_where_every_rank_has_a_core_a_pipeline_takes_what_the_textbook_says() -> (
    None
):
    assert _pipeline(2, MACHINE).step == pytest.approx((8 + 1) * 3.0)


def test_messages_take_the_time_of_a_core_that_would_compute_beside_them() -> (
    None
):
    shape = Shape(
        name="even", layers=2, hidden=8, heads=1, vocab=8, sequence=8
    )
    cost = replace(NOTHING.cost, weights=1e8)
    block = replace(
        NOTHING, forward=OpTime(1.0), input_gradient=OpTime(2.0), cost=cost
    )
    case = Case(shape, Layout.parse("dp2 accum:1 fp32"), 1.0, 8)
    busy, idle = (
        choice(_of_blocks(case, block, hardware)).step
        for two in [
            hardware_of_machine(replace(MACHINE, curves=MACHINE.curves[:1]), 2)
        ]
        for hardware in (two, replace(two, cores=64))
    )
    one = MACHINE.curves[0].seconds(4e8)
    # The last sum has nothing beside it; the first is sent while the first block goes back.
    assert busy == pytest.approx(6.0 + 2 * one, rel=0.1)
    assert idle < busy - 0.5 * min(one, 2.0)


def test_a_pieces_bytes_are_those_of_float32_on_a_cpu() -> None:
    profile = local_profile("fp32")
    assert (
        profile.weight_bytes,
        profile.optimizer_bytes,
        profile.context,
        profile.reserve,
    ) == (
        4,
        8,
        0,
        1,
    )
    # a copy in full beside the narrow weights
    assert local_profile("bf16").optimizer_bytes == 12


def test_starting_a_kernel_takes_the_time_of_who_computes_it_on_a_cpu_and_is_hidden_elsewhere() -> (
    None
):
    load = Load((Product(512, 512, 512),), launches=1000.0)
    cut, here = Layout.parse("fp32"), hardware_of_machine(MACHINE, 1)
    times = [
        op_parts(load, hardware, cut, "fp32", SoftwareProfile()).under(
            SoftwareProfile(host=1.0)
        )
        for hardware in (here, replace(here, cores=0))
    ]
    product = (
        here.rates.product(load.products[0], "fp32") / SoftwareProfile().speed
    )
    starts = 1000 * here.rates.launch
    assert times[0].total == pytest.approx(product + starts)
    assert times[1].total == pytest.approx(max(product, starts))


def test_a_rings_messages_cost_their_time_where_all_cores_compute_and_hide_where_one_is_left() -> (
    None
):
    ring = Layout.parse("cp2 fp32")
    attention = AttentionLoad(1, 8, 8, 4096, 4096, 64)
    load = Load(
        (), (attention,), messages=(MessageLoad("cp.ring", "send", 4096.0),)
    )
    busy = hardware_of_machine(MACHINE, 2)
    idle = replace(busy, cores=4)
    shared = op_parts(load, busy, ring, "fp32", SoftwareProfile()).messages
    assert shared.ring == 0.0
    # Each of two ranks carries what it sends and what it is sent, on the one core that it has.
    one = busy.network.seconds("send", 4096.0, 2, 1)
    assert shared.others == pytest.approx(2 * one)
    assert (
        op_parts(load, idle, ring, "fp32", SoftwareProfile()).messages.ring
        > 0.0
    )
    seen = op_parts(load, busy, ring, "fp32", SoftwareProfile()).under(
        local_profile()
    )
    hidden = op_parts(load, idle, ring, "fp32", SoftwareProfile()).under(
        local_profile()
    )
    assert seen.messages > hidden.messages == 0.0
