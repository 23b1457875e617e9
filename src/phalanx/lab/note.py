"""The notebook of one rank: what it holds, does, sends and keeps in memory, as it happens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from ..comm import Group, World
from ..comm.base import Call
from .record import Figure, Message, Moment, Record, Span, value_of
from .watch import Live, WatchedWorld

__all__ = ["Note", "everyone"]


def everyone(world: World) -> Group:
    """A wire between all ranks, any two of which may send to each other."""
    n = world.size
    flows = [(i, j) for i in range(n) for j in range(n) if i != j]
    return world.split("everyone", [range(n)], flows)


class Note:
    """What an experiment writes into. Messages and memory write themselves down."""

    def __init__(self, rank: int) -> None:
        self.record = Record(rank)
        self.live = Live()
        self._sent: defaultdict[str, float] = defaultdict(float)
        self._received: defaultdict[str, float] = defaultdict(float)

    def watched(self, world: World) -> World:
        """The same world, whose messages are written down here."""
        return WatchedWorld(world, self._told, self.live)

    def step(self, title: str) -> None:
        """From here on, everything belongs to a step of that name."""
        self.record.steps.append((title, time.perf_counter()))

    def holds(self, when: str, **what: Any) -> None:
        """What this rank holds now, by name."""
        with self.live.paused():
            values = tuple(value_of(name.replace("_", " "), x) for name, x in what.items())
        self.record.moments.append(Moment(self._step(), when, values))

    @contextmanager
    def doing(self, name: str) -> Iterator[None]:
        """What this rank computes in here, for the timeline."""
        step, start = self._step(), time.perf_counter()
        yield
        self.record.spans.append(Span(step, "compute", name, start, time.perf_counter()))

    def says(self, sentence: str) -> None:
        """A finding in words, with its numbers. One rank may speak for all: `if rank == 0`."""
        self.record.sentences.append((self._step(), sentence))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        data = {"header": list(header), "rows": [[str(cell) for cell in row] for row in rows]}
        self._figure("table", title, data)

    def curves(
        self, title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]]
    ) -> None:
        """A picture with a line for every name, both axes logarithmic."""
        points = {name: [list(point) for point in line] for name, line in lines.items()}
        self._figure("curves", title, {"x": x, "y": y, "lines": points})

    def segments(self, title: str, bars: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """A picture with a bar for every name, each a row of named lengths."""
        rows = {name: [list(part) for part in bar] for name, bar in bars.items()}
        self._figure("segments", title, {"bars": rows})

    def groups(self, title: str, axes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """A picture of all ranks for every axis, each in the colour of its group."""
        rows = {axis: [list(group) for group in groups] for axis, groups in axes.items()}
        self._figure("groups", title, {"axes": rows})

    def sent(self, wire: str | None = None) -> float:
        """Bytes that this rank has sent so far, on one wire or on all."""
        return sum(self._sent.values()) if wire is None else self._sent[wire]

    def received(self, wire: str | None = None) -> float:
        """Bytes that this rank has received so far, on one wire or on all."""
        return sum(self._received.values()) if wire is None else self._received[wire]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """In here nothing is watched, and so nothing slowed down: for what is timed."""
        with _disable_current_modes():
            yield

    def close(self) -> Record:
        """The record, its memory curve thinned to what a picture can show."""
        self.record.memory = _thinned(self.live.samples)
        return self.record

    def _step(self) -> int:
        if not self.record.steps:
            self.step("start")
        return len(self.record.steps) - 1

    def _figure(self, kind: str, title: str, data: dict[str, Any]) -> None:
        self.record.figures.append(Figure(self._step(), kind, title, data))

    def _told(
        self,
        wire: Group,
        call: Call,
        moved: list[tuple[int, int, float]],
        start: float,
        end: float,
    ) -> None:
        step = self._step()
        self.record.spans.append(Span(step, "wire", f"{call.kind} on {wire.name}", start, end))
        for source, to, size in moved:
            if source == to:
                continue
            if source == self.record.rank:
                self._sent[wire.name] += size
                message = Message(step, wire.name, call.kind, source, to, size, start)
                self.record.messages.append(message)
            else:
                self._received[wire.name] += size


def _thinned(samples: list[tuple[float, int]], most: int = 600) -> list[tuple[float, int]]:
    """At most about `most` samples, the highest and the last of every run of them."""
    run = max(1, -(-2 * len(samples) // most))
    if run <= 2:
        return list(samples)
    kept: list[tuple[float, int]] = []
    for i in range(0, len(samples), run):
        part = samples[i : i + run]
        kept += [max(part, key=lambda sample: sample[1]), part[-1]]
    return kept
