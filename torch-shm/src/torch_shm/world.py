"""A world of processes on one machine that communicate through shared memory, and its
groups.

Every rank advances its own calls: when it makes one, and while it waits for any of
them, so that ranks may wait for their calls in any order. A send completes at once. No
threads are involved, and a rank that computes does not advance the calls of others.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .arena import Arena, Extent, forget
from .calls import NOTHING, Call, CommError, CommMisuse, Work, split_call
from .lines import Collectives, Inbox, Line, LineWork, Outbox, Receives
from .settle import settle
from .watch import Watch

_COMPLETE = Work()
_BARRIER = Call("barrier", NOTHING)


class SharedWork(LineWork):
    """A call that a line executes."""

    def __init__(self, world: "SharedWorld", line: Line, call: Call) -> None:
        super().__init__(call)
        self.world, self.line = world, line

    def wait(self, limit: float | None = None) -> None:
        """Wait for the call. After `limit` seconds this raises `CommTimeout`; the call
        continues."""
        if not self.ended:
            self.world.wait_for(self, limit)

    def done(self) -> bool:
        if not self.ended:
            self.world.advance()
        return self.ended


class SharedGroup:
    """A group of ranks that share memory, as one of them sees it. Calls must have
    passed `calls.check`."""

    def __init__(self, world: "SharedWorld", collectives: Collectives) -> None:
        self.name = collectives.name
        self.rank = collectives.rank
        self.ranks = collectives.ranks
        self.size = collectives.size
        self._world, self._collectives = world, collectives
        self._inboxes: dict[int, Inbox] = {}
        # by source (-1 for any) and tag
        self._receives: dict[tuple[int, int], Receives] = {}
        self._outboxes: dict[int, Outbox] = {}
        self.closed = False

    def begin(self, call: Call, tag: int = 0) -> Work:
        """Start a call. Sends and receives match by tag; a receive from -1 accepts any
        source."""
        if call.kind == "send":
            return self._send(call, tag)
        if call.kind == "receive":
            return self._world.begin(self._receives_of(call.at, tag), call)
        # A group of one computes its collectives at once.
        if self.size == 1:
            settle([call])
            return _COMPLETE
        return self._world.begin(self._collectives, call)

    def small_all_reduce(self, x: Tensor, op: str) -> bool:
        """Make a small all-reduce and wait for it; return False, having done nothing,
        if it is not one."""
        return self.size > 1 and self._world.small_all_reduce(
            self._collectives, x, op
        )

    def _send(self, call: Call, tag: int) -> Work:
        """Send `call.x` to a rank, in order with earlier messages of the same tag."""
        if call.at not in self._outboxes:
            self._outboxes[call.at] = Outbox(self._collectives, call.at)
        self._outboxes[call.at].send(call, tag)
        return _COMPLETE

    def _receives_of(self, source: int, tag: int) -> Receives:
        """Return the receives of a tag from a rank, or from any rank if the source is
        -1."""
        key = source, tag
        if key not in self._receives:
            sources = [source] if source >= 0 else self._collectives.others
            for i in sources:
                if i not in self._inboxes:
                    self._inboxes[i] = Inbox(self._collectives, i)
            inboxes = [self._inboxes[i] for i in sources]
            self._receives[key] = Receives(self._collectives, inboxes, tag)
        return self._receives[key]

    def close(self) -> None:
        """Close the group. Collective: nobody continues while another rank still
        reads."""
        if not self.closed:
            self.begin(_BARRIER).wait()
            self.release()

    def release(self) -> None:
        """Free the group's memory, after a barrier of all members."""
        self.closed = True
        for outbox in self._outboxes.values():
            outbox.drop()
        self._collectives.clear()
        self._world.free(self._collectives.number)


