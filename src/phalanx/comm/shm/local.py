"""A world of processes of one machine that talk through shared memory.

Every rank moves its own calls: when it makes one, and while it waits for any of them, so that ranks
may wait for their calls in any order. A send is complete at once. Nothing of it runs in a thread of
its own, and a rank that computes does not help others on.
"""

import os
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from phalanx.comm.base import Call, CommError, CommMisuse, Group, Work, World
from phalanx.comm.settle import settle
from phalanx.comm.shm.arena import Arena, Extent, forget
from phalanx.comm.shm.little import Little
from phalanx.comm.shm.table import Done, Inbox, Letters, Line, Outbox, Table
from phalanx.comm.shm.watch import Watch


class Ongoing(Work):
    """A call that a line carries out."""

    def __init__(self, world: "ShmWorld", call: Call, number: int, line: Line, done: Done):
        self._world, self._kind, self._number = world, call.kind, number
        self._line, self._done = line, done

    def wait(self, limit: float | None = None, quiet: bool = False) -> None:
        """`limit` and `quiet`: see `Watch.until`."""
        if not self._done.ended:
            self._world.wait_for(self._kind, self._number, self._line, self._done, limit, quiet)

    @property
    def ended(self) -> bool:
        """Whether it has ended, without moving it."""
        return self._done.ended

    @property
    def source(self) -> int:
        """The place that a received tensor came from."""
        return self._done.source

    @property
    def absent(self) -> list[int]:
        """The ranks that it waits for."""
        return self._line.absent()

    def done(self) -> bool:
        if not self._done.ended:
            self._world.advance()
        return self._done.ended


_DONE = Work()


class ShmGroup(Group):
    """A group of ranks around a table, as one of them sees it."""

    def __init__(self, world: "ShmWorld", number: int, table: Table) -> None:
        super().__init__(table.name, table.rank, table.ranks, world.device)
        self._world, self._number, self._table = world, number, table
        self._inboxes: dict[int, Inbox] = {}
        # By source, -1 for any, and tag.
        self._letters: dict[tuple[int, int], Letters] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._own: deque[Tensor] = deque()
        self._closed = False
        self._little = Little(table, self, partial(world.wait_here, number, table))

    def all_reduce(self, x: Tensor, op: str = "sum", *, wait: bool = True) -> Work:
        if wait and self.all_reduce_little(x, op):
            return _DONE
        return super().all_reduce(x, op, wait=wait)

    def all_reduce_little(self, x: Tensor, op: str) -> bool:
        """Make a small all-reduce and wait for it; False, and nothing is done, if it is not one."""
        return self.size > 1 and self._world.try_little(self._little, x, op, self._table)

    def _begin(self, call: Call) -> Work:
        if call.kind == "send":
            return self._send(call)
        if self.size == 1 or (call.kind == "receive" and call.at == self.rank):
            return self._with_oneself(call)
        if call.kind == "receive":
            return self._receive(call, call.at, 0)
        return self._ongoing(self._table, call)

    def _ongoing(self, line: Line, call: Call) -> "Ongoing":
        return Ongoing(self._world, call, self._number, line, self._world.begin(line, call))

    def _receive(self, call: Call, source: int, tag: int) -> "Ongoing":
        """Receive what has a tag, from a place or, if that is -1, from whoever sends first."""
        if (source, tag) not in self._letters:
            sources = [source] if source >= 0 else [i for i in range(self.size) if i != self.rank]
            for i in sources:
                if i not in self._inboxes:
                    self._inboxes[i] = Inbox(self._table, i)
            inboxes = [self._inboxes[i] for i in sources]
            self._letters[source, tag] = Letters(self._table, inboxes, tag)
        return self._ongoing(self._letters[source, tag], call)

    def receive_tagged(self, x: Tensor, source: int, tag: int) -> Work:
        """`x` becomes the next tensor with a tag that a place sent here; -1: that any of them did."""
        call = Call("receive", x, at=source)
        return self._receive(call, source, tag)

    def send_tagged(self, x: Tensor, to: int, tag: int) -> Work:
        """`x` goes to a place, in order with what was sent there before with the same tag."""
        return self._send(Call("send", x, at=to), tag)

    def _send(self, call: Call, tag: int = 0) -> Work:
        if call.at == self.rank:
            self._own.append(call.x.detach().clone())
        else:
            if call.at not in self._outboxes:
                self._outboxes[call.at] = Outbox(self._table, call.at)
            self._outboxes[call.at].send(call, tag)
        return Work()

    def _with_oneself(self, call: Call) -> Work:
        if call.kind != "receive":
            settle([call])
        elif not self._own:
            raise CommError(
                f"receive on {self.name}: rank {self.ranks[self.rank]} waits for itself."
            )
        else:
            settle([Call("send", self._own.popleft()), call])
        return Work()

    def close(self) -> None:
        """Every member closes: nobody is past it while another still reads what was laid down."""
        if self._closed:
            return
        self._closed = True
        self.barrier()
        for outbox in self._outboxes.values():
            outbox.drop()
        self._table.clear()
        self._world.free(self._number)


