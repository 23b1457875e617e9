"""Every mixture of choices gives a program that is proved."""

from itertools import pairwise, product

import pytest
from program_worlds import PIPELINES

from phalanx.layout import Layout, Shape, legal, plain_pieces, staged_pieces
from phalanx.program import (
    Costs,
    Op,
    StepOptions,
    build,
    check,
    faults,
    simulate,
)

ZEROS = (
    "", "zero1", "zero2", "zero3", "zero3 gather:micro", "zero3 gather:micro reduce:step prefetch:0",
    "zero2 reduce:step prefetch:3",
)  # fmt: skip
RECOMPUTES = ("none", "all", "every=2", "sqrt")
OFFLOADS = (
    "",
    "offload:activations",
    "offload:weights",
    "offload:weights,activations,optimizer",
)


@pytest.mark.parametrize(
    "name, chunks",
    [("accum", 1), *PIPELINES, ("searched", 1), ("searched", 2)],
)
def test_every_mixture_of_choices_is_proved(name: str, chunks: int) -> None:
    pp = 1 if name == "accum" else 2
    count = (
        str(chunks)
        if name in ("interleaved", "searched") and chunks > 1
        else ""
    )
    pieces = 3 * pp * chunks
    bounds = [i * pieces // (pp * chunks) for i in range(pp * chunks + 1)]
    stages = [range(a, b) for a, b in pairwise(bounds)]
    # A search takes a while; what follows it is the same passes.
    few = 3 if name == "searched" else 1
    for zero, again, away in product(
        ZEROS[::few], RECOMPUTES[::few], OFFLOADS[::few]
    ):
        text = f"dp2 pp{pp} {name}{count}:3 {zero} recompute:{again} {away}"
        layout = Layout.parse(text)
        for tied, agree in ((False, False), (True, True)):
            program = build(
                layout,
                plain_pieces(stages, tied=((pieces - 1, 0),) if tied else ()),
                StepOptions(agree=agree),
            )
            assert faults(program) == (), text


def test_every_legal_layout_of_the_tiny_model_on_eight_ranks_is_proved() -> (
    None
):
    tiny = Shape.load("tiny")
    count = 0
    for dp, pp, cp, tp in product((1, 2, 4, 8), repeat=4):
        if dp * pp * cp * tp != 8:
            continue
        for zero, schedule in product(
            ("", "zero1", "zero3"), ("", "zb-h1:4", "zb-v:2", "accum:2")
        ):
            layout = Layout.parse(
                f"dp{dp} pp{pp} cp{cp} tp{tp} {zero} {schedule}"
            )
            if legal(layout, tiny):
                continue
            program = build(layout, staged_pieces(layout, tiny))
            assert faults(program) == ()
            assert len(program.rows) == pp
            count += 1
    assert count > 60


def test_reducing_3_backward_of_2_and_fetching_1_stand_side_by_side() -> None:
    """The picture of ZeRO-3 that its teaching examples draw, over the deep MLP of 4 layers."""
    layout = Layout.parse("dp2 zero3")
    program = build(
        layout,
        staged_pieces(layout, Shape.load("mlp")),
        StepOptions(agree=False),
    )
    timeline = simulate(
        program, Costs({"F": 1, "B": 2, "G": 1, "S": 1, "U": 0.5})
    )
    at = {s.op: s for s in timeline.spans}
    back = at[Op.parse("2B0")]
    for word, lane in (("3S", "reduce"), ("1G#1", "gather")):
        span = at[Op.parse(word)]
        assert span.lane == lane != back.lane
        assert max(span.start, back.start) < min(span.end, back.end)
    # 3S has waited for 5S, so 5U takes no waiting; it computes, and stands before 2B0.
    update = at[Op.parse("5U")]
    assert (update.lane, update.end) == (back.lane, back.start)
    assert at[Op.parse("5S")].end <= update.start == at[Op.parse("3S")].start


def test_one_mechanism_is_ddp_and_the_three_stages_of_zero() -> None:
    """Rajbhandari et al. 2020: what is gathered and summed when, for 2 microbatches of 3 pieces."""
    counts = {}
    for text in (
        "dp2 accum:2",
        "dp2 zero1 accum:2",
        "dp2 zero2 accum:2",
        "dp2 zero3 accum:2",
    ):
        layout = Layout.parse(text)
        (row,) = build(
            layout, plain_pieces([range(3)]), StepOptions(agree=False)
        ).rows
        kinds = [op.kind for op in row]
        counts[text] = tuple(kinds.count(k) for k in "GDSU")
    assert counts == {
        "dp2 accum:2": (0, 0, 3, 3),
        "dp2 zero1 accum:2": (3, 0, 3, 3),
        "dp2 zero2 accum:2": (3, 0, 6, 3),
        # Forward and backward of each piece and microbatch, less the last piece's and first's joints.
        "dp2 zero3 accum:2": (9, 9, 6, 3),
    }


def test_each_schedule_s_held_microbatches_survive_the_passes() -> None:
    bare = build(
        Layout.parse("pp4 1f1b:8"),
        plain_pieces([range(r, r + 1) for r in range(4)]),
        StepOptions(agree=False),
    )
    full = build(
        Layout.parse(
            "dp2 pp4 1f1b:8 zero3 gather:micro recompute:all offload:activations"
        ),
        plain_pieces([range(r, r + 1) for r in range(4)]),
    )
    assert check(bare).held == check(full).held == (4, 3, 2, 1)
