"""Memory of each rank, by kind, over its list of operations.

Memory depends only on the order of the list, not on durations. `check` takes the peaks
from here, and `simulate` places the same changes on its time axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add, gt

from . import ops, state
from .program import Op, Program
from .state import Changes, State


@dataclass(frozen=True)
class Sizes:
    """Bytes (or counts) by piece: each field has one number for each piece.

    `kept`: what the forward keeps for the backward, its input included. `kept_after_i`:
    the part of that which the weight gradient still needs. `input`: what a recomputed
    piece keeps instead. `selected`: what a partly recomputed piece keeps, its input
    included.

    `home`: the weights that a rank always holds. `gathered`: the whole weights, if they
    are not at home. `gradient_shard`: what remains of a gradient after its sum; if left
    out, sums are in place and the whole gradient stays until the update.
    `gradient_home`: a gradient buffer that exists from the start. `matrices`: what a
    unit sends to the owners of its matrices and back, and the results.

    `slot`: the most that the CUDA graphs of a piece hold for each microbatch in flight,
    for the whole run. Such pieces have no `kept` and no `temporary`, and their backwards
    share `graph_temporary`.

    `edge`: a piece's output, which a message takes to the next stage; its gradient is
    as large. `sends_stay`: the group keeps a copy of what was sent until the step ends,
    as gloo's does; otherwise it is freed when received. `derived`: what a rank computes
    from a microbatch for all its pieces, from the first forward to the last backward.
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
    derived: tuple[float, ...] = ()
    sends_stay: bool = False
    slot: tuple[float, ...] = ()
    graph_temporary: float = 0.0

    def in_graphs(self, pieces: Collection[int], *, shapes: int = 1) -> Sizes:
        """The sizes where the forwards and backwards of these pieces are CUDA graphs.

        Microbatches have `shapes` different shapes, each with slots of its own.
        """

        def slot(piece: int) -> float:
            # Input and output, their gradients, and the entries of the batch.
            copies = 4 * _of(self.edge, piece) + _of(self.derived, piece)
            # A forward's graph has its temporary memory to itself.
            own = _of(self.kept, piece) + _of(self.temporary, piece)
            return shapes * (own + copies)

        def others(each: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                0.0 if piece in pieces else size
                for piece, size in enumerate(each)
            )

        every = range(len(self.kept))
        shared = (_of(self.temporary, piece) for piece in pieces)
        return replace(
            self,
            slot=tuple(slot(n) if n in pieces else 0.0 for n in every),
            graph_temporary=max(shared, default=0.0),
            kept=others(self.kept),
            temporary=others(self.temporary),
        )

    @classmethod
    def counts(cls, pieces: int) -> Sizes:
        """Sizes that count held pieces, kept inputs, gathered units, gradients."""
        one, none = (1.0,) * pieces, (0.0,) * pieces
        return cls(
            one,
            one,
            gathered=one,
            gradient=one,
            gradient_shard=none,
            selected=one,
        )


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds, in total and of each kind."""

    total: float
    at: Op | None
    kinds: dict[str, float]  # each kind's own peak
    then: dict[str, float]  # each kind at the time of the total peak


def _of(sizes: tuple[float, ...], piece: int) -> float:
    return sizes[piece] if 0 <= piece < len(sizes) else 0.0


def _table(s: Sizes) -> dict[str, tuple[str, tuple[float, ...]]]:
    """The kind of memory of each buffer that `State` reports, and its size by piece."""
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


def follow(program: Program, sizes: Sizes, row: int) -> State:
    """Walk a row to its end. The sizes matter only in whether gradients have shards."""
    return State(program, row, in_place=not sizes.gradient_shard).follow()


def _on_row(program: Program, sizes: Sizes, row: int) -> Sizes:
    """The sizes for one row; its first piece's activations include what is `derived`.

    That piece's forward is a microbatch's first on the row and its backward the last,
    so what it keeps is held for as long.
    """
    pieces = [piece for piece, host in program.host.items() if host == row]
    amount = max((_of(sizes.derived, piece) for piece in pieces), default=0.0)
    if not amount:
        return sizes
    first, count = min(pieces), program.pieces

    def more(each: tuple[float, ...], times: int = 1) -> tuple[float, ...]:
        return tuple(
            _of(each, n) + amount * times * (n == first) for n in range(count)
        )

    if any(op.kind == ops.OFFLOAD for op in program.rows[row]):
        # It is not offloaded. At most all microbatches have it.
        return replace(
            sizes, home=more(sizes.home, program.microbatches), derived=()
        )
    # Weight gradients, which may be computed later, do not need it.
    factors = tuple(
        _of(sizes.kept_after_i or sizes.kept, n) for n in range(count)
    )
    return replace(
        sizes,
        kept=more(sizes.kept),
        input=more(sizes.input),
        kept_after_i=factors,
        selected=more(sizes.selected),
        derived=(),
    )


Bytes = list[tuple[str, float]]  # by kind


def _sized(sizes: Sizes, bundles: Sequence[Changes]) -> list[Bytes]:
    # Few different bundles of changes occur in a list, so each is sized once.
    table = _table(sizes)
    rows = ([(*table[c.what], c) for c in changes] for changes in bundles)
    return [
        [(kind, c.sign * _of(size, c.piece)) for kind, size, c in row]
        for row in rows
    ]


def changes(
    program: Program, sizes: Sizes, row: int
) -> Iterator[tuple[Op | None, Bytes, Bytes]]:
    """Yield the bytes that each operation takes at its start and frees at its end.

    The first entry, with the operation None, holds the bytes that are always there.
    """
    sizes = _on_row(program, sizes, row)
    yield None, [*_always(program, sizes, row).items()], []
    walked = follow(program, sizes, row)
    takes = _sized(sizes, walked.bundles)
    gives = [[(kind, -amount) for kind, amount in each] for each in takes]
    # `flow` alternates: the bundle at an operation's start, then the one at its end.
    for op, start, end in zip(
        walked.ops, walked.flow[::2], walked.flow[1::2], strict=True
    ):
        yield op, takes[start], gives[end]


def _always(program: Program, sizes: Sizes, row: int) -> dict[str, float]:
    forwards = (op for op in program.rows[row] if op.kind == ops.FORWARD)
    # A tied unit lives on each stage that uses it.
    units = {
        u
        for piece in {op.piece for op in forwards}
        for u in program.units(piece)
    }
    always = {"weights": sizes.home, "optimizer": sizes.optimizer}
    if sizes.gradient_home:
        always["gradients"] = sizes.gradient_home
    found = {
        kind: sum(_of(size, u) for u in sorted(units))
        for kind, size in always.items()
    }
    if sizes.slot:
        found["activations"] = _of_slots(program, sizes, row)
        found["temporary"] = sizes.graph_temporary
    return found


def _of_slots(program: Program, sizes: Sizes, row: int) -> float:
    """The bytes of all slots: of each piece, its most microbatches in flight."""
    now, most = Counter[int](), Counter[int]()
    for op in program.rows[row]:
        if op.kind == ops.FORWARD:
            now[op.piece] += 1
            most[op.piece] = max(most[op.piece], now[op.piece])
        elif op.kind == ops.BACKWARD:
            now[op.piece] -= 1
    return sum(_of(sizes.slot, n) * count for n, count in most.items())


def peaks(
    program: Program, sizes: Sizes, walked: Sequence[State] = ()
) -> tuple[Peak, ...]:
    """The most that each row's ranks hold if operations run in the order of the list.

    `walked` are the rows' final states, if they have been computed.
    """
    rows = range(len(program.rows))
    each = walked or [follow(program, sizes, row) for row in rows]
    return tuple(
        _peak(program, _on_row(program, sizes, row), row, each[row])
        for row in rows
    )


def fullest(
    program: Program, sizes: Sizes, walked: Sequence[State]
) -> list[dict[str, float]]:
    """The bytes that each row's ranks hold at their peak, by kind."""
    held = []
    for row, each in enumerate(walked):
        own = _on_row(program, sizes, row)
        held.append(_highest(_always(program, own, row), own, each)[2])
    return held