class ShmWorld(World):
    """This process as one rank of an arena. `path` is where to open it, once."""

    def __init__(
        self,
        path: str,
        extent: Extent,
        rank: int,
        *,
        timeout: float,
        busy: "dict[Line, ShmWorld] | None" = None,
    ) -> None:
        super().__init__(rank, extent.ranks, torch.device("cpu"))
        self._arena = Arena(path, extent, rank)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._watch = Watch(self._arena, self.size, timeout, cores or 1)
        self._everyone = Table(self._arena, 0, "the world", tuple(range(self.size)), 1)
        # Lines with calls; worlds that share this move each other's.
        self._busy = {} if busy is None else busy
        # Seats by group, alike on every rank, since all split and close in the same order.
        self._seats: dict[int, int] = {}
        self._splits = 0
        self._meet(Call("barrier", torch.empty(0)))
        if rank == 0:
            # All have mapped it: a file loses its name here, so that a kill leaves nothing.
            forget(path)

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        # The whole list of groups is what the ranks must say alike. Nobody is past this before all
        # have closed what sat at these seats before.
        said = f"{name!r} into {[list(each) for each in groups]}"
        self._meet(Call("split", torch.empty(0), op=said))
        self._splits += 1
        self._watch.names.append(name)
        taken = set(self._seats.values())
        seat = next(i for i in range(1, len(taken) + 2) if i not in taken)
        if seat >= self._arena.extent.seats:
            raise CommError(f"group {name!r}: this arena has {seat} seats and all are taken.")
        self._seats[self._splits] = seat
        ranks = next(group for group in groups if self.rank in group)
        table = Table(self._arena, seat, name, ranks, self._splits + 1)
        return ShmGroup(self, self._splits, table)

    def free(self, number: int) -> None:
        """A group is closed; another may have its seat."""
        del self._seats[number]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._arena.empty(numel, dtype)

    def begin(self, line: Line, call: Call) -> Done:
        """Put a call in its line and move it as far as it goes."""
        if line.error is not None:
            raise line.error
        done = line.add(call)
        self._busy[line] = self
        self.move(line)
        return done

    def advance(self) -> bool:
        """Move every line once; True if something moved."""
        moved = False
        for line in tuple(self._busy):
            moved |= self.move(line)
        return moved

    def wait_for(
        self,
        kind: str,
        number: int,
        line: Line,
        done: Done,
        limit: float | None = None,
        quiet: bool = False,
    ) -> None:
        """Return when a call has ended. Meanwhile all others of this rank go on, too."""

        def go_on() -> bool:
            # Not only this line: a peer may have to get past another call to come to this one.
            while self.move(line):
                if done.ended:
                    return True
            while len(self._busy) > 1 and self.advance():
                pass
            if line.error is not None and not done.ended:
                self._watch.fail(str(line.error), line)
            return done.ended

        self._watch.until(kind, number, go_on, line, limit=limit, quiet=quiet)

    def move(self, line: Line) -> bool:
        """Move a line. If that fails, those who wait for its calls raise it, and nobody else."""
        if line.error is not None:
            return False
        try:
            moved = line.advance()
        except CommError as error:
            line.error = error
            moved = False
        if not line.calls or line.error is not None:
            self._busy.pop(line, None)
        return moved

    def wait_here(self, number: int, table: Table) -> None:
        """Return when all have come to a round of a call that is not in the table's line."""

        def go_on() -> bool:
            while not table.ready() and self.advance():
                pass
            return table.ready()

        self._watch.until("all_reduce", number, go_on, table)

    def try_little(self, little: Little, x: Tensor, op: str, table: Table) -> bool:
        """A small all-reduce, if it is one."""
        if table.error is not None:
            raise table.error
        try:
            return little.all_reduce(x, op)
        except CommError as error:
            if not isinstance(error, CommMisuse):
                table.error = error
                self._watch.fail(str(error), table)
            raise

    def _meet(self, call: Call) -> None:
        if self.size > 1:
            done = self.begin(self._everyone, call)
            self.wait_for(call.kind, 0, self._everyone, done)

    def fail(self, failure: str) -> None:
        """Tell the others why this rank goes; they raise it wherever they wait."""
        self._watch.tell(failure)

    def leave(self) -> None:
        """Tell the others that this rank makes no further call."""
        self._watch.leave()

    def close(self) -> None:
        """Leave together: nobody takes a rank that has left for one that is lost."""
        self.clear()
        self._meet(Call("barrier", torch.empty(0)))
        self.leave()
