"""Programs broken on purpose: each fault is found, with the operation and the rank in its text."""

from collections.abc import Callable

import pytest
from program_worlds import (
    moved,
    per_rank,
    pipeline,
    put,
    renamed,
    step,
    swapped,
    without,
)

from phalanx.layout import Layout, Mesh, plain_pieces
from phalanx.program import (
    Op,
    Program,
    ProgramError,
    build,
    check,
    faults,
    repeat,
)
from phalanx.program.passes import matrices


def _pipe() -> Program:
    return step("pp2 1f1b:2", 4)


def _zero3() -> Program:
    return step("dp2 zero3 accum:2", 4)


def _clipped() -> Program:
    return step("dp2 zero1", 2, agree=True)


def _tied() -> Program:
    return step("dp2 pp2 1f1b:2", 4, tied=True)


def _again() -> Program:
    return step("pp2 zb-h1:3 recompute:all", 4)


def _away() -> Program:
    return step("pp2 gpipe:4 offload:activations", 4)


def _narrow() -> Program:
    """Two blocks whose matrices travel in 8 bits, between an embedding and a head."""
    return build(
        Layout.parse("dp2 zero3"), plain_pieces([range(4)], scaled=(1, 2))
    )


def _balanced() -> Program:
    """A block whose router's loss needs the choices of ranks with other tokens."""
    return build(
        Layout.parse("cp2 accum:2"),
        plain_pieces([range(4)], sums_choices=(2,)),
    )


def _muon() -> Program:
    """Matrices that ranks exchange as a whole, for an optimizer such as Muon."""
    return matrices(step("dp2 zero1", 4, agree=True), (1, 2))


def _each(text: str = "dp2 zero3") -> Program:
    return per_rank(step(text, 4))


