"""What one rank is doing, in memory that others can read while it does not answer.

Each rank owns a nameless file in memory: some words, a ring of its last calls, and a log of texts that
the words number. A rank writes a word as it begins an operation, and seven when it makes a call of a
group; whoever reads finds out by looking twice since when they are what they are. A second such file
takes the stacks of its threads, which Python's fault handler writes when a signal asks for them: that
needs no lock of the interpreter.
"""

import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# Words of the page. STEP to WAITS change as the rank goes on; BEAT as long as its interpreter runs.
RANK, PID, THREAD, NATIVE, TEXTS, BEAT = range(6)
STEP, PHASE, OP, CALLS, WAITS = range(6, 11)
SINCE, LONGEST = 11, 12  # in ms, of the watcher: when the rank last went on, its longest operation
WORDS = 16
NOTE, ROOM = 256, 2048  # bytes of the page: what a phase works on
_COUNTS, GROUPS = 4096, 1024  # collectives made on each group, a word each
_RING = _COUNTS + 8 * GROUPS
CALLS_KEPT = 1024
# Its number, group, text, operation, peer, and which of its peer's or group's.
_CALL = struct.Struct("6q")
_LOG = _RING + CALLS_KEPT * _CALL.size
_SIZE = _LOG + (1 << 22)
DEVICE = -1  # in WAITS: not for a call, but for the rank's own GPU
BEATS = 0.5  # seconds

# In these a rank may take very long without going on, and is not taken to hang.
KNOWN = ("starting", "reading a checkpoint", "saving", "compiling")
# In these, computing and reading or writing files is going on: the first step loads code, too.
WORKING = (*KNOWN, "first step")
OVER = ("ended", "failed")
PHASES = (*WORKING, "loading data", "in a step", "validating", "between steps", *OVER)
# A signal that nothing else uses; the fault handler answers it from C.
STACKS = int(signal.SIGRTMIN) + 8 if hasattr(signal, "SIGRTMIN") else int(signal.SIGUSR2)


