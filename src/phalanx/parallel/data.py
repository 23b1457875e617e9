"""Data parallelism by one mechanism: a unit's weights and gradients in flat buffers.

DDP, ZeRO-1, 2, 3 and HSDP share this code. They differ in the number of shards of a
unit, and in the places of G, D and S in the program. The gathered buffer *is* the
weights: parameters are views of it, and their gradients are views of the flat gradient.
Only gradients that go to no other rank are left to autograd: see `PlainUnit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torch_shm.settle import HALVES

from ..comm import Work
from .groups import UnitGroups
from .pool import BufferPool, storage_of
from .products import Matmul, Place
from .tensor import Weight
from .works import ChainedWork, WorkGroup


@dataclass(frozen=True)
class Precision:
    """The dtypes of computing, of stored weights, and of gradient sums.

    `matmul` multiplies by the weights of blocks; without it torch does, in the dtype
    `compute`.
    """

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    matmul: Matmul | None = None


class Segment(NamedTuple):
    """A run of the flat order whose weights are updated alike.

    Runs are the same on all ranks that hold copies. A fused kernel rounds the last few
    elements of a run differently from the rest, so copies in runs of different lengths
    would drift apart.
    """

    start: int
    stop: int
    adds: str
    decay: bool
    rate: float
    matrices: bool = False  # matrices that the optimizer updates separately


class Entry(NamedTuple):
    """The part of a weight that lies in this rank's shard.

    Elements `start` to `stop` of the weight, as this rank of tp holds it and flattened,
    begin at `offset` of the shard.
    """

    weight: Weight
    start: int
    stop: int
    offset: int


class UnitBytes(NamedTuple):
    """The sizes in bytes of a unit's buffers on one rank, whether allocated now or not."""

    home: int  # this rank's shard in master precision, always allocated
    weights: int  # the whole weights; 0 if the home is all of them
    shared: int  # bytes of the home that lie inside the whole weights
    beside: int  # other bytes, always allocated
    gradient: int  # the whole gradient
    gradient_shard: int  # this rank's shard of it
    gradient_home: int = (
        0  # the whole gradient, where it has one place for good
    )


