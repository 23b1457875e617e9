"""Waiting for other ranks of this machine, and noticing that one of them is lost.

A rank that waits spins for some microseconds, then hands its core on, then sleeps for a tenth of
the time it has waited so far, at most some milliseconds: waiting costs next to nothing when ranks
outnumber cores, and little is added to what takes long anyway. While it sleeps it looks now and then
whether a rank has written down a failure, and whether the processes of all others are still there.
"""

import os
import time
from collections.abc import Callable

from phalanx.comm.arena import Arena
from phalanx.comm.base import CommError

# Words of a rank's page, and the place of its failure's text. The arena's page: who failed first.
STATE, PID, DOING, FAILED = 0, 1, 2, 0
ABSENT, HERE, LEFT = 0, 1, 2
TEXT, ROOM = 64, 3000

YIELD_AFTER = 40e-6
SLEEP_AFTER = 400e-6
LONGEST_SLEEP = 0.005
LOOK_EVERY = 0.1
# Seconds that a process may stand still (as after SIGSTOP) until it is given up.
STANDSTILL = 0.5
KINDS = (
    "nothing", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
    "gather", "scatter", "barrier", "send", "receive", "split",
)  # fmt: skip
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


class Watch:
    """How one rank waits, and what it and the others are doing."""

    def __init__(self, arena: Arena, size: int, timeout: float, cores: int) -> None:
        self._arena, self._size, self._timeout = arena, size, timeout
        self._words = arena.words
        self._me = arena.rank
        self._page = arena.page(arena.rank) >> 3
        # Groups by number: every rank splits the same ones in the same order.
        self.names = ["the world"]
        # Where ranks outnumber cores, spinning keeps away whom one waits for.
        self._spin = 50 if size <= cores else 2
        self._standing: dict[int, float] = {}
        self._words[self._page + PID] = os.getpid()
        self._words[self._page + STATE] = HERE

    def until(
        self, kind: str, number: int, go_on: Callable[[], bool], absent: Callable[[], list[int]]
    ) -> None:
        """Return once `go_on` is True; raise one sentence when that cannot be any more."""
        for _ in range(self._spin):
            if go_on():
                return
        words, here = self._words, self._page + DOING
        words[here] = number << 8 | _NUMBER[kind]
        try:
            self._wait(go_on, absent)
        finally:
            words[here] = 0

    def _wait(self, go_on: Callable[[], bool], absent: Callable[[], list[int]]) -> None:
        start = time.perf_counter()
        look = start + LOOK_EVERY / 10
        while not go_on():
            now = time.perf_counter()
            waited = now - start
            if waited > SLEEP_AFTER:
                time.sleep(min(waited / 10, LONGEST_SLEEP))
            elif waited > YIELD_AFTER or self._spin < 10:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
            if now > look:
                look = now + LOOK_EVERY
                self.look(absent())
                if waited > self._timeout:
                    self.fail(self._late(absent()))

    # ---- failures

    def fail(self, failure: str) -> None:
        """Write a failure down for all, and raise it with what each rank was doing."""
        self.tell(failure)
        raise CommError(self._first())

    def tell(self, failure: str) -> None:
        """Write a failure down for all; the first one stays."""
        if self._words[FAILED] == 0:
            text = f"{failure} {self._doings()}"
            self._arena.write_text(self._arena.page(self._me) + TEXT, text, ROOM)
            self._words[FAILED] = self._me + 1

    def leave(self) -> None:
        """Tell the others that this rank makes no further call."""
        self._words[self._page + STATE] = LEFT

    def look(self, awaited: list[int]) -> None:
        """Raise what has gone wrong with any rank, if something has."""
        if self._words[FAILED]:
            raise CommError(self._first())
        for rank in range(self._size):
            page = self._arena.page(rank) >> 3
            state = self._words[page + STATE]
            if state == LEFT and rank in awaited:
                self.fail(f"rank {rank} has left and makes no further call;")
            if state == HERE and rank != self._me:
                self._look_at(rank, self._words[page + PID])

    def _look_at(self, rank: int, pid: int) -> None:
        condition = process_state(pid)
        if condition in "ZX":
            if self._words[(self._arena.page(rank) >> 3) + STATE] == LEFT:
                return
            self.fail(f"rank {rank} is lost, its process {pid} has ended;")
        if condition != "T":
            self._standing.pop(rank, None)
        elif time.monotonic() - self._standing.setdefault(rank, time.monotonic()) > STANDSTILL:
            self.fail(f"rank {rank} does not answer, its process {pid} has been stopped;")

    def _first(self) -> str:
        return self._arena.read_text(self._arena.page(self._words[FAILED] - 1) + TEXT)

    def _late(self, absent: list[int]) -> str:
        names = ", ".join(map(str, absent))
        who = f"rank {names} has" if len(absent) == 1 else f"ranks {names} have"
        return f"{who} not arrived in {self._timeout:g} s;"

    def _doings(self) -> str:
        """What every rank is doing, as the end of a sentence."""
        said = []
        for rank in range(self._size):
            doing = self._words[(self._arena.page(rank) >> 3) + DOING]
            number, kind = doing >> 8, KINDS[doing & 255]
            name = self.names[number] if number < len(self.names) else f"wire {number}"
            said.append(f"rank {rank} was in {f'{kind} on {name}' if doing & 255 else 'no call'}")
        return ", ".join(said) + "."


def process_state(pid: int) -> str:
    """R and S for a process that lives, T for one that was stopped, Z or X for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name before it is in brackets and may hold anything.
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists("/proc/self/stat"):
            return "X"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "X"
    return "S"
