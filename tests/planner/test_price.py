"""Loads in seconds: against rooflines by hand, links' rates, and programs that are simulated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from by_hand import piece_kinds, pieces

from phalanx.layout import ByKind, Layout, Shape
from phalanx.planner import MachineError, cluster, device
from phalanx.planner.case import Case
from phalanx.planner.corrections import (
    PieceWork,
    Software,
    Tokens,
    starts_each_routed_mlp,
)
from phalanx.planner.hardware import SLOWED, Roofline, hardware_of
from phalanx.planner.piece_price import (
    MessageSeconds,
    OpParts,
    PieceTimes,
    parts_of,
    piece_parts,
    together,
)
from phalanx.planner.price import Priced, Units, exchange_seconds
from phalanx.planner.profile import (
    SoftwareProfile,
    profile,
    profile_named,
    profiles,
)
from phalanx.planner.step import Choice, choice
from phalanx.program import (
    AttentionLoad,
    CostedPiece,
    Load,
    PieceCost,
    PieceKinds,
    Product,
    ops,
)

SHAPE = Shape(
    name="small",
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=32000,
    sequence=2048,
)
BARE = SoftwareProfile(speed=1, traffic=1, host=0, context=0, reserve=1)


def _one(
    text: str,
    *,
    rows: float = 1.0,
    what: SoftwareProfile = BARE,
    name: str = "",
    tied: bool = False,
) -> tuple[Choice, tuple[PieceTimes, ...]]:
    priced = _priced(text, rows=rows, what=what, name=name, tied=tied)
    return choice(priced), priced.times.values


def _priced(
    text: str,
    *,
    rows: float = 1.0,
    what: SoftwareProfile = BARE,
    name: str = "",
    tied: bool = False,
) -> Priced:
    layout = Layout.parse(text)
    shape = replace(SHAPE, tied=tied)
    hardware = hardware_of(cluster(name or f"h100x{layout.ranks}"))
    embed, block, head = (
        piece_parts(w, hardware, what, layout, layout.precision).under(what)
        for w in pieces(SHAPE, layout, SHAPE.sequence, rows)
    )
    times = ByKind.equal_blocks(embed, block, head, shape.layers)
    case = Case(shape, layout, rows, SHAPE.sequence)
    return Priced(case, times, hardware, what)


def test_a_large_square_product_runs_near_the_best_rate_that_was_measured() -> (
    None
):
    chip = Roofline(device("h100-sxm"))
    p = Product(16384, 16384, 16384)
    assert 0.9 < p.flops / chip.product(p, "bf16") / 794.5e12 <= 1.0


def test_a_product_with_one_row_is_bound_by_reading_its_weights() -> None:
    chip = Roofline(device("h100-sxm"))
    p = Product(1, 8192, 8192)
    assert (
        chip.product(p, "bf16")
        >= 2 * 8192 * 8192 / device("h100-sxm").memory.bandwidth
    )


def test_a_tile_too_many_costs_a_whole_wave() -> None:
    chip = Roofline(device("a100-80"))
    # 108 tiles: one wave.
    full = chip.product(Product(128 * 12, 4096, 256 * 9), "bf16")
    more = chip.product(Product(128 * 12, 4096, 256 * 9 + 256), "bf16")
    assert more > 1.2 * full * 10 / 9


@pytest.mark.parametrize(("apart", "ranks"), [(1, 8), (8, 8), (1, 64)])
def test_a_collective_is_never_faster_than_its_link(
    apart: int, ranks: int
) -> None:
    whole = cluster("h100x64")
    group = hardware_of(whole).network
    size = 4e9
    time = group.seconds("all_gather", size, ranks, apart)
    crosses = (ranks - 1) * apart >= 8  # a server
    port = whole.levels[crosses].bandwidth * (
        8 if apart == 1 and ranks > 8 else 1
    )
    assert size * (ranks - 1) / ranks / time <= port


def test_a_group_across_servers_drives_a_port_for_each_of_its_members() -> (
    None
):
    group = hardware_of(cluster("h100x64")).network
    packed = group.seconds("all_reduce", 1e9, 64, 1)
    spread = group.seconds("all_reduce", 1e9, 8, 8)
    assert packed < spread / 4


def test_tokens_for_another_server_leave_by_the_port_of_their_own_rank() -> (
    None
):
    whole = cluster("h100x64")
    network = hardware_of(whole).network
    link = whole.levels[1]
    port = link.bandwidth * link.reached
    for servers, ranks, apart in ((2, 16, 1), (8, 64, 1), (8, 8, 8)):
        seconds = network.seconds("all_to_all", 1e9, ranks, apart)
        leaves = 1e9 * (servers - 1) / servers
        assert seconds == pytest.approx(leaves / port, rel=0.01)
    inside = network.seconds("all_to_all", 1e9, 8, 1)
    near = whole.levels[0].bandwidth * whole.levels[0].reached
    assert inside == pytest.approx(1e9 * 7 / 8 / near, rel=0.05)


def test_a_token_that_travels_once_to_a_server_takes_the_port_less_time() -> (
    None
):
    """Eight experts on four servers are on 4 (1 - (3/4)^8) = 3.6 of them in the mean."""
    layout = Layout.parse("ep32 bf16")
    shape = replace(SHAPE, experts=256, top_k=8, expert_ffn=512)
    hardware = hardware_of(cluster("h100x32"))
    often, once = (
        exchange_seconds(layout, shape, hardware, profile, 1e9)[1]
        for profile in (BARE, replace(BARE, sends_once=True))
    )
    assert once / often == pytest.approx(4 * (1 - 0.75**8) / 8, rel=0.01)
    # In one server a token travels to each of its experts either way.
    near = replace(BARE, sends_once=True)
    eight = Layout.parse("ep8 bf16"), shape, hardware_of(cluster("h100x8"))
    assert exchange_seconds(*eight, near, 1e9) == exchange_seconds(
        *eight, BARE, 1e9
    )


def test_every_expert_has_kernels_of_its_own() -> None:
    """16 experts on a rank, each with two linears, each cast by two kernels."""
    layout = Layout.parse("ep8 bf16")
    shape = replace(SHAPE, experts=128, top_k=8, expert_ffn=512)
    software = Software(replace(BARE, experts_one_by_one=True), layout)
    plain = PieceWork(pieces(SHAPE, layout, SHAPE.sequence, 1.0)[1])

    def more(narrow: bool) -> tuple[float, float]:
        of = Tokens(shape, 2048.0, layout, sparse=True, narrow=narrow)
        cost = starts_each_routed_mlp(plain, software, of).cost
        return (
            cost.forward.launches - plain.cost.forward.launches,
            cost.input_gradient.launches - plain.cost.input_gradient.launches,
        )

    assert more(narrow=False) == (32, 64)
    assert more(narrow=True) == (32 + 64, 64 + 64)
    none = Software(BARE, layout)
    of = Tokens(shape, 2048.0, layout, sparse=True)
    assert starts_each_routed_mlp(plain, none, of) is plain


def test_sums_of_tp_beside_weight_gradients_are_hidden_by_matmuls() -> None:
    plain, beside = (
        _priced("tp8", what=each).times[1]
        for each in (BARE, replace(BARE, sums_beside=True))
    )
    cost = pieces(SHAPE, Layout.parse("tp8"), SHAPE.sequence, 1.0)[1]
    eight = hardware_of(cluster("h100x8"))
    sums = [m for m in cost.input_gradient.messages if m.op == "all_reduce"]
    assert len(sums) == 2
    sent = sum(eight.network.seconds(m.op, m.bytes, 8, 1) for m in sums)
    products = sum(
        eight.rates.product(p, "fp32") for p in cost.input_gradient.products
    )
    assert plain.input_gradient.messages == pytest.approx(sent)
    assert beside.input_gradient.messages == pytest.approx(
        max(sent - products, SLOWED * sent)
    )
    # The sums of the forward have no such matmul.
    assert beside.forward == plain.forward


@pytest.mark.parametrize(
    ("ranks", "mib", "microseconds"),
    [(8, 1, 93), (8, 16, 232), (8, 64, 580), (8, 128, 1162), (8, 1024, 8193),
     (4, 4, 77), (4, 64, 544), (4, 256, 1929), (2, 16, 132), (2, 128, 764)],
)  # fmt: skip
def test_an_all_reduce_in_a_server_takes_what_was_measured(
    ranks: int, mib: int, microseconds: float
) -> None:
    """Of A100s over NVLink, from vTrain's table (Bang et al. 2024)."""
    network = hardware_of(cluster("a100-80x8")).network
    time = network.seconds("all_reduce", mib * 2**20, ranks, 1)
    assert time == pytest.approx(1e-6 * microseconds, rel=0.25)


