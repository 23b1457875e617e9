"""Calls of one group in shared memory, in order: its collectives, and messages between
pairs.

For each group a rank owns a segment of its area that only it writes to:

    flag     how many rounds it has come to, over all calls
    headers  two, for rounds in turn: which call it is in, and where its tensor lies
    queues   one for each peer: where the first message to it lies
    buffers  two, for rounds in turn: what the others may read

Reaching round k means that buffer and header k have been written and those of round k -
1 have been read. So once all ranks have reached round k, buffer and header k + 1 (the
same memory as k - 1) are free, and one flag per member is all the signalling needed.
Flags only increase, even when a segment is reused for another group: a rank that still
looks at an old flag sees a larger value than it waits for.
"""

from __future__ import annotations

import platform
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rounds
from .arena import LINE, NOWHERE, PAGE, Arena, whole
from .calls import Call, CommError, Work, disagreement, signature
from .settle import HALVES, STEPS, reduce_into

# Words of a header: the length of its text is first; the text begins after the counts.
# Digests of texts are compared, and texts are read only if they differ.
PLACE, DIGEST = 1, 2
COUNTS = 3
# Words of a message: the place of the next message, the receiver's progress, the tag;
# then a text.
NEXT, STATE, TAG = 0, 1, 2
SENT, SEEN, READ = 0, 1, 2
PAYLOAD = 512

# x86 keeps the order of stores. Elsewhere releasing and acquiring a lock acts as a
# barrier.
_ordered = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


def keep_order() -> None:
    """Make earlier writes visible to other ranks before later ones (a memory fence)."""
    # Released and acquired again: no access crosses both.
    for _ in () if _ordered else (1, 2):
        with _fence:
            pass


class LineWork(Work):
    """A call in a line. `source`: the rank that a message came from."""

    ended = False
    source = -1

    def __init__(self, call: Call) -> None:
        self.call = call


class Line(ABC):
    """Calls that progress one after another; `advance` moves the first as far as
    possible."""

    collective = True
    any_of_them = False  # True if one of the absent ranks is enough

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.works: deque[LineWork] = deque()
        # the error that ended this line
        self.error: CommError | None = None

    def add(self, work: LineWork) -> None:
        """Append a call."""
        self.works.append(work)

    @abstractmethod
    def ready(self) -> bool:
        """True if the first call can progress."""

    @abstractmethod
    def advance(self) -> bool:
        """Advance the first call if possible; return True if something moved."""

    @abstractmethod
    def absent(self) -> list[int]:
        """List the ranks that the first call waits for."""


class SmallSum(NamedTuple):
    """The buffers and signature of a small all-reduce, for one of the two turns."""

    signature: tuple[bytes, int]
    mine: Tensor
    parts: list[Tensor]  # of all members, in group order
    # Reduces two parts, if there are just two.
    step: Callable[..., Tensor] | None


