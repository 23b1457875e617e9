"""Every block is priced as what it is: its window, an MLP or experts, trained or frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from phalanx.api.plan_text import utilization
from phalanx.api.request import request_for
from phalanx.layout import (
    Layout,
    Shape,
    legal,
    one_block_of_each,
    piece_layout,
    staged_pieces,
)
from phalanx.layout.choices import BF16, FP16
from phalanx.layout.families import shape_of
from phalanx.planner import devices
from phalanx.planner.hardware import hardware_of
from phalanx.planner.link import cluster
from phalanx.planner.profile import profile, profiles
from phalanx.planner.search import Screened, judge, search
from phalanx.planner.space import Space
from phalanx.planner.step import Choice, Pricer, Request
from sampled import one_in

SMALL = Shape.of({
    "layers": 8, "hidden": 1024, "heads": 16, "vocab": 4000, "ffn": 6144, "sequence": 4096,
})  # fmt: skip
EXPERTS = replace(SMALL, experts=4, top_k=2, expert_ffn=2048)
# Each with several kinds of blocks.
MIXED = {
    "windows": replace(SMALL, windows=(256, 0, 0)),
    "dense first": replace(EXPERTS, dense_layers=3),
    "windows and experts": replace(EXPERTS, dense_layers=3, windows=(256, 0)),
    "frozen": replace(SMALL, freeze=("embed", "layers.1-3")),
}


def _asked(
    shape: Shape, name: str = "h100x4", batch: int = 16, sequence: int = 0
) -> Request:
    return request_for(
        shape, hardware_of(cluster(name)), batch=batch, sequence=sequence
    )


def _judged(
    shape: Shape, text: str, name: str = "h100x4", batch: int = 16
) -> Choice:
    (found,) = judge(
        _asked(shape, name, batch), [Layout.parse(f"{text} bf16")]
    )
    return found


ONE_STAGE = (
    "dp4 accum:4", "dp4 zero1 accum:4", "dp4 zero3 accum:2 recompute:all", "tp2 dp2 zero1",
    "tp4 seq recompute:selective", "cp4:2x2",
)  # fmt: skip


@pytest.mark.parametrize("text", ONE_STAGE)
def test_the_order_of_windows_changes_no_price(text: str) -> None:
    orders = ((256, 0, 0, 0), (0, 0, 256, 0), (0, 0, 0, 256))
    found = [_judged(replace(SMALL, windows=each), text) for each in orders]
    assert len({each.layout for each in found}) == 1
    # A gather that no computation hides may stand beside another block: far less than times are right to.
    for each in found[1:]:
        assert each.step == pytest.approx(
            found[0].step, rel=1e-9 if "zero3" not in text else 1e-3
        )
        assert each.memory == pytest.approx(found[0].memory)


@pytest.mark.parametrize(
    "text", [*ONE_STAGE, "pp4 1f1b:8", "pp2 dp2 zero1 interleaved2:4"]
)
def test_equal_blocks_cost_the_same_however_their_window_is_written(
    text: str,
) -> None:
    plain = _judged(SMALL, text)
    for windows in ((0,), (0, 0), (0,) * 8):
        found = _judged(replace(SMALL, windows=windows), text)
        assert (found.step, found.parts, found.memory) == (
            plain.step,
            plain.parts,
            plain.memory,
        )
    narrow = _judged(replace(SMALL, windows=(256,)), text)
    again = _judged(replace(SMALL, windows=(256, 256)), text)
    assert (again.step, again.memory) == (narrow.step, narrow.memory)
    assert narrow.step < plain.step


def _steps(shape: Shape, sequence: int) -> list[float]:
    """Seconds where all blocks have a window, every second block, every other second block, and none."""
    text, windows = (
        Layout.parse("dp8 zero3 recompute:all bf16"),
        ((128,), (128, 0), (0, 128), (0,)),
    )
    return [
        judge(
            _asked(replace(shape, windows=each), "h100x8", 8, sequence), [text]
        )[0].step
        for each in windows
    ]


def test_half_of_the_windows_take_the_time_halfway_between_none_and_all() -> (
    None
):
    every, half, swapped, none = _steps(replace(EXPERTS, sinks=True), 16384)
    assert none > 1.5 * every
    assert half == pytest.approx((every + none) / 2, rel=1e-3)
    assert swapped == pytest.approx(half, rel=1e-3)


@pytest.mark.slow
def test_gpt_oss_at_65536_tokens_is_priced_by_both_kinds_of_its_blocks() -> (
    None
):
    every, half, swapped, none = _steps(Shape.load("gpt-oss-20b"), 65536)
    assert (round(every, 1), round(none, 1)) == (6.1, 18.6)
    assert half == pytest.approx(12.4, abs=0.1)
    assert swapped == pytest.approx(half, rel=1e-3)


# The shapes of Gemma 2 9B and Gemma 3 12B by their configurations, with fewer and narrower blocks: one
# block without a window of two, and of six; and tokens of a sequence, as many as tell windows apart.
GEMMAS: dict[str, tuple[dict[str, object], int, int]] = {
    "gemma2": ({
        "num_hidden_layers": 4, "sliding_window": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
    }, 2, 8192),
    "gemma3_text": ({
        "num_hidden_layers": 12, "sliding_window": 256, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    }, 6, 16384),
}  # fmt: skip
_GEMMA = {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 1000, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


@pytest.mark.parametrize("kind", GEMMAS)
def test_every_block_of_gemma_is_priced_by_its_own_window(kind: str) -> None:
    """By hand: with a part of the blocks without a window, that part of what all of them take longer."""
    config, every, sequence = GEMMAS[kind]
    shape = shape_of(_GEMMA | config | {"model_type": kind}, kind)
    windows = [shape.window(piece) for piece in range(1, 1 + shape.layers)]
    assert windows.count(0) == shape.layers // every
    text = Layout.parse("dp8 zero3 recompute:all bf16")

    def step(each: tuple[int, ...]) -> float:
        asked = _asked(replace(shape, windows=each), "h100x8", 8, sequence)
        return judge(asked, [text])[0].step

    narrow, own, full = step((256,)), step(shape.windows), step((0,))
    assert full > 1.2 * narrow
    assert own - narrow == pytest.approx((full - narrow) / every, rel=0.01)
    assert step(shape.windows[::-1]) == pytest.approx(own, rel=1e-3)


def test_a_stage_takes_the_time_and_the_bytes_of_the_blocks_that_it_holds() -> (
    None
):
    """Two blocks with long attention beside two with short: one stage of each kind, or both in each."""
    long = replace(SMALL, layers=4, sequence=16384)
    apart = Pricer(_asked(replace(long, windows=(256, 256, 0, 0)), batch=8))
    mixed = Pricer(_asked(replace(long, windows=(256, 0, 256, 0)), batch=8))
    layout = Layout.parse("pp2 dp2 1f1b:4 stages:2-2 bf16")
    short, full = apart.times(piece_layout(layout), 1.0, True).blocks
    one = sum(t.forward.total + t.backward for t in (full, full))
    less = sum(t.forward.total + t.backward for t in (short, full))
    # The slower stage computes all four microbatches one after the other, of which the first or the last
    # may stand beside the other stage.
    slower = apart.choose(layout).step - mixed.choose(layout).step
    assert 2.99 * (one - less) < slower < 5 * (one - less)


@pytest.mark.parametrize(
    "text",
    [
        "pp2 dp2 1f1b:4 stages:3-5",
        "pp4 1f1b:4 stages:2-2-2-2",
        "pp4 ep2 1f1b:4",
    ],
)
def test_each_stage_holds_the_weights_of_its_own_blocks(text: str) -> None:
    shape = MIXED["dense first"]
    ranks = 8 if "ep" in text else 4
    found = _judged(shape, text, f"h100x{ranks}")
    pieces, two = (
        staged_pieces(found.layout, shape),
        profile("phalanx").weight_bytes,
    )
    ep = found.layout.ep
    numbers = [
        row.numel - row.routed_numel + row.routed_numel / ep
        for row in pieces.rows
    ]
    wanted = [
        two * sum(numbers[piece] for piece in stage) for stage in pieces.stages
    ]
    assert [stage["weights"] for stage in found.stages] == pytest.approx(
        wanted
    )
    assert len({round(each) for each in wanted}) > 1


# The totals that are published, in units of their last digit.
PUBLISHED = {
    # Radford et al. 2019: the weights of gpt2 on the hub.
    "124m": (
        124_439_808,
        1,
    ),
    "1b": (1_235_814_400, 1),  # the weights of Llama-3.2-1B on the hub
    "8b": (8_030_261_248, 1),  # of Meta-Llama-3-8B
    "70b": (70_553_706_496, 1),  # of Meta-Llama-3-70B
    "405b": (405_853_388_800, 1),  # of Llama-3.1-405B
    "1t-gpt": (1008.0e9, 0.1e9),  # Narayanan et al. 2021, table 1
    "8x7b": (46_702_792_704, 1),  # the weights of Mixtral-8x7B-v0.1 on the hub
    "30b-a3b": (30_532_122_624, 1),  # of Qwen3-30B-A3B
    # OpenAI 2025, the model card of gpt-oss, table 1.
    "gpt-oss-20b": (
        20.91e9,
        0.01e9,
    ),
    "gpt-oss-120b": (116.83e9, 0.01e9),
    # DeepSeek-AI 2024, the technical report: without its MTP module.
    "deepseek-v3": (
        671.0e9,
        0.1e9,
    ),
    # Our own, by hand: the sums of their weights.
    "25m": (
        8 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 2 * 256 * 512 + 512,
        1,
    ),
    "tiny": (
        4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
        + 2 * 256 * 64
        + 64,
        1,
    ),
    "mlp": (4 * 1024 * 1024, 1),
}


@pytest.mark.parametrize("name", Shape.names())
def test_the_weights_that_are_priced_are_those_that_are_published(
    name: str,
) -> None:
    shape = Shape.load(name)
    total, digit = PUBLISHED[name]
    for text in ("", "dp2 ep2") if shape.experts else ("",):
        layout = Layout.parse(f"{text} bf16")
        priced = Pricer(_asked(shape)).priced(layout)
        rows = staged_pieces(layout, shape).rows
        # A rank has its part of the experts.
        held = [
            piece.times.cost.weights - piece.times.cost.routed
            for piece in priced.pieces
        ]
        routed = [
            piece.times.cost.routed * layout.ep for piece in priced.pieces
        ]
        assert [a + b for a, b in zip(held, routed, strict=True)] == [
            row.numel for row in rows
        ]
        assert abs(sum(held) + sum(routed) - total) <= digit / 2 + 0.5


@pytest.mark.parametrize("name", Shape.names())
def test_one_block_of_each_kind_stands_for_all(name: str) -> None:
    shape = Shape.load(name)
    few, like = one_block_of_each(shape)
    whole, part = (staged_pieces(Layout(), each).rows for each in (shape, few))
    assert len(part) == 2 + (
        2 if name in ("gpt-oss-20b", "gpt-oss-120b", "deepseek-v3") else 1
    )
    for row, number in zip(whole, like, strict=True):
        assert row.weights == part[number].weights
        assert shape.window(row.piece) == few.window(number)
        assert shape.routes(row.piece) == few.routes(number)


def test_frozen_blocks_compute_no_gradients_of_weights_and_hold_none() -> None:
    every = _judged(SMALL, "dp4 zero1")
    some = _judged(replace(SMALL, freeze=("layers.0-3",)), "dp4 zero1")
    all_ = _judged(replace(SMALL, freeze=("layers",)), "dp4 zero1")
    assert some.parts["compute"] == pytest.approx(
        (every.parts["compute"] + all_.parts["compute"]) / 2, rel=1e-6
    )
    held = [each.memory["optimizer"] for each in (every, some, all_)]
    assert held[1] == pytest.approx((held[0] + held[2]) / 2)
    assert held[2] < held[1] < held[0]


BOUNDED = MIXED | {"experts": EXPERTS, "adapters": replace(SMALL, lora_r=8)}


@pytest.mark.parametrize("software", ["phalanx", "megatron-core"])
@pytest.mark.parametrize("name", one_in(2, BOUNDED))
def test_bounds_hold_for_blocks_of_several_kinds(
    name: str, software: str
) -> None:
    """Software that keeps rotated queries does so in blocks whose experts are apart, too."""
    asked = replace(_asked(BOUNDED[name]), profile=profile(software))
    pricer = Pricer(asked)
    screened = Screened(Space(asked), pricer)
    near = 0.0
    sample = range(0, len(screened), max(1, len(screened) // 20))
    for i in sample:
        layout = screened.layout(i)
        assert not legal(layout, asked.shape, batch=asked.batch)
        found = pricer.choose(layout)
        screened.costs(i)
        assert screened.follow(i) <= found.step * (1 + 1e-9), layout
        assert screened.bytes[i] <= found.bytes * (1 + 1e-9), layout
        near += screened.step[i] / found.step
    # A bound that says nothing screens nothing.
    assert near / len(sample) > 0.8


def test_screening_never_loses_the_best_layout_of_a_mixed_model() -> None:
    shape = replace(MIXED["windows and experts"], layers=4, dense_layers=1)
    asked = replace(_asked(shape, "h100x2", batch=4), limit=0.05)
    space = Space(asked)
    screened = Screened(space, Pricer(asked))
    steps = []
    for i in _every(screened):
        found = screened.pricer.choose(screened.layout(i), asked.room)
        if found.parts:
            steps.append(found.step)
    # One that could be faster by no more than 0.2 % is not looked at.
    assert search(asked, top=1).fastest.step <= min(steps) / 0.998


def _every(screened: Screened) -> Iterable[int]:
    return range(0, len(screened), max(1, len(screened) // 400))


# 3 has no factor in common with two sequences.
@pytest.mark.parametrize(
    "case",
    one_in(
        3, product([n for n in Shape.names() if n != "mlp"], (2048, 65536))
    ),
)
def test_no_prediction_exceeds_the_peak_of_a_device(
    case: tuple[str, int],
) -> None:
    """Sizes of models on every device, and on one under every profile."""
    name, sequence = case
    shape = Shape.load(name)
    asked = [_asked(shape, f"{each}x2", 2, sequence) for each in devices()]
    asked += [
        replace(asked[0], profile=profile(other)) for other in profiles()
    ]
    for request in asked:
        precision = BF16 if request.hardware.peak.get(BF16) else FP16
        layout = Layout.parse(f"dp2 zero1 {precision}")
        (found,) = judge(replace(request, precision=precision), [layout])
        used = utilization(request, found)
        assert 0 < used.mfu <= used.hfu <= 1, (
            request.hardware.name,
            request.profile.name,
        )
