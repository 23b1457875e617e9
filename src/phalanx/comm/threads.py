"""A world of ranks in one process: collectives in milliseconds, and a debugger that works.

Each rank is a thread. The members of a group meet call by call: who comes last settles the call for
everyone and wakes the others, under one lock with a condition per group. A send and its receive are
a meeting of two for which the sender does not wait. Whoever fails sets the failure of the whole
world, and every rank that waits anywhere raises it at once.

On CUDA each rank leaves an event of its own stream when it comes, the last one's streams wait for
all of them, and those who wait make their stream wait for the settled call.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.base import (
    Call,
    CommError,
    Group,
    RankFailed,
    Report,
    Work,
    World,
    become_a_rank,
)
from phalanx.comm.settle import settle

# Seconds that the other ranks have to come back once one has failed.
GRACE = 4.0


class Hub:
    """What the ranks of one world share."""

    def __init__(
        self, size: int, timeout: float, members: "type[ThreadMembers] | None" = None
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.members = members or ThreadMembers
        self.lock = threading.Lock()
        self.failure: str | None = None
        self.gone: set[int] = set()
        self.doing: list[str | None] = [None] * size
        self.everyone = ThreadMembers(self, "the world", tuple(range(size)))
        self.groups: dict[tuple[int, tuple[int, ...]], ThreadMembers] = {}
        self.waiting = [self.everyone.changed]

    def fail(self, failure: str) -> None:
        """Every rank that waits, or calls from here on, raises this; the first failure stays."""
        with self.lock:
            if self.failure is None:
                self.failure = failure
            self._wake()

    def leave(self, rank: int) -> None:
        """This rank will make no further call."""
        with self.lock:
            self.gone.add(rank)
            self._wake()

    def group(self, ordinal: int, name: str, ranks: tuple[int, ...]) -> "ThreadMembers":
        """The group made by the world's split of that number: one object for all its members."""
        with self.lock:
            key = (ordinal, ranks)
            if key not in self.groups:
                self.groups[key] = self.members(self, name, ranks)
                self.waiting.append(self.groups[key].changed)
            return self.groups[key]

    def drop(self, group: "ThreadMembers") -> None:
        """Forget a group once all its members have closed it; some may not even have split it yet."""
        with self.lock:
            group.closed += 1
            if group.closed < len(group.ranks):
                return
            self.groups = {key: value for key, value in self.groups.items() if value is not group}
            self.waiting = [each for each in self.waiting if each is not group.changed]

    def _wake(self) -> None:
        for changed in self.waiting:
            changed.notify_all()


@dataclass(eq=False)
class Meeting:
    """One call: who has come, with what, and whether it is settled."""

    members: tuple[int, ...]
    calls: list[Call | None]
    ready: list[torch.cuda.Event] = field(default_factory=list)
    settled: list[torch.cuda.Event] = field(default_factory=list)
    done: bool = False
    first: tuple[int, str] | None = None

    def enter(self, seat: int, call: Call, promise: str) -> int | None:
        """Take a seat; the answer is a seat whose call does not belong together with this one."""
        self.calls[seat] = call
        if self.first is None:
            self.first = (seat, promise)
        if promise != self.first[1]:
            return self.first[0]
        if call.kind == "all_to_all":
            for i, other in enumerate(self.calls):
                if other is not None and (
                    call.in_splits[i] != other.out_splits[seat]
                    or other.in_splits[seat] != call.out_splits[i]
                    or call.x.shape[1:] != other.x.shape[1:]
                ):
                    return i
        return None


