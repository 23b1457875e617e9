"""Why a layout does not fit a model, and the nearest that do."""

import re
from dataclasses import replace

import pytest

from phalanx.layout import (
    Layout,
    LayoutError,
    Mesh,
    Shape,
    legal,
    nearest,
    stage_pieces,
)
from phalanx.layout.cases import SHAPES

# 4 layers, 4 heads, 2 kv heads, ffn 128, sequence 64, batch 16
TINY = Shape.load("tiny")


def _broken(text: str, shape: Shape = TINY, **more: int) -> set[str]:
    return {v.rule for v in legal(Layout.parse(text), shape, **more)}


@pytest.mark.parametrize(
    "text, rules",
    [
        ("dp2 pp2 tp2 seq zero3", set()),
        ("tp4", set()),
        ("tp3", {"heads", "ffn"}),
        ("tp8", {"heads"}),
        ("tp1 seq", {"seq"}),
        ("pp8", {"stages"}),
        ("pp2 interleaved3:4", {"stages"}),
        ("pp2 stages:1-2", {"stages"}),
        ("pp2 stages:0-4", set()),
        ("pp4 stages:2-0-1-1", {"stages"}),
        ("pp2 accum:4", {"schedule"}),
        ("dp2 1f1b:4", {"schedule"}),
        ("pp2 naive:4", {"schedule"}),
        ("cp64", {"sequence"}),
        ("cp8:ulysses", {"ulysses"}),
        ("cp4:ulysses tp2", {"ulysses"}),
        ("cp2:ulysses tp2", set()),
        ("dp32", {"batch"}),
        ("dp4 pp2 1f1b:8", {"batch"}),
        ("dp2x2", {"hsdp"}),
        ("dp2x2 zero1", set()),
        ("dp2 zero1 gather:micro", {"gather"}),
        ("dp2 zero3 gather:micro", set()),
        ("ep2", {"ep"}),
        ("dp32 tp3 pp8 cp64 seq gather:micro", {"heads", "ffn", "stages", "sequence", "batch", "gather"}),
    ],
)  # fmt: skip
def test_a_layout_breaks_exactly_these_rules(
    text: str, rules: set[str]
) -> None:
    assert _broken(text) == rules


def test_only_widths_of_mlps_that_a_block_has_are_rules() -> None:
    # No block has an MLP of width 100, which tp=3 would not divide.
    routed = Shape(
        "x", 2, 96, heads=12, vocab=8, ffn=100, experts=4, expert_ffn=96
    )
    assert _broken("tp3", routed) == set()
    assert _broken("tp3", replace(routed, dense_layers=1)) == {"ffn"}
    assert _broken("tp3", replace(routed, expert_ffn=100)) == {"experts"}
    # The sizes of `exact` are the same ones.
    assert _broken("tp2 exact:4", replace(routed, ffn=102)) == set()


def test_an_mlp_has_no_heads_and_no_sequence_to_cut() -> None:
    mlp = Shape.load("mlp")
    assert _broken("dp2 tp2 pp2", mlp) == set()
    assert _broken("cp2 tp3 seq", mlp) == {"cp", "width", "seq"}


def test_kv_heads_either_divide_or_are_repeated() -> None:
    shape = Shape.parse(
        "layers=2\nhidden=96\nheads=12\nkv_heads=6\nvocab=8\nffn=96", "x"
    )
    legal_tp = {
        tp for tp in range(1, 13) if not legal(Layout.parse(f"tp{tp}"), shape)
    }
    by_hand = {
        tp
        for tp in range(1, 13)
        if 12 % tp == 0 and (6 % tp == 0 or tp % 6 == 0)
    }
    assert legal_tp == by_hand == {1, 2, 3, 6, 12}
    (found,) = legal(Layout.parse("tp4"), shape)
    assert "tp=4 does not divide kv=6" in found.what
    assert "1, 2, 3, 6" in found.way_out


def test_batch_and_sequence_may_be_other_than_the_shape_says() -> None:
    assert _broken("dp32", batch=32) == set()
    assert _broken("cp64", sequence=128) == set()
    assert _broken("dp4", batch=2) == {"batch"}


def _every_small_layout() -> list[Layout]:
    words = [
        f"dp{dp} pp{pp} cp{cp} tp{tp} {choice}"
        for dp in (1, 2, 3) for pp in (1, 2, 8) for cp in (1, 2) for tp in (1, 3, 4)
        for choice in ("", "seq", "zero3", "naive:4", "interleaved4:4", "gather:micro", "accum:9")
    ]  # fmt: skip
    return [Layout.parse(text) for text in words]


