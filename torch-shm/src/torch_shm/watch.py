"""Waiting for other ranks of this machine, and detection of lost ranks.

A waiting rank spins for some microseconds, then yields its core, then sleeps for a
tenth of the time waited so far, at most some milliseconds. So waiting costs almost
nothing when ranks outnumber cores, and adds little to long waits. While it sleeps it
regularly checks for failures recorded by other ranks, and that their processes still
exist.
"""

import os
import time
from collections.abc import Callable

import torch

from . import direct
from .arena import Arena
from .calls import CommError, named
from .lines import Line

# Words of a rank's page, and the offset of its failure text.
STATE, PID, DOING, BROKEN, BASE, READS = 0, 1, 2, 3, 4, 5
ABSENT, HERE, LEFT = 0, 1, 2
# The extent of a failure: nothing that others wait for, collectives, or all calls.
NOTHING, COLLECTIVES, EVERYTHING = 0, 1, 2
TEXT, ROOM = 64, 3000

YIELD_AFTER = 40e-6
SLEEP_AFTER = 400e-6
LONGEST_SLEEP = 0.005
LOOK_EVERY = 0.1
# Seconds that a process may be stopped (as by SIGSTOP) until it is given up.
STANDSTILL = 0.5
_KINDS = """nothing all_reduce reduce broadcast all_gather reduce_scatter all_to_all gather scatter
    barrier send receive split"""
KINDS = tuple(_KINDS.split())


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CommTimeout(CommError):
    """Raised when a wait exceeds its time limit; the call continues."""


