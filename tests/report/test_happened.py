"""A measured step in sentences: waits of a step of two stages, worked out by hand."""

from __future__ import annotations

import pytest

from phalanx.drawing import recorded_picture
from phalanx.layout import Layout, plain_pieces
from phalanx.program import (
    Costs,
    Op,
    Recorded,
    Span,
    StepOptions,
    Timeline,
    build,
    simulate,
)
from phalanx.report.happened import happened, shown_ranks, waits

PROGRAM = build(
    Layout.parse("dp2 pp2 gpipe:1"),
    plain_pieces([range(1), range(1, 2)]),
    StepOptions(),
)
# Ranks 0 and 1 are one pipeline, 2 and 3 the other, in which rank 3 is slow. Rank 0 and 2
# sum gradients together, and so do 1 and 3.
SLOW = {0: 1.0, 1: 1.0, 2: 1.0, 3: 5.0}


def at(rank: int, lane: str, word: str, start: float, end: float) -> Span:
    return Span(rank, lane, Op.parse(word), start, end)


def of_last(rank: int, slow: float, summed: float) -> list[Span]:
    """A last stage: receives at 1.5, computes, sends, and sums with its copy."""
    back = 2 + 2 * slow
    return [
        at(rank, "act 0>1", "1F0<0", 0.0, 1.5),
        at(rank, "compute", "1F0", 2.0, 2 + slow),
        at(rank, "compute", "1B0", 2 + slow, back),
        at(rank, "grad 1>0", "1B0>0", back, 30.0),
        at(rank, "reduce", "1S", back, summed),
        at(rank, "compute", "1U", summed, summed + 0.5),
    ]


def of_first(rank: int, back: float) -> list[Span]:
    """A first stage: computes from 0 to 1, and again when the gradient is there."""
    return [
        at(rank, "compute", "0F0", 0.0, 1.0),
        at(rank, "act 0>1", "0F0>1", 1.0, 30.0),
        at(rank, "grad 1>0", "0B0<1", 1.0, back),
        at(rank, "compute", "0B0", back, back + 2),
        at(rank, "reduce", "0S", back + 2, 15.0),
        at(rank, "compute", "0U", 15.0, 15.5),
    ]


RECORDED = Recorded(
    PROGRAM,
    Timeline(
        (
            *of_first(0, 4.25),
            # Rank 1 looks after the count of tokens once its input is there.
            at(1, "agree", "N", 0.0, 1.75),
            *of_last(1, 1.0, 13.0),
            *of_first(2, 12.25),
            *of_last(3, 5.0, 13.0),
        )
    ),
)


def seconds(rank: int) -> list[tuple[str, int, float]]:
    """The waits of a rank: operation, the rank that was late, and the time."""
    return [
        (str(wait.op or ""), wait.late, pytest.approx(wait.seconds))
        for wait in waits(RECORDED)
        if wait.rank == rank
    ]


def test_a_wait_names_its_call_and_the_rank_that_was_late() -> None:
    # Rank 0 waits for its gradient from 1 to 4.25, then from 6.25 to 15 for the sum, which
    # rank 2 begins at 14.25.
    assert seconds(0) == [("0B0<1", 1, 3.25), ("0S", 2, 8.75)]
    # The input is there at 1.5, the count at 1.75; at 2, rank 1 starts. Rank 3 begins the sum
    # at 12.
    assert seconds(1) == [
        ("1F0<0", 0, 1.5), ("N", -1, 0.25), ("", -1, 0.25), ("1S", 3, 9.0)
    ]  # fmt: skip
    assert seconds(2) == [("0B0<1", 3, 11.25), ("0S", -1, 0.75)]
    # Nobody else is late: this is what the sum itself takes.
    assert seconds(3) == [("1F0<0", 2, 1.5), ("", -1, 0.5), ("1S", -1, 1.0)]


def test_waits_and_computing_are_the_whole_time_of_a_rank() -> None:
    timeline = RECORDED.timeline
    for rank, end in ((0, 15.5), (1, 13.5), (2, 15.5), (3, 13.5)):
        waited = sum(w.seconds for w in waits(RECORDED) if w.rank == rank)
        assert waited + timeline.busy(rank) == pytest.approx(end)


def test_the_step_is_told_in_sentences() -> None:
    picture = recorded_picture(RECORDED, costs=Costs({"F": 1.0, "B": 1.0}))
    lines = happened(RECORDED, picture, 7, launched=False, planned=True)
    # All ranks from 0 to 15.5; the plan's are F and B of two stages.
    assert lines[0] == (
        "Step 7 took 15,500 ms, 288 % longer than the predicted 4000 ms."
    )
    assert lines[1].startswith("Rank 0 computed for 3500 ms and waited for")
    assert '8750 ms in "sum gradients" (rank 2 began last)' in lines[1]
    assert "3250 ms for gradients from rank 1" in lines[1]
    whole = "\n".join(lines)
    assert "The longest single wait: rank 2, 11,250 ms" in whole
    assert "for gradients from rank 3" in whole
    assert "between rank 1 (2500 ms) and rank 3 (10,500 ms)" in whole
    assert "The largest differences" in whole
    assert "Between operations it spent 250 ms on neither." in lines[2]
    assert "neither" not in lines[1]
    on_gpu = happened(RECORDED, picture, 7, launched=True, planned=True)
    assert any("launched" in line for line in on_gpu)


