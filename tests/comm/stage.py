"""Members of a group in shared memory, in one process, of which exactly one runs at a time.

The members are threads that hand a baton on: at each wait, and whenever one has raised a flag that
others look at. Who runs next is the member that comes first in an order and can go on. So a member
that comes last in it runs only when nobody else can: it reads as late as is allowed, while those
before it run ahead, overwrite their tensors, and lay down what they can of later calls. A wait or
a flag that is missing gives a wrong result each time and not once in a thousand.
"""

import contextlib
import os
import threading

import torch

from phalanx.comm.base import World
from phalanx.comm.shm import ShmWorld
from torch_shm import arena as arenas
from torch_shm.arena import Arena, Extent, Reserved
from torch_shm.lines import Collectives
from torch_shm.world import SharedWorld

CHUNK = 1 << 16


class Stuck(AssertionError):
    """No member can go on."""


class Stage:
    """The baton. `order(step)` are the members from first to last, at the step-th decision."""

    def __init__(self, size, order):
        self.size, self.order = size, order
        self._changed = threading.Condition()
        self._runs = -1
        # What has been written that others wait for, and how much of it each had seen when it
        # could not go on.
        self._events, self._seen = 0, [-1] * size
        self._left = set(range(size))
        self._steps = 0
        self.error = None

    def run(self, member):
        """Call `member(rank)` in a thread each; their results by rank."""
        results = [None] * self.size

        def play(rank):
            try:
                self._wait_for_turn(rank)
                results[rank] = member(rank)
            except BaseException as error:
                self.error = self.error or error
            finally:
                with self._changed:
                    self._left.discard(rank)
                    self._next()

        threads = [
            threading.Thread(target=play, args=(rank,))
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            self._next()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return results

    def happened(self, rank):
        """A member has raised a flag: who comes before it and waited for this goes on at once."""
        self._events += 1
        self._hand_on(rank)

    def blocked(self, rank):
        """A member cannot go on until something happens."""
        self._seen[rank] = self._events
        self._hand_on(rank)
        self._seen[rank] = -1

    def _hand_on(self, rank):
        with self._changed:
            self._next()
        self._wait_for_turn(rank)

    def _wait_for_turn(self, rank):
        with self._changed:
            self._changed.wait_for(
                lambda: self._runs == rank or self.error is not None
            )
        if self.error is not None:
            raise Stuck("another member has failed")

    def _next(self):
        self._steps += 1
        able = [
            rank
            for rank in self.order(self._steps)
            if rank in self._left and self._seen[rank] < self._events
        ]
        if able:
            self._runs = able[0]
        elif self._left:
            self.error = self.error or Stuck(
                f"members {sorted(self._left)} wait for ever"
            )
        self._changed.notify_all()


class Words:
    """An arena's words; who writes one that others wait for hands the baton on."""

    def __init__(self, words, stage, rank, headers):
        self._words, self._stage, self._rank, self._headers = (
            words,
            stage,
            rank,
            headers,
        )

    def __getitem__(self, at):
        return self._words[at]

    def __setitem__(self, at, value):
        self._words[at] = value
        if not isinstance(at, slice) and at not in self._headers:
            self._stage.happened(self._rank)


class _Watch:
    """Waiting without time: hands the baton on until it can go on."""

    def __init__(self, stage, rank):
        self._stage, self._rank, self.names = stage, rank, []

    def until(self, kind, go_on, line, limit=None):
        while not go_on():
            self._stage.blocked(self._rank)

    def fail(self, text, line):
        raise AssertionError(text)


class Member(ShmWorld):
    """One rank of a stage: a world over the arena that all members of this process map."""

    def __init__(self, stage, reserved, rank):
        World.__init__(self, rank, stage.size, torch.device("cpu"))
        self._shared = Shared(stage, reserved, rank)


class Shared(SharedWorld):
    """The memory of a member, whose waits hand the baton on."""

    def __init__(self, stage, reserved, rank):
        self.rank, self.size = rank, stage.size
        self.arena = Arena(reserved.path, reserved.extent, rank)
        self.arena.words = Words(
            self.arena.words, stage, rank, _headers(self.arena)
        )
        self.watch = _Watch(stage, rank)
        self._everyone = Collectives(
            self.arena, 0, "the world", tuple(range(self.size)), 0
        )
        self._lines, self._segments, self._splits = {}, {}, 0
        # The baton is handed on while calls are moved.
        self._lock = contextlib.nullcontext()


def _headers(arena):
    """The words that nobody waits for: those of headers, and the texts of messages."""
    words = set()
    header = arenas.whole(arena.extent.header, arenas.LINE)
    for rank in range(arena.extent.ranks):
        for number in range(arena.extent.segments):
            start = (arena.segment(rank, number) + arenas.LINE) >> 3
            words.update(range(start, start + 2 * header // 8))
    return words


def perform(fn, size, order, *args, reads=False):
    """What `fn(world, *args)` returns on each member of a stage. `reads`: members read each other's
    tensors where they lie, as processes that may read each other's memory do; here all of them are
    this process."""
    reserved = Reserved.__new__(Reserved)
    reserved.extent = Extent(size, CHUNK, 6, 1 << 26)
    reserved._file, reserved._fd = "", os.memfd_create("stage")
    os.ftruncate(reserved._fd, reserved.extent.total)
    reserved.path = f"/proc/{os.getpid()}/fd/{reserved._fd}"
    stage = Stage(size, order)
    try:
        members = [Member(stage, reserved, rank) for rank in range(size)]
        for member in members:
            member._shared.arena.processes = [os.getpid()] * (size * reads)
        return stage.run(lambda rank: fn(members[rank], *args))
    finally:
        reserved.close()
