"""What is said of ranks that stand still, by hand-made positions; and positions read by another."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace

import pytest

from rank_watch import Positions, RankState, diagnose
from rank_watch.positions import DEVICE, OP, STEP, WAITS
from rank_watch.processes import Process, started_at
from rank_watch.rank_state import pack, unpack
from rank_watch.reader import Made, PositionReader

GROUP = ("tp", (0, 1, 2), 0)


def made(
    number: int,
    nth: int,
    text: str = "all_reduce(sum) of 8 float32",
    op: str = "7F3",
) -> Made:
    return Made(number, GROUP, text, op, -1, False, nth)


def rank(number: int, still: float = 61.0, **more: object) -> RankState:
    plain = RankState(
        number, "a", 100 + number, 3, "in a step", "", "7F3 (forward of layers.6, microbatch 3)", still,
        0.2, 0, "S", "asleep in futex (a lock)",
    )  # fmt: skip
    return replace(plain, **more)  # type: ignore[arg-type]


def here() -> Process:
    return Process(os.getpid(), started_at(os.getpid()))


def waiting(number: int, *calls: Made, still: float = 61.0) -> RankState:
    return rank(number, still, waits=calls[-1].number, calls=calls)


def test_the_rank_that_all_wait_for_is_named_with_the_call_it_should_be_in() -> (
    None
):
    late = rank(
        2, phase="loading data", note="tokens.bin", op="", calls=(made(1, 0),), state="D",
        doing="waits for a disk or the kernel in read of /data/tokens.bin",
        stack=('File "batches.py", line 88 in rows',),
    )  # fmt: skip
    found = diagnose(
        [waiting(0, made(1, 0), made(2, 1)), waiting(1, made(2, 1)), late],
        60.0,
    )
    assert found.hangs
    assert found.ranks == (2,)
    assert (
        "rank 2 should be in all_reduce(sum) of 8 float32 on tp of 7F3; it has been loading data"
        " (tokens.bin) for 61 s" in found.text
    )
    assert "read of /data/tokens.bin" in found.text
    assert "batches.py" in found.text
    assert (
        "ranks 0-1 wait for rank 2, in all_reduce(sum) of 8 float32 on tp of 7F3"
        in found.text
    )
    assert len(found.lines) <= 24


def test_nothing_hangs_before_the_timeout_and_the_longest_operation_have_passed() -> (
    None
):
    late = rank(2, 60.1)
    assert not diagnose([waiting(0, made(1, 0)), late], 60.0).hangs
    assert diagnose(
        [waiting(0, made(1, 0)), replace(late, still=60.3)], 60.0
    ).hangs


@pytest.mark.parametrize(
    "phase", ["saving", "compiling", "starting", "reading a checkpoint"]
)
def test_who_saves_or_compiles_is_mentioned_and_left_alone(phase: str) -> None:
    others = [
        waiting(0, made(1, 0), still=300.0),
        waiting(1, made(1, 0), still=300.0),
    ]
    found = diagnose([*others, rank(2, 300.0, phase=phase, op="")], 60.0)
    assert not found.hangs
    assert f"rank 2 has been {phase} for 300 s" in found.text
    assert diagnose([*others, rank(2, 5000.0, phase=phase, op="")], 60.0).hangs


def test_a_rank_that_was_stopped_alone_is_told_at_once_and_all_of_them_are_left() -> (
    None
):
    stopped = [rank(n, 0.0, state="T", held=4.0) for n in range(3)]
    assert not diagnose(stopped, 60.0).hangs  # as after Ctrl-Z
    found = diagnose([waiting(0, made(1, 0), still=4.0), stopped[1]], 60.0)
    assert found.ranks == (1,)
    assert "it has been stopped (SIGSTOP) for 4 s, at 7F3" in found.text


def test_ranks_that_wait_for_each_other_are_told_the_first_call_that_differs() -> (
    None
):
    barrier = made(2, 1, "barrier", "")
    sides = [waiting(n, made(1, 0), made(2, 1), made(3, 2)) for n in (0, 1)]
    found = diagnose([*sides, waiting(2, made(1, 0), barrier)], 60.0)
    assert found.hangs
    # Two stand in call 2 and one in call 1, which is another there.
    assert "the first that differs is call 1 of tp" in found.text
    assert "rank 2: barrier" in found.text
    assert "ranks 0-1: all_reduce(sum) of 8 float32 of 7F3" in found.text


def test_a_rank_that_waits_for_its_gpu_waits_for_those_that_do_not() -> None:
    found = diagnose(
        [rank(0, waits=DEVICE), rank(1, waits=DEVICE), rank(2)], 60.0
    )
    assert found.ranks == (2,)


def test_a_rank_that_has_ended_or_was_killed_is_named_when_others_wait_for_it() -> (
    None
):
    found = diagnose(
        [waiting(0, made(1, 0)), rank(1, state="X"), rank(2, phase="ended")],
        60.0,
    )
    assert found.ranks == (1, 2)
    assert "its process 101 has ended" in found.text
    assert not diagnose([rank(0, 1.0), rank(1, phase="ended")], 60.0).hangs


def test_a_host_that_does_not_answer_is_named() -> None:
    found = diagnose([waiting(0, made(1, 0))], 60.0, missing=["b"])
    assert found.hangs
    assert "host b does not answer" in found.text


def test_states_travel_between_hosts_as_json() -> None:
    state = waiting(0, made(1, 0), Made(2, GROUP, "send", "", 1, True, 0))
    state = replace(state, made=((GROUP, 1),))
    assert unpack(json.loads(json.dumps(pack([state]))), "a") == [state]


# ---- positions


def test_another_reader_sees_operations_calls_phases_and_the_stack() -> None:
    positions = Positions(5)
    try:
        reader = PositionReader(here(), positions.paths)
        first = positions.texts(
            ["0F0 (forward of embed, microbatch 0)", "1F0"]
        )
        group = positions.group("tp", [4, 5, 6])
        positions.words[STEP], positions.words[OP] = 7, first + 1
        before = reader.mark()
        text = positions.texts(["all_reduce of 4 float32"])
        for _ in range(3):
            positions.words[WAITS] = positions.call(group, text)
        message = positions.call(group, text, peer=2, sends=True)
        assert reader.mark() != before
        assert (reader.operation, reader.phase) == ("1F0", "starting")
        assert reader.calls()[-2:] == [
            Made(
                3,
                ("tp", (4, 5, 6), 0),
                "all_reduce of 4 float32",
                "1F0",
                -1,
                False,
                2,
            ),
            Made(
                message,
                ("tp", (4, 5, 6), 0),
                "all_reduce of 4 float32",
                "1F0",
                6,
                True,
                0,
            ),
        ]
        with positions.phase("loading data", "tokens.bin"):
            assert (reader.phase, reader.note, reader.operation) == (
                "loading data",
                "tokens.bin",
                "",
            )
        assert (reader.phase, reader.operation) == ("starting", "1F0")
        begin = reader.ask_for_stacks()  # answered here, in this very function
        # Python's handler prints the newest 100 threads, and other tests leave some behind.
        if threading.active_count() < 100:
            assert any(
                "test_another_reader_sees" in frame
                for frame in reader.stack(begin)
            )
        for _ in range(3000):  # more than are kept
            positions.call(group, text)
        assert len(reader.calls()) == 1024
        assert reader.calls()[-1].nth == 3002
    finally:
        positions.close("ended")
    assert reader.phase == "ended"


def test_what_is_no_memory_of_a_rank_is_refused(tmp_path: object) -> None:
    for path in (
        f"{tmp_path}/file",
        "/proc/self/fd/0",
        f"/proc/{os.getpid()}/fd/0",
        "/dev/zero",
    ):
        with pytest.raises(
            OSError,
            match=re.compile("memory of a rank|No such file|not a file of"),
        ):
            PositionReader(here(), [path, path])