class ThreadMembers:
    """The meetings of some ranks. `line` () is everyone's; (i, j) is what place i sends to j."""

    def __init__(self, hub: Hub, name: str, ranks: tuple[int, ...]) -> None:
        self.hub = hub
        self.name = name
        self.ranks = ranks
        self.closed = 0
        self.changed = threading.Condition(hub.lock)
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.counts: dict[tuple[tuple[int, ...], int], int] = {}

    def come(self, line: tuple[int, ...], place: int, call: Call) -> Meeting:
        """Bring one's call to the next meeting of a line; the last to come settles it."""
        members = line or tuple(range(len(self.ranks)))
        event, promise = _event(call), call.promise()
        with self.hub.lock:
            self._raise_failure()
            seat = int(call.kind == "receive") if line else place
            number = self.counts.get((line, seat), 0)
            self.counts[line, seat] = number + 1
            meeting = self.meetings.setdefault(
                (line, number), Meeting(members, [None] * len(members))
            )
            other = meeting.enter(seat, call, promise)
            meeting.ready += event
            complete = None not in meeting.calls
            if complete:
                del self.meetings[line, number]
        if other is not None:
            self._quarrel(meeting, number, *sorted((other, seat)))
        if complete:
            self._settle(meeting)
        return meeting

    def wait(self, meeting: Meeting, place: int, call: Call) -> None:
        """Return when the meeting is settled, or raise who is missing."""
        hub, rank = self.hub, self.ranks[place]
        with hub.lock:
            hub.doing[rank] = f"{call.kind} on {self.name}"
            while not meeting.done:
                self._raise_failure()
                woken = self.changed.wait_for(
                    lambda: meeting.done or hub.failure is not None or self._hopeless(meeting),
                    hub.timeout,
                )
                # A meeting where all have come is only being settled, however long it takes.
                if (self._hopeless(meeting) or not woken) and self._absent(meeting):
                    hub.failure = hub.failure or self._missing(meeting, rank, call)
                    hub._wake()
            hub.doing[rank] = None
        for event in meeting.settled:
            event.wait(torch.cuda.current_stream(call.x.device))

    def _settle(self, meeting: Meeting) -> None:
        # Outside the lock: all members have come and leave their tensors alone until it is done.
        calls = [call for call in meeting.calls if call is not None]
        try:
            with _streams(calls, meeting):
                settle(calls)
        except BaseException as error:
            self.hub.fail(f"{calls[0].kind} on {self.name} failed: {error}")
            raise
        with self.hub.lock:
            meeting.done = True
            meeting.calls.clear()
            self.changed.notify_all()

    def _quarrel(self, meeting: Meeting, number: int, i: int, j: int) -> None:
        def said(seat: int) -> str:
            call = meeting.calls[seat]
            assert call is not None
            splits = ""
            if call.kind == "all_to_all":
                splits = f" (sends {list(call.in_splits)}, takes {list(call.out_splits)} rows)"
            return f"rank {self.ranks[meeting.members[seat]]} is in {call.promise()}{splits}"

        self.hub.fail(
            f"the ranks disagree on call {number} of {self.name}: {said(i)}, {said(j)}. "
            "Every rank of a group makes the same calls in the same order with the same sizes."
        )
        with self.hub.lock:
            self._raise_failure()

    def _absent(self, meeting: Meeting) -> list[int]:
        seats = zip(meeting.members, meeting.calls, strict=False)
        return [self.ranks[member] for member, call in seats if call is None]

    def _hopeless(self, meeting: Meeting) -> bool:
        return not self.hub.gone.isdisjoint(self._absent(meeting))

    def _missing(self, meeting: Meeting, rank: int, call: Call) -> str:
        absent = self._absent(meeting)
        names = ", ".join(map(str, absent))
        text = f"rank {rank} waits in {call.kind} on {self.name}; "
        text += f"rank {names} has" if len(absent) == 1 else f"ranks {names} have"
        text += " not arrived"
        where = [
            f"rank {each} has returned"
            if each in self.hub.gone
            else f"rank {each} waits in {self.hub.doing[each]}"
            for each in absent
            if each in self.hub.gone or self.hub.doing[each]
        ]
        limit = "" if self._hopeless(meeting) else f" in {self.hub.timeout:g} s"
        return f"{text}{limit}{''.join(f'; {each}' for each in where)}."

    def _raise_failure(self) -> None:
        if self.hub.failure is not None:
            raise CommError(self.hub.failure)


class Promise(Work):
    """A call whose meeting may not have been settled yet."""

    def __init__(self, group: ThreadMembers, meeting: Meeting, place: int, call: Call) -> None:
        self._group, self._meeting, self._place, self._call = group, meeting, place, call

    def wait(self) -> None:
        self._group.wait(self._meeting, self._place, self._call)

    def done(self) -> bool:
        return self._meeting.done


