"""The interface of all communication: a world of ranks, and groups of some of them.

A `Group` checks its arguments, makes a `Call` of them and passes it to `_begin`, the
only method that a backend must implement. `Group` itself is a group of one. Not here:
how bytes travel, and what each collective computes (`torch_shm/settle.py`).
"""

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from phalanx.program.tree import merges
from rank_watch.positions import WAITS, Positions
from torch_shm.calls import NOTHING, Call, check, equal_splits
from torch_shm.calls import OPS as OPS
from torch_shm.calls import CommError as CommError
from torch_shm.calls import CommMisuse as CommMisuse
from torch_shm.calls import Work as Work
from torch_shm.calls import disagreement as disagreement
from torch_shm.calls import named as named
from torch_shm.calls import split_call as split_call
from torch_shm.settle import settle


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that is a message for the user.

    0 for every other error: its traceback is needed to find the mistake. Messages for
    the user are our own ValueErrors: the user has to change something, so a restart
    would not help. Their code is 2, or the `exit_code` of the class: 1 if the run had
    begun. A misuse of a group is a mistake in the code that calls it, unless its class
    has an `exit_code`.
    """
    # Errors of our own that are for the user, rather than a mistake in the code.
    ours = isinstance(error, ValueError) and type(error).__module__.startswith(
        "phalanx."
    )
    default = 0 if isinstance(error, CommError) or not ours else 2
    code: int = getattr(error, "exit_code", default)
    return code


@dataclass(frozen=True)
class Report:
    """The end of one rank: its error in a line, and its traceback.

    `secondary` marks a rank that failed only because it lost a peer. `exit_code` is
    nonzero if the error is a message for the user; see `exit_code_of`. A restart then
    helps only if the error's class sets `restart_helps`.
    """

    rank: int
    error: str
    trace: str
    secondary: bool
    exit_code: int = 0
    restart_helps: bool = True

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Report":
        secondary = isinstance(error, CommError) and not isinstance(
            error, CommMisuse
        )
        trace = "".join(traceback.format_exception(error))
        text = f"{type(error).__name__}: {error}"
        code = exit_code_of(error)
        helps: bool = getattr(error, "restart_helps", not code)
        return cls(rank, text, trace, secondary, code, helps)


class RankFailed(CommError):
    """A rank failed and ended the others; shows its traceback, then the others' lines.

    `refusal` is the first rank's error if it is a message for the user, else "".
    `restart_helps`: a new start of the ranks may get further.
    """

    def __init__(self, reports: Sequence[Report]) -> None:
        # A rank that only lost a peer is named after the one that failed by itself.
        first, *others = sorted(reports, key=lambda report: report.secondary)
        lines = [f"rank {first.rank} failed: {first.error}"]
        lines += [first.trace.rstrip()] if first.trace else []
        for each in others:
            same = each.error == first.error
            lines.append(
                f"then rank {each.rank} failed: {'the same' if same else each.error}"
            )
        super().__init__("\n".join(lines))
        self.rank = first.rank
        self.reports = (first, *others)
        self.refusal = first.error if first.exit_code else ""
        self.restart_helps = first.restart_helps
        self.exit_code = first.exit_code or 1


class RecordedCall(Work):
    """A recorded call, which also records its waits."""

    def __init__(self, work: Work, number: int, positions: Positions) -> None:
        self.work, self.number, self.positions = work, number, positions

    def wait(self) -> None:
        words, begun = self.positions.words, time.perf_counter()
        # The watcher reads `words` from outside: while this is set, the rank waits.
        words[WAITS] = self.number
        self.work.wait()
        words[WAITS] = 0
        self.positions.waits.append((begun, time.perf_counter()))

    def done(self) -> bool:
        return self.work.done()


class Group:
    """A process group as a member sees it; roots and peers are ranks of the group.

    Tensors must be contiguous. With `wait=True` a call is complete when it returns.
    With `wait=False` the caller leaves its tensors alone until `.wait()` of the
    returned work. Calls of one rank on one group progress in the order in which they
    were made. Sums of bf16 and fp16 are computed in float32 and rounded once (NCCL
    rounds in its own way). A NaN on any rank survives min and max.
    """

    positions: Positions | None = None  # records this rank's calls
    number = 0  # of this group in the record
    # True: sums have the order of `program/tree.py` on every backend.
    in_tree = False

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], device: torch.device
    ) -> None:
        self.name = name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.device = device
        self._to_itself: deque[Tensor] = deque()

    # Work that a rank does on its own with a value of the group, without a call. A
    # group that follows values from rank to rank overrides these.

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of an `x` that all ranks hold whole, as a separate tensor."""
        mine = x.chunk(self.size, dim)[self.rank]
        return mine.clone(memory_format=torch.contiguous_format)

    def share(self, x: Tensor, ranks: int) -> Tensor:
        """This rank's share of an `x` that all ranks hold; the shares sum to x."""
        return x / ranks

    def gradient_of_sum(self, gradient: Tensor) -> None:
        """Hook for the gradient of a sum over the group, which passes unchanged."""

    def _begin(self, call: Call) -> Work:
        """Start a checked call; here that of a rank with itself."""
        # A message to itself is copied, so that the sender may write to its tensor.
        if call.kind == "send":
            self._to_itself.append(call.x.detach().clone())
        elif call.kind != "receive":
            # `settle` with the calls of all members, of which there is one.
            settle([call])
        elif self._to_itself:
            settle([Call("send", self._to_itself.popleft()), call])
        else:
            raise CommError(
                f"receive on {self.name}: rank {self.ranks[self.rank]} waits for itself."
            )
        return Work()

    def _alone(self, call: Call) -> bool:
        """True if a call involves only this rank."""
        return self.size == 1 or (
            call.at == self.rank and call.kind in ("send", "receive")
        )

    def close(self) -> None:
        """Release what the group owns. Every member closes, in the same order."""

    def flush(self) -> None:
        """Wait until everything sent has left.

        Only valid where every matching receive is posted, or will be, without further
        calls of this rank.
        """

    def _do(self, call: Call, wait: bool, number: int = 0) -> Work:
        """Make a call. `number` is its number in the record, if it is recorded already."""
        check(self, call)
        if self.positions is None:
            work = self._begin(call)
        else:
            # Recorded first, as the call may hang inside `_begin`.
            number = number or self.record(
                self.positions, call.kind, call.x, call.op, call.at
            )
            work = RecordedCall(self._begin(call), number, self.positions)
        if wait:
            work.wait()
        return work

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context that reads a call's device results; the host waits for the GPU."""
        if self.positions is None or self.device.type != "cuda":
            yield
            return
        # For the watcher: the rank waits for its own GPU, not for a peer.
        with self.positions.reading():
            yield

    def record(
        self, positions: Positions, kind: str, x: Tensor, op: str, at: int = -1
    ) -> int:
        """Record a call and return its number."""
        # The text of a call is built once for each kind, shape and dtype.
        key = kind, x.shape, x.dtype, op, at
        if (text := positions.call_texts.get(key)) is None:
            text = positions.texts([Call(kind, x, op=op, at=at).signature()])
            positions.call_texts[key] = text
        peer = at if kind in ("send", "receive") else -1
        return positions.call(self.number, text, peer, kind == "send")

    def all_reduce(
        self, x: Tensor, op: str = "sum", *, wait: bool = True
    ) -> Work:
        """Replace every rank's `x` by the reduction over all."""
        if self._adds_in_tree(op):
            self._sum_in_tree(x.view(-1))
            return Work()
        return self._do(Call("all_reduce", x, op=op), wait)

    def reduce(
        self, x: Tensor, root: int, op: str = "sum", *, wait: bool = True
    ) -> Work:
        """Replace the root's `x` by the reduction. The others keep theirs."""
        return self._do(Call("reduce", x, op=op, at=root), wait)

    def broadcast(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Replace every rank's `x` by the root's."""
        return self._do(Call("broadcast", x, at=root), wait)

    def all_gather(
        self, out: Tensor, x: Tensor, *, still: bool = False, wait: bool = True
    ) -> Work:
        """Fill `out` with every rank's `x`, concatenated in group order.

        `still` promises that this rank leaves `x` unchanged until a later call tells it
        that all ranks have their `out`. Then it need not wait for ranks that read `x`
        in shared memory (`World.empty`). Other memory is the caller's again at the
        wait: it may be a copy that is freed there.
        """
        # x: n elements on each rank; out: (size, n)
        return self._do(Call("all_gather", x, out, still=still), wait)

    def reduce_scatter(
        self, out: Tensor, x: Tensor, op: str = "sum", *, wait: bool = True
    ) -> Work:
        """Fill rank i's `out` with the reduction of part i of every rank's `x`."""
        # x: (size, n), whose row i goes to rank i; out: n elements
        if self._adds_in_tree(op):
            out.view(-1).copy_(self._part_in_tree(x.view(self.size, -1)))
            return Work()
        return self._do(Call("reduce_scatter", x, out, op=op), wait)

    def _adds_in_tree(self, op: str) -> bool:
        return self.in_tree and op == "sum" and self.size > 1

    def _sum_in_tree(self, x: Tensor) -> None:
        """Replace every rank's x (n) by the sum in the tree."""
        n = x.numel()
        each = -(-n // self.size)
        # (size, each), with zeros behind the last element
        parts = x.new_zeros(self.size, each)
        parts.view(-1)[:n] = x
        mine = self._part_in_tree(parts)
        self.all_gather(parts, mine)
        x.copy_(parts.view(-1)[:n])

    def _part_in_tree(self, parts: Tensor) -> Tensor:
        """The sum in the tree of row i of every rank's parts (size, n), for rank i."""
        came = torch.empty_like(parts)
        self.all_to_all(came, parts)
        for into, term in merges(self.size):
            came[into] += came[term]
        return came[0]

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Work:
        """Send part j of `x` to rank j; `out` receives parts in group order.

        Parts are along dim 0.
        """
        # x: (sum of in_splits, ...), out: (sum of out_splits, ...)
        sends = equal_splits(self, x, in_splits, "in_splits")
        takes = equal_splits(self, out, out_splits, "out_splits")
        return self._do(
            Call("all_to_all", x, out, in_splits=sends, out_splits=takes), wait
        )

    def gather(
        self,
        outs: Sequence[Tensor] | None,
        x: Tensor,
        root: int,
        *,
        wait: bool = True,
    ) -> Work:
        """Fill the root's `outs` with every rank's `x`. The others pass None."""
        # outs: `size` tensors of x's size at the root
        return self._do(
            Call("gather", x, parts=outs and tuple(outs), at=root), wait
        )

    def scatter(
        self,
        out: Tensor,
        xs: Sequence[Tensor] | None,
        root: int,
        *,
        wait: bool = True,
    ) -> Work:
        """Fill rank i's `out` with the root's `xs[i]`. The others pass None."""
        # xs: `size` tensors of out's size at the root
        return self._do(
            Call("scatter", out, parts=xs and tuple(xs), at=root), wait
        )

    def barrier(self, *, wait: bool = True) -> Work:
        """Wait until every rank has arrived."""
        return self._do(Call("barrier", NOTHING), wait)

    def send(self, x: Tensor, to: int, *, wait: bool = True) -> Work:
        """Send `x` to a rank, in order with earlier sends; never waits for the peer."""
        return self._do(Call("send", x, at=to), wait)

    def receive(self, x: Tensor, source: int, *, wait: bool = True) -> Work:
        """Fill `x` with the next tensor that `source` sent here."""
        return self._do(Call("receive", x, at=source), wait)


class World(ABC):
    """All ranks of a run, as one of them sees it. Groups are split from it."""

    sharing = 1  # number of ranks that compute on this rank's device
    positions: Positions | None = None

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        # In the order of the splits, which is the order of closing.
        self._groups: dict[str, Group] = {}

    @abstractmethod
    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        """Create this rank's group, with a communicator of its own."""

    def split(
        self,
        name: str,
        groups: Sequence[Sequence[int]],
        flows: Sequence[tuple[int, int]] = (),
    ) -> Group:
        """Create this rank's group; all ranks call it with equal groups in one order.

        Each rank of the world is in exactly one of the groups. `flows` are the (from,
        to) ranks of a group that will send to each other: NCCL needs a communicator for
        each, other backends allow any pair.
        """
        # Checked on each rank alone, before any rank could wait for another.
        fixed = [tuple(group) for group in groups]
        text = [list(group) for group in fixed]
        if sorted(rank for group in fixed for rank in group) != list(
            range(self.size)
        ):
            raise CommMisuse(
                f"the groups of split {name!r} hold the ranks {text}; "
                f"each of the {self.size} ranks of the world must be in exactly one group."
            )
        if any(list(group) != sorted(group) for group in fixed):
            raise CommMisuse(
                f"the groups of split {name!r} are {text}; write the ranks of each in ascending order."
            )
        if any(i == j or min(i, j) < 0 for i, j in flows):
            raise CommMisuse(
                f"the flows of split {name!r} are {list(flows)}; each must go from one rank of a group "
                "to another."
            )
        if name in self._groups:
            raise CommMisuse(
                f"this world already has a group {name!r}; close it or choose another name."
            )
        group = self._groups[name] = self._split(name, fixed, tuple(flows))
        # A group of one needs no name for graphs, whose regions are then the identity.
        if group.size > 1:
            _open_groups()[name] = group
            if self.positions is not None:
                group.number = self.positions.group(name, group.ranks)
                group.positions = self.positions
        return group

    def unused_prefix(self, name: str) -> str:
        """The prefix of a new set of groups, one of which has this name.

        It is empty for the first set. All ranks get the same prefix, since they open
        the same groups.
        """
        prefix = ""
        for number in count(2):
            if prefix + name not in self._groups:
                break
            prefix = f"{number}."
        return prefix

    def record(self, positions: Positions | None) -> None:
        """Record the calls of every group split from now on; None stops it."""
        self.positions = positions

    def own(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The one of these groups that contains this rank."""
        return next(group for group in groups if self.rank in group)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor for frequent messages, in shared memory if possible."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def release(self, name: str) -> None:
        """Close one group and free its name. Every member calls it."""
        group = self._groups.pop(name)
        group.close()
        # Another world of this process may have opened a group of that name.
        if _open_groups().get(name) is group:
            del _open_groups()[name]

    def clear(self) -> None:
        """Close every group split so far, in that order, and free their names."""
        for name in tuple(self._groups):
            self.release(name)

    def close(self) -> None:
        """Leave the world."""
        self.clear()

    def abort(self) -> None:  # noqa: B027 - most worlds have nothing to abort
        """Abort the calls under way, so that this process can end without the others."""


# Open groups by name, for compiled code, as a graph cannot contain a group. A process
# is usually one rank and has one table. Ranks that are threads of one process have one
# each.
_of_process: dict[str, Group] = {}
_of_thread = threading.local()


def _open_groups() -> dict[str, Group]:
    table: dict[str, Group] = getattr(_of_thread, "table", _of_process)
    return table


def become_a_rank() -> None:
    """Give this thread a table of open groups of its own, as it is a rank."""
    _of_thread.table = {}


def group_named(name: str) -> Group:
    """The open group of that name on this rank."""
    try:
        return _open_groups()[name]
    except KeyError:
        raise CommError(
            f"no open group is named {name!r} on this rank."
        ) from None
