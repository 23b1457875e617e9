"""Regions: conjugate pairs of collectives, one forward and one for the gradient.

    copy        identity                  <->  reduce       all-reduce
    gather      all-gather along dim      <->  take         this rank's slice along dim
    gather_sum  all-gather along dim      <->  scatter_sum  reduce-scatter along dim
    exchange    all-to-all: split one dim, join another  <->  exchange, the dims swapped

Each is the other's backward. `copy`, `gather` and `take` expect that all ranks do the
same work with the whole value, so that its gradient is the same on all of them.
`gather_sum` is for ranks that do different work with it. On a group of one rank every
region is the identity and costs nothing.

In eager mode a region calls its group directly, and backward uses that same group from
whichever thread it runs in. In compiled code the region is one opaque op that finds the
group by its name.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.base import CommMisuse, Group, group_named


def copy(x: Tensor, group: Group) -> Tensor:
    """Return `x`, with its gradient summed over the group: a column region's input."""
    return _region("copy", x, group)


def reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group; the gradient passes unchanged: a row region's output."""
    return _region("reduce", x, group)


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Join every rank's `x` along `dim` for equal use; the gradient is sliced."""
    return _region("gather", x, group, dim)


def take(x: Tensor, group: Group, dim: int) -> Tensor:
    """Take this rank's slice of an `x` that all ranks hold; the gradient is gathered."""
    return _region("take", x, group, dim)


def gather_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """Join every rank's `x` along `dim`; the gradient is summed and sliced."""
    return _region("gather_sum", x, group, dim)


def scatter_sum(x: Tensor, group: Group, dim: int) -> Tensor:
    """Take this rank's slice of the sum of every rank's `x`; the gradient is gathered."""
    return _region("scatter_sum", x, group, dim)


def exchange(x: Tensor, group: Group, split_dim: int, join_dim: int) -> Tensor:
    """Send slice j of `x` along one dim to rank j; join received ones along another."""
    return _region("exchange", x, group, split_dim, join_dim)


_PAIRS = (
    ("copy", "reduce"),
    ("gather", "take"),
    ("gather_sum", "scatter_sum"),
)
_CONJUGATE = {
    "exchange": "exchange",
    **dict(_PAIRS),
    **{back: kind for kind, back in _PAIRS},
}
_GROWS = ("gather", "gather_sum")
_SHRINKS = ("take", "scatter_sum")


_local = threading.local()


@contextmanager
def opaque() -> Iterator[None]:
    """A context in which each region is a single op on this thread, in eager mode too.

    Selective recomputation needs it, which looks at every operation and must not see
    those inside a group.
    """
    _local.opaque = True
    try:
        yield
    finally:
        _local.opaque = False


def is_opaque() -> bool:
    return torch.compiler.is_compiling() or getattr(_local, "opaque", False)


def _region(
    kind: str, x: Tensor, group: Group, dim: int = 0, join: int = 0
) -> Tensor:
    if group.size == 1:
        return x
    if kind not in ("copy", "reduce"):
        dim, join = dim % x.dim(), join % x.dim()
    # Each rank takes an equal slice, so nothing may be left over.
    if kind in (*_SHRINKS, "exchange") and x.shape[dim] % group.size:
        raise CommMisuse(
            f"{kind} on {group.name}: dim {dim} of size {x.shape[dim]} does not divide by "
            f"{group.size} ranks; pad it to {-(-x.shape[dim] // group.size) * group.size}."
        )
    # A compiled graph cannot contain a group: it gets the group's name and size.
    where = (group.name, group.size) if is_opaque() else group
    result = _Region.apply(x, kind, where, dim, join)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kind: str,
        where: Group | tuple[str, int],
        dim: int,
        join: int,
    ) -> Tensor:
        ctx.kind, ctx.where, ctx.dim, ctx.join = kind, where, dim, join
        return (
            x.view_as(x)
            if kind == "copy"
            else _carry(x, kind, where, dim, join)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kind, dim, join = _CONJUGATE[ctx.kind], ctx.dim, ctx.join
        # exchange is its own conjugate with the dims swapped.
        if kind == "exchange":
            dim, join = join, dim
        if kind != "copy":
            grad = _carry(grad, kind, ctx.where, dim, join)
        # The gradient of a sum passes unchanged; a group that follows values is told.
        elif not isinstance(ctx.where, tuple):
            ctx.where.gradient_of_sum(grad)
        return (grad, None, None, None, None)


def _carry(
    x: Tensor, kind: str, where: Group | tuple[str, int], dim: int, join: int
) -> Tensor:
    if not isinstance(where, tuple):
        return carry(x, kind, where, dim, join)
    result: Tensor = _op(x, kind, where[0], where[1], dim, join)
    return result


def carry(x: Tensor, kind: str, group: Group, dim: int, join: int) -> Tensor:
    """Compute a region's value, always a new tensor, without autograd."""
    n = group.size
    if kind == "reduce":
        # A copy: all-reduce works in place, and autograd may need x.
        total = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total
    # (..., n, ...) to (..., n / ranks, ...)
    if kind == "take":
        return group.part(x, dim)
    # (..., n, ...) to (..., n * ranks, ...)
    if kind in _GROWS:
        parts = x.new_empty((n, *x.shape))  # (ranks, *x.shape)
        group.all_gather(parts, x.contiguous())
        return _joined(parts, dim)
    # cut: (ranks, slice), so that each rank's slice is contiguous.
    cut = (
        torch.stack(x.chunk(n, dim))
        if dim
        else x.contiguous().view(n, x.shape[0] // n, *x.shape[1:])
    )
    # (..., n, ...) to (..., n / ranks, ...), summed over ranks
    if kind == "scatter_sum":
        mine = torch.empty_like(cut[0])
        group.reduce_scatter(mine, cut)
        return mine
    # (ranks, slice) each: part j goes to rank j, and part i comes from rank i
    came = torch.empty_like(cut)
    group.all_to_all(came, cut)
    return _joined(came, join)


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Join slices (ranks, ...) along their dim `dim`."""
    # Along dim 0 the parts lie one behind the other already.
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


@torch.library.custom_op("phalanx::region", mutates_args=())
def _op(
    x: Tensor, kind: str, name: str, size: int, dim: int, join: int
) -> Tensor:
    return carry(x, kind, group_named(name), dim, join)


@_op.register_fake
def _(
    x: Tensor, kind: str, name: str, size: int, dim: int, join: int
) -> Tensor:
    # The shape alone, for tracing: nothing is sent.
    shape = list(x.shape)
    if kind in (*_SHRINKS, "exchange"):
        shape[dim] //= size
    if kind in _GROWS:
        shape[dim] *= size
    if kind == "exchange":
        shape[join] *= size
    return x.new_empty(shape)
