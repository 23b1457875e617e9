"""Each pass by what it promises of the list it returns."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from program_worlds import pipeline, step

from phalanx.layout import Layout, plain_pieces
from phalanx.program import (
    Op,
    Program,
    ProgramError,
    Sizes,
    StepOptions,
    build,
    check,
    faults,
    ops,
    schedule,
)
from phalanx.program.build import forward_only
from phalanx.program.memory import peaks
from phalanx.program.passes import (
    _with_segments,
    expand,
    finish,
    gather,
    messages,
    offload_activations,
    recompute,
    recompute_to_fit,
    reduce,
    tie,
)

LINE = [range(8)]


def _one(pieces: int = 8, microbatches: int = 2) -> Program:
    return expand(schedule("accum", 1, microbatches), [range(pieces)])


def _kinds(program: Program, kinds: str) -> list[list[str]]:
    return [
        [str(op) for op in row if op.kind in kinds] for row in program.rows
    ]


def test_ranks_agree_on_scales_once_a_step_and_before_they_compute() -> None:
    for text in (
        "dp2 zero1",
        "dp2 zero3 accum:3",
        "dp2 pp2 zero3 1f1b:2 gather:micro",
    ):
        layout = Layout.parse(text)
        stages = [range(3), range(3, 6)] if layout.pp > 1 else [range(6)]
        pieces = plain_pieces(stages, scaled=(1, 2, 3, 4))
        program = build(layout, pieces)
        check(program)
        for row, stage in zip(program.rows, stages, strict=True):
            blocks = [f"{unit}M" for unit in stage if unit in pieces.scaled]
            assert [str(op) for op in row[: 1 + len(blocks)]] == ["N", *blocks]
            assert sum(op.kind == "M" for op in row) == len(blocks)
        plain = build(layout, plain_pieces(stages))
        assert [
            [op for op in row if op.kind != "M"] for row in program.rows
        ] == [[*row] for row in plain.rows]
        forwards = forward_only(program, layout)
        check(forwards)
        assert [r.count(Op("M", 1)) for r in forwards.rows] == [
            r.count(Op("M", 1)) for r in program.rows
        ]


def test_choices_are_summed_behind_each_forward_however_often_it_is_computed() -> (
    None
):
    for text in (
        "cp2 accum:2",
        "cp2 accum:2 recompute:all",
        "cp2 pp2 zb-h2:3",
        "ep2 cp2 overlap accum:2",
    ):
        layout = Layout.parse(text)
        stages = [range(3), range(3, 6)] if layout.pp > 1 else [range(6)]
        experts = (2,) if layout.ep > 1 else ()
        program = build(
            layout, plain_pieces(stages, receivers=experts, sums_choices=(1,))
        )
        check(program)
        for row in program.rows:
            words = [
                str(op)
                for op in row
                if op.kind == "C" or op.kind in ops.COMPUTES
            ]
            forwards = [
                n for n, word in enumerate(words) if word.startswith("1F")
            ]
            assert [words[n + 1] for n in forwards] == [
                words[n].replace("F", "C") for n in forwards
            ]
            assert sum(op.kind == "C" for op in row) == len(forwards)
        assert not any(
            op.kind == "C"
            for row in forward_only(program, layout).rows
            for op in row
        )


@pytest.mark.parametrize(
    "text", ["dp2 pp2 zero1 1f1b:2", "dp2 zero3 accum:2", "dp2 zero2 accum:2"]
)
def test_frozen_units_are_gathered_at_most_and_never_summed_or_updated(
    text: str,
) -> None:
    layout = Layout.parse(text)
    stages = [range(3), range(3, 6)] if layout.pp > 1 else [range(6)]
    program = build(
        layout, plain_pieces(stages, tied=((5, 0),), frozen=(0, 1, 5))
    )
    check(program)
    assert Program.parse(str(program)) == program
    units = {
        kind: {
            op.piece for row in program.rows for op in row if op.kind == kind
        }
        for kind in "GSUT"
    }
    assert units["S"] == units["U"] == {2, 3, 4}
    assert units["G"] == (
        {0, 1, 2, 3, 4, 5} if layout.zero == 3 else {2, 3, 4}
    )
    assert units["T"] == set()
    plain = build(layout, plain_pieces(stages, tied=((5, 0),)))
    sizes = Sizes.counts(6)
    for some, every in zip(
        peaks(program, sizes), peaks(plain, sizes), strict=True
    ):
        assert some.kinds["gradients"] <= every.kinds["gradients"]
    assert sum(p.kinds["gradients"] for p in peaks(program, sizes)) < sum(
        p.kinds["gradients"] for p in peaks(plain, sizes)
    )


def test_stages_become_their_pieces_and_backward_goes_down() -> None:
    program = expand(schedule("zb-h1", 2, 1), [range(2), range(2, 5)])
    assert _kinds(program, "FIW") == [
        ["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"],
        ["2F0", "3F0", "4F0", "4I0", "3I0", "2I0", "4W0", "3W0", "2W0"],
    ]


def test_a_send_follows_its_value_and_a_receive_stands_one_computation_ahead() -> (
    None
):
    for name, m in product(("gpipe", "1f1b", "zb-h1", "zb-h2"), (1, 2, 5)):
        for row in pipeline(name, 4, m).rows:
            works = [op for op in row if op.kind in "FBIW"]
            for i, op in enumerate(row):
                if op.kind == ">":
                    made = [o for o in row[:i] if o.kind in "FBIW"][-1]
                    assert made == Op(op.of, op.piece, op.index)
                if op.kind == "<":
                    user = Op(op.of, op.piece, op.index)
                    earlier = [o for o in row[i:] if o.kind in "FBIW"]
                    # Sooner only where an earlier message of the same group comes even sooner.
                    assert earlier.index(user) <= 1 or _behind(row, i)
                    assert user in works


def _behind(row: tuple[Op, ...], i: int) -> bool:
    """Whether another receive of the same flow stands directly with this one."""
    near = [o for o in row[i + 1 :] if o.kind in "<FBIW"]
    return bool(near) and near[0].kind == "<"


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 8])
def test_gathers_run_ahead_by_the_prefetch_distance_and_the_pool_has_one_more(
    prefetch: int,
) -> None:
    for pieces, m in product((1, 2, 3, 5), (1, 2, 3)):
        program = gather(
            _one(pieces, m), each_use=True, drop=True, prefetch=prefetch
        )
        assert faults(program) == ()
        assert _most_gathered(program, 0) <= min(prefetch + 1, pieces)
        if m > 1 or pieces > 2:
            assert _most_gathered(program, 0) == min(prefetch + 1, pieces)
        once = step(f"dp2 zero1 accum:{m} prefetch:{prefetch}", pieces)
        # The count of tokens.
        before = [op.kind for op in once.rows[0]].index("F") - 1
        assert before == (pieces if prefetch else 1)
        assert check(program).counts[0].kinds["gathered"] == _most_gathered(
            program, 0
        )


def _most_gathered(program: Program, row: int) -> int:
    now: set[int] = set()
    most = 0
    for op in program.rows[row]:
        if op.kind == "G":
            now.add(op.piece)
        elif op.kind == "D":
            now.remove(op.piece)
        most = max(most, len(now))
    return most


def test_the_proof_counts_the_pool_of_every_layout() -> None:
    texts = (
        "dp2 zero3 prefetch:2", "dp2 pp2 1f1b:4 zero3 gather:micro", "dp2 pp2 zb-v:4 zero3",
        "dp2 zero1", "pp3 interleaved2:4 dp2 zero3 gather:micro prefetch:3",
    )  # fmt: skip
    for text, tied in product(texts, (False, True)):
        program = step(text, 12, tied=tied)
        proof = check(program)
        for row in range(len(program.rows)):
            assert proof.counts[row].kinds["gathered"] == _most_gathered(
                program, row
            )


def test_the_last_block_is_not_dropped_between_forward_and_backward() -> None:
    (row,) = _kinds(gather(_one(4, 1), each_use=True, drop=True), "FBGD")
    forward = "0G 1G 0F0 0D 2G 1F0 1D 3G 2F0 2D 2G#1 3F0"
    assert (
        " ".join(row)
        == forward + " 3B0 3D 1G#1 2B0 2D#1 0G#1 1B0 1D#1 0B0 0D#1"
    )


def test_gathering_once_a_step_fetches_each_unit_once_and_drops_it_after_its_last_use() -> (
    None
):
    kept = gather(_one(4, 3), each_use=False, drop=False)
    assert _kinds(kept, "GD") == [["0G", "1G", "2G", "3G"]]
    dropped = gather(_one(4, 3), each_use=False, drop=True)
    assert _kinds(dropped, "GD") == [
        ["0G", "1G", "2G", "3G", "3D", "2D", "1D", "0D"]
    ]
    assert faults(kept) == faults(dropped) == ()


def test_weights_are_not_needed_for_weight_gradients() -> None:
    """W multiplies its input by its output's gradient: the drop may stand before it."""
    program = gather(
        expand(schedule("zb-h2", 1, 1), LINE), each_use=True, drop=True
    )
    row = program.rows[0]
    assert row.index(Op.parse("3D#1")) < row.index(Op.parse("3W0"))