class Positions:
    """A rank's own positions, which it writes.

    `words` is written as it is by who writes often: `words[OP] = number` of a text that `texts` gave.
    """

    watched = False  # by a process that ends the run when it hangs

    def __init__(self, rank: int) -> None:
        sizes = {"position": _SIZE, "stacks": 0}
        self._files = [_nameless(f"phalanx-{what}-{rank}", n) for what, n in sizes.items()]
        self._map = mmap.mmap(self._files[0], _SIZE)  # -1: nobody else can read it
        self._bytes = memoryview(self._map)
        self.words: memoryview[int] = self._bytes[: WORDS * 8].cast("q")
        self._counts = self._bytes[_COUNTS:_RING].cast("q")
        self.call_texts: dict[tuple[object, ...], int] = {}  # numbers of texts, for calls alike
        self._groups = 0
        self._messages: dict[tuple[int, int], int] = {}
        self._lines = 0
        self.waits: list[tuple[float, float]] = []  # in calls, of this step; by time.perf_counter
        self._stop = threading.Event()
        self.words[RANK], self.words[PID] = rank, os.getpid()
        self.words[THREAD], self.words[NATIVE] = threading.get_ident(), threading.get_native_id()
        self.words[OP] = -1
        self.words[PHASE] = PHASES.index("starting")
        self.begun = self._since = time.monotonic()
        self._spent: dict[str, float] = {}
        if self._files[1] >= 0:
            faulthandler.register(STACKS, self._files[1], all_threads=True)
        threading.Thread(target=self._beat, name="positions", daemon=True).start()

    @property
    def paths(self) -> list[str]:
        """Where others open both files, as long as this process lives; nothing where there are none."""
        return [f"/proc/{os.getpid()}/fd/{each}" for each in self._files if each >= 0]

    def _beat(self) -> None:
        # Needs the interpreter's lock: where this stands still, something holds the lock.
        while not self._stop.wait(BEATS):
            self.words[BEAT] += 1

    def texts(self, texts: Sequence[str]) -> int:
        """Number these texts; the number of the first."""
        first = self._lines
        for text in texts:
            line = json.dumps(text).encode() + b"\n"
            end = _LOG + self.words[TEXTS]
            if end + len(line) <= _SIZE:
                self._bytes[end : end + len(line)] = line
                self.words[TEXTS] += len(line)
                self._lines += 1
        return first

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Number a group of ranks."""
        self._groups += 1
        self.texts([f"group {self._groups} {json.dumps([name, list(ranks)])}"])
        return self._groups

    def call(self, group: int, text: int, peer: int = -1, sends: bool = False) -> int:
        """Write down a call of a group, or a message to or from a `peer` in it; its number, from 1."""
        words = self.words
        number = words[CALLS] + 1
        if peer < 0:
            place = group % GROUPS
            nth = self._counts[place]
            self._counts[place] = nth + 1
        else:
            channel = group, peer if sends else -1 - peer
            nth = self._messages.get(channel, 0)
            self._messages[channel] = nth + 1
            peer = 2 * peer + sends
        at = _RING + number % CALLS_KEPT * _CALL.size
        _CALL.pack_into(self._map, at, number, group, text, words[OP], peer, nth)
        words[CALLS] = number
        return number

    def begin(self) -> None:
        """The rank is ready: from here on it goes on, or hangs."""
        self._pass()
        self.words[PHASE] = PHASES.index("between steps")

    def _pass(self) -> None:
        """What has passed is the phase's that ends here."""
        now, name = time.monotonic(), PHASES[self.words[PHASE]]
        self._spent[name] = self._spent.get(name, 0.0) + now - self._since
        self._since = now

    def taken(self) -> dict[str, float]:
        """Seconds in each phase since this was last asked, each second in the innermost."""
        self._pass()
        spent, self._spent = self._spent, {}
        return spent

    @contextmanager
    def phase(self, name: str, note: str = "") -> Iterator[None]:
        """What the rank does meanwhile, and on what."""
        before = self.words[PHASE], self.words[OP]
        raw = note.encode()[: ROOM - 8]
        self._bytes[NOTE + 8 : NOTE + 8 + len(raw)] = raw
        self._bytes[NOTE : NOTE + 8] = len(raw).to_bytes(8, "little")
        self._pass()
        self.words[PHASE], self.words[OP] = PHASES.index(name), -1
        try:
            yield
        finally:
            self._pass()
            self.words[PHASE], self.words[OP] = before

    def close(self, how: str) -> None:
        """Write no more: the rank has `ended` or `failed`."""
        self.words[PHASE] = PHASES.index(how)
        self._stop.set()
        if self._files[1] >= 0:
            faulthandler.unregister(STACKS)


def _nameless(name: str, size: int) -> int:
    if not hasattr(os, "memfd_create"):
        return -1
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    return file


@dataclass(frozen=True)
class Made:
    """A call that a rank has made: of a group by its name, ranks and how often such a group was made
    before. `nth`: which of the group's collectives, or of the messages on its way."""

    number: int
    group: tuple[str, tuple[int, ...], int]
    text: str
    op: str
    peer: int  # as a rank of the world; -1: a collective
    sends: bool
    nth: int

    def __str__(self) -> str:
        way = f" {'to' if self.sends else 'from'} rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.text}{way} on {self.group[0]}{f' of {self.op}' if self.op else ''}"