BROKEN: dict[str, tuple[Callable[[], Program], tuple[str, ...]]] = {
    "a receive is dropped": (
        lambda: without(_pipe(), 1, "2F1<1"),
        ("rank 1: 2F1 needs 2F1<1", "rank 0: 1F1>2 is sent and never received"),
    ),
    "a send is dropped": (
        lambda: without(_pipe(), 0, "1F0>2"),
        ("rank 0: 1F0 makes what piece 2 needs, and 1F0>2 is missing", "rank 1: 2F0<1 waits for a message"),
    ),
    "two operations are swapped": (
        lambda: swapped(_pipe(), 1, "3F0", "3B0"),
        ("rank 1: 3B0 stands before 3F0, which it needs",),
    ),
    "pieces of one stage are swapped": (
        lambda: swapped(_pipe(), 0, "0F0", "1F0"),
        ("rank 0: 1F0 stands before 0F0",),
    ),
    "a value is sent before it is made": (
        lambda: moved(_pipe(), 0, "1F0>2", after="N"),
        ("rank 0: 1F0>2 stands before 1F0",),
    ),
    "the ends of a group differ in order": (
        lambda: swapped(pipeline("gpipe", 2, 2), 1, "1F0<0", "1F1<0"),
        ("rank 0 sends 0F0>1 where rank 1 receives 1F1<0",),
    ),
    "a message runs the wrong way": (
        lambda: renamed(_pipe(), 0, "1F0>2", "1B0>2"),
        ("rank 0: 1B0>2 runs the wrong way",),
    ),
    "a message skips a stage": (
        lambda: put(_pipe(), 0, "0F0>2", after="0F0"),
        ("rank 0: 0F0>2 is between pieces 0 and 2, which are not neighbours",),
    ),
    "a message stays on its rank": (
        lambda: put(_pipe(), 0, "0F0>1", after="0F0"),
        ("rank 0: 0F0>1 goes to piece 1, which is not on another rank",),
    ),
    "an operation stands twice": (
        lambda: put(_pipe(), 1, "3B0", after="3B0"),
        ("rank 1: 3B0 stands 2 times",),
    ),
    "an unknown piece is used": (
        lambda: put(_pipe(), 1, "7B0", after="3B0"),
        ("rank 1: 7B0 names piece 7, of which no rank has a forward",),
    ),
    "an operation is on the wrong rank": (
        lambda: put(_pipe(), 1, "0B0", after="3B0"),
        ("rank 1: 0B0 belongs to rank 0, which holds piece 0",),
    ),
    "a piece is on two stages": (
        lambda: put(_pipe(), 1, "0F0", after="N"),
        ("piece 0 has its forward on rank 0 and rank 1",),
    ),
    "a piece is left out": (
        lambda: Program.parse("ranks 0: 0F0 2F0 2B0 0B0\n"),
        ("piece 1 has its forward on no rank",),
    ),
    "a backward is missing": (
        lambda: without(_pipe(), 0, "0B1"),
        ("rank 0: 0F1 is followed by no backward; it needs 0B1",),
    ),
    "a weight gradient is missing": (
        lambda: without(_again(), 0, "0W1"),
        ("rank 0: 0F1 is followed by 0I1; it needs 0B1, or 0I1 and 0W1",),
    ),
    "a weight gradient comes before its input gradient": (
        lambda: swapped(_again(), 0, "1W0", "1I0"),
        ("rank 0: 1W0 stands before 1I0",),
    ),
    "a gather is missing": (
        lambda: without(_zero3(), 0, "2G#1"),
        ("rank 0 (and 1 more): 2B0 needs the weights of unit 2: a 2G must come before it",),
    ),
    "scales are agreed on after the gather that needs them": (
        lambda: moved(_narrow(), 0, "1M", after="1G"),
        ("rank 0 (and 1 more): 1G needs 1M before it, after the last update",),
    ),
    "a backward does not wait for the choices of other ranks": (
        lambda: moved(_balanced(), 0, "2C1", after="2B1"),
        ("rank 0 (and 1 more): 2B1 stands before 2C1, which it needs",),
    ),
    "the choices of a microbatch are not summed": (
        lambda: without(_balanced(), 0, "2C1"),
        ("rank 0 (and 1 more): 2B1 needs 2C1, which is missing",),
    ),
    "a unit is used after its drop": (
        lambda: moved(_zero3(), 0, "1D", after="0F0"),
        ("rank 0 (and 1 more): 1F0 needs the weights of unit 1",),
    ),
    "a drop is missing": (
        lambda: without(_zero3(), 0, "1D"),
        ("rank 0 (and 1 more): 1G#1 gathers unit 1, which is already there",),
    ),
    "gathered weights are left over": (
        lambda: without(_zero3(), 0, "0D#2"),
        ("rank 0 (and 1 more): unit 0 is still gathered at the end; 0D is missing",),
    ),
    "a unit is dropped that is not there": (
        lambda: put(_zero3(), 0, "2D#7", after="2D"),
        ("rank 0 (and 1 more): 2D#7 needs a gather of unit 2 before it",),
    ),
    "a gradient is summed twice": (
        lambda: put(_clipped(), 0, "1S#1", after="1S"),
        ("rank 0 (and 1 more): 1S#1 needs a gradient of unit 1 not yet summed",),
    ),
    "a gradient is never summed": (
        lambda: without(_clipped(), 0, "1S"),
        ("1 gradients of unit 1 are never summed: 1S is missing", "rank 0 (and 1 more): 1U needs the sum 1S"),
    ),
    "one of two microbatches comes after the sum": (
        lambda: moved(_zero3(), 0, "3S#1", after="3S"),
        ("rank 0 (and 1 more): 3S#1 needs a gradient of unit 3", "3U needs the sum 3S of 3B1 before it"),
    ),
    "an update is missing": (
        lambda: without(_clipped(), 0, "1U"),
        ("rank 0 (and 1 more): unit 1 has gradients and no update 1U",),
    ),
    "a unit is updated twice": (
        lambda: put(_clipped(), 0, "1U#1", after="1U"),
        ("rank 0 (and 1 more): unit 1 is updated 2 times in one step", "1U#1 needs the sum 1S"),
    ),
    "an update comes before the last backward": (
        lambda: moved(_zero3(), 0, "3U", after="3S"),
        ("rank 0 (and 1 more): 3F1 uses unit 3 after its update 3U", "3B1 uses unit 3 after its update"),
    ),
    "an update does not wait for the agreement": (
        lambda: moved(_clipped(), 0, "1U", after="1S"),
        ("rank 0 (and 1 more): 1U needs A before it",),
    ),
    "a sum comes after the agreement": (
        lambda: moved(_clipped(), 0, "A", after="1S"),
        ("rank 0 (and 1 more): 0U needs A before it, after every sum",),
    ),
    "the loss does not wait for the count": (
        lambda: moved(_clipped(), 0, "N", after="1B0"),
        ("rank 0 (and 1 more): 1B0 needs N before it",),
    ),
    "a tied gradient is not summed over its stages": (
        lambda: without(_tied(), 1, "0T"),
        ("rank 1 (and 1 more): pieces 0 and 3 use unit 0; 0T must occur 1 times, not 0",),
    ),
    "a tied gradient is summed before its sum is finished": (
        lambda: put(put(without(_tied(), 0, "0S", "0T"), 0, "0S", after="0B0"), 0, "0T", after="0S"),
        ("rank 0 (and 1 more): 1 gradients of unit 0 are never summed", "0U needs the sum 0S of 0B1"),
    ),
    "a sum comes after the tie": (
        lambda: put(put(_tied(), 0, "0S#1", after="0B0"), 0, "0T#1", after="0S#1"),
        ("rank 0 (and 1 more): 0S stands after 0T, which adds finished sums",),
    ),
    "a recomputation has no backward": (
        lambda: renamed(_again(), 0, "0R1", "0R7"),
        ("rank 0: 0R7 needs 0F7", "rank 0: 0R7 brings back what no backward uses"),
    ),
    "a backward comes before its recomputation": (
        lambda: swapped(_again(), 0, "1R0", "1I0"),
        ("rank 0: 1I0 stands before 1R0",),
    ),
    "what went out to the host never comes back": (
        lambda: without(_away(), 0, "1Z0"),
        ("rank 0: 1B0 needs 1Z0", "rank 0: 1O0 moves out what 1Z0 never brings back"),
    ),
    "what never went out is brought back": (
        lambda: without(_away(), 0, "1O0"),
        ("rank 0: 1Z0 needs 1O0, which is missing",),
    ),
    "one member of a group does not call": (
        lambda: without(_each("dp2 zero1"), 1, "1S", "1U"),
        ("rank 0: 1S is a call that rank 1 of its group never makes",),
    ),
    "a microbatch's sum is not summed over the replicas": (
        lambda: without(step("dp2x2 zero2 accum:2", 4), 0, "2H#1"),
        ("rank 0 (and 3 more): 2S#1 needs 2H#1 in the same step",),
    ),
    "matrices do not come back from their owners": (
        lambda: without(_muon(), 0, "1V"),
        ("rank 0 (and 1 more): 1Y needs 1V in the same step",),
    ),
    "matrices come back that were not sent": (
        lambda: without(_muon(), 0, "1Y"),
        ("rank 0 (and 1 more): 1V needs 1Y in the same step",),
    ),
    "what is recomputed was never computed": (
        lambda: without(step("pp2 gpipe:2 recompute:every=2", 4), 1, "3F1"),
        ("rank 1: 3R1 computes again what no 3F1 has computed",),
    ),
    "one rank does not agree": (
        lambda: without(step("pp2 1f1b:2", 2, agree=True), 1, "A"),
        ("rank 0: A is a call that rank 1 of its group never makes",),
    ),
    "members of a group call in another order": (
        lambda: moved(_each(), 1, "2G", after="N"),
        ("deadlock. rank 0 waits at 0F0 for 0G, rank 1 waits at 0F0 for 0G",),
    ),
    "two groups wait on each other across rows": (
        lambda: swapped(_two_ties(), 1, "0T", "1T"),
        ("deadlock. rank 0 waits at 0U for 0T, rank 1 waits at 0U for 0T",),
    ),
    "ranks that compute together follow different lists": (
        lambda: per_rank(step("tp2", 2)),
        ("ranks 0, 1 compute the same pieces together (tp) but follow 2 different lists",),
    ),
    "one list serves two pipelines that differ": (
        lambda: Program(
            (*_pipe().rows, _pipe().rows[1]), Mesh.parse("dp2 pp2"), (0, 1, 0, 2)
        ),
        ("ranks 0 and 2 follow one list, but the other stages of their pipelines follow different ones",),
    ),
}  # fmt: skip


