"""A world of processes over torch.distributed: NCCL on GPUs, gloo otherwise.

Over gloo everything but all-reduce, broadcast and barrier is a *trade*: each rank posts
its receives and its sends at once, then reduces the received parts in rank order.
gloo's own all-gather passes parts around a ring, and its reduce-scatter is an
all-reduce of a copy. Milliseconds for 64 MB of float32 on 2 | 4 ranks of one machine
with 2 cores, over loopback, medians of 9 calls interleaved in one run:

    all-reduce      gloo  88 | 154     trade twice 142 | 228
    all-gather      gloo 146 | 185     trade  44 |  64     all-to-all 110 | 183
    reduce-scatter  gloo 184 | 276     trade  88 | 140     all-to-all 110 | 170

Every step that follows a transfer is local. So a call made with `wait=False` needs
nothing more of its peers, and ranks may wait for their calls in any order.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.base import CommError, CommMisuse, Group, Work, World, named
from phalanx.comm.colours import rounds
from phalanx.layout.choices import GLOO, NCCL
from torch_shm.calls import Call
from torch_shm.settle import HALVES, reduce_into

# torch 2.13 deprecates the only names that 2.11 has.
_all_gather: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
# Some of its names exist only in builds that support them, so the type checker does not
# know them.
_untyped: Any = dist
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


# A receive waits on the device for its message and occupies as many blocks as NCCL
# gives it: up to 32 over NVLink, on which nothing else computes. Eight move the
# messages of a pipeline or ring as fast as an InfiniBand port. The number follows from
# NCCL's 15 to 20 GB/s per block; it is not measured.
FLOW_BLOCKS = 8


def nccl_options(timeout: timedelta, blocks: int = 0) -> Any:
    """NCCL's options, with at most `blocks` blocks if not 0; None without NCCL.

    torch warns if their timeout is not the one that is given beside them.

    Their streams have high priority: a transfer starts beside a running matmul, and
    does not wait until all blocks of the matmul are scheduled.
    """
    if not hasattr(_untyped, "ProcessGroupNCCL"):
        return None
    options = _untyped.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if blocks:
        options.config.max_ctas = blocks
    return options


class Pending(Work):
    """Transfers under way, with the ranks they wait for and the step that follows."""

    def __init__(
        self,
        where: str,
        transfers: Sequence[tuple[Any, Sequence[int]]],
        after: Callable[[], object] | None = None,
    ) -> None:
        self._where = where
        self._transfers = list(transfers)
        self._after = after

    def wait(self) -> None:
        # Waiting twice is harmless: the second time there is nothing left to wait for.
        transfers, self._transfers = self._transfers, []
        for transfer, peers in transfers:
            try:
                transfer.wait()
            except RuntimeError as error:
                names = named(peers).removesuffix(" has").removesuffix(" have")
                raise CommError(
                    f"{self._where} waits for {names}: {_reason(error)}"
                ) from error
        # What follows a transfer changes tensors in place, outside of any graph.
        after, self._after = self._after, None
        if after is not None:
            with torch.no_grad():
                after()

    def done(self) -> bool:
        return all(transfer.is_completed() for transfer, _ in self._transfers)


class TorchGroup(Group):
    """A process group of torch.distributed, as one rank sees it.

    `flows` holds the communicator of each directed pair over NCCL. None: any pair may
    use the group itself (gloo). `made` lists all torch groups that this rank created
    for it, including those of one rank, which only keep the number of groups equal on
    all ranks.
    """

    def __init__(
        self,
        name: str,
        world_rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        group: dist.ProcessGroup,
        flows: Mapping[tuple[int, int], dist.ProcessGroup] | None,
        made: Sequence[dist.ProcessGroup],
    ) -> None:
        super().__init__(name, ranks.index(world_rank), ranks, device)
        self._group = group
        self._flows = flows
        self._made = list(made)  # closed together with this group
        self._native = flows is not None
        self._others = [rank for rank in ranks if rank != world_rank]
        self._tags: Counter[tuple[str, int]] = Counter()
        self._sent: list[tuple[Pending, Tensor]] = []
        self._closed = False

    def flush(self) -> None:
        # gloo's isend is never `done` on its own: a sent tensor stays in memory until
        # waited for.
        for sent, _ in self._sent:
            sent.wait()
        self._sent.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.flush()
        # One member may finish here while another still reads what it sent.
        self.barrier()
        while self._made:
            dist.destroy_process_group(self._made.pop())
        # A group's threads run until nothing refers to it, and cycles may refer to this
        # object for long.
        del self._group, self._flows

    def _begin(self, call: Call) -> Work:
        if self._alone(call):
            return super()._begin(call)
        try:
            # By the kind of the call: `_all_reduce`, `_send` and so on.
            begin: Callable[[Call], Work] = getattr(self, f"_{call.kind}")
            return begin(_plain(call))
        except (RuntimeError, ValueError) as error:
            if isinstance(error, CommError):
                raise
            raise CommError(
                f"{self._where(call)} failed: {_reason(error)}"
            ) from error

    def _where(self, call: Call) -> str:
        return f"rank {self.ranks[self.rank]} in {call.kind} on {self.name}"

    def _pending(
        self, call: Call, work: Any, after: Callable[[], object] | None = None
    ) -> Work:
        return Pending(self._where(call), [(work, self._others)], after)

    def _around(self, step: int) -> Iterator[int]:
        # Ranks at distance 1, 2, ... in one direction around the group.
        return (
            (self.rank + step * i) % self.size for i in range(1, self.size)
        )

    def _trade(
        self,
        call: Call,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        after: Callable[[], object] | None = None,
    ) -> Work:
        """Send tensors to some ranks and receive tensors from some, all at once."""
        me, group = self.rank, self._group
        # This rank's own part needs no message.
        if me in sends and me in receives:
            receives[me].view(-1).copy_(sends[me].view(-1))
        # Nearest rank first, so that ranks do not all send to rank 0 at the same time.
        out = [
            (i, sends[i])
            for i in self._around(1)
            if i in sends and sends[i].numel()
        ]
        into = [
            (i, receives[i])
            for i in self._around(-1)
            if i in receives and receives[i].numel()
        ]
        # NCCL: one batch, or a send could wait for a receive that is posted behind it.
        if self._native:
            batch = [
                dist.P2POp(dist.irecv, x, group=group, group_peer=i)
                for i, x in into
            ]
            batch += [
                dist.P2POp(dist.isend, x, group=group, group_peer=i)
                for i, x in out
            ]
            works = dist.batch_isend_irecv(batch) if batch else []
            return Pending(
                self._where(call),
                [(work, self._others) for work in works],
                after,
            )
        # Each trade has its own tag, so it cannot match another transfer of the pair.
        self._tags["trade", 0] += 1
        tag = 2 * self._tags["trade", 0] + 1
        # Receives first, so that a message finds its place when it arrives.
        transfers = [
            (begin(x, self.ranks[i], group=group, tag=tag), [self.ranks[i]])
            for begin, messages in ((dist.irecv, into), (dist.isend, out))
            for i, x in messages
        ]
        return Pending(self._where(call), transfers, after)

    def _all_reduce(self, call: Call) -> Work:
        x, op = call.x, call.op
        # NaN must survive min and max: reduce integers in the order of the floats.
        if x.dtype.is_floating_point and op in ("min", "max"):
            whole = ordered(x, op)
            work = dist.all_reduce(
                whole, _OPS[op], group=self._group, async_op=True
            )
            return self._pending(call, work, lambda: x.copy_(unordered(whole)))
        # gloo sums in the dtype that it gets, so 16-bit values travel in float32.
        total = (
            x.to(torch.float32)
            if x.dtype in HALVES and not self._native
            else x
        )
        work = dist.all_reduce(
            total, _OPS[op], group=self._group, async_op=True
        )

        def after() -> None:
            if op == "average":
                total.div_(self.size)
            if total is not x:
                x.copy_(total)

        return self._pending(call, work, after)

    def _reduce(self, call: Call) -> Work:
        x, root = call.x, call.at
        # Each rank sends its part to the root, which reduces in rank order.
        if self.rank != root:
            return self._trade(call, {root: x}, {})
        parts = {i: torch.empty_like(x) for i in range(self.size)} | {root: x}
        return self._trade(
            call,
            {},
            parts,
            lambda: reduce_into(x, list(parts.values()), call.op),
        )

    def _broadcast(self, call: Call) -> Work:
        work = dist.broadcast(
            call.x, group=self._group, group_src=call.at, async_op=True
        )
        return self._pending(call, work)

    def _all_gather(self, call: Call) -> Work:
        x, out = call.x.view(-1), call.out
        assert out is not None
        if self._native:
            # One torch call, as for all-to-all; with our own sends and receives it
            # would be 2(n-1) calls.
            work = _all_gather(
                out.view(-1), x, group=self._group, async_op=True
            )
            return self._pending(call, work)
        # rows: (size, n), one for each rank's x, which goes to all
        rows = out.view(self.size, x.numel())
        return self._trade(
            call, dict.fromkeys(range(self.size), x), dict(enumerate(rows))
        )

    def _reduce_scatter(self, call: Call) -> Work:
        x, out = call.x, call.out
        assert out is not None
        if self._native and call.op in ("sum", "average", "product"):
            work = _reduce_scatter(
                out.view(-1),
                x.view(-1),
                op=_OPS[call.op],
                group=self._group,
                async_op=True,
            )
            # NCCL averages nothing here: it sums, and the division follows.
            average = call.op == "average"
            return self._pending(
                call, work, (lambda: out.div_(self.size)) if average else None
            )
        # row i of every rank goes to rank i: (ranks, out.numel())
        rows = x.view(self.size, out.numel())
        # out is reduced from all ranks' rows, this rank's own among them.
        parts = [
            row if i == self.rank else torch.empty_like(row)
            for i, row in enumerate(rows)
        ]
        sends = {i: row for i, row in enumerate(rows) if i != self.rank}
        return self._trade(
            call,
            sends,
            {i: parts[i] for i in sends},
            lambda: reduce_into(out, parts, call.op),
        )

    def _all_to_all(self, call: Call) -> Work:
        assert call.out is not None
        sends, takes = list(call.in_splits), list(call.out_splits)
        if self._native:
            work = dist.all_to_all_single(
                call.out,
                call.x,
                takes,
                sends,
                group=self._group,
                async_op=True,
            )
            return self._pending(call, work)
        out, into = torch.split(call.x, sends), torch.split(call.out, takes)
        return self._trade(call, dict(enumerate(out)), dict(enumerate(into)))

    def _gather(self, call: Call) -> Work:
        return self._trade(
            call, {call.at: call.x}, dict(enumerate(call.parts or ()))
        )

    def _scatter(self, call: Call) -> Work:
        return self._trade(
            call, dict(enumerate(call.parts or ())), {call.at: call.x}
        )

    def _barrier(self, call: Call) -> Work:
        return self._pending(call, _barrier(self._group, self.device))

    def _send(self, call: Call) -> Work:
        # A copy, so the sender can continue at once, and two ranks that both send first
        # do not block.
        x = call.x.clone()
        # torch.distributed's work does not keep the sent tensor alive, so this list
        # does.
        self._sent = [sent for sent in self._sent if not sent[0].done()]
        self._sent.append((self._transfer(dist.isend, call, x), x))
        return Work()

    def _receive(self, call: Call) -> Work:
        return self._transfer(dist.irecv, call, call.x)

    def _transfer(
        self, begin: Callable[..., Any], call: Call, x: Tensor
    ) -> Pending:
        # Even tags for messages, odd ones for trades: the n-th send meets its receive.
        peer, tag = self.ranks[call.at], 2 * self._tags[call.kind, call.at]
        self._tags[call.kind, call.at] += 1
        work = begin(x, peer, group=self._communicator(call), tag=tag)
        return Pending(self._where(call), [(work, [peer])])

    def _communicator(self, call: Call) -> dist.ProcessGroup:
        if self._flows is None:
            return self._group
        flow = (
            (self.rank, call.at)
            if call.kind == "send"
            else (call.at, self.rank)
        )
        if flow not in self._flows:
            raise CommMisuse(
                f"{self._where(call)}: the group was split without the flow {flow}. NCCL needs a "
                f"communicator for each flow: pass flows=[{flow}, ...] to split."
            )
        return self._flows[flow]


class ProcessWorld(World):
    """This process as one rank of torch.distributed's default group.

    With a store it creates that group and destroys it. Without one the group exists
    already, and stays.
    """

    # True if the group knows its device. A group created elsewhere may not, and then
    # cannot be split.
    bound = True

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        size: int,
        *,
        gpu: int,
        timeout: float,
    ) -> None:
        # Every NCCL branch that does not touch the device depends on this flag, so that
        # tests can run it over gloo.
        self.native = backend == NCCL
        device = (
            torch.device("cuda", gpu) if self.native else torch.device("cpu")
        )
        super().__init__(rank, size, device)
        self._timeout = timedelta(seconds=timeout)
        self._made = store is not None
        if self.native:
            torch.cuda.set_device(device)
        if not self._made:
            return
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=self._timeout,
            # NCCL then creates its communicators at once and in order, not at the first
            # message.
            device_id=device if self.native else None,
            pg_options=nccl_options(self._timeout) if self.native else None,
        )

    @classmethod
    def existing(cls, timeout: float) -> "ProcessWorld":
        """A rank of a group of Ray, Accelerate or others, on the GPU chosen there."""
        native = NCCL in str(dist.get_backend_config(None))
        gpu = torch.cuda.current_device() if native else 0
        backend, rank, size = (
            NCCL if native else GLOO,
            dist.get_rank(),
            dist.get_world_size(),
        )
        world = cls(backend, None, rank, size, gpu=gpu, timeout=timeout)
        # Without a bound device `split_group` refuses, and `new_group` takes its place.
        world.bound = (
            getattr(_untyped.group.WORLD, "bound_device_id", None) is not None
        )
        return world

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        ranks = self.own(groups)
        made: list[dist.ProcessGroup] = []
        group = self._new(name, groups, made)
        # gloo: one process group carries the collectives and all messages.
        if not self.native:
            return TorchGroup(
                name, self.rank, ranks, self.device, group, None, made
            )
        if len(ranks) > 1:
            self._connect_all(group)
        lines: dict[tuple[int, int], dist.ProcessGroup] = {}
        # A send over NCCL blocks its communicator until it is matched, so each directed
        # flow has its own. gloo's socket pairs are independent.
        for batch in apart(flows):
            pairs = [
                (each[i], each[j])
                for each in groups
                for i, j in batch
                if max(i, j) < len(each)
            ]
            title = f"{name}:{'+'.join(f'{i}>{j}' for i, j in batch)}"
            line = self._new(title, pairs, made, FLOW_BLOCKS)
            for i, j in batch:
                if max(i, j) < len(ranks) and self.rank in (
                    ranks[i],
                    ranks[j],
                ):
                    lines[i, j] = line
                    self._connect(line, ranks[i], ranks[j])
        return TorchGroup(
            name, self.rank, ranks, self.device, group, lines, made
        )

    def _connect_all(self, group: dist.ProcessGroup) -> None:
        """Sum one number over a group to connect its members before a step.

        Like a flow's first message, NCCL's first collective makes the host wait for all
        members. During a step one of them may be waiting for a message that this rank
        sends only later.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def _connect(
        self, line: dist.ProcessGroup, source: int, target: int
    ) -> None:
        """Send one number along a flow, so that its connection exists.

        NCCL connects two ranks inside their first send or receive, where the host waits
        until the peer has come too. In a ring every rank sends first, so all would wait
        for each other. Here all ranks open the flows of one batch after another, and
        none has two flows in a batch.
        """
        x = torch.zeros(1, device=self.device)
        sends = self.rank == source
        begin, peer = (dist.isend, target) if sends else (dist.irecv, source)
        work = begin(x, peer, group=line)
        assert work is not None
        work.wait()

    def _new(
        self,
        name: str,
        groups: Sequence[tuple[int, ...]],
        made: list[dist.ProcessGroup],
        blocks: int = 0,
    ) -> dist.ProcessGroup:
        """Create process groups of disjoint ranks; return this rank's own.

        Every process group that includes this rank is appended to `made`. `blocks`
        limits the GPU blocks of one NCCL call.
        """
        own: dist.ProcessGroup = _untyped.GroupMember.NON_GROUP_MEMBER
        # A lone rank sends nothing, and a group costs threads or a communicator.
        together = [tuple(sorted(group)) for group in groups if len(group) > 1]
        if self.native and self.bound:
            return (
                self._split_communicator(name, together, made, blocks)
                if together
                else own
            )
        options = nccl_options(self._timeout, blocks) if self.native else None
        # Every rank of the world calls `new_group` for every group, in one order.
        for group in together:
            terms: dict[str, Any] = {
                "timeout": self._timeout,
                "group_desc": name,
            }
            new = dist.new_group(list(group), pg_options=options, **terms)
            if self.rank in group:
                own = new
                made.append(new)
        return own

    def _split_communicator(
        self,
        name: str,
        groups: Sequence[tuple[int, ...]],
        made: list[dist.ProcessGroup],
        blocks: int,
    ) -> dist.ProcessGroup:
        """Split the default group's communicator into these groups at once.

        `new_group` would split the whole world for each group: 4,801 splits for dp16
        pp8 tp8, where this method is called 20 times. It needs more than one split only
        if two groups have the same colour.
        """
        own: dist.ProcessGroup = _untyped.GroupMember.NON_GROUP_MEMBER
        for parts in rounds(groups, self.size):
            split = [list(ranks) for ranks in parts]
            new = dist.split_group(
                split_ranks=split,
                timeout=self._timeout,
                pg_options=nccl_options(self._timeout, blocks),
                group_desc=name,
            )
            made.append(cast(dist.ProcessGroup, new))
            if any(self.rank in ranks and ranks in groups for ranks in parts):
                own = made[-1]
        return own

    def close(self) -> None:
        self.clear()
        if not self._made:
            return
        # Leaving without a barrier would abort ranks that still read from their
        # sockets.
        _barrier(None, self.device).wait()
        dist.destroy_process_group()

    def abort(self) -> None:
        # NCCL's kernels wait on the device for peers, and a process that ends waits for
        # its kernels. Over gloo a process just ends, and the others notice it at their
        # sockets.
        if self._made and self.native:
            _untyped.distributed_c10d._abort_process_group()


