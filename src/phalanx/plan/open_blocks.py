"""Blocks that a schedule has open at once: what bounds of memory need to know of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout.choices import traits
from ..program import Op, ops, schedule
from ..program.state import IN_FLIGHT


class Moment(NamedTuple):
    """Blocks that a rank's schedule has open at once."""

    opened: float = 0.0  # their forwards wait for their backward
    waiting: float = 0.0  # their input gradient waits for the weights'
    there: bool = False  # weights that are gathered once a step, of all stages
    whole: float = 0.0  # gradients that further contributions will be added to
    # units whose gradient is used or on its way, if summed every microbatch
    summing: float = 0.0

    def sizes(self) -> tuple[float, float, float]:
        """Those opened, those opened or waiting, and those waiting."""
        return self.opened, self.opened + self.waiting, self.waiting

    def holds_more(self, other: Moment, size: int) -> bool:
        """True if it has more by one of the sizes, or as much and more of the rest."""
        mine, others = self.sizes()[size], other.sizes()[size]
        return (mine, *self[2:]) > (others, *other[2:])


@lru_cache(maxsize=64)
def rows_of(name: str, pp: int, count: int, chunks: int) -> tuple[tuple[Op, ...], ...]:
    """A schedule's list for each rank."""
    return schedule(name, pp, count, chunks).rows


@lru_cache(maxsize=4096)
def in_flight(
    name: str,
    pp: int,
    chunks: int,
    count: int,
    blocks: tuple[int, ...],
    ranks: tuple[int, ...],
) -> tuple[tuple[Moment, ...], ...]:
    """For each of the ranks the moments with the most blocks opened, with the most opened or waiting, and
    with the most waiting; then the same once every stage of the rank has begun a gradient."""
    rows, found = rows_of(name, pp, count, chunks), {}
    for rank in {*ranks}:
        row = _freed_first(rows[rank]) if traits(name).forward_first else rows[rank]
        found[rank] = _fullest(row, blocks, pp)
    return tuple(found[rank] for rank in ranks)


def _fullest(row: Sequence[Op], blocks: Sequence[int], pp: int) -> tuple[Moment, ...]:
    """The six moments of one rank's list."""
    split = any(op.kind == ops.WEIGHT_GRADIENT for op in row)
    uses = Counter(op.piece for op in row if op.kind in ops.USES_WEIGHTS)
    unused, missing, whole = set(uses), set(uses), set[int]()
    ended, latest = False, -1
    opened = waiting = under_way = 0
    most = [Moment()] * 6
    for op in row:
        size, current = blocks[op.piece], 0
        if op.kind in ops.USES_WEIGHTS:
            uses[op.piece] -= 1
        # In a pipeline the head's are dropped before the last backward of its stage's blocks.
        left = uses[op.piece] - (op.kind == ops.FORWARD)
        dropped = pp > 1 and op.piece == len(blocks) - 1 and left < 1
        begun = not missing
        if op.kind == ops.FORWARD:
            opened += size
            unused.discard(op.piece)
        elif op.kind in ops.PROPAGATES:
            # Before it gives back what its forward kept; or, if split, after it.
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
        # Behind an input gradient that is split from the weights' nothing is computed again.
        factored = split and op.kind in ops.PROPAGATES
        for of in (2,) if factored else (0, 1, 2):
            for place in (of, of + 3) if begun else (of,):
                if now.holds_more(most[place], of):
                    most[place] = now
        if op.kind in ops.PROPAGATES and not split:
            opened -= size
        if op.kind in ops.CONTRIBUTES:
            # The third sum waits for the first, and one of the same unit for that before it.
            other_unit = latest not in (-1, op.piece)
            under_way = min(IN_FLIGHT, max(size, 1) + other_unit)
            latest = op.piece
        ended = ended or not uses[op.piece]
    return tuple(most)


def _freed_first(row: Sequence[Op]) -> list[Op]:
    """A row in which a forward that a backward stands beside comes after it: part by part, they never
    have less open than this."""
    out: list[Op] = []
    for op in row:
        last = out[-1] if out else op
        beside = last.kind == ops.FORWARD and op.kind in ops.PROPAGATES
        if beside and op.piece != last.piece:
            out.insert(-1, op)
        else:
            out.append(op)
    return out
