"""What each rank holds while it works through its list, by kind.

Memory depends on the order of the list alone, not on how long anything takes: `check` takes the
peaks from here, `simulate` lays the same steps over its times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from . import ops, state
from .program import Op, Program
from .state import State, Step


@dataclass(frozen=True)
class Sizes:
    """Bytes (or counts) by piece, each a tuple with one number a piece; units count as their piece.

    `kept`: what the forward keeps for the backward, its input among it. `kept_after_i`: what of
    that the weight gradient still needs. `input`: what a recomputed piece keeps instead;
    `selected`: what one keeps of which a part is recomputed, its input among it. `home`:
    the weights that a rank always holds; `gathered`: the whole weights when they are not at home.
    `gradient_shard`: what is left of a gradient once it is summed; left out, sums are in place and
    the whole gradient stays until the update. `gradient_home`: a buffer for gradients that is there
    from the start. `edge`: what a piece puts out, which a message takes
    to the next stage; its gradient is as large. `matrices`: of a unit, what is sent to their owners and
    back, and the results. `sends_stay`: the group keeps a copy of what was
    sent until the step ends, as gloo's does; else it goes when it has been received.
    """

    kept: tuple[float, ...]
    input: tuple[float, ...]
    kept_after_i: tuple[float, ...] = ()
    temporary: tuple[float, ...] = ()
    home: tuple[float, ...] = ()
    gathered: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    gradient_shard: tuple[float, ...] = ()
    gradient_home: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    edge: tuple[float, ...] = ()
    selected: tuple[float, ...] = ()
    matrices: tuple[float, ...] = ()
    sends_stay: bool = False

    @classmethod
    def counts(cls, pieces: int) -> Sizes:
        """Everything counts one: held pieces, kept inputs, gathered units, whole gradients."""
        one, none = (1.0,) * pieces, (0.0,) * pieces
        return cls(one, one, gathered=one, gradient=one, gradient_shard=none, selected=one)


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds: of everything together, and of each kind by itself."""

    total: float
    at: Op | None
    kinds: dict[str, float]  # each kind's own highest
    then: dict[str, float]  # what each kind held at the moment of the total


def _of(sizes: tuple[float, ...], piece: int) -> float:
    return sizes[piece] if 0 <= piece < len(sizes) else 0.0


def _table(s: Sizes) -> dict[str, tuple[str, tuple[float, ...]]]:
    """For each buffer that `State` tells of: the kind it is counted as, and its size by piece."""
    return {
        ops.KEPT: ("activations", s.kept),
        ops.SELECTED: ("activations", s.selected),
        ops.FACTORS: ("activations", s.kept_after_i or s.kept),
        state.INPUT: ("inputs", s.input),
        state.WORKING: ("temporary", s.temporary),
        ops.WEIGHTS: ("gathered", s.gathered),
        state.WHOLE: ("gradients", s.gradient),
        state.PART: ("gradients", s.gradient_shard or s.gradient),
        state.RECEIVED: ("messages", s.edge),
        state.SENT: ("messages", s.edge if s.sends_stay else ()),
        state.MATRICES: ("messages", s.matrices),
    }


def follow(program: Program, sizes: Sizes, row: int) -> list[Step]:
    """What each operation of a row takes and gives back, buffer by buffer. Of the sizes it matters
    only whether gradients have shards."""
    return State(program, row, in_place=not sizes.gradient_shard).follow()


Bytes = list[tuple[str, float]]  # by kind


def changes(program: Program, sizes: Sizes, row: int) -> Iterator[tuple[Op | None, Bytes, Bytes]]:
    """What each operation of a row takes when it starts and gives back when it ends; first, under None,
    what is always there."""
    table = _table(sizes)

    def sized(changed: Iterable[state.Change], sign: int) -> Bytes:
        rows = ((*table[c.what], c) for c in changed)
        return [(kind, sign * c.sign * _of(size, c.piece)) for kind, size, c in rows]

    yield None, [*_always(program, sizes, row).items()], []
    for op, _, start, end in follow(program, sizes, row):
        yield op, sized(start, 1), sized(end, -1)


def _always(program: Program, sizes: Sizes, row: int) -> dict[str, float]:
    forwards = (op for op in program.rows[row] if op.kind == ops.FORWARD)
    units = {u for piece in {op.piece for op in forwards} for u in program.units(piece)}
    always = {"weights": sizes.home, "optimizer": sizes.optimizer}
    if sizes.gradient_home:
        always["gradients"] = sizes.gradient_home
    return {kind: sum(_of(size, u) for u in sorted(units)) for kind, size in always.items()}


def peaks(
    program: Program, sizes: Sizes, followed: Sequence[Sequence[Step]] = ()
) -> tuple[Peak, ...]:
    """The most that each row's ranks hold, when operations follow each other as listed. `followed`
    is what `follow` says of each row, where that is known."""
    rows = range(len(program.rows))
    each = followed or [follow(program, sizes, row) for row in rows]
    return tuple(_peak(_always(program, sizes, row), sizes, each[row]) for row in rows)


def _peak(always: Mapping[str, float], sizes: Sizes, followed: Sequence[Step]) -> Peak:
    table = _table(sizes)
    now, kinds = dict(always), dict(always)
    held = total = sum(always.values())
    at, then = None, dict(always)
    amounts: dict[state.Change, tuple[str, float]] = {}
    for op, _, *changed in followed:
        for n, each in enumerate(changed):
            for change in each:
                if change not in amounts:
                    kind, size = table[change.what]
                    amounts[change] = kind, change.sign * _of(size, change.piece)
                    now.setdefault(kind, 0.0)
                    kinds.setdefault(kind, 0.0)
                kind, amount = amounts[change]
                held += amount
                now[kind] = most = now[kind] + amount
                if most > kinds[kind]:
                    kinds[kind] = most
            if not n and held > total:
                total, at, then = held, op, dict(now)
    return Peak(total, at, kinds, then)
