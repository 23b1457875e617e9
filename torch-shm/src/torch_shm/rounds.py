"""Each collective as a sequence of rounds: write to one's own buffer, yield, read what
others wrote.

A round ends when all ranks have reached its `yield`. Calls that fit into a chunk take
one round (a large all-reduce two). Longer ones proceed chunk by chunk, which also keeps
the data in the caches.

If all tensors are in shared memory already, the other ranks read them in place and
nothing is copied. Data that is only moved is read directly from the other process,
where that is allowed (see `direct.py`). Either way needs one more round at the end, as
the tensor may not change before all have read it. A rank that promised not to change
its tensor in shared memory yields True there and does not wait.

Reductions run in rank order, bit-equal to those of `settle.py`.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arena import NOWHERE
from .calls import Call
from .settle import reduce_into

if TYPE_CHECKING:
    from .lines import Collectives

# Up to this size every rank reduces everything: reading it all is cheaper than a second
# round.
SMALL = 1 << 15


def _places(
    t: "Collectives", x: Tensor, sources: Iterable[int]
) -> Generator[bool, None, dict[int, int] | None]:
    """Return the places of the sources' tensors, once all ranks have arrived.

    Returns None if `x` fits into a chunk, without taking a round, or if one of them
    cannot be read in place.
    """
    # What fits into a chunk is copied: that takes one round, this would take two.
    if x.numel() * x.itemsize <= t.chunk:
        return None
    yield False
    places = {i: t.place(i) for i in sources}
    return None if NOWHERE in places.values() else places


def _shared(
    t: "Collectives", x: Tensor
) -> Generator[bool, None, list[Tensor] | None]:
    """Return all ranks' tensors, if `_places` finds all of them in shared memory."""
    places = yield from _places(t, x, range(t.size))
    # A negative place is in another process: to be copied, not reduced in place.
    if places is None or min(places.values()) < 0:
        return None
    return [t.arena.at(place, x.numel(), x.dtype) for place in places.values()]


def _all_reduce(t: "Collectives", call: Call) -> Iterator[bool]:
    x = call.x.view(-1)
    # Small: write all of x, one round, and every rank reduces everything.
    if x.numel() * x.itemsize <= SMALL:
        t.mine(0, x.numel(), x.dtype).copy_(x)
        yield False
        reduce_into(
            x,
            [t.theirs(i, 0, x.numel(), x.dtype) for i in range(t.size)],
            call.op,
        )
        return
    # In place, if x of all ranks is in shared memory; otherwise chunk by chunk.
    xs = yield from _shared(t, x)
    if xs is None:
        yield from _reduce_chunks(t, x, call.op)
    else:
        _reduce_in_place(xs, t.rank, call.op)
        # Every rank writes its part to all tensors, so wait for all.
        yield False


def _reduce_in_place(xs: list[Tensor], me: int, op: str) -> None:
    """Reduce this rank's part of all tensors, and write the result to all of them."""
    parts = [_cut(x, len(xs))[me] for x in xs]
    # Runs of 65,536 elements of this rank's part, from all tensors at once.
    for pieces in zip(*(_runs(part, 1 << 16) for part in parts), strict=True):
        total = torch.empty_like(pieces[0])
        reduce_into(total, list(pieces), op)
        for piece in pieces:
            piece.copy_(total)


