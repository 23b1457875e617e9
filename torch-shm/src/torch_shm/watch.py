"""Waiting for other ranks of this machine, and noticing that one of them is lost.

A rank that waits spins for some microseconds, then hands its core on, then sleeps for a tenth of
the time it has waited so far, at most some milliseconds: waiting costs next to nothing when ranks
outnumber cores, and little is added to what takes long anyway. While it sleeps it looks now and then
whether a rank has written down a failure, and whether the processes of all others are still there.
"""

import os
import time
from collections.abc import Callable

import torch

from . import direct
from .arena import Arena
from .calls import CommError, named
from .lines import Line

# Words of a rank's page, and where the text of its failure begins.
STATE, PID, DOING, BROKEN, BASE, READS = 0, 1, 2, 3, 4, 5
ABSENT, HERE, LEFT = 0, 1, 2
# What is broken after a failure: nothing that others wait for, its collectives, or all of its calls.
NOTHING, COLLECTIVES, EVERYTHING = 0, 1, 2
TEXT, ROOM = 64, 3000

YIELD_AFTER = 40e-6
SLEEP_AFTER = 400e-6
LONGEST_SLEEP = 0.005
LOOK_EVERY = 0.1
# Seconds that a process may stand still (as after SIGSTOP) until it is given up.
STANDSTILL = 0.5
_KINDS = """nothing all_reduce reduce broadcast all_gather reduce_scatter all_to_all gather scatter
    barrier send receive split"""
KINDS = tuple(_KINDS.split())


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CommTimeout(CommError):
    """A wait with a time limit gave up; the call goes on."""


class Watch:
    """The waiting of one rank, and its view of what the others are doing."""

    watched = False  # by a process outside, which knows more of ranks that stand still

    def __init__(self, arena: Arena, size: int, timeout: float) -> None:
        self._arena, self._size, self._timeout = arena, size, timeout
        self._words = arena.words
        self._page = arena.page(arena.rank) >> 3
        # Groups by number: every rank splits the same ones in the same order.
        self.names = ["the world"]
        # Where ranks outnumber cores, spinning keeps away whom one waits for.
        self._spin = 20 if size <= cores() else 2
        self._standing: dict[int, float] = {}
        direct.allow()
        self._words[self._page + PID] = os.getpid()
        self._words[self._page + BASE] = arena.base
        self._words[self._page + STATE] = HERE

    def try_reading(self) -> None:
        """Note whether this process can read the memory of all others: the page of each."""
        self._words[self._page + READS] = all(map(self._reads, range(self._size)))

    def _reads(self, rank: int) -> bool:
        page, seen = self._arena.page(rank), torch.zeros(1, dtype=torch.int64)
        pid, base = self._words[(page >> 3) + PID], self._words[(page >> 3) + BASE]
        return direct.readable(pid, base + page + 8 * PID, seen) and int(seen) == pid

    def processes(self) -> list[int]:
        """The processes of all ranks, if everyone has noted that it can read the others."""
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
        """Return once `go_on` is True; raise one sentence when that cannot be any more.

        `limit`: give up after so many seconds, which breaks nothing: the call may be waited for again.
        """
        for _ in range(self._spin):
            if go_on():
                return
        # After a failure it stays, for the sentences of the others.
        self._words[self._page + DOING] = line.number << 8 | KINDS.index(kind)
        start = time.perf_counter()
        look = start + LOOK_EVERY / 10
        while not go_on():
            now = time.perf_counter()
            waited = now - start
            if limit is not None and waited > limit:
                raise CommTimeout(self._late(line, limit))
            if waited > SLEEP_AFTER:
                time.sleep(min(waited / 10, LONGEST_SLEEP))
            elif waited > YIELD_AFTER or self._spin < 10:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            if now > look:
                look = now + LOOK_EVERY
                # What it waits for may have come before its sender went: look again at what it left.
                if self.why_stuck(line, waited) is not None and not go_on():
                    reason = self.why_stuck(line, waited)
                    if reason is not None:
                        self.fail(reason, line)
        self._words[self._page + DOING] = 0

    # ---- failures

    def fail(self, text: str, line: Line) -> None:
        """Raise a failure, which also ends the calls of those who wait for this rank there."""
        self._break(text, COLLECTIVES if line.collective else NOTHING)
        raise CommError(text)

    def tell(self, failure: str) -> None:
        """Break all calls that others wait for this rank in."""
        self._break(f"{failure} {self._doings()}", EVERYTHING)

    def _break(self, text: str, how_much: int) -> None:
        page = self._page
        # The first failure is the cause of those that follow.
        if self._words[page + (TEXT >> 3)] == 0:
            self._arena.write_text(page << 3 | TEXT, text, ROOM)
        self._words[page + BROKEN] = max(how_much, self._words[page + BROKEN])

    def leave(self) -> None:
        """Tell the others that this rank makes no further call."""
        self._words[self._page + STATE] = LEFT

    def why_stuck(self, line: Line, waited: float) -> str | None:
        """Explains why a line cannot progress: what happened to the ranks that it waits for."""
        absent = line.absent()
        reasons = [
            text for rank in absent if (text := self._end_of(rank, line)) is not None
        ]
        if reasons and len(reasons) >= (len(absent) if line.any_of_them else 1):
            return reasons[0]
        return self._late(line, self._timeout) if waited > self._timeout else None

    def _end_of(self, rank: int, line: Line) -> str | None:
        page = self._arena.page(rank)
        words, word = self._words, page >> 3
        if words[word + BROKEN] >= (COLLECTIVES if line.collective else EVERYTHING):
            return self._arena.read_text(page + TEXT)
        if words[word + STATE] == LEFT:
            return f"rank {rank} has left and makes no further call; {self._doings()}"
        if words[word + STATE] == ABSENT:
            return None
        pid = words[word + PID]
        state = process_state(pid)
        if state in "ZX":
            return f"rank {rank} is lost, its process {pid} has ended; {self._doings()}"
        if state != "T" or self.watched:
            self._standing.pop(rank, None)
        elif (
            time.monotonic() - self._standing.setdefault(rank, time.monotonic())
            > STANDSTILL
        ):
            return f"rank {rank} does not answer, its process {pid} has been stopped; {self._doings()}"
        return None

    def _late(self, line: Line, seconds: float) -> str:
        limit = f"in {round(seconds, 3):g} s, the timeout that was set"
        return f"{named(line.absent())} not arrived {limit}; {self._doings()}"

    def _doings(self) -> str:
        """The call of every rank, as the end of a sentence."""
        calls = []
        for rank in range(self._size):
            doing = self._words[(self._arena.page(rank) >> 3) + DOING]
            number, kind = doing >> 8, KINDS[doing & 255]
            name = self.names[number] if number < len(self.names) else f"group {number}"
            calls.append(
                f"rank {rank} was in {f'{kind} on {name}' if doing & 255 else 'no call'}"
            )
        return ", ".join(calls) + "."


def process_state(pid: int) -> str:
    """R and S for a process that lives, T for one that was stopped, Z or X for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it is in brackets and may contain anything.
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return "X"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    return "S"
