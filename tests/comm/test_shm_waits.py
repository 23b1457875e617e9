"""No wait and no flag of shared memory can be left out: each member in turn is as late, or as early,
as is allowed, and every tensor is overwritten as soon as its call has returned."""

import contextlib
import itertools
import os
import random
from functools import lru_cache

import pytest
import torch
from group_cases import one_process
from stage import CHUNK, perform

from phalanx.comm import CommError
from torch_shm import lines
from torch_shm.arena import LINE, Arena, Extent
from torch_shm.calls import Call
from torch_shm.lines import Collectives, Inbox, LineWork, Outbox, Receives
from torch_shm.rounds import SMALL
from torch_shm.world import SharedWorld

F = torch.float32
# Elements: within the small sums, within a chunk, and several chunks.
SIZES = {"small": 96, "chunk": SMALL // 4 + 64, "long": 2 * CHUNK // 4 + 192}
KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "still",
    "inside",
    "gather",
    "scatter",
    "reduce_scatter",
    "into_own",
    "into_other",
    "all_to_all",
    "in_place",
    "uneven",
    "barrier",
    "ring",
)
# What tensors are overwritten with, and a prime below which the numbers of three ranks have an exact sum.
POISON = {F: -7777.0, torch.float64: -7777.0, torch.uint8: 251}
PRIME = {F: 65521, torch.float64: 65521, torch.uint8: 79}


@lru_cache(100)
def numbers(k, rank, n, dtype=F):
    """What a rank brings to its k-th call: whole numbers, so that sums are exact. They repeat after as
    many as the prime, so that no part of a tensor is like another at a distance of chunks."""
    return ((torch.arange(n) * 31 + k * 17 + rank * 1009) % PRIME[dtype]).to(
        dtype
    )


def wanted(kind, k, me, size, n, root, dtype=F):
    """The result of a call, by plain torch from what everyone brings."""
    xs = [numbers(k, i, n, dtype) for i in range(size)]
    wide = [numbers(k, i, n * size, dtype).view(size, n) for i in range(size)]
    if kind == "all_reduce":
        return one_process(xs, "sum")
    if kind == "reduce":
        return one_process(xs, "sum") if me == root else xs[me]
    if kind == "broadcast":
        return xs[root]
    if kind in ("all_gather", "still", "inside"):
        return torch.cat(xs)
    if kind == "gather":
        return torch.cat(xs) if me == root else None
    if kind == "scatter":
        return wide[root][me]
    if kind in ("reduce_scatter", "into_own", "into_other"):
        return one_process([rows[me] for rows in wide], "sum")
    if kind in ("all_to_all", "in_place"):
        return torch.cat([rows[me] for rows in wide])
    # rank i sends (i + 1) parts' worth of every row to each, in rows of n
    if kind == "uneven":
        return torch.cat(
            [
                numbers(k, i, n * (i + 1) * size, dtype).view(size, -1)[me]
                for i in range(size)
            ]
        )
    return xs[me - 1] if kind == "ring" else None


