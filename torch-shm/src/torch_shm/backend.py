"""Shared memory as a backend of torch.distributed: `import torch_shm` registers `shm`.

    dist.init_process_group("shm")   # or "cpu:shm,cuda:nccl"; all ranks on one machine

DDP, FSDP2 and DTensor run on it unchanged. Each process group has its own arena; the
group's first rank creates it, and publishes its path in the store until all ranks have
mapped it.

torch does not allow a `Backend` to be written in Python. So the backend registered for
a group's device is one of torch's own that refuses every call. Kernels of torch's
operators `c10d::*`, at the dispatch key where a backend is selected, execute the call
if the group is one of ours, and forward all others. The profiler and dispatch modes
come before these kernels and see the operators as with any backend.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .arena import Extent, Reserved
from .calls import (
    NOTHING,
    Call,
    CommError,
    CommMisuse,
    Work,
    check,
    equal_splits,
)
from .lines import Line
from .watch import LOOK_EVERY, CommTimeout
from .world import SharedGroup, SharedWork, SharedWorld

NAME = "shm"  # the backend's name

# torch's stubs lack most of what is used here.
_c10d: Any = torch._C._distributed_c10d
_dist: Any = dist
_torch: Any = torch
_Key: Any = _torch._C.DispatchKey
_BELOW = _torch._C._dispatch_keyset_full_after(_Key.BackendSelect)
_CPU = torch.device("cpu")
_OPS = {
    int(_dist.ReduceOp.SUM): "sum",
    int(_dist.ReduceOp.AVG): "average",
    int(_dist.ReduceOp.PRODUCT): "product",
    int(_dist.ReduceOp.MIN): "min",
    int(_dist.ReduceOp.MAX): "max",
}

# Guards all groups of this process: held by whoever advances calls, never while
# sleeping.
_lock = threading.RLock()
_groups: "dict[str, ShmProcessGroup]" = {}
# Lines with pending calls, of all groups.
_lines: dict[Line, SharedWorld] = {}


# ---- pending calls


class AsyncWork(dist.Work):
    """A pending call, as torch.distributed sees it.

    Waiting for it advances it and the calls of all other groups of this process. A
    thread advances calls that nobody waits for, so that futures complete by themselves.
    """

    def __init__(
        self,
        works: Sequence[Work],
        result: Any,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self.works = [work for work in works if isinstance(work, SharedWork)]
        self.since = time.perf_counter()
        self._result, self._finish = result, finish
        self._source = -1
        self._error: CommError | None = None
        self._future: Any = None
        self.ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the call. After `timeout` this raises; the call continues and can be
        waited for again."""
        # From here on the caller advances it; the thread need not.
        _background.forget(self)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        deadline = time.monotonic() + seconds if seconds > 0 else None
        try:
            for work in tuple(self.works):
                work.wait(
                    None
                    if deadline is None
                    else max(0.0, deadline - time.monotonic())
                )
            self.end()
        # Timed out, not ended: back to the thread.
        except CommTimeout:
            _background.add(self)
            raise
        except CommError as error:
            self.end(error)
        if self._error is not None:
            raise self._error
        return True

    def end(self, error: CommError | None = None) -> None:
        """Finish the call after its transfers, once."""
        # Once, also if the thread and a waiting caller come here together.
        with _lock:
            if self.ended:
                return
            if error is None and self._finish is not None:
                self._finish()
            for work in self.works:
                self._source = work.source
            self._error, self.ended = error, True
            self.works, self._finish = [], None
        # Without the lock: callbacks chained to the future may make calls.
        if self._future is not None:
            self._complete()

    def _complete(self) -> None:
        _background.forget(self)
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    def end_if_over(self) -> bool:
        if not self.ended and all(work.ended for work in self.works):
            self.end()
        return self.ended

    def is_completed(self) -> bool:
        for work in self.works[:1]:
            work.world.advance()
        if self.end_if_over():
            _background.forget(self)
        return self.ended

    def is_success(self) -> bool:
        return self.ended and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future that completes even if nobody waits for the call."""
        with _lock:
            first = self._future is None
            if first:
                self._future = torch.futures.Future()
            # The call may have ended before anybody asked for its future.
            if first and self.ended:
                self._complete()
            return self._future


class _Background:
    """A thread that advances calls nobody waits for; it starts with the first of
    them."""

    # Seconds for which a new call is left to its caller: most are waited for at once.
    NAP = 2e-4
    LONGEST_NAP = 5e-3

    def __init__(self) -> None:
        # C++ may hold a call without its Python part and wait through it, so it has to
        # be kept until somebody has waited. Ordered by creation.
        self._works: dict[AsyncWork, None] = {}
        self._more = threading.Condition(_lock)
        self._thread: threading.Thread | None = None

    def add(self, work: AsyncWork) -> None:
        with _lock:
            self._works[work] = None
            # Let go of ended calls, unless C++ may still hold them.
            if (
                len(self._works) > 1024
                and _c10d._get_work_registry_size() == 0
            ):
                for ended in [
                    each for each in tuple(self._works)[:512] if each.ended
                ]:
                    del self._works[ended]
            if work.ended:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name=NAME
                )
                self._thread.start()
            self._more.notify()

    def forget(self, work: AsyncWork) -> None:
        self._works.pop(work, None)

    def _run(self) -> None:
        nap, looked = self.NAP, 0.0
        while True:
            # While calls follow each other, being woken would cost a caller more than
            # the naps do.
            time.sleep(nap)
            with _lock:
                pending = [work for work in self._works if not work.ended]
                # Nothing pending for a while: sleep until `add` wakes the thread.
                if not pending and nap >= self.LONGEST_NAP:
                    self._more.wait()
                    nap = self.NAP
                    continue
                lines = tuple(_lines.items()) if pending else ()
            moved = sum(world.move(line) for line, world in lines) > 0
            # Shorter naps while calls progress, longer ones while nothing moves.
            nap = self.NAP if moved else min(1.5 * nap, self.LONGEST_NAP)
            now = time.perf_counter()
            look = now > looked + LOOK_EVERY
            looked = now if look else looked
            for work in pending:
                if not work.end_if_over() and look:
                    self._examine(work, now)
            pending = []  # the last reference to a call may be its caller's

    def _examine(self, work: AsyncWork, now: float) -> None:
        """End a call that cannot complete, though nobody waits for it."""
        for part in [part for part in tuple(work.works) if not part.ended][:1]:
            part.world.examine(part.line, now - work.since)
            if part.line.error is not None and not part.ended:
                work.end(part.line.error)


_background = _Background()


# ---- one process group


class ShmProcessGroup:
    """One rank's side of a process group over shared memory."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, name: str
    ) -> None:
        self.name = name
        # torch needs a backend object; this one of its own refuses every call.
        options = _c10d.FakeProcessGroup.Options()
        options.error_on_collective = True
        self.backend = _c10d.FakeProcessGroup._create_internal(
            rank, size, options
        )
        _be_on_one_machine(store, rank, size)
        reserved = None
        if rank == 0:
            # 4 GiB of addresses for messages: a program may create very many groups.
            try:
                reserved = Reserved(size, heap=1 << 32)
            # The others wait for this key, so a failure is published as well.
            except CommMisuse as error:
                store.set("arena", json.dumps([str(error), None]))
                raise
            store.set(
                "arena", json.dumps([reserved.path, asdict(reserved.extent)])
            )
        path, extent = json.loads(store.get("arena"))
        if extent is None:
            raise CommMisuse(
                f"backend shm: rank 0 has no shared memory: {path}"
            )
        seconds = timeout.total_seconds()
        try:
            self.world = SharedWorld(
                path,
                Extent(**extent),
                rank,
                timeout=seconds,
                lines=_lines,
                lock=_lock,
            )
        except OSError as error:
            raise CommMisuse(
                f"backend shm: rank {rank} cannot open the memory of rank 0, {path} ({error}); "
                "all ranks must run as one user."
            ) from error
        # All ranks have mapped the arena, which lives on without a name.
        if reserved is not None:
            reserved.close()
        self._group = self.world.split(f"group {name}", [tuple(range(size))])
        # serializes calls of several threads
        self._order = threading.RLock()

    def leave(self) -> None:
        """Make no further calls. Waits for nobody, as the other ranks may be gone
        already."""
        with _lock:
            if _groups.get(self.name) is self:
                del _groups[self.name]
        self.world.leave()

    def call(
        self, operator: str, args: Sequence[Any], wait: bool
    ) -> dist.Work:
        """Execute one of torch's operators on this group."""
        # a profiler event, like those of torch's own backends
        with (
            self._order,
            torch._C._profiler._RecordFunctionFast(
                f"shm:{operator.strip('_')}"
            ),
        ):
            run = _Operators(self._group, wait)
            getattr(run, operator)(*args)
            # Synchronous: the kernel returns a work that has ended.
            if wait:
                run.finish()
                return _completed
        result = args[0] if isinstance(args[0], list) else [args[0]]
        work = AsyncWork(run.works, result, run.finish)
        work.end_if_over()
        _background.add(work)
        return work


