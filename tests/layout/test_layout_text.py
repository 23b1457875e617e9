"""A layout is a value that prints and parses back."""

from itertools import product

import pytest

from phalanx.layout import Layout, LayoutError

MESHES = (
    "",
    "dp4",
    "dp2x4",
    "pp4",
    "tp2 seq",
    "dp2 pp2 cp4:2x2 tp2 seq",
    "cp4:ulysses dp2",
)
SCHEDULES = (
    "", "accum:4", "naive", "naive:2", "gpipe:8", "1f1b", "1f1b:16", "interleaved:8", "interleaved3:4",
    "zb-h1:8", "zb-h2:1", "zb-v:8", "searched:8", "searched2:8", "my/own.py:order:6", "own.py:v2/3:6",
)  # fmt: skip
ZEROS = (
    "",
    "zero1",
    "zero2 reduce:step",
    "zero3",
    "zero3 gather:micro prefetch:0",
    "zero3 gather:step",
)
REST = (
    "", "recompute:all", "recompute:every=3 offload:weights", "recompute:fit offload:optimizer,weights",
    "offload:activations stages:2-2-2-1 bf16", "recompute:sqrt fp64", "recompute:selective tf32",
    "compile", "bf16 compile:max",
)  # fmt: skip


def every_layout() -> list[Layout]:
    choices = product(MESHES, ZEROS, SCHEDULES, REST)
    return [Layout.parse(" ".join(words)) for words in choices]


def test_every_layout_prints_and_parses_back() -> None:
    layouts = every_layout()
    for layout in layouts:
        assert Layout.parse(str(layout)) == layout
    # Different values have different texts, as the text is how a run names its layout.
    assert len({str(x) for x in layouts}) == len(set(layouts))


def test_what_is_not_written_has_its_default_and_is_not_printed() -> None:
    assert str(Layout()) == ""
    assert (
        str(Layout.parse("pp4 1f1b:4 zero0 recompute:none fp32 prefetch:1"))
        == "pp4"
    )
    assert str(
        Layout.parse("bf16 dp4 1f1b:16 pp2 seq tp8 recompute:all zero3")
    ) == ("dp4 pp2 tp8 seq zero3 1f1b:16 recompute:all bf16")
    assert Layout.parse("dp4 zero3").gather == "micro"
    assert Layout.parse("dp4 pp2 zero3").gather == "step"
    assert Layout.parse("dp4 zero2").reduce == "micro"
    assert Layout.parse("dp4 zero1").reduce == "step"


def test_copies_are_over_dp_and_cp_and_shards_follow_the_zero_stage() -> None:
    hsdp = Layout.parse("dp2x4 cp2 tp2 zero3")
    assert (hsdp.copies, hsdp.shards, hsdp.ranks) == (16, 8, 32)
    assert Layout.parse("dp2x4 cp2").shards == 1
    assert Layout.parse("pp4 interleaved3:8").virtual_stages == 12


def test_layouts_are_listed_with_semicolons() -> None:
    assert Layout.parse_many("dp2; tp2 ;") == (
        Layout.parse("dp2"),
        Layout.parse("tp2"),
    )


@pytest.mark.parametrize(
    "text, parts",
    [
        ("dp2 zeor3", ("'zeor3'", "Did you mean 'zero3'")),
        ("zero4", ("'zero4'", "zero")),
        ("pp2 1f1b:0", ("microbatches is 0", "1 or more")),
        ("pp2 interleaved0:4", ("chunks is 0",)),
        ("pp2 gpipe2:4", ("gpipe takes 1 chunk", "not 2")),
        ("pp2 zb-v3:4", ("zb-v takes 2 chunks", "not 3")),
        ("zero1 zero2", ("'zero2'", "appears twice")),
        ("1f1b:4 gpipe:4", ("gpipe:4", "appears twice")),
        ("offload:disk", ("'offload:disk'",)),
        ("compile:foo", ("'compile:foo'", "compile:max or compile:graphs")),
        ("recompute:some", ("'recompute:some'", "Did you mean")),
    ],
)
def test_a_word_that_means_nothing_is_refused_with_the_nearest(
    text: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_wrong_values_are_refused_all_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(
            zero=5,
            prefetch=-1,
            gather="often",
            schedule="fifo",
            precision="int8",
            recompute="x",
        )
    for part in (
        "zero=5",
        "prefetch=-1",
        "'often'",
        "'fifo'",
        "'int8'",
        "recompute='x'",
    ):
        assert part in str(caught.value)
    with pytest.raises(LayoutError, match="disk"):
        Layout(offload=("disk",))
