"""Groups over threads that use every freedom of `Group`'s contract.

`verify` trains over them, since plain threads hide mistakes: there a result is often in
place before it is waited for, and a message is copied before its tensor is reused.

From the start of a call to its wait, a rank's tensors belong to the group. These groups
exploit that. Every output is NaN (the largest number, for integers) until the rank's
own wait, even if the result is known long before, and even for tensors reduced in
place. Every input must be unchanged at the rank's own wait or, with `still`, until
every member has its result. So a rank that uses a result too early computes with NaN. A
rank that writes to a tensor too early, or never waits, gets an error.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.base import CommMisuse, Group, Work
from phalanx.comm.threads import (
    Hub,
    Meeting,
    ThreadGroup,
    ThreadMembers,
    ThreadWorld,
    run_threads,
)
from torch_shm.calls import Call


@dataclass(eq=False)
class Held:
    """A rank's call while its tensors belong to the group."""

    where: str
    call: Call
    # Each with a copy from the start of the call.
    reads: list[tuple[Tensor, Tensor]]
    # each with its poisoned copy, and its result
    writes: list[tuple[Tensor, Tensor, Tensor]]
    returned: bool = False

    def misuse(self) -> str:
        """Describe how the rank misused tensors that belong to the group, or return ""."""
        # Inputs: until every member has its result with `still`, else until the wait.
        reading = self.call.still or not self.returned
        if reading and not all(
            same_bits(x, before) for x, before in self.reads
        ):
            return f"{self.where}: a tensor that the call reads has been written to too early."
        if not self.returned and not all(
            same_bits(x, bad) for x, bad, _ in self.writes
        ):
            return f"{self.where}: the result has been written to before the wait."
        return ""


# A comparison makes thousands of calls, so tables that each would build are built here.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WRITTEN = {
    "all_reduce": "x",
    "receive": "x",
    "scatter": "x",
    "all_gather": "out",
    "reduce_scatter": "out",
    "all_to_all": "out",
}
AT_ROOT = {"reduce": "x", "gather": "parts"}
FIELDS = ("x", "out", "parts")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if two tensors are equal bit by bit, NaN included."""
    bits = BITS[a.itemsize]
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def written(call: Call, place: int) -> str:
    """The field of a call that is written to on this rank: x, out, parts or ""."""
    kind, root = call.kind, call.at == place
    # The root of a broadcast only reads.
    if kind == "broadcast":
        return "" if root else "x"
    return WRITTEN.get(kind, "") or (AT_ROOT.get(kind, "") if root else "")


def tensors(call: Call, field: str) -> Sequence[Tensor]:
    value = getattr(call, field)
    return (
        ()
        if value is None
        else (value,)
        if isinstance(value, Tensor)
        else value
    )


def private(call: Call) -> Call:
    """The call on copies of its tensors."""
    out, parts = call.out, call.parts
    return Call(
        call.kind,
        call.x.detach().clone(),
        None if out is None else out.detach().clone(),
        None
        if parts is None
        else tuple(part.detach().clone() for part in parts),
        call.op,
        call.at,
        call.in_splits,
        call.out_splits,
        call.still,
    )


def poison(x: Tensor) -> None:
    if x.dtype.is_floating_point:
        x.detach().fill_(math.nan)
    else:
        x.detach().fill_(
            1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
        )


def hold(where: str, call: Call, copy: Call, place: int) -> Held:
    """Poison what the call writes to, except where the call also reads it."""
    into = written(call, place)
    # Inputs are compared with their copies later; outputs are poisoned now.
    reads = [
        pair
        for field in FIELDS
        if field != into
        for pair in zip(
            tensors(call, field), tensors(copy, field), strict=True
        )
    ]
    writes = tensors(call, into) if into else ()
    for x in writes:
        poison(x)
    # Poisoning may have reached an input that shares memory with an output: restore it.
    for x, before in reads if writes else ():
        if not same_bits(x, before):
            x.detach().copy_(before)
    # The result will appear in the private copy, and move to the caller at its wait.
    bad = [x.detach().clone() for x in writes]
    results = tensors(copy, into) if into else ()
    return Held(
        where, call, reads, list(zip(writes, bad, results, strict=True))
    )


class LateMembers(ThreadMembers):
    """Members that meet with copies of their tensors."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: dict[int, Held] = {}
        self.met: weakref.WeakKeyDictionary[Meeting, list[Held]] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, line: tuple[int, ...], place: int, call: Call) -> LateWork:
        # Computed on copies: the caller's tensors show nothing before the wait.
        copy = private(call)
        where = f"rank {self.ranks[place]} in {call.kind} on {self.name}"
        # Under the lock, because others compare this rank's inputs under it.
        with self.hub.lock:
            held = self.held[id(copy)] = hold(where, call, copy, place)
        return LateWork(self, self.come(line, place, copy), place, copy, held)

    def _settle(self, meeting: Meeting) -> None:
        # All members have arrived, and this meeting takes over their tensors.
        calls = [call for call in meeting.calls if id(call) in self.held]
        self.met[meeting] = [self.held.pop(id(call)) for call in calls]
        super()._settle(meeting)

    def finish(self, meeting: Meeting, held: Held) -> None:
        with self.hub.lock:
            met = self.met.get(meeting, [held])
            # Members that have not returned check their own tensors when they do.
            # What this rank and those before it have done wrong, and then the result.
            wrong = [
                each.misuse() for each in met if each is held or each.returned
            ]
            for x, _, result in held.writes:
                x.detach().copy_(result)
            held.returned = True
            if all(each.returned for each in met):
                self.met.pop(meeting, None)
        if any(wrong):
            raise CommMisuse(next(filter(None, wrong)))