_completed = AsyncWork((), [], None)
_completed.end()


class _Operators:
    """The implementations of torch's operators `c10d::*`, by name.

    Non-contiguous tensors are replaced by contiguous copies, and results are copied
    back at the end. Everything runs below autograd, as with torch's own backends:
    `data` shares neither history nor version counter with its tensor.
    """

    def __init__(self, group: SharedGroup, wait: bool) -> None:
        self.group, self.wait = group, wait
        self.works: list[Work] = []
        self._back: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        for x, flat in self._back:
            x.copy_(flat)

    def _into(self, x: Tensor) -> Tensor:
        """Return a contiguous tensor to write into, in place of `x`."""
        x = x.data
        if x.is_contiguous():
            return x
        flat = x.contiguous()
        self._back.append((x, flat))
        return flat

    def _copy_back(
        self, outs: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> None:
        for out, part in zip(outs, parts, strict=True):
            self._back.append((out.data, part.view_as(out)))

    def _begin(self, call: Call) -> None:
        check(self.group, call)
        if (
            call.kind == "all_reduce"
            and self.wait
            and self.group.small_all_reduce(call.x, call.op)
        ):
            return
        work = self.group.begin(call)
        if self.wait:
            work.wait()
        self.works.append(work)

    def allreduce_(
        self, xs: list[Tensor], op: Any, sparse: Any = None
    ) -> None:
        for x in xs:
            if x.is_sparse:
                self._sum_sparse(x, op)
            else:
                self._begin(Call("all_reduce", self._into(x), op=_op(op)))

    allreduce_coalesced_ = allreduce_

    def broadcast_(self, xs: list[Tensor], root: int, index: int) -> None:
        for x in xs:
            self._begin(Call("broadcast", self._into(x), at=root))

    def reduce_(
        self, xs: list[Tensor], op: Any, root: int, index: int
    ) -> None:
        for x in xs:
            self._begin(Call("reduce", self._into(x), op=_op(op), at=root))

    def allgather_into_tensor_coalesced_(
        self, outs: list[Tensor], xs: list[Tensor]
    ) -> None:
        for out, x in zip(outs, xs, strict=True):
            self._begin(Call("all_gather", _of(x), self._into(out)))

    def _allgather_base_(self, out: Tensor, x: Tensor) -> None:
        self.allgather_into_tensor_coalesced_([out], [x])

    def allgather_(self, outs: list[list[Tensor]], xs: list[Tensor]) -> None:
        for parts, x in zip(outs, xs, strict=True):
            # whole: (ranks, *x.shape), then one row into each output
            whole = x.new_empty((len(parts), *x.shape)).data
            self._copy_back(parts, list(whole))
            self._begin(Call("all_gather", _of(x), whole))

    def allgather_coalesced_(
        self, outs: list[list[Tensor]], xs: list[Tensor]
    ) -> None:
        # the inner lists here are per rank, not per tensor
        self.allgather_([list(parts) for parts in zip(*outs, strict=True)], xs)

    def reduce_scatter_tensor_coalesced_(
        self, outs: list[Tensor], xs: list[Tensor], op: Any
    ) -> None:
        for out, x in zip(outs, xs, strict=True):
            self._begin(
                Call("reduce_scatter", _of(x), self._into(out), op=_op(op))
            )

    def _reduce_scatter_base_(self, out: Tensor, x: Tensor, op: Any) -> None:
        self.reduce_scatter_tensor_coalesced_([out], [x], op)

    def reduce_scatter_(
        self, outs: list[Tensor], xs: list[list[Tensor]], op: Any
    ) -> None:
        self.reduce_scatter_tensor_coalesced_(
            outs, [_joined(parts) for parts in xs], op
        )

    def gather_(
        self, outs: list[list[Tensor]], xs: list[Tensor], root: int
    ) -> None:
        parts = (
            [self._into(out) for out in outs[0]]
            if self.group.rank == root
            else None
        )
        self._begin(Call("gather", _of(xs[0]), parts=parts, at=root))

    def scatter_(
        self, outs: list[Tensor], xs: list[list[Tensor]], root: int
    ) -> None:
        parts = [_of(x) for x in xs[0]] if self.group.rank == root else None
        self._begin(Call("scatter", self._into(outs[0]), parts=parts, at=root))

    def alltoall_(self, outs: list[Tensor], xs: list[Tensor]) -> None:
        # Lists of tensors travel as one flat tensor, cut by their sizes.
        whole = outs[0].new_empty(sum(out.numel() for out in outs))
        takes, sends = [out.numel() for out in outs], [x.numel() for x in xs]
        self._copy_back(outs, torch.split(whole, takes))
        self._all_to_all(whole, _joined(xs), takes, sends)

    def alltoall_base_(
        self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]
    ) -> None:
        self._all_to_all(self._into(out), _of(x), takes or None, sends or None)

    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        takes: list[int] | None,
        sends: list[int] | None,
    ) -> None:
        in_splits = equal_splits(self.group, x, sends, "in_splits")
        out_splits = equal_splits(self.group, out, takes, "out_splits")
        self._begin(
            Call(
                "all_to_all",
                x,
                out,
                in_splits=in_splits,
                out_splits=out_splits,
            )
        )

    def barrier(self, x: Tensor, devices: list[int]) -> None:
        self._begin(Call("barrier", NOTHING))

    def monitored_barrier_(self, *args: Any) -> None:
        raise CommMisuse(
            "backend shm has no monitored_barrier; use barrier, whose error after the timeout names "
            "the missing ranks."
        )

    def send(self, xs: list[Tensor], to: int, tag: int) -> None:
        for x in xs:
            self.group.begin(Call("send", _of(x), at=to), tag)

    def recv_(self, xs: list[Tensor], source: int, tag: int) -> None:
        for x in xs:
            self.works.append(
                self.group.begin(
                    Call("receive", self._into(x), at=source), tag
                )
            )

    def recv_any_source_(self, xs: list[Tensor], tag: int) -> None:
        self.recv_(xs, -1, tag)

    def _sum_sparse(self, x: Tensor, op: Any) -> None:
        """Sum sparse tensors, as DDP needs for embedding gradients."""
        if _op(op) != "sum":
            raise CommMisuse("backend shm: sparse tensors can only be summed.")
        n, part = self.group.size, x.detach().coalesce()
        # 1. The number of nonzero entries of each rank: (n)
        counts = torch.empty(n, dtype=torch.int64)
        self.group.begin(
            Call("all_gather", torch.tensor([part._nnz()]), counts)
        ).wait()
        # 2. Indices (n * rows, dims) and values, padded to the longest part.
        rows = int(counts.max())
        gathered = []
        for mine in (part.indices().T, part.values()):
            # zero rows, which add nothing, pad all parts to the same length
            padded = mine.new_zeros((rows, *mine.shape[1:]))
            padded[: len(mine)] = mine
            gathered.append(mine.new_empty((n * rows, *mine.shape[1:])))
            self.group.begin(Call("all_gather", padded, gathered[-1])).wait()
        # 3. `coalesce` adds the values of equal indices.
        total = torch.sparse_coo_tensor(
            gathered[0].T, gathered[1], x.shape
        ).coalesce()
        with (
            torch.no_grad(),
            _torch.autograd._unsafe_preserve_version_counter(x),
        ):
            x.copy_(total)


