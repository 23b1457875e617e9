"""A world of ranks in one process: collectives take milliseconds, and debuggers work.

Each rank is a thread. The members of a group meet call by call. The last to arrive
computes the call for everyone and wakes the others, under one lock with a condition per
group. A send and its receive are a meeting of two, for which the sender does not wait.
A rank that fails sets the failure of the whole world, and every waiting rank raises it
at once.

On CUDA each rank records an event on its stream when it arrives. The last one's streams
wait for all events, and ranks that wait make their streams wait for the computed call.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.comm.base import (
    CommError,
    Group,
    RankFailed,
    Report,
    Work,
    World,
    become_a_rank,
    disagreement,
    named,
    split_call,
)
from torch_shm.calls import Call
from torch_shm.settle import settle

# Seconds in which the other ranks must return once one has failed.
GRACE = 4.0


class Hub:
    """State shared by all ranks of one world."""

    def __init__(
        self,
        size: int,
        timeout: float,
        members: "type[ThreadMembers] | None" = None,
    ) -> None:
        self.timeout = timeout
        self.members = members or ThreadMembers
        self.lock = threading.Lock()
        self.failure: str | None = None
        self.gone: set[int] = set()
        self.doing: list[str | None] = [None] * size
        # By the number of the world's split and its ranks; the world itself has number
        # 0.
        self.groups: dict[tuple[int, tuple[int, ...]], ThreadMembers] = {}
        self.everyone = ThreadMembers(self, "the world", tuple(range(size)))
        self.groups[0, self.everyone.ranks] = self.everyone

    def fail(self, failure: str) -> None:
        """Make every rank raise this at its next call; the first failure stays."""
        with self.lock:
            self.failure = self.failure or failure
            self.wake()

    def leave(self, rank: int) -> None:
        """Note that this rank will make no further call."""
        with self.lock:
            self.gone.add(rank)
            self.wake()

    def group(
        self, number: int, name: str, ranks: tuple[int, ...]
    ) -> "ThreadMembers":
        """The group of the world's split with this number, shared by members."""
        # The first member to ask creates it, and the others find it.
        with self.lock:
            return self.groups.setdefault(
                (number, ranks), self.members(self, name, ranks)
            )

    def drop(self, group: "ThreadMembers") -> None:
        """Forget a group once all members have closed it, even one yet to be split."""
        with self.lock:
            group.closed += 1
            if group.closed == len(group.ranks):
                self.groups = {
                    key: each
                    for key, each in self.groups.items()
                    if each is not group
                }

    def wake(self) -> None:
        for group in self.groups.values():
            group.changed.notify_all()


@dataclass(eq=False)
class Meeting:
    """One call: the arguments of each member, and whether it has been computed."""

    members: tuple[int, ...]
    calls: list[Call | None]
    ready: list[torch.cuda.Event] = field(default_factory=list)
    settled: list[torch.cuda.Event] = field(default_factory=list)
    done: bool = False
    first: tuple[int, str] | None = None

    def enter(self, i: int, call: Call, signature: str) -> int | None:
        """Enter member i's call; returns a member whose call differs, or None."""
        self.calls[i] = call
        # All signatures are compared with that of the first to arrive.
        self.first = self.first or (i, signature)
        if signature != self.first[1]:
            return self.first[0]
        # An all-to-all's sizes are compared pair by pair, in both directions.
        for j, other in enumerate(
            self.calls if call.kind == "all_to_all" else ()
        ):
            if other is not None and (
                call.in_splits[j] != other.out_splits[i]
                or other.in_splits[i] != call.out_splits[j]
                or call.x.shape[1:] != other.x.shape[1:]
            ):
                return j
        return None