@pytest.mark.parametrize(
    ("schedule", "m"), [("gpipe:8", 8), ("1f1b:8", 8), ("1f1b:16", 16)]
)
def test_a_pipeline_takes_what_the_textbook_says(
    schedule: str, m: int
) -> None:
    """(p - 1) microbatches of ramp and m of the dearest stage (Narayanan et al. 2021, equation 1)."""
    found, (embed, block, head) = _one(f"pp4 {schedule} stages:2-2-2-2 bf16")
    middle = 2 * (block.forward.total + block.backward)
    ends = [t.forward.total + t.backward for t in (embed, head)]
    ramp = 3 * middle + sum(ends)
    longest = middle + max(ends)
    textbook = ramp - max(ends) + m * longest
    # Weights are also gathered, gradients summed and the update done.
    assert textbook < found.step < 1.05 * textbook
    assert found.parts["compute"] == pytest.approx(m * longest, rel=0.01)


def test_memory_is_what_zero_promises() -> None:
    numbers = SHAPE.total
    for zero, each in (
        (0, 2 + 4 + 12),
        (1, 2 + 4 + 12 / 8),
        (2, 2 + 4 / 8 + 12 / 8),
    ):
        held = _one(
            f"dp8 zero{zero} accum:2 bf16" if zero else "dp8 accum:2 bf16"
        )[0].memory
        states = held["weights"] + held["gradients"] + held["optimizer"]
        # Summed after every microbatch, a gradient is whole until it has been sent: at most two
        # are under way, and embedding and head are the largest.
        slack = (
            4.0 * SHAPE.vocab * SHAPE.hidden * 3
            if zero == 2
            else 0.01 * numbers
        )
        assert states == pytest.approx(
            each * numbers, abs=slack + 0.02 * each * numbers
        )


