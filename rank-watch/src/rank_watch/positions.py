"""A rank's position in the program, in memory that other processes can read even if it
hangs.

Each rank owns anonymous memory files. The first contains some words, a ring of the
rank's last calls, and a log of texts that the words refer to by number. A rank writes
one word when it begins an operation, and seven when it makes a call of a group. A
reader finds out by repeated reads how long they have not changed. The second file
receives the stacks of the rank's threads, which Python's fault handler writes on a
signal, without the GIL.
"""

import faulthandler
import json
import mmap
import os
import signal
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

# Words of the page. The rank writes these once, except TEXTS, and BEAT while its
# interpreter runs.
RANK, PID, THREAD, NATIVE, TEXTS, BEAT, HEARTBEAT = range(7)
# These change as the rank makes progress. PASSED: events that the device has passed.
STEP, PHASE, OP, CALLS, WAITS, PASSED = range(8, 14)
DEVICE_AT = (
    # the text of the operation that the device is at; -1: it has finished all, or has
    # no queue
    14
)
# Written by the watcher, in ms: the last progress, the longest operation so far, its
# own last look, and the longest time without progress of a healthy device. The last is
# the number of waits for the device that have ended.
SINCE, LONGEST, LOOKED, DEVICE_LONGEST, DEVICE_WAITS = range(16, 21)
# The watcher requests the NCCL record by writing a number, and the rank answers with
# the same number.
ASKS, ANSWERS = 21, 22
TOKEN = 24  # a random number, by which ranks find out if they are on one host
WORDS = 32
NOTE, ROOM = 256, 2048  # bytes of the page: a note on the current phase
# Number of collectives made on each group, one word each.
COUNTS, GROUPS = (
    4096,
    1024,
)
RING = COUNTS + 8 * GROUPS
CALLS_KEPT = 1024
# number, group, text, operation, peer, and index among the peer's or group's calls
CALL = struct.Struct("6q")
LOG = RING + CALLS_KEPT * CALL.size
SIZE = LOG + (1 << 22)
# name suffixes of the anonymous files
FILES = ("position", "stacks", "flight")
DEVICE = -1  # value of WAITS: the rank waits for its own GPU, not for a call
BEATS = 0.5  # seconds

# In these phases a rank may make no progress for very long without counting as hung.
KNOWN = ("starting", "reading a checkpoint", "saving", "compiling")
OVER = ("ended", "failed")
_OTHER = (
    "first step", "loading data", "in a step", "validating", "comparing copies", "sampling",
    "between steps",
)  # fmt: skip
PHASES = (*KNOWN, *_OTHER, *OVER)
# An otherwise unused signal; the fault handler answers it from C.
STACKS = (
    int(signal.SIGRTMIN) + 8
    if hasattr(signal, "SIGRTMIN")
    else int(signal.SIGUSR2)
)


def phase_named(number: int) -> str:
    """Return the phase with this number, or ""."""
    return PHASES[number] if 0 <= number < len(PHASES) else ""