class ThreadMembers:
    """A group's meetings by line: () for all, (i, j) for messages from i to j."""

    def __init__(self, hub: Hub, name: str, ranks: tuple[int, ...]) -> None:
        self.hub = hub
        self.name = name
        self.ranks = ranks
        self.closed = 0
        self.changed = threading.Condition(hub.lock)
        self.meetings: dict[tuple[tuple[int, ...], int], Meeting] = {}
        self.counts: Counter[tuple[tuple[int, ...], int]] = Counter()

    def come(self, line: tuple[int, ...], rank: int, call: Call) -> Meeting:
        """Bring a call to the next meeting of a line. The last to arrive computes it."""
        members = line or tuple(range(len(self.ranks)))
        event, signature = _event(call), call.signature()
        with self.hub.lock:
            self._raise_failure()
            # A member's n-th call on a line belongs to the line's n-th meeting. There,
            # place 0 sends and place 1 receives.
            i = int(call.kind == "receive") if line else rank
            number = self.counts[line, i]
            self.counts[line, i] += 1
            meeting = self.meetings.setdefault(
                (line, number), Meeting(members, [None] * len(members))
            )
            other = meeting.enter(i, call, signature)
            meeting.ready += event
            # What follows takes the lock again: only the last to arrive computes.
            complete = None not in meeting.calls
            if complete:
                del self.meetings[line, number]
        if other is not None:
            self._disagree(meeting, number, *sorted((other, i)))
        if complete:
            self._settle(meeting)
        return meeting

    def wait(self, meeting: Meeting, rank: int, call: Call) -> None:
        """Wait until the meeting is done; raises with the names of missing ranks."""
        hub, me = self.hub, self.ranks[rank]
        with hub.lock:
            hub.doing[me] = f"{call.kind} on {self.name}"
            while not meeting.done:
                self._raise_failure()
                # Until the result, a failure, the timeout, or a member is gone.
                woken = self.changed.wait_for(
                    lambda: (
                        meeting.done
                        or hub.failure is not None
                        or self._hopeless(meeting)
                    ),
                    hub.timeout,
                )
                # If all have arrived, the call is being computed, however long that
                # takes.
                if (self._hopeless(meeting) or not woken) and self._absent(
                    meeting
                ):
                    hub.failure = hub.failure or self._missing(
                        meeting, me, call
                    )
                    hub.wake()
            hub.doing[me] = None
        for event in meeting.settled:
            event.wait(torch.cuda.current_stream(call.x.device))

    def _settle(self, meeting: Meeting) -> None:
        # Outside the lock: all members have arrived and leave their tensors alone until
        # it is done.
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

    def _disagree(self, meeting: Meeting, number: int, *pair: int) -> None:
        sides = []
        for i in pair:
            call = meeting.calls[i]
            assert call is not None
            rows = f" (sends {list(call.in_splits)}, takes {list(call.out_splits)} rows)"
            splits = rows if call.kind == "all_to_all" else ""
            sides.append(
                (self.ranks[meeting.members[i]], call.signature() + splits)
            )
        self.hub.fail(disagreement(number, self.name, sides))
        with self.hub.lock:
            self._raise_failure()

    def _absent(self, meeting: Meeting) -> list[int]:
        brought = zip(meeting.members, meeting.calls, strict=False)
        return [self.ranks[member] for member, call in brought if call is None]

    def _hopeless(self, meeting: Meeting) -> bool:
        # A member that has returned will never come.
        return not self.hub.gone.isdisjoint(self._absent(meeting))

    def _missing(self, meeting: Meeting, rank: int, call: Call) -> str:
        hub, absent = self.hub, self._absent(meeting)
        text = f"rank {rank} waits in {call.kind} on {self.name}; {named(absent)} not arrived"
        if not self._hopeless(meeting):
            text += f" in {hub.timeout:g} s"
        for each in absent:
            if each in hub.gone:
                text += f"; rank {each} has returned"
            elif hub.doing[each]:
                text += f"; rank {each} waits in {hub.doing[each]}"
        return f"{text}."

    def _raise_failure(self) -> None:
        if self.hub.failure is not None:
            raise CommError(self.hub.failure)


class ThreadWork(Work):
    """A call whose meeting may not be done yet."""

    def __init__(
        self, members: ThreadMembers, meeting: Meeting, rank: int, call: Call
    ) -> None:
        self._members, self._meeting, self._rank, self._call = (
            members,
            meeting,
            rank,
            call,
        )

    def wait(self) -> None:
        self._members.wait(self._meeting, self._rank, self._call)

    def done(self) -> bool:
        return self._meeting.done