def test_every_violation_has_numbers_and_a_way_out() -> None:
    seen = set()
    for layout in _every_small_layout():
        for violation in legal(layout, TINY):
            seen.add(violation.rule)
            assert re.search(r"\d", violation.what), violation
            assert violation.way_out.startswith(
                ("Use", "Write", "Leave", "Name", "Only")
            ), violation
    assert len(seen) >= 7


def test_the_nearest_layouts_are_legal_and_of_as_many_ranks() -> None:
    for layout in _every_small_layout():
        if layout.ranks > 24:
            continue
        found = nearest(layout, TINY)
        assert found, layout
        for other in found:
            assert other.ranks == layout.ranks
            assert legal(other, TINY) == (), f"{layout} -> {other}"
        assert len(set(found)) == len(found)


def test_the_nearest_of_a_legal_layout_is_itself() -> None:
    for layout in _every_small_layout():
        if not legal(layout, TINY):
            assert nearest(layout, TINY, most=1) == (layout,)


def test_the_nearest_keeps_what_it_can() -> None:
    first = nearest(Layout.parse("tp8 seq"), TINY)[0]
    assert first.mesh in (Mesh.parse("dp2 tp4"), Mesh.parse("tp4 dp2"), Mesh.parse("tp4 cp2"),
                          Mesh.parse("tp4 pp2"))  # fmt: skip
    assert first.seq
    assert nearest(Layout.parse("dp4 pp2 1f1b:8"), TINY)[0] == Layout.parse(
        "dp4 pp2 1f1b:4"
    )


def test_stages_named_wrongly_are_refused_with_the_counts() -> None:
    with pytest.raises(
        LayoutError, match=r"stages:1-2 is 2 stages of 3 blocks; .* tiny has 4"
    ):
        stage_pieces(Layout.parse("pp2 stages:1-2"), TINY)


@pytest.mark.parametrize(
    ("text", "rules", "words"),
    [
        ("ep2", set(), ""),
        ("ep9 tp2 seq zero3", set(), ""),
        (
            "ep10",
            {"ep"},
            "ep=10 for a model with 9 experts.\n  Use ep 9 or less, and dp for the rest.",
        ),
        (
            "dp4 ep7",
            {"batch"},
            "dp=4 x ep=7 x 1 microbatches less than one sequence each",
        ),
        ("tp4 cp2 seq experts:tp,cp", set(), ""),
        (
            "ep5 tp2 seq experts:tp",
            {"ep"},
            "ep=5 x tp=2 for a model with 9 experts.\n  Leave experts: out, or use fewer ranks there.",
        ),
        (
            "ep2 tp2 experts:tp",
            {"experts"},
            "would send each token 2 times to its experts.\n  Add seq, or",
        ),
        (
            "ep2 experts:cp",
            {"experts"},
            "no ranks to share experts with: cp=1.\n  Leave cp out of it",
        ),
    ],
)
def test_experts_over_ranks(text: str, rules: set[str], words: str) -> None:
    broken = legal(Layout.parse(text), SHAPES["experts"])
    assert {v.rule for v in broken} == rules
    assert words in "".join(map(str, broken))
    assert all(
        not legal(x, SHAPES["experts"])
        for x in nearest(Layout.parse(text), SHAPES["experts"])
    )


def test_latents_are_cut_over_whole_heads() -> None:
    (wrong,) = legal(Layout.parse("tp256"), Shape.load("deepseek-v3"))
    assert str(wrong) == (
        "tp=256 does not divide heads=128 in layers.*.attn.w*_b.weight.\n"
        "  Use tp 1, 2, 4, 8, 16, 32, 64, 128."
    )


def test_a_loss_of_the_batch_needs_it_whole() -> None:
    shape = replace(SHAPES["experts"], batch_loss=0.1)
    assert not legal(Layout.parse("dp2 ep2"), shape)
    (wrong,) = legal(Layout.parse("pp2 1f1b:3"), shape)
    assert (
        "3 microbatches are not all forward by then.\n  Use one microbatch, or"
        in str(wrong)
    )


def test_ep_needs_experts() -> None:
    (wrong,) = legal(Layout.parse("ep2"), TINY)
    assert (
        str(wrong)
        == "ep=2 for a model with no experts.\n  Use dp in place of ep."
    )