def _two_ties() -> Program:
    """Two weights that both stages hold: two sums between the same two ranks."""
    text = (
        "mesh pp2\ntied 2:0\ntied 3:1\n"
        "ranks 0: 0F0 1F0 1F0>2 1B0<2 1B0 0B0 0S 1S 0T 1T 0U 1U\n"
        "ranks 1: 2F0<1 2F0 3F0 3B0 2B0 2B0>1 0S 1S 2S 3S 0T 1T 0U 1U 2U 3U\n"
    )
    return Program.parse(text)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_program_is_caught_with_operation_and_rank(name: str) -> None:
    make, parts = BROKEN[name]
    found = faults(make())
    assert found
    for part in parts:
        assert any(part in fault for fault in found), (part, found)
    with pytest.raises(ProgramError, match=r"rank|piece"):
        check(make())


def test_the_programs_that_were_broken_were_whole() -> None:
    whole = (
        _pipe(), _zero3(), _clipped(), _tied(), _again(), _away(), _each(), _each("dp2 zero1"),
        _narrow(), _balanced(),
        _two_ties(), step("pp2 1f1b:2", 2, agree=True), step("tp2", 2), pipeline("gpipe", 2, 2),
    )  # fmt: skip
    for program in whole:
        assert faults(program) == ()
    assert len(BROKEN) >= 20