def _of(x: Tensor) -> Tensor:
    """Return a contiguous tensor for reading."""
    return x.data.contiguous()


def _joined(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([_of(x).view(-1) for x in xs])


def _op(op: Any) -> str:
    name = _OPS.get(op.op())
    if name is None:
        raise CommMisuse(
            f"backend shm has no reduction {dist.ReduceOp.RedOpType(op.op()).name}; there are "
            f"{', '.join(_OPS.values())}. For others gather the parts and reduce them."
        )
    return name


# ---- torch's operators

# Kept alive, because the kernels are removed with it.
_library: Any = None
# The CPU backend of each process group in this process; None for groups of other
# backends.
_known: "weakref.WeakKeyDictionary[Any, ShmProcessGroup | None]" = (
    weakref.WeakKeyDictionary()
)


def _install() -> None:
    """Register our kernels in front of torch's own, when the first group is created."""
    global _library
    if _library is not None:
        return
    _library = _torch.library.Library("c10d", "IMPL")
    for name in vars(_Operators):
        if not name.startswith("__") and hasattr(torch.ops.c10d, name):
            _library.impl(
                name, _kernel(name), "BackendSelect", with_keyset=True
            )


def _kernel(name: str) -> Callable[..., Any]:
    own = getattr(torch.ops.c10d, name).default
    # The signature is read once, when the kernel is made.
    schema = own._schema
    names = [argument.name for argument in schema.arguments]
    defaults = [argument.default_value for argument in schema.arguments]
    at = names.index("process_group")
    waits = names.index("async_op") if "async_op" in names else None
    takes_sparse = name == "allreduce_"

    def kernel(keyset: Any, *given: Any) -> Any:
        args = (*given, *defaults[len(given) :])
        # CPU tensors of one of our groups are ours; everything else is passed on.
        here = keyset.has(_Key.CPU) or (
            takes_sparse and keyset.has(_Key.SparseCPU)
        )
        group = _group_of(args[at]) if here else None
        if group is None:
            # Unlike calling a kernel directly, this releases the GIL, which gloo's
            # threads acquire while holding a lock that the call waits for.
            return own.redispatch(keyset & _BELOW, *args)
        # Without the process group, and up to async_op.
        passed = (*args[:at], *args[at + 1 : waits])
        work: Any = group.call(
            name, passed, waits is not None and not args[waits]
        )
        return (
            (args[0], work.boxed())
            if len(schema.returns) == 2
            else work.boxed()
        )

    return kernel


def _group_of(boxed: Any) -> ShmProcessGroup | None:
    """Return the shm group that a process group uses for CPU tensors, if any."""
    process_group = _dist.ProcessGroup.unbox(boxed)
    # Looked up once per group, as each call comes through here.
    try:
        return _known[process_group]
    except KeyError:
        pass
    group = _groups.get(process_group.group_name)
    # Ours by name, but torch may use another backend of it for CPU tensors.
    if (
        group is not None
        and process_group._get_backend(_CPU) is not group.backend
    ):
        group = None
    _known[process_group] = group
    if group is not None:
        weakref.finalize(process_group, group.leave).atexit = False
    return group


def _be_on_one_machine(store: Any, rank: int, size: int) -> None:
    """Refuse ranks that cannot share memory, on every rank, and name them."""
    store.set(f"host of {rank}", json.dumps(_host()))
    hosts = [json.loads(store.get(f"host of {i}")) for i in range(size)]
    for what, value in hosts[0].items():
        others = [i for i in range(size) if hosts[i][what] != value]
        if others:
            i = others[0]
            raise CommMisuse(
                f"backend shm: rank {', '.join(map(str, others))} "
                f"{'is' if len(others) == 1 else 'are'} in a different {what} than rank 0 "
                f"({hosts[i][what]}, and {value} for rank 0). The ranks of a group share memory: "
                "start them on one machine and in one container, or use gloo."
            )


def _host() -> dict[str, str]:
    """Return the properties that all ranks with shared memory have in common."""
    host = {"machine": "", "pid namespace": "", "container": ""}
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host["machine"] = f"boot {file.read().strip()}"
        host["pid namespace"] = os.readlink("/proc/self/ns/pid")
        shm = os.stat("/dev/shm")
        host["container"] = f"/dev/shm {shm.st_dev}:{shm.st_ino}"
    except OSError:
        pass  # not Linux, or no /proc
    return host


def _make(options: Any, _: Any) -> Any:
    """Create the backend that torch registers for a group's device."""
    if _dist.get_debug_level() == _dist.DebugLevel.DETAIL:
        raise CommMisuse(
            "backend shm: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends in checks over gloo that "
            "shm makes itself; set it to INFO, or use gloo."
        )
    _install()
    name = options.group_id
    before = _groups.get(name)
    # its process group was destroyed, and a new one has the same name
    if before is not None:
        before.leave()
    group = ShmProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        name,
    )
    with _lock:
        _groups[name] = group
    return group.backend


@atexit.register
def _leave_all() -> None:
    for group in tuple(_groups.values()):
        group.leave()


dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
