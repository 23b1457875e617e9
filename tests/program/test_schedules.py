"""Schedules against the formulas of the papers that introduced them."""

from itertools import product

import pytest
from program_worlds import (
    PIPELINES,
    pipeline,
    shares,
    split_costs,
    step,
    whole_costs,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from phalanx.program import (
    SCHEDULES,
    Costs,
    ProgramError,
    check,
    faults,
    repeat,
    schedule,
    simulate,
)

# stages, microbatches
SMALL = list(product((2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_the_textbook_one(name: str) -> None:
    """Narayanan et al. 2021, section 2.2.1: (P - 1) / (m + P - 1) of the step."""
    for p, m in SMALL:
        found = simulate(pipeline(name, p, m), whole_costs(p))
        assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("chunks", [2, 3])
def test_the_interleaved_bubble_is_the_textbook_one(chunks: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: the bubble of 1F1B over v, where P divides m."""
    for p, m in SMALL:
        if m % p == 0:
            found = simulate(
                pipeline("interleaved", p, m, chunks), whole_costs(p, chunks)
            )
            assert found.bubble_fraction == pytest.approx(
                (p - 1) / (chunks * m + p - 1)
            )


def test_four_stages_use_16_of_28_cells_with_four_microbatches_and_a_quarter_with_one() -> (
    None
):
    """Huang et al. 2019, figure 2: a triangle of P - 1 empty cells on each side, each way."""
    for name, m, used, cells in (
        ("gpipe", 4, 16, 28),
        ("1f1b", 4, 16, 28),
        ("naive", 1, 4, 16),
    ):
        timeline = simulate(pipeline(name, 4, m), Costs({"F": 1, "B": 1}))
        # Forward and backward each fill one such grid.
        assert sum(map(timeline.busy, timeline.ranks)) == 2 * used
        assert timeline.makespan * 4 == 2 * cells
    assert pytest.approx(0.571, abs=1e-3) == 16 / 28


def test_gpipe_holds_every_microbatch_and_1f1b_only_those_on_the_way() -> None:
    """Narayanan et al. 2019: at most P - r microbatches on rank r."""
    for p, m in SMALL:
        assert check(pipeline("gpipe", p, m)).held == (m,) * p
        assert check(pipeline("1f1b", p, m)).held == tuple(
            min(m, p - r) for r in range(p)
        )


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_holds_its_warm_up_and_one_more_chunk(chunks: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: (v - 1) P + 2 (P - r - 1) chunks before the first B."""
    for p, m in SMALL:
        if m % p == 0 and m > p:
            held = [
                ((chunks - 1) * p + 2 * (p - r - 1) + 1) / chunks
                for r in range(p)
            ]
            assert check(
                pipeline("interleaved", p, m, chunks)
            ).held == pytest.approx(held)


def test_zb_h1_exceeds_the_ideal_by_p_minus_1_at_the_memory_of_1f1b() -> None:
    """Qi et al. 2023, table 1: bubble (P - 1)(F + I - W), peak memory that of 1F1B."""
    for p, m in SMALL:
        program = pipeline("zb-h1", p, m)
        found = simulate(program, split_costs(p))
        if m >= p:
            assert found.makespan - found.ideal == p - 1
        assert max(check(program).held) == max(
            check(pipeline("1f1b", p, m)).held
        )


def test_zb_h2_has_no_inner_idle_at_about_twice_the_memory() -> None:
    """Qi et al. 2023, table 1: no bubble, peak memory 2P - 1 for P microbatches."""
    for p, m in SMALL:
        program = pipeline("zb-h2", p, m)
        found = simulate(program, split_costs(p))
        if m >= 2 * p - 1:
            assert [found.inner_idle(r) for r in found.ranks] == [0] * p
            assert max(check(program).held) == 2 * p - 1


def test_zb_v_has_no_inner_idle_at_the_memory_of_1f1b() -> None:
    """Qi et al. 2024 (controllable memory), section 3: V-ZB holds P microbatches on every rank."""
    for p, m in SMALL:
        program = pipeline("zb-v", p, m, 2)
        found = simulate(program, split_costs(p, 2))
        assert max(check(program).held) <= p
        if m >= 2 * p - 1:
            assert [found.inner_idle(r) for r in found.ranks] == [0] * p
            assert check(program).held == (p,) * p


def test_zb_v_keeps_embedding_and_head_on_one_rank() -> None:
    program = schedule("zb-v", 4, 8, 2)
    assert program.host == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 0}


def _steps(name: str, agree: bool, p: int = 4, m: int = 8) -> list[float]:
    """How much each further step adds when the same step is repeated."""
    chunks = 2 if name == "zb-v" else 1
    program = step(f"pp{p} {name}:{m}", p * chunks, agree=agree)
    costs = split_costs(p, chunks)
    ends = [simulate(repeat(program, k), costs).makespan for k in (1, 2, 3)]
    return [ends[1] - ends[0], ends[2] - ends[1]]


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_zero_bubble_shows_over_repeated_steps_and_a_clipping_barrier_takes_it_away(
    name: str,
) -> None:
    """Qi et al. 2023, section 4: the optimizer's synchronisation would undo the gain."""
    ideal = 3 * 8
    assert _steps(name, agree=False) == [ideal, ideal]
    held_up = _steps(name, agree=True)
    assert min(held_up) > ideal
    chunks = 2 if name == "zb-v" else 1
    alone = simulate(step(f"pp4 {name}:8", 4 * chunks), split_costs(4, chunks))
    assert held_up == [alone.makespan] * 2


def test_without_zero_bubble_a_barrier_costs_nothing_more() -> None:
    for name in ("1f1b", "zb-h1"):
        assert _steps(name, agree=False) == _steps(name, agree=True)


@pytest.mark.parametrize("name, chunks", PIPELINES)
def test_every_small_schedule_is_proved(name: str, chunks: int) -> None:
    for p, m in product(range(1, 7), range(1, 17)):
        program = pipeline(name, p, m, chunks)
        assert faults(program) == (), (p, m)
        assert len(program.host) == p * chunks
        simulate(program)


@pytest.mark.parametrize(
    "arguments, part",
    [
        (("gpipe", 0, 4), "stages is 0"),
        (("1f1b", 4, 0), "microbatches is 0"),
        (("zb-h1", 4, 4, 0), "chunks is 0"),
        (("gpipe", 4, 4, 2), "gpipe takes 1 chunks a stage, not 2"),
        (
            ("interleaved", 4, 4, 1),
            "interleaved takes 2 to 64 chunks a stage, not 1",
        ),
        (("zb-v", 4, 4, 3), "zb-v takes 2 chunks a stage, not 3"),
        (("accum", 2, 4), "accum is for one stage, not 2"),
        (
            ("naive", 4, 2),
            "naive takes the batch whole, as 1 microbatch, not 2",
        ),
        (("1fb1", 4, 4), "unknown schedule '1fb1'. Did you mean '1f1b'"),
        (("nowhere.py:f", 2, 2), "there is no file nowhere.py with 'f'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_reason(
    arguments: tuple[str, int, int], part: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        schedule(*arguments)
    assert part in str(caught.value)


def test_a_person_s_own_schedule_is_one_function(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.py"
    path.write_text(
        "from phalanx.program import Op\n"
        "def order(stages, microbatches, chunks):\n"
        "    ms = range(microbatches)\n"
        "    return [[Op(k, r, m) for k in 'FB' for m in ms] for r in range(stages)]\n"
    )
    assert schedule(f"{path}:order", 3, 4) == schedule("gpipe", 3, 4)
    with pytest.raises(ProgramError, match="has no function or class 'other'"):
        schedule(f"{path}:other", 3, 4)
    assert len(SCHEDULES) == 9


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_a_forward_beside_a_backward_stands_where_torch_has_it(p: int) -> None:
    """torch.distributed.pipelining's DualPipeV, with a whole backward as both its halves."""

    class Order(ScheduleDualPipeV):
        def __init__(self, microbatches: int) -> None:
            self.pp_group_size, self._n_microbatches, self._num_stages = (
                p,
                microbatches,
                2 * p,
            )
            self.n_local_stages = 2
            self.stage_index_to_group_rank = {
                s: min(s, 2 * p - 1 - s) for s in range(2 * p)
            }

    halves = {
        "FORWARD": "F",
        "FULL_BACKWARD": "IW",
        "BACKWARD_INPUT": "I",
        "BACKWARD_WEIGHT": "W",
    }
    for m in (2 * p, 2 * p + 1, 3 * p + 2):
        ours = schedule("dualpipe-v", p, m, 2).rows
        for rank in range(p):
            actions = Order(m)._calculate_single_rank_operations(rank)
            theirs = [
                one for a in actions if a for one in (a.sub_actions or (a,))
            ]
            assert [tuple(op[:3]) for op in ours[rank]] == [
                (kind, one.stage_index, one.microbatch_index)
                for one in theirs
                for kind in halves[one.computation_type.name]
            ]


def test_a_rank_that_is_slower_or_a_stage_that_is_dearer_sets_the_pace() -> (
    None
):
    plain = simulate(pipeline("1f1b", 4, 64), whole_costs(4))
    slow = simulate(
        pipeline("1f1b", 4, 64), Costs({"F": 1, "B": 2}, ranks={2: 2.0})
    )
    dear = simulate(
        pipeline("1f1b", 4, 64),
        Costs({"F": 1, "B": 2}, share={**shares(4, 1), 2: 2.0}),
    )
    assert slow.makespan == dear.makespan
    assert slow.ideal == 2 * plain.ideal
    assert slow.makespan > 2 * plain.ideal
