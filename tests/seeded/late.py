"""Seeded faults of synchronization: results used before they are ready, tensors reused
before they are read.

Over plain threads nearly all of these agree with one process, because a result is in
place before it is used. `verify` trains over groups that deliver results as late as
allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from phalanx.comm import Group
from phalanx.comm.base import Work
from phalanx.comm.threads import ThreadGroup
from phalanx.parallel import Unit
from phalanx.parallel.works import ChainedWork
from phalanx.program import ops
from phalanx.training.executor import Executor

from .fault import fault, swapped


def without_waits(
    before: set[str], awaited: set[str]
) -> AbstractContextManager[None]:
    """Let operations of some kinds run without waiting for those of others."""
    right = Executor._perform

    def perform(self: Executor, op: Any) -> None:
        if op.kind in before:
            left = tuple(w for w in self.waits[op] if w.kind not in awaited)
            self.waits = {**self.waits, op: left}
        right(self, op)

    return swapped(Executor, "_perform", perform)


@fault("the norm does not wait for a tied sum", "gpt", "pp2 1f1b:3", "norm")
def _norm_without_tie() -> AbstractContextManager[None]:
    # It was seen over gloo only: with threads and shared memory the sum was ready in
    # time.
    return without_waits({ops.AGREE}, {ops.TIE})


@fault("an update does not wait for the norm", "gqa", "dp2 zero1", "weight")
def _update_without_norm() -> AbstractContextManager[None]:
    return without_waits({ops.UPDATE}, {ops.AGREE})


@fault(
    "a forward does not wait for its weights",
    "gqa",
    "dp2 zero3",
    "output of embed",
)
def _forward_without_weights() -> AbstractContextManager[None]:
    return without_waits({ops.FORWARD}, {ops.GATHER})


@fault(
    "a forward does not wait for its input",
    "gqa",
    "pp2 1f1b:3",
    "output of layers.2",
)
def _forward_without_input() -> AbstractContextManager[None]:
    return without_waits({ops.FORWARD}, {ops.RECEIVE})


@fault(
    "a buffer is overwritten before its send completes",
    "gqa",
    "pp2 1f1b:3",
    "a tensor that the call reads",
)
def _cleared_after_sending() -> AbstractContextManager[None]:
    right = Group.send

    def send(self: Group, x: Any, to: int, *, wait: bool = True) -> Work:
        work = right(self, x, to, wait=wait)
        x.detach().zero_()
        return work

    return swapped(Group, "send", send)


@fault("a message is sent without a copy", "gqa", "pp2 1f1b:3", "not a number")
def _sent_without_copy() -> AbstractContextManager[None]:
    """Keep the sender's own tensor until the peer arrives."""
    right = ThreadGroup._begin

    def begin(self: ThreadGroup, call: Any) -> Work:
        if call.kind != "send":
            return right(self, call)
        self._members.come((self.rank, call.at), self.rank, call)
        return Work()

    return swapped(ThreadGroup, "_begin", begin)


@fault(
    "weights are overwritten while other ranks read them",
    "gqa",
    "dp2 zero3",
    "a tensor that the call reads",
)
def _updated_while_gathered() -> AbstractContextManager[None]:
    """Write to this rank's shard, which others read in place, as soon as this rank has
    all shards."""
    right = Unit.gather

    def gather(self: Unit) -> Work:
        work = right(self)
        return (
            ChainedWork(work, lambda: self.home.mul_(1.5))
            if self.groups.gather.size > 1
            else work
        )

    return swapped(Unit, "gather", gather)


def used_at_once(name: str) -> AbstractContextManager[None]:
    """Copy a call's result before its wait, as if shared memory already held it."""
    right: Callable[..., Work] = getattr(Group, name)

    def call(self: Group, out: Any, *args: Any, **kwargs: Any) -> Work:
        work = right(self, out, *args, **kwargs)
        early = out.detach().clone()
        return (
            ChainedWork(work, lambda: out.copy_(early))
            if self.size > 1
            else work
        )

    return swapped(Group, name, call)


@fault(
    "a gather's result is read before it has arrived",
    "gqa",
    "dp2 zero3",
    "output of embed",
)
def _gathered_too_early() -> AbstractContextManager[None]:
    return used_at_once("all_gather")


@fault(
    "a reduction's result is read before it has arrived",
    "gqa",
    "dp2 zero3",
    "gradient",
)
def _summed_too_early() -> AbstractContextManager[None]:
    return used_at_once("reduce_scatter")


@fault(
    "a reduction over all ranks is not waited for",
    "gqa",
    "dp2",
    "reduced gradients",
)
def _never_waited() -> AbstractContextManager[None]:
    right = Executor._wait

    def wait(self: Executor, op: Any) -> None:
        if op.kind == ops.REDUCE:
            _, start = self.under_way.pop(op)
            self.moments.append((op, start, self._end(op)))
            return
        right(self, op)

    return swapped(Executor, "_wait", wait)