def test_recomputing_saves_memory_and_costs_time() -> None:
    plain, _ = _one("dp8 bf16", rows=4)
    again, _ = _one("dp8 bf16 recompute:all", rows=4)
    assert again.bytes < plain.bytes
    assert 1.15 < again.parts["compute"] / plain.parts["compute"] < 1.4


@pytest.mark.parametrize(
    ("text", "sums"), [("pp2 1f1b:4", True), ("pp2 zb-v:4", False)]
)
def test_a_tied_weight_is_summed_between_the_two_ends_of_a_pipeline(
    text: str, sums: bool
) -> None:
    layout = Layout.parse(text)
    plain, three = _one(text)
    tied, _ = _one(text, tied=True)
    size = three[0].cost.weights * BARE.reduce_bytes
    pair = hardware_of(cluster(f"h100x{layout.ranks}")).network.seconds(
        "all_reduce", size, 2, 1
    )
    assert tied.step - plain.step == pytest.approx(
        pair if sums else 0.0, rel=0.01, abs=1e-6
    )


@pytest.mark.parametrize(
    ("text", "norms"), [("tp4 bf16", 0), ("tp4 seq bf16", 2 * 1024)]
)
def test_sums_over_tp_have_the_weights_of_which_ranks_have_parts(
    text: str, norms: int
) -> None:
    """Four ranks share two key and value heads of 64: each sums its head of both with another rank's. Norms
    are summed where ranks have other tokens."""
    shape = replace(SHAPE, kv_heads=2)
    priced = replace(
        _priced(text),
        case=Case(shape, Layout.parse(text), 1.0, SHAPE.sequence),
    )
    own = 2 * 64 * 1024 + norms
    network = hardware_of(cluster("h100x4")).network
    found = priced.costs().pieces[ops.SUM_PARTS, 1]
    assert found == pytest.approx(
        network.seconds("all_reduce", BARE.reduce_bytes * own, 4, 1)
    )


