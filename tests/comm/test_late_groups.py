"""The groups of `comm/late.py` find calls that are used too early, changed too early or left."""

import pytest
import torch

from phalanx.comm import RankFailed
from phalanx.comm.base import Work
from phalanx.comm.late import late
from phalanx.comm.threads import ThreadGroup
from seeded import swapped


def everyone(world):
    return world.split("all", [range(world.size)])


def reads_a_sum_too_early(world):
    x = torch.ones(3)
    work = everyone(world).all_reduce(x, wait=False)
    early = x.sum().item()
    work.wait()
    return early, x.sum().item()


def reads_a_gather_too_early(world):
    out = torch.zeros(world.size, dtype=torch.int64)
    work = everyone(world).all_gather(
        out, torch.tensor([world.rank]), wait=False
    )
    early = out.clone()
    work.wait()
    return early.tolist(), out.tolist()


def test_results_are_poison_until_the_wait():
    for early, after in late(2)(reads_a_sum_too_early):
        assert early != early  # NaN
        assert after == 6.0
    most = torch.iinfo(torch.int64).max
    assert late(2)(reads_a_gather_too_early) == [([most, most], [0, 1])] * 2


def writes_what_is_sent(world):
    group, x = everyone(world), torch.ones(3)
    if world.rank == 0:
        work = group.send(x, 1, wait=False)
        x.zero_()
        work.wait()
    else:
        group.receive(torch.empty(3), 0)


def writes_what_is_scattered(world):
    x, out = torch.ones(2 * world.size), torch.empty(2)
    work = everyone(world).reduce_scatter(out, x, wait=False)
    if world.rank == 1:
        x.zero_()
    work.wait()


def writes_into_a_sum(world):
    x = torch.ones(3)
    work = everyone(world).all_reduce(x, wait=False)
    if world.rank == 1:
        x.zero_()
    work.wait()


def writes_what_stands_still(world):
    """Rank 0 has its result and changes its part, which rank 1 has not read."""
    group, part, out = everyone(world), torch.ones(1), torch.empty(world.size)
    work = group.all_gather(out, part, still=True, wait=False)
    if world.rank == 0:
        work.wait()
        part.zero_()
    # Not the same group, whose order would be another.
    world.split("later", [range(world.size)]).barrier()
    work.wait()


def never_waits(world):
    everyone(world).all_reduce(torch.ones(3), wait=False)
    world.clear()


@pytest.mark.parametrize(
    "fn, named",
    [
        (
            writes_what_is_sent,
            "rank 0 in send on all: a tensor that the call reads",
        ),
        (
            writes_what_is_scattered,
            "rank 1 in reduce_scatter on all: a tensor that the call reads",
        ),
        (
            writes_into_a_sum,
            "rank 1 in all_reduce on all: the result has been written to",
        ),
        (
            writes_what_stands_still,
            "rank 0 in all_gather on all: a tensor that the call reads",
        ),
        (
            never_waits,
            "in all_reduce on all: the group is closed before the wait",
        ),
    ],
)
def test_who_touches_a_tensor_before_its_time_is_named(fn, named):
    with pytest.raises(RankFailed, match=named):
        late(2)(fn)


def part_of_the_whole(world):
    """Parts that lie in their place of the result, and a result that lies in what is reduced."""
    group = everyone(world)
    whole = torch.arange(4.0) * (world.rank + 1)
    group.all_gather(
        whole, whole[2 * world.rank : 2 * world.rank + 2], wait=False
    ).wait()
    x = torch.ones(4) * (world.rank + 1)
    group.reduce_scatter(x[:2], x, wait=False).wait()
    return whole.tolist(), x[:2].tolist()


def test_a_part_may_lie_in_the_whole():
    assert (
        late(2)(part_of_the_whole) == [([0.0, 1.0, 4.0, 6.0], [3.0, 3.0])] * 2
    )


def test_a_message_arrives_as_it_was_when_it_was_sent():
    def sends_two(world):
        group, x = everyone(world), torch.ones(3)
        if world.rank == 0:
            for number in (1.0, 2.0):
                x.fill_(number)
                group.send(x, 1)
            return []
        world.split("later", [range(world.size)])
        into = [torch.empty(3), torch.empty(3)]
        for each in into:
            group.receive(each, 0)
        return [each.tolist() for each in into]

    def rank(world):
        if world.rank == 0:
            done = sends_two(world)
            world.split("later", [range(world.size)])
            return done
        return sends_two(world)

    assert late(2)(rank)[1] == [[1.0] * 3, [2.0] * 3]
    # A transport that keeps the sender's own tensor delivers what became of it.
    right = ThreadGroup._begin

    def without_a_copy(self, call):
        if call.kind != "send":
            return right(self, call)
        self._members.come((self.rank, call.at), self.rank, call)
        return Work()

    with swapped(ThreadGroup, "_begin", without_a_copy):
        found = late(2)(rank)[1]
    assert all(number != number for row in found for number in row)  # NaN
