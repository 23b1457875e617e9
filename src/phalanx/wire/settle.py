"""What each collective means, given the calls of all members at once.

The wires that have everyone's tensors in one process (alone, threads) settle their calls here, and
it is the definition the other transports are tested against. Reductions go in rank order, halves
through float32 with one rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.wire.base import HALVES, Call


def reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    """A new tensor: the parts reduced in their order, the way one process would."""
    first = parts[0]
    total = first.to(torch.float32) if first.dtype in HALVES else first.clone()
    for part in parts[1:]:
        part = part.to(total.device)
        if op in ("sum", "average"):
            total += part
        elif op == "product":
            total *= part
        else:
            # maximum and minimum hand a NaN on; most libraries' reductions drop it.
            (torch.maximum if op == "max" else torch.minimum)(total, part.to(total), out=total)
    if op == "average":
        total /= len(parts)
    return total.to(first.dtype)


@torch.no_grad()
def settle(calls: Sequence[Call]) -> None:
    """Carry out one collective: `calls[i]` is place i's, all of one kind."""
    _MEANING[calls[0].kind](calls)


def _all_reduce(calls: Sequence[Call]) -> None:
    if len(calls) == 1:
        return
    total = reduced([call.x for call in calls], calls[0].op)
    for call in calls:
        call.x.copy_(total.view_as(call.x))


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].at]
    root.x.copy_(reduced([call.x.view_as(root.x) for call in calls], root.op))


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
    totals = [reduced([call.x.view(n, -1)[i] for call in calls], calls[0].op) for i in range(n)]
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