def apart(flows: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The flows in few lists, no rank twice in one list; each list is one split.

    For a pipeline: even and odd stages, in each direction.
    """
    batches: list[list[tuple[int, int]]] = []
    for flow in flows:
        # The first list in which neither rank is busy.
        for batch in batches:
            if not set(flow) & {rank for other in batch for rank in other}:
                batch.append(flow)
                break
        else:
            batches.append([flow])
    return batches


def _barrier(group: dist.ProcessGroup | None, device: torch.device) -> Any:
    ids = [device.index] if device.type == "cuda" else None
    return dist.barrier(group=group, async_op=True, device_ids=ids)


def _reason(error: BaseException) -> str:
    """The first sentence of a backend's error, without source lines and advice."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+\] ", "", line).split(" This is typically")[0]


def ordered(x: Tensor, op: str) -> Tensor:
    """Integers in the order of the floats `x`, with NaN beyond the end that `op` seeks.

    Reducing these keeps a NaN, which min and max of floats may drop on some backends.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    whole = wide.view(
        torch.int64 if wide.dtype == torch.float64 else torch.int32
    )
    limits = torch.iinfo(whole.dtype)
    beyond = limits.max if op == "max" else limits.min
    return _flip(whole).masked_fill_(wide.isnan(), beyond)


def unordered(whole: Tensor) -> Tensor:
    """The floats that `ordered` turned into integers."""
    return _flip(whole).view(
        torch.float64 if whole.dtype == torch.int64 else torch.float32
    )


def _flip(whole: Tensor) -> Tensor:
    # Negative floats are in the opposite order of their bits: keep the sign and flip
    # the rest.
    limits = torch.iinfo(whole.dtype)
    return whole ^ ((whole >> (limits.bits - 1)) & limits.max)


def _plain(call: Call) -> Call:
    """The call with tensors that backends accept: no autograd, bools as bytes."""

    def plain(x: Tensor) -> Tensor:
        return (
            x.detach().view(torch.uint8)
            if x.dtype == torch.bool
            else x.detach()
        )

    return replace(
        call,
        x=plain(call.x),
        out=None if call.out is None else plain(call.out),
        parts=None
        if call.parts is None
        else tuple(plain(part) for part in call.parts),
    )
