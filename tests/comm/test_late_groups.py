"""The groups of `adversary.py` find calls that are used too early, changed too early or left."""

import pytest
import torch

from adversary import late, late_worlds
from phalanx.comm import Group, RankFailed
from phalanx.layout import Layout
from phalanx.parallel import Unit
from phalanx.parallel.data import Then
from phalanx.program import ops
from phalanx.train.executor import Executor
from phalanx.verify import SHAPES, verify
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
    work = everyone(world).all_gather(out, torch.tensor([world.rank]), wait=False)
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
        (writes_what_is_sent, "rank 0 in send on all: a tensor that the call reads"),
        (writes_what_is_scattered, "rank 1 in reduce_scatter on all: a tensor that the call reads"),
        (writes_into_a_sum, "rank 1 in all_reduce on all: the result has been written to"),
        (writes_what_stands_still, "rank 0 in all_gather on all: a tensor that the call reads"),
        (never_waits, "in all_reduce on all: the group is closed before the wait"),
    ],
)
def test_who_touches_a_tensor_before_its_time_is_named(fn, named):
    with pytest.raises(RankFailed, match=named):
        late(2)(fn)


def part_of_the_whole(world):
    """Parts that lie in their place of the result, and a result that lies in what is reduced."""
    group = everyone(world)
    whole = torch.arange(4.0) * (world.rank + 1)
    group.all_gather(whole, whole[2 * world.rank : 2 * world.rank + 2], wait=False).wait()
    x = torch.ones(4) * (world.rank + 1)
    group.reduce_scatter(x[:2], x, wait=False).wait()
    return whole.tolist(), x[:2].tolist()


def test_a_part_may_lie_in_the_whole():
    assert late(2)(part_of_the_whole) == [([0.0, 1.0, 4.0, 6.0], [3.0, 3.0])] * 2


TIED = "pp2 1f1b:3; pp2 gpipe:3; dp2 pp2 zero1 1f1b:3"


def test_a_norm_read_before_the_tied_sum_has_come_is_caught_over_threads():
    # It was seen over gloo only: threads and shared memory had the sum by then.
    right = Executor._perform

    def without_ties(self, op):
        if op.kind == ops.AGREE:
            self.waits = {**self.waits, op: tuple(w for w in self.waits[op] if w.kind != ops.TIE)}
        right(self, op)

    for text in TIED.split("; "):
        (clean,) = verify(SHAPES["gpt"], [Layout.parse(text)], worlds=late_worlds)
        assert clean.passed, clean
        with swapped(Executor, "_perform", without_ties):
            (seen,) = verify(SHAPES["gpt"], [Layout.parse(text)], worlds=late_worlds)
        assert not seen.passed


def without_waits(before, awaited):
    """Operations of one kind go on without what they need of another."""
    right = Executor._perform

    def perform(self, op):
        if op.kind in before:
            left = tuple(w for w in self.waits[op] if w.kind not in awaited)
            self.waits = {**self.waits, op: left}
        right(self, op)

    return swapped(Executor, "_perform", perform)


def cleared_after_sending():
    """A buffer is used anew as soon as its sending has begun."""
    right = Group.send

    def send(self, x, to, *, wait=True):
        work = right(self, x, to, wait=wait)
        x.detach().zero_()
        return work

    return swapped(Group, "send", send)


def updated_while_gathered():
    """The own part, which others read where it lies, is written to once this rank has all."""
    right = Unit.gather

    def gather(self):
        work = right(self)
        return Then(work, lambda: self.home.mul_(1.5)) if self.groups.gather.size > 1 else work

    return swapped(Unit, "gather", gather)


def used_at_once(name):
    """What a call gives is copied before its wait, as if shared memory held it already."""
    right = getattr(Group, name)

    def call(self, out, *args, **kwargs):
        work = right(self, out, *args, **kwargs)
        early = out.detach().clone()
        return Then(work, lambda: out.copy_(early)) if self.size > 1 else work

    return swapped(Group, name, call)


MISTAKES = {
    "the norm does not wait for a sum": (
        "dp2",
        lambda: without_waits({ops.AGREE}, {ops.REDUCE}),
    ),
    "an update does not wait for the norm": (
        "dp2 zero1",
        lambda: without_waits({ops.UPDATE}, {ops.AGREE}),
    ),
    "a forward does not wait for its weights": (
        "dp2 zero3",
        lambda: without_waits({ops.FORWARD}, {ops.GATHER}),
    ),
    "a forward does not wait for its input": (
        "pp2 1f1b:3",
        lambda: without_waits({ops.FORWARD}, {ops.RECEIVE}),
    ),
    "what is sent is written to before it has left": ("pp2 1f1b:3", cleared_after_sending),
    "weights are written to while others read them": ("dp2 zero3", updated_while_gathered),
    "a gather's result is read before it is there": (
        "dp2 zero3",
        lambda: used_at_once("all_gather"),
    ),
    "a sum's result is read before it is there": (
        "dp2 zero3",
        lambda: used_at_once("reduce_scatter"),
    ),
}


def test_without_a_mistake_nothing_is_caught():
    layouts = [Layout.parse(text) for text in sorted({layout for layout, _ in MISTAKES.values()})]
    for seen in verify(SHAPES["gqa"], layouts, worlds=late_worlds, steps=2):
        assert seen.passed, seen


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wait_that_is_missing_or_a_tensor_used_too_early_is_caught(mistake):
    layout, broken = MISTAKES[mistake]
    with broken():
        (seen,) = verify(SHAPES["gqa"], [Layout.parse(layout)], worlds=late_worlds, steps=2)
    assert not seen.passed
