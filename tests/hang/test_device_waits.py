"""Runs on GPUs, where the host queues a step and waits in one read: what is healthy, and what is named.

No GPU is needed: events are fakes, and positions are made by hand.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_diagnosis import made, rank

from phalanx.comm.base import Group
from phalanx.layout.run import Hangs
from phalanx.training.device_progress import DeviceProgress
from phalanx.training.flight import flight_record
from rank_watch import Positions, RankState, diagnose
from rank_watch import positions as positions_module
from rank_watch import watcher as watcher_module
from rank_watch.diagnosis import DEVICE_LEAST
from rank_watch.flight import Flight, parse_flights
from rank_watch.hosted import Hosted, RankProcess
from rank_watch.positions import DEVICE, OP, PHASES, STEP, WAITS
from rank_watch.processes import started_at
from rank_watch.rank_state import pack, unpack
from rank_watch.watched_rank import WatchedRank
from rank_watch.watcher import Watcher

REDUCE = "7S (reduce layers.6)"
FORWARD = "7F3 (forward of layers.6, microbatch 3)"
COMPUTES = "7B3 (backward of layers.6, microbatch 3)"


def on_gpu(number: int, still: float, **more: Any) -> RankState:
    """A rank that waits for its GPU, after five such waits of 80 s at most."""
    plain = rank(
        number, still, waits=DEVICE, device_longest=80.0, device_waits=5
    )
    return replace(plain, calls=(made(1, 0, op=REDUCE),), **more)


# ---- what is healthy


@pytest.mark.parametrize("still", [61.0, 240.0, DEVICE_LEAST - 1])
def test_a_long_first_step_on_a_gpu_is_not_ended(still: float) -> None:
    first = [
        on_gpu(n, still, device_longest=0.0, device_waits=0) for n in range(3)
    ]
    assert not diagnose(first, 60.0).hangs
    assert not diagnose(first[:1], 60.0).hangs
    assert diagnose(
        [replace(r, still=DEVICE_LEAST + 1) for r in first], 60.0
    ).hangs


DEFAULT = Hangs().timeout


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("state", "RSD")
def test_by_default_nothing_that_takes_under_ten_minutes_is_ended(
    phase: str, state: str
) -> None:
    # A slow disk (D), a step of four minutes on the device after short ones, a computation.
    short = {"longest": 0.1, "device_longest": 0.1, "device_waits": 1000}
    host = [
        rank(n, 599.0, phase=phase, state=state, op="", **short)
        for n in range(3)
    ]
    device = [replace(r, waits=DEVICE) for r in host]
    for ranks in (host, device, host[:1], device[:1]):
        assert not diagnose(ranks, DEFAULT).hangs


def test_by_default_a_save_that_does_nothing_is_ended_after_half_an_hour() -> (
    None
):
    assert not diagnose(
        [rank(0, 1799.0, phase="saving", op="")], DEFAULT
    ).hangs
    assert diagnose([rank(0, 1801.0, phase="saving", op="")], DEFAULT).hangs


def test_a_gpu_may_take_the_timeout_beyond_its_longest_wait() -> None:
    assert not diagnose([on_gpu(n, 139.0) for n in range(3)], 60.0).hangs
    assert diagnose([on_gpu(n, 141.0) for n in range(3)], 60.0).hangs


def test_a_wait_for_a_gpu_that_ended_was_a_healthy_one() -> None:
    positions = Positions(0)
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    seen = WatchedRank(entry, "a")
    positions.begin()
    now = seen.since
    for step in range(4):
        positions.words[STEP] = step
        with positions.phase("in a step"), positions.reading():
            seen.look(now := now + 1)
            seen.look(now := now + 80)
        seen.look(now := now + 1)
    state = seen.state(now)
    assert state.device_longest >= 80.0
    assert state.device_waits == 4
    # An operation of the host is no longer for that.
    assert state.longest <= 2.0
    # Of a watcher started again.
    assert WatchedRank(entry, "a").device_longest == state.device_longest
    positions.close("ended")


def test_progress_of_a_gpu_is_progress_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(positions_module, "BEATS", 0.001)
    passed = [0]
    positions = Positions(0)
    positions.look_at_device = lambda: (first, passed[0])
    first = positions.texts([REDUCE])
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    seen = WatchedRank(entry, "a")
    now = seen.since
    with positions.reading():
        for _ in range(5):
            seen.look(now := now + 1)  # the wait itself is progress
            passed[0] += 1
            until(lambda: positions.words[13] == passed[0])
            seen.look(now := now + 500)
            assert seen.state(now).still == 0.0
            assert seen.state(now).device_op == REDUCE
    positions.close("ended")


def until(true: Callable[[], object]) -> None:
    waits = threading.Event()
    for _ in range(2000):
        if true():
            return
        waits.wait(0.005)
    raise AssertionError("it did not come")


# ---- who is named


def test_a_host_that_queues_no_more_is_named_before_its_peers_gpus() -> None:
    loads = rank(
        2,
        61.0,
        phase="loading data",
        note="tokens.bin",
        op="",
        made=(((made(1, 0).group), 0),),
    )
    others = [on_gpu(n, 61.0, made=((made(1, 0).group, 1),)) for n in (0, 1)]
    found = diagnose([*others, loads], 60.0)
    assert found.ranks == (2,)
    assert "rank 2" in found.text
    assert "it has been loading data (tokens.bin) for 61 s" in found.text


def test_a_host_that_can_queue_no_more_waits_for_its_gpu() -> None:
    # Its queue is full: it stands in an operation, and its GPU in an earlier one.
    full = [rank(n, 100.0, op=COMPUTES, device_op=REDUCE, device_longest=80.0, device_waits=5,
                 calls=(made(1, 0, op=REDUCE),)) for n in range(3)]  # fmt: skip
    assert not diagnose(full, 60.0).hangs
    late = [replace(each, still=200.0) for each in full]
    found = diagnose(late, 60.0)
    assert found.hangs
    assert "all ranks wait for their GPUs" in found.text
    # Where nothing of its interpreter runs, what is known of its GPU is old.
    assert diagnose(
        [*late[:2], replace(full[2], locked=True)], 60.0
    ).ranks == (2,)


def test_a_gpu_in_work_of_its_own_is_named_with_the_operation() -> None:
    stands = [on_gpu(n, 200.0, device_op=REDUCE) for n in (0, 2)]
    found = diagnose([*stands, on_gpu(1, 200.0, device_op=COMPUTES)], 60.0)
    assert found.ranks == (1,)
    assert f"its GPU has been at {COMPUTES} for 200 s" in found.text
    assert "they do not make the same calls" not in found.text
    assert "longest time without progress of a GPU 80.0 s" in found.text
    alone = diagnose([on_gpu(0, 200.0, device_op=COMPUTES)], 60.0)
    assert alone.ranks == (0,)


def test_gpus_that_stand_in_the_same_call_blame_the_network_and_the_gpus() -> (
    None
):
    hosts = {0: "alpha", 1: "alpha", 2: "beta"}
    states = [
        replace(on_gpu(n, 200.0, device_op=REDUCE), host=host)
        for n, host in hosts.items()
    ]
    found = diagnose(states, 60.0)
    assert found.ranks == ()
    assert "look at the GPUs, or the network between alpha, beta" in found.text
    assert (
        f"the GPUs of ranks 0-2 are at all_reduce(sum) of 8 float32 on tp of {REDUCE}"
        in found.text
    )
    assert "they do not make the same calls" not in found.text


def flight(ended: int, started: int, queued: int) -> tuple[Flight, ...]:
    return (Flight("tp", (0, 1, 2), ended, started, queued, "all_reduce"),)


def test_the_record_of_nccl_names_the_gpu_that_has_not_started_a_call() -> (
    None
):
    # All stand in the same forward, whose all-reduce only the GPU of rank 1 has not come to.
    at = {"device_op": FORWARD, "calls": (made(1, 0, op=FORWARD),)}
    ranks = [
        replace(on_gpu(n, 200.0), **at, flights=flight(6, 7, 9))
        for n in (0, 2)
    ]
    stuck = replace(on_gpu(1, 200.0), **at, flights=flight(6, 6, 9))
    found = diagnose([*ranks, stuck], 60.0)
    assert found.ranks == (1,)
    assert (
        "NCCL, tp: all_reduce 7 waits to start; collective 6 is the last that has ended"
        in "\n".join(found.full)
    )
    assert "all_reduce 7 has started" in "\n".join(found.full)
    both = diagnose([*ranks, replace(stuck, flights=flight(6, 7, 9))], 60.0)
    assert both.hangs
    assert both.ranks == ()


# ---- where this comes from


class FakeEvent:
    def __init__(self, *, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done


def test_a_device_is_at_the_first_event_that_it_has_not_passed() -> None:
    progress, events = DeviceProgress(), [FakeEvent() for _ in range(4)]
    for place, event in zip((5, 5, 6, 7), events, strict=True):
        progress.add(place, event)
    assert progress.look() == (5, 0)
    # an event is not passed before those that were first
    events[0].done = events[2].done = True
    assert progress.look() == (5, 1)
    events[1].done = True
    assert progress.look() == (7, 3)
    events[3].done = True
    assert progress.look() == (-1, 4)


def test_events_of_a_step_that_is_over_are_not_kept_and_count_as_passed() -> (
    None
):
    progress = DeviceProgress()
    for step in range(1, 4):
        for place in range(5):
            progress.add(place, FakeEvent())
        progress.forget()
        assert progress.look() == (-1, 5 * step)


def test_a_device_that_has_failed_is_at_its_last_event() -> None:
    class Failed(FakeEvent):
        def query(self) -> bool:
            raise RuntimeError("CUDA error")

    progress = DeviceProgress()
    progress.add(3, Failed())
    assert progress.look() == (3, 0)


def test_a_read_of_what_a_call_leaves_on_a_gpu_is_a_wait_for_the_gpu() -> None:
    positions = Positions(0)
    for device, waits in (("cuda", DEVICE), ("cpu", 0)):
        group = Group("everyone", 0, [0, 1], torch.device(device))
        group.positions = positions
        with group.reading():
            assert positions.words[WAITS] == waits
        assert positions.words[WAITS] == 0
    positions.close("ended")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Positions]:
    monkeypatch.setattr(positions_module, "BEATS", 0.01)
    positions = Positions(0)
    yield positions
    positions.close("ended")


# As torch 2.11 and 2.13 write it; numbers of the status are text there.
RECORD: dict[str, Any] = {
    "version": "2.10",
    "pg_config": {"1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"}},
    "pg_status": {"1": {"last_completed_collective": "2"}},
    "entries": [
        {"collective_seq_id": n, "is_p2p": False, "p2p_seq_id": 0, "pg_id": 1,
         "process_group": ["1", "tp"], "profiling_name": "nccl:all_reduce", "state": state,
         "retired": state == "completed"}
        for n, state in ((1, "completed"), (2, "completed"), (3, "started"), (4, "scheduled"))
    ],
}  # fmt: skip


def test_a_watcher_gets_the_record_of_nccl_from_a_rank_that_waits_for_its_gpu(
    recording: Positions, tmp_path: Any
) -> None:
    recording.flight = json.dumps(RECORD).encode
    recording.words[OP] = recording.texts([FORWARD])
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(recording.paths)
    )
    watcher = Watcher(Hosted("a", str(tmp_path), ("a",), 60.0, (entry,)))
    with recording.reading():
        (state,) = watcher._with_flights(watcher.seen())
    assert state.flights == (Flight("tp", (0, 1), 2, 3, 4, "all_reduce"),)
    assert unpack(json.loads(json.dumps(pack([state]))), "a") == [state]


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b"null", b"[" * 100_000, b'{"entries": 3}', b'{"entries": [3]}',
     b'{"entries": [{"is_p2p": false}]}', b"\xff", b'{"entries": [{"is_p2p": false, "process_group": 3}]}'],
)  # fmt: skip
def test_what_is_no_record_of_nccl_is_none(raw: bytes) -> None:
    assert parse_flights(raw) == ()


def test_the_record_that_torch_keeps_can_be_read() -> None:
    # nothing was recorded here
    assert isinstance(parse_flights(flight_record()), tuple)


def test_a_machine_that_was_asleep_has_not_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CLOCK_MONOTONIC does not count suspension on Linux; where a clock does, or a virtual machine was
    # paused, the watcher sees a gap between two of its own looks.
    positions = Positions(0)
    positions.begin()
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    watcher = Watcher(Hosted("a", str(tmp_path), ("a",), 60.0, (entry,)))
    now, naps = time.monotonic(), [0.1, 0.1, 36_000.0, 0.1, 5_000.0, 0.1]

    def sleep(seconds: float) -> None:
        nonlocal now
        if naps:
            now += naps.pop(0)
        else:
            positions.close("ended")

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(watcher_module, "time", clock)
    monkeypatch.setattr(Watcher, "_begin_to_answer", lambda _: None)
    assert watcher.watch() is None
    assert not naps