def test_messages_of_data_parallel_are_seen_or_slow_what_is_computed_beside_them() -> (
    None
):
    alone, _ = _one("dp8 zero3 bf16")
    beside = replace(BARE, overlaps_data=False)
    seen, three = _one("dp8 zero3 bf16", what=beside)
    network = hardware_of(cluster("h100x8")).network
    weights = [
        three[0].cost.weights,
        *[three[1].cost.weights] * SHAPE.layers,
        three[2].cost.weights,
    ]
    # Each block is gathered twice, embedding and head once or twice, and all are summed.
    gathers = sum(network.seconds("all_gather", 2 * w, 8, 1) for w in weights)
    sums = sum(network.seconds("reduce_scatter", 4 * w, 8, 1) for w in weights)
    assert seen.parts["data"] > gathers + sums > alone.parts["data"]
    lost = alone.parts["compute"] - seen.parts["compute"]
    assert 0 < lost <= SLOWED * (2 * gathers + sums) * (1 + 1e-9)
    # Summed once a step, a gradient slows as much, however many microbatches there are.
    once = [_one(f"dp8 accum:{m} bf16")[0].parts["compute"] for m in (4, 8)]
    plain = [_one(f"accum:{m} bf16")[0].parts["compute"] for m in (4, 8)]
    assert once[0] - plain[0] == pytest.approx(once[1] - plain[1], rel=0.01)


