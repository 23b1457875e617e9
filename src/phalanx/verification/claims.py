"""Claims about a layout's program that training does not test, checked before it runs.

The texts of a layout and its program parse back to the same values. The memory counts
agree with what ranks hold, which the executor compares with real buffers. The order is
that of the papers (`step_order.py`). The check of a program rejects it once it is
damaged.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..layout import Layout
from ..program import Op, Program, check, faults, ops
from ..program.memory import Sizes, peaks
from ..program.state import INPUT, SENT, WHOLE, State
from .step_order import idle_faults, order_faults

# microbatches of a step long enough for the check to simulate only a few of them
LONG = 12
# Operations without which a program is still correct: a count, clipping, recomputation,
# weights that stay gathered, and weights that a gather loads from the host itself. A
# program does not say which units need sums over tp, sums of routing choices or scales.
OPTIONAL = {
    ops.COUNT,
    ops.AGREE,
    ops.LOAD,
    ops.DROP,
    ops.SUM_PARTS,
    ops.SUM_CHOICES,
    ops.AGREE_SCALES,
    *ops.RECOMPUTES,
}
# Axes whose ranks compute the same pieces together.
INNER = ("cp", "tp", "ep")
# operations with requirements, which therefore never come first
EARLY = {*ops.BACKWARDS, *ops.REDUCTIONS, ops.UPDATE, ops.SEND}


def false_claim(layout: Layout, program: Program, long: Program | None) -> str:
    """Return the first claim about a program that does not hold, or "".

    `long` is the same step with `LONG` microbatches, or None if the layout has none.
    """
    # Generators: what follows the first false claim is not computed.
    claims = (
        _texts(layout, program),
        order_faults(layout, program),
        idle_faults(layout),
        _books(program),
        _peaks_by_hand(program),
        _undetected(program, str(layout)),
        _shortened(long),
    )
    return next((wrong for claim in claims for wrong in claim), "")


def _texts(layout: Layout, program: Program) -> Iterator[str]:
    if Layout.parse(str(layout)) != layout:
        yield f"the layout {str(layout)!r} is read back as another one"
    if Program.parse(str(program)) != program:
        yield "the program's text is read back as another program"


# ---- the counts of memory


def _books(program: Program) -> Iterator[str]:
    """Compare the buffers taken and released with what the state holds after each
    operation."""
    for row in range(len(program.rows)):
        for in_place in (False, True):
            yield from _row_books(State(program, row, in_place=in_place))


def _row_books(state: State) -> Iterator[str]:
    books: Counter[tuple[str, int]] = Counter()
    walked = 0
    for op, _ in state.walk():
        # The state is that before `op`; the flow covers all operations before it.
        for number in state.flow[walked:]:
            _enter(books, state, number)
        walked = len(state.flow)
        yield from _unequal(books, state, op)
    for number in state.flow[walked:]:
        _enter(books, state, number)
    # Weights may stay for the next step, and some transports keep messages until then.
    stays = {ops.WEIGHTS, SENT}
    for (what, piece), count in sorted(books.items()):
        if count and what not in stays:
            yield f"the step ends with {count} of the buffers '{what}' of piece {piece}"


def _enter(books: Counter[tuple[str, int]], state: State, number: int) -> None:
    for change in state.bundles[number]:
        books[change.what, change.piece] += change.sign


def _unequal(
    books: Counter[tuple[str, int]], state: State, op: Op
) -> Iterator[str]:
    """Describe buffers whose count differs from what the state holds before an
    operation."""
    held = Counter((what, piece) for (piece, _), what in state.kept.items())
    held.update(
        (ops.WEIGHTS, unit) for unit in {*state.gathered, *state.loaded}
    )
    # These are counted exactly; the others may be counted for longer than the
    # state holds them.
    exact = {ops.KEPT, ops.SELECTED, ops.FACTORS, INPUT, ops.WEIGHTS}
    for key in {*books, *held}:
        what, piece = key
        # A whole gradient is held while a unit is open, even if no operation
        # keeps it.
        least = max(held[key], what == WHOLE and piece in state.open)
        wrong = (
            books[key] != held[key] if what in exact else books[key] < least
        )
        if wrong:
            yield (
                f"before {op} {books[key]} buffers '{what}' of piece {piece} are counted, and"
                f" {least} are held"
            )


def _peaks_by_hand(program: Program) -> Iterator[str]:
    """Compare the peaks of activations and of gathered units with counts of the list
    alone."""
    counted = peaks(program, Sizes.counts(program.pieces))
    for number, (row, peak) in enumerate(
        zip(program.rows, counted, strict=True)
    ):
        wanted = {"gathered": _most_gathered(row)}
        # With recomputation, a piece keeps its input for another time than the rest.
        if not any(op.kind in ops.RECOMPUTES for op in row):
            wanted["activations"] = _most_kept(row)
        for kind, count in wanted.items():
            told = peak.kinds.get(kind, 0.0)
            if told != count:
                yield f"row {number} holds up to {count} {kind}, and {told:g} are counted"


def _most_kept(row: Sequence[Op]) -> int:
    """The most activations, counted by piece and microbatch, on the device at once."""
    kept: set[tuple[int, int]] = set()
    most = 0
    for op in row:
        of = op.piece, op.index
        if op.kind in (ops.FORWARD, ops.RELOAD):
            kept.add(of)
        most = max(most, len(kept))
        # A backward for inputs alone keeps the activations that the weight gradient
        # needs.
        if op.kind in (ops.BACKWARD, ops.WEIGHT_GRADIENT, ops.OFFLOAD):
            kept.discard(of)
    return most


def _most_gathered(row: Sequence[Op]) -> int:
    """The largest number of units whose weights are gathered at once."""
    there: set[int] = set()
    most = 0
    for op in row:
        if op.kind in (ops.GATHER, ops.LOAD):
            there.add(op.piece)
        most = max(most, len(there))
        if op.kind == ops.DROP:
            there.discard(op.piece)
    return most


# ---- the proof


def _undetected(program: Program, seed: str) -> Iterator[str]:
    """Describe damaged programs that the check accepts: for each kind of damage and of
    operation one, drawn with the layout as seed."""
    draw = random.Random(seed)
    alike: dict[tuple[str, str], list[Damage]] = {}
    for damage in _damages(program):
        alike.setdefault((damage.way, damage.kind), []).append(damage)
    for _, group in sorted(alike.items()):
        damage = draw.choice(group)
        rows = [*program.rows]
        rows[damage.row] = damage.operations
        if not faults(program.with_rows(rows)):
            what = f"{damage.text} {damage.way}"
            yield f"the proof accepts the program though {what}"
    # Ranks along an inner axis make the same calls, so one list must serve
    # them all.
    for axis in program.mesh.axes:
        if axis.name in INNER and not faults(_parted(program, axis.name)):
            yield f"the proof accepts ranks of {axis.name} that follow lists of their own"


def _parted(program: Program, axis: str) -> Program:
    """Return a program in which ranks beyond the first along an axis have separate rows."""
    owner = [*program.owner]
    rows = [*program.rows]
    copies: dict[int, int] = {}
    for rank, row in enumerate(program.owner):
        # The first rank along the axis keeps its row.
        place = program.mesh.coordinates(rank)[axis]
        if not place:
            continue
        if row not in copies:
            copies[row] = len(rows)
            rows.append(program.rows[row])
        owner[rank] = copies[row]
    return replace(program, rows=tuple(rows), owner=tuple(owner))


class Damage(NamedTuple):
    """A row with one mistake: how it is damaged, and the kind and text of the operation."""

    way: str
    kind: str
    text: str
    row: int
    operations: tuple[Op, ...]


def _damages(program: Program) -> Iterator[Damage]:
    """Yield rows with one mistake each: an operation missing, duplicated or too early,
    or two messages received in another order than they are sent."""
    for number, row in enumerate(program.rows):
        # The last of each kind on each piece: an earlier one may be optional, because
        # the next sum includes what it would sum.
        last = {(op.kind, op.piece): place for place, op in enumerate(row)}
        counts = Counter(op.kind for op in row)
        for (kind, _), place in last.items():
            op, before, after = row[place], row[:place], row[place + 1 :]
            name = str(op)
            # A row without gathers has its weights at home; one without reductions has
            # its gradients, or with `exact` all of their sums.
            single = ops.GATHER, ops.REDUCE, ops.SHARE_SUMS
            alone = kind in single and counts[kind] == 1
            if kind not in OPTIONAL and not alone:
                missing = (*before, *after)
                yield Damage("is missing", kind, name, number, missing)
            if kind in EARLY:
                early = (op, *before, *after)
                yield Damage("comes first", kind, name, number, early)
            twice = (*before, op, op, *after)
            yield Damage("stands twice", kind, name, number, twice)
        yield from _crossed(number, row)


def _crossed(number: int, row: tuple[Op, ...]) -> Iterator[Damage]:
    """Yield rows in which the receives of two consecutive messages of one flow are
    swapped."""
    received: dict[tuple[int, str, int], int] = {}
    for place, op in enumerate(row):
        if op.kind != ops.RECEIVE:
            continue
        # Messages of one flow are matched by their order.
        flow = op.piece, op.of, op.peer
        if (other := received.get(flow)) is not None:
            changed = [*row]
            changed[other], changed[place] = op, row[other]
            both = f"{row[other]} and {op}"
            yield Damage(
                "are exchanged", op.kind, both, number, tuple(changed)
            )
        received[flow] = place


def _shortened(program: Program | None) -> Iterator[str]:
    """Compare the check with a few microbatches to a check with all of them."""
    if program is None:
        return
    sizes = Sizes.counts(program.pieces)
    if check(program).counts != peaks(program, sizes):
        yield "the proof of a long step counts other peaks than the step has"
