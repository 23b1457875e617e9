"""Pieces of stages: told, or as even as can be."""

from itertools import combinations, pairwise

import pytest

from phalanx.layout import Layout, LayoutError, Shape, stage_pieces
from phalanx.layout.stages import balance


def _dearest(
    costs: tuple[int, ...], lengths: tuple[int, ...], first: int, last: int
) -> int:
    runs, at = [], 0
    for length in lengths:
        runs.append(sum(costs[at : at + length]))
        at += length
    runs[0] += first
    runs[-1] += last
    return max(runs)


def _all_cuts(n: int, parts: int) -> list[tuple[int, ...]]:
    found = []
    for inner in combinations(range(1, n), parts - 1):
        bounds = (0, *inner, n)
        found.append(tuple(b - a for a, b in pairwise(bounds)))
    return found


def test_balanced_runs_are_as_cheap_as_the_best_of_all_cuts() -> None:
    rows = [
        (1,) * 7,
        (3, 1, 2, 5, 1, 1, 4),
        (9, 1, 1, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 9),
        (2, 0, 0, 3, 1),
    ]
    for costs in rows:
        for parts in range(1, len(costs) + 1):
            for first, last in (
                (0, 0),
                (4, 0),
                (0, 5),
                (2, 3),
                (20, 0),
                (0, 20),
            ):
                found = balance(costs, parts, first, last)
                assert sum(found) == len(costs)
                assert len(found) == parts
                assert min(found) >= 1
                best = min(
                    _dearest(costs, cut, first, last)
                    for cut in _all_cuts(len(costs), parts)
                )
                assert _dearest(costs, found, first, last) == best, (
                    costs,
                    parts,
                    first,
                    last,
                )


def test_equal_blocks_are_cut_evenly_with_the_earlier_stages_longer() -> None:
    assert balance((1,) * 7, 3) == (3, 2, 2)
    assert balance((1,) * 8, 4) == (2, 2, 2, 2)


def test_too_many_stages_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match="3 blocks cannot fill 4 stages"):
        balance((1, 1, 1), 4)


def test_stages_hold_every_piece_once_and_in_order() -> None:
    for name in Shape.names():
        shape = Shape.load(name)
        for text in ("", "pp2", "pp4", "pp2 interleaved2:4", "pp2 zb-v:4"):
            layout = Layout.parse(text)
            stages = stage_pieces(layout, shape)
            assert len(stages) == layout.virtual_stages
            assert [p for s in stages for p in s] == list(range(shape.pieces))


def test_named_stages_count_blocks_and_the_ends_take_embedding_and_head() -> (
    None
):
    tiny = Shape.load("tiny")
    assert stage_pieces(Layout.parse("pp3 stages:2-2-0"), tiny) == (
        range(3),
        range(3, 5),
        range(5, 6),
    )
    assert stage_pieces(Layout.parse("pp2 stages:0-4"), tiny) == (
        range(1),
        range(1, 6),
    )


def test_a_dear_head_makes_the_last_stage_shorter() -> None:
    # 16 blocks; its head costs about as much as 4 of them.
    one = Shape.load("1b")
    lengths = [len(s) for s in stage_pieces(Layout.parse("pp4"), one)]
    assert lengths[-1] - 1 < lengths[1]
