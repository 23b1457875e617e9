"""The one protocol every message goes through: a world of ranks, and groups between some of them.

A `Group` checks what it is asked, writes it down as a `Call`, and hands the call to `_begin`, the only
method a transport has to write. How the bytes travel is not here; what a collective means when
everybody's tensors are at hand is in `settle.py`.
"""

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OPS = ("sum", "average", "min", "max", "product")
HALVES = (torch.bfloat16, torch.float16)
_NOTHING = torch.empty(0)


class CommError(RuntimeError):
    """Something between the ranks went wrong; the text says where and who."""


class CommMisuse(CommError, ValueError):
    """A call that cannot be right, refused before anything is sent."""


@dataclass(frozen=True)
class Report:
    """How one rank ended: its error in a line, and its traceback. `secondary`: it lost a peer."""

    rank: int
    error: str
    trace: str
    secondary: bool

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Report":
        secondary = isinstance(error, CommError) and not isinstance(error, CommMisuse)
        trace = "".join(traceback.format_exception(error))
        return cls(rank, f"{type(error).__name__}: {error}", trace, secondary)


class RankFailed(CommError):
    """A rank failed and ended the others: its traceback first, then a line for each other."""

    def __init__(self, reports: Sequence[Report]) -> None:
        first, *others = sorted(reports, key=lambda report: report.secondary)
        lines = [f"rank {first.rank} failed: {first.error}", first.trace.rstrip()]
        for each in others:
            same = each.error == first.error
            lines.append(f"then rank {each.rank} failed: {'the same' if same else each.error}")
        super().__init__("\n".join(lines))
        self.rank = first.rank
        self.reports = (first, *others)


class Work:
    """A call under way. This plain one is already complete."""

    def wait(self) -> None:
        """Return when the tensors of the call may be read and written again."""

    def done(self) -> bool:
        """True when `wait` would return at once."""
        return True


@dataclass(eq=False, slots=True)  # not frozen: that takes three times as long to make
class Call:
    """What one rank asks of its group: the collective and this rank's own tensors.

    `x` is the tensor every kind has (for scatter, the one that receives). `parts` are the root's
    list in gather and scatter. `at` is the root or the peer, as a place in the group.
    """

    kind: str
    x: Tensor
    out: Tensor | None = None
    parts: tuple[Tensor, ...] | None = None
    op: str = ""
    at: int = -1
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    still: bool = False

    def promise(self) -> str:
        """What every member of the group has to say the same, as text for people."""
        if self.kind in ("barrier", "split"):
            return f"{self.kind} {self.op}".rstrip()
        dtype = str(self.x.dtype).removeprefix("torch.")
        # In all-to-all each rank brings its own sizes; they are compared pair by pair.
        size = "" if self.kind == "all_to_all" else f"{self.x.numel()} "
        kind = "send/receive" if self.kind in ("send", "receive") else self.kind
        root = f"root {self.at}" if self.kind in _ROOTED else ""
        said = ", ".join(word for word in (self.op, root) if word)
        return f"{kind}({said}) of {size}{dtype}" if said else f"{kind} of {size}{dtype}"

    def tensors(self) -> list[Tensor]:
        """Every tensor of this rank that the call reads or writes."""
        return [self.x, *((self.out,) if self.out is not None else ()), *(self.parts or ())]


_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_PLACED = (*_ROOTED, "send", "receive")


