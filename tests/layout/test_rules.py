"""Which weight is cut how: every number of a dim is on the ranks that should hold it."""

from collections import Counter

import pytest

from phalanx.layout import LayoutError, Rules
from phalanx.layout.rules import Cut

TABLE = """
embed.weight               : vocab embed
layers.*.attn.w[q].weight  : heads embed   # one line a family
layers.*.attn.w[kv].weight : kv embed
layers.*.norm.weight       : -
"""


@pytest.mark.parametrize("unit", [1, 2, 16])
@pytest.mark.parametrize("units", range(1, 13))
@pytest.mark.parametrize("parts", range(1, 9))
def test_the_parts_of_a_dim_cover_it_and_each_unit_lies_on_as_many_ranks(
    units: int, parts: int, unit: int
) -> None:
    size = units * unit
    cuts = [Cut.of(size, parts, place, unit) for place in range(parts)]
    holders = Counter(i for cut in cuts for i in range(cut.start, cut.stop))
    assert set(holders) == set(range(size))
    assert {cut.copies for cut in cuts} == set(holders.values())
    assert len({cut.length for cut in cuts}) == 1
    for cut in cuts:
        assert cut.start % unit == 0
        assert 0 <= cut.stop - cut.start <= cut.length
    if units % parts == 0:
        assert all(
            cut.stop - cut.start == cut.length == size // parts for cut in cuts
        )


def test_two_kv_heads_over_four_ranks_lie_on_two_neighbours_each() -> None:
    cuts = [Cut.of(2 * 16, 4, place, 16) for place in range(4)]
    assert [(c.start, c.stop, c.copies) for c in cuts] == [
        (0, 16, 2),
        (0, 16, 2),
        (16, 32, 2),
        (16, 32, 2),
    ]


def test_a_vocabulary_that_does_not_divide_is_padded_at_its_end() -> None:
    cuts = [Cut.of(50257, 8, place) for place in range(8)]
    assert {c.length for c in cuts} == {6283}
    assert (cuts[-1].start, cuts[-1].stop) == (43981, 50257)


def test_a_table_prints_and_parses_back_and_the_first_line_that_fits_counts() -> (
    None
):
    rules = Rules.parse(TABLE)
    assert Rules.parse(str(rules)) == rules
    assert rules.dims("layers.3.attn.wk.weight", 2) == ("kv", "embed")
    first = Rules.parse("a.* : heads embed\n* : -")
    assert (first.dims("a.b"), first.dims("b")) == (("heads", "embed"), ("-",))


def test_what_the_table_does_not_say_is_refused_with_the_line_to_write() -> (
    None
):
    rules = Rules.parse(TABLE)
    with pytest.raises(
        LayoutError,
        match=r"no rule names the parameter head.weight. Add a line",
    ):
        rules.dims("head.weight")
    with pytest.raises(
        LayoutError, match=r"has 1 dims, its rule .* names 2: vocab embed"
    ):
        rules.dims("embed.weight", 1)
    with pytest.raises(LayoutError, match=r"line 2: .* names dim 'haeds'"):
        Rules.parse("a : embed\nb : haeds embed")
    with pytest.raises(LayoutError, match="line 1: 'just words'"):
        Rules.parse("just words")
