"""Shared memory as a backend of torch.distributed: `import phalanx.comm.shm.backend` registers `shm`.

    dist.init_process_group("shm")   # or "cpu:shm,cuda:nccl"; all ranks on one machine

DDP, FSDP2 and DTensor then run on it as they are. Each process group has an arena of its own; the
group's first rank makes it, and the store tells the others where it is until all have mapped it.

torch has no way to write a `Backend` in Python. So what is registered for a group's device is one of
torch's own that refuses every call. Kernels of torch's operators `c10d::*`, at the dispatch key where
a backend is selected, carry the call out if the group is one of these and pass on all others. The
profiler and dispatch modes stand in front of them and see the operators as with any backend.

This is for code that speaks torch.distributed; ours splits its groups from a `ShmWorld`.
"""

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.base import Call, CommError, CommMisuse, Work
from phalanx.comm.shm.arena import Extent, Reserved
from phalanx.comm.shm.little import Little
from phalanx.comm.shm.local import Ongoing, ShmGroup, ShmWorld
from phalanx.comm.shm.table import Done, Line, Table
from phalanx.comm.shm.watch import CommTimeout
from phalanx.layout.choices import SHM

__all__ = ["ShmProcessGroup", "ShmWorld"]

# Their stubs lack most of what is used here.
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

# Guards all groups of this process: whoever moves calls holds it, and nobody sleeps with it.
_lock = threading.RLock()
_groups: "dict[str, ShmProcessGroup]" = {}
# All lines with calls, of all groups.
_busy: "dict[Line, ShmWorld]" = {}

# Seconds that the thread leaves a new call to whoever made it: most are waited for at once.
_NAP = 2e-4


# ---- calls under way


