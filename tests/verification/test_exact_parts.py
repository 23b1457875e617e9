"""Layouts of tp have the bits of one process, if both compute products in equal parts."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from phalanx.comm import Group
from phalanx.cost import piece_costs
from phalanx.layout import Layout, LayoutError
from phalanx.layout.cases import SHAPES, covering, exact_layouts
from phalanx.layout.choices import BF16, FP32
from phalanx.parallel import Precision, build_model, refuse_unfit
from phalanx.parallel import parts as regions
from phalanx.parallel.data import Unit
from phalanx.verification.cases import trial_batch
from phalanx.verification.exact import verify_exact
from phalanx.verification.trial import Setting, join, program_in, train_layout
from phalanx.verification.verify import truth_of, worlds_over
from seeded.exact import INSTEAD
from seeded.narrow import TWENTIETH

# Sizes that 8 divides; gqa has fewer key heads than ranks.
SIZES = {
    name: replace(SHAPES[name], vocab=40, batch=24, layers=3)
    for name in ("gqa", "gpt", "qwen", "gemma")
}
WIDE = {
    name: replace(shape, heads=8, kv_heads=min(8, 2 * shape.kv_heads))
    for name, shape in SIZES.items()
}
FEW = [
    ("gqa", "tp4 exact:4", FP32),
    ("gpt", "dp2 tp2 zero3 seq exact:4", BF16),
]
# of each option a layout; norms of heads, soft caps and windows in the last
MORE = [
    ("gqa", "tp8 exact:8; tp4 seq exact:8; tp2 zero1 exact:8"),
    ("gpt", "tp8 seq exact:8; dp2 tp4 seq zero2 exact:4"),
    ("gpt", "pp2 tp2 seq zb-h1:2 exact:2; pp2 tp2 zb-v:4 zero1 exact:4"),
    ("qwen", "tp4 seq exact:4; tp2 recompute:selective seq exact:4"),
    ("gemma", "tp4 seq exact:4; tp2 accum:4 offload:weights exact:4"),
]
# Hybrids of delta layers and attention with a gate at its output.
DELTA = replace(SHAPES["delta"], vocab=40, batch=24)
GATED = replace(SIZES["gqa"], output_gate=True)
PARTS = 4  # of the list of layouts, a test each


def differences(
    shape: Any, text: str, *precisions: str, **terms: Any
) -> list[str]:
    layouts = Layout.parse_many(text)
    verdicts = verify_exact(shape, layouts, precisions=precisions, **terms)
    return [v.first_difference for v in verdicts if not v.passed]


@pytest.mark.parametrize(("model", "text", "precision"), FEW)
def test_layouts_of_tp_have_the_bits_of_one_process(
    model: str, text: str, precision: str
) -> None:
    assert not differences(SIZES[model], text, precision)


@pytest.mark.parametrize("text", ["dp2 zero3 exact", "tp2 seq exact:2"])
def test_delta_layers_have_the_bits_of_one_process(text: str) -> None:
    assert not differences(DELTA, text, FP32, steps=1)


@pytest.mark.slow
def test_more_layouts_of_delta_layers_have_the_bits_of_one_process() -> None:
    text = "pp2 zb-h1:2 exact; dp2 accum:2 exact; tp4 seq exact:4; tp2 exact:4"
    more = "dp2 tp2 seq zero3 exact:2"
    assert not differences(DELTA, f"{text}; {more}", FP32, BF16)


@pytest.mark.slow
def test_a_gate_of_attention_has_the_bits_of_one_process() -> None:
    text = "tp2 seq exact:4; dp2 pp2 1f1b:2 zero3 exact"
    assert not differences(GATED, text, FP32, BF16)


def test_a_frozen_block_has_the_bits_of_one_process() -> None:
    frozen = replace(SIZES["gqa"], layers=1, freeze=("layers.0",))
    text = "tp2 exact:4; cp2 tp2 exact:2x2"
    assert not differences(frozen, text, FP32, steps=1)


def test_a_frozen_block_has_the_forward_of_a_trained_one() -> None:
    shape, layout = SIZES["gqa"], Layout.parse("tp2 exact:4")
    frozen = replace(shape, freeze=("layers.0",))
    costs = [
        piece_costs(build_model(each), layout, 2) for each in (shape, frozen)
    ]
    trained, found = (each[1].forward.flops for each in costs)
    assert found == trained


@pytest.mark.slow
@pytest.mark.parametrize(("model", "text"), MORE)
def test_more_layouts_of_tp_have_the_bits_of_one_process(
    model: str, text: str
) -> None:
    # zb-v has two stages on each rank.
    shape = replace(WIDE[model], layers=4) if "zb-v" in text else WIDE[model]
    assert not differences(shape, text, FP32, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize("model", ["gqa", "gpt"])
def test_every_two_choices_have_the_bits_of_one_process(
    model: str, precision: str, part: int
) -> None:
    layouts = covering(exact_layouts(SIZES[model], 8, 4), 40)
    own = layouts[part::PARTS]
    verdicts = verify_exact(SIZES[model], own, precisions=[precision])
    assert not [v for v in verdicts if not v.passed]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(backend: str) -> None:
    text = "tp4 seq exact:4; dp2 tp2 zero1 exact:2"
    assert not differences(SIZES["gqa"], text, FP32, BF16, backend=backend)


@pytest.mark.slow
def test_sizes_of_several_blocks_of_a_product_have_them_too() -> None:
    sizes = {"hidden": 192, "heads": 8, "ffn": 520, "vocab": 1000}
    shape = replace(SIZES["gqa"], sequence=72, **sizes)
    text = "tp4 seq exact:4; tp8 exact:8"
    assert not differences(shape, text, FP32, BF16, packed=True)
    assert not differences(shape, "tp2 seq exact:4", FP32, dropout=0.1)


@pytest.mark.parametrize(
    "text", ["exact:4", "tp2 seq exact:4", "exact:1x4", "cp2 tp2 exact:2x2"]
)
@pytest.mark.parametrize("model", ["gqa", "gpt"])
def test_products_in_parts_have_the_gradients_of_plain_torch(
    model: str, text: str
) -> None:
    """Against one process in float64, by torch's own modules."""
    shape = replace(SIZES[model], batch=4)
    make = partial(build_model, shape)
    layout = Layout.parse(text)
    wide = Precision(*[torch.float64] * 3)
    terms = [
        Setting(partial(trial_batch, shape, dtype=p.compute), 1, precision=p)
        for p in (Precision(), wide)
    ]
    program = program_in(layout, make, terms[0])
    with worlds_over("threads")(layout.ranks) as run:
        seen = run(train_layout, layout, program, make, terms[0])
    found = join(seen, 1).steps[0]
    known = truth_of(make, terms[1]).trace.steps[0]
    assert found.logged == pytest.approx(known.logged, rel=1e-6)
    for name, gradient in known.gradients.items():
        apart = (found.gradients[name] - gradient).abs().max()
        # A bias of keys has no gradient at all: softmax does not see it.
        assert apart < 1e-5 * gradient.abs().max() + 1e-10


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (replace(SIZES["gqa"], heads=6), "exact:4 does not divide heads=6"),
        (SHAPES["mlp"], "exact:4 does not cover .* in .* yet"),
    ],
)
def test_models_without_equal_parts_are_refused(shape: Any, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        refuse_unfit(build_model(shape), Layout.parse("exact:4"))


# ---- differences of bits


def test_another_order_over_the_parts_of_a_rank_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_order(terms: Any) -> torch.Tensor:
        first, *others = terms
        return sum(others, first)

    monkeypatch.setattr(regions, "add_in_tree", in_order)
    (found,) = differences(SIZES["gqa"], "tp2 exact:4", FP32)
    assert found.startswith("step 0: the output of layers.0 for microbatch 0")


def test_another_order_over_ranks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Group, "_adds_in_tree", lambda self, op: False)
    (found,) = differences(SIZES["gqa"], "tp4 exact:4", FP32)
    assert found.startswith("step 0: the output of layers.0 for microbatch 0")


def test_a_mistake_below_the_bounds_of_bfloat16_is_found_in_float32() -> None:
    with INSTEAD[TWENTIETH]():
        (found,) = differences(SIZES["gqa"], "exact:2", BF16)
    assert found.startswith("in float32 one process differs from plain torch")
    assert "the gradient of layers.2.attn.wq.weight" in found


def test_a_weight_gradient_of_another_part_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Unit.contribute_part

    def first(self: Unit, name: str, a: Any, b: Any, place: Any) -> None:
        if name.endswith("layers.1.mlp.up.weight"):
            size = place[0].stop - place[0].start
            place = (slice(0, size),)
        plain(self, name, a, b, place)

    monkeypatch.setattr(Unit, "contribute_part", first)
    (found,) = differences(SIZES["gqa"], "tp4 exact:4", BF16)
    assert "the gradient of layers.1.mlp.up.weight from microbatch 0" in found
