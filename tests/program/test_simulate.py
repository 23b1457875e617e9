"""Times by hand, and what a timeline tells of them."""

import json
from itertools import pairwise, product

import pytest
from program_worlds import moved, pipeline, step, without

from phalanx.layout import Mesh
from phalanx.program import (
    Costs,
    Op,
    Program,
    ProgramError,
    Sizes,
    Span,
    Timeline,
    check,
    faults,
    repeat,
    simulate,
)
from phalanx.program.graph import graph, possible
from phalanx.program.ops import COMPUTE


def _at(timeline: Timeline, word: str, rank: int = 0) -> tuple[float, float]:
    (span,) = [
        s for s in timeline.spans if s.op == Op.parse(word) and s.rank == rank
    ]
    return span.start, span.end


def test_a_small_pipeline_runs_as_worked_out_by_hand() -> None:
    timeline = simulate(
        pipeline("1f1b", 2, 2), Costs({"F": 1, "B": 2, "send": 0.5})
    )
    by_hand = {
        (0, "0F0"): (0, 1), (0, "0F0>1"): (1, 1.5), (0, "0F1"): (1, 2), (0, "0F1>1"): (2.5, 3),
        (1, "1F0"): (1.5, 2.5), (1, "1B0"): (2.5, 4.5), (1, "1B0>0"): (4.5, 5), (1, "1F1"): (4.5, 5.5),
        (0, "0B0"): (5, 7), (1, "1B1"): (5.5, 7.5), (1, "1B1>0"): (7.5, 8), (0, "0B1"): (8, 10),
    }  # fmt: skip
    for (rank, word), times in by_hand.items():
        assert _at(timeline, word, rank) == times
    # The two ends of a message are one event: 0F1>1 waits until rank 1, after 1F0, posts its end.
    assert _at(timeline, "1F0<0", 1) == _at(timeline, "0F0>1", 0)
    assert timeline.makespan == 10
    assert (timeline.busy(0), timeline.busy(1), timeline.ideal) == (6, 6, 6)
    assert (timeline.inner_idle(0), timeline.inner_idle(1)) == (4, 0)
    assert timeline.bubble_fraction == pytest.approx(0.4)
    assert timeline.exposed(0) == pytest.approx(0.5 + 0.5 + 0.5)


def test_nothing_starts_before_what_it_needs_and_lanes_keep_their_order() -> (
    None
):
    texts = (
        "dp2 pp2 1f1b:4 zero3 gather:micro",
        "pp2 zb-v:4",
        "offload:activations,weights accum:2",
    )
    for text, tied in product(texts, (False, True)):
        program = step(f"{text} recompute:every=2", 8, tied=tied, agree=tied)
        costs = Costs({"F": 1, "I": 1, "W": 1, "send": 0.3, "G": 0.7, "S": 0.9, "U": 0.2, "O": 2, "Z": 2,
                       "T": 0.4, "N": 0.1, "A": 0.1})  # fmt: skip
        timeline = simulate(program, costs)
        made = graph(program)
        ends = [s.end for s in timeline.spans]
        for i, span in enumerate(timeline.spans):
            assert all(ends[j] <= span.start for j in made.before[i])
        for rank, lane in timeline.lanes:
            mine = [
                s for s in timeline.spans if (s.rank, s.lane) == (rank, lane)
            ]
            assert all(a.end <= b.start for a, b in pairwise(mine))
        # As soon as possible: every event starts when the last of what it waits for has ended.
        for event in made.events:
            waits = [ends[j] for i in event for j in made.before[i]]
            assert timeline.spans[event[0]].start == max(waits, default=0)


def test_a_collective_starts_when_its_last_member_calls() -> None:
    program = Program.parse(
        "mesh dp2\nranks 0: 0F0 0B0 0S 0U\nranks 1: 0F0 0B0 0F1 0B1 0S 0U\n"
    )
    assert faults(program) == ()
    timeline = simulate(program, Costs({"F": 1, "B": 2, "S": 1, "U": 1}))
    assert _at(timeline, "0S", 0) == _at(timeline, "0S", 1) == (6, 7)
    assert timeline.exposed(0) == 1


def test_costs_may_differ_by_piece_and_by_rank_and_derive_what_is_left_out() -> (
    None
):
    costs = Costs(
        {"F": 1, "B": 4},
        {("F", 1): 3, ("I", 2): 5, ("W", 2): 1, ("B", 3): 8},
        {1: 2.0},
    )
    expected = {
        "0F0": 1, "0B0": 4, "0I0": 2, "0W0": 2, "0R0": 1, "1F0": 3, "1R0": 3, "2B0": 6, "3I0": 4, "3W0": 4,
        "0S": 0, "0F0>1": 0, "1F0<0": 0, "N": 0,
    }  # fmt: skip
    for word, time in expected.items():
        assert costs.of(Op.parse(word), 0) == time, word
        slower = 2 if Op.parse(word).kind in "FBIWR" else 1
        assert costs.of(Op.parse(word), 1) == time * slower
    assert Costs({"F": 1, "I": 1, "W": 2}).of(Op.parse("0B0"), 0) == 3
    assert Costs({"send": 2}).of(Op.parse("0F0>1"), 0) == 2
    assert (
        Costs({"F": 1, "A": 3}, share={0: 0.25}).of(Op.parse("0F0"), 0) == 0.25
    )
    assert Costs({"F": 1, "A": 3}, share={0: 0.25}).of(Op("A"), 0) == 3