class Later(dist.Work):
    """A call under way, as torch.distributed sees it.

    Who waits for it moves it on, and the calls of all other groups of this process. Calls that
    nobody waits for are moved by a thread, so that futures complete by themselves.
    """

    def __init__(
        self,
        group: "ShmProcessGroup",
        works: Sequence[Work],
        result: Any,
        after: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group: ShmProcessGroup | None = group
        self._works = [work for work in works if isinstance(work, Ongoing)]
        self._result, self._after = result, after
        self._from = -1
        self._error: CommError | None = None
        self._future: Any = None
        self.ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """With a timeout it raises when that has passed; the call goes on and can be waited for."""
        _progress.kept.pop(self, None)
        if not self.ended:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            with _progress.somebody_waits():
                self.drive(seconds if seconds > 0 else None)
        if self._error is not None:
            raise self._error
        return True

    def drive(self, limit: float | None = None, quiet: bool = False) -> None:
        """Move it to its end, good or bad."""
        deadline = None if limit is None else time.monotonic() + limit
        try:
            for work in tuple(self._works):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                work.wait(left, quiet)
        except CommTimeout:
            raise
        except CommError as error:
            self.end(error)
            return
        self.end()

    def over(self) -> bool:
        """Whether it has only to be ended."""
        return all(work.ended for work in self._works)

    def end(self, error: CommError | None = None) -> None:
        """What comes after the transfers, once."""
        with _lock:
            if self.ended:
                return
            if error is None:
                self._after()
                for work in self._works:
                    self._from = work.source
            self._error, self.ended = error, True
            _progress.pending.pop(self, None)
            self._works, self._after, self._group = [], _nothing, None
            future = self._future
        # Not with the lock: what is chained to it may make calls.
        if future is not None:
            _settle(future, self._result, error)

    def is_completed(self) -> bool:
        _progress.move()
        if self.ended:
            _progress.kept.pop(self, None)
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
        return self._from

    _source_rank = source_rank

    def get_future(self) -> Any:
        """It completes also if nobody waits for the call."""
        with _lock:
            _progress.kept.pop(self, None)
            if self._future is None:
                self._future = torch.futures.Future()
                if self.ended:
                    _settle(self._future, self._result, self._error)
            return self._future


def _nothing() -> None:
    """What comes after most calls."""


def _settle(future: Any, result: Any, error: CommError | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class _Progress:
    """Moves the calls that nobody waits for, in a thread that starts with the first of them."""

    def __init__(self) -> None:
        self.pending: OrderedDict[Later, None] = OrderedDict()
        # C++ may hold a call without its Python part, and waits through that: it has to stay until
        # somebody has waited.
        self.kept: OrderedDict[Later, None] = OrderedDict()
        self.last = threading.local()
        self._waiting = 0
        self._more = threading.Condition(_lock)
        self._thread: threading.Thread | None = None

    def add(self, work: Later) -> None:
        with _lock:
            self.kept[work] = None
            if len(self.kept) > 1024 and _c10d._get_work_registry_size() == 0:
                oldest = next(iter(self.kept))
                if oldest.ended:
                    del self.kept[oldest]
            if work.ended:
                return
            self.pending[work] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=SHM)
                self._thread.start()
            self._more.notify()

    @contextlib.contextmanager
    def somebody_waits(self) -> Iterator[None]:
        """While a thread waits it moves everything, and this one does not come in between."""
        with _lock:
            self._waiting += 1
        try:
            yield
        finally:
            with _lock:
                self._waiting -= 1
                if self.pending and not self._waiting:
                    self._more.notify()

    def idle(self) -> bool:
        """Whether this is the thread and somebody else moves the calls anyway."""
        return self._waiting > 0 and threading.current_thread() is self._thread

    def move(self) -> bool:
        """Move the calls of all groups; True if something moved."""
        moved = False
        with _lock:
            for line, world in tuple(_busy.items()):
                moved |= world.move(line)
            ended = [work for work in self.pending if work.over()] if moved else []
        for work in ended:
            work.end()
        return moved

    def _run(self) -> None:
        naps = 0
        while True:
            # To be woken costs a caller more than the naps do while calls follow each other.
            time.sleep(_NAP)
            naps += 1
            with _lock:
                while naps > 25 and (self._waiting or not self.pending):
                    self._more.wait()
                    naps = 0
                work = None if self._waiting else next(iter(self.pending), None)
            if work is not None:
                naps = 0
                work.drive(quiet=True)
            del work


_progress = _Progress()


class _World(ShmWorld):
    """The ranks of one process group. It moves with all others of this process."""

    def __init__(self, path: str, extent: Extent, rank: int, timeout: timedelta) -> None:
        super().__init__(path, extent, rank, timeout=timeout.total_seconds(), busy=_busy)

    def advance(self) -> bool:
        return not _progress.idle() and _progress.move()

    def begin(self, line: Line, call: Call) -> Done:
        with _lock:
            return super().begin(line, call)

    def move(self, line: Line) -> bool:
        # Without the lock, since who waits looks often; `ready` of letters reads them already.
        if (line.collective and not line.ready()) or _progress.idle():
            return False
        with _lock:
            return super().move(line)

    def wait_here(self, number: int, table: Table) -> None:
        with _progress.somebody_waits():
            super().wait_here(number, table)

    def try_little(self, little: Little, x: Tensor, op: str, table: Table) -> bool:
        with _lock:
            pass  # the thread may be about to end the last call of this table
        return super().try_little(little, x, op, table)

    def leave(self) -> None:
        with _lock:
            for line in [line for line, world in _busy.items() if world is self]:
                del _busy[line]
        super().leave()


# ---- one process group


class ShmProcessGroup:
    """One rank's part in a process group over shared memory: its calls, by the names of `c10d`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self.name = name
        options = _c10d.FakeProcessGroup.Options()
        options.error_on_collective = True
        self.backend = _c10d.FakeProcessGroup._create_internal(rank, size, options)
        _be_on_one_machine(store, rank, size)
        reserved = None
        if rank == 0:
            # 4 GiB of addresses for letters: a program may make very many groups.
            try:
                reserved = Reserved(size, heap=1 << 32)
            except CommMisuse as error:
                store.set("arena", json.dumps([str(error), None]))
                raise
            store.set("arena", json.dumps([reserved.path, asdict(reserved.extent)]))
        path, extent = json.loads(store.get("arena"))
        if extent is None:
            raise CommMisuse(f"backend shm: rank 0 has no shared memory: {path}")
        try:
            self.world = _World(path, Extent(**extent), rank, timeout)
        except OSError as error:
            raise CommMisuse(
                f"backend shm: rank {rank} cannot open the memory of rank 0, {path} ({error}); "
                "all ranks run as one user."
            ) from error
        if reserved is not None:
            reserved.close()
        group = self.world.split(f"group {name}", [range(size)])
        assert isinstance(group, ShmGroup)
        self._group = group
        # Calls of several threads are made one after another.
        self._order = threading.RLock()

    def leave(self) -> None:
        """Make no further call. The others may be gone already, so nobody is waited for."""
        with _lock:
            if _groups.get(self.name) is self:
                del _groups[self.name]
        self.world.leave()

    def call(self, begin: Callable[..., Any], args: Sequence[Any], wait: bool) -> Later:
        """Make a call; `begin` is one of the methods below."""
        # An event of the profiler, as torch's own backends make one.
        with self._order, torch._C._profiler._RecordFunctionFast(f"shm:{begin.__name__}"):
            flat = _Flat(wait)
            works, result = begin(self, flat, *args)
            later = Later(self, works, result, flat.back)
            if later.over():
                later.end()
            elif wait:
                with _progress.somebody_waits():
                    later.drive()
        if wait and later._error is not None:
            raise later._error
        # Until the caller has its own reference to it.
        _progress.last.work = later
        if not wait:
            _progress.add(later)
        return later

    # ---- the calls: their works, and the result of their future

    def all_reduce(self, flat: "_Flat", tensors: list[Tensor], op: Any) -> Any:
        name = _op(op)
        works = [
            self._group.all_reduce(x, name, wait=False)
            for x in map(flat.into, tensors)
            if not (flat.waits and self._group.all_reduce_little(x, name))
        ]
        return works, tensors

    def broadcast(self, flat: "_Flat", tensors: list[Tensor], root: int, index: int = 0) -> Any:
        return [self._group.broadcast(flat.into(x), root, wait=False) for x in tensors], tensors

    def reduce(
        self, flat: "_Flat", tensors: list[Tensor], op: Any, root: int, index: int = 0
    ) -> Any:
        name = _op(op)
        return [self._group.reduce(flat.into(x), root, name, wait=False) for x in tensors], tensors

    def all_gather_into(self, flat: "_Flat", outs: list[Tensor], xs: list[Tensor]) -> Any:
        pairs = zip(outs, xs, strict=True)
        works = [self._group.all_gather(flat.into(out), _of(x), wait=False) for out, x in pairs]
        return works, outs

    def all_gather(self, flat: "_Flat", outs: list[list[Tensor]], xs: list[Tensor]) -> Any:
        works = []
        for parts, x in zip(outs, xs, strict=True):
            whole = flat.parts(parts, x)
            works.append(self._group.all_gather(whole, _of(x), wait=False))
        return works, outs

    def all_gather_coalesced(
        self, flat: "_Flat", outs: list[list[Tensor]], xs: list[Tensor]
    ) -> Any:
        # One list for each rank here, and not for each tensor.
        return self.all_gather(flat, [list(parts) for parts in zip(*outs, strict=True)], xs)

    def reduce_scatter_from(
        self, flat: "_Flat", outs: list[Tensor], xs: list[Tensor], op: Any
    ) -> Any:
        name, pairs = _op(op), zip(outs, xs, strict=True)
        works = [
            self._group.reduce_scatter(flat.into(out), _of(x), name, wait=False) for out, x in pairs
        ]
        return works, outs

    def reduce_scatter(
        self, flat: "_Flat", outs: list[Tensor], xs: list[list[Tensor]], op: Any
    ) -> Any:
        return self.reduce_scatter_from(flat, outs, [_joined(parts) for parts in xs], op)

    def gather(self, flat: "_Flat", outs: list[list[Tensor]], xs: list[Tensor], root: int) -> Any:
        parts = [flat.into(out) for out in outs[0]] if self._group.rank == root else None
        return [self._group.gather(parts, _of(xs[0]), root, wait=False)], outs

    def scatter(self, flat: "_Flat", outs: list[Tensor], xs: list[list[Tensor]], root: int) -> Any:
        parts = [_of(x) for x in xs[0]] if self._group.rank == root else None
        return [self._group.scatter(flat.into(outs[0]), parts, root, wait=False)], outs

    def all_to_all(self, flat: "_Flat", outs: list[Tensor], xs: list[Tensor]) -> Any:
        came = outs[0].new_empty(sum(out.numel() for out in outs))
        sizes = [out.numel() for out in outs], [x.numel() for x in xs]
        flat.copy(outs, torch.split(came, sizes[0]))
        return [self._group.all_to_all(came, _joined(xs), *sizes, wait=False)], outs

    def all_to_all_into(
        self, flat: "_Flat", out: Tensor, x: Tensor, takes: list[int], sends: list[int]
    ) -> Any:
        work = self._group.all_to_all(
            flat.into(out), _of(x), takes or None, sends or None, wait=False
        )
        return [work], [out]

    def barrier(self, flat: "_Flat", *of_others: Any) -> Any:
        return [self._group.barrier(wait=False)], []

    def send(self, flat: "_Flat", tensors: list[Tensor], to: int, tag: int) -> Any:
        return [self._group.send_tagged(_of(x), to, tag) for x in tensors], tensors

    def recv(self, flat: "_Flat", tensors: list[Tensor], source: int, tag: int) -> Any:
        return [self._group.receive_tagged(flat.into(x), source, tag) for x in tensors], tensors

    def recv_any_source(self, flat: "_Flat", tensors: list[Tensor], tag: int) -> Any:
        return self.recv(flat, tensors, -1, tag)

    def all_reduce_sparse(self, flat: "_Flat", tensors: list[Tensor], op: Any) -> Any:
        """The sum of sparse tensors, as DDP asks for of the gradient of an embedding."""
        if _op(op) != "sum":
            raise CommMisuse("backend shm: sparse tensors can be summed and not reduced otherwise.")
        for x in tensors:
            part = x.detach().coalesce()
            counts = torch.empty(self._group.size, dtype=torch.int64)
            self._group.all_gather(counts, torch.tensor([part._nnz()]))
            wide = int(counts.max())
            # Rows of zeros, which add nothing, make them all as long as the longest.
            at = _padded(part.indices().T, wide)
            values = _padded(part.values(), wide)
            all_at = at.new_empty((self._group.size * wide, *at.shape[1:]))
            all_values = values.new_empty((self._group.size * wide, *values.shape[1:]))
            self._group.all_gather(all_at, at)
            self._group.all_gather(all_values, values)
            total = torch.sparse_coo_tensor(all_at.T, all_values, x.shape).coalesce()
            with torch.no_grad(), _torch.autograd._unsafe_preserve_version_counter(x):
                x.copy_(total)
        return [], tensors


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


class _Flat:
    """Contiguous stand-ins for tensors that are not; what came is copied back in the end.

    All of it goes below autograd, as with torch's own backends: `data` shares neither history nor
    version with its tensor. `waits`: the call is waited for before anything else.
    """

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self._back: list[tuple[Tensor, Tensor]] = []

    def into(self, x: Tensor) -> Tensor:
        """For a tensor that is written to."""
        x = x.data
        if x.is_contiguous():
            return x
        flat = x.contiguous()
        self._back.append((x, flat))
        return flat

    def parts(self, outs: Sequence[Tensor], x: Tensor) -> Tensor:
        """For a list of tensors that are written to as one."""
        whole = x.new_empty((len(outs), *x.shape)).data
        self.copy(outs, list(whole))
        return whole

    def copy(self, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Copy the parts to tensors in the end."""
        for out, part in zip(outs, parts, strict=True):
            self._back.append((out.data, part.view_as(out)))

    def back(self) -> None:
        for x, flat in self._back:
            x.copy_(flat)


def _of(x: Tensor) -> Tensor:
    """For a tensor that is only read."""
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


def _no_monitored_barrier(*args: Any) -> Any:
    raise CommMisuse(
        "backend shm has no monitored_barrier; use barrier, whose error after the timeout names the "
        "ranks that have not come."
    )


# Of each operator: the call, and what it passes of the operator's arguments after the group.
_KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": lambda xs, op, sparse: (ShmProcessGroup.all_reduce, (xs, op)),
    "allreduce_coalesced_": lambda xs, op: (ShmProcessGroup.all_reduce, (xs, op)),
    "broadcast_": lambda xs, root, i: (ShmProcessGroup.broadcast, (xs, root, i)),
    "reduce_": lambda xs, op, root, i: (ShmProcessGroup.reduce, (xs, op, root, i)),
    "allgather_": lambda outs, xs: (ShmProcessGroup.all_gather, (outs, xs)),
    "allgather_coalesced_": lambda outs, xs: (ShmProcessGroup.all_gather_coalesced, (outs, xs)),
    "_allgather_base_": lambda out, x: (ShmProcessGroup.all_gather_into, ([out], [x])),
    "allgather_into_tensor_coalesced_": lambda outs, xs: (ShmProcessGroup.all_gather_into, (outs, xs)),
    "reduce_scatter_": lambda outs, xs, op: (ShmProcessGroup.reduce_scatter, (outs, xs, op)),
    "_reduce_scatter_base_": lambda out, x, op: (
        ShmProcessGroup.reduce_scatter_from, ([out], [x], op)
    ),
    "reduce_scatter_tensor_coalesced_": lambda outs, xs, op: (
        ShmProcessGroup.reduce_scatter_from, (outs, xs, op)
    ),
    "gather_": lambda outs, xs, root: (ShmProcessGroup.gather, (outs, xs, root)),
    "scatter_": lambda outs, xs, root: (ShmProcessGroup.scatter, (outs, xs, root)),
    "alltoall_": lambda outs, xs: (ShmProcessGroup.all_to_all, (outs, xs)),
    "alltoall_base_": lambda out, x, takes, sends: (
        ShmProcessGroup.all_to_all_into, (out, x, takes, sends)
    ),
    "monitored_barrier_": _no_monitored_barrier,
    "barrier": lambda x, ids: (ShmProcessGroup.barrier, ()),
    "send": lambda xs, to, tag: (ShmProcessGroup.send, (xs, to, tag)),
    "recv_": lambda xs, source, tag: (ShmProcessGroup.recv, (xs, source, tag)),
    "recv_any_source_": lambda xs, tag: (ShmProcessGroup.recv_any_source, (xs, tag)),
}  # fmt: skip

