"""The cause that is named where all ranks wait, where one is traced, and where hosts are missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from test_diagnosis import GROUP, made, rank, waiting

from rank_watch import RankState, diagnose
from rank_watch.processes import tracer_of
from rank_watch.reader import Made

DIFFERENT = "they do not make the same calls"


def on(host: str, *states: RankState) -> list[RankState]:
    return [replace(state, host=host) for state in states]


def message(number: int, peer: int, nth: int, *, sends: bool) -> Made:
    return Made(
        number, ("pp", (0, 1), 0), "8 float32", "3F0", peer, sends, nth
    )


def test_ranks_that_stand_in_the_same_call_blame_the_network_between_their_hosts() -> (
    None
):
    # Packets between two hosts are dropped: ranks 0 and 2 stand in the same call of three.
    first = [waiting(n, made(1, 0)) for n in range(2)]
    found = diagnose(
        [*on("alpha", *first), *on("beta", waiting(2, made(1, 0)))], 60.0
    )
    assert found.hangs
    assert found.ranks == ()
    assert DIFFERENT not in found.text
    assert (
        "ranks 0-2 have all made all_reduce(sum) of 8 float32 on tp of 7F3"
        in found.text
    )
    assert (
        "between alpha (ranks 0-1), beta (rank 2): look at the network"
        in found.text
    )


def test_a_rank_that_got_past_the_call_waits_elsewhere_and_the_network_is_blamed_still() -> (
    None
):
    # The data of call 0 has come to rank 1, which waits for the others in another group.
    other = Made(2, ("dp", (0, 1, 2), 0), "barrier", "", -1, False, 0)
    past = replace(waiting(1, made(1, 0), other), host="beta")
    stands = on("alpha", waiting(0, made(1, 0)), waiting(2, made(1, 0)))
    found = diagnose([*stands, past], 60.0)
    assert DIFFERENT not in found.text
    assert "look at the network" in found.text


def test_a_message_that_was_sent_and_does_not_come_blames_the_network() -> (
    None
):
    receiver = replace(waiting(1, message(5, 0, 3, sends=False)), host="beta")
    back = Made(9, ("pp", (0, 1), 0), "8 float32", "2B0", 1, False, 0)
    sender = waiting(0, message(4, 1, 3, sends=True), back)
    unsent = replace(
        receiver, calls=(*receiver.calls, message(4, 0, 0, sends=True))
    )
    found = diagnose([replace(sender, host="alpha"), unsent], 60.0)
    assert DIFFERENT not in found.text
    assert "no data passes between alpha (rank 0), beta (rank 1)" in found.text


def test_ranks_of_one_host_are_not_told_to_look_at_a_network() -> None:
    found = diagnose([waiting(n, made(1, 0)) for n in range(3)], 60.0)
    assert found.hangs
    assert DIFFERENT not in found.text
    assert "which are all on a (ranks 0-2)" in found.text


def test_calls_that_differ_are_the_programs_fault_also_where_their_sizes_are_the_same() -> (
    None
):
    # Rank 2 has left out the reduction of layer 4: its calls are one behind.
    def calls(*layers: int) -> list[Made]:
        return [
            made(n, n, op=f"{layer}S (reduce layer {layer})")
            for n, layer in enumerate(layers, 1)
        ]

    agree = Made(
        9, ("everyone", (0, 1, 2), 0), "all_reduce", "A", -1, False, 0
    )
    behind = waiting(2, *calls(3, 5, 6), agree)
    found = diagnose(
        [*(waiting(n, *calls(3, 4, 5, 6)) for n in (0, 1)), behind], 60.0
    )
    assert DIFFERENT in found.text
    assert (
        "rank 2 has not made all_reduce(sum) of 8 float32 on tp of 6S"
        in found.text
    )
    assert "it waits in all_reduce on everyone" in found.text
    assert "the first that differs is call 2 of tp" in found.text


def test_a_call_counts_as_made_when_so_many_later_ones_pushed_it_out() -> None:
    ahead = replace(
        waiting(1, Made(5000, ("dp", (0, 1), 0), "barrier", "", -1, False, 0)),
        made=((GROUP, 1),),
    )
    others = [waiting(0, made(1, 0)), waiting(2, made(1, 0))]
    assert "has not made" not in diagnose([*others, ahead], 60.0).text


def test_messages_in_the_wrong_order_are_the_programs_fault() -> None:
    sides = [
        waiting(0, message(1, 1, 0, sends=False)),
        waiting(1, message(1, 0, 0, sends=False)),
    ]
    found = diagnose(sides, 60.0)
    assert DIFFERENT in found.text
    assert (
        "rank 1 has not made 8 float32 from rank 1 on pp of 3F0, where rank 0 waits"
        in found.text
    )


# ---- debuggers and signals


@pytest.mark.parametrize("state", ["t", "S", "R"])
def test_a_run_is_not_ended_while_a_debugger_is_at_a_rank(state: str) -> None:
    traced = rank(1, 600.0, state=state, held=600.0, traced="gdb (process 12)")
    others = [waiting(n, made(1, 0), still=600.0) for n in (0, 2)]
    found = diagnose([*others, traced], 60.0)
    assert not found.hangs
    assert (
        "rank 1 is traced by gdb (process 12); the run is not ended while it is"
        in found.text
    )
    assert diagnose(
        [*others, replace(traced, state="S", traced="")], 60.0
    ).ranks == (1,)


def test_a_single_rank_that_somebody_stopped_is_left_alone() -> None:
    assert not diagnose([rank(0, 1.0, state="T", held=600.0)], 60.0).hangs


def test_a_tracer_is_known_by_its_name() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    # Attaches to the child as a debugger does, until its own input ends.
    attach = f"import ctypes; assert not ctypes.CDLL(None).ptrace(0x4206, {child.pid}, 0, 0)"
    code = f"{attach}; print(1, flush=True); input()"
    tracer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=-1, stdout=-1
    )
    assert tracer.stdout is not None
    assert tracer.stdout.readline() == b"1\n"
    assert f"(process {tracer.pid})" in tracer_of(child.pid)
    tracer.communicate(b"\n")
    assert tracer_of(child.pid) == ""
    child.communicate(b"\n")


# ---- several hosts


def test_a_missing_host_is_blamed_only_where_one_of_its_ranks_is_waited_for() -> (
    None
):
    saves = rank(2, 100.0, phase="saving", op="", calls=(made(0, -1),))
    others = [waiting(n, made(1, 0), still=100.0) for n in (0, 1)]
    assert not diagnose([*others, saves], 60.0, missing=["b"]).hangs
    assert diagnose(others, 60.0, missing=["b"]).hangs  # rank 2 is on b
    # In a save they are patient: its disk may be the one that b's watcher cannot write to.
    patient = [replace(each, phase="saving") for each in others]
    assert not diagnose(patient, 60.0, missing=["b"]).hangs
