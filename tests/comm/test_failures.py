"""What goes wrong between ranks is said at once, by whom, and leaves nobody behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from group_cases import (
    listening,
    one_is_killed,
    one_raises,
    one_returns,
    one_stays_away,
    other_letter,
    other_order,
    other_size,
    other_splits,
    process,
)
from rank_threads import threads_of

from phalanx.comm import (
    AloneWorld,
    CommError,
    CommMisuse,
    RankFailed,
    launch,
    workers,
)
from phalanx.comm.threads import Hub


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failure(run, fn):
    with pytest.raises(RankFailed) as caught:
        run(fn)
    return caught.value


def test_a_rank_that_raises_frees_the_other_threads_and_comes_first():
    error = failure(threads_of(4), one_raises)
    assert error.rank == 1
    assert str(error).startswith(
        "rank 1 failed: KeyError: 'the second rank stumbles'\nTraceback"
    )
    assert "in one_raises" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert {report.rank for report in error.reports} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "fn, said",
    [
        (other_size, "all_reduce(sum) of 3 float32"),
        (other_order, "is in barrier"),
        (other_splits, "sends [1, 1], takes [1, 1] rows"),
        (other_letter, "send/receive of 4 float32"),
    ],
)
def test_threads_that_disagree_all_raise_the_same_sentence_at_once(fn, said):
    # The timeout is far longer than the test may take, so it is not what ends the wait.
    error = failure(threads_of(2, timeout=3600.0), fn)
    assert len(error.reports) == 2
    assert len({report.error for report in error.reports}) == 1
    assert "the ranks disagree on call 0 of tp: rank 0 is in" in str(error)
    assert said in str(error)


def test_a_timeout_names_who_waits_where_and_who_has_not_come():
    text = str(failure(threads_of(3, timeout=1.0), one_stays_away))
    first = text.splitlines()[0]
    assert (
        "has not arrived in 1 s" in first or "have not arrived in 1 s" in first
    )
    assert "waits in all_gather on tp" in first
    assert "waits in all_gather on dp" in first


def test_waiting_for_a_thread_that_has_returned_ends_without_the_timeout():
    error = failure(threads_of(3, timeout=3600.0), one_returns)
    first = str(error).splitlines()[0]
    assert "waits in all_reduce on tp" in first
    assert "not arrived; rank 0 has returned" in first


@pytest.mark.parametrize(
    "fn, first",
    [
        (
            one_raises,
            "rank 1 failed: KeyError: 'the second rank stumbles'\nTraceback",
        ),
        (one_is_killed, "rank 1 failed: the process was killed by signal 9"),
    ],
)
def test_a_process_that_ends_ends_the_others_and_the_next_run_starts_afresh(
    fn, first
):
    with workers(3, backend="gloo", timeout=3600.0) as run:
        old = run(process)
        assert str(failure(run, fn)).startswith(first)
        assert not any(alive(pid) for pid in old)
        new = run(process)
        assert set(new).isdisjoint(old)
    assert not any(alive(pid) for pid in new)


def test_a_silent_peer_over_gloo_is_named_when_the_timeout_has_passed():
    with workers(2, backend="gloo", timeout=1.0) as run:
        text = str(failure(run, one_stays_away))
    assert "in all_gather on" in text.splitlines()[0]
    assert "waits for rank" in text.splitlines()[0]


LAUNCHER = """
from phalanx.comm import workers
from group_cases import both_wait
with workers(2, backend="gloo", timeout=3600.0) as run:
    run(both_wait)
