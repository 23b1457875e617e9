"""Shared memory as a backend of torch.distributed: `import phalanx.comm.shared` registers `shm`.

    dist.init_process_group("shm")   # or "cpu:shm,cuda:nccl"; all ranks on one machine

DDP, FSDP2 and DTensor then run on it as they are. Each process group has an arena of its own; the
group's first rank makes it, and the store tells the others where it is until all have mapped it.
This is for code that speaks torch.distributed; ours splits its wires from a `SharedWorld`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm.arena import Extent, Reserved
from phalanx.comm.base import CommMisuse, Work
from phalanx.comm.local import SharedWorld

__all__ = ["SharedGroup", "SharedWorld"]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Later(dist.Work):
    """Calls under way, as torch.distributed sees them. Who takes the future waits for it: DDP asks
    for it from a place where nobody could move the calls on later."""

    def __init__(self, works: Sequence[Work], result: Any, after: Callable[[], None]) -> None:
        super().__init__()
        self._works, self._result, self._after = works, result, after
        self._ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._ended:
            for work in self._works:
                work.wait()
            self._ended = True
            self._after()
        return True

    def is_completed(self) -> bool:
        return self._ended or all(work.done() for work in self._works)

    def is_success(self) -> bool:
        return self._ended

    def result(self) -> Any:
        self.wait()
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


class _Flat:
    """Contiguous stand-ins for tensors that are not; what came is copied back in the end."""

    def __init__(self) -> None:
        self._back: list[tuple[Tensor, Tensor]] = []

    def into(self, x: Tensor) -> Tensor:
        """For a tensor that is written to."""
        x = x.detach()
        if x.is_contiguous():
            return x
        flat = x.contiguous()
        self._back.append((x, flat))
        return flat

    def back(self) -> None:
        with torch.no_grad():
            for x, flat in self._back:
                x.copy_(flat)


def _of(x: Tensor) -> Tensor:
    """For a tensor that is only read."""
    return x.detach().contiguous()


# Its stubs know only how torch itself calls it, in every one of several ways.
_Group: Any = dist.ProcessGroup


class SharedGroup(_Group):  # type: ignore[misc]
    """A process group over shared memory. What is started progresses when it is waited for."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._names = ["", ""]
        reserved = None
        if rank == 0:
            # 4 GiB of addresses for letters: a program may make very many groups.
            reserved = Reserved(size, heap=1 << 32)
            store.set("arena", json.dumps([reserved.path, asdict(reserved.extent)]))
        path, extent = json.loads(store.get("arena"))
        self._world = SharedWorld(path, Extent(**extent), rank, timeout=timeout.total_seconds())
        if reserved is not None:
            reserved.close()
        self._wire = self._world.split("shm", [range(size)])

    def getBackendName(self) -> str:
        return "shm"

    # A group without one of torch's own backends in it keeps its name itself.

    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupDesc(self, description: str) -> None:
        self._names[1] = description

    def getGroupDesc(self) -> str:
        return self._names[1]

    def abort(self) -> None:
        self._world.fail(f"rank {self._world.rank} aborted its group;")

    def shutdown(self) -> None:
        """Leave. The others may be gone already, so nobody is waited for."""
        self._world.leave()

    # ---- collectives. torch 2.13 gives some a second name.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        flat, op = _Flat(), _op(opts)
        works = [self._wire.all_reduce(flat.into(x), op, wait=False) for x in tensors]
        return Later(works, tensors, flat.back)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        flat = _Flat()
        works = [self._wire.broadcast(flat.into(x), opts.rootRank, wait=False) for x in tensors]
        return Later(works, tensors, flat.back)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        flat, op = _Flat(), _op(opts)
        works = [self._wire.reduce(flat.into(x), opts.rootRank, op, wait=False) for x in tensors]
        return Later(works, tensors, flat.back)

    def all_gather_single_coalesced(
        self, outs: list[Tensor], xs: list[Tensor], opts: Any = None
    ) -> Any:
        flat = _Flat()
        works = [
            self._wire.all_gather(flat.into(out), _of(x), wait=False)
            for out, x in zip(outs, xs, strict=True)
        ]
        return Later(works, outs, flat.back)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([out], [x])

    _allgather_base = all_gather_single

    def allgather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any = None) -> Any:
        wholes = [x.new_empty((self._wire.size, *x.shape)) for x in xs]

        def hand_out() -> None:
            for parts, whole in zip(outs, wholes, strict=True):
                _copy_all(parts, whole)

        works = [
            self._wire.all_gather(whole, _of(x), wait=False)
            for whole, x in zip(wholes, xs, strict=True)
        ]
        return Later(works, outs, hand_out)

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], xs: list[Tensor], opts: Any
    ) -> Any:
        flat, op = _Flat(), _op(opts)
        works = [
            self._wire.reduce_scatter(flat.into(out), _of(x), op, wait=False)
            for out, x in zip(outs, xs, strict=True)
        ]
        return Later(works, outs, flat.back)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Any:
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outs: list[Tensor], xs: list[list[Tensor]], opts: Any) -> Any:
        wholes = [torch.cat([part.detach().reshape(-1) for part in parts]) for parts in xs]
        return self.reduce_scatter_single_coalesced(outs, wholes, opts)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> Any:
        flat = _Flat()
        work = self._wire.all_to_all(
            flat.into(out), _of(x), out_splits or None, in_splits or None, wait=False
        )
        return Later([work], out, flat.back)

    alltoall_base = all_to_all_single

    def alltoall(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        whole = torch.cat([x.detach().reshape(-1) for x in xs])
        came = whole.new_empty(sum(out.numel() for out in outs))
        sizes = [out.numel() for out in outs], [x.numel() for x in xs]
        work = self._wire.all_to_all(came, whole, *sizes, wait=False)
        return Later([work], outs, lambda: _copy_all(outs, torch.split(came, sizes[0])))

    def gather(self, outs: list[list[Tensor]], xs: list[Tensor], opts: Any) -> Any:
        flat = _Flat()
        parts = [flat.into(out) for out in outs[0]] if outs else None
        work = self._wire.gather(parts, _of(xs[0]), opts.rootRank, wait=False)
        return Later([work], outs, flat.back)

    def scatter(self, outs: list[Tensor], xs: list[list[Tensor]], opts: Any) -> Any:
        flat = _Flat()
        parts = [_of(x) for x in xs[0]] if xs else None
        work = self._wire.scatter(flat.into(outs[0]), parts, opts.rootRank, wait=False)
        return Later([work], outs, flat.back)

    def barrier(self, opts: Any = None) -> Any:
        return Later([self._wire.barrier(wait=False)], [], _Flat().back)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        _refuse(tag)
        return Later([self._wire.send(_of(x), to) for x in tensors], tensors, _Flat().back)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        _refuse(tag)
        flat = _Flat()
        works = [self._wire.receive(flat.into(x), source, wait=False) for x in tensors]
        return Later(works, tensors, flat.back)


def _copy_all(outs: Sequence[Tensor], parts: Any) -> None:
    with torch.no_grad():
        for out, part in zip(outs, parts, strict=True):
            out.copy_(part.view_as(out))


def _op(opts: Any) -> str:
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for name, op in _OPS.items():
        if wanted == op:
            return name
    raise CommMisuse(f"backend shm has no reduction {wanted}; there are {', '.join(_OPS)}.")


def _refuse(tag: int) -> None:
    if tag:
        raise CommMisuse(
            f"backend shm keeps what a pair sends in order and has no tags; tag {tag} was given."
        )


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> SharedGroup:
    return SharedGroup(store, rank, size, timeout)


dist.Backend.register_backend("shm", _group, devices=["cpu"])