class SharedWorld:
    """This process as one rank of an arena, which is opened once at `path`.

    Worlds that share `lines` advance each other's calls. Whoever advances calls holds
    the `lock`.
    """

    def __init__(
        self,
        path: str,
        extent: Extent,
        rank: int,
        *,
        timeout: float,
        lines: "dict[Line, SharedWorld] | None" = None,
        lock: "threading.RLock | None" = None,
    ) -> None:
        self.rank, self.size = rank, extent.ranks
        self.arena = Arena(path, extent, rank)
        self.watch = Watch(self.arena, self.size, timeout)
        self._everyone = Collectives(
            self.arena, 0, "the world", tuple(range(self.size)), 0
        )
        # Lines with pending calls.
        self._lines = {} if lines is None else lines
        self._lock = lock or threading.RLock()
        # Segments by number of the split: equal on every rank, since all split and
        # close in the same order.
        self._segments: dict[int, int] = {}
        self._splits = 0
        # 1. Meet: all ranks have mapped the arena, and their pages are written.
        self._meet(_BARRIER)
        if rank == 0:
            # All have mapped the file. It loses its name here, so that a kill leaves
            # nothing behind.
            forget(path)
        # 2. Try to read each other's memory, and meet again with the results.
        self.watch.try_reading()
        self._meet(_BARRIER)
        self.arena.processes = self.watch.processes()

    def split(
        self, name: str, groups: Sequence[tuple[int, ...]]
    ) -> SharedGroup:
        """Return this rank's group. Every rank calls this with the same groups in the
        same order."""
        # Nobody passes this before all have closed the previous users of these
        # segments.
        self._meet(split_call(name, groups))
        self._splits += 1
        self.watch.names.append(name)
        # The lowest free number, which is the same on all ranks.
        taken = set(self._segments.values())
        segment = next(i for i in range(1, len(taken) + 2) if i not in taken)
        if segment >= self.arena.extent.segments:
            raise CommError(
                f"group {name!r}: there is shared memory for {segment} open groups, all of which are in use."
            )
        self._segments[self._splits] = segment
        ranks = next(group for group in groups if self.rank in group)
        return SharedGroup(
            self, Collectives(self.arena, segment, name, ranks, self._splits)
        )

    def free(self, number: int) -> None:
        """Release a closed group's segment for reuse."""
        del self._segments[number]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in shared memory, which all ranks can read in place."""
        return self.arena.empty(numel, dtype)

    # ---- calls

    def begin(self, line: Line, call: Call) -> SharedWork:
        """Append a call to its line and advance it as far as possible."""
        work = SharedWork(self, line, call)
        with self._lock:
            # An error of an earlier call has ended this line for good.
            if line.error is not None:
                raise line.error
            line.add(work)
            self._lines[line] = self
            self.move(line)
        return work

    def move(self, line: Line) -> bool:
        """Advance a line. An error is raised only by those who wait for its calls."""
        # Without the lock, since waiting ranks check often; `ready` of messages already
        # reads them.
        if line.collective and not line.ready():
            return False
        with self._lock:
            moved = False
            try:
                moved = line.error is None and line.advance()
            except CommError as error:
                line.error = error
            if not line.works or line.error is not None:
                self._lines.pop(line, None)
            return moved

    def advance(self) -> bool:
        """Advance every line once; return True if something moved."""
        return (
            sum(world.move(line) for line, world in tuple(self._lines.items()))
            > 0
        )

    def wait_for(self, work: SharedWork, limit: float | None = None) -> None:
        """Wait until a call has ended. Meanwhile all other calls of this rank progress,
        too."""
        line = work.line

        def go_on() -> bool:
            # Not only this line: a peer may have to complete another call before it
            # reaches this one.
            while self.move(line):
                if work.ended:
                    return True
            while len(self._lines) > 1 and self.advance():
                pass
            if line.error is not None and not work.ended:
                self.watch.fail(str(line.error), line)
            return work.ended

        self.watch.until(work.call.kind, go_on, line, limit)

    def examine(self, line: Line, waited: float) -> None:
        """End a line that cannot progress, on behalf of no particular caller."""
        with self._lock:
            # The message may have arrived before its sender ended: check again what it
            # left behind.
            if self.watch.why_stuck(line, waited) and not self.move(line):
                reason = self.watch.why_stuck(line, waited)
                try:
                    if reason is not None and line.error is None:
                        self.watch.fail(reason, line)
                except CommError as error:
                    line.error = error
                    self._lines.pop(line, None)

    def small_all_reduce(self, group: Collectives, x: Tensor, op: str) -> bool:
        """Make a small all-reduce and wait for it; return False, having done nothing,
        if it is not one."""
        with self._lock:  # another thread may be about to end the last call
            if group.error is not None:
                raise group.error

        # The other lines advance meanwhile, as a peer may wait for one of them.
        def go_on() -> bool:
            while not group.ready() and self.advance():
                pass
            return group.ready()

        try:
            return group.small_all_reduce(
                x, op, lambda: self.watch.until("all_reduce", go_on, group)
            )
        except CommError as error:
            if not isinstance(error, CommMisuse):
                group.error = error
                self.watch.fail(str(error), group)
            raise

    def _meet(self, call: Call) -> None:
        if self.size > 1:
            self.begin(self._everyone, call).wait()

    # ---- ends

    def fail(self, failure: str) -> None:
        """Tell the other ranks why this one fails; they raise it wherever they wait."""
        self.watch.tell(failure)

    def leave(self) -> None:
        """Make no further calls. Waits for nobody, as the other ranks may be gone
        already."""
        # Nobody advances the lines of a world that has been left.
        with self._lock:
            for line in [
                line for line, world in self._lines.items() if world is self
            ]:
                del self._lines[line]
        self.watch.leave()

    def close(self) -> None:
        """Leave together, so that nobody takes a rank that has left for a lost one."""
        self._meet(_BARRIER)
        self.leave()