def test_gradients_are_summed_once_a_step_or_once_a_microbatch() -> None:
    for name in ("accum", "1f1b", "zb-h2"):
        stages, m = (1, 3) if name == "accum" else (2, 3)
        base = pipeline(name, stages, m)
        for each, times, replicas in (
            (False, 1, False),
            (True, m, False),
            (True, m, True),
        ):
            program = reduce(base, each_microbatch=each, replicas=replicas)
            assert faults(finish(program, agree=False)) == ()
            for number, row in enumerate(program.rows):
                sums = [op for op in row if op.kind == "S"]
                assert sums == [Op("S", number, n) for n in range(times)]
                # The stage before waits for the message, nobody for the sum.
                last = max(i for i, op in enumerate(row) if op.kind in "BW")
                after = [op.kind for op in row[last + 1 :]]
                waits = [">"] * (name == "1f1b" and number == 1) + [
                    "H"
                ] * replicas
                assert after == [*waits, "S"] + ["H"] * replicas


def test_a_tied_unit_is_summed_after_both_uses_and_over_both_stages_once() -> (
    None
):
    one = step("dp2 accum:2", 4, tied=True)
    assert [
        str(op) for op in one.rows[0] if op.kind in "ST" and op.piece == 0
    ] == ["0S"]
    assert one.rows[0].index(Op.parse("0S")) > one.rows[0].index(
        Op.parse("0B1")
    )
    two = step("dp2 pp2 1f1b:2", 4, tied=True)
    for row in two.rows:
        assert [
            str(op) for op in row if op.piece == 0 and op.kind in "STU"
        ] == [
            "0S",
            "0T",
            "0U",
        ]
    three = expand(
        schedule("1f1b", 3, 2),
        [range(1), range(1, 2), range(2, 3)],
        ((1, 0), (2, 0)),
    )
    tied = finish(
        tie(reduce(messages(three), each_microbatch=False)), agree=False
    )
    assert faults(tied) == ()
    assert all(sum(op.kind == "T" for op in row) == 1 for row in tied.rows)