def test_messages_beside_computing_slow_it_or_come_late() -> None:
    """Of 8 seconds of attention and 16 of products: a ring of four comes in four parts, the last of which
    is computed when all have come; so do the messages of eight ranks beside their products."""
    plain, beside = (
        replace(BARE, speed=1.0, overlaps_tensor=flag)
        for flag in (False, True)
    )
    empty = OpParts(16.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for sent, seen in (
        (2.0, SLOWED * 2.0),
        (8.0, 8.0 - 6.0),
        (80.0, 80.0 - 6.0),
    ):
        ring = replace(empty, messages=MessageSeconds(ring=sent), ring=4)
        assert ring.under(plain).total == pytest.approx(24.0 + seen)
    for sent, seen in (
        (4.0, SLOWED * 4.0),
        (16.0, SLOWED * 16.0),
        (40.0, 40.0 - 14.0),
    ):
        tensor = replace(empty, messages=MessageSeconds(tensor=sent), group=8)
        assert tensor.under(plain).total == pytest.approx(24.0 + sent)
        assert tensor.under(beside).total == pytest.approx(24.0 + seen)


def test_a_block_as_one_takes_no_longer_than_its_parts() -> None:
    """With any messages: those of one part may travel beside what another one computes."""
    profile = replace(BARE, overlaps_tensor=True, speed=1.0)
    sent = [
        MessageSeconds(ring, tensor, gathered, others)
        for ring, tensor, gathered, others in product(
            (0.0, 0.5, 20.0), repeat=4
        )
    ]
    some = [
        OpParts(
            products, attention, 1.0, 0.0, 2.0, 0.0, 0.0, each, ring=4, group=8
        )
        for products, attention, each in product((0.0, 3.0), (0.0, 3.0), sent)
    ]
    for a, b in zip(some, some[::-1], strict=True):
        whole = together([a, b]).under(profile).total
        assert whole <= (a.under(profile).total + b.under(profile).total) * (
            1 + 1e-12
        )


def test_recomputation_that_ends_early_makes_no_last_product_again() -> None:
    whole, early = (replace(BARE, ends_early=early) for early in (False, True))
    text = "tp2 seq bf16 recompute:all"
    (all_of_it, _), (part, _) = (
        _one(text, rows=4, what=what) for what in (whole, early)
    )
    layout = Layout.parse(text)
    hardware = hardware_of(cluster("h100x2"))
    forward = pieces(SHAPE, layout, SHAPE.sequence, 4.0)[1].forward
    last = hardware.rates.product(forward.products[-1], "bf16")
    message = forward.messages[-1]
    last += hardware.network.seconds(message.op, message.bytes, 2, 1)
    assert all_of_it.step - part.step == pytest.approx(SHAPE.layers * last)


def test_narrow_heads_cost_attention_less_before_its_third_generation() -> (
    None
):
    rates = hardware_of(cluster("h100x8")).rates
    narrow, wide = (
        AttentionLoad(1, 2048 / d, 2048 / d, 8192, 8192, d, 1, 2)
        for d in (64, 128)
    )

    def slower(kernel: str) -> float:
        return rates.attention(narrow, "bf16", kernel) / rates.attention(
            wide, "bf16", kernel
        )

    # Dao 2023, figure 4.
    assert slower("flash-2") == pytest.approx(189 / 171, rel=0.01)
    assert slower("flash-3") > 1.2


def _attention_rate(
    name: str, kernel: str, keys: int = 16384, products: int = 7
) -> float:
    """FLOP/s of causal attention with heads of 128 on a device of the catalogue.

    Both directions together have 7 products, the forward has 2 of them.
    """
    rates = Roofline(device(name))
    parts = (2, 5) if products == 7 else (products,)
    loads = [AttentionLoad(1, 16, 16, keys, keys, 128, 1, n) for n in parts]
    seconds = sum(rates.attention(load, "bf16", kernel) for load in loads)
    return sum(load.flops for load in loads) / seconds


def _long_rate(name: str, kernel: str) -> float:
    """The rate at 16,384 keys, of which a ramp of 512 keys takes 3 %."""
    return _attention_rate(name, kernel) * (1 + 512 / 16384)


def test_attention_on_an_h100_takes_what_was_measured_there() -> None:
    # cuDNN at 4,096 keys (benchmarks/README.md): TFLOP/s forward and backward.
    for products, measured in ((2, 535e12), (5, 428e12)):
        rate = _attention_rate("h100-sxm", "flash-3", 4096, products)
        assert rate == pytest.approx(measured, rel=0.04)
    both = _attention_rate("h100-sxm", "flash-3")
    # Shah et al. 2024, figures 5 and 6.
    assert both == pytest.approx(540e12, rel=0.03)


def test_a_faster_device_needs_longer_sequences_for_its_rate() -> None:
    """A tile starts and ends in a fixed time: a device gains less with few keys."""

    def short(name: str) -> float:
        few, many = (
            _attention_rate(name, "flash-3", keys) for keys in (2048, 1 << 18)
        )
        return few / many

    assert short("a100-80") > 1.1 * short("h100-sxm") > 1.2 * short("b200")


@pytest.mark.parametrize("name", ["b200", "gb200", "h100-nvl", "h100-pcie"])
def test_attention_with_older_instructions_gains_by_units_and_clock_alone(
    name: str,
) -> None:
    # FlashAttention-1 and -2 use mma.sync: 200 and 335 TFLOP/s on the 132 units of an H100 at 1.83 GHz.
    chip = device(name).chip
    assert chip is not None
    for kernel, rate in (("flash-1", 200e12), ("flash-2", 335e12)):
        most = rate / (132 * 1.83) * chip.units * chip.matrix_clock_ghz
        assert _long_rate(name, kernel) <= 1.01 * most
    assert device(name).attention_tflops == {}


def test_the_newest_attention_kernel_of_a_new_device_is_a_part_of_its_best_matmul() -> (
    None
):
    b200 = device("b200").reached_tflops["bf16"] * 1e12
    assert _long_rate("b200", "flash-3") == pytest.approx(0.6 * b200, rel=0.01)
    assert _long_rate("b200", "flash-2") < 0.4 * _long_rate("b200", "flash-3")
    # Kernels of makers without mma.sync, and of slow devices, are that part in every generation.
    assert _long_rate("rtx-4090", "flash-2") == _long_rate(
        "rtx-4090", "flash-3"
    )


def test_a_format_that_was_not_measured_reaches_no_more_of_its_peak_than_those_that_were() -> (
    None
):
    mi300x, a100 = Roofline(device("mi300x")), device("a100-80")
    measured = mi300x.reached("bf16") / mi300x.device.peak("bf16")
    assert measured == pytest.approx(668.4 / 1307.4, rel=1e-3)
    assert mi300x.reached("fp8") / mi300x.device.peak("fp8") == pytest.approx(
        measured
    )
    # A device that reaches more of a peak than is usual is not assumed to do so in other formats.
    assert Roofline(a100).reached("tf32") == pytest.approx(
        0.75 * a100.peak("tf32")
    )
    unmeasured = replace(device("h100-sxm"), reached_tflops={})
    assert Roofline(unmeasured).reached("bf16") == 0.75 * unmeasured.peak(
        "bf16"
    )


def test_sums_that_do_not_overlap_come_after_the_pipeline_and_not_stage_by_stage() -> (
    None
):
    beside = replace(BARE, overlaps_data=False)
    (alone, _), (seen, three) = (
        _one(f"{dp}pp4 1f1b:16 bf16", what=beside) for dp in ("", "dp2 ")
    )
    network = hardware_of(cluster("h100x8")).network
    weights = (
        max(three[0].cost.weights, three[2].cost.weights)
        + SHAPE.layers / 4 * three[1].cost.weights
    )
    sums = network.seconds("all_reduce", 4 * weights, 2, 1)
    # All stages sum at once when the last of them has computed: not each before the next one.
    assert seen.step - alone.step < 1.5 * sums


def test_sends_that_do_not_overlap_take_the_time_of_the_stage_that_sends() -> (
    None
):
    plain, three = _one("pp2 1f1b:16 bf16")
    seen, _ = _one(
        "pp2 1f1b:16 bf16", what=replace(BARE, overlaps_sends=False)
    )
    one = hardware_of(cluster("h100x2")).network.seconds(
        "send", three[1].cost.edge, 2, 1
    )
    assert 15 * one < seen.step - plain.step < 20 * one


@pytest.mark.parametrize("faster", [1, 50])
def test_columns_that_gather_again_keep_a_part_and_wait_for_what_products_do_not_hide(
    faster: int,
) -> None:
    plain = replace(BARE, speed=faster, traffic=1 / faster)
    again = replace(plain, regathers=True)
    whole, part = (
        _priced("tp8 seq", what=each).times[1] for each in (plain, again)
    )
    # what each of two columns takes, in 16 bits
    size = 2 * SHAPE.sequence * SHAPE.hidden
    assert whole.cost.kept - part.cost.kept == pytest.approx(2 * size * 7 / 8)
    assert part.forward == whole.forward
    eight = hardware_of(cluster("h100x8"))
    sent = 2 * eight.network.seconds("all_gather", size, 8, 1)
    cost = pieces(SHAPE, Layout.parse("tp8 seq"), SHAPE.sequence, 1.0)[
        1
    ].input_gradient
    products = (
        sum(eight.rates.product(p, "fp32") for p in cost.products) / faster
    )
    extra = part.input_gradient.messages - whole.input_gradient.messages
    # They come late where they take longer than the products, and slow these where they do not.
    assert (sent > products) == (faster > 1)
    assert extra == pytest.approx(max(sent - products, SLOWED * sent))
    without = (_priced("tp8", what=each).times[1] for each in (plain, again))
    assert len({each.cost.kept for each in without}) == 1


def test_what_selective_recomputation_repeats_of_the_products_is_the_profiles() -> (
    None
):
    text = "recompute:selective"
    none, half = (
        _one(text, what=replace(BARE, repeats=part))[1][1]
        for part in (0.0, 0.5)
    )
    chip = Roofline(device("h100-sxm"))
    layout = Layout.parse(text)
    forward = pieces(SHAPE, layout, SHAPE.sequence, 1.0)[1].forward
    products = sum(chip.product(p, layout.precision) for p in forward.products)
    assert half.recompute.device - none.recompute.device == pytest.approx(
        products / 2
    )
    assert half.forward == none.forward
    whole = (
        _one("recompute:all", what=replace(BARE, repeats=part))[1][1]
        for part in (0.0, 0.5)
    )
    assert len({each.recompute for each in whole}) == 1


def test_what_software_keeps_of_a_token_follows_from_its_kernels() -> None:
    """Of one block of a gated model, by hand: 2 bytes for each number, 2,048 tokens, over tp2."""
    shape = replace(
        SHAPE,
        kv_heads=4,
        gated=True,
        positions="rope",
        norm="rms",
        bias="none",
    )
    cut = Layout.parse("tp2 seq bf16")
    kinds, case = (
        piece_kinds(shape, cut, shape.sequence),
        Case(shape, cut, 1.0, 2048),
    )

    def kept(what: SoftwareProfile, piece: int) -> tuple[float, float]:
        cost = (
            parts_of(kinds, case, hardware_of(cluster("h100x2")), what, cut)
            .values[piece]
            .cost
        )
        return cost.kept, cost.temporary

    plain = replace(BARE, loss="over")
    usual, _ = kept(plain, 1)
    # One kernel for gate and product keeps nothing between them; a value that is a view of the joint
    # product keeps queries and keys before they were rotated.
    assert (
        usual - kept(replace(plain, fused=True), 1)[0] == 2 * 2048 * 4096 / 2
    )
    assert (
        kept(replace(plain, joint=True), 1)[0] - usual
        == 2 * 2048 * (1024 + 256) / 2
    )
    # Logits of 2,048 tokens and 16,000 words: a softmax in float32 takes two bytes more than they do,
    # made beside both; plain torch has the gradient and its like beside the softmax.
    logits = 2048 * 32000 / 2
    held, there = kept(plain, 2)
    for loss, more, beside in (
        ("beside", 0, 2),
        ("wide-over", 2, 6),
        ("wide", 2, 8),
    ):
        found = kept(replace(plain, loss=loss), 2)
        assert (found[0] - held, found[1] - there) == (
            more * logits,
            beside * logits,
        )


def test_adding_gradients_is_a_kernel_of_its_own_or_part_of_a_product() -> (
    None
):
    """A block that moves 30 MB for a row of tokens beside the 10 bytes of each of 10 million weights."""
    cut = Layout.parse("tp2 bf16")
    embed, whole, head = piece_kinds(SHAPE, cut, SHAPE.sequence).values

    def block(rows: float) -> PieceCost:
        return replace(
            whole(rows), input_gradient=Load(moved=1e8 + 3e7 * rows)
        )

    kinds = PieceKinds.equal_blocks(
        embed, CostedPiece((block,)), head, SHAPE.layers
    )
    hardware, case = (
        hardware_of(cluster("h100x2")),
        Case(SHAPE, cut, 2.0, 2048),
    )

    def moved(what: SoftwareProfile) -> float:
        inputs = (
            parts_of(kinds, case, hardware, what, cut)[1]
            .under(what)
            .input_gradient
        )
        return (
            inputs.device
            * 0.85
            * hardware_of(cluster("h100x2")).rates.device.memory.bandwidth
        )

    plain = replace(BARE, loss="over")
    assert moved(plain) == pytest.approx(1e8 + 6e7)
    # What a compiler joins are operations on tokens.
    assert moved(replace(plain, fused=True)) == pytest.approx(1e8 + 3e7)
    assert moved(replace(plain, fused=True, adding=6.0)) == pytest.approx(
        6e7 + 3e7
    )
    assert moved(replace(plain, adding=0.0, traffic=2.0)) == pytest.approx(
        1.2e8
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_in_squares_with_one_scale_are_gathered_in_8_bits(
    zero: int,
) -> None:
    (wide, _), (narrow, _) = (
        _one(f"dp8 zero{zero} bf16 {word}") for word in ("fp8", "fp8:tile")
    )
    # By hand: attention's four matrices of 1024 x 1024, and three of 1024 x 4096, in one byte less.
    matrices = 4 * 1024 * 1024 + 3 * 1024 * 4096
    kind, count = ("weights", 8) if zero == 1 else ("gathered", 1)
    assert wide.memory[kind] - narrow.memory[kind] == pytest.approx(
        count * matrices
    )
    hardware, layout = (
        hardware_of(cluster("h100x8")),
        Layout.parse(f"dp8 zero{zero}"),
    )
    found = (
        Units(layout, hardware, BARE)
        .of(matrices + 2048, narrow=matrices)
        .gather
    )
    assert found == hardware.network.seconds(
        "all_gather", matrices + 2 * 2048, 8, 1
    )
    # Before it ranks agree on two norms and a number for each square of 128 x 128, all in 16 bits.
    costs = _priced(f"dp8 zero{zero} bf16 fp8:tile").costs().pieces
    size = 2 * (2048 + matrices / 128**2)
    assert costs[ops.AGREE_SCALES, 1] == hardware.network.seconds(
        "all_reduce", size, 8, 1
    )
    # The embedding is gathered in 16 bits.
    assert costs[ops.AGREE_SCALES, 0] == 0.0


@pytest.mark.parametrize(
    ("text", "apart"), [("dp4 tp2", 2), ("tp2 dp4", 1), ("dp4 pp2", 2)]
)
def test_copies_of_exact_without_zero_gather_from_their_neighbours(
    text: str, apart: int
) -> None:
    hardware = hardware_of(cluster("h100x8"))
    exact = " exact:2" if "tp" in text else " exact"
    found = Units(Layout.parse(text + exact), hardware, BARE).of(1e6)
    assert found.replicas == hardware.network.seconds(
        "all_gather", 1e6 * BARE.reduce_bytes, 4, apart
    )


def test_a_bucket_is_the_most_of_a_piece_that_is_gathered_or_sent_at_once() -> (
    None
):
    text, few = "dp8 zero3 bf16", 1e6
    whole, part = (
        _one(text, what=replace(BARE, bucket=n))[0].memory for n in (0.0, few)
    )
    # of the embedding, gathered and with its gradient
    largest = SHAPE.vocab * SHAPE.hidden
    assert whole["gathered"] > 2 * largest
    assert part["gathered"] <= 2 * 2 * few
    assert part["gradients"] <= 4 * SHAPE.total / 8 + 2 * 4 * few
    assert sum(part.values()) < sum(whole.values()) - 2 * largest
    assert part["optimizer"] == whole["optimizer"]


def test_gradients_with_a_buffer_of_their_own_are_there_when_activations_are_most() -> (
    None
):
    """The last rank of one microbatch has no gradient yet when its logits are there."""
    lazy, _ = _one("dp2 bf16", rows=4)
    flat, _ = _one("dp2 bf16", rows=4, what=replace(BARE, flat_gradients=True))
    weights = lazy.memory["weights"] / 2
    assert flat.memory["gradients"] == 4 * weights
    assert lazy.memory["gradients"] < 0.3 * flat.memory["gradients"]
    assert flat.bytes > lazy.bytes + 2 * weights


def test_a_profile_is_named_by_what_tables_call_it() -> None:
    assert profile_named("nanotron v0.5").name == "nanotron"
    assert profile_named("Megatron-LM 2021").name == "megatron-2021"
    assert profile_named("Megatron-LM zero-bubble fork").name == "zero-bubble"
    assert profile_named("something new").name == "default"


def test_an_unknown_profile_is_refused_with_the_nearest() -> None:
    with pytest.raises(MachineError, match="nanotron"):
        profile("nanotrn")
    assert all(each.source for each in profiles().values())


def test_graphs_beside_zero1_keep_a_shard_beside_the_whole_gradient() -> None:
    whole = _priced("dp2 zero1 compile bf16").sizes
    found = _priced("dp2 zero1 compile:graphs bf16").sizes
    assert found.gradient_shard == whole.gradient_shard != ()
    assert sum(found.gradient_home) == 2 * sum(found.gradient_shard)


@pytest.mark.parametrize(("rows", "slots"), [(3.0, 3), (8 / 3, 2 * 3)])
def test_graphs_of_microbatches_that_differ_by_a_row_have_two_shapes(
    rows: float, slots: int
) -> None:
    """Eight rows in three microbatches are 3, 3 and 2: a graph of up to three rows for
    each of two shapes. Nine rows are 3, 3 and 3."""
    text = "accum:3 compile:graphs bf16"
    one = _priced(text).sizes
    found = _priced(text, rows=rows).sizes
    assert one.slot[1] > 0
    assert found.slot[1] == pytest.approx(slots * one.slot[1])
    assert found.graph_temporary == pytest.approx(3 * one.graph_temporary)
