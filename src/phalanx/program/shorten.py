"""Shortens a program by leaving out microbatches that repeat others.

In a program that repeats, every row is a list A, then equal windows X that differ only
in their microbatches, then C. In a window, each kind of operation on a microbatch
occurs once for each of its microbatches, and nothing else occurs. Leave out some
windows of each row. Suppose that the rest has no fault, and that every row's windows
contain a point up to which no rank waits for anything listed behind it. Then the whole
program has no fault: up to these points the two are the same, each further window leads
from such a point to the next, and everything behind waits for the same operations as in
the rest.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add, eq, itemgetter, sub
from typing import NamedTuple

from . import ops
from .graph import Graph
from .memory import Peak
from .program import Op, Program

# Windows before each row's point, and windows left in the row that has fewest: for
# windows of one microbatch, and for longer ones.
BEHIND = 2
LEFT, LEFT_LONG = 6, 3
_KIND = itemgetter(0, 1, 3, 4)  # everything of an operation but its number


class Short(NamedTuple):
    """A shortened program, and the windows in each row: start, end and length."""

    program: Program
    windows: list[tuple[int, int, int]]
    gone: int  # the windows left out

    def proves(self, made: Graph) -> bool:
        """True if a proof for the shortened program holds for the whole program."""
        first = [0, *accumulate(map(len, self.program.rows))]
        least = [start + BEHIND * length for start, _, length in self.windows]
        # for each row: the operations examined so far, and those to examine
        done = first[:-1]
        reach = list(map(add, first, least))
        # Follow what the points wait for: everything up to a point belongs to it.
        while done != reach:
            todo = [
                i
                for a, b in zip(done, reach, strict=True)
                for i in range(a, b)
            ]
            done = [*reach]
            for event in {made.event[j] for i in todo for j in made.before[i]}:
                for i in made.events[event]:
                    row = made.ops[i][0]
                    reach[row] = max(reach[row], i + 1)
        # In every row the point must lie inside the windows, where all repeat.
        points = zip(map(sub, reach, first), self.windows, strict=True)
        return all(point <= end for point, (_, end, _) in points)

    def of_whole(
        self, peaks: Sequence[Peak], program: Program
    ) -> tuple[Peak, ...]:
        """Translate peaks of the shortened program to the whole; memory is the same."""

        def named(row: int, op: Op) -> Op:
            at = self.program.rows[row].index(op)
            _, end, length = self.windows[row]
            return program.rows[row][at + self.gone * length * (at >= end)]

        return tuple(
            replace(peak, at=named(row, peak.at)) if peak.at else peak
            for row, peak in enumerate(peaks)
        )


def shortened(program: Program) -> Short | None:
    """The program without repeated windows; None if this saves less than a third.

    A tree of sums does not repeat.
    """
    if program.exact:
        return None
    # Windows of one microbatch, or of as many as stages, as in rounds of P.
    for period in dict.fromkeys((1, program.mesh.of("pp"))):
        windows = [_windows(row, period) for row in program.rows]
        found = [each for each in windows if each]
        left = LEFT if period == 1 else LEFT_LONG
        gone = min(map(_count, found), default=0) - left
        if (
            len(found) < len(windows)
            or 3 * gone * period < program.microbatches
        ):
            continue
        rows = []
        for row, (start, _, length) in zip(program.rows, found, strict=True):
            at, by = start + length, gone * period
            rest = row[at + gone * length :]
            # Behind the gap every microbatch's number is lower by those left out.
            moved = (
                op._replace(index=op.index - by) if _numbered(op) else op
                for op in rest
            )
            rows.append((*row[:at], *moved))
        kept = [(a, b - gone * n, n) for a, b, n in found]
        short = Short(program.with_rows(rows), kept, gone)
        return short if _in_turn(short.program) else None
    return None


def _count(windows: tuple[int, int, int]) -> int:
    start, end, length = windows
    return (end - start) // length


def _numbered(op: Op) -> bool:
    """True if an operation's number is that of a microbatch."""
    return bool(op.of) or op.kind in ops.ON_MICROBATCH


def _windows(row: tuple[Op, ...], period: int) -> tuple[int, int, int] | None:
    """The windows around the middle of a row, of `period` microbatches each, or None."""
    numbers = list(map(itemgetter(2), row))
    kinds = list(map(_KIND, row))
    known = {
        kind for kind in set(kinds) if kind[2] or kind[0] in ops.ON_MICROBATCH
    }
    length = len(known) * period
    # same[i]: the operation `length` later is of the same kind, one period on.
    again = map(eq, kinds[length:], kinds)
    later = map(period.__eq__, map(sub, numbers[length:], numbers))
    same = bytes(map(min, again, later))
    middle = len(same) // 2
    # The longest run of that around the middle.
    start = same.rfind(0, 0, middle) + 1
    end = same.find(0, middle)
    end = (len(same) if end < 0 else end) + length
    each = Counter(kinds[start : start + length])
    # A window must hold each kind once for each of its microbatches, and nothing else.
    whole = (
        known
        and end - start >= 2 * length
        and each == dict.fromkeys(known, period)
    )
    return (start, end, length) if whole else None


def _in_turn(program: Program) -> bool:
    """True if each kind of operation occurs once per microbatch, in order."""
    turns = list(range(program.microbatches))
    for row in program.rows:
        numbers: dict[tuple[object, ...], list[int]] = {}
        for op in filter(_numbered, row):
            numbers.setdefault(_KIND(op), []).append(op.index)
        if any(each != turns for each in numbers.values()):
            return False
    return True