def test_gathering_ahead_hides_what_gathering_at_once_exposes() -> None:
    costs = Costs({"F": 2, "B": 4, "G": 1, "S": 1})
    exposed = [
        simulate(step(f"dp2 zero3 prefetch:{n}", 6), costs).exposed(0)
        for n in (0, 1)
    ]
    # Prefetch 0 waits for every gather but those joined at the turn; ahead, for the first and last.
    assert exposed[0] > exposed[1]
    assert exposed[1] == 2


def test_gathers_of_a_step_are_under_way_on_all_stages_at_once() -> None:
    """Four pieces a stage, gathered in 3 s each: both stages have theirs after 12 s, the first then
    computes its fourth piece, the second its four."""
    program = step("dp2 pp2 zero1 1f1b:2", 8)
    assert _at(
        simulate(program, Costs({"F": 1, "B": 2, "G": 3})), "7F0", 1
    ) == (16, 17)


def test_sums_once_a_step_hold_up_nobody() -> None:
    """By the last microbatch every gradient is begun, so that waiting for a sum would free nothing."""
    for text in ("1f1b:6", "gpipe:6", "interleaved2:6", "zb-h1:6"):
        program = step(f"dp2 pp3 zero1 {text}", 12, agree=True)
        costs = {"F": 1, "B": 2, "I": 1, "W": 1}
        slow, none = (
            simulate(program, Costs(costs | {"S": each})) for each in (20, 0)
        )
        for now, then in zip(slow.spans, none.spans, strict=True):
            assert now.lane != COMPUTE or now.op.kind == "U" or now == then, (
                text
            )


def test_a_program_that_never_ends_is_refused() -> None:
    stuck = moved(pipeline("1f1b", 2, 2), 0, "0F0>1", after="0B0")
    stuck = without(stuck, 0, "0F1>1", "0F1", "0B1", "0B1<1")
    stuck = without(stuck, 1, "1F1<0", "1F1", "1B1", "1B1>0")
    assert "deadlock" in faults(stuck)[0]
    with pytest.raises(ProgramError, match=r"never ends.*Run check"):
        simulate(stuck)
    assert len(possible(graph(stuck))) < len(graph(stuck).events)


def test_repeated_steps_follow_each_other_without_a_barrier() -> None:
    program = step("dp2 pp2 1f1b:3 zero1", 4)
    assert repeat(program, 1) == program
    three = repeat(program, 3)
    for row, one in zip(three.rows, program.rows, strict=True):
        assert len(row) == 3 * len(one) == len(set(row))
    assert three.microbatches == 9
    costs = Costs({"F": 1, "B": 2, "G": 0.1, "U": 0.1})
    assert (
        simulate(three, costs).makespan
        <= 3 * simulate(program, costs).makespan + 1e-9
    )
    update = _at(simulate(repeat(program, 2), costs), "0U")
    again = _at(simulate(repeat(program, 2), costs), "0G#1")
    assert update[1] <= again[0]


def test_a_timeline_saves_and_loads_and_what_is_none_is_refused() -> None:
    sizes = Sizes((2.0,) * 4, (1.0,) * 4)
    for timeline in (
        simulate(pipeline("zb-h1", 4, 4)),
        simulate(pipeline("1f1b", 4, 4), None, sizes),
    ):
        again = Timeline.from_json(json.dumps(timeline.to_json()))
        assert again == timeline
    for text in (
        "",
        "[]",
        "{}",
        '{"spans": [[0, "compute", "0f0", 0, 1]]}',
        '{"spans": [[0]]}',
    ):
        with pytest.raises(ValueError, match="this is not a timeline"):
            Timeline.from_json(text)


def test_an_empty_timeline_is_nothing() -> None:
    empty = Timeline(())
    assert (
        empty.makespan,
        empty.ideal,
        empty.bubble_fraction,
        empty.lanes,
    ) == (
        0,
        0,
        0,
        (),
    )
    one = Timeline((Span(3, "compute", Op("F", 0), 2.0, 5.0),))
    assert (
        one.start,
        one.makespan,
        one.busy(3),
        one.inner_idle(3),
        one.exposed(3),
    ) == (
        2,
        3,
        3,
        0,
        0,
    )


def test_sixteen_stages_of_four_chunks_and_128_microbatches_are_simulated_and_proved() -> (
    None
):
    """The bubble of Narayanan et al. 2021 at a size that people run."""
    program = pipeline("interleaved", 16, 128, 4)
    costs = Costs({"F": 1, "B": 2}, share=dict.fromkeys(range(64), 0.25))
    assert simulate(program, costs).bubble_fraction == pytest.approx(
        15 / (4 * 128 + 15)
    )
    assert len(check(program).held) == 16
    assert program.mesh == Mesh.parse("pp16")
