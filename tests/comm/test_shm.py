"""Shared memory carries any sequence of calls as threads do, bit for bit, and waits cheaply."""

import errno
import hashlib
import os
import random
import resource
import subprocess
import sys
import time

import pytest
import torch
from group_cases import DTYPES, EXACT, KINDS, REDUCING, Step, meaningful
from rank_threads import threads_of

from phalanx.comm import OPS, CommMisuse, launch, workers
from phalanx.comm.shm import ShmWorld
from torch_shm import arena, direct
from torch_shm.watch import READS

SIZES = (0, 1, 7, 64, 1000, 20_000)


def fill(x, seed):
    g = torch.Generator().manual_seed(seed)
    if x.dtype in EXACT:
        low = 0 if x.dtype in (torch.uint8, torch.bool) else -5
        return x.copy_(torch.randint(low, 5, x.shape, generator=g))
    return x.copy_(torch.randn(x.shape, generator=g))


def call_of(group, world, draw, seed):
    """Make a random call, which is the same on all ranks of the group; its work and its results."""
    step = Step("average", "average", 0, torch.int64)
    while not meaningful(step):
        step = Step(
            draw.choice(KINDS),
            draw.choice(OPS),
            draw.randrange(64),
            draw.choice(DTYPES),
            draw.random() < 0.5,
        )
    size = draw.choice(SIZES) if draw.random() < 0.98 else arena.CHUNK // 8 + 1
    made = world.empty if draw.random() < 0.4 else torch.empty
    n, me, root = group.size, group.rank, step.root % group.size
    return _begin(
        group,
        step,
        root,
        size,
        lambda k, s: fill(made(k, dtype=step.dtype), s + me),
        n,
        seed,
    )


def _begin(group, step, root, m, tensor, n, seed):
    me, wait, mine = group.rank, step.wait, 1000 * seed
    if step.kind in REDUCING[:2] or step.kind == "broadcast":
        x = tensor(m, mine)
        at = () if step.kind == "all_reduce" else (root,)
        op = () if step.kind == "broadcast" else (step.op,)
        return getattr(group, step.kind)(x, *at, *op, wait=wait), [x]
    if step.kind == "reduce_scatter":
        out = tensor(m, mine)
        return group.reduce_scatter(
            out, tensor(m * n, mine + 100), step.op, wait=wait
        ), [out]
    if step.kind == "all_gather":
        out = tensor(m * n, mine)
        # Sometimes in place: a rank's part stands where it belongs.
        x = out.view(n, m)[me] if step.root % 3 == 0 else tensor(m, mine + 100)
        # x is held to the end, so that it may be promised to stay as it is.
        return group.all_gather(out, x, still=step.root % 2 == 0, wait=wait), [
            out,
            x,
        ]
    if step.kind == "all_to_all":
        counts = [
            [random.Random(f"{seed} {i} {j}").randrange(4) for j in range(n)]
            for i in range(n)
        ]
        takes, sends = [counts[i][me] for i in range(n)], counts[me]
        out = tensor(sum(takes) * m, mine).view(sum(takes), m)
        x = tensor(sum(sends) * m, mine + 100).view(sum(sends), m)
        return group.all_to_all(out, x, takes, sends, wait=wait), [out]
    if step.kind in ("gather", "scatter"):
        x = tensor(m, mine)
        parts = (
            [tensor(m, mine + 100 * (i + 1)) for i in range(n)]
            if me == root
            else None
        )
        first, second = (parts, x) if step.kind == "gather" else (x, parts)
        return getattr(group, step.kind)(first, second, root, wait=wait), [
            x,
            *(parts or ()),
        ]
    if step.kind == "barrier":
        return group.barrier(wait=wait), []
    x, out = tensor(m, mine), tensor(m, mine + 100)
    group.send(x, (me + 1) % n)
    x.zero_()
    return group.receive(out, (me - 1) % n, wait=wait), [out]


def groups_of(size, draw):
    """A random way to part the ranks."""
    ranks = list(range(size))
    draw.shuffle(ranks)
    cuts = sorted(draw.sample(range(1, size), draw.randrange(size)))
    return [
        sorted(ranks[a:b])
        for a, b in zip([0, *cuts], [*cuts, size], strict=True)
    ]


