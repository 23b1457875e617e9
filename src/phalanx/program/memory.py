"""What each rank holds while it works through its list, by kind.

Memory depends on the order of the list alone, not on how long anything takes: `check` takes the
peaks from here, `simulate` lays the same steps over its times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .program import Op, Program

__all__ = ["Change", "Peak", "Sizes", "changes", "peaks"]


@dataclass(frozen=True)
class Sizes:
    """Bytes (or counts) by piece, each a tuple with one number a piece; units count as their piece.

    `kept`: what the forward keeps for the backward, its input among it. `kept_after_i`: what of
    that the weight gradient still needs. `input`: what a recomputed piece keeps instead. `home`:
    the weights that a rank always holds; `gathered`: the whole weights when they are not at home.
    `gradient_shard`: what is left of a gradient once it is summed; left out, sums are in place and
    the whole gradient stays until the update. `edge`: what a piece puts out, which a message takes
    to the next stage; its gradient is as large. `sends_stay`: the wire keeps a copy of what was
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
    optimizer: tuple[float, ...] = ()
    edge: tuple[float, ...] = ()
    sends_stay: bool = False

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
        self.full: set[int] = set()  # units with a whole gradient that S has not yet taken up
        self.sums: list[int] = []  # units whose gradients are on their way to being summed
        self.part: set[int] = set()  # units with a summed gradient that U has not yet used
        self.late: set[int] = set()  # units whose U waits for their sum

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
            return Change((*self._came(op), *self._keeps(op), *working), working)
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
            came = self._came(op)
            return Change((*came, *working), (("activations", kept - rest), *working))
        if op.kind in "BW":
            left = kept if op.kind == "B" or not s.kept_after_i else _of(s.kept_after_i, piece)
            takes = (*self._came(op), *self._contribute(piece), *working)
            return Change(takes, (("activations", left), *working))
        if op.of:
            return Change(self._message(op))
        return self._on_unit(op)

    def _message(self, op: Op) -> tuple[tuple[str, float], ...]:
        if op.kind == ">" and not self.sizes.sends_stay:
            return ()
        # Between pieces p and p + 1 passes what p puts out, or the gradient of that.
        return (("messages", _of(self.sizes.edge, min(op.piece, op.peer))),)

    def _came(self, op: Op) -> tuple[tuple[str, float], ...]:
        """What was received is from here on the operation's own: it changes its name."""
        peer = op.piece + (-1 if op.kind == "F" else 1)
        if Op("<", op.piece, op.index, op.kind, peer) not in self.at:
            return ()
        return (("messages", -_of(self.sizes.edge, min(op.piece, peer))),)

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
        if op.kind in "SAT":
            return Change(self._sum(op))
        if op.kind == "U":
            return Change((), self._update(unit))
        return Change()

    def _sum(self, op: Op) -> tuple[tuple[str, float], ...]:
        """A sum holds the whole gradient until it has arrived, and two may be on their way. The
        agreement waits for all, a tied weight for its own."""
        unit, found = op.piece, []
        if op.kind == "S":
            while len(self.sums) >= 2 or unit in self.sums:
                found += self._arrived(self.sums.pop(0))
            self.full.discard(unit)
            self.sums.append(unit)
            found.append(_of(self.sizes.gradient_shard, unit))
        else:
            mine = [u for u in self.sums if op.kind == "A" or u == unit]
            self.sums = [u for u in self.sums if u not in mine]
            for each in mine:
                found += self._arrived(each)
        return tuple(("gradients", amount) for amount in found)

    def _arrived(self, unit: int) -> list[float]:
        """The whole gradient goes; what is left of it is new, or is added to what there is."""
        whole, shard = _of(self.sizes.gradient, unit), _of(self.sizes.gradient_shard, unit)
        if self.sizes.gradient_shard:
            freed = [-whole] + [-shard] * (unit in self.part)
        else:
            freed = [-whole] * (unit in self.part)
        self.part.add(unit)
        if unit in self.late:
            self.late.discard(unit)
            freed += [-amount for _, amount in self._update(unit)]
        return freed

    def _update(self, unit: int) -> tuple[tuple[str, float], ...]:
        if unit in self.sums:
            self.late.add(unit)
            return ()
        left = self.sizes.gradient_shard or self.sizes.gradient
        held = [_of(self.sizes.gradient, unit)] * (unit in self.full)
        held += [_of(left, unit)] * (unit in self.part)
        self.full.discard(unit)
        self.part.discard(unit)
        return tuple(("gradients", amount) for amount in held)

    def end(self) -> Change:
        """What is still on its way when the list ends is waited for."""
        found: list[float] = []
        while self.sums:
            found += self._arrived(self.sums.pop(0))
        return Change((), tuple(("gradients", -amount) for amount in found))


def changes(program: Program, sizes: Sizes, row: int) -> Iterator[tuple[Op | None, Change]]:
    """What each operation of a row takes and gives back; first, under None, what is always there."""
    walk = _Row(program, row, sizes)
    yield None, Change(tuple(walk.base().items()))
    for op in walk.ops[:-1]:
        yield op, walk.change(op)
    for op in walk.ops[-1:]:
        change, end = walk.change(op), walk.end()
        yield op, Change(change.takes, (*change.gives, *end.gives))


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