class Group(ABC):
    """One group of ranks, as one of them sees it. Roots and peers are places in the group.

    Tensors are contiguous, or refused. With `wait=True` a call is complete when it returns; with
    `wait=False` its tensors are left alone until `.wait()` of the returned work. Calls of one rank
    on one group progress in the order in which they were made. Sums of bf16 and fp16 are made in
    float32 and rounded once (over NCCL: as NCCL does). A NaN on any rank survives min and max.
    """

    def __init__(self, name: str, rank: int, ranks: Sequence[int], device: torch.device) -> None:
        self.name = name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.device = device

    @abstractmethod
    def _begin(self, call: Call) -> Work:
        """Start a call that has been checked."""

    def close(self) -> None:  # noqa: B027 - most groups hold nothing
        """Give back what the group holds. Every member closes, in the same order."""

    def flush(self) -> None:  # noqa: B027 - most groups keep nothing of what was sent
        """Wait until all that was sent has left. Only where every receive of it is, or will be,
        posted without anything more from here."""

    def _do(self, call: Call, wait: bool) -> Work:
        check(self, call)
        work = self._begin(call)
        if wait:
            work.wait()
        return work

    def all_reduce(self, x: Tensor, op: str = "sum", *, wait: bool = True) -> Work:
        """Everyone's `x` becomes the reduction of all of them."""
        return self._do(Call("all_reduce", x, op=op), wait)

    def reduce(self, x: Tensor, root: int, op: str = "sum", *, wait: bool = True) -> Work:
        """The root's `x` becomes the reduction; the others keep theirs."""
        return self._do(Call("reduce", x, op=op, at=root), wait)

    def broadcast(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Everyone's `x` becomes the root's."""
        return self._do(Call("broadcast", x, at=root), wait)

    def all_gather(self, out: Tensor, x: Tensor, *, still: bool = False, wait: bool = True) -> Work:
        """`out` holds everyone's `x`, one after another in group order.

        `still`: this rank leaves `x` as it is until it knows by some later call that all have their
        `out`. Who reads `x` where it lies is then not waited for.
        """
        return self._do(Call("all_gather", x, out, still=still), wait)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str = "sum", *, wait: bool = True) -> Work:
        """Place i's `out` is the reduction of the i-th equal part of everyone's `x`."""
        return self._do(Call("reduce_scatter", x, out, op=op), wait)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Work:
        """Part j of `x` goes to place j; `out` is what came, in group order. Parts are along dim 0."""
        call = Call(
            "all_to_all",
            x,
            out,
            in_splits=_splits(self, x, in_splits, "in_splits"),
            out_splits=_splits(self, out, out_splits, "out_splits"),
        )
        return self._do(call, wait)

    def gather(
        self, outs: Sequence[Tensor] | None, x: Tensor, root: int, *, wait: bool = True
    ) -> Work:
        """The root's `outs` become everyone's `x`; the others pass None."""
        return self._do(Call("gather", x, parts=_tuple(outs), at=root), wait)

    def scatter(
        self, out: Tensor, xs: Sequence[Tensor] | None, root: int, *, wait: bool = True
    ) -> Work:
        """Place i's `out` becomes the root's `xs[i]`; the others pass None."""
        return self._do(Call("scatter", out, parts=_tuple(xs), at=root), wait)

    def barrier(self, *, wait: bool = True) -> Work:
        """Nobody is past it before everyone has come."""
        return self._do(Call("barrier", _NOTHING), wait)

    def send(self, x: Tensor, to: int, *, wait: bool = True) -> Work:
        """`x` goes to a place, in order with what was sent there before. Never waits for the peer."""
        return self._do(Call("send", x, at=to), wait)

    def receive(self, x: Tensor, source: int, *, wait: bool = True) -> Work:
        """`x` becomes the next tensor that `source` sent here."""
        return self._do(Call("receive", x, at=source), wait)


class World(ABC):
    """All ranks of a run, as one of them sees it. Groups are split from it at the door."""

    sharing = 1  # ranks that compute on the device of this one

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._groups: dict[str, Group] = {}

    @abstractmethod
    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        """This rank's group, with a communicator of its own."""

    def split(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        flows: Sequence[tuple[int, int]] = (),
    ) -> Group:
        """This rank's group. Every rank calls it, with the same groups, in the same order.

        The groups part the ranks of the world. `flows` are the (from, to) places that will send to
        each other: NCCL needs a communicator for each, other transports take any pair.
        """
        fixed = [tuple(group) for group in groups]
        if sorted(rank for group in fixed for rank in group) != list(range(self.size)):
            raise CommMisuse(
                f"the groups of split {name!r} hold the ranks {[list(each) for each in fixed]}; "
                f"each of the {self.size} ranks of the world must stand in exactly one group."
            )
        if any(list(group) != sorted(group) for group in fixed):
            raise CommMisuse(
                f"the groups of split {name!r} are {[list(each) for each in fixed]}; "
                "write the ranks of each in ascending order."
            )
        if any(i == j or min(i, j) < 0 for i, j in flows):
            raise CommMisuse(
                f"the flows of split {name!r} are {list(flows)}; each goes from one rank of a group "
                "to another."
            )
        if name in self._groups:
            raise CommMisuse(f"this world already has a group {name!r}; close it or choose a name.")
        group = self._split(name, fixed, tuple(flows))
        self._groups[name] = group
        if group.size > 1:
            _here()[name] = group
        return group

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor to send and receive much with: where ranks share memory, they share it."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, name: str) -> None:
        """Close one group, so that its name is free again. Every member comes here."""
        group = self._groups.pop(name)
        group.close()
        if _here().get(name) is group:
            del _here()[name]

    def clear(self) -> None:
        """Close every group split so far, in that order, so that their names are free again."""
        for name in tuple(self._groups):
            self.release(name)

    def close(self) -> None:
        """Leave the world."""
        self.clear()


# The one table of the house: a group's name to its far side. Compiled code carries only the name,
# since a graph cannot hold a group. A process is usually one rank and has one table; ranks that are
# threads of one process have one each.
_process: dict[str, Group] = {}
_thread = threading.local()


def _here() -> dict[str, Group]:
    table: dict[str, Group] | None = getattr(_thread, "table", None)
    return _process if table is None else table


def become_a_rank() -> None:
    """From here on, groups that this thread splits are found from this thread only."""
    _thread.table = {}


def far_side(name: str) -> Group:
    """The open group of that name, for code that can carry only the name."""
    try:
        return _here()[name]
    except KeyError:
        raise CommError(f"no open group is named {name!r} on this rank.") from None


def _tuple(tensors: Sequence[Tensor] | None) -> tuple[Tensor, ...] | None:
    return None if tensors is None else tuple(tensors)


def _splits(group: Group, x: Tensor, splits: Sequence[int] | None, what: str) -> tuple[int, ...]:
    rows = x.shape[0] if x.dim() else 0
    if splits is None:
        if rows % group.size:
            raise CommMisuse(
                f"all_to_all on {group.name}: {rows} rows do not divide by {group.size} ranks; "
                f"give {what}."
            )
        return (rows // group.size,) * group.size
    if len(splits) != group.size or sum(splits) != rows or min(splits) < 0:
        raise CommMisuse(
            f"all_to_all on {group.name}: {what} {list(splits)} must be {group.size} counts "
            f"that add up to {rows} rows."
        )
    return tuple(splits)


def check(group: Group, call: Call) -> None:
    """Refuse a call that cannot be right on any transport."""
    where = f"{call.kind} on {group.name}"
    for tensor in (call.x,) if call.out is None and call.parts is None else call.tensors():
        # gloo would work on the first numel() elements of the storage and say nothing.
        if not tensor.is_contiguous():
            raise CommMisuse(
                f"{where}: the tensor of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())} is not contiguous; pass x.contiguous()."
            )
        if tensor.dtype != call.x.dtype:
            raise CommMisuse(f"{where}: {tensor.dtype} and {call.x.dtype} in one call.")
    if call.op:
        _check_op(where, call)
    if call.at != -1 or call.kind in _PLACED:
        _check_place(where, group, call)
    if call.out is not None or call.parts is not None:
        _check_sizes(where, group, call)


def _check_op(where: str, call: Call) -> None:
    if call.op not in OPS:
        raise CommMisuse(f"{where}: no reduction is named {call.op!r}; there are {', '.join(OPS)}.")
    whole = not call.x.dtype.is_floating_point
    if (call.op == "average" and whole) or (call.op == "sum" and call.x.dtype == torch.bool):
        raise CommMisuse(f"{where}: {call.op} of {call.x.dtype} is not defined; convert it first.")


def _check_place(where: str, group: Group, call: Call) -> None:
    if not 0 <= call.at < group.size:
        raise CommMisuse(f"{where}: there is no rank {call.at} in a group of {group.size}.")
    if call.kind in ("gather", "scatter"):
        parts = None if call.parts is None else len(call.parts)
        if parts != (group.size if group.rank == call.at else None):
            raise CommMisuse(
                f"{where}: the root passes {group.size} tensors and the others None; "
                f"place {group.rank} passed {parts} with root {call.at}."
            )


def _check_sizes(where: str, group: Group, call: Call) -> None:
    x, out = call.x.numel(), 0 if call.out is None else call.out.numel()
    wanted = {"all_gather": x * group.size, "reduce_scatter": x / group.size}.get(call.kind, out)
    if out != wanted:
        raise CommMisuse(
            f"{where}: out has {out} elements, {wanted:g} are needed for x of {x} "
            f"in a group of {group.size}."
        )
    for i, part in enumerate(call.parts or ()):
        if part.numel() != x:
            raise CommMisuse(f"{where}: part {i} has {part.numel()} elements, the others {x}.")
    if call.kind == "all_to_all":
        assert call.out is not None
        if call.x.shape[1:] != call.out.shape[1:]:
            raise CommMisuse(
                f"{where}: rows of x are {list(call.x.shape[1:])} and of out "
                f"{list(call.out.shape[1:])}."
            )
