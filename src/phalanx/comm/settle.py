"""What each collective means, given the calls of all members at once.

The groups that have everyone's tensors in one process (alone, threads) settle their calls here, and
it is the definition the other transports are tested against. Reductions go in rank order, halves
through float32 with one rounding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx.comm.base import HALVES, Call

# Two tensors into one, a NaN handed on; most libraries' max and min drop it.
STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "average": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_into(total: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """`total` becomes the parts reduced in their order, the way one process would. It may be one of
    them; halves are reduced in float32 and rounded once."""
    if not total.numel():
        return
    first, *others = (part.to(total.device).view_as(total) for part in parts)
    aside = any(part.data_ptr() == total.data_ptr() for part in others[1:])
    if total.dtype in HALVES or aside:
        dtype = torch.float32 if total.dtype in HALVES else total.dtype
        wide = first.to(dtype, copy=True)
        reduce_into(wide, [wide, *(part.to(wide.dtype) for part in others)], op)
        total.copy_(wide)
        return
    step = STEPS[op]
    for part in others:
        step(first, part, out=total)
        first = total
    if not others and first.data_ptr() != total.data_ptr():
        total.copy_(first)
    if op == "average":
        total /= len(parts)


@torch.no_grad()
def settle(calls: Sequence[Call]) -> None:
    """Carry out one collective: `calls[i]` is place i's, all of one kind."""
    _MEANING[calls[0].kind](calls)


def _all_reduce(calls: Sequence[Call]) -> None:
    if len(calls) == 1:
        return
    total = calls[0].x
    reduce_into(total, [call.x for call in calls], calls[0].op)
    for call in calls[1:]:
        call.x.copy_(total.view_as(call.x))


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].at]
    reduce_into(root.x, [call.x for call in calls], root.op)


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[calls[0].at]
    for call in calls:
        if call is not root:
            call.x.copy_(root.x.view_as(call.x))


def _all_gather(calls: Sequence[Call]) -> None:
    # Everyone's x is read before any out is written to, since x may be a part of out.
    for i, source in enumerate(calls):
        for call in calls:
            assert call.out is not None
            part = _rows(call.out, len(calls))[i]
            if part.data_ptr() != source.x.data_ptr():
                part.copy_(source.x.flatten())


def _reduce_scatter(calls: Sequence[Call]) -> None:
    n = len(calls)
    rows = [_rows(call.x, n) for call in calls]
    totals = [torch.empty_like(rows[0][0]) for _ in calls]  # out may be a part of somebody's x
    for i, total in enumerate(totals):
        reduce_into(total, [mine[i] for mine in rows], calls[0].op)
    for call, total in zip(calls, totals, strict=True):
        assert call.out is not None
        call.out.copy_(total.view_as(call.out))


def _all_to_all(calls: Sequence[Call]) -> None:
    parts = [torch.split(call.x, list(call.in_splits)) for call in calls]
    for j, call in enumerate(calls):
        assert call.out is not None
        rooms = torch.split(call.out, list(call.out_splits))
        for room, sent in zip(rooms, parts, strict=True):
            room.copy_(sent[j])


def _gather(calls: Sequence[Call]) -> None:
    outs = calls[calls[0].at].parts
    assert outs is not None
    for out, call in zip(outs, calls, strict=True):
        out.copy_(call.x.view_as(out))


def _scatter(calls: Sequence[Call]) -> None:
    xs = calls[calls[0].at].parts
    assert xs is not None
    for x, call in zip(xs, calls, strict=True):
        call.x.copy_(x.view_as(call.x))


def _send(calls: Sequence[Call]) -> None:
    sent, received = calls
    received.x.copy_(sent.x.view_as(received.x))


def _barrier(calls: Sequence[Call]) -> None:
    """Having come is all there is to it."""


def _rows(x: Tensor, n: int) -> Tensor:
    # Written out, since view(n, -1) is ambiguous for an empty tensor.
    return x.view(n, x.numel() // n)


_MEANING = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "barrier": _barrier,
    "split": _barrier,
}
