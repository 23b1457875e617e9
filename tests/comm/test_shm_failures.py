"""Ranks that share memory: who is lost is named at once by everybody, and nothing is left behind."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from group_cases import (
    one_raises,
    one_returns,
    one_stays_away,
    other_letter,
    other_order,
    other_size,
    other_splits,
)

from phalanx.comm import RankFailed, workers


def of_shared_memory():
    """What of ours lies where nameless memory would not."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if "phalanx" in name or "psm_" in name
    }


def left_since(before):
    """What has come and stays; a test beside this one may have a file there for a moment."""
    deadline = time.monotonic() + 10.0
    while (
        left := of_shared_memory() - before
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def failure(run, fn, *args):
    with pytest.raises(RankFailed) as caught:
        run(fn, *args)
    return caught.value


def told(error):
    """What each rank but the first to fail ended with."""
    return {report.rank: report.error for report in error.reports[1:]}


def lost_in_a_call(world, signal_number):
    """Rank 1 is hit while it waits for what never comes, the others wait elsewhere."""
    tp, dp = (world.split(name, [range(world.size)]) for name in ("tp", "dp"))
    if world.rank == 1:
        me = os.getpid()
        subprocess.Popen(
            ["sh", "-c", f"sleep 0.3; kill -{signal_number} {me}"]
        )
        dp.receive(torch.zeros(2), 0)
    tp.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "number, how", [(9, "is lost, its process"), (19, "does not answer")]
)
def test_a_rank_that_is_killed_or_stopped_is_named_by_all_with_the_call_each_was_in(
    number, how
):
    before = of_shared_memory()
    with workers(3, backend="shm", timeout=3600.0) as run:
        error = failure(run, lost_in_a_call, number)
    said = [each for rank, each in told(error).items() if rank != 1]
    if number == 9:
        assert str(error).startswith(
            "rank 1 failed: the process was killed by signal 9"
        )
    else:
        said.append(error.reports[0].error)
    assert len(said) == 2
    for sentence in said:
        assert f"rank 1 {how}" in sentence
        assert "rank 0 was in all_reduce on tp" in sentence
        assert "rank 1 was in receive on dp" in sentence
        assert "rank 2 was in all_reduce on tp" in sentence
    assert not left_since(before)


def test_a_rank_that_raises_comes_first_and_the_others_say_where_they_were():
    with workers(3, backend="shm", timeout=3600.0) as run:
        error = failure(run, one_raises)
    assert error.rank == 1
    assert "in one_raises" in str(error)
    assert sorted(told(error)) == [0, 2]
    for sentence in told(error).values():
        assert (
            "rank 1 raised KeyError: 'the second rank stumbles'; rank 0 was in"
            in sentence
        )


@pytest.mark.parametrize(
    "fn, said",
    [
        (other_size, "all_reduce(sum) of 3 float32"),
        (other_order, "is in barrier"),
        (other_splits, "sends [1, 1], takes [1, 1] rows"),
        (other_letter, "send/receive of 4 float32"),
        (
            one_returns,
            "rank 0 is in barrier, rank 1 is in all_reduce(sum) of 3 float32",
        ),
    ],
)
def test_ranks_that_disagree_end_at_once_with_both_sides_of_it(fn, said):
    with workers(2, backend="shm", timeout=3600.0) as run:
        text = str(failure(run, fn))
    assert "the ranks disagree on call 0 of tp: rank 0 is in" in text
    assert said in text


def test_a_timeout_over_shared_memory_names_who_has_not_come_and_where_it_waits():
    with workers(3, backend="shm", timeout=1.0) as run:
        text = str(failure(run, one_stays_away)).splitlines()[0]
    assert "not arrived in 1 s" in text
    assert "rank 0 was in all_gather on tp" in text
    assert "rank 2 was in all_gather on dp" in text


def busy(world, seed):
    """Calls without end, of all kinds and sizes, and letters."""
    group = world.split("all", [range(world.size)])
    half = world.split("pair", [[i, i + 1] for i in range(0, world.size, 2)])
    draw = random.Random(seed)
    os.write(1, f"pid {os.getpid()}\n".encode())
    while True:
        n = draw.choice([1, 100, 3000, 700_000])
        x = torch.ones(n * world.size)
        group.all_reduce(x)
        works = [group.reduce_scatter(torch.ones(n), x, wait=False)]
        half.send(x[:n].clone(), 1 - half.rank)
        works.append(group.all_gather(x, torch.ones(n), wait=False))
        half.receive(torch.ones(n), 1 - half.rank)
        for work in works:
            work.wait()


LAUNCHER = """
import os, sys
from phalanx.comm import workers, RankFailed
from test_shm_failures import busy
if __name__ == "__main__":
    os.write(1, f"pid {os.getpid()}\\n".encode())
    with workers(4, backend="shm", timeout=3600.0) as run:
        try:
            run(busy, int(sys.argv[1]))
        except RankFailed as error:
            os.write(1, f"{error}\\nended\\n".encode())
"""


def kill_something(seed):
    """Kill one rank, the launcher, or everybody, at a random moment; return who, what was printed,
    and the seconds until all ranks were down."""
    draw = random.Random(seed)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(seed)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(5)]
    time.sleep(draw.random() / 2)  # the random moment
    victims = [[draw.choice(pids[1:])], pids[:1], pids][seed % 3]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    ranks = [pid for pid in pids[1:] if alive(pid)]
    while any(map(alive, ranks)) and time.monotonic() < start + 30.0:
        time.sleep(0.01)
    seconds = time.monotonic() - start
    said, _ = launcher.communicate(timeout=30.0)
    return pids, victims, said.decode(), seconds


def assert_all_are_down(seed):
    before = of_shared_memory()
    pids, victims, said, seconds = kill_something(seed)
    assert not [pid for pid in pids if alive(pid)], (
        f"seed {seed}, killed {victims} of {pids}"
    )
    assert not left_since(before)
    print(f"{seconds:.2f} s after {len(victims)} of {len(pids)} were killed")
    if len(victims) == 1 and victims != pids[:1]:
        rank = said.split("failed: the process was killed by signal 9")[
            0
        ].split()[-1]
        assert (
            f"rank {rank} is lost, its process {victims[0]} has ended;" in said
        )
        assert said.endswith("ended\n")


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_at_any_moment_all_ranks_end_and_nothing_is_left(
    seed,
):
    assert_all_are_down(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 103))
def test_a_hundred_kills_leave_nothing(seed):
    assert_all_are_down(seed)


@pytest.mark.parametrize(
    "threads", ["1", "2"], ids=["forked", "forked by a server"]
)
def test_ranks_that_cannot_run_are_killed_with_the_launcher(threads):
    # With a thread of OpenBLAS the launcher does not fork its ranks itself. These kept the pipe open
    # whose end ends the process that does.
    numbers = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "0"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | numbers,
    )
    assert launcher.stdout is not None
    ranks = [int(launcher.stdout.readline().split()[1]) for _ in range(5)][1:]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + 30.0
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in ranks if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