def test_every_single_operation_of_a_step_is_needed() -> None:
    """Take away any one operation: something is missing then, and the proof says so."""
    for program in (
        _pipe(),
        _clipped(),
        _tied(),
        _again(),
        _away(),
        step("dp2 zero3", 4),
    ):
        for row, ops in enumerate(program.rows):
            for op in ops:
                if op.kind in "NAR":
                    # another program, as good: no count, no clipping, all of it kept
                    continue
                broken = without(program, row, str(op))
                assert faults(broken), f"{op} on row {row} is not missed"


def test_a_deadlock_is_named_rank_by_rank() -> None:
    """The input of the last stage is sent only after its gradient: nobody can begin a backward."""
    program = moved(pipeline("1f1b", 4, 4), 2, "2F0>3", after="2B0")
    program = moved(program, 2, "2F1>3", after="2F0>3")
    assert faults(program) == (
        "deadlock. rank 0 waits at 0B0 for 0B0<1, rank 1 waits at 1B0 for 1B0<2,"
        " rank 2 waits at 2B0 for 2B0<3, rank 3 waits at 3F0 for 3F0<2.",
    )


def test_a_validation_of_forwards_alone_is_a_program() -> None:
    forwards = pipeline("gpipe", 3, 4).with_rows(
        [op for op in row if op.kind == "F" or op.of == "F"]
        for row in pipeline("gpipe", 3, 4).rows
    )
    assert faults(forwards) == ()
    assert faults(without(forwards, 1, "1F2<0"))


def test_ranks_of_dp_may_follow_lists_of_their_own() -> None:
    """A person may write one list for each rank; groups then join the stages of one pipeline."""
    for text in (
        "dp2 pp2 1f1b:3 zero1",
        "pp2 dp2 gpipe:2 zero3 gather:micro",
        "dp3 zero2 accum:2",
    ):
        apart = per_rank(step(text, 6, tied=True, agree=True))
        assert faults(apart) == ()
    uneven = per_rank(step("dp2 pp2 1f1b:3", 4))
    for row, pieces in ((0, (0, 1)), (1, (2, 3))):
        gone = [
            op
            for op in uneven.rows[row]
            if op.index == 2 and op.kind in "FB<>"
        ]
        assert {op.piece for op in gone} == set(pieces)
        uneven = without(uneven, row, *map(str, gone))
    # one replica has a microbatch less: the token count makes it right
    assert faults(uneven) == ()


def test_repeated_steps_are_a_program_too() -> None:
    for text in (
        "dp2 pp2 1f1b:3 zero1",
        "dp2 zero3",
        "pp2 zb-h2:4 zero3 gather:micro dp2",
        "dp2",
    ):
        for agree in (False, True):
            for tied in (False, True):
                program = repeat(step(text, 4, agree=agree, tied=tied), 3)
                assert faults(program) == ()
    stale = without(repeat(step("dp2 zero1", 2), 2), 0, "1G#1")
    assert any(
        "1F1 needs the weights of unit 1" in fault for fault in faults(stale)
    )
    old = without(repeat(_narrow(), 2), 0, "1M#1")
    assert any(
        "1G#2 needs 1M before it, after the last update" in fault
        for fault in faults(old)
    )
    lost = without(repeat(_clipped(), 2), 0, "A#1")
    assert any("1U#1 needs A before it" in fault for fault in faults(lost))


def test_all_faults_are_told_at_once() -> None:
    program = without(without(_pipe(), 0, "0B1"), 1, "3S", "2F1<1")
    found = faults(program)
    assert len(found) >= 4
    with pytest.raises(ProgramError) as caught:
        check(program)
    assert str(caught.value).splitlines() == list(found)
    assert Op.parse("0B1") not in program.rows[0]