def test_without_a_plan_nothing_is_compared_with_a_prediction() -> None:
    """The prediction would come from the step itself."""
    picture = recorded_picture(RECORDED)
    lines = happened(RECORDED, picture, 7, launched=False, planned=False)
    assert lines[0] == "Step 7 took 15,500 ms."
    assert not any("predicted" in line for line in lines)


def test_a_step_that_takes_as_long_as_planned_took_it_as_predicted() -> None:
    made = Timeline((at(0, "compute", "0F0", 0.0, 4.01),))
    picture = recorded_picture(RECORDED, costs=Costs({"F": 1.0, "B": 1.0}))
    alone = Recorded(PROGRAM, made)
    lines = happened(alone, picture, 1, launched=False, planned=True)
    assert lines[0] == "Step 1 took 4010 ms, as predicted (4000 ms)."
    # It waited for nothing, and is told of as the rank that computed longest.
    assert lines[1] == "Rank 0 computed for 4010 ms and waited for 0 ms."


def test_a_rank_that_only_sends_has_no_waits() -> None:
    spans = (
        at(0, "act 0>1", "0F0>1", 1.0, 3.0),
        at(1, "act 0>1", "1F0<0", 0.0, 2.0),
        at(1, "compute", "1F0", 2.0, 3.0),
    )
    recorded = Recorded(PROGRAM, Timeline(spans))
    assert [wait.rank for wait in waits(recorded)] == [1]
    picture = recorded_picture(recorded)
    lines = happened(recorded, picture, 1, launched=False, planned=False)
    assert not any(line.startswith("Rank 0") for line in lines)


def test_the_time_and_the_zero_of_a_step_are_those_of_all_ranks() -> None:
    """Rank 2, which is not shown, begins 1 s before the others and ends 1 s after them."""
    spans = tuple(
        at(rank, "compute", "0F0", begin, end)
        for rank, begin, end in ((0, 1.0, 2.0), (2, 0.0, 3.0))
    )
    recorded = Recorded(PROGRAM, Timeline(spans))
    picture = recorded_picture(recorded)
    lines = happened(recorded, picture, 1, launched=False, planned=False)
    assert lines[0] == "Step 1 took 3000 ms."
    assert picture.other
    (shown,) = picture.other.spans
    assert (shown.start, shown.end) == (1000.0, 2000.0)


def test_of_many_ranks_the_busiest_and_those_that_waited_longest_are_told_of() -> (
    None
):
    program = build(
        Layout.parse("dp10"), plain_pieces([range(1)]), StepOptions()
    )
    # Rank 7 does nothing for nine seconds, but waits for no call.
    spans = [
        at(7, "compute", "0F0", 0.0, 1.0),
        at(7, "compute", "0B0", 10.0, 10.5),
    ]
    for rank in (0, 1, 2, 3, 4, 5, 6, 8, 9):
        # Rank 9 computes longest, and each other one a second less.
        done = 1.0 + rank
        spans.append(at(rank, "compute", "0F0", 0.0, done))
        spans.append(at(rank, "reduce", "0S", done, 10.5))
    recorded = Recorded(program, Timeline(tuple(spans)))
    picture = recorded_picture(recorded)
    lines = happened(recorded, picture, 1, launched=False, planned=False)
    told = [line.split()[1] for line in lines if line.startswith("Rank ")]
    assert told == ["0", "1", "2", "3", "4", "5", "6", "9"]
    assert (
        "These are 8 of 10 ranks: rank 9, which computed longest, and the 7 others that waited"
        " longest."
    ) in lines


def test_a_message_whose_sender_is_unknown_names_no_rank() -> None:
    spans = (
        at(1, "act 0>1", "1F0<0", 0.0, 2.0),
        at(1, "compute", "1F0", 2.0, 3.0),
    )
    recorded = Recorded(PROGRAM, Timeline(spans))
    picture = recorded_picture(recorded)
    whole = "\n".join(
        happened(recorded, picture, 1, launched=False, planned=False)
    )
    assert "2000 ms for activations." in whole
    assert "-1" not in whole


def test_one_rank_stands_for_all_with_its_list_and_the_page_says_so() -> None:
    said = shown_ranks(PROGRAM)
    assert "rank 0 for ranks 0, 2; rank 1 for ranks 1, 3." in said
    alone = build(
        Layout.parse("pp2 gpipe:1"),
        plain_pieces([range(1), range(1, 2)]),
        StepOptions(agree=False),
    )
    assert shown_ranks(alone) == ""


def test_a_simulated_step_has_no_wait_but_those_of_its_pipeline() -> None:
    program = build(
        Layout.parse("pp2 gpipe:2"),
        plain_pieces([range(1), range(1, 2)]),
        StepOptions(agree=False),
    )
    made = simulate(program, Costs({"F": 1.0, "B": 2.0}))
    # A simulated receive takes no time and ends when its message is there.
    found = waits(Recorded(program, made))
    by_rank = {
        rank: sum(w.seconds for w in found if w.rank == rank)
        for rank in made.ranks
    }
    # Rank 1 computes forwards from 1 to 3 and a backward until 5, for which rank 0, with its
    # forwards done at 2, waits. The second gradient is there when it is needed.
    assert by_rank == pytest.approx({0: 3.0, 1: 1.0})
