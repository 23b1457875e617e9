"""The best order found for given costs: list scheduling, never worse than a named schedule.

Every rank keeps a list of what it can do; the simulated clock moves from one finish to the next and
each free rank takes its most urgent operation that memory allows. Several urgencies are tried, with
the named schedules beside them, and the shortest program wins. `bound` says how much could be left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .check import held
from .op import Op, Program, ProgramError
from .passes import messages
from .schedules import schedule
from .simulate import Costs, simulate

__all__ = ["bound", "search"]

_NAMED = {1: ("1f1b", "gpipe", "zb-h1", "zb-h2"), 2: ("interleaved", "zb-v")}


def search(
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    limits: Sequence[float] | None = None,
) -> Program:
    """The shortest program known for these costs; `limits` are microbatches a rank may hold
    (a chunk counts 1/V), from forward until the weight gradient."""
    found: list[tuple[float, int, Program]] = []
    for number, program in enumerate(_candidates(stages, microbatches, chunks, costs, limits)):
        if program is not None and _fits(program, limits):
            found.append((simulate(messages(program), costs).makespan, number, program))
    if not found:
        raise ProgramError(
            f"no order of {stages} stages and {microbatches} microbatches fits in the memory limits"
            f" {list(limits or ())}: every rank must hold at least one microbatch in each chunk."
        )
    return min(found, key=lambda f: f[:2])[2]


def _candidates(
    stages: int, microbatches: int, chunks: int, costs: Costs, limits: Sequence[float] | None
) -> list[Program | None]:
    named = [*_NAMED.get(chunks, ("interleaved",))]
    found: list[Program | None] = [schedule(n, stages, microbatches, chunks) for n in named]
    places = ["wrap", "fold"] if chunks == 2 else ["wrap"]
    for place in places:
        for order in ("IFW", "FIW"):
            for room in _rooms(stages, microbatches, limits):
                greedy = _Listing(stages, microbatches, chunks, costs, place, order, room)
                found.append(greedy.run())
    return found


def _rooms(stages: int, microbatches: int, limits: Sequence[float] | None) -> list[list[float]]:
    """Memory that the greedy order may use: all that is allowed, and less, which may be better."""
    most = list(limits or [microbatches] * stages)
    shapes: list[list[float]] = [
        most,
        [float(stages)] * stages,
        [stages - r for r in range(stages)],
        [2.0 * stages - 1] * stages,
        [2 * (stages - r) - 1 for r in range(stages)],
    ]
    return [[min(a, b) for a, b in zip(most, shape, strict=True)] for shape in shapes]


def _fits(program: Program, limits: Sequence[float] | None) -> bool:
    return limits is None or all(
        h <= limit + 1e-9 for h, limit in zip(held(program), limits, strict=True)
    )


def bound(program: Program, costs: Costs) -> float:
    """A time that no order of the same operations can beat: each rank's own work, plus what must
    come before its first operation and after its last."""
    first = [program.owner.index(row) for row in range(len(program.rows))]
    ops = [(r, op) for r, row in enumerate(program.rows) for op in row if op.kind in "FBIWR"]
    time = {(op.kind, op.piece): costs.of(op, first[r]) for r, op in ops if op.index == 0}
    send = costs.kinds.get("send", 0.0)
    last = program.pieces - 1

    def chain(upto: int) -> float:
        """Forward through all pieces before this one, with their messages."""
        moves = sum(program.host[p] != program.host[p + 1] for p in range(upto))
        return sum(time.get(("F", p), 0.0) for p in range(upto)) + send * moves

    best = 0.0
    for r in range(len(program.rows)):
        mine = sorted(p for p, row in program.host.items() if row == r)
        work = sum(costs.of(op, first[r]) for row, op in ops if row == r)
        best = max(best, chain(mine[0]) + work)
    through = chain(last) + time.get(("F", last), 0.0)
    through += sum(max(time.get(("B", p), 0.0), time.get(("I", p), 0.0)) for p in range(last + 1))
    moves = sum(program.host[p] != program.host[p + 1] for p in range(last))
    return max(best, through + send * moves)


@dataclass
class _Listing:
    """One greedy run over virtual stages."""

    stages: int
    microbatches: int
    chunks: int
    costs: Costs
    place: str
    order: str
    room: Sequence[float]

    def row(self, stage: int) -> int:
        turn, r = divmod(stage, self.stages)
        return self.stages - 1 - r if self.place == "fold" and turn % 2 else r

    def run(self) -> Program | None:
        n = self.stages * self.chunks
        rows: list[list[Op]] = [[] for _ in range(self.stages)]
        self.next = {(k, s): 0 for k in "FIW" for s in range(n)}
        self.ready: dict[Op, float] = {Op("F", 0, m): 0.0 for m in range(self.microbatches)}
        self.used = [0.0] * self.stages
        self.free = [0.0] * self.stages
        clock = [(0.0, r) for r in range(self.stages)]
        heapq.heapify(clock)
        left = 3 * n * self.microbatches
        while left and clock:
            now, r = heapq.heappop(clock)
            if now < self.free[r]:
                continue
            op = self._choose(r, now)
            if op is None:
                waits = [t for o, t in self.ready.items() if t > now and self.row(o.piece) == r]
                if waits:
                    heapq.heappush(clock, (min(waits), r))
                continue
            rows[r].append(op)
            left -= 1
            for other, time in self._finish(op, r, now):
                heapq.heappush(clock, (time, other))
        return None if left else Program.pipeline(rows)

    def _choose(self, r: int, now: float) -> Op | None:
        """The most urgent operation that rank r can start now; deeper chunks first."""
        best: tuple[tuple[int, int], Op] | None = None
        share = 1 / self.chunks
        full = self.used[r] + share > self.room[r] + 1e-9
        for stage in range(self.stages * self.chunks):
            if self.row(stage) != r:
                continue
            for kind in "FIW":
                op = Op(kind, stage, self.next[kind, stage])
                if self.ready.get(op, now + 1) > now or (kind == "F" and full):
                    continue
                # Forwards of the later chunk lead to a backward sooner; so do they free memory.
                depth = -stage if kind == "F" else stage
                urgency = -1 if kind == "W" and full else self.order.index(kind)
                key = (urgency, depth)
                if best is None or key < best[0]:
                    best = (key, op)
        return best[1] if best else None

    def _finish(self, op: Op, r: int, now: float) -> list[tuple[int, float]]:
        """Book the operation; returns the ranks to look at again, and when."""
        end = now + self.costs.of(op, r)
        del self.ready[op]
        self.next[op.kind, op.piece] += 1
        self.free[r] = end
        wake = [(r, end)]
        last = self.stages * self.chunks - 1
        if op.kind == "F":
            self.used[r] += 1 / self.chunks
            following = [
                Op("F", op.piece + 1, op.index) if op.piece < last else Op("I", last, op.index)
            ]
        elif op.kind == "I":
            following = [Op("W", op.piece, op.index)]
            following += [Op("I", op.piece - 1, op.index)] * (op.piece > 0)
        else:
            self.used[r] -= 1 / self.chunks
            following = []
        for later in following:
            there = self.row(later.piece)
            at = end + (self.costs.kinds.get("send", 0.0) if there != r else 0.0)
            self.ready[later] = at
            wake.append((there, max(at, self.free[there])))
        return wake
