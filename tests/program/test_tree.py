"""The tree of sums of a layout of `exact`, and the operations that make it."""

import re
from fractions import Fraction
from itertools import permutations

import pytest

from phalanx.layout import Layout, LayoutError
from phalanx.layout.cases import SHAPES
from phalanx.layout.pieces import staged_pieces
from phalanx.program import Program, build, check, ops
from phalanx.program.check import faults
from phalanx.program.tree import add_in_tree, merges


def written(count: int) -> str:
    """The sum that the additions of a tree make, with all its brackets."""
    sums = {n: str(n) for n in range(count)}
    for into, term in merges(count):
        sums[into] = f"({sums[into]} {sums.pop(term)})"
    (whole,) = sums.values()
    return whole


def test_the_left_sum_of_a_node_has_the_largest_power_of_two_of_terms() -> (
    None
):
    assert written(1) == "0"
    assert written(3) == "((0 1) 2)"
    assert written(6) == "(((0 1) (2 3)) (4 5))"
    assert written(7) == "(((0 1) (2 3)) ((4 5) 6))"


@pytest.mark.parametrize("ranks", [2, 3, 5, 6])
@pytest.mark.parametrize("each", [1, 2, 4])
def test_trees_of_ranks_make_the_tree_of_one_process(
    ranks: int, each: int
) -> None:
    """Each rank's tree stands in that over ranks in the place of its number."""

    def own(rank: re.Match[str]) -> str:
        first = int(rank[0]) * each
        return re.sub(
            "[0-9]+", lambda n: str(first + int(n[0])), written(each)
        )

    over = re.sub("[0-9]+", own, written(ranks))
    assert over == written(ranks * each)


def test_microbatches_may_end_in_any_order() -> None:
    for order in permutations(range(5)):
        sums: list[range] = []
        additions = sum(add_in_tree(sums, leaf, 5) for leaf in order)
        assert sums == [range(5)]
        assert additions == 4


def test_the_tree_rounds_otherwise_than_a_running_sum() -> None:
    """So the order is worth fixing: three terms, of which two cancel."""
    terms = [1.0, 2.0**-53, 2.0**-53, 0.0]
    tree = (terms[0] + terms[1]) + (terms[2] + terms[3])
    assert tree != sum(map(Fraction, terms))
    assert tree == 1.0
    assert terms[0] + (terms[1] + terms[2]) > 1.0


def program_of(text: str, shape: str = "gqa") -> Program:
    layout = Layout.parse(text)
    return build(layout, staged_pieces(layout, SHAPES[shape]))


def test_each_microbatch_is_added_and_the_sum_is_exchanged_once() -> None:
    program = program_of("dp2x2 zero1 accum:2 exact")
    (row,) = program.rows
    words = [str(op) for op in row if op.piece == 2]
    assert words == [
        "2G", "2F0", "2B0", "2^", "2F1", "2B1", "2^#1", "2X", "2~", "2U",
    ]  # fmt: skip
    assert Program.parse(str(program)) == program


def test_a_tied_weight_has_a_tree_for_each_piece_that_uses_it() -> None:
    (row,) = program_of("accum:2 exact", "gpt").rows
    kinds = ops.ADD, ops.EXCHANGE_PARTS
    words = [str(op) for op in row if op.piece == 0 and op.kind in kinds]
    assert words == ["0^#2", "0^", "0^#3", "0X#1", "0^#1", "0X"]


@pytest.mark.parametrize("kind", [ops.ADD, ops.EXCHANGE_PARTS, ops.SHARE_SUMS])
def test_check_finds_a_missing_operation_of_the_tree(kind: str) -> None:
    program = program_of("dp2 pp2 1f1b:2 exact", "gpt")
    for number, row in enumerate(program.rows):
        for op in row:
            if op.kind == kind:
                less = tuple(other for other in row if other != op)
                rows = list(program.rows)
                rows[number] = less
                assert faults(program.with_rows(rows)), f"without {op}"


def test_a_sum_of_the_tree_takes_a_buffer_until_it_is_added() -> None:
    """Before the last of 8 there are sums of 4, 2 and 1, and its own gradient.

    The last unit is exchanged, and so freed, before the next one's last gradient.
    """
    for count, most in ((2, 2), (4, 3), (8, 4)):
        program = program_of(f"accum:{count} exact")
        at_peak = check(program).counts[0].kinds["gradients"]
        units = len({op.piece for op in program.rows[0] if op.kind == ops.ADD})
        assert (most - 1) * units < at_peak <= most * units


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tp2 exact", "exact with tp2: each rank computes whole parts"),
        ("cp2 exact", "exact with cp2: each rank computes whole runs"),
        ("fp64 exact", "exact does not cover fp64 yet"),
        ("bf16 fp8 exact", "exact does not cover fp8 yet"),
        ("compile:max exact", "exact does not cover compile:max"),
        ("dp2 zero2 reduce:micro exact", "exact does not cover reduce:micro"),
    ],
)
def test_what_exact_does_not_cover_is_refused_by_name(
    text: str, reason: str
) -> None:
    with pytest.raises(LayoutError, match=reason):
        Layout.parse(text)
