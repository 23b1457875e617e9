"""Calls between the ranks of a group: their arguments, checks and errors.

A `Call` is one rank's part in a collective or a message. `settle.py` defines its
result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

ROOTED = ("reduce", "broadcast", "gather", "scatter")
OPS = ("sum", "average", "min", "max", "product")
# The tensor of a call that moves none, such as a barrier.
NOTHING = torch.empty(0)


class CommError(RuntimeError):
    """Raised if communication fails; the text says where and between whom."""


class CommMisuse(CommError, ValueError):
    """Raised for an invalid call, before anything is sent."""


class Work:
    """A pending call. This base class is already complete."""

    def wait(self) -> None:
        """Wait until the tensors of the call may be read and written again."""

    def done(self) -> bool:
        """True if the call has completed."""
        return True


def signature(
    kind: str, op: str, at: int, numel: int, dtype: torch.dtype
) -> str:
    """Return the readable text of a call that must be equal on every member of its
    group."""
    # No size moves, and a split names its groups in `op`.
    if kind in ("barrier", "split"):
        return f"{kind} {op}".rstrip()
    # In an all-to-all each rank has its own sizes; they are compared pair by pair.
    size = "" if kind == "all_to_all" else f"{numel} "
    words = ", ".join(
        word for word in (op, f"root {at}" if kind in ROOTED else "") if word
    )
    # Both ends of a message have one text, as each compares its own with the other's.
    name = "send/receive" if kind in ("send", "receive") else kind
    return f"{name}{f'({words})' if words else ''} of {size}{str(dtype).removeprefix('torch.')}"


# not frozen: creating a frozen one takes three times as long
@dataclass(eq=False, slots=True)
class Call:
    """One rank's part in a collective: its kind and this rank's own tensors.

    Every kind has `x` (in scatter, the receiving tensor). `parts` is the root's list in
    gather and scatter. `at` is the root or the peer, as a rank of the group.
    """

    kind: str
    x: Tensor
    out: Tensor | None = None
    parts: Sequence[Tensor] | None = None
    op: str = ""
    at: int = -1
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    still: bool = False

    def signature(self) -> str:
        """Return the text that must be equal on every member of the group."""
        return signature(
            self.kind, self.op, self.at, self.x.numel(), self.x.dtype
        )

    def tensors(self) -> list[Tensor]:
        """Return every tensor of this rank that the call reads or writes."""
        return [
            self.x,
            *((self.out,) if self.out is not None else ()),
            *(self.parts or ()),
        ]


def split_call(name: str, groups: Sequence[tuple[int, ...]]) -> Call:
    """Return the call that starts a split of a world into groups; all ranks name the
    same groups."""
    return Call(
        "split",
        NOTHING,
        op=f"{name!r} into {[list(group) for group in groups]}",
    )


# ---- refusals and their messages


class Member(Protocol):
    """One rank's view of a group, as far as the checks of its calls need it."""

    name: str
    rank: int
    size: int


def equal_splits(
    member: Member, x: Tensor, splits: Sequence[int] | None, name: str
) -> tuple[int, ...]:
    """Return the rows of `x` for each rank in an all-to-all: as given, or in equal
    parts."""
    # Trailing dims are not split: counts are of rows of dim 0.
    rows = x.shape[0] if x.dim() else 0
    if splits is None and rows % member.size:
        raise CommMisuse(
            f"all_to_all on {member.name}: {rows} rows do not divide by {member.size} ranks; "
            f"give {name}."
        )
    counts = (
        (rows // member.size,) * member.size
        if splits is None
        else tuple(splits)
    )
    if len(counts) != member.size or sum(counts) != rows or min(counts) < 0:
        raise CommMisuse(
            f"all_to_all on {member.name}: {name} {list(counts)} must be {member.size} counts "
            f"that add up to {rows} rows."
        )
    return counts


def check(member: Member, call: Call) -> None:
    """Refuse a call that is invalid on any backend."""
    if reason := _reason_against(member, call):
        raise CommMisuse(f"{call.kind} on {member.name}: {reason}")


def _reason_against(member: Member, call: Call) -> str:
    x, n = call.x, member.size
    for tensor in (
        (x,) if call.out is None and call.parts is None else call.tensors()
    ):
        # gloo would silently use the first numel() elements of the storage.
        if not tensor.is_contiguous():
            shape = f"shape {list(tensor.shape)} and strides {list(tensor.stride())}"
            return f"the tensor of {shape} is not contiguous; pass x.contiguous()."
        if tensor.dtype != x.dtype:
            return f"{tensor.dtype} and {x.dtype} in one call."
    if call.op and call.op not in OPS:
        return (
            f"no reduction is named {call.op!r}; there are {', '.join(OPS)}."
        )
    # The mean of integers is no integer, and a sum of bools is no bool.
    whole = call.op == "average" and not x.dtype.is_floating_point
    if whole or (call.op == "sum" and x.dtype == torch.bool):
        return f"{call.op} of {x.dtype} is not defined; convert it first."
    if call.kind in (*ROOTED, "send", "receive") and not 0 <= call.at < n:
        return f"there is no rank {call.at} in a group of {n}."
    return _reason_against_sizes(member, call)


def _reason_against_sizes(member: Member, call: Call) -> str:
    x, n = call.x.numel(), member.size
    if call.kind in ("gather", "scatter"):
        parts = None if call.parts is None else len(call.parts)
        if parts != (n if member.rank == call.at else None):
            return (
                f"the root passes {n} tensors and the others None; "
                f"rank {member.rank} passed {parts} with root {call.at}."
            )
        for i, part in enumerate(call.parts or ()):
            if part.numel() != x:
                return f"part {i} has {part.numel()} elements, the others {x}."
    if call.out is None:
        return ""
    out = call.out.numel()
    # Only all-gather and reduce-scatter tie the size of out to that of x.
    needed = {"all_gather": x * n, "reduce_scatter": x / n}.get(call.kind, out)
    if out != needed:
        return f"out has {out} elements, {needed:g} are needed for x of {x} in a group of {n}."
    if call.kind == "all_to_all" and call.x.shape[1:] != call.out.shape[1:]:
        return f"rows of x are {list(call.x.shape[1:])} and of out {list(call.out.shape[1:])}."
    return ""


def disagreement(
    number: int, name: str, sides: Sequence[tuple[int, str]]
) -> str:
    """Describe calls of two ranks that do not match."""
    calls = ", ".join(f"rank {rank} is in {call}" for rank, call in sides)
    return (
        f"the ranks disagree on call {number} of {name}: {calls}. "
        "Every rank of a group makes the same calls in the same order with the same sizes."
    )


def named(ranks: Sequence[int]) -> str:
    """Format ranks with a verb: rank 3 has; ranks 0-2, 5 have."""
    # Ranks that ascend by one have an equal difference to their index.
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(
            enumerate(ranks), key=lambda pair: pair[1] - pair[0]
        )
    ]
    names = [
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    ]
    more = [f"{len(names) - 8} more"] if len(names) > 8 else []
    text = ", ".join([*names[:8], *more])
    return f"rank {text} has" if len(ranks) == 1 else f"ranks {text} have"
