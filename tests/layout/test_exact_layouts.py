"""Legality of layouts of `exact`."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx.layout import Layout, LayoutError, piece_layout
from phalanx.layout.cases import SHAPES, exact_layouts
from phalanx.layout.legal import legal


@pytest.mark.parametrize(
    ("text", "batch", "what", "way_out"),
    [
        ("dp2 accum:3 exact", 12, "no subtree of the 6", "2 or 4; or dp1"),
        ("dp2 accum:2 exact", 6, "a batch of 6 is no multiple", "4 or 8"),
        ("accum:3 exact", 12, "", ""),
        ("dp3 accum:2 exact", 12, "", ""),
        ("dp2 accum:2", 6, "", ""),
    ],
)
def test_counts_that_are_no_subtrees_are_refused_with_those_that_are(
    text: str, batch: int, what: str, way_out: str
) -> None:
    found = legal(Layout.parse(text), SHAPES["gqa"], batch=batch)
    assert bool(found) == bool(what)
    for violation in found:
        assert what in violation.what
        assert way_out in violation.way_out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp2 exact", "exact with tp2: .* Write exact:2, or exact:4"),
        ("tp4 exact:2", "exact:2 with tp4: .* Write exact:4, or exact:8"),
        ("exact:3", "exact:3: .* exact:2 or exact:4"),
        ("tp3 exact:4", "exact does not cover tp3: .* Use tp2, tp4 or tp8"),
        ("exact:0", "'exact:0': write 1 part or more"),
        ("exact:2048", "exact:2048: write 1 to 1024 parts"),
        ("exact:1x2048", "exact:1x2048: write 1 to 1024 parts"),
        ("exact:6x4", "exact:6x4: .* exact:4x4 or exact:8x4"),
        ("ep2 dp2 exact", "exact with ep before dp: .* Write dp before ep"),
        ("dp2 ep3 exact", "does not cover dp2 with ep3: .* power of two"),
        ("tp2 seq experts:tp exact:2", "does not cover experts:tp yet"),
        ("dp2 compile:max exact", "compile:max: its tuning .* Use compile"),
        ("dp2 compile:graphs exact", "compile:graphs yet: .* Use compile"),
        ("tp2 compile exact:2", "exact:2 does not cover compile yet"),
        ("exact:1x2 compile", "exact:1x2 does not cover compile yet"),
        ("dp2 compile recompute:all exact", "compile with recompute:all"),
    ],
)
def test_parts_that_ranks_cannot_share_are_refused(
    text: str, why: str
) -> None:
    with pytest.raises(LayoutError, match=why):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("sizes", "what", "way_out"),
    [
        ({}, "exact:4 does not divide vocab=37", "vocab=40"),
        ({"vocab": 40, "ffn": 22}, "divide ffn=22", "exact:2; or ffn=24"),
        ({"vocab": 40, "heads": 6}, "divide heads=6", "exact:2; or heads=8"),
        ({"vocab": 40, "qk_norm": True, "qk_norm_wide": True}, "wide", "tp"),
        ({"vocab": 40, "lora_r": 4}, "LoRA", "Use exact, without tp"),
        (
            {"vocab": 40, "heads": 12, "kv_heads": 6, "hidden": 96},
            "divide kv_heads=6",
            "exact:2; or kv_heads=8",
        ),
        ({"vocab": 40}, "", ""),
    ],
)
def test_sizes_without_equal_parts_are_refused(
    sizes: dict[str, Any], what: str, way_out: str
) -> None:
    shape = replace(SHAPES["gqa"], **sizes)
    found = legal(Layout.parse("exact:4"), shape, batch=4)
    assert bool(found) == bool(what)
    for violation in found:
        assert what in violation.what
        assert way_out in violation.way_out


def test_the_number_of_parts_is_a_part_of_the_layout() -> None:
    layout = Layout.parse("tp2 exact:4")
    assert layout.exact == 4
    assert str(layout) == "tp2 exact:4"
    assert str(Layout.parse("exact:1")) == "exact"
    assert piece_layout(layout) == Layout.parse("tp2 exact:4")
    assert piece_layout(Layout.parse("dp2 exact")) == Layout()


def test_the_layouts_with_parts_to_compare_have_tp_and_seq() -> None:
    shape = replace(SHAPES["gqa"], vocab=40)
    layouts = exact_layouts(shape, 4, 4)
    assert {layout.exact for layout in layouts} == {4}
    assert {layout.tp for layout in layouts} == {2, 4}
    assert {layout.seq for layout in layouts} == {False, True}
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("text", "sizes", "what"),
    [
        ("dp2 ep2 exact", {}, ""),
        ("tp2 exact:2", {"vocab": 40}, ""),
        ("exact:4", {"vocab": 40, "expert_ffn": 10}, "divide expert_ffn=10"),
        ("cp2 ep2 exact:1x2", {}, ""),
        ("dp2 exact", {"batch_loss": 0.1}, "batch_loss counts the choices"),
        ("exact", {"batch_loss": 0.1}, ""),
    ],
)
def test_experts_in_parts_and_losses_of_a_batch_are_refused(
    text: str, sizes: dict[str, Any], what: str
) -> None:
    shape = replace(SHAPES["experts"], **sizes)
    found = legal(Layout.parse(text), shape, batch=8)
    assert bool(found) == bool(what)
    assert all(what in violation.what for violation in found[:1])


def test_a_layout_of_exact_sums_once_a_step_and_prints_its_word() -> None:
    layout = Layout.parse("dp2 zero3 accum:2 bf16 exact")
    assert layout.reduce == "step"
    assert str(layout) == "dp2 zero3 accum:2 bf16 exact"


def test_the_layouts_to_compare_have_every_option() -> None:
    layouts = exact_layouts(SHAPES["gqa"], 4)
    assert all(layout.exact for layout in layouts)
    assert {layout.zero for layout in layouts} == {0, 1, 2, 3}
    assert {"zb-v", "dualpipe-v", "searched", "naive"} <= {
        layout.schedule for layout in layouts
    }