def _reduce_chunks(t: "Collectives", x: Tensor, op: str) -> Iterator[bool]:
    """Reduce a part of each chunk on every rank; results are passed on with the next
    chunk."""
    me, dtype, byte = t.rank, x.dtype, x.itemsize
    chunks = [_cut(chunk, t.size) for chunk in _runs(x, t.chunk // byte)]
    # starts[k][i]: the first element of rank i's part in chunk k.
    starts = [[_start(parts, i) for i in range(t.size)] for parts in chunks]
    # Round k brings the parts of chunk k and the results of chunk k - 1.
    for k in range(len(chunks) + 1):
        now = k < len(chunks)
        if now:
            # To every other rank its part of this rank's chunk.
            for i in t.others:
                t.mine(starts[k][i] * byte, chunks[k][i].numel(), dtype).copy_(
                    chunks[k][i]
                )
        yield False
        if now:
            own = chunks[k][me]
            at, n = starts[k][me] * byte, own.numel()
            # Written where the others read it in the next round, then to x.
            total = t.mine(t.chunk, n, dtype)
            came = [
                own if i == me else t.theirs(i, at, n, dtype)
                for i in range(t.size)
            ]
            reduce_into(total, came, op)
            own.copy_(total)
        # The other ranks' results of the chunk before.
        if k:
            for i in t.others:
                part = chunks[k - 1][i]
                part.copy_(t.theirs(i, t.chunk, part.numel(), dtype))


def _reduce_scatter(t: "Collectives", call: Call) -> Iterator[bool]:
    assert call.out is not None
    me, out, dtype, byte = (
        t.rank,
        call.out.view(-1),
        call.x.dtype,
        call.x.itemsize,
    )
    # rows: (size, n); row i is reduced on rank i
    rows = call.x.view(t.size, out.numel())
    xs = yield from _shared(t, call.x)
    if xs is not None:
        parts = [_runs(x.view(rows.shape)[me], 1 << 16) for x in xs]
        for total, *pieces in zip(_runs(out, 1 << 16), *parts, strict=True):
            reduce_into(total, pieces, call.op)
        yield False
        return
    # In each round a run of `width` elements of every row.
    width = max(1, t.chunk // byte // t.size)
    for own, total, *others in zip(
        _runs(rows[me], width),
        _runs(out, width),
        *(_runs(row, width) for row in rows),
        strict=True,
    ):
        n = own.numel()
        for i in t.others:
            t.mine(i * width * byte, n, dtype).copy_(others[i])
        yield False
        at = me * width * byte
        reduce_into(
            total,
            [
                own if i == me else t.theirs(i, at, n, dtype)
                for i in range(t.size)
            ],
            call.op,
        )


def _reduce(t: "Collectives", call: Call) -> Iterator[bool]:
    x = call.x.view(-1)
    for part in _runs(x, t.chunk // x.itemsize):
        n = part.numel()
        # The others only write; the root reduces in rank order.
        if t.rank != call.at:
            t.mine(0, n, x.dtype).copy_(part)
        yield False
        if t.rank == call.at:
            parts = [
                part if i == t.rank else t.theirs(i, 0, n, x.dtype)
                for i in range(t.size)
            ]
            reduce_into(part, parts, call.op)


def _broadcast(t: "Collectives", call: Call) -> Iterator[bool]:
    x = call.x.view(-1)
    yield from _collect(
        t, x, [call.at], {} if t.rank == call.at else {call.at: x}
    )


def _all_gather(t: "Collectives", call: Call) -> Iterator[bool]:
    assert call.out is not None
    rows = dict(enumerate(call.out.view(t.size, call.x.numel())))
    yield from _collect(t, call.x.view(-1), range(t.size), rows, call.still)


def _gather(t: "Collectives", call: Call) -> Iterator[bool]:
    rows = {i: part.view(-1) for i, part in enumerate(call.parts or ())}
    yield from _collect(t, call.x.view(-1), range(t.size), rows)


def _collect(
    t: "Collectives",
    x: Tensor,
    sources: Sequence[int],
    rows: dict[int, Tensor],
    still: bool = False,
) -> Iterator[bool]:
    """Show the sources' x to all ranks; those with `rows`, by source, fill them."""
    own = rows.get(t.rank, x)
    if own.data_ptr() != x.data_ptr():
        # x may be another part of the filled tensor, whose chunks are read after some
        # are filled.
        x = x.clone() if any(overlap(x, row) for row in rows.values()) else x
        own.copy_(x)
    others = [i for i in t.others if i in rows]
    places = yield from _places(t, x, sources)
    # Large: read from the sources directly, in shared memory or in their process.
    if places is not None:
        for i in others:
            t.fetch(i, places[i], rows[i])
        yield still and min(places.values()) >= 0
        return
    width = t.chunk // x.itemsize
    for k, part in enumerate(_runs(x, width)):
        n = part.numel()
        if t.rank in sources:
            t.mine(0, n, x.dtype).copy_(part)
        yield False
        for i in others:
            rows[i][k * width : k * width + n].copy_(
                t.theirs(i, 0, n, x.dtype)
            )


def _scatter(t: "Collectives", call: Call) -> Iterator[bool]:
    x, root = call.x.view(-1), call.at
    byte = x.itemsize
    width = max(1, t.chunk // byte // t.size)
    sources = [part.view(-1) for part in call.parts or ()]
    for k, part in enumerate(_runs(x, width)):
        n = part.numel()
        # Only the root has parts; the others write nothing.
        for i, source in enumerate(sources):
            t.mine(i * width * byte, n, x.dtype).copy_(
                source[k * width : k * width + n]
            )
        yield False
        part.copy_(t.theirs(root, t.rank * width * byte, n, x.dtype))


def _all_to_all(t: "Collectives", call: Call) -> Iterator[bool]:
    """Exchange slices of x: in each round every rank writes a run for each receiver."""
    assert call.out is not None
    x, out, dtype, byte = (
        call.x.view(-1),
        call.out.view(-1),
        call.x.dtype,
        call.x.itemsize,
    )
    # Elements of a row, also where this rank sends none.
    row = call.x[0].numel() if call.x.shape[0] else call.out[:1].numel()
    stretches = torch.split(x, [n * row for n in call.in_splits])
    taken = torch.split(out, [n * row for n in call.out_splits])
    width = max(1, t.chunk // byte // t.size)
    longest = width  # until the first round has shown the sizes of the others
    k = 0
    while k * width < longest:
        for i in t.others:
            part = stretches[i][k * width : (k + 1) * width]
            t.mine(i * width * byte, part.numel(), dtype).copy_(part)
        yield False
        # The first round also brings all splits, and with them the longest slice.
        if not k:
            taken[t.rank].copy_(stretches[t.rank])
            sent = [t.splits(i)[: t.size] for i in range(t.size)]
            apart = (
                n
                for i, to in enumerate(sent)
                for j, n in enumerate(to)
                if i != j
            )
            longest = row * max(apart, default=0)
            places = [t.place(i) for i in range(t.size)]
            if longest > width and NOWHERE not in places:
                for i in t.others:
                    t.fetch(
                        i,
                        places[i],
                        taken[i],
                        # In rank i's x, this slice lies behind those for lower ranks.
                        skip=row * byte * sum(sent[i][: t.rank]),
                    )
                yield False
                return
        for i in t.others:
            into = taken[i][k * width : (k + 1) * width]
            into.copy_(t.theirs(i, t.rank * width * byte, into.numel(), dtype))
        k += 1


def _barrier(t: "Collectives", call: Call) -> Iterator[bool]:
    yield False


def _runs(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Split into runs of at most `width` elements; an empty x gives one empty run."""
    return torch.split(x, width)


def _cut(x: Tensor, n: int) -> list[Tensor]:
    """Split into n parts, the first ones longer; into whole cache lines if x is
    long."""
    width = -(-x.numel() // n)
    # 64 elements fill whole cache lines, which two ranks should not share.
    width = -(-width // 64) * 64 if x.numel() >= 64 * n else width
    return [x[min(i * width, x.numel()) : (i + 1) * width] for i in range(n)]


def _start(parts: list[Tensor], i: int) -> int:
    return sum(part.numel() for part in parts[:i])


def overlap(x: Tensor, y: Tensor) -> bool:
    """True if two contiguous tensors share memory."""
    a, b = x.data_ptr(), y.data_ptr()
    return a < b + y.numel() * y.itemsize and b < a + x.numel() * x.itemsize


def readable(call: Call, me: int) -> bool:
    """True if the others may read `x` in place while this rank fills `out`."""
    x, out = call.x, call.out
    if out is None or not overlap(x, out):
        return True
    if call.kind == "all_to_all":
        return False
    # An in-place call is fine: only this rank needs that part of `out`, or of `x`.
    if call.kind == "all_gather":
        return x.data_ptr() == out.data_ptr() + me * x.numel() * x.itemsize
    return out.data_ptr() == x.data_ptr() + me * out.numel() * x.itemsize


# the rounds of each kind of call
ROUNDS: dict[str, Callable[["Collectives", Call], Iterator[bool]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "split": _barrier,
}
