"""Searches the best order for given costs by list scheduling.

Every rank keeps a list of operations that it can do. The simulated clock moves from one
finish to the next, and each free rank takes its most urgent operation that memory
allows. Several urgencies are tried, beside the named schedules, and the shortest
program wins.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..layout.choices import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    ZB_H2,
    ZB_V,
    traits,
)
from . import ops
from .check import held
from .passes import messages
from .program import Op, Program, ProgramError
from .schedules import schedule
from .simulate import Costs, simulate

# The first wins if several are equally short.
_BESIDE = (ONE_F_ONE_B, GPIPE, ZB_H1, ZB_H2, INTERLEAVED, ZB_V)
_KINDS = (ops.FORWARD, ops.INPUT_GRADIENT, ops.WEIGHT_GRADIENT)
# The most urgent first.
_ORDERS = ((ops.INPUT_GRADIENT, ops.FORWARD, ops.WEIGHT_GRADIENT), _KINDS)


def search(
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    limits: Sequence[float] | None = None,
) -> Program:
    """The shortest program found for these costs.

    `limits` are the microbatches that each rank may hold (a chunk counts 1/V), from the
    forward until the weight gradient.
    """
    most = list(limits or [microbatches] * stages)
    ended = filter(
        None, _candidates(stages, microbatches, chunks, costs, most)
    )
    # Slack: how far each candidate stays below the limits.
    slack = (
        (x, min(n - h for n, h in zip(most, held(x), strict=True)))
        for x in ended
    )
    fitting = [program for program, left in slack if left >= -1e-9]
    if not fitting:
        what = f"no order of {stages} stages and {microbatches} microbatches fits in the memory"
        why = "every rank must hold at least 1 microbatch"
        raise ProgramError(f"{what} limits {most}: {why}.")
    return min(
        fitting,
        key=lambda program: simulate(messages(program), costs).makespan,
    )


def _candidates(
    stages: int,
    microbatches: int,
    chunks: int,
    costs: Costs,
    most: list[float],
) -> Iterator[Program | None]:
    for name in _BESIDE:
        if traits(name).least <= chunks <= traits(name).most:
            yield schedule(name, stages, microbatches, chunks)
    ways = ["wrap", "fold"] if chunks == 2 else ["wrap"]
    # Admitting whole microbatches always ends. Admitting chunks is shorter where it
    # ends.
    whole = (False, True) if chunks > 1 else (False,)
    # Memory for the greedy order: all that is allowed, and less, which may be better.
    behind = [stages - r for r in range(stages)]
    shapes = (
        [stages] * stages,
        behind,
        [2 * stages - 1] * stages,
        [2 * n - 1 for n in behind],
    )
    both = [zip(most, shape, strict=True) for shape in shapes]
    rooms = [most, *([min(a, b) for a, b in pairs] for pairs in both)]
    for choice in product(ways, _ORDERS, rooms, whole):
        yield _Listing(stages, microbatches, chunks, costs, *choice).run()


@dataclass
class _Listing:
    """One greedy run over virtual stages."""

    stages: int
    microbatches: int
    chunks: int
    costs: Costs
    chunks_go: str
    order: tuple[str, ...]
    room: Sequence[float]
    whole: bool

    def row(self, stage: int) -> int:
        # A V folds back at the last rank; otherwise every chunk starts at rank 0 again.
        turn, r = divmod(stage, self.stages)
        return (
            self.stages - 1 - r if self.chunks_go == "fold" and turn % 2 else r
        )

    def run(self) -> Program | None:
        n = self.stages * self.chunks
        self.mine = [
            [s for s in range(n) if self.row(s) == r]
            for r in range(self.stages)
        ]
        rows: list[list[Op]] = [[] for _ in range(self.stages)]
        self.next = {(k, s): 0 for k in _KINDS for s in range(n)}
        self.ready: dict[Op, float] = {
            Op(ops.FORWARD, 0, m): 0.0 for m in range(self.microbatches)
        }
        self.used = [0.0] * self.stages
        self.free = [0.0] * self.stages
        clock = [(0.0, r) for r in range(self.stages)]
        heapq.heapify(clock)
        left = 3 * n * self.microbatches
        while left and clock:
            now, r = heapq.heappop(clock)
            # A rank that was woken while it still works looks again when it is done.
            if now < self.free[r]:
                continue
            op = self._choose(r, now)
            # Nothing can start now: look again when the next input arrives.
            if op is None:
                waits = [
                    t
                    for o, t in self.ready.items()
                    if t > now and self.row(o.piece) == r
                ]
                if waits:
                    heapq.heappush(clock, (min(waits), r))
                continue
            rows[r].append(op)
            left -= 1
            for other, time in self._finish(op, r, now):
                heapq.heappush(clock, (time, other))
        # Some ways of admitting microbatches fill the memory with ones that cannot
        # continue.
        return None if left else Program.pipeline(rows)

    def _choose(self, r: int, now: float) -> Op | None:
        """The most urgent operation that rank r can start now; deeper chunks first."""
        best: tuple[tuple[int, int], Op] | None = None
        share = 1 / self.chunks
        # Forward needs room for one more chunk.
        full = self.used[r] + share > self.room[r] + 1e-9
        mine = self.mine[r]
        entry = -1
        # Admit no microbatch if those already in may come to fill the memory.
        if self.whole:
            left = min(self.next[ops.WEIGHT_GRADIENT, stage] for stage in mine)
            inside = self.next[ops.FORWARD, mine[0]] - left
            entry = mine[0] if inside + 1 > self.room[r] + 1e-9 else -1
        for stage in mine:
            for kind in _KINDS:
                if kind == ops.FORWARD and (full or stage == entry):
                    continue
                op = Op(kind, stage, self.next[kind, stage])
                if self.ready.get(op, now + 1) > now:
                    continue
                # Forwards of a later chunk lead to a backward sooner, so they free
                # memory sooner.
                depth = -stage if kind == ops.FORWARD else stage
                urgency = (
                    -1
                    if kind == ops.WEIGHT_GRADIENT and full
                    else self.order.index(kind)
                )
                key = (urgency, depth)
                if best is None or key < best[0]:
                    best = (key, op)
        return best[1] if best else None

    def _finish(self, op: Op, r: int, now: float) -> list[tuple[int, float]]:
        """Book the operation. Returns the ranks to look at again, and when."""
        end = now + self.costs.of(op, r)
        del self.ready[op]
        self.next[op.kind, op.piece] += 1
        self.free[r] = end
        wake = [(r, end)]
        last = self.stages * self.chunks - 1
        if op.kind == ops.FORWARD:
            self.used[r] += 1 / self.chunks
            # The last stage's forward is followed by its backward.
            turn = Op(ops.INPUT_GRADIENT, last, op.index)
            following = [
                op._replace(piece=op.piece + 1) if op.piece < last else turn
            ]
        elif op.kind == ops.INPUT_GRADIENT:
            following = [Op(ops.WEIGHT_GRADIENT, op.piece, op.index)]
            following += [Op(ops.INPUT_GRADIENT, op.piece - 1, op.index)] * (
                op.piece > 0
            )
        else:
            self.used[r] -= 1 / self.chunks
            following = []
        for later in following:
            there = self.row(later.piece)
            # A message delays what follows on another rank.
            at = end + (
                self.costs.kinds.get("send", 0.0) if there != r else 0.0
            )
            self.ready[later] = at
            wake.append((there, max(at, self.free[there])))
        return wake