def brought(world, kind, k, size, n, made, dtype=F):
    """A call's tensors: the one that is read, and the one that the result comes into."""
    me = world.rank

    def tensor(numel, values=None):
        x = (world.empty if made else torch.empty)(numel, dtype=dtype)
        return x.fill_(POISON[dtype]) if values is None else x.copy_(values)

    if kind in ("all_reduce", "reduce", "broadcast", "barrier"):
        x = tensor(n, numbers(k, me, n, dtype))
        return x, x
    if kind in ("scatter", "reduce_scatter"):
        return tensor(n * size, numbers(k, me, n * size, dtype)), tensor(n)
    if kind == "all_to_all":
        return tensor(n * size, numbers(k, me, n * size, dtype)), tensor(
            n * size
        )
    if kind in ("in_place", "into_own", "into_other"):
        x = tensor(n * size, numbers(k, me, n * size, dtype))
        rows = x.view(size, n)
        return x, {
            "in_place": x,
            "into_own": rows[me],
            "into_other": rows[me - 1],
        }[kind]
    if kind == "uneven":
        sent = n * (me + 1) * size
        return tensor(sent, numbers(k, me, sent, dtype)), tensor(
            n * size * (size + 1) // 2
        )
    # x is a part of what is filled, and not the one that it goes to
    if kind == "inside":
        out = tensor(n * size)
        return out[n // 2 : n // 2 + n].copy_(numbers(k, me, n, dtype)), out
    x = tensor(n, numbers(k, me, n, dtype))
    return x, tensor(n) if kind == "ring" else tensor(n * size)


def begin(group, kind, x, out, n, root, wait):
    size, me = group.size, group.rank
    if kind in ("reduce", "broadcast"):
        return getattr(group, kind)(x, root, wait=wait)
    if kind == "all_reduce":
        return group.all_reduce(x, wait=wait)
    if kind in ("all_gather", "still", "inside"):
        return group.all_gather(out, x, still=kind == "still", wait=wait)
    if kind == "gather":
        parts = list(out.view(size, n)) if me == root else None
        return group.gather(parts, x, root, wait=wait)
    if kind == "scatter":
        parts = list(x.view(size, n)) if me == root else None
        return group.scatter(out, parts, root, wait=wait)
    if kind in ("reduce_scatter", "into_own", "into_other"):
        return group.reduce_scatter(out, x, wait=wait)
    if kind in ("all_to_all", "in_place"):
        return group.all_to_all(out, x, wait=wait)
    if kind == "uneven":
        sends, takes = [me + 1] * size, [i + 1 for i in range(size)]
        rows = out.view(sum(takes), n), x.view(sum(sends), n)
        return group.all_to_all(*rows, takes, sends, wait=wait)
    if kind == "barrier":
        return group.barrier(wait=wait)
    group.send(x, (me + 1) % size)
    x.fill_(POISON[x.dtype])  # what was sent is the sender's again at once
    return group.receive(out, (me - 1) % size, wait=wait)


def calls(world, plan, dtype=F):
    """Make the calls of a plan; the first whose result is wrong.

    What a call has read and written is overwritten as soon as it returns, or the wait for it does;
    those without `wait` are waited for after the next call with it. What lies in shared memory and was
    promised to stay (`still`) is overwritten when a later call has shown that all are past it.
    """
    group = world.split("all", [range(world.size)])
    late, wrong, under_way = [], [], []

    def finish(k, kind, n, x, out, work):
        work.wait()
        result = out.clone()
        due = wanted(kind, k, world.rank, world.size, n, k % world.size, dtype)
        if due is not None and not torch.equal(result.view(-1), due.view(-1)):
            wrong.append(f"rank {world.rank}, call {k}: {plan[k]}")
        out.fill_(POISON[dtype])
        if kind == "still" and plan[k][2]:
            late.append((k, x))
        else:
            x.fill_(POISON[dtype])
        if kind == "barrier":
            # It came after these; all are past them.
            for made, each in late:
                if made < k:
                    each.fill_(POISON[dtype])
            late[:] = [(made, each) for made, each in late if made > k]

    for k, (kind, n, made, wait) in enumerate(plan):
        x, out = brought(world, kind, k, world.size, n, made, dtype)
        call = (
            k,
            kind,
            n,
            x,
            out,
            begin(group, kind, x, out, n, k % world.size, wait),
        )
        if not wait:
            under_way.append(call)
            continue
        finish(*call)
        while under_way:
            finish(*under_way.pop(0))
    while under_way:
        finish(*under_way.pop(0))
    world.clear()
    return wrong[0] if wrong else None


CALLS = [
    (kind, n, made, wait)
    for kind in KINDS
    for n in SIZES.values()
    for made in (False, True)
    for wait in (True, False)
    # Without tensors, or the same in each case.
    if (kind != "barrier" or (n == 96 and not made)) and (wait or n == 96)
]


# What a late member may find overwritten by: each way in which a call can begin.
NEXT = [
    ("all_reduce", SIZES["small"], False, True),
    ("all_reduce", SIZES["small"], False, False),
    ("all_gather", SIZES["chunk"], False, True),
    ("still", SIZES["long"], True, True),
    ("reduce_scatter", SIZES["long"], False, True),
]


def pairs():
    """A plan in which every call is followed by each way in which the next one can begin."""
    both = [(first, then) for first in CALLS for then in NEXT]
    random.Random(0).shuffle(both)
    return [call for pair in both for call in pair]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_every_call_after_every_other_is_right_when_one_member_is_always_late(
    first, reads
):
    order = [first, 1 - first]
    assert (
        perform(calls, 2, lambda step: order, pairs(), reads=reads)
        == [None] * 2
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_calls_of_three_members_are_right_in_every_order_of_who_is_early(
    order,
):
    plan = random.Random(1).sample(pairs(), 200)
    reads = order[0] == 1
    assert (
        perform(calls, 3, lambda step: order, plan, reads=reads) == [None] * 3
    )


def around(size, itemsize):
    """Numbers of elements at, below and above every threshold: no elements for some ranks, small sums, a
    rank's share of a chunk, a chunk, and several of each."""
    chunk = CHUNK // itemsize
    edges = [
        SMALL // itemsize,
        chunk // size,
        chunk,
        2 * chunk,
        2 * chunk + chunk // size,
    ]
    return [
        0,
        1,
        size - 1,
        size + 1,
        *(edge + more for edge in edges for more in (-1, 0, 1)),
    ]


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.uint8), (3, torch.float64)]
)
def test_every_call_is_right_at_and_around_every_size_where_its_way_changes(
    size, dtype, reads
):
    kinds = [kind for kind in KINDS if kind != "barrier"]
    plan = [
        (kind, n, False, True)
        for kind in kinds
        for n in around(size, dtype.itemsize)
    ]
    # In shared memory runs of 1 << 16 elements are reduced at once.
    long = [(size << 16) + more for more in (-1, 0, 1)]
    plan += [
        (kind, n, True, True)
        for kind in ("all_reduce", "reduce_scatter")
        for n in long
    ]
    plan = [
        (*each[:2], n % 3 == 0 or each[2], True) for n, each in enumerate(plan)
    ]
    random.Random(size).shuffle(plan)
    order = list(range(size))[:: 1 if reads else -1]
    assert (
        perform(calls, size, lambda step: order, plan, dtype, reads=reads)
        == [None] * size
    )


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_right_when_who_is_late_changes_all_the_time(seed):
    plan = random.Random(seed).sample(pairs(), 200)

    def order(step):
        members = list(range(3))
        random.Random(f"{seed} {step // 5}").shuffle(members)
        return members

    assert perform(calls, 3, order, plan) == [None] * 3


