"""A group of ranks around a table in shared memory, and the letters that pairs of them exchange.

Each member has a seat that only it writes to:

    flag    how many rounds it has come to, over all calls
    notes   two, for rounds in turn: what call it is in, and where its tensor lies
    boxes   one for each peer: where the first letter to it lies
    slots   two, for rounds in turn: what it lays down

Coming to round k says that slot and note k are written and that those of round k - 1 are read. So
once everyone has come to round k, slot and note k + 1 (which are those of k - 1) are free, and one
flag a member is all the signalling there is. Flags only rise, also when a table is laid again for
other ranks: who still looks at an old flag sees more than it waits for.
"""

import hashlib
import platform
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.comm.base import Call, CommError, Work, disagreement
from phalanx.comm.shm import rounds
from phalanx.comm.shm.arena import LINE, PAGE, Arena, whole

# Words of a note: the length of its text comes first; then the text begins after the counts. Texts
# are compared by their digest, and read when it differs.
ADDRESS, DIGEST = 1, 2
COUNTS = 3
# Words of a letter: where the next one lies, how far its receiver is with it, its tag; then a text.
NEXT, STATE, TAG = 0, 1, 2
SENT, SEEN, READ = 0, 1, 2
LETTER = 512

# On x86 stores are seen in their order. Elsewhere a lock given back and taken keeps them apart.
_ordered = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


def keep_order() -> None:
    """What was written before is seen before what is written after."""
    if not _ordered:
        with _fence:
            pass
        with _fence:
            pass


class Line(ABC):
    """Calls that progress one after another; `advance` moves the first as far as it goes."""

    name: str
    collective = True
    any_of_them = False

    def __init__(self) -> None:
        self.calls: deque[tuple[Call, Done]] = deque()
        # What ended this line: its calls do not go on.
        self.error: CommError | None = None

    @abstractmethod
    def add(self, call: Call) -> "Done":
        """Put a call at the end."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the first call can go on."""

    @abstractmethod
    def advance(self) -> bool:
        """Go on with the first call if it can; True if something moved."""

    @abstractmethod
    def absent(self) -> list[int]:
        """The ranks that the first call waits for."""


class Done(Work):
    """A flag that a line raises when it has finished a call. `source`: who a letter came from."""

    ended = False
    source = -1