def dance(world, first, last):
    """Random sequences of calls on several groups at once; a digest of all results for each."""
    digests = []
    for seed in range(first, last):
        draw = random.Random(seed)
        groups = [
            world.split(f"w{i}", groups_of(world.size, draw)) for i in range(2)
        ]
        calls = [
            call_of(groups[draw.randrange(2)], world, draw, 100 * seed + k)
            for k in range(draw.randrange(1, 7))
        ]
        order = list(calls)
        # each rank waits in an order of its own
        random.Random(world.rank).shuffle(order)
        for work, _ in order:
            work.wait()
        digest = hashlib.sha256()
        for _, results in calls:
            for x in results:
                digest.update(x.flatten().view(torch.uint8).numpy().tobytes())
        digests.append(digest.hexdigest())
        world.clear()
    return digests


def assert_like_threads(run, size, first, last):
    wanted = threads_of(size, timeout=60.0)(dance, first, last)
    for rank, (got, want) in enumerate(
        zip(run(dance, first, last), wanted, strict=True)
    ):
        differing = [
            first + k
            for k, pair in enumerate(zip(got, want, strict=True))
            if pair[0] != pair[1]
        ]
        assert not differing, f"rank {rank}, seeds {differing}"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_random_sequences_of_calls_equal_those_over_threads_bit_for_bit(
    size, kept
):
    run, _ = kept(f"shm-{size}")
    assert_like_threads(run, size, 0, 60 if size < 8 else 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_sequences_equal_those_over_threads(part, kept):
    size = (2, 3, 4, 8)[part % 4]
    run, _ = kept(f"shm-{size}")
    assert_like_threads(run, size, 1000 + 500 * part, 1500 + 500 * part)


def large(world, numel, dtype):
    """Calls of several chunks: on ordinary tensors, read by other processes or not, and on shared ones."""
    group = world.split("all", [range(world.size)])
    n, results = world.size, []
    for way in (ordinary, copied, shared):
        made = way(world)
        x, part = (
            fill(made(numel * n, dtype=dtype), world.rank),
            made(numel, dtype=dtype),
        )
        group.reduce_scatter(part, x)
        results.append(part.clone())
        group.all_gather(x, part, still=way is shared)
        results.append(x.clone())
        group.broadcast(x.add_(world.rank), 1)
        results.append(x.clone())
        group.all_reduce(x)
        results.append(x)
    world.clear()
    return [x.clone() for x in results]


@pytest.mark.parametrize("name", ["shm-2", "shm-3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_of_many_chunks_give_the_same_in_and_outside_of_shared_memory(
    name, dtype, kept
):
    run, size = kept(name)
    numel = 2 * arena.CHUNK // dtype.itemsize + 5
    for got, want in zip(
        run(large, numel, dtype),
        threads_of(size)(large, numel, dtype),
        strict=True,
    ):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
        assert all(
            torch.equal(x, y) for x, y in zip(got[:8], got[4:], strict=True)
        )


def recycled(world):
    """Buffers whose room is taken again once nothing holds them, and not before."""
    a = world.empty(1000, torch.float32)
    view, place = a[10:20].fill_(7.0), a.data_ptr()
    del a
    b = world.empty(1000, torch.float32).fill_(1.0)
    kept_alive = b.data_ptr() != place and view.eq(7.0).all().item()
    del view
    return kept_alive, world.empty(1000, torch.float32).data_ptr() == place


def test_a_shared_buffer_lives_as_long_as_any_view_of_it(kept):
    run, _ = kept("shm-2")
    assert run(recycled) == [(True, True)] * 2


def idle(world):
    """The share of a core that a rank uses while it waits, after it has waited for a while."""
    group = world.split("all", [range(world.size)])
    if world.rank == 0:
        time.sleep(1.5)
    used, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    group.barrier()
    now, seconds = (
        resource.getrusage(resource.RUSAGE_SELF),
        time.monotonic() - start,
    )
    world.clear()
    return (now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) / max(
        seconds, 1.5
    )


def test_waiting_ranks_leave_the_cores_to_others():
    # All four together stay below a tenth of a core; a rank that spins would take a whole one.
    assert sum(launch(idle, 4, backend="shm")) < 0.1


def test_without_room_for_shared_memory_the_size_needed_is_said(
    monkeypatch, tmp_path
):
    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        CommMisuse, match=r"needs 5 MiB of shared memory .* \(No space left"
    ):
        arena.filled_file(5 << 20, (str(tmp_path),))
    assert os.listdir(tmp_path) == []


def test_a_small_shared_memory_file_system_falls_back_to_a_file_on_disk(
    tmp_path,
):
    path = arena.filled_file(1 << 20, ("/nowhere", str(tmp_path)))
    assert os.stat(path).st_blocks * 512 >= 1 << 20
    os.unlink(path)


def in_a_filled_file(world):
    group = world.split("all", [range(world.size)])
    x = torch.full((100_000,), float(world.rank))
    group.all_reduce(x)
    group.send(x, 1 - world.rank)
    out = torch.zeros_like(x)
    group.receive(out, 1 - world.rank)
    left = [
        name for name in os.listdir("/dev/shm") if name.startswith("torch-shm")
    ]
    return out.sum().item(), left


def test_where_memory_without_a_name_cannot_be_had_ranks_meet_in_a_file_that_goes(
    monkeypatch,
):
    monkeypatch.delattr(os, "memfd_create")
    with workers(2, backend="shm") as run:
        # It has lost its name while they still use it.
        assert run(in_a_filled_file) == [(100_000.0, [])] * 2


def laid_down(world, kind, made):
    """How many bytes of this rank's slots a call of more than a chunk has written to."""
    group = world.split("all", [range(world.size)])
    numel = arena.CHUNK // 4 + 64
    part, whole = (
        made(world)(numel, torch.float32),
        made(world)(2 * numel, torch.float32),
    )
    part.fill_(1.0), whole.fill_(1.0)
    if kind == "all_reduce":
        group.all_reduce(whole)
    elif kind == "reduce_scatter":
        group.reduce_scatter(part, whole)
    elif kind == "broadcast":
        group.broadcast(whole, 1)
    else:
        group.all_gather(whole, part, still=kind == "still")
    group.barrier()
    slots = [
        group._shared._collectives.view(
            group.rank, turn, 0, 100, torch.float32
        )
        for turn in (0, 1)
    ]
    return int(sum(slot.count_nonzero() for slot in slots))


def ordinary(world):
    """Tensors of torch's, read in the memory of their process where that is allowed."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype)


def copied(world):
    """As where no process may read another's memory."""
    if isinstance(world, ShmWorld):
        world._shared.arena.processes = []
    return ordinary(world)


def shared(world):
    return world.empty


@pytest.mark.parametrize(
    "kind",
    ["all_reduce", "reduce_scatter", "all_gather", "still", "broadcast"],
)
def test_what_lies_in_shared_memory_is_not_laid_down_once_more(kind):
    # New ranks each time: slots are empty only where no call was before.
    assert launch(laid_down, 2, kind, shared, backend="shm") == [0, 0]
    assert max(launch(laid_down, 2, kind, copied, backend="shm")) > 0


@pytest.mark.parametrize("kind", ["all_gather", "still", "broadcast"])
def test_what_is_only_moved_is_read_where_it_lies(kind):
    if not all(launch(reading, 2, backend="shm")):
        pytest.skip("processes may not read each other's memory here")
    assert launch(laid_down, 2, kind, ordinary, backend="shm") == [0, 0]


def reading(world):
    return len(world._shared.arena.processes) == world.size


def one_refused(world):
    """The processes that may be read where rank 1 has noted that it cannot read the others."""
    if world.rank == 1:
        arena = world._shared.arena
        arena.words[(arena.page(1) >> 3) + READS] = 0
    world.split("all", [range(world.size)]).barrier()
    return world._shared.watch.processes()


def test_where_one_rank_may_not_read_the_others_none_does():
    assert launch(one_refused, 2, backend="shm") == [[], []]


def test_the_memory_of_a_process_that_has_ended_cannot_be_read():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(ProcessLookupError):
        direct.read(ended.pid, 1 << 20, torch.empty(3))


def uneven_stretches(world, made):
    """An all-to-all of stretches of no length alike, some of several chunks."""
    group = world.split("all", [range(world.size)])
    row, me = arena.CHUNK // 32, world.rank + 1
    sends = takes = [me * (i + 1) for i in range(world.size)]
    x = made(world)(sum(sends) * row, torch.int32).view(-1, row)
    out = made(world)(sum(takes) * row, torch.int32).view(-1, row)
    x.copy_(
        torch.arange(x.numel(), dtype=torch.int32).view(-1, row) * 8
        + world.rank
    )
    group.all_to_all(out, x, takes, sends)
    return out.clone()


@pytest.mark.parametrize("made", [ordinary, copied, shared])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_to_all_of_long_uneven_stretches_is_that_of_the_threads_group(
    made, ranks
):
    due = launch(uneven_stretches, ranks, ordinary, backend="threads")
    came = launch(uneven_stretches, ranks, made, backend="shm")
    assert all(torch.equal(x, y) for x, y in zip(came, due, strict=True))