class ThreadGroup(Group):
    """A group of threads, as one of them sees it."""

    def __init__(self, group: ThreadMembers, place: int, device: torch.device) -> None:
        super().__init__(group.name, place, group.ranks, device)
        self._group = group

    def _begin(self, call: Call) -> Work:
        group = self._group
        if call.kind == "send":
            # A copy, so that the sender may go on and write to x whenever the peer comes.
            call = Call("send", call.x.detach().clone(), at=call.at)
            group.come((self.rank, call.at), self.rank, call)
            return Work()
        line = (call.at, self.rank) if call.kind == "receive" else ()
        return Promise(group, group.come(line, self.rank, call), self.rank, call)

    def close(self) -> None:
        self._group.hub.drop(self._group)


class ThreadWorld(World):
    """The world of one thread; it is made in that thread.

    A test's world may have groups, and members that meet, of classes of its own.
    """

    group_type: type[ThreadGroup] = ThreadGroup
    members_type: type[ThreadMembers] = ThreadMembers

    def __init__(self, hub: Hub, rank: int, device: torch.device | str = "cpu") -> None:
        super().__init__(rank, hub.size, torch.device(device))
        become_a_rank()
        self._hub = hub
        self._splits = 0

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        # The whole list of groups is what the ranks must say alike.
        said = Call("split", torch.empty(0), op=f"{name!r} into {[list(each) for each in groups]}")
        everyone = self._hub.everyone
        everyone.wait(everyone.come((), self.rank, said), self.rank, said)
        self._splits += 1
        ranks = next(group for group in groups if self.rank in group)
        group = self._hub.group(self._splits, name, ranks)
        return self.group_type(group, ranks.index(self.rank), self.device)

    def leave(self) -> None:
        """Tell the others that this rank makes no further call."""
        self._hub.leave(self.rank)


def _event(call: Call) -> list[torch.cuda.Event]:
    if not call.x.is_cuda:
        return []
    return [torch.cuda.current_stream(call.x.device).record_event()]


@contextmanager
def _streams(calls: Sequence[Call], meeting: Meeting) -> Iterator[None]:
    tensors = [tensor for call in calls for tensor in call.tensors() if tensor.is_cuda]
    streams = [torch.cuda.current_stream(device) for device in {each.device for each in tensors}]
    for stream in streams:
        for event in meeting.ready:
            stream.wait_event(event)
    yield
    for stream in streams:
        meeting.settled.append(stream.record_event())
    if calls[0].kind == "send" and streams:
        # The sender does not wait, so its copy could be freed and reused before it is read.
        calls[0].x.record_stream(torch.cuda.current_stream(calls[0].x.device))


def run_threads(
    fn: Callable[..., Any],
    size: int,
    args: Sequence[Any],
    timeout: float,
    gpus: int,
    kind: type[ThreadWorld] = ThreadWorld,
) -> list[Any]:
    """What `fn(world, *args)` returns on each rank, each rank a thread of this process.

    The ranks share so many GPUs; without any they compute on the CPU.
    """
    hub = Hub(size, timeout, kind.members_type)
    results: list[Any] = [None] * size
    reports: list[Report] = []
    errors: list[BaseException] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def rank_thread(rank: int) -> None:
        device = f"cuda:{rank % gpus}" if gpus else "cpu"
        if gpus:
            torch.cuda.set_device(device)
        world = kind(hub, rank, device)
        world.sharing = len(range(rank % gpus, size, gpus)) if gpus else 1
        try:
            # Otherwise all ranks' backward passes share one engine thread per GPU, and a region
            # that waits in one of them keeps its peer from ever coming.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world, *args)
            world.leave()
        except BaseException as error:
            errors.append(error)
            reports.append(Report.of(rank, error))
            hub.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            ended.put(rank)

    threads = [
        threading.Thread(target=rank_thread, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        try:
            # A thread cannot be ended from outside: one that computes on after another has failed
            # is left behind.
            ended.get(timeout=GRACE if reports else None)
        except queue.Empty:
            break
    if reports:
        raise RankFailed(reports) from errors[0]
    return results