class Table(Line):
    """A seat at a table: collectives of a group, in their order."""

    def __init__(self, arena: Arena, number: int, name: str, ranks: tuple[int, ...], epoch: int):
        super().__init__()
        self.arena, self.name, self.ranks = arena, name, ranks
        self.size = len(ranks)
        self.rank = ranks.index(arena.rank)
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.chunk = arena.extent.chunk
        self.made = 0
        seats = [arena.seat(rank, number) for rank in ranks]
        head = whole(arena.extent.head, LINE)
        self._notes = [(seat + LINE, seat + LINE + head) for seat in seats]
        self.boxes = [seat + LINE + 2 * head for seat in seats]
        slots = whole(LINE + 2 * head + LINE * arena.extent.ranks, PAGE)
        self._slots = [(seat + slots, seat + slots + 2 * self.chunk) for seat in seats]
        self._words = arena.words
        self._flag = seats[self.rank] >> 3
        self._flags = [seats[i] >> 3 for i in self.others]
        self.count = epoch << 40
        self._rounds: Iterator[bool] | None = None
        # The last round of a call was come to and not waited for: the next call has to.
        self.owed = False
        self._first = False
        # What stands in this rank's notes, so that calls that repeat write little.
        self._noted: list[tuple[bytes, int] | None] = [None, None]
        self._digest = 0
        self._views: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}
        self._texts: dict[tuple[object, ...], tuple[bytes, int]] = {}

    # ---- what the rounds of a call are written with

    def mine(self, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Room in the slot of the round that comes."""
        return self.view(self.rank, (self.count + 1) & 1, at, numel, dtype)

    def theirs(self, i: int, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        """What place i laid down in the round that everyone has come to."""
        return self.view(i, self.count & 1, at, numel, dtype)

    def places(self) -> list[int] | None:
        """Where everyone's tensor lies in shared memory; None if it does not for all of them."""
        found = [self.place(i) for i in range(self.size)]
        return found if min(found) >= 0 else None

    def place(self, i: int) -> int:
        """Where place i's tensor lies in shared memory; -1 if it does not."""
        return int(self._words[(self._notes[i][self.count & 1] >> 3) + ADDRESS])

    def at(self, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        return self.arena.at(place, numel, dtype)

    def counts(self) -> list[list[int]]:
        """How many rows each place sends to each in an all-to-all."""
        return [self._splits(i)[: self.size] for i in range(self.size)]

    def _splits(self, i: int) -> list[int]:
        start = (self._notes[i][self.count & 1] >> 3) + COUNTS
        return list(self._words[start : start + 2 * self.size])

    def view(self, i: int, turn: int, at: int, numel: int, dtype: torch.dtype) -> Tensor:
        key = (i, turn, at, numel, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 2000:
                self._views.clear()
            found = self._views[key] = self.arena.at(self._slots[i][turn] + at, numel, dtype)
        return found

    # ---- calls

    def add(self, call: Call) -> Done:
        done = Done()
        self.calls.append((call, done))
        if len(self.calls) == 1:
            self._start()
        return done

    def ready(self) -> bool:
        words, count = self._words, self.count
        for flag in self._flags:  # noqa: SIM110 - a generator costs more than what it looks at
            if words[flag] < count:
                return False
        return True

    def advance(self) -> bool:
        if not self.calls or not self.ready():
            return False
        keep_order()
        if self._rounds is None:
            self._start()
            return True
        if self._first:
            self._first = False
            self.compare()
            if self.calls[0][0].kind == "all_to_all":
                self._compare_splits()
        if self._step(self._rounds):
            self.calls.popleft()[1].ended = True
            self.made += 1
            self._rounds = None
            if self.calls:
                self._start()
        return True

    def clear(self) -> None:
        """Empty this seat's boxes, once all have left: the next table may not find letters there."""
        for i in range(self.size):
            self._words[(self.boxes[self.rank] + LINE * i) >> 3] = 0

    def absent(self) -> list[int]:
        flags = zip(self.others, self._flags, strict=True)
        return sorted(self.ranks[i] for i, flag in flags if self._words[flag] < self.count)

    def _start(self) -> None:
        if self.owed and not self.ready():
            return  # `advance` comes here again
        self.owed = False
        call = self.calls[0][0]
        self._say(call)
        self._rounds = rounds.begin(self, call)
        self._first = True
        self._step(self._rounds)

    def _step(self, steps: Iterator[bool]) -> bool:
        """Lay down what the next round needs and come to it; True when there is none to wait for."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._step(steps)
        for last in steps:
            self.come()
            self.owed = last
            return last
        return True

    def come(self) -> None:
        """Come to the next round: what it needs has been laid down."""
        self.count += 1
        keep_order()
        self._words[self._flag] = self.count

    def _say(self, call: Call) -> None:
        """Write the note of a call's first round."""
        if call.kind == "all_to_all":
            counts = (self._notes[self.rank][(self.count + 1) & 1] >> 3) + COUNTS
            for k, count in enumerate((*call.in_splits, *call.out_splits)):
                self._words[counts + k] = count
        readable = call.x.numel() and rounds.readable(call, self.rank)
        self.note(self.promise(call), self.arena.address(call.x) if readable else -1)

    def promise(self, call: Call) -> tuple[bytes, int]:
        """What the members have to say alike of a call, and its digest."""
        key = (call.kind, call.op, call.at, call.x.numel(), call.x.dtype)
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) > 2000:
                self._texts.clear()
            text = call.signature().encode()[:1000]
            digest = hashlib.blake2b(text, digest_size=8).digest()
            known = self._texts[key] = text, int.from_bytes(digest, "big", signed=True)
        return known

    def note(self, promise: tuple[bytes, int], address: int) -> None:
        """Write the note for the round that comes: what is promised, and where the tensor lies."""
        turn = (self.count + 1) & 1
        word = self._notes[self.rank][turn] >> 3
        if self._noted[turn] is not promise:
            text, self._words[word + DIGEST] = promise
            start = 8 * (word + COUNTS + 2 * self.size)
            self.arena.bytes[start : start + len(text)] = text
            self._words[word] = len(text)
            self._noted[turn] = promise
        self._words[word + ADDRESS] = address
        self._digest = promise[1]

    def _said(self, i: int) -> bytes:
        offset = self._notes[i][self.count & 1]
        start = offset + 8 * (COUNTS + 2 * self.size)
        return bytes(self.arena.bytes[start : start + self._words[offset >> 3]])

    def compare(self) -> None:
        """Everyone's note has to say what this rank's says."""
        turn, words = self.count & 1, self._words
        for i in self.others:
            if words[(self._notes[i][turn] >> 3) + DIGEST] != self._digest:
                self._quarrel(i, "")

    def _compare_splits(self) -> None:
        splits = [self._splits(i) for i in range(self.size)]
        n, me = self.size, self.rank
        for i in self.others:
            if splits[i][me] != splits[me][n + i] or splits[me][i] != splits[i][n + me]:
                self._quarrel(i, " (sends {}, takes {} rows)")

    def _quarrel(self, i: int, more: str) -> None:
        said = []
        for place in sorted((i, self.rank)):
            splits = self._splits(place)
            text = self._said(place).decode(errors="replace")
            more_ = more.format(splits[: self.size], splits[self.size :])
            said.append((self.ranks[place], f"{text}{more_}"))
        raise CommError(disagreement(self.made, self.name, said))


class Inbox:
    """What one member sends to this one. Each letter lies in its sender's heap until it is read."""

    def __init__(self, table: Table, source: int) -> None:
        self.source, self.rank = source, table.ranks[source]
        self.read = 0
        self._arena, self._words = table.arena, table.arena.words
        self._last = table.boxes[source] + LINE * table.rank
        self._unread: dict[int, deque[int]] = {}

    def find(self, tag: int) -> int:
        """Where the first letter with a tag lies that has not been read; 0 if there is none."""
        while letter := self._words[(self._last >> 3) + NEXT]:
            keep_order()
            self._unread.setdefault(self._words[(letter >> 3) + TAG], deque()).append(letter)
            self._words[(letter >> 3) + STATE] = SEEN
            self._last = letter
        letters = self._unread.get(tag)
        return letters[0] if letters else 0

    def text(self, letter: int) -> str:
        return self._arena.read_text(letter + LINE)

    def take(self, letter: int, tag: int, x: Tensor) -> None:
        """Copy a letter to x. From then on its room is the sender's again."""
        with torch.no_grad():
            x.view(-1).copy_(self._arena.at(letter + LETTER, x.numel(), x.dtype))
        keep_order()
        self._words[(letter >> 3) + STATE] = READ
        self.read += 1
        letters = self._unread[tag]
        letters.popleft()
        if not letters:
            del self._unread[tag]


class Letters(Line):
    """Receives of one tag from one source, or from any of several, in the order of the letters."""

    collective = False

    def __init__(self, table: Table, inboxes: list[Inbox], tag: int) -> None:
        super().__init__()
        self.name = table.name
        self.any_of_them = len(inboxes) > 1
        self._inboxes, self._tag, self._me = inboxes, tag, table.ranks[table.rank]

    def add(self, call: Call) -> Done:
        done = Done()
        self.calls.append((call, done))
        return done

    def ready(self) -> bool:
        return any(inbox.find(self._tag) for inbox in self._inboxes)

    def advance(self) -> bool:
        if not self.calls:
            return False
        for inbox in self._inboxes:
            if letter := inbox.find(self._tag):
                self._read(inbox, letter)
                return True
        return False

    def _read(self, inbox: Inbox, letter: int) -> None:
        call, done = self.calls[0]
        sent, expected = inbox.text(letter), call.signature()
        if sent != expected:
            both = sorted([(inbox.rank, sent), (self._me, expected)])
            raise CommError(disagreement(inbox.read, self.name, both))
        inbox.take(letter, self._tag, call.x)
        self.calls.popleft()
        done.source = inbox.source
        done.ended = True

    def absent(self) -> list[int]:
        return sorted(inbox.rank for inbox in self._inboxes)


class Outbox:
    """What this place sends to another one, or what it has not read yet."""

    def __init__(self, table: Table, target: int) -> None:
        self._arena, self._words = table.arena, table.arena.words
        self._last = table.boxes[table.rank] + LINE * target
        self._sent: deque[tuple[int, int]] = deque()

    def send(self, call: Call, tag: int = 0) -> None:
        """Write a letter and hang it behind the last one."""
        self._sweep()
        x = call.x.detach().view(-1)
        size = LETTER + x.numel() * x.itemsize
        letter = self._arena.heap.take(size)
        if letter is None:
            raise CommError(
                f"there is no room for a letter of {size} bytes in shared memory; its receiver is "
                "far behind, or the machine has no memory that can grow: use backend gloo."
            )
        self._words[(letter >> 3) + NEXT] = self._words[(letter >> 3) + STATE] = 0
        self._words[(letter >> 3) + TAG] = tag
        self._arena.write_text(letter + LINE, call.signature(), LETTER - LINE)
        with torch.no_grad():
            self._arena.at(letter + LETTER, x.numel(), x.dtype).copy_(x)
        keep_order()
        self._words[(self._last >> 3) + NEXT] = letter
        self._last = letter
        self._sent.append((letter, size))

    def _sweep(self) -> None:
        # The receiver looks for the next letter in the one that it saw last: that one stays.
        while len(self._sent) > 1 and self._state(0) == READ and self._state(1) >= SEEN:
            self._arena.heap.give(*self._sent.popleft())

    def _state(self, i: int) -> int:
        return int(self._words[(self._sent[i][0] >> 3) + STATE])

    def drop(self) -> None:
        """Give everything back: the receiver has closed its side, too."""
        while self._sent:
            self._arena.heap.give(*self._sent.popleft())