class Positions:
    """This rank's position, which it writes for other processes to read.

    Frequent writers write `words` directly: `words[OP] = number`, with a number that
    `texts` returned.
    """

    watched = False  # True if a process ends the run when it hangs
    host = ""  # the name of this rank's host among those of the run
    # On a GPU: a function that returns the device's operation and the number of events
    # it has passed, and one that returns the NCCL record.
    look_at_device: Callable[[], tuple[int, int]] | None = None
    flight: Callable[[], bytes] | None = None

    def __init__(self, rank: int) -> None:
        sizes = dict.fromkeys(FILES, 0) | {"position": SIZE}
        self._files = [
            _nameless(f"rank-watch-{what}-{rank}", n)
            for what, n in sizes.items()
        ]
        # Ranks that are threads come and go in one process, which may open few files.
        weakref.finalize(self, _close, self._files)
        # -1: no other process can read it.
        self._map = mmap.mmap(self._files[0], SIZE)
        self._bytes = memoryview(self._map)
        self.words: memoryview[int] = self._bytes[: WORDS * 8].cast("q")
        self._counts = self._bytes[COUNTS:RING].cast("q")
        # numbers of texts, for repeated calls
        self.call_texts: dict[tuple[object, ...], int] = {}
        self._groups = 0
        self._messages: dict[tuple[int, int], int] = {}
        self._lines = 0
        # For the run's log, from threads.
        self.notices: deque[str] = deque(maxlen=100)
        # intervals of waiting in calls in this step, by time.perf_counter
        self.waits: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self.words[RANK], self.words[PID] = rank, os.getpid()
        self.words[THREAD], self.words[NATIVE] = (
            threading.get_ident(),
            threading.get_native_id(),
        )
        # -1: no text.
        self.words[OP] = self.words[DEVICE_AT] = -1
        self.words[PHASE] = PHASES.index("starting")
        self.begun = self._since = time.monotonic()
        self._spent: dict[str, float] = {}
        if self._files[1] >= 0:
            _answer_with_stacks(self._files[1])
        threading.Thread(
            target=self._beat, name="positions", daemon=True
        ).start()

    @property
    def paths(self) -> list[str]:
        """The paths under which other processes open the files while this one lives;
        empty without memfd."""
        return [
            f"/proc/{os.getpid()}/fd/{each}"
            for each in self._files
            if each >= 0
        ]

    def _beat(self) -> None:
        # This thread needs the GIL: if it makes no progress, something holds the GIL.
        words = self.words
        words[HEARTBEAT] = threading.get_native_id()
        before = tuple(words[STEP:PASSED])
        while not self._stop.wait(BEATS):
            words[BEAT] += 1
            now = tuple(words[STEP:PASSED])
            # Needed only if the host itself makes no progress.
            if self.look_at_device is not None and now == before:
                words[DEVICE_AT], words[PASSED] = self.look_at_device()
            else:
                words[DEVICE_AT] = -1
            before = now
            if self.flight is not None and words[ASKS] != words[ANSWERS]:
                given = (self.flight, words[ASKS])
                self.flight = None  # requested only once: then the run ends
                # In a thread of its own, so that the heartbeat goes on even if
                # the record takes long.
                threading.Thread(
                    target=self._record_flight, args=given, daemon=True
                ).start()

    def _record_flight(self, flight: Callable[[], bytes], number: int) -> None:
        with suppress(OSError, RuntimeError, TypeError):
            os.pwrite(self._files[2], flight(), 0)
        # Last, so that a reader never sees half a record.
        self.words[ANSWERS] = number

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark in the block that the rank waits for its own GPU, to read values from
        it."""
        before = self.words[WAITS]
        self.words[WAITS] = DEVICE
        try:
            yield
        finally:
            self.words[WAITS] = before

    def texts(self, texts: Sequence[str]) -> int:
        """Number these texts and return the number of the first."""
        first = self._lines
        for text in texts:
            line = json.dumps(text).encode() + b"\n"
            end = LOG + self.words[TEXTS]
            # A full log drops texts: a reader shows "" for numbers beyond its
            # end.
            if end + len(line) <= SIZE:
                self._bytes[end : end + len(line)] = line
                # The length last: a reader never sees half a line.
                self.words[TEXTS] += len(line)
                self._lines += 1
        return first

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Number a group of ranks."""
        self._groups += 1
        # Groups share the log of texts, so that a reader learns both in the
        # order of their numbers.
        self.texts([f"group {self._groups} {json.dumps([name, list(ranks)])}"])
        return self._groups

    def call(
        self, group: int, text: int, peer: int = -1, sends: bool = False
    ) -> int:
        """Record a call of a group, or a message to or from a `peer` in it. Calls are
        counted from 1."""
        words = self.words
        number = words[CALLS] + 1
        if peer < 0:
            # Groups beyond 1,024 share counters; a reader keeps no group
            # beyond them.
            place = group % GROUPS
            nth = self._counts[place]
            self._counts[place] = nth + 1
        else:
            # One counter for each direction and peer: negative for receives.
            channel = group, peer if sends else -1 - peer
            nth = self._messages.get(channel, 0)
            self._messages[channel] = nth + 1
            # The direction is the lowest bit of a peer's word.
            peer = 2 * peer + sends
        at = RING + number % CALLS_KEPT * CALL.size
        CALL.pack_into(
            self._map, at, number, group, text, words[OP], peer, nth
        )
        # Last: the call is complete in the ring before CALLS names it.
        words[CALLS] = number
        return number

    @contextmanager
    def operation(self, text: str) -> Iterator[None]:
        """Mark the current operation in the block, such as `forward` or `layer 3`."""
        # Looked up first: a training step marks the same operations again and
        # again.
        if (number := self.call_texts.get((text,))) is None:
            number = self.call_texts[text,] = self.texts([text])
        before, self.words[OP] = self.words[OP], number
        try:
            yield
        finally:
            self.words[OP] = before

    def step(self, number: int) -> None:
        """Mark the beginning of a step. The first call also marks the end of
        starting."""
        self.words[STEP] = number
        self._pass()
        self.words[PHASE] = PHASES.index("in a step")

    @contextmanager
    def waiting(self, call: int) -> Iterator[None]:
        """Mark in the block that the rank waits for the end of call number `call`."""
        self.words[WAITS] = call
        try:
            yield
        finally:
            self.words[WAITS] = 0

    def begin(self) -> None:
        """Mark the end of starting: from now on the rank makes progress or hangs."""
        self._pass()
        self.words[PHASE] = PHASES.index("between steps")

    def _pass(self) -> None:
        """Add the time since the last transition to the phase that ends here."""
        now, name = time.monotonic(), PHASES[self.words[PHASE]]
        # Monotonic seconds by phase; a phase within another one interrupts it.
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now

    def taken(self) -> dict[str, float]:
        """Return the seconds in each phase since the last call; each second counts for
        the innermost phase."""
        self._pass()
        spent, self._spent = self._spent, {}
        return spent

    @contextmanager
    def phase(self, name: str, note: str = "") -> Iterator[None]:
        """Mark the phase in the block, and what it works on."""
        before = self.words[PHASE], self.words[OP]
        # 8 bytes of the room hold the length.
        raw = note.encode(errors="replace")[: ROOM - 8]
        # Bytes, then the length, then the phase that refers to them.
        self._bytes[NOTE + 8 : NOTE + 8 + len(raw)] = raw
        self._bytes[NOTE : NOTE + 8] = len(raw).to_bytes(8, "little")
        self._pass()
        self.words[PHASE], self.words[OP] = PHASES.index(name), -1
        try:
            yield
        finally:
            self._pass()
            # The outer phase and its operation go on.
            self.words[PHASE], self.words[OP] = before

    def close(self, how: str) -> None:
        """Mark the rank as `ended` or `failed`, and stop writing."""
        self.words[PHASE] = PHASES.index(how)
        self._stop.set()
        if self._files[1] >= 0:
            # Unregistered, because the file is closed when the rank goes.
            faulthandler.unregister(STACKS)


def _nameless(name: str, size: int) -> int:
    # Linux alone has memfds; elsewhere the memory stays private and nobody
    # watches.
    if not hasattr(os, "memfd_create"):
        return -1
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    return file


def _close(files: Sequence[int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)


def _answer_with_stacks(file: int) -> None:
    """Have the stacks of all threads written to a file on the signal `STACKS`."""
    faulthandler.unregister(STACKS)
    # only allowed in the main thread; ranks that are threads get no signals
    with suppress(ValueError):
        # `unregister` restores this handler: a late request must not kill the process.
        signal.signal(STACKS, signal.SIG_IGN)
    faulthandler.register(STACKS, file, all_threads=True)
