"""Layouts of cp have the bits of one process, if both compute equal parts of time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from exact_list import CHOICES, covering_list, layout_of, piece_of_list
from phalanx.layout import Layout, LayoutError, Shape
from phalanx.layout.cases import SHAPES
from phalanx.layout.choices import BF16, FP16, FP32
from phalanx.layout.exact import folded
from phalanx.layout.legal import legal
from phalanx.parallel import build_model, context, refuse_unfit
from phalanx.parallel import exact as units
from phalanx.parallel.exact import ExactUnit
from phalanx.verification.exact import verify_exact

# Sizes that 8 divides; as many key heads as query heads, which Ulysses can share.
SIZES = {
    name: replace(
        SHAPES[name], vocab=40, heads=8, kv_heads=8, layers=4, batch=24
    )
    for name in ("gqa", "gpt")
} | {
    "experts": replace(
        SHAPES["experts"],
        vocab=40,
        heads=8,
        kv_heads=8,
        ffn=24,
        expert_ffn=16,
        batch=24,
    )
}


def differences(
    shape: Any, text: str, *precisions: str, **terms: Any
) -> list[str]:
    layouts = Layout.parse_many(text)
    verdicts = verify_exact(shape, layouts, precisions=precisions, **terms)
    return [v.first_difference for v in verdicts if not v.passed]


@pytest.mark.parametrize(
    ("model", "text", "precision"),
    [
        ("gqa", "dp2 cp2 zero3 accum:2 exact:1x2", FP32),
        ("gpt", "cp2:ulysses exact:1x4", BF16),
    ],
)
def test_layouts_of_cp_have_the_bits_of_one_process(
    model: str, text: str, precision: str
) -> None:
    assert not differences(SHAPES[model], text, precision)


SMALL = Shape(
    "small", layers=1, hidden=16, heads=4, ffn=32, vocab=32, sequence=16
)
LATENT = {"kv_latent": 8, "rope_dim": 4, "value_dim": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"kv_heads": 2}, "cp2 exact:4x4; cp2 exact:4x2"),
        ({"kv_heads": 4, **LATENT}, "cp2 exact:2x2; tp2 cp2 seq exact:2x2"),
    ],
)
def test_parts_of_products_that_share_a_weight_have_them_too(
    sizes: dict[str, int], text: str
) -> None:
    """Two parts of the heads have one key head, or one latent vector."""
    shape = replace(SMALL, **sizes)
    assert not differences(shape, text, FP32, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gemma", "cp4 zero1 exact:1x4; cp2 tp2 seq exact:2x2"),
        ("qwen", "dp2 cp2 pp2 zb-v:2 exact:1x4; cp2:ulysses zero2 exact:1x2"),
        ("gqa", "dp2x2 cp2 zero3 exact:1x2; cp8 recompute:all exact:1x8"),
    ],
)
def test_more_layouts_of_cp_have_them_too(model: str, text: str) -> None:
    shape = replace(SHAPES[model], vocab=40)
    assert not differences(shape, text, FP32, BF16)
    packed = text.partition(";")[0]
    assert not differences(shape, packed, FP32, packed=True)
    assert not differences(shape, packed, FP32, dropout=0.1)


@pytest.mark.slow
def test_float16_with_a_loss_scale_has_them_too() -> None:
    assert not differences(SHAPES["gqa"], "dp2 cp2 zero1 exact:1x2", FP16)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(backend: str) -> None:
    text = "dp2 cp2 zero3 exact:1x2; cp2:ulysses exact:1x2"
    shape = SHAPES["gqa"]
    assert not differences(shape, text, FP32, BF16, backend=backend)


PARTS = 12  # of the list of layouts, a test each


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize("model", SIZES)
def test_every_two_techniques_have_the_bits_of_one_process(
    model: str, precision: str, part: int
) -> None:
    own = piece_of_list(SIZES[model], part, PARTS)
    verdicts = verify_exact(SIZES[model], own, precisions=[precision], steps=2)
    assert not [v for v in verdicts if not v.passed]


def test_the_list_has_every_technique_on_up_to_16_ranks() -> None:
    for choice in CHOICES:
        shape = SIZES["experts" if choice[0] == "ep" else "gqa"]
        assert layout_of((choice,), shape) is not None
    layouts = covering_list(SIZES["gqa"])
    assert len(layouts) >= 60
    assert max(layout.ranks for layout in layouts) == 16
    pieces = [piece_of_list(SIZES["gqa"], n, PARTS) for n in range(PARTS)]
    assert {x for each in pieces for x in each} == set(layouts)


# ---- layouts


def test_ranks_have_early_and_late_parts() -> None:
    assert folded(1) == [0]
    assert folded(2) == [0, 1]
    assert folded(8) == [0, 7, 1, 6, 2, 5, 3, 4]


def test_parts_of_the_sequence_are_written_behind_those_of_products() -> None:
    layout = Layout.parse("cp2 tp2 exact:2x4")
    assert (layout.exact, layout.time_parts) == (2, 4)
    assert str(layout) == "cp2 tp2 exact:2x4"
    assert str(Layout.parse("exact:1x1")) == "exact"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cp2 exact", "exact with cp2: .* Write exact:1x2, or exact:1x4"),
        ("cp4 exact:2x2", "exact:2x2 with cp4: .* exact:2x4, or exact:2x8"),
        ("cp3 exact:1x4", "exact does not cover cp3: .* cp2, cp4 or cp8"),
        ("exact:1x6", "exact:1x6: .* exact:1x4 or exact:1x8"),
        ("cp2 dp2 exact:1x2", "exact with cp before dp"),
        ("exact:1x0", "write 1 part or more"),
    ],
)
def test_parts_that_ranks_cannot_share_are_refused(
    text: str, why: str
) -> None:
    with pytest.raises(LayoutError, match=why):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "sizes", "what"),
    [
        ("cp2:ulysses exact:1x2", {}, ""),
        ("cp4:ulysses exact:1x4", {}, "ulysses=4 does not divide the 2 key"),
        ("cp2 exact:1x2", {"experts": 4, "top_k": 2}, ""),
        ("cp2 exact:1x2", {"lora_r": 2}, "does not cover LoRA yet"),
        ("cp2 exact:1x2", {"sinks": True}, "does not cover sinks yet"),
    ],
)
def test_models_that_cannot_run_in_parts_are_refused(
    text: str, sizes: dict[str, Any], what: str
) -> None:
    shape = replace(SHAPES["gqa"], **sizes)
    found = legal(Layout.parse(text), shape, batch=8)
    assert bool(found) == bool(what)
    assert all(what in violation.what for violation in found)
    if what:
        with pytest.raises(LayoutError, match="exact"):
            refuse_unfit(build_model(shape), Layout.parse(text))


# ---- differences of bits


def test_another_order_over_parts_of_time_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ExactUnit, "_times_summed", _last_part_first(ExactUnit._times_summed)
    )
    found = differences(SHAPES["gqa"], "cp2 exact:1x4", FP32)
    assert "the sum of the gradient of " in found[0]


def _last_part_first(right: Any) -> Any:
    def summed(self: ExactUnit, every: Tensor) -> None:
        parts = every.view(self.times, self.numel)
        parts.copy_(parts.roll(1, 0))
        right(self, every)

    return summed


def test_a_gradient_in_the_slot_of_another_part_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ExactUnit.contribute_to_slot

    def first(self: Any, name: str, a: Any, b: Any, slot: int, x: Any) -> None:
        right(self, name, a, b, 0, x)

    monkeypatch.setattr(ExactUnit, "contribute_to_slot", first)
    (found,) = differences(SHAPES["gqa"], "cp2 exact:1x4", BF16)
    assert "the gradient of head.output.weight from microbatch 0" in found


def test_keys_in_another_order_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "folded", lambda parts: list(range(parts)))
    (found,) = differences(SHAPES["gqa"], "cp2 exact:1x4", FP32)
    assert found.startswith("one process differs from plain torch: ")


def test_sums_over_copies_of_one_time_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ExactUnit._over_copies

    def in_order_of_ranks(self: ExactUnit, parts: Tensor) -> Tensor:
        self.over_time = tuple(range(len(self.over_time)))
        return right(self, parts)

    monkeypatch.setattr(ExactUnit, "_over_copies", in_order_of_ranks)
    (found,) = differences(SHAPES["gqa"], "dp2 cp2 exact:1x2", FP32)
    assert "the sum of the gradient of " in found


def test_merges_are_those_of_the_tree() -> None:
    """The sum over copies against additions written by hand."""
    unit: Any = ExactUnit.__new__(ExactUnit)
    # two sequences of dp, of which each has two ranks of cp with two parts
    unit.over_time = (0, 1, 0, 1)
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(4, 2, 3, generator=draw) * torch.tensor([1e4, 1.0, 1e-4])
    early = a[0] + a[2]
    late = a[1] + a[3]
    by_hand = (early[0] + early[1]) + (late[0] + late[1])
    assert torch.equal(units.ExactUnit._over_copies(unit, a.clone()), by_hand)
