"""The result of each collective, computed from the calls of all members at once.

Groups that have all tensors in one process execute their calls here, and the other
transports are tested against this definition. Reductions run in rank order; 16-bit
values are reduced in float32 and rounded once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .calls import Call

HALVES = (torch.bfloat16, torch.float16)

# Reductions of two tensors that propagate NaN; max and min of most libraries drop it.
STEPS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "average": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_into(total: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Reduce the parts in order into `total`, as one process would.

    `total` may be one of the parts. 16-bit values are reduced in float32 and rounded
    once.
    """
    if not total.numel():
        return
    first, *others = (part.to(total.device).view_as(total) for part in parts)
    # A later part that lies in `total` would be overwritten before its turn.
    aside = any(part.data_ptr() == total.data_ptr() for part in others[1:])
    # In float32 from the first part to the last, and one rounding at the end.
    if total.dtype in HALVES or aside:
        dtype = torch.float32 if total.dtype in HALVES else total.dtype
        wide = first.to(dtype, copy=True)
        reduce_into(
            wide, [wide, *(part.to(wide.dtype) for part in others)], op
        )
        total.copy_(wide)
        return
    step = STEPS[op]
    # total = first op second, then total = total op third, and so on
    for part in others:
        step(first, part, out=total)
        first = total
    # A single part: there was no step that wrote to total.
    if not others and first.data_ptr() != total.data_ptr():
        total.copy_(first)
    if op == "average":
        total /= len(parts)


@torch.no_grad()
def settle(calls: Sequence[Call]) -> None:
    """Execute one collective: `calls[i]` is the call of the group's rank i, all of one
    kind."""
    first, n = calls[0], len(calls)
    xs = [call.x for call in calls]
    outs = [call.out for call in calls if call.out is not None]
    root = calls[first.at] if 0 <= first.at < n else first
    match first.kind:
        # The first rank's tensor takes the result; the others get copies of it.
        case "all_reduce" if n > 1:
            reduce_into(xs[0], xs, first.op)
            for x in xs[1:]:
                x.copy_(xs[0].view_as(x))
        case "reduce":
            reduce_into(root.x, xs, first.op)
        case "broadcast":
            for x in xs:
                if x is not root.x:
                    x.copy_(root.x.view_as(x))
        # out: (n, numel of x), and row i is rank i's x
        case "all_gather":
            for i, x in enumerate(xs):
                for out in outs:
                    part = _rows(out, n)[i]
                    if (
                        part.data_ptr() != x.data_ptr()
                    ):  # x may be a part of out
                        part.copy_(x.flatten())
        case "reduce_scatter":
            # rows[r][i] is the part of rank r's x that goes to rank i.
            rows = [_rows(x, n) for x in xs]
            # out may be a part of some x
            totals = [torch.empty_like(rows[0][0]) for _ in xs]
            for i, total in enumerate(totals):
                reduce_into(total, [row[i] for row in rows], first.op)
            for out, total in zip(outs, totals, strict=True):
                out.copy_(total.view_as(out))
        case "all_to_all":
            parts = [
                torch.split(call.x, list(call.in_splits)) for call in calls
            ]
            for j, out in enumerate(outs):
                # taken[i] is where rank j puts the rows from rank i.
                taken = torch.split(out, list(calls[j].out_splits))
                for into, sent in zip(taken, parts, strict=True):
                    into.copy_(sent[j])
        case "gather":
            for part, x in zip(root.parts or (), xs, strict=True):
                part.copy_(x.view_as(part))
        case "scatter":
            for x, part in zip(xs, root.parts or (), strict=True):
                x.copy_(part.view_as(x))
        # calls[0] is the sender's, calls[1] the receiver's.
        case "send":
            xs[1].copy_(xs[0].view_as(xs[1]))


def _rows(x: Tensor, n: int) -> Tensor:
    # Written out, since view(n, -1) is ambiguous for an empty tensor.
    return x.view(n, x.numel() // n)