class Unit:
    """The weights of one piece on one rank.

    A unit has a home (this rank's shard, in master precision), the weights (whole,
    views of a flat buffer, gathered or dropped) and the gradient. A piece that is
    trained in part has two units: the unit of its `frozen` weights has no gradient and
    keeps them in the compute dtype.
    """

    plain = False  # True: gradients stay autograd's own
    scaled = False  # True: gathers need scales agreed on by the shards, see `narrow.py`
    # of weights gathered in 8 bits
    scales: Mapping[str, Tensor] = MappingProxyType({})
    beside = 0  # bytes always allocated besides the home and the buffer

    def __init__(
        self,
        number: int,
        weights: Sequence[Weight],
        groups: UnitGroups,
        pool: BufferPool,
        precision: Precision,
        *,
        resident: bool,
        at_host: bool = False,
        replicas_apart: bool = False,
        frozen: bool = False,
        piece: int = -1,  # if it is not the unit's number: see `Model.unit_of`
    ) -> None:
        self.piece = piece if piece >= 0 else number
        if frozen:  # no update adds to them, so they need no wider master copy
            precision = replace(precision, master=precision.compute)
        self.number, self.groups, self.pool, self.precision = (
            number,
            groups,
            pool,
            precision,
        )
        self.frozen = frozen
        # the program sums over replicas in an operation of its own
        self.replicas_apart = replicas_apart
        # Weights summed apart lie together, and among these the decayed ones come
        # first. The order must not differ between tp ranks, so it cannot depend on
        # `counted` for instance: see `Segment`.
        self.order = sorted(
            weights,
            key=lambda w: (w.adds, w.rate, not w.decay, w.local == w.shape),
        )
        self.offsets: list[int] = []
        total = 0
        for weight in self.order:
            self.offsets.append(total)
            total += self._room(weight)
        self.used = total
        shards = groups.gather.size
        # No other rank adds to this gradient: its memory serves activations in the next
        # forward.
        self.alone = groups.reduce.size == groups.replica.size == 1
        # Equal parts: zeros behind `used` fill up the end.
        divides = self._divisor(groups)
        self.numel = -(-total // divides) * divides
        self.part = self.numel // shards
        self.start = self.part * groups.gather.rank
        # Made once: their data becomes a view of whichever buffer holds the weights.
        self.parameters = {
            w.name: nn.Parameter(
                torch.empty(0, device=pool.device), requires_grad=not frozen
            )
            for w in self.order
        }
        # Shapes alone: the views of a flat buffer are cut by them.
        self._like = [torch.empty(w.local, device="meta") for w in self.order]
        self._matrices = {w.name for w in self.order if len(w.shape) == 2}
        # Autograd adds to a gradient whose memory holds no zeros yet; see `open`.
        for name in self._matrices if not (frozen or self.plain) else ():
            parameter: Any = self.parameters[name]  # its stubs are not typed
            parameter.register_hook(partial(self._before_adding, name))
        # With the home on the host, master weights and the optimizer's state stay
        # there. A gather or a refresh brings the compute copy. Without a GPU this is a
        # copy too, so the path is tested.
        self.buffer: Tensor | None = None  # the whole weights
        self.full: Tensor | None = (
            None  # the whole gradient, open for contributions
        )
        # Weights without a contribution yet: their gradient's memory is uninitialized.
        self.fresh: set[str] = set()
        # this rank's shards, summed over the shards alone
        self.parts: list[Tensor] = []
        self.gradient: Tensor | None = (
            None  # this rank's shard of the gradient, summed
        )
        self.resident, self.at_host = resident, at_host
        self.loaded = (
            False  # True: the host's shard has been copied into the buffer
        )
        # True if the home is a run of the whole weights.
        self.home_inside = inside = (
            resident and not at_host and self.dtype == precision.master
        )
        self.same = inside and shards == 1
        if at_host and pool.device.type != "cpu":
            pinned = pool.device.type == "cuda"
            self.home = torch.zeros(
                self.part, dtype=precision.master, pin_memory=pinned
            )
        elif inside:
            # The home is a run of the whole weights, and a gather leaves it in place.
            whole = (
                pool.empty(self.numel, precision.master)
                if self.same
                else self._new_buffer()
            )
            self._bind(whole.zero_())
            self.home = whole[self.start : self.start + self.part]
        else:
            self.home = pool.empty(self.part, precision.master).zero_()
        if resident and not inside:
            self._bind(self._new_buffer())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole weights."""
        return self.precision.compute

    @property
    def bytes(self) -> UnitBytes:
        """The sizes in bytes of this unit's buffers."""
        home = self.part * self.precision.master.itemsize
        width = 0 if self.frozen else self.precision.reduce.itemsize
        return UnitBytes(
            home=home,
            weights=0 if self.same else self.numel * self.dtype.itemsize,
            shared=home if self.home_inside and not self.same else 0,
            beside=self.beside,
            gradient=self.numel * width,
            gradient_shard=self.part * width,
        )

    # ---- the flat order

    def _room(self, weight: Weight) -> int:
        """The elements of the flat order that a weight occupies."""
        return numel_of(weight)

    def _divisor(self, groups: UnitGroups) -> int:
        """A divisor of the elements of the flat order."""
        return groups.gather.size

    def segments(self, *, matrices: bool = False) -> list[Segment]:
        """The flat order in runs that are updated alike, `matrices` apart if asked."""
        runs: list[Segment] = []
        for weight, offset in zip(self.order, self.offsets, strict=True):
            alike = (
                weight.adds,
                weight.decay,
                weight.rate,
                matrices and bool(weight.matrices),
            )
            one = Segment(offset, offset + self._room(weight), *alike)
            # A plain unit has one gradient for each weight, so it joins no runs.
            if runs and runs[-1][2:] == one[2:] and not self.plain:
                one = Segment(runs.pop().start, *one[1:])
            runs.append(one)
        return runs

    def own_segments(self, *, matrices: bool = False) -> list[Segment]:
        """The segments of this rank's shard, counted from its start."""
        stop = self.start + self.part
        # Clip the runs to the shard, then count from its start.
        clipped = (
            s._replace(start=max(s.start, self.start), stop=min(s.stop, stop))
            for s in self.segments(matrices=matrices)
        )
        return [
            s._replace(start=s.start - self.start, stop=s.stop - self.start)
            for s in clipped
            if s.start < s.stop
        ]

    def entries(self) -> Iterator[Entry]:
        """Yield the part of each weight that lies in this rank's shard."""
        for weight, offset in zip(self.order, self.offsets, strict=True):
            start = max(offset, self.start)
            stop = min(offset + numel_of(weight), self.start + self.part)
            if start < stop:
                yield Entry(
                    weight, start - offset, stop - offset, start - self.start
                )

    @property
    def moved(self) -> int:
        """The elements of this rank's shard that belong to matrices sent to owners."""
        matrices = (
            e
            for e in self.entries()
            if e.weight.matrices and self.groups.matrices
        )
        return sum(each.stop - each.start for each in matrices)

    @property
    def counts_norm(self) -> bool:
        """True if this rank's gradient counts in the gradient norm, not a replica's."""
        return self.groups.replica.rank == 0

    @cached_property
    def counted_runs(self) -> list[slice]:
        """The runs of this rank's shard that it counts in the gradient norm."""
        runs: list[slice] = []
        for weight, start, stop, offset in self.entries():
            if weight.counted and not weight.rate:
                end = offset + stop - start
                # Neighbouring weights join into one run, so the norm needs few kernels.
                joins = bool(runs) and runs[-1].stop == offset
                runs.append(slice(runs.pop().start if joins else offset, end))
        return runs

    # ---- weights

    def bring_up(self) -> None:
        """Complete the weights after homes are drawn or read; all ranks call it."""
        self.refresh()
        self.agree_scales().wait()
        if self.resident and self.groups.gather.size > 1:
            self.gather().wait()

    def agree_scales(self) -> Work:
        """Start agreeing with the other shards on scales of weights in 8 bits."""
        return Work()

    def gather(self) -> Work:
        """Start gathering the whole weights. They are readable after the work's wait."""
        if self.at_host and not self.loaded:
            self.load()()
        self.loaded = False
        buffer = self._take()
        if self.at_host:
            part = buffer[self.start : self.start + self.part]
        else:
            # Otherwise the shard is rounded to the compute dtype on the way.
            part = self.home.to(
                self.pool.device, self.precision.compute, non_blocking=True
            )
        # `still`: the home changes only in an update. An update follows the sum of this
        # unit's gradient over the same ranks, which no rank reaches before it has these
        # weights. A buffer may change sooner.
        still = not self.at_host
        return self.groups.gather.all_gather(
            buffer, part, still=still, wait=False
        )

    def load(self) -> Callable[[], object]:
        """Take a buffer; return the copy of the host's shard into it, for a gather."""
        self.loaded = True
        part = self._take()[self.start : self.start + self.part]
        return lambda: part.copy_(self.home, non_blocking=True)

    def _take(self) -> Tensor:
        if self.buffer is None:
            self._bind(self._new_buffer())
        assert self.buffer is not None
        return self.buffer

    def storage(self) -> int:
        """The identity of the weights' buffer, or 0 after it is dropped."""
        return 0 if self.buffer is None else storage_of(self.buffer)

    def drop(self) -> None:
        """Return the weights' buffer to the pool; no view may remain (`pieces.py`)."""
        assert self.buffer is not None, (
            f"unit {self.number} is dropped and was not gathered"
        )
        # Keep the shape, without memory: a gradient may be bound while the weights are
        # away.
        nothing = torch.empty(
            (), dtype=self.buffer.dtype, device=self.buffer.device
        )
        for weight in self.order:
            self.parameters[weight.name].data = nothing.expand(weight.local)
        self.pool.give(self.buffer)
        self.buffer = None

    def refresh(self) -> None:
        """Copy an update into weights that no gather brings again."""
        # A rank alone in its group copies its home; others wait for a gather.
        if (
            self.buffer is not None
            and not self.same
            and self.groups.gather.size == 1
        ):
            self.buffer.copy_(self.home)

    def _new_buffer(self) -> Tensor:
        return self.pool.take(self.numel, self.dtype)

    def _bind(self, buffer: Tensor) -> None:
        # `p.data = view`: new Parameters around views, or writes through a detached
        # buffer, would share the version counter, and a later gather would raise
        # "modified by an inplace operation".
        self.buffer = buffer
        for parameter, view in zip(
            self.parameters.values(), self._views(buffer), strict=True
        ):
            parameter.data = view

    def _views(self, flat: Tensor) -> Sequence[Tensor]:
        """Each weight's view of a flat buffer."""
        return torch._utils._unflatten_dense_tensors(flat, self._like)  # type: ignore[no-any-return, no-untyped-call]

    # ---- gradients

    @property
    def is_open(self) -> bool:
        """True if gradient contributions not yet summed have arrived or may arrive."""
        return self.full is not None

    @property
    def has_gradient(self) -> bool:
        return self.gradient is not None

    def gradients(self, runs: Sequence[slice]) -> list[Tensor]:
        """This rank's summed gradient: a flat tensor for each run."""
        assert self.gradient is not None, (
            f"unit {self.number} is updated without a gradient"
        )
        return [self.gradient[run] for run in runs]

    def counted(self) -> list[Tensor]:
        """The parts of the gradient that this rank counts in the gradient norm."""
        return self.gradients(self.counted_runs)

    def open(self, user: int = 0, microbatch: int = 0) -> None:
        """Allocate the flat gradient, into which backward adds from here on.

        The backward is that of the piece `user` on a microbatch. Matrices are not
        zeroed: the first product overwrites them, see `contribute`.
        """
        if self.full is not None:
            return
        self.full = self.pool.take(self.numel, self.precision.reduce)
        self._bind_gradient(self.full)
        for parameter in self._others:
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.fresh |= self._matrices
        self.full[self.used :].zero_()

    @cached_property
    def _others(self) -> list[nn.Parameter]:
        """The parameters that are no matrices."""
        every = self.parameters.items()
        return [p for name, p in every if name not in self._matrices]

    def _bind_gradient(self, full: Tensor) -> None:
        """Let backward add to the views of a flat gradient."""
        wide = self.precision.reduce != self.dtype
        for name, view in zip(self.parameters, self._views(full), strict=True):
            # `grad_dtype` lets a gradient be wider than its weight.
            if wide:
                self.parameters[name].grad_dtype = self.precision.reduce
            self.parameters[name].grad = view

    def _unbind_gradient(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _before_adding(self, name: str, gradient: Tensor) -> None:
        """Zero a fresh gradient before autograd adds its own contribution."""
        if name in self.fresh:
            self.fresh.discard(name)
            grad = self.parameters[name].grad
            assert grad is not None
            grad.zero_()

    def contribute(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to a weight's gradient without a temporary.

        The first product is written without zeros to add to. Call it with gradients
        disabled.
        """
        grad = self.parameters[name].grad
        assert grad is not None
        first = name in self.fresh
        if first:
            self.fresh.discard(name)
        _add_product(grad, a, b, first=first)

    def contribute_expert(
        self, name: str, a: Tensor, b: Tensor, expert: int
    ) -> None:
        """Add the product of two matrices to the gradient of one expert's weight.

        The weights of all experts are one tensor, whose gradient is zeroed when it is
        opened: an expert without tokens adds nothing.
        """
        grad = self.parameters[name].grad
        assert grad is not None
        if a.shape[1]:
            _add_product(grad[expert], a, b, first=False)

    def contribute_part(
        self, name: str, a: Tensor, b: Tensor, place: Place
    ) -> None:
        """Add the product of two matrices to a part of a weight's gradient.

        The product has the same shape in every layout: see `parts.py`.
        """
        grad = self.parameters[name].grad
        assert grad is not None
        self._before_adding(name, grad)
        grad[place] += torch.mm(a, b)

    def contribute_sum(self, name: str, product: Tensor) -> None:
        """Add a product that has been computed already to the gradient of a weight."""
        grad = self.parameters[name].grad
        assert grad is not None
        grad.copy_(product) if name in self.fresh else grad.add_(product)
        self.fresh.discard(name)

    def reduce(self) -> Work:
        """Start summing the gradient over shards, or over replicas without shards.

        Later contributions open a new gradient.
        """
        full, self.full = self.full, None
        assert full is not None, (
            f"unit {self.number} is summed and has no gradient"
        )
        # A weight that no product has reached gets zeros: its memory is uninitialized.
        for name in tuple(self.fresh):
            self._before_adding(name, full)
        # A later backward must not add to a buffer that is being summed.
        self._unbind_gradient()
        shards, replica = self.groups.reduce, self.groups.replica
        if shards.size == 1 and self.replicas_apart:
            self.parts.append(full)
            return Work()
        if shards.size == 1:
            return ChainedWork(
                replica.all_reduce(full, wait=False),
                lambda: self.summed(full, full),
            )
        # `full` is released after the wait.
        part = self.pool.take(self.part, self.precision.reduce)
        work = shards.reduce_scatter(part, full, wait=False)
        if not self.replicas_apart:
            return ChainedWork(work, lambda: self.summed(full, part))
        self.parts.append(part)
        return ChainedWork(work, lambda: self._release(full))

    def reduce_replicas(self) -> Work:
        """Start summing this rank's shard, already reduced, over its replicas."""
        # HSDP: the oldest shard first, in the order in which `reduce` appended them.
        part = self.parts.pop(0)
        work = self.groups.replica.all_reduce(part, wait=False)
        return ChainedWork(work, lambda: self.summed(part, part))

    def sum_parts(self) -> Work:
        """Start adding gradients of tp ranks that did other work to this shard."""
        assert self.gradient is not None
        # In the flat order these weights lie together, so one call takes a run of them.
        runs = [s for s in self.own_segments() if s.adds]
        parts = [
            (self.groups.also[s.adds], self.gradient[s.start : s.stop])
            for s in runs
        ]
        return WorkGroup(
            [group.all_reduce(part, wait=False) for group, part in parts]
        )

    def summed(self, full: Tensor, part: Tensor) -> None:
        """Accept a finished sum: it becomes this rank's gradient, or is added to it."""
        if part is not full:
            self._release(full)
        if self.gradient is None:
            self.gradient = part
        else:
            # A later reduction of the same step: add it, and free its buffer.
            self.gradient += part
            self._release(part, keep=not self.alone)

    def spend(self) -> None:
        """Release the gradient after an update has used it."""
        assert self.gradient is not None
        self._release(self.gradient, keep=not self.alone)
        self.gradient = None

    def _release(self, gradient: Tensor, *, keep: bool = True) -> None:
        """Give a gradient's buffer back to the pool."""
        self.pool.give(gradient, keep=keep)


class SteadyUnit(Unit):
    """Weights whose whole gradient stays in one place, to which CUDA graphs add.

    A graph does the same each time, so it cannot overwrite a gradient with the first
    contribution of a step: the gradient is zeroed before.
    """

    @property
    def bytes(self) -> UnitBytes:
        held = super().bytes
        # A sum over replicas alone is in place.
        apart = self.groups.reduce.size > 1
        return held._replace(
            gradient=0,
            gradient_shard=held.gradient_shard if apart else 0,
            gradient_home=held.gradient,
        )

    @cached_property
    def _whole_gradient(self) -> Tensor:
        return self.pool.take(self.numel, self.precision.reduce)

    def open(self, user: int = 0, microbatch: int = 0) -> None:
        if self.full is None:
            self.full = self._whole_gradient.zero_()
            self._bind_gradient(self.full)

    def _release(self, gradient: Tensor, *, keep: bool = True) -> None:
        if gradient is not self._whole_gradient:
            super()._release(gradient, keep=keep)


class PlainUnit(Unit):
    """Weights kept in the compute dtype, with local gradients once per step.

    A gradient stays the tensor that backward made, in the weight's `.grad`: gathering
    gradients in one buffer would be work that nobody needs.
    """

    plain = True
    _open = _summed = False

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def has_gradient(self) -> bool:
        return self._summed

    def gradients(self, runs: Sequence[slice]) -> list[Tensor]:
        return [
            cast(Tensor, self._at[run.start].grad).view(-1) for run in runs
        ]

    @cached_property
    def _at(self) -> dict[int, nn.Parameter]:
        return dict(zip(self.offsets, self.parameters.values(), strict=True))

    def counted(self) -> list[Tensor]:
        return [cast(Tensor, parameter.grad) for parameter in self._counted]

    @cached_property
    def _counted(self) -> list[nn.Parameter]:
        both = zip(self.order, self.parameters.values(), strict=True)
        return [p for w, p in both if w.counted and not w.rate]

    def open(self, user: int = 0, microbatch: int = 0) -> None:
        if not self._open:
            # Autograd allocates this gradient, so the pool only counts it.
            self._open = True
            self.pool.count(self.numel, self.precision.reduce)

    def contribute(self, name: str, a: Tensor, b: Tensor) -> None:
        weight = self.parameters[name]
        if weight.grad is None:
            weight.grad = torch.mm(a, b)
        else:
            weight.grad.addmm_(a, b)

    def reduce(self) -> Work:
        assert self._open, f"unit {self.number} is summed and has no gradient"
        self._open = False

        def arrived() -> None:
            self._summed = True
            for parameter in self.parameters.values():
                if parameter.grad is None:  # the loss does not depend on it
                    parameter.grad = torch.zeros_like(parameter)

        return ChainedWork(Work(), arrived)

    def sum_parts(self) -> Work:
        return Work()  # no weight here needs it, but others of the piece may

    def spend(self) -> None:
        self._summed = False
        self.pool.count(self.numel, self.precision.reduce, -1)
        for parameter in self.parameters.values():
            parameter.grad = None


_aten: Any = torch.ops.aten


def _add_product(grad: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """Add a product to a gradient, or write it there if it is the first."""
    # One dtype: the matmul writes or adds right into the gradient.
    if grad.dtype == a.dtype:
        torch.mm(a, b, out=grad) if first else grad.addmm_(a, b)
    elif grad.dtype == torch.float32 and _sums_wide(a):
        # Accumulate in float32 straight from the matmul: an intermediate rounding to 16
        # bits is as large as one microbatch's share among many.
        if first:
            _aten.mm.dtype_out(a, b, grad.dtype, out=grad)
        else:
            _aten.addmm.dtype_out(grad, a, b, grad.dtype, out=grad)
    else:
        # No such kernel on this device: a product of its own, then a copy or a sum.
        product = torch.mm(a, b)
        grad.copy_(product) if first else grad.add_(product)


def _sums_wide(a: Tensor) -> bool:
    """True if these 16-bit matmuls can accumulate in float32 on this device."""
    gpu = a.device.type not in ("cpu", "meta")
    return gpu and a.dtype in HALVES and hasattr(_aten.addmm, "dtype_out")


def numel_of(weight: Weight) -> int:
    """The elements of a weight, as this rank of tp holds it."""
    return torch.Size(weight.local).numel()