def test_updates_wait_for_everybody_only_when_clipping_or_scaling() -> None:
    """Else an update follows the second reduction after its own, which had to wait for it."""
    free, held = (step("dp2", 4, agree=agree) for agree in (False, True))
    (early,), (late,) = (_kinds(program, "NBSAU") for program in (free, held))
    assert " ".join(early) == "N 3B0 3S 2B0 2S 1B0 1S 3U 0B0 0S 2U 1U 0U"
    assert " ".join(late) == "N 3B0 3S 2B0 2S 1B0 1S 0B0 0S A 3U 2U 1U 0U"


def test_what_a_forward_kept_goes_out_and_comes_back_one_computation_before_its_use() -> (
    None
):
    program = offload_activations(expand(schedule("gpipe", 1, 2), [range(3)]))
    assert [" ".join(map(str, program.rows[0]))] == [
        "0F0 0O0 1F0 1O0 2F0 2O0 0F1 0O1 1F1 1O1 2Z0 2F1 2O1 1Z0 2B0 0Z0 1B0 2Z1 0B0 1Z1 2B1 0Z1 1B1 0B1"
    ]


def test_nothing_goes_out_that_is_used_at_once() -> None:
    (row,) = offload_activations(_one(3, 1)).rows
    assert {op.piece for op in row if op.kind == "O"} == {0, 1}
    assert faults(offload_activations(_one(3, 1))) == ()


