"""Schedules of users, refused unless they order the computing of one whole training
step.

Every reader of a schedule (`draw`, `check`, `plan`, `verify`, `train`) gets it from
here, so all of them refuse the same schedules, with the same message.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from . import ops
from .check import faults
from .ops import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT
from .passes import messages
from .program import MOST, Op, Program, ProgramError

_KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


def own_schedule(
    name: str, returned: Any, stages: int, microbatches: int, chunks: int = 1
) -> Program:
    """Turn the result of a user's function into a program, or raise a ProgramError with
    its first fault.
    """
    rows = _rows(name, returned, stages)
    # First the list itself, as the messages of a wrong one would only confuse.
    wrong = next(_faults(rows, stages * chunks, microbatches), "")
    if not wrong:
        program = Program.pipeline(rows)
        # Ranks may still wait for each other, which only their messages show.
        wrong = next(iter(faults(messages(program))), "")
    if wrong:
        raise ProgramError(f"schedule {name}: {wrong}")
    return program


def _rows(name: str, rows: Any, stages: int) -> list[list[Op]]:
    """The schedule's result, checked to be a list of operations for each stage."""
    if not isinstance(rows, list | tuple) or len(rows) != stages:
        many = (
            f"{len(rows)} lists"
            if isinstance(rows, list | tuple)
            else f"a {type(rows).__name__}"
        )
        what = f"schedule {name} returns {many} for {stages} stages"
        raise ProgramError(f"{what}. Return a list of Op for each stage.")
    for stage, row in enumerate(rows):
        for x in row if isinstance(row, list | tuple) else [row]:
            # Numbers of type int alone: True, or a tensor, would fail much later.
            numbers = (
                (x.piece, x.index, x.peer)
                if isinstance(x, Op) and x.kind in KINDS
                else ()
            )
            if not numbers or not all(
                type(n) is int and -1 <= n <= MOST for n in numbers
            ):
                raise ProgramError(
                    f"schedule {name}: stage {stage} has {repr(x)[:60]}, which is not an operation."
                    ' Return lists of Op, as in [Op("F", 0, 0), Op("B", 0, 0)].'
                )
    return [list(row) for row in rows]


def _faults(
    rows: Sequence[Sequence[Op]], pieces: int, microbatches: int
) -> Iterator[str]:
    """Yield each reason why these lists are not one training step, the most general
    first.
    """
    yield from _foreign(rows, pieces, microbatches)
    if not any(op.kind in ops.BACKWARDS for row in rows for op in row):
        yield "it has no backward, so it cannot train. Give each F a B, or an I and a W."
    yield from _misplaced(rows, pieces)
    for rank, row in enumerate(rows):
        yield from _incomplete(f"rank {rank}", row, microbatches)


def _foreign(
    rows: Sequence[Sequence[Op]], pieces: int, microbatches: int
) -> Iterator[str]:
    """Yield operations that a schedule does not order, or that this step does not have."""
    for rank, row in enumerate(rows):
        for op in row:
            who = f"rank {rank} has {op}"
            if op.kind not in _KINDS or op.of:
                yield f"{who}. A schedule orders F, B, I and W; passes place everything else."
            elif not 0 <= op.piece < pieces:
                yield f"{who}, but the stages are 0 to {pieces - 1}."
            elif not 0 <= op.index < microbatches:
                yield f"{who}, but the microbatches are 0 to {microbatches - 1}."


def _misplaced(rows: Sequence[Sequence[Op]], pieces: int) -> Iterator[str]:
    """Yield stages that no rank computes, or several, and ranks that compute none."""
    holders = [{op.piece for op in row} for row in rows]
    for piece in range(pieces):
        ranks = [rank for rank, held in enumerate(holders) if piece in held]
        if len(ranks) != 1:
            where = (
                f"ranks {', '.join(map(str, ranks))}" if ranks else "no rank"
            )
            yield f"stage {piece} is computed by {where}; it belongs to one rank."
    for rank, held in enumerate(holders):
        if not held:
            yield f"rank {rank} computes nothing. Give it a stage, or use fewer stages."


def _incomplete(
    rank: str, row: Sequence[Op], microbatches: int
) -> Iterator[str]:
    """Yield microbatches without forward or backward, and operations in a wrong order."""
    for op, count in Counter(row).items():
        if count > 1:
            yield f"{rank} has {op} {count} times; write it once."
    place = {op: i for i, op in enumerate(row)}
    for piece in sorted({op.piece for op in row}):
        for m in range(microbatches):
            # A forward, then a whole backward or its two halves in order.
            forward, whole, first, second = (
                Op(kind, piece, m) for kind in _KINDS
            )
            if forward not in place:
                yield f"{rank} lacks {forward}, the forward of stage {piece}, microbatch {m}."
                continue
            backward = [op for op in (whole, first, second) if op in place]
            if backward not in ([whole], [first, second]):
                has = " and ".join(map(str, backward)) or "no backward"
                yield f"{rank} has {has} after {forward}. Give it {whole}, or {first} and {second}."
            for before, after in (
                ((forward, backward[0]), (backward[0], backward[-1]))
                if backward
                else ()
            ):
                if place[before] > place[after]:
                    yield f"{rank} has {after} before {before}, which it needs."