class ThreadGroup(Group):
    """A group of threads, as one of them sees it."""

    def __init__(
        self, members: ThreadMembers, rank: int, device: torch.device
    ) -> None:
        super().__init__(members.name, rank, members.ranks, device)
        self._members = members

    def _begin(self, call: Call) -> Work:
        members, rank = self._members, self.rank
        if call.kind == "send":
            # A copy, so the sender can go on and write to x before the peer arrives.
            call = Call("send", call.x.detach().clone(), at=call.at)
            members.come((rank, call.at), rank, call)
            return Work()
        line = (call.at, rank) if call.kind == "receive" else ()
        return ThreadWork(members, members.come(line, rank, call), rank, call)

    def close(self) -> None:
        self._members.hub.drop(self._members)


class ThreadWorld(World):
    """The world of one thread, created in that thread."""

    # A test's world may have others.
    group_type: type[ThreadGroup] = ThreadGroup
    members_type: type[ThreadMembers] = ThreadMembers

    def __init__(
        self, hub: Hub, rank: int, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(rank, len(hub.everyone.ranks), torch.device(device))
        become_a_rank()
        self._hub = hub
        self._splits = 0

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        # All ranks meet first, so that a different split is an error and not a hang.
        call, everyone = split_call(name, groups), self._hub.everyone
        everyone.wait(everyone.come((), self.rank, call), self.rank, call)
        self._splits += 1
        ranks = self.own(groups)
        members = self._hub.group(self._splits, name, ranks)
        return self.group_type(members, ranks.index(self.rank), self.device)


def _event(call: Call) -> list[torch.cuda.Event]:
    if not call.x.is_cuda:
        return []
    return [torch.cuda.current_stream(call.x.device).record_event()]


@contextmanager
def _streams(calls: Sequence[Call], meeting: Meeting) -> Iterator[None]:
    tensors = [
        tensor for call in calls for tensor in call.tensors() if tensor.is_cuda
    ]
    streams = [
        torch.cuda.current_stream(device)
        for device in {each.device for each in tensors}
    ]
    # Compute behind the members' work, then let their streams wait for the result.
    for stream in streams:
        for event in meeting.ready:
            stream.wait_event(event)
    yield
    for stream in streams:
        meeting.settled.append(stream.record_event())
    if calls[0].kind == "send" and streams:
        # The sender does not wait, so its copy could be freed and reused before it is
        # read.
        calls[0].x.record_stream(torch.cuda.current_stream(calls[0].x.device))


def run_threads(
    fn: Callable[..., Any],
    size: int,
    args: Sequence[Any],
    timeout: float,
    gpus: int,
    kind: type[ThreadWorld] = ThreadWorld,
) -> list[Any]:
    """Run `fn(world, *args)` on ranks that are threads, and return all results.

    The ranks share the GPUs.
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
        # The ranks of a GPU divide its memory.
        world.sharing = len(range(rank % gpus, size, gpus)) if gpus else 1
        try:
            # Otherwise the backward passes of all ranks share one engine thread per
            # GPU, and a region that waits in one of them keeps its peer from ever
            # arriving.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world, *args)
            hub.leave(rank)
        except BaseException as error:
            errors.append(error)
            reports.append(Report.of(rank, error))
            hub.fail(f"rank {rank} raised {type(error).__name__}: {error}")
        finally:
            ended.put(rank)

    threads = [
        threading.Thread(
            target=rank_thread, args=(rank,), name=f"rank {rank}", daemon=True
        )
        for rank in range(size)
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            # A thread cannot be ended from outside. One that computes on after another
            # has failed is left behind.
            ended.get(timeout=GRACE if reports else None)
    except queue.Empty:
        pass
    except KeyboardInterrupt:
        # Otherwise the ranks of an interrupted cell train on in the background of the
        # notebook, and keep their folder locked.
        hub.fail("the caller was interrupted")
        for thread in threads:
            if thread.is_alive():
                thread.join(GRACE)
        raise
    if reports:
        raise RankFailed(reports) from errors[0]
    return results