def test_what_is_used_after_one_other_computation_stays() -> None:
    """1F1B by hand. Out takes the time of a computation, and back the time of another: with fewer than two
    between forward and backward the rank would wait for its own copies."""
    stages = [range(n, n + 1) for n in range(3)]
    program = offload_activations(expand(schedule("1f1b", 3, 4), stages))
    assert [" ".join(map(str, row)) for row in program.rows] == [
        "0F0 0O0 0F1 0O1 0Z0 0F2 0O2 0B0 0Z1 0F3 0O3 0Z2 0B1 0Z3 0B2 0B3",
        "1F0 1F1 1O1 1B0 1Z1 1F2 1O2 1B1 1Z2 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_inside_a_recomputed_segment_there_is_nothing_to_move_out() -> None:
    again = recompute(_one(8, 1), LINE, "every=4")
    assert {op.piece for op in again.rows[0] if op.kind == "R"} == {0, 1, 2, 3}
    program = offload_activations(again)
    assert faults(program) == ()
    # The last segment is fresh and kept whole; of the first one only its input is there to move.
    assert {op.piece for op in program.rows[0] if op.kind == "O"} == {
        0,
        4,
        5,
        6,
    }


@pytest.mark.parametrize(
    ("pieces", "mode", "lengths"),
    [
        (5, "every=2", (2, 2, 1)), (7, "every=3", (3, 3, 1)), (8, "every=3", (3, 3, 2)),
        (7, "every=4", (4, 3)), (3, "every=5", (3,)), (6, "every=3", (3, 3)),
        # The root of 7 rounds to 3, that of 8 to 3, that of 6 to 2.
        (7, "sqrt", (3, 3, 1)), (8, "sqrt", (3, 3, 2)), (6, "sqrt", (2, 2, 2)),
    ],
)  # fmt: skip
def test_the_last_segment_of_a_stage_is_computed_again_also_where_it_is_shorter(
    pieces: int, mode: str, lengths: tuple[int, ...]
) -> None:
    """On both stages of a GPipe of three microbatches. A segment is computed right before its backward,
    the last one first; but not the last stage's last microbatch, whose forward was just computed."""
    stages, microbatches = [range(pieces), range(pieces, 2 * pieces)], 3
    program = recompute(
        expand(schedule("gpipe", 2, microbatches), stages), stages, mode
    )
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    backwards = []
    for start, length in list(zip(starts, lengths, strict=True))[::-1]:
        segment = range(start, start + length)
        backwards += [f"{p}R{{0}}" for p in segment] + [
            f"{p}B{{0}}" for p in segment[::-1]
        ]
    every = [op.format(m) for m in range(microbatches) for op in backwards]
    row, last = (" ".join(ops) for ops in _kinds(program, "RB"))
    assert row == " ".join(every)
    first = program.rows[1].index(Op("B", 2 * pieces - 1, 0))
    assert program.rows[1][first - 1].kind == "R"
    again = microbatches * pieces
    assert sum(word[-2] == "R" for word in last.split()) == again
    # Kept: each segment's input for each microbatch, and one segment while its backward runs.
    for peak in peaks(program, Sizes.counts(2 * pieces)):
        assert peak.kinds["inputs"] == microbatches * len(lengths)
        assert peak.kinds["activations"] == max(lengths)


def test_a_last_segment_that_was_just_computed_is_not_computed_again() -> None:
    for pieces, every, fresh in ((5, 2, 1), (8, 3, 2), (6, 3, 3)):
        (row,) = recompute(
            _one(pieces, 1), [range(pieces)], f"every={every}"
        ).rows
        again = [op.piece for op in row if op.kind == "R"]
        assert sorted(again) == [*range(pieces - fresh)]


@pytest.mark.parametrize(
    ("mode", "segments"),
    [
        ("every=4", [range(8), range(8, 12)]),
        # The root of 6 rounds to 2.
        (
            "sqrt",
            [range(2), range(2, 8), range(8, 12)],
        ),
    ],
)
def test_a_segment_counts_the_three_pieces_of_a_block_with_experts_as_one(
    mode: str, segments: list[range]
) -> None:
    """An embedding, a dense block, three blocks with experts of three pieces each, a head: six in all."""
    stages, experts = [range(12)], (3, 6, 9)
    program = recompute(
        expand(schedule("gpipe", 1, 2), stages), stages, mode, experts
    )
    again = [
        op.piece for op in program.rows[0] if op.kind == "R" and op.index == 0
    ]
    assert again == [piece for segment in segments[::-1] for piece in segment]


def test_a_part_of_each_block_is_recomputed_before_its_backward() -> None:
    program = recompute(_one(4, 2), LINE, "selective")
    assert [" ".join(map(str, row)) for row in program.rows] == [
        "0F0 1F0 2F0 3F0 3B0 2P0 2B0 1P0 1B0 0B0 0F1 1F1 2F1 3F1 3B1 2P1 2B1 1P1 1B1 0B1"
    ]
    stages = [range(n, n + 1) for n in range(3)]
    split = recompute(
        expand(schedule("zb-h1", 3, 4), stages), stages, "selective"
    )
    again = {
        n: [op for op in row if op.kind == "P"]
        for n, row in enumerate(split.rows)
    }
    assert again == {0: [], 1: [Op("P", 1, m) for m in range(4)], 2: []}
    for op in again[1]:
        assert split.rows[1].index(op) + 1 == split.rows[1].index(
            Op("I", 1, op.index)
        )


def _sizes(pieces: int, kept: float = 10, entry: float = 1) -> Sizes:
    return Sizes(kept=(kept,) * pieces, input=(entry,) * pieces)


def test_recompute_to_fit_recomputes_more_on_the_early_stages_of_1f1b() -> (
    None
):
    """Rank r of 1F1B holds P - r microbatches, so the early stages run out of memory first."""
    stages = [range(4 * r, 4 * r + 4) for r in range(4)]
    program = expand(schedule("1f1b", 4, 8), stages)
    found = recompute_to_fit(program, _sizes(16), [70] * 4)
    again = [
        len({op.piece for op in row if op.kind == "R"}) for row in found.rows
    ]
    assert again == sorted(again, reverse=True)
    assert again[0] > again[1] > again[2] > again[3] == 0
    assert all(
        peak.total <= 70
        for peak in check(messages(found), _sizes(16)).bytes or ()
    )


def test_recompute_to_fit_recomputes_no_piece_too_many() -> None:
    """Against all subsets of two stages: no smaller number of pieces fits."""
    stages = [range(3), range(3, 6)]
    sizes = Sizes(kept=(5, 9, 2, 7, 7, 3), input=(1, 2, 1, 1, 3, 1))
    program = expand(schedule("1f1b", 2, 4), stages)
    for limit in (14, 18, 22, 26, 30, 34):
        try:
            found = recompute_to_fit(program, sizes, [limit] * 2)
        except ProgramError:
            found = None
        for row, stage in enumerate(stages):
            subsets = [c for n in range(4) for c in combinations(stage, n)]
            fitting = [
                len(c)
                for c in subsets
                if _peak_with(program, sizes, row, c) <= limit
            ]
            if found is not None:
                assert len(
                    {op.piece for op in found.rows[row] if op.kind == "R"}
                ) == min(fitting)
        if found is None:
            everything = [
                _peak_with(program, sizes, r, s) for r, s in enumerate(stages)
            ]
            assert max(everything) > limit


def _peak_with(
    program: Program, sizes: Sizes, row: int, pieces: Sequence[int]
) -> float:
    chosen = [
        [range(p, p + 1) for p in pieces] if r == row else [] for r in range(2)
    ]
    return peaks(_with_segments(program, chosen), sizes)[row].total


def test_a_limit_that_nothing_meets_is_refused_with_rank_bytes_and_operation() -> (
    None
):
    program = expand(schedule("1f1b", 2, 4), [range(2), range(2, 4)])
    with pytest.raises(
        ProgramError, match=r"rank 0 holds 13 bytes at 1R0 .* the limit is 5"
    ):
        recompute_to_fit(program, _sizes(4), [5, 100])


def test_fit_counts_the_gathered_weights_and_gradients_that_later_passes_add() -> (
    None
):
    layout = Layout.parse("dp2 pp2 1f1b:4 zero3 recompute:fit")
    one = (1.0,) * 8
    sizes = Sizes(
        kept=(4.0,) * 8,
        input=one,
        gathered=(3.0,) * 8,
        gradient=one,
        gradient_shard=one,
    )
    stages = [range(4), range(4, 8)]
    whole = build(
        Layout.parse("dp2 pp2 1f1b:4 zero3"),
        plain_pieces(stages),
        StepOptions(agree=False),
    )
    high = max(peak.total for peak in check(whole, sizes).bytes or ())
    for limit in (high, high - 4, high - 8):
        found = build(
            layout,
            plain_pieces(stages),
            StepOptions(agree=False, sizes=sizes, limit=limit),
        )
        assert (
            max(peak.total for peak in check(found, sizes).bytes or ())
            <= limit
        )
    assert (
        build(
            layout,
            plain_pieces(stages),
            StepOptions(agree=False, sizes=sizes, limit=high),
        )
        == whole
    )
    with pytest.raises(ProgramError, match="recompute:fit needs the bytes"):
        build(layout, plain_pieces(stages), StepOptions(agree=False))