class OpenWork(Work):
    """A call that its rank has started."""

    def __init__(self, held: Held) -> None:
        self.held = held


class SentWork(OpenWork):
    """A message on its way. Its sender never waits for the peer."""

    def __init__(self, held: Held, sent: Tensor) -> None:
        super().__init__(held)
        self._sent = sent

    def wait(self) -> None:
        if self.held.returned:
            return
        # The sender must not have written to a tensor that is being sent.
        if misuse := self.held.misuse():
            raise CommMisuse(misuse)
        self.held.returned = True
        # From now on the sender may write to the tensor. A transport without a copy
        # would deliver this.
        poison(self._sent)


class LateWork(OpenWork):
    """A call whose results appear at the wait and not before."""

    def __init__(
        self,
        members: LateMembers,
        meeting: Meeting,
        place: int,
        copy: Call,
        held: Held,
    ) -> None:
        super().__init__(held)
        self._members, self._meeting, self._place, self._copy = (
            members,
            meeting,
            place,
            copy,
        )

    def wait(self) -> None:
        if self.held.returned:
            return
        # This rank gives up its turn only where it really has to wait.
        if not self._meeting.done:
            with others_turn(self._members.hub):
                self._members.wait(self._meeting, self._place, self._copy)
        self._members.finish(self._meeting, self.held)

    def done(self) -> bool:
        return self._meeting.done


class LateGroup(ThreadGroup):
    """A group whose every call takes effect as late as the contract allows."""

    _members: LateMembers

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: list[OpenWork] = []

    def _begin(self, call: Call) -> Work:
        if call.kind == "send":
            return self._opened(self._begin_send(call))
        line = (call.at, self.rank) if call.kind == "receive" else ()
        return self._opened(self._members.begin(line, self.rank, call))

    def _begin_send(self, call: Call) -> OpenWork:
        """Send a private tensor, which is poisoned once the sender has waited."""
        sent = private(call)
        super()._begin(sent)
        where = f"rank {self.ranks[self.rank]} in send on {self.name}"
        return SentWork(hold(where, call, private(call), self.rank), sent.x)

    def _opened(self, work: OpenWork) -> OpenWork:
        # Forget calls that have been waited for; `close` complains about the rest.
        self._open = [
            each for each in self._open if not each.held.returned
        ] + [work]
        return work

    def close(self) -> None:
        for work in self._open:
            if not work.held.returned:
                raise CommMisuse(
                    f"{work.held.where}: the group is closed before the wait."
                )
        super().close()


# Ranks take turns: one computes until it has to wait. Every torch operation releases
# the interpreter lock, and handing it over each time would take as long as the
# computation itself.
TURNS: weakref.WeakKeyDictionary[Hub, threading.Lock] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def others_turn(hub: Hub) -> Iterator[None]:
    """A context in which this rank waits and another may compute."""
    turn = TURNS[hub]
    turn.release()
    try:
        yield
    finally:
        turn.acquire()


class LateWorld(ThreadWorld):
    group_type = LateGroup
    members_type = LateMembers

    @property
    def turn(self) -> threading.Lock:
        with self._hub.lock:
            return TURNS.setdefault(self._hub, threading.Lock())

    def _split(self, *args: Any) -> Group:
        with others_turn(self._hub):
            return super()._split(*args)


def late(size: int, timeout: float = 30.0) -> Callable[..., list[Any]]:
    """A runner for `size` ranks over such groups, on the CPU."""

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        def rank(world: LateWorld, *args: Any) -> Any:
            # Its turn first: only one rank computes at a time.
            with world.turn:
                return fn(world, *args)

        return run_threads(rank, size, args, timeout, gpus=0, kind=LateWorld)

    return run


@contextmanager
def late_worlds(
    size: int, timeout: float = 300.0
) -> Iterator[Callable[..., list[Any]]]:
    """A replacement of `workers` whose ranks are threads over such groups."""
    yield late(size, timeout)
