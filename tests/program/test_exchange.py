"""Tokens on their way to experts and back, as operations: what must stand where, and what is held."""

from itertools import pairwise

import pytest

from phalanx.layout import Layout, plain_pieces
from phalanx.program import (
    Costs,
    Op,
    Program,
    ProgramError,
    Sizes,
    StepOptions,
    build,
    check,
    ops,
    simulate,
)
from phalanx.program.memory import peaks

STAGES = (range(5),)  # embedding, three pieces of a block with experts, head
EXPERTS = (2,)


def step(text: str) -> Program:
    return build(
        Layout.parse(text),
        plain_pieces(STAGES, frozen=(3,), receivers=EXPERTS),
        StepOptions(agree=False),
    )


def computed(program: Program) -> str:
    kinds = (*ops.COMPUTES, *ops.EXCHANGES)
    return " ".join(str(op) for op in program.rows[0] if op.kind in kinds)


def test_tokens_travel_right_after_what_makes_them() -> None:
    program = step("ep2")
    check(program)
    assert computed(program) == (
        "0F0 1F0 2K0 2E0 2F0 3E0 3F0 4F0 4B0 3B0 3J0 2B0 2J0 1B0 0B0"
    )
    assert Program.parse(str(program)) == program


def test_overlapped_a_backward_takes_turns_with_the_next_forward() -> None:
    program = step("ep2 accum:2 overlap")
    check(program)
    assert computed(program) == (
        "0F0 1F0 2K0 2E0 2F0 3E0 3F0 4F0"
        " 4B0 3B0 3J0 0F1 1F1 2K1 2E1 2B0 2J0 2F1 3E1 1B0 0B0 3F1 4F1"
        " 4B1 3B1 3J1 2B1 2J1 1B1 0B1"
    )


@pytest.mark.parametrize("missing", ["2K0", "2E0", "3E0", "3J0", "2J0"])
def test_a_block_whose_tokens_do_not_travel_is_refused(missing: str) -> None:
    program = step("ep2")
    without = program.with_rows(
        [op for op in row if str(op) != missing] for row in program.rows
    )
    with pytest.raises(ProgramError, match=missing):
        check(without)


def test_a_dispatch_after_the_experts_is_refused() -> None:
    program, late = step("ep2"), Op(ops.EXCHANGE, 2, 0)
    moved = program.with_rows(
        [*(op for op in row if op != late), late] for row in program.rows
    )
    with pytest.raises(
        ProgramError, match="2F0 stands before 2E0, which it needs"
    ):
        check(moved)


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", "interleaved2", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"],
)
@pytest.mark.parametrize("microbatches", [2, 3, 8, 9])
def test_no_pipeline_waits_for_itself_when_it_overlaps(
    schedule: str, microbatches: int
) -> None:
    layout = Layout.parse(
        f"pp4 ep2 {schedule}:{microbatches} overlap recompute:all"
    )
    starts = range(1, 2 + 3 * layout.virtual_stages, 3)
    bounds = [0, *starts[1:-1], starts[-1] + 1]
    stages = tuple(range(a, b) for a, b in pairwise(bounds))
    check(
        build(
            layout,
            plain_pieces(
                stages, receivers=[start + 1 for start in starts[:-1]]
            ),
            StepOptions(agree=False),
        )
    )


def test_a_forward_beside_a_backward_hides_what_either_sends() -> None:
    """16 microbatches exchange 0.9 s four times in each of a rank's 8 blocks. Blocking, that adds its sum
    to the step; beside the other way's work, less than a fifth of it."""
    # four blocks each
    stages = tuple(range(a, b) for a, b in pairwise((0, 13, 25, 37, 50)))
    experts = [p + 1 for p in range(1, 49, 3)]
    times = []
    for text in ("zb-v", "dualpipe-v"):
        program = build(
            Layout.parse(f"pp2 ep2 {text}:16"),
            plain_pieces(stages, receivers=experts),
            StepOptions(agree=False),
        )
        free, slow = (
            Costs({"F": 1, "I": 1, "W": 1, "E": x, "J": x}) for x in (0.0, 0.9)
        )
        times.append(
            (
                simulate(program, free).makespan,
                simulate(program, slow).makespan,
            )
        )
    (plain, blocking), (same, hidden) = times
    travel = 16 * 8 * 4 * 0.9
    assert blocking == pytest.approx(plain + travel, rel=0.02)
    assert hidden < same + 0.2 * travel


def test_tokens_are_held_as_they_go_and_as_they_come() -> None:
    """Pieces put out 1, 10, 100, 1 and no bytes; nothing else is held. Blocking, the tokens are there
    twice; overlapped, the results of one microbatch beside the gradients of another."""
    none = (0.0,) * 5
    sizes = Sizes(kept=none, input=none, edge=(1.0, 10.0, 100.0, 1.0, 0.0))
    (blocking,) = peaks(step("ep2 accum:2"), sizes)
    assert (blocking.total, str(blocking.at)) == (200.0, "3E0")
    (overlapped,) = peaks(step("ep2 accum:2 overlap"), sizes)
    # 3J0 has 200 when 1F1 puts out 10 and 2E1 takes as much.
    assert (overlapped.total, str(overlapped.at)) == (220.0, "2E1")