"""


def test_no_rank_outlives_a_launcher_that_is_killed():
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == [b"here\n"] * 2
    launcher.kill()
    # Both ranks wait in a call, and hold the other end of this pipe: it ends when the last has.
    launcher.communicate(timeout=5.0)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/net/tcp"),
    reason="the kernel does not list sockets",
)
def test_local_processes_listen_on_loopback_only(kept):
    run, _ = kept("gloo-2")
    addresses = [address for rank in run(listening) for address in rank]
    assert addresses
    assert all(
        address.split(":")[0].endswith("0100007F") for address in addresses
    )


def test_a_member_may_close_a_group_of_threads_before_another_has_come_to_it():
    hub = Hub(2, timeout=1.0)
    group = hub.group(1, "tp", (0, 1))
    hub.drop(group)
    assert hub.group(1, "tp", (0, 1)) is group
    hub.drop(group)
    assert list(hub.groups.values()) == [hub.everyone]


BACKEND = "no backend is named 'ether'; choose one of auto, threads, shm, gloo, nccl."


def test_an_unknown_group_and_a_world_of_nobody_are_refused_in_a_sentence():
    with pytest.raises(CommMisuse, match=BACKEND):
        launch(process, 2, backend="ether")
    with pytest.raises(
        CommMisuse,
        match="named 'shared'; it is now called shm; choose one of auto",
    ):
        launch(process, 2, backend="shared")
    with pytest.raises(CommMisuse, match="at least 1 rank, not 0"):
        launch(process, 0)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="here nccl may well be used"
)
def test_nccl_without_gpus_is_refused_before_any_process_starts():
    with pytest.raises(
        CommMisuse,
        match=r"backend nccl cannot be used: .*; use backend gloo or threads",
    ):
        launch(process, 2, backend="nccl")


MISUSES = {
    "is not contiguous": lambda w: w.all_reduce(torch.zeros(4, 4).t()),
    "no reduction is named 'mean'": lambda w: w.all_reduce(
        torch.zeros(1), "mean"
    ),
    "average of torch.int64 is not defined": lambda w: w.all_reduce(
        torch.ones(1).long(), "average"
    ),
    "sum of torch.bool is not defined": lambda w: w.all_reduce(
        torch.ones(1).bool()
    ),
    "there is no rank 1 in a group of 1": lambda w: w.broadcast(
        torch.zeros(1), 1
    ),
    "there is no rank -1 in a group of 1": lambda w: w.send(
        torch.zeros(1), -1
    ),
    "out has 2 elements, 3 are needed": lambda w: w.all_gather(
        torch.zeros(2), torch.zeros(3)
    ),
    "torch.float64 and torch.float32 in one": lambda w: w.all_gather(
        torch.zeros(3).double(), torch.zeros(3)
    ),
    "in_splits [2] must be 1 counts that add up to 3 rows": lambda w: (
        w.all_to_all(torch.zeros(3), torch.zeros(3), None, [2])
    ),
    "the root passes 1 tensors": lambda w: w.scatter(torch.zeros(1), None, 0),
    "part 0 has 2 elements, the others 1": lambda w: w.gather(
        [torch.zeros(2)], torch.zeros(1), 0
    ),
}


@pytest.mark.parametrize("said", MISUSES)
def test_a_call_that_cannot_be_right_is_refused_before_anything_is_sent(said):
    group = AloneWorld().split("tp", [[0]])
    with pytest.raises(CommMisuse) as caught:
        MISUSES[said](group)
    assert said in str(caught.value)
    assert " on tp: " in str(caught.value)


def test_groups_that_do_not_part_the_ranks_and_names_in_use_are_refused():
    world = AloneWorld()
    world.split("tp", [[0]])
    with pytest.raises(CommMisuse, match="already has a group 'tp'"):
        world.split("tp", [[0]])
    with pytest.raises(CommMisuse, match="must be in exactly one group"):
        world.split("dp", [[0, 0]])


def test_receiving_from_oneself_what_was_not_sent_does_not_wait():
    with pytest.raises(CommError, match="waits for itself"):
        AloneWorld().split("tp", [[0]]).receive(torch.zeros(1), 0)


def waits_for_a_file(world, ready, answer):
    """Says that it waits, and whether the file has come."""
    ready.with_name(f"{ready.name}-{world.rank}").touch()
    end = time.monotonic() + 60
    while not answer.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return answer.exists()


def test_a_signal_that_another_thread_gets_is_noticed_while_ranks_are_waited_for(
    tmp_path,
):
    """The system gives signals to any thread that takes them, and Python calls handlers in the main one."""
    ready, answer = tmp_path / "ready", tmp_path / "answer"

    def get_a_signal():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    before = signal.signal(
        signal.SIGUSR2, lambda number, frame: answer.touch()
    )
    thread = threading.Thread(target=get_a_signal)
    thread.start()
    try:
        assert launch(waits_for_a_file, 2, ready, answer, backend="shm") == [
            True,
            True,
        ]
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)


def sums_until_interrupted(world, running):
    group = world.split("all", [range(world.size)])
    running.append(threading.current_thread())
    total = torch.zeros(1)
    group.all_reduce(total)
    if not world.rank:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    while True:
        group.all_reduce(total)


def test_an_interrupted_caller_leaves_no_rank_running_in_its_process():
    """As a cell of a notebook that is interrupted: its run must not train on behind it."""
    running = []
    with pytest.raises(KeyboardInterrupt):
        launch(sums_until_interrupted, 2, running, backend="threads")
    assert len(running) == 2
    assert not any(thread.is_alive() for thread in running)
