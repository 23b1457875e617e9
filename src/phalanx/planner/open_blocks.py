"""Blocks that a schedule has open at once, for lower bounds of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout.choices import traits
from ..program import Op, ops, schedule
from ..program.state import IN_FLIGHT


class Moment(NamedTuple):
    """Blocks of a rank that are open at one point of its schedule."""

    opened: float = 0.0  # whose backward has not run
    waiting: float = 0.0  # whose weight gradients have not been computed
    # whether weights are present that every stage gathers once per step
    there: bool = False
    whole: float = 0.0  # blocks whose gradients still receive contributions
    # blocks whose gradient is computed or summed, if sums run every microbatch
    summing: float = 0.0

    def sizes(self) -> tuple[float, float, float]:
        """Blocks opened, opened or waiting, and waiting."""
        return self.opened, self.opened + self.waiting, self.waiting

    def holds_more(self, other: Moment, size: int) -> bool:
        """True if it has more by one size, or the same and more of the other fields."""
        mine, others = self.sizes()[size], other.sizes()[size]
        return (mine, *self[2:]) > (others, *other[2:])


@lru_cache(maxsize=4096)
def in_flight(
    name: str,
    pp: int,
    chunks: int,
    count: int,
    blocks: tuple[int, ...],
    ranks: tuple[int, ...],
) -> tuple[tuple[Moment, ...], ...]:
    """Six moments for each rank, in lists of the schedule.

    The first three have the most blocks opened, opened or waiting, and waiting. The
    last three are the same, from the point where every stage of the rank has begun a
    gradient.
    """
    rows, found = schedule(name, pp, count, chunks).rows, {}
    for rank in {*ranks}:
        row = (
            _freed_first(rows[rank])
            if traits(name).forward_first
            else rows[rank]
        )
        found[rank] = _fullest(row, blocks, pp)
    return tuple(found[rank] for rank in ranks)


def _fullest(
    row: Sequence[Op], blocks: Sequence[int], pp: int
) -> tuple[Moment, ...]:
    """The six moments of one rank's list."""
    split = any(op.kind == ops.WEIGHT_GRADIENT for op in row)
    uses = Counter(op.piece for op in row if op.kind in ops.USES_WEIGHTS)
    # Stages whose first forward, and whose first input gradient, are still to
    # come.
    unused, missing, whole = set(uses), set(uses), set[int]()
    ended, latest = False, -1
    opened = waiting = under_way = 0
    most = [Moment()] * 6
    for op in row:
        size, current = blocks[op.piece], 0
        if op.kind in ops.USES_WEIGHTS:
            uses[op.piece] -= 1
        # In a pipeline the head's weights are dropped before the last backward of its
        # stage's blocks.
        left = uses[op.piece] - (op.kind == ops.FORWARD)
        dropped = pp > 1 and op.piece == len(blocks) - 1 and left < 1
        begun = not missing
        if op.kind == ops.FORWARD:
            opened += size
            unused.discard(op.piece)
        elif op.kind in ops.PROPAGATES:
            # This moment is before the backward frees what its forward kept; if it is
            # split, after.
            missing.discard(op.piece)
            if split:
                opened -= size
                waiting += size
                whole.add(op.piece)
                begun = not missing
            else:
                current = 1
        else:
            waiting -= size
            whole.discard(op.piece)
        there = not (unused or ended or dropped)
        gradients = float(sum(blocks[piece] for piece in whole))
        now = Moment(opened, waiting, there, gradients, under_way + current)
        # A moment counts for the second three places from the first gradient
        # of the last stage on.
        # After an input gradient that is split off, nothing is recomputed.
        factored = split and op.kind in ops.PROPAGATES
        for of in (2,) if factored else (0, 1, 2):
            for place in (of, of + 3) if begun else (of,):
                if now.holds_more(most[place], of):
                    most[place] = now
        if op.kind in ops.PROPAGATES and not split:
            opened -= size
        if op.kind in ops.CONTRIBUTES:
            # The third sum waits for the first. A sum waits for an earlier one of the
            # same unit.
            other_unit = latest not in (-1, op.piece)
            under_way = min(IN_FLIGHT, max(size, 1) + other_unit)
            latest = op.piece
        # A stage's weights are dropped after their last use in the step.
        ended = ended or not uses[op.piece]
    return tuple(most)


def _freed_first(row: Sequence[Op]) -> list[Op]:
    """The row with each forward moved after a backward that it overlaps with.

    A lower bound: running both part by part never keeps less open.
    """
    out: list[Op] = []
    for op in row:
        last = out[-1] if out else op
        beside = last.kind == ops.FORWARD and op.kind in ops.PROPAGATES
        if beside and op.piece != last.piece:
            out.insert(-1, op)
        else:
            out.append(op)
    return out
