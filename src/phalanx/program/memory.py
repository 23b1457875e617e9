"""What each rank holds while it works through its list, by kind.

Memory depends on the order of the list alone, not on how long anything takes: `check` takes the
peaks from here, `simulate` lays the same steps over its times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .op import Op, Program

__all__ = ["Change", "Peak", "Sizes", "changes", "peaks"]


@dataclass(frozen=True)
class Sizes:
    """Bytes (or counts) by piece, each a tuple with one number a piece; units count as their piece.

    `kept`: what the forward keeps for the backward, its input among it. `kept_after_i`: what of
    that the weight gradient still needs. `input`: what a recomputed piece keeps instead. `home`:
    the weights that a rank always holds; `gathered`: the whole weights when they are not at home.
    `gradient_shard`: what is left of a gradient once it is summed; left out, sums are in place and
    the whole gradient stays until the update.
    """

    kept: tuple[float, ...]
    input: tuple[float, ...]
    kept_after_i: tuple[float, ...] = ()
    temporary: tuple[float, ...] = ()
    home: tuple[float, ...] = ()
    gathered: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    gradient_shard: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()

    @classmethod
    def counts(cls, pieces: int) -> Sizes:
        """Everything counts one: held pieces, kept inputs, gathered units, whole gradients."""
        one = (1.0,) * pieces
        none = (0.0,) * pieces
        return cls(kept=one, input=one, gathered=one, gradient=one, gradient_shard=none)


@dataclass(frozen=True)
class Change:
    """What an operation takes when it starts and gives back when it ends, by kind."""

    takes: tuple[tuple[str, float], ...] = ()
    gives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds: of everything together, and of each kind by itself."""

    total: float
    at: Op | None
    kinds: dict[str, float]  # each kind's own highest
    then: dict[str, float]  # what each kind held at the moment of the total


def _of(sizes: tuple[float, ...], piece: int) -> float:
    return sizes[piece] if 0 <= piece < len(sizes) else 0.0


class _Row:
    """Walks one row; knows which pieces are recomputed, offloaded, gathered."""

    def __init__(self, program: Program, number: int, sizes: Sizes) -> None:
        self.program, self.ops, self.sizes = program, program.rows[number], sizes
        self.at = {op: i for i, op in enumerate(self.ops)}
        self.whole: set[int] = set()  # units gathered now
        self.full: set[int] = set()  # units with a whole gradient that S has not yet summed
        self.part: set[int] = set()  # units with a summed gradient that U has not yet used

    def base(self) -> dict[str, float]:
        units = {u for op in self.ops if op.kind == "F" for u in self.program.units(op.piece)}
        return {
            "weights": sum(_of(self.sizes.home, u) for u in units),
            "optimizer": sum(_of(self.sizes.optimizer, u) for u in units),
        }

    def _keeps(self, op: Op) -> tuple[tuple[str, float], ...]:
        """What stays after the forward: everything, the input only, or nothing."""
        again = self.at.get(Op("R", op.piece, op.index))
        if again is None:
            return (("activations", _of(self.sizes.kept, op.piece)),)
        before = self.at.get(Op("R", op.piece - 1, op.index), again)
        return () if before < again else (("inputs", _of(self.sizes.input, op.piece)),)

    def change(self, op: Op) -> Change:
        s, piece = self.sizes, op.piece
        forward = Op("F", piece, op.index)
        kept = _of(s.kept, piece)
        working = (("temporary", _of(s.temporary, piece)),)
        if op.kind == "F":
            return Change((*self._keeps(op), *working), working)
        if op.kind == "R":
            # The kept input is among what is restored: it is not there twice, it changes its name.
            held = self._keeps(forward)
            known = sum(amount for _, amount in held)
            back = (*held, *(("activations", -amount) for _, amount in held))
            return Change((("activations", kept - known), *working), (*back, *working))
        if op.kind == "O":
            return Change((), self._keeps(forward))
        if op.kind == "Z":
            return Change(self._keeps(forward), ())
        if op.kind == "I":
            rest = _of(s.kept_after_i, piece) if s.kept_after_i else kept
            return Change(working, (("activations", kept - rest), *working))
        if op.kind in "BW":
            left = kept if op.kind == "B" or not s.kept_after_i else _of(s.kept_after_i, piece)
            return Change((*self._contribute(piece), *working), (("activations", left), *working))
        return self._on_unit(op)

    def _contribute(self, piece: int) -> tuple[tuple[str, float], ...]:
        new = [u for u in self.program.units(piece) if u not in self.full]
        self.full.update(new)
        return tuple(("gradients", _of(self.sizes.gradient, u)) for u in new)

    def _on_unit(self, op: Op) -> Change:
        s, unit = self.sizes, op.piece
        if op.kind == "G" and unit not in self.whole:
            self.whole.add(unit)
            return Change((("gathered", _of(s.gathered, unit)),))
        if op.kind == "D" and unit in self.whole:
            self.whole.discard(unit)
            return Change((), (("gathered", _of(s.gathered, unit)),))
        if op.kind == "S" and s.gradient_shard:
            self.full.discard(unit)
            shard = () if unit in self.part else (("gradients", _of(s.gradient_shard, unit)),)
            self.part.add(unit)
            return Change(shard, (("gradients", _of(s.gradient, unit)),))
        if op.kind == "U":
            held = [_of(s.gradient, unit)] * (unit in self.full)
            held += [_of(s.gradient_shard, unit)] * (unit in self.part)
            self.full.discard(unit)
            self.part.discard(unit)
            return Change((), tuple(("gradients", h) for h in held))
        return Change()


def changes(program: Program, sizes: Sizes, row: int) -> Iterator[tuple[Op | None, Change]]:
    """What each operation of a row takes and gives back; first, under None, what is always there."""
    walk = _Row(program, row, sizes)
    yield None, Change(tuple(walk.base().items()))
    for op in walk.ops:
        yield op, walk.change(op)


def peaks(program: Program, sizes: Sizes) -> tuple[Peak, ...]:
    """The most that each row's ranks hold, when operations follow each other as listed."""
    return tuple(_peak(program, sizes, row) for row in range(len(program.rows)))


def _peak(program: Program, sizes: Sizes, row: int) -> Peak:
    now: dict[str, float] = {}
    kinds: dict[str, float] = {}
    then: dict[str, float] = {}
    total, at = 0.0, None
    for op, change in changes(program, sizes, row):
        for kind, amount in change.takes:
            now[kind] = now.get(kind, 0.0) + amount
            kinds[kind] = max(kinds.get(kind, 0.0), now[kind])
        if sum(now.values()) > total:
            total, at, then = sum(now.values()), op, dict(now)
        for kind, amount in change.gives:
            now[kind] -= amount
            kinds[kind] = max(kinds[kind], now[kind])
    return Peak(total, at, kinds, then)