def _highest(
    always: Mapping[str, float], sizes: Sizes, walked: State
) -> tuple[float, int, dict[str, float]]:
    """The peak, the operation then started (-1: none), and each kind at that time."""
    table = _table(sizes)
    flow = walked.flow
    net = [
        sum(amount for _, amount in each)
        for each in _sized(sizes, walked.bundles)
    ]
    # Memory after each start and end of an operation, in the order of the list.
    held = _running(sum(always.values()), net, flow)
    # Starts have odd indices: memory is highest after something is taken.
    begun = held[1::2]
    at = 1 + 2 * begun.index(max(begun)) if begun else 0
    if held[at] <= held[0]:
        return held[0], -1, dict(always)
    # Buffers that are taken and not yet given back.
    there: Counter[tuple[str, int]] = Counter()
    for number, times in Counter(flow[:at]).items():
        for what, piece, sign in walked.bundles[number]:
            there[what, piece] += times * sign
    then = dict(always)
    for (what, piece), count in there.items():
        kind, size = table[what]
        then[kind] = then.get(kind, 0.0) + count * _of(size, piece)
    return held[at], at // 2, then


def _peak(program: Program, sizes: Sizes, row: int, walked: State) -> Peak:
    always = _always(program, sizes, row)
    total, at, then = _highest(always, sizes, walked)
    kinds = dict(always)
    amounts = _sized(sizes, walked.bundles)
    # Kinds peak at different times, so each is followed on its own.
    for kind in {kind: None for each in amounts for kind, _ in each}:
        own = [[a for k, a in each if k == kind] for each in amounts]
        net = [sum(each) for each in own]
        start = always.get(kind, 0.0)
        now = _running(start, net, walked.flow)
        kinds[kind] = max(now)
        # A bundle may take before it gives back.
        most = [max(accumulate(each), default=0.0) for each in own]
        if any(map(gt, most, (max(0.0, each) for each in net))):
            peaks = map(most.__getitem__, walked.flow)
            kinds[kind] = max(kinds[kind], *map(add, now, peaks))
    return Peak(total, walked.ops[at] if at >= 0 else None, kinds, then)


def _running(
    first: float, amounts: Sequence[float], flow: Sequence[int]
) -> list[float]:
    """The amounts held before the first bundle and after each."""
    return list(accumulate(map(amounts.__getitem__, flow), initial=first))