class Watch:
    """The waiting of one rank, and its view of what the others are doing."""

    watched = (
        False  # by an external process, which knows more about stopped ranks
    )

    def __init__(self, arena: Arena, size: int, timeout: float) -> None:
        self._arena, self._size, self._timeout = arena, size, timeout
        self._words = arena.words
        self._page = arena.page(arena.rank) >> 3
        # group names by number: every rank splits the same ones in the same order
        self.names = ["the world"]
        # If ranks outnumber cores, spinning blocks the rank that one waits for.
        self._spin = 20 if size <= cores() else 2
        self._standing: dict[int, float] = {}
        # What the others need to know of this process; STATE last, as it says HERE.
        direct.allow()
        self._words[self._page + PID] = os.getpid()
        self._words[self._page + BASE] = arena.base
        self._words[self._page + STATE] = HERE

    def try_reading(self) -> None:
        """Record whether this process can read the memory of all others."""
        self._words[self._page + READS] = all(
            map(self._reads, range(self._size))
        )

    def _reads(self, rank: int) -> bool:
        page, seen = self._arena.page(rank), torch.zeros(1, dtype=torch.int64)
        pid, base = (
            self._words[(page >> 3) + PID],
            self._words[(page >> 3) + BASE],
        )
        # A word with a known value: its own process id, read through its mapping.
        return (
            direct.readable(pid, base + page + 8 * PID, seen)
            and int(seen) == pid
        )

    def processes(self) -> list[int]:
        """Return the process ids of all ranks if all can read each other, else []."""
        pages = [self._arena.page(rank) >> 3 for rank in range(self._size)]
        if not all(self._words[page + READS] for page in pages):
            return []
        return [self._words[page + PID] for page in pages]

    def until(
        self,
        kind: str,
        go_on: Callable[[], bool],
        line: Line,
        limit: float | None = None,
    ) -> None:
        """Wait until `go_on` returns True; raise when that has become impossible.

        `limit`: seconds after which to give up. Nothing breaks then: the call may be
        waited for again.
        """
        # The common case: the others come within a few looks.
        for _ in range(self._spin):
            if go_on():
                return
        # Kept after a failure, for the messages of the others.
        self._words[self._page + DOING] = line.number << 8 | KINDS.index(kind)
        start = time.perf_counter()
        look = start + LOOK_EVERY / 10
        while not go_on():
            now = time.perf_counter()
            waited = now - start
            if limit is not None and waited > limit:
                raise CommTimeout(self._late(line, limit))
            # Spin, then yield the core, then sleep for a growing time.
            if waited > SLEEP_AFTER:
                time.sleep(min(waited / 10, LONGEST_SLEEP))
            elif waited > YIELD_AFTER or self._spin < 10:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(
                    0
                )
            if now > look:
                look = now + LOOK_EVERY
                # The message may have arrived before its sender ended: check again what
                # it left behind.
                if self.why_stuck(line, waited) is not None and not go_on():
                    reason = self.why_stuck(line, waited)
                    if reason is not None:
                        self.fail(reason, line)
        self._words[self._page + DOING] = 0

    # ---- failures

    def fail(self, text: str, line: Line) -> None:
        """Record a failure and raise it. It also ends the calls of ranks that wait for
        this one."""
        self._break(text, COLLECTIVES if line.collective else NOTHING)
        raise CommError(text)

    def tell(self, failure: str) -> None:
        """Break all calls in which others wait for this rank."""
        self._break(f"{failure} {self._doings()}", EVERYTHING)

    def _break(self, text: str, how_much: int) -> None:
        page = self._page
        # The first failure is the cause of later ones.
        if self._words[page + (TEXT >> 3)] == 0:
            self._arena.write_text(page << 3 | TEXT, text, ROOM)
        # A failure only grows: from messages to collectives to all calls.
        self._words[page + BROKEN] = max(how_much, self._words[page + BROKEN])

    def leave(self) -> None:
        """Tell the others that this rank makes no further calls."""
        self._words[self._page + STATE] = LEFT

    def why_stuck(self, line: Line, waited: float) -> str | None:
        """Explain why a line cannot progress, from the state of the ranks that it waits
        for."""
        absent = line.absent()
        reasons = [
            text
            for rank in absent
            if (text := self._end_of(rank, line)) is not None
        ]
        # A collective needs all absent ranks, a receive from any rank only one.
        if reasons and len(reasons) >= (
            len(absent) if line.any_of_them else 1
        ):
            return reasons[0]
        return (
            self._late(line, self._timeout) if waited > self._timeout else None
        )

    def _end_of(self, rank: int, line: Line) -> str | None:
        page = self._arena.page(rank)
        words, word = self._words, page >> 3
        # Broken collectives do not end messages from that rank; a failed rank does.
        if words[word + BROKEN] >= (
            COLLECTIVES if line.collective else EVERYTHING
        ):
            return self._arena.read_text(page + TEXT)
        if words[word + STATE] == LEFT:
            return f"rank {rank} has left and makes no further call; {self._doings()}"
        # Not yet here: it may still come, so only the timeout ends this wait.
        if words[word + STATE] == ABSENT:
            return None
        pid = words[word + PID]
        state = process_state(pid)
        if state in "ZX":
            return f"rank {rank} is lost, its process {pid} has ended; {self._doings()}"
        # Stopped, as by SIGSTOP: lost only if it stays so.
        if state != "T" or self.watched:
            self._standing.pop(rank, None)
        elif (
            time.monotonic()
            - self._standing.setdefault(rank, time.monotonic())
            > STANDSTILL
        ):
            return f"rank {rank} does not answer, its process {pid} has been stopped; {self._doings()}"
        return None

    def _late(self, line: Line, seconds: float) -> str:
        limit = f"in {round(seconds, 3):g} s, the timeout that was set"
        return f"{named(line.absent())} not arrived {limit}; {self._doings()}"

    def _doings(self) -> str:
        """Describe the call of every rank, as the end of a sentence."""
        calls = []
        for rank in range(self._size):
            doing = self._words[(self._arena.page(rank) >> 3) + DOING]
            number, kind = doing >> 8, KINDS[doing & 255]
            name = (
                self.names[number]
                if number < len(self.names)
                else f"group {number}"
            )
            calls.append(
                f"rank {rank} was in {f'{kind} on {name}' if doing & 255 else 'no call'}"
            )
        return ", ".join(calls) + "."


def process_state(pid: int) -> str:
    """Return R or S for a live process, T for a stopped one, Z or X for one that has
    ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the preceding name is in parentheses and may contain anything
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return "X"
    try:
        # Without /proc: signal 0 only asks if the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    return "S"