# Kept, since the kernels go with it.
_library: Any = None
# What each process group of this process has on the CPU, None for those of other backends.
_known: "weakref.WeakKeyDictionary[Any, ShmProcessGroup | None]" = weakref.WeakKeyDictionary()


def _install() -> None:
    """Put our kernels before torch's own. Called when the first group is made."""
    global _library
    if _library is not None:
        return
    _library = _torch.library.Library("c10d", "IMPL")
    for name, meaning in _KERNELS.items():
        _library.impl(name, _kernel(name, meaning), "BackendSelect", with_keyset=True)


def _kernel(name: str, meaning: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(torch.ops.c10d, name).default
    schema = own._schema
    names = [argument.name for argument in schema.arguments]
    defaults = [argument.default_value for argument in schema.arguments]
    at = names.index("process_group")
    waits = names.index("async_op") if "async_op" in names else None

    def kernel(keyset: Any, *given: Any) -> Any:
        args = (*given, *defaults[len(given) :])
        sparse = name == "allreduce_" and keyset.has(_Key.SparseCPU)
        group = _group_of(args[at]) if sparse or keyset.has(_Key.CPU) else None
        if group is None:
            # Unlike the call of a kernel, this releases the interpreter's lock, which gloo's threads
            # take while they hold the one that a call waits for.
            return own.redispatch(keyset & _BELOW, *args)
        call, passed = meaning(*args[:at], *args[at + 1 : waits])
        if sparse:
            call = ShmProcessGroup.all_reduce_sparse
        work = group.call(call, passed, waits is not None and not args[waits])
        return (args[0], work.boxed()) if len(schema.returns) == 2 else work.boxed()

    return kernel


def _group_of(boxed: Any) -> ShmProcessGroup | None:
    """The shm group that a process group has for CPU tensors, if it has one."""
    process_group = _dist.ProcessGroup.unbox(boxed)
    try:
        return _known[process_group]
    except KeyError:
        pass
    group = _groups.get(process_group.group_name)
    if group is not None and process_group._get_backend(_CPU) is not group.backend:
        group = None
    _known[process_group] = group
    if group is not None:
        weakref.finalize(process_group, group.leave).atexit = False
    return group


def _be_on_one_machine(store: Any, rank: int, size: int) -> None:
    """Refuse ranks that cannot share memory, on every rank and by name."""
    store.set(f"place of {rank}", json.dumps(_where()))
    places = [json.loads(store.get(f"place of {i}")) for i in range(size)]
    for what, value in places[0].items():
        others = [i for i in range(size) if places[i][what] != value]
        if others:
            i = others[0]
            raise CommMisuse(
                f"backend shm: rank {', '.join(map(str, others))} "
                f"{'is' if len(others) == 1 else 'are'} in another {what} than rank 0 "
                f"({places[i][what]}, and {value} for rank 0). The ranks of a group share memory: "
                "start them on one machine and in one container, or use gloo."
            )


def _where() -> dict[str, str]:
    """What ranks that share memory have in common."""
    place = {"machine": "", "pid namespace": "", "container": ""}
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            place["machine"] = f"boot {file.read().strip()}"
        place["pid namespace"] = os.readlink("/proc/self/ns/pid")
        shm = os.stat("/dev/shm")
        place["container"] = f"/dev/shm {shm.st_dev}:{shm.st_ino}"
    except OSError:
        pass  # no Linux, or no /proc
    return place


def _make(options: Any, _: Any) -> Any:
    """What torch registers for a group's device."""
    if _dist.get_debug_level() == _dist.DebugLevel.DETAIL:
        raise CommMisuse(
            "backend shm: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends in checks over gloo that "
            "shm makes itself; set it to INFO, or use gloo."
        )
    _install()
    name = options.group_id
    before = _groups.get(name)
    if before is not None:  # its process group was destroyed and another one has its name
        before.leave()
    group = ShmProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, name
    )
    with _lock:
        _groups[name] = group
    return group.backend


def _leave_all() -> None:
    for group in tuple(_groups.values()):
        group.leave()


atexit.register(_leave_all)
dist.Backend.register_backend(SHM, _make, extended_api=True, devices=["cpu"])
