"""The searched schedule against the named ones and against times found by hand."""

from itertools import product

import pytest
from program_worlds import PIPELINES, pipeline

from phalanx.layout import Layout, plain_pieces
from phalanx.program import (
    Costs,
    ProgramError,
    StepOptions,
    build,
    check,
    faults,
    search,
    simulate,
)
from phalanx.program.passes import messages


def _costs(stages: int) -> dict[str, Costs]:
    """Even, uneven and lopsided stages, with and without time for messages."""
    third = {(k, s): 1.0 + (s % 3) for k in "FIW" for s in range(stages)}
    last = {(k, stages - 1): 2.5 for k in "FIW"}
    return {
        "even": Costs({"F": 1, "I": 1, "W": 1}),
        "far": Costs({"F": 1, "I": 1, "W": 1, "send": 0.4}),
        "dear I": Costs({"F": 1, "I": 2, "W": 0.5}),
        "uneven": Costs({"F": 1, "I": 1, "W": 1, "send": 0.1}, third),
        "dear head": Costs({"F": 1, "I": 1, "W": 1}, last),
    }


WORLDS = [
    (2, 5, 1),
    (3, 3, 1),
    (4, 8, 1),
    (4, 2, 1),
    (2, 4, 2),
    (3, 3, 2),
    (2, 4, 3),
]


@pytest.mark.parametrize("stages, microbatches, chunks", WORLDS)
def test_searched_never_loses_to_a_named_schedule_on_the_same_costs_and_limits(
    stages: int, microbatches: int, chunks: int
) -> None:
    limits = [
        None,
        [stages] * stages,
        [stages - r for r in range(stages)],
        [2 * stages - 1] * stages,
    ]
    named = [
        pipeline(n, stages, microbatches, v)
        for n, v in PIPELINES
        if v == chunks
    ]
    for costs, limit in product(_costs(stages * chunks).values(), limits):
        program = messages(search(stages, microbatches, chunks, costs, limit))
        assert faults(program) == ()
        time = simulate(program, costs).makespan
        if limit:
            assert all(
                h <= n + 1e-9
                for h, n in zip(check(program).held, limit, strict=True)
            )
        for other in named:
            held = check(other).held
            if limit is None or all(
                h <= n for h, n in zip(held, limit, strict=True)
            ):
                assert time <= simulate(other, costs).makespan + 1e-9


def test_searched_leaves_no_bubble_where_zero_bubble_schedules_leave_none() -> (
    None
):
    costs = Costs({"F": 1, "I": 1, "W": 1})
    for stages, m in ((2, 4), (4, 8), (4, 16), (6, 12)):
        for limits in (None, [stages] * stages):
            program = messages(search(stages, m, 1, costs, limits))
            assert simulate(program, costs).makespan == 3 * m + stages - 1


def test_every_limit_that_lets_one_microbatch_in_has_an_order() -> None:
    for stages, chunks in product((1, 3), (1, 2, 3)):
        for limits in ([1] * stages, [1 + r % 2 for r in range(stages)]):
            program = messages(
                search(
                    stages, 4, chunks, Costs({"F": 1, "I": 1, "W": 1}), limits
                )
            )
            assert faults(program) == ()
            assert all(
                h <= n
                for h, n in zip(check(program).held, limits, strict=True)
            )


def test_a_limit_without_an_order_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ProgramError, match=r"3 stages and 4 microbatches .* \[1, 0.5, 1\]"
    ):
        search(3, 4, 1, Costs({"F": 1, "I": 1, "W": 1}), [1, 0.5, 1])


def test_whole_backwards_take_the_time_of_the_textbook() -> None:
    """What comes after a rank's last operation counts too: the way of the gradient to the front."""
    costs = Costs({"F": 1, "B": 2, "send": 0.25})
    for stages, m in ((2, 3), (4, 8)):
        program = pipeline("gpipe", stages, m)
        assert simulate(program, costs).makespan == 3 * m + (stages - 1) * (
            3 + 2 * 0.25
        )


def test_a_layout_s_search_orders_whole_stages_by_what_their_pieces_cost() -> (
    None
):
    layout = Layout.parse("pp3 searched:6")
    stages = [range(3), range(3, 4), range(4, 6)]
    costs = Costs({"F": 1, "I": 1, "W": 1}, {("F", 1): 3.0, ("I", 4): 2.0})
    found = build(
        layout,
        plain_pieces(stages),
        StepOptions(agree=False, costs=costs, held=[3, 3, 3]),
    )
    assert faults(found) == ()
    summed = {"F": (5.0, 1.0, 2.0), "I": (3.0, 1.0, 3.0), "W": (3.0, 1.0, 2.0)}
    pieces = {
        (kind, stage): time
        for kind, row in summed.items()
        for stage, time in enumerate(row)
    }
    by_hand = search(3, 6, 1, Costs({}, pieces), [3, 3, 3])
    for row, top in enumerate((2, 3, 5)):
        order = [
            (o.kind, o.index)
            for o in found.rows[row]
            if o.kind in "FBIW" and o.piece == top
        ]
        assert order == [(o.kind, o.index) for o in by_hand.rows[row]]
    evenly = search(3, 6, 1, Costs({"F": 1, "I": 1, "W": 1}), [3, 3, 3])
    assert evenly.rows != by_hand.rows