class Traced:
    """An arena's words that write down what is read and written."""

    def __init__(self, words, trace):
        self._words, self._trace = words, trace

    def __getitem__(self, at):
        self._trace.append(("read", at))
        return self._words[at]

    def __setitem__(self, at, value):
        self._words[at] = value
        self._trace.append(("write", at))


@pytest.fixture
def traced(monkeypatch):
    """Two members' tables, and what the first one does: its reads, writes and fences in order."""
    trace = []
    monkeypatch.setattr(lines, "keep_order", lambda: trace.append("fence"))
    extent = Extent(2, CHUNK, 3, 1 << 20)
    fd = os.memfd_create("traced")
    os.ftruncate(fd, extent.total)
    arenas = [
        Arena(f"/proc/{os.getpid()}/fd/{fd}", extent, rank)
        for rank in range(2)
    ]
    os.close(fd)
    arenas[0].words = Traced(arenas[0].words, trace)
    return [Collectives(each, 1, "all", (0, 1), 0) for each in arenas], trace


def all_reduce(x):
    return LineWork(Call("all_reduce", x, op="sum"))


# Machines that are not x86 may let later reads and writes overtake earlier ones: a fence stands
# between what is laid down and its flag, and between a flag and what is read then.


def test_a_flag_is_raised_after_a_fence_and_nothing_is_read_before_one(traced):
    (mine, other), trace = traced
    x, y = torch.ones(4), torch.ones(4)
    mine.add(all_reduce(x))
    assert trace[-2:] == ["fence", ("write", mine._flag)]
    other.add(all_reduce(y))
    trace.clear()
    assert mine.advance()
    assert trace[:2] == [("read", mine._flags[0]), "fence"]
    assert x.tolist() == [2.0] * 4