class PositionReader:
    """A rank's positions, read by another process."""

    def __init__(self, paths: Sequence[str]) -> None:
        # The paths come from a file of the run's folder, which may be anybody's.
        for path, what in zip(paths, ("position", "stacks"), strict=True):
            plain = re.fullmatch(r"/proc/\d+/fd/\d+", path)
            if not plain or not os.readlink(path).startswith(f"/memfd:phalanx-{what}-"):
                raise OSError(f"{path} is not the memory of a rank")
        fd = os.open(paths[0], os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        with memoryview(self._map) as whole, whole[: WORDS * 8] as page:
            self.words: memoryview[int] = page.cast("q")
        self._stacks = os.open(paths[1], os.O_RDONLY | os.O_CLOEXEC)
        self._texts: list[str] = []
        self._groups: dict[int, tuple[str, tuple[int, ...], int]] = {}
        self._read = 0

    def close(self) -> None:
        self.words.release()
        self._map.close()
        os.close(self._stacks)

    def mark(self) -> tuple[int, ...]:
        """What changes when the rank goes on."""
        return tuple(self.words[STEP : WAITS + 1])

    @property
    def phase(self) -> str:
        number = self.words[PHASE]
        return PHASES[number] if 0 <= number < len(PHASES) else ""

    @property
    def note(self) -> str:
        length = min(int.from_bytes(self._map[NOTE : NOTE + 8], "little"), ROOM - 8)
        return self._map[NOTE + 8 : NOTE + 8 + length].decode(errors="replace")

    def text(self, number: int) -> str:
        end = min(self.words[TEXTS], _SIZE - _LOG)
        if end > self._read:
            lines = self._map[_LOG + self._read : _LOG + end].splitlines()
            self._read = end
            for text in map(json.loads, lines):
                self._texts.append(text)
                if text.startswith("group "):
                    _, group, rest = text.split(" ", 2)
                    name, ranks = json.loads(rest)
                    before = sum(g[:2] == (name, tuple(ranks)) for g in self._groups.values())
                    self._groups[int(group)] = name, tuple(ranks), before
        return self._texts[number] if 0 <= number < len(self._texts) else ""

    @property
    def operation(self) -> str:
        return self.text(self.words[OP])

    def calls(self) -> list[Made]:
        """The last calls, the oldest first."""
        made = []
        for at in range(_RING, _LOG, _CALL.size):
            number, group, text, op, peer, nth = _CALL.unpack_from(self._map, at)
            self.text(text)
            if number and group in self._groups:
                of = self._groups[group]
                other = of[1][peer // 2] if 0 <= peer < 2 * len(of[1]) else -1
                sends = peer >= 0 and bool(peer % 2)
                made.append(Made(number, of, self.text(text), self.text(op), other, sends, nth))
        return sorted(made, key=lambda call: call.number)

    def ask_for_stacks(self) -> int:
        """Ask for the stacks; where what comes of it begins. The rank may be unable to answer."""
        begin = os.fstat(self._stacks).st_size
        if self.phase not in OVER:
            with suppress(OSError):
                os.kill(self.words[PID], STACKS)
        return begin

    def stack(self, begin: int) -> list[str]:
        """The stack of the rank's own thread, innermost first, of what has come since `begin`."""
        text = os.pread(self._stacks, 1 << 20, begin).decode(errors="replace")
        mine = f"0x{self.words[THREAD] & (1 << 64) - 1:016x}"
        for part in text.replace("\nCurrent thread", "\nThread").split("\nThread "):
            if mine in part.partition("\n")[0]:
                return [
                    line.strip()
                    for line in part.splitlines()[1:]
                    if line.startswith("  File") and "<frozen" not in line
                ]
        return []


def alive(pid: int, started: int) -> bool:
    """Whether the process still is the one that was started at that tick of the clock."""
    return started_at(pid) == started


def started_at(pid: int) -> int:
    """When a process was started, in ticks since the machine was; 0 when it is gone."""
    fields = stat_of(f"/proc/{pid}")
    return 0 if fields[0] in "ZX" else int(fields[19])


def stat_of(path: str) -> list[str]:
    """What the kernel says of a process, or of a thread: its state first, X when it is gone."""
    with suppress(OSError):
        return Path(path, "stat").read_text().rpartition(")")[2].split() or ["X"]
    return ["X"]