class Collectives(Line):
    """The collectives of a group, as one member makes them. `segment` is its number in
    each area."""

    def __init__(
        self,
        arena: Arena,
        segment: int,
        name: str,
        ranks: tuple[int, ...],
        number: int,
    ) -> None:
        super().__init__(name, number)
        self.arena, self.ranks = arena, ranks
        self.size = len(ranks)
        self.rank = ranks.index(arena.rank)
        # Nearest first, so that ranks do not all read from rank 0 at the same time.
        self.others = [
            (self.rank + i) % self.size for i in range(1, self.size)
        ]
        self.chunk = arena.extent.chunk
        self.made = 0
        # The offsets of all members' segments; only this rank's own is written here.
        starts = [arena.segment(rank, segment) for rank in ranks]
        header = whole(arena.extent.header, LINE)
        self._headers = [
            (start + LINE, start + LINE + header) for start in starts
        ]
        self.queues = [start + LINE + 2 * header for start in starts]
        buffers = whole(LINE + 2 * header + LINE * arena.extent.ranks, PAGE)
        self._buffers = [
            (start + buffers, start + buffers + 2 * self.chunk)
            for start in starts
        ]
        self._words = arena.words
        # Offsets are in bytes, and a word has 8.
        self._flag = starts[self.rank] >> 3
        self._flags = [starts[i] >> 3 for i in self.others]
        # Above every count that an earlier group can have left in this segment.
        self.count = (number + 1) << 40
        self._rounds: Iterator[bool] | None = None
        # The last round of the previous call was reached but not waited for: the next
        # call has to wait.
        self.owed = False
        self._first = False
        # The contents of this rank's headers, so that repeated calls write little.
        self._written: list[tuple[bytes, int] | None] = [None, None]
        self._digest = 0
        # Without `self`: a reference cycle would keep the memory mapped until garbage
        # collection.
        self.view = lru_cache(2000)(partial(_view, arena, self._buffers))
        self._small: dict[
            tuple[str, torch.Size, torch.dtype, int], SmallSum
        ] = {}

    # ---- memory of a call's rounds

    def mine(self, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory in this rank's buffer for the next round."""
        # Round k uses buffer k modulo 2, and this is for the next round.
        return self.view(self.rank, (self.count + 1) & 1, at, numel, dtype)

    def theirs(
        self, i: int, at: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        """Return memory that rank i wrote in the round that all have reached."""
        return self.view(i, self.count & 1, at, numel, dtype)

    def place(self, i: int) -> int:
        """Return the place of rank i's tensor, as `Arena.place` defines it."""
        return int(self._words[self._header(i) + PLACE])

    def fetch(self, i: int, place: int, into: Tensor, skip: int = 0) -> None:
        """Copy into a tensor from a place of rank i, without the first `skip` bytes
        there."""
        try:
            self.arena.fetch(self.ranks[i], place, into, skip)
        except OSError as error:
            raise CommError(
                f"rank {self.ranks[i]} is lost: {error.strerror}"
            ) from error

    def splits(self, i: int) -> list[int]:
        """Return the rows that rank i sends to each rank in an all-to-all, then those
        that it receives."""
        start = self._header(i) + COUNTS
        return list(self._words[start : start + 2 * self.size])

    def _header(self, i: int, ahead: int = 0) -> int:
        """Return the first word of rank i's header for this round, or for the one
        `ahead`."""
        return self._headers[i][(self.count + ahead) & 1] >> 3

    # ---- calls

    def add(self, work: LineWork) -> None:
        super().add(work)
        # Later calls start when the ones before them have ended.
        if len(self.works) == 1:
            self._start()

    def ready(self) -> bool:
        words, count = self._words, self.count
        for flag in self._flags:  # noqa: SIM110 - a generator costs more than what it looks at
            if words[flag] < count:
                return False
        return True

    def advance(self) -> bool:
        if not self.works or not self.ready():
            return False
        # What the others wrote before their flags must be read after the flags.
        keep_order()
        if self._rounds is None:
            self._start()
            return True
        # The first round of a call has brought all headers: now calls can be compared.
        if self._first:
            self._first = False
            self._compare()
            if self.works[0].call.kind == "all_to_all":
                self._compare_splits()
        # The last round: the call is complete, and the next one may start at once.
        if self._step(self._rounds):
            self.works.popleft().ended = True
            self.made += 1
            self._rounds = None
            if self.works:
                self._start()
        return True

    def clear(self) -> None:
        """Empty this rank's queues once all have left: the next group must not find
        messages there."""
        for i in range(self.size):
            self._words[(self.queues[self.rank] + LINE * i) >> 3] = 0

    def absent(self) -> list[int]:
        flags = zip(self.others, self._flags, strict=True)
        return sorted(
            self.ranks[i]
            for i, flag in flags
            if self._words[flag] < self.count
        )

    def _start(self) -> None:
        if self.owed and not self.ready():
            return  # `advance` calls this again
        self.owed = False
        call = self.works[0].call
        # Into the header of the next round, which nobody reads before its flag.
        if call.kind == "all_to_all":
            counts = self._header(self.rank, 1) + COUNTS
            for k, count in enumerate((*call.in_splits, *call.out_splits)):
                self._words[counts + k] = count
        readable = call.x.numel() and rounds.readable(call, self.rank)
        self._write_header(
            _signature(call), self.arena.place(call.x) if readable else NOWHERE
        )
        self._rounds = rounds.ROUNDS[call.kind](self, call)
        self._first = True
        self._step(self._rounds)

    def _step(self, steps: Iterator[bool]) -> bool:
        """Write what the next round needs and enter it; return True if there is nothing
        to wait for."""
        with torch.no_grad():
            # Every yield ends the writing for one round.
            for last in steps:
                self._come()
                self.owed = last
                return last
        return True

    def _come(self) -> None:
        """Enter the next round; its buffers have been written."""
        self.count += 1
        # First the data and then the flag, in this order for all ranks.
        keep_order()
        self._words[self._flag] = self.count

    def small_all_reduce(
        self, x: Tensor, op: str, wait: Callable[[], None]
    ) -> bool:
        """Make a small all-reduce in one round, with as little Python as possible.

        It is waited for at once, as tensor parallelism of small models does. Returns
        False, having done nothing, if it has to go the general way; other ranks may
        choose either. `wait` is called if the others do not arrive soon.
        """
        if self.works or self.owed or x.requires_grad or not x.is_contiguous():
            return False
        # 1. Find the buffers for this op, shape, dtype and turn, prepared once.
        turn = (self.count + 1) & 1
        key = op, x.shape, x.dtype, turn
        plan = self._small.get(key) or self._prepare(x, op, key)
        if plan is None:
            return False
        # 2. Write x and the header, and enter the round.
        plan.mine.copy_(x)
        self._write_header(plan.signature, NOWHERE)
        self._come()
        # 3. Look some times before waiting in earnest.
        for _ in range(20):
            if self.ready():
                break
        else:
            wait()
        # 4. Compare the headers, and reduce in rank order.
        keep_order()
        self._compare()
        self.made += 1
        if plan.step is None:
            reduce_into(x, plan.parts, op)
        else:
            plan.step(*plan.parts, out=x)
        return True

    def _prepare(
        self, x: Tensor, op: str, key: tuple[str, torch.Size, torch.dtype, int]
    ) -> SmallSum | None:
        n, exact = x.numel(), not x.dtype.is_floating_point
        # Invalid calls are refused in the general way.
        refused = op not in STEPS or (
            exact and (op == "average" or x.dtype == torch.bool)
        )
        if refused or not 0 < n * x.itemsize <= rounds.SMALL:
            return None
        parts = [
            self.view(i, key[3], 0, n, x.dtype).view(x.shape)
            for i in range(self.size)
        ]
        # One step of two parts, without a float32 copy or a division.
        plain = self.size == 2 and x.dtype not in HALVES and op != "average"
        signature = _signature(Call("all_reduce", x, op=op))
        if len(self._small) > 500:
            self._small.clear()
        plan = SmallSum(
            signature, parts[self.rank], parts, STEPS[op] if plain else None
        )
        self._small[key] = plan
        return plan

    # ---- comparison of calls between members

    def _write_header(self, signature: tuple[bytes, int], place: int) -> None:
        """Write the header of the next round: the call, and the place of its tensor."""
        turn, word = (self.count + 1) & 1, self._header(self.rank, 1)
        # The text of a repeated call is there already; only its place may differ.
        if self._written[turn] is not signature:
            text, self._words[word + DIGEST] = signature
            start = 8 * (word + COUNTS + 2 * self.size)
            self.arena.bytes[start : start + len(text)] = text
            self._words[word] = len(text)
            self._written[turn] = signature
        self._words[word + PLACE] = place
        self._digest = signature[1]

    def _compare(self) -> None:
        turn, words = self.count & 1, self._words
        for i in self.others:
            if words[(self._headers[i][turn] >> 3) + DIGEST] != self._digest:
                self._disagree(i, "")

    def _compare_splits(self) -> None:
        splits = [self.splits(i) for i in range(self.size)]
        n, me = self.size, self.rank
        # i sends to me as many rows as I take from i, and the reverse.
        for i in self.others:
            if (
                splits[i][me] != splits[me][n + i]
                or splits[me][i] != splits[i][n + me]
            ):
                self._disagree(i, " (sends {}, takes {} rows)")

    def _disagree(self, other: int, more: str) -> None:
        sides = []
        for i in sorted((other, self.rank)):
            word, splits = self._header(i), self.splits(i)
            start = 8 * (word + COUNTS + 2 * self.size)
            text = bytes(self.arena.bytes[start : start + self._words[word]])
            rows = more.format(splits[: self.size], splits[self.size :])
            sides.append((self.ranks[i], text.decode(errors="replace") + rows))
        raise CommError(disagreement(self.made, self.name, sides))


def _view(
    arena: Arena,
    buffers: list[tuple[int, int]],
    i: int,
    turn: int,
    at: int,
    *kind: Any,
) -> Tensor:
    """Return memory in one of the two buffers of rank i."""
    return arena.at(buffers[i][turn] + at, *kind)


def _signature(call: Call) -> tuple[bytes, int]:
    """Return the text that must be equal on all members, and its digest."""
    return _digested(call.kind, call.op, call.at, call.x.numel(), call.x.dtype)


@lru_cache(2000)
def _digested(*key: Any) -> tuple[bytes, int]:
    text = signature(*key).encode()[:1000]
    return text, int.from_bytes(
        blake2b(text, digest_size=8).digest(), "big", signed=True
    )


class Inbox:
    """The messages from one member to this one. A message lies in its sender's heap
    until it is read."""

    def __init__(self, group: Collectives, source: int) -> None:
        self.source, self.rank = source, group.ranks[source]
        self.read = 0
        self._arena, self._words = group.arena, group.arena.words
        # The source's queue for this rank, then the last message seen: NEXT leads on.
        self._last = group.queues[source] + LINE * group.rank
        self._unread: dict[int, deque[int]] = {}

    def first(self, tag: int) -> int:
        """Return the offset of the first unread message with a tag; 0 if there is
        none."""
        # Follow the chain as far as it goes, and sort new messages by their tags.
        while message := self._words[(self._last >> 3) + NEXT]:
            keep_order()
            self._unread.setdefault(
                self._words[(message >> 3) + TAG], deque()
            ).append(message)
            self._words[(message >> 3) + STATE] = SEEN
            self._last = message
        messages = self._unread.get(tag)
        return messages[0] if messages else 0

    def text(self, message: int) -> str:
        return self._arena.read_text(message + LINE)

    def take(self, message: int, tag: int, x: Tensor) -> None:
        """Copy a message to x. Afterwards its memory belongs to the sender again."""
        with torch.no_grad():
            x.view(-1).copy_(
                self._arena.at(message + PAYLOAD, x.numel(), x.dtype)
            )
        # The copy is complete before the sender may reuse the memory.
        keep_order()
        self._words[(message >> 3) + STATE] = READ
        self.read += 1
        self._unread[tag].popleft()
        if not self._unread[tag]:
            del self._unread[tag]


class Receives(Line):
    """Receives of one tag from one source, or from any of several, in message order."""

    collective = False

    def __init__(
        self, group: Collectives, inboxes: list[Inbox], tag: int
    ) -> None:
        super().__init__(group.name, group.number)
        self.any_of_them = len(inboxes) > 1
        self._inboxes, self._tag, self._me = (
            inboxes,
            tag,
            group.ranks[group.rank],
        )

    def ready(self) -> bool:
        return any(inbox.first(self._tag) for inbox in self._inboxes)

    def advance(self) -> bool:
        # From any source: the first inbox with a message of this tag.
        for inbox in self._inboxes if self.works else ():
            if message := inbox.first(self._tag):
                self._read(inbox, message)
                return True
        return False

    def _read(self, inbox: Inbox, message: int) -> None:
        work = self.works[0]
        sent, expected = inbox.text(message), work.call.signature()
        if sent != expected:
            sides = sorted([(inbox.rank, sent), (self._me, expected)])
            raise CommError(disagreement(inbox.read, self.name, sides))
        inbox.take(message, self._tag, work.call.x)
        self.works.popleft()
        work.source, work.ended = inbox.source, True

    def absent(self) -> list[int]:
        return sorted(inbox.rank for inbox in self._inboxes)


class Outbox:
    """The messages from this member to another one that may not have been read yet."""

    def __init__(self, group: Collectives, target: int) -> None:
        self._arena, self._words = group.arena, group.arena.words
        self._last = group.queues[group.rank] + LINE * target
        self._sent: deque[tuple[int, int]] = deque()

    def send(self, call: Call, tag: int = 0) -> None:
        """Write a message and append it to the queue."""
        # The receiver finds the next message through the last one that it saw, which
        # must stay.
        while (
            len(self._sent) > 1
            and self._state(0) == READ
            and self._state(1) >= SEEN
        ):
            self._arena.heap.give(*self._sent.popleft())
        x = call.x.detach().view(-1)
        size = PAYLOAD + x.numel() * x.itemsize
        message = self._arena.heap.take(size)
        if message is None:
            raise CommError(
                f"there is no room for a message of {size} bytes in shared memory; its receiver is "
                "far behind, or the machine's shared memory cannot grow: use backend gloo."
            )
        # A new message ends the chain: its NEXT is 0.
        word = message >> 3
        (
            self._words[word + NEXT],
            self._words[word + STATE],
            self._words[word + TAG],
        ) = (
            0,
            SENT,
            tag,
        )
        self._arena.write_text(
            message + LINE, call.signature(), PAYLOAD - LINE
        )
        with torch.no_grad():
            self._arena.at(message + PAYLOAD, x.numel(), x.dtype).copy_(x)
        # The message is complete before the one before it leads there.
        keep_order()
        self._words[(self._last >> 3) + NEXT] = message
        self._last = message
        self._sent.append((message, size))

    def _state(self, i: int) -> int:
        return int(self._words[(self._sent[i][0] >> 3) + STATE])

    def drop(self) -> None:
        """Free all messages, after the receiver has closed its side."""
        while self._sent:
            self._arena.heap.give(*self._sent.popleft())