def test_a_letter_is_hung_up_and_given_back_after_a_fence_and_read_after_one(
    traced,
):
    (mine, other), trace = traced
    box = mine.queues[0] + LINE
    Outbox(mine, 1).send(Call("send", torch.ones(3), at=1))
    assert trace[-2:] == ["fence", ("write", box >> 3)]
    Outbox(other, 0).send(Call("send", torch.full((3,), 5.0), at=0))
    trace.clear()
    x = torch.zeros(3)
    receives = Receives(mine, [Inbox(mine, 1)], 0)
    receives.add(LineWork(Call("receive", x, at=1)))
    assert receives.advance()
    assert trace[:2] == [("read", (other.queues[1]) >> 3), "fence"]
    assert trace[-2] == "fence"
    assert trace[-1][0] == "write"
    assert x.tolist() == [5.0] * 3


def test_a_small_sum_reads_after_a_fence(traced):
    (mine, other), trace = traced
    x = torch.ones(4)

    def others_come():
        other.add(all_reduce(torch.ones(4)))
        trace.clear()

    assert mine.small_all_reduce(x, "sum", others_come)
    assert trace[0] == "fence"
    assert any(step[0] == "read" for step in trace[1:])
    assert x.tolist() == [2.0] * 4


class Left:
    """What is known of the others: they have left."""

    def why_stuck(self, line, waited):
        return "rank 1 has left"

    def fail(self, text, line):
        raise CommError(text)


def test_a_message_that_came_before_its_sender_left_is_received_by_calls_that_nobody_waits_for(
    traced,
):
    # The thread that moves them found the sender gone, and did not look for messages again.
    (mine, other), _ = traced
    world = SharedWorld.__new__(SharedWorld)
    world._lines, world._lock, world.watch = (
        {},
        contextlib.nullcontext(),
        Left(),
    )
    x, line = torch.zeros(3), Receives(mine, [Inbox(mine, 1)], 0)
    first = world.begin(line, Call("receive", x, at=1))
    Outbox(other, 0).send(Call("send", torch.full((3,), 5.0), at=0))
    world.examine(line, 0.0)
    assert first.ended
    assert line.error is None
    assert x.tolist() == [5.0] * 3
    second = world.begin(line, Call("receive", x, at=1))
    world.examine(line, 0.0)
    assert not second.ended
    assert str(line.error) == "rank 1 has left"
    assert not world._lines


def differing(world, small):
    """The third call is of another size on each member."""
    group = world.split("all", [range(2)])
    for _ in range(2):
        group.all_reduce(torch.ones(4))
    x = torch.ones(4 + world.rank)
    group.all_reduce(x) if small else group.all_reduce(x, wait=False).wait()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("small", [True, False])
def test_calls_that_differ_are_refused_by_both_ways_of_summing(small, order):
    said = "the ranks disagree on call 2 of all: rank 0 is in all_reduce.sum. of 4 float32, rank 1"
    with pytest.raises((AssertionError, CommError), match=said):
        perform(differing, 2, lambda step: order, small)


def letters_for_ever(world):
    """More letters than there is room for at once, some read late, on groups that come and go."""
    late = torch.zeros(1)
    for round_ in range(4):
        group = world.split(f"w{round_}", [range(2)])
        peer = 1 - group.rank
        group._shared.begin(
            Call("send", torch.tensor([float(round_)]), at=peer), tag=7
        )
        for k in range(100):
            x = torch.full((100_000,), float(k))
            group.send(x, 1 - group.rank)
            group.receive(x, 1 - group.rank)
            assert x[0] == x[-1] == k
            if k == 50:
                group._shared.begin(
                    Call("receive", late, at=peer), tag=7
                ).wait()
                assert late.item() == round_
        world.clear()
    arena = world._shared.arena
    return arena.heap._next - arena.page(world.rank)


def test_the_room_of_letters_is_used_again_and_not_before_they_are_read():
    # Half of 100 letters of 400 kB wait behind the one that is read late, twice what is used.
    for order in ([0, 1], [1, 0]):
        for room in perform(
            letters_for_ever, 2, lambda step, order=order: order
        ):
            assert room < 60 * 450_000 + 8 * CHUNK * 6
