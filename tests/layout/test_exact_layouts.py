"""Legality of layouts of `exact`."""

import pytest

from phalanx.layout import Layout
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


def test_experts_are_refused() -> None:
    name = next(n for n, shape in SHAPES.items() if shape.experts)
    found = legal(Layout.parse("dp2 exact"), SHAPES[name], batch=4)
    assert any("exact does not cover experts yet" in v.what for v in found)


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
