"""Checks that every sum over ranks is made, once and over the right axes, without
running a step.

One rank of each kind runs its row of the program on meta tensors, with the operations
and regions that train. Nothing is computed or sent. For every value and each axis of
the mesh, only its `Placement` is known: how the values of the ranks along that axis
relate. The rule table gives it for weights and batches; from there each operation
derives its output's placement from its inputs, and each group call changes it
accordingly. If a value must be equal on all ranks and is not, a sum is missing.

The length of an axis does not matter. Axes are shortened to the smallest length with
the same groups, and one of several equal pieces is examined, so a layout of thousands
of ranks takes as long as one of eight. A correct sum of wrong values, such as a wrong
factor or an extra row, is not found: `verify` finds those.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_shm.calls import Call

from ..comm import Group, TallyWorld, Work
from ..comm.tally import Tally
from ..layout import Layout, LayoutError, Mesh, StagedPieces
from ..layout.choices import FP32
from ..layout.mesh import Axis
from ..models.routed import Chooser
from ..parallel import Model, Unit, microbatches, tensor, time_multiple
from ..parallel.block_parts import cut_blocks
from ..parallel.exchange import SENT, Choices, Routes
from ..parallel.kinds import alike
from ..parallel.local import build_local
from ..parallel.pieces import Bundle
from ..parallel.pool import storage_of
from ..parallel.rows import model_rows
from ..parallel.tensor import Weight
from ..parallel.works import ChainedWork
from ..program import Op, Program, StepOptions, build, check, ops
from ..program.build import DEFAULT
from ..training.executor import Executor


class Placement(IntEnum):
    """Relation between the values of the ranks along an axis."""

    ZERO = 0  # all zero
    REPLICATED = 1  # equal
    SHARDED = 2  # parts of one whole, each of them complete
    VARYING = 3  # different on each rank; a sum may still be missing
    # VARYING plus a common value, which a sum would count once for each rank
    MIXED = 4


Places = tuple[Placement, ...]  # one for each axis
Run = tuple[int, int]  # start and end in bytes
ZERO, REPLICATED, SHARDED, VARYING, MIXED = Placement
COPIES = "tp, among ranks that share a head of k and v"
AXES = (
    "dp.replicate",
    "dp.shard",
    "pp",
    "cp.ring",
    "cp.ulysses",
    "ep",
    "tp",
    COPIES,
)
# Equal along every axis: what no operation has made different.
NOWHERE: Places = (REPLICATED,) * len(AXES)

_ADDS = {"add", "sub", "add_", "sub_"}
# elementwise, with at most one varying input
_ALONE = {"neg", "clone", "_to_copy", "mul", "mul_", "div", "div_"}
_LINEAR = {"sum", "mean", "cat", "stack", "mm", "bmm"}
_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm"}
_SCATTERS = {
    "scatter_add",
    "scatter_add_",
    "index_add",
    "index_add_",
    "index_put",
    "index_put_",
}
_OVERWRITES = {"copy_", "zero_", "fill_"}
_MAKES = ("empty", "zeros", "ones", "full", "arange", "new_", "rand")


def placement_faults(
    make: Callable[[], Model], layout: Layout, options: StepOptions = DEFAULT
) -> tuple[str, ...]:
    """Faults in a layout's sums over ranks: the operation, the weight or value, and the axis."""
    if layout.exact:
        raise LayoutError(
            "exact: its sums are not followed yet. Check the layout without exact,"
            " which sums over the same ranks, and compare bits by verify --exact."
        )
    small = _shortened(layout)
    found: dict[str, None] = {}
    # One rank for each combination of what differs: its stage, and its part of
    # each weight.
    for rank in range(small.ranks):
        at = {**dict.fromkeys(AXES, 0), **small.mesh.coordinates(rank)}
        parts = tuple(f"{axis}." for axis in small.shard_axes)
        apart = (
            axis
            for axis in AXES
            if axis != "pp" and not f"{axis}.".startswith(parts)
        )
        if any(at[axis] for axis in apart):
            # equivalent to an examined rank, or with parts of the same weights
            continue
        few = cut_blocks(_few(make(), small), small)
        stages = _stages(
            [name for name, _ in few.pieces], small.pp * small.chunks
        )
        program = build(
            small, StagedPieces(model_rows(few, small), stages), options
        )
        check(program)
        found |= dict.fromkeys(_Walk(few, small, program, rank).faults())
    return tuple(found)


def _shortened(layout: Layout) -> Layout:
    """Return the layout with the fewest ranks that has the same kinds of groups."""

    def short(axis: Axis) -> Axis:
        if axis.name == "tp":
            return axis  # which KV heads are shared depends on its length
        # The smallest factor above 1: dp6 -> dp2, dp9 -> dp3. Larger ones have
        # the same kinds of groups.
        least = (
            next((f for f in range(2, n) if n % f == 0), n) for n in axis.parts
        )
        return replace(axis, parts=tuple(least))

    mesh = Mesh(tuple(map(short, layout.mesh.axes)))
    # Enough for a pipeline to fill and to run in its steady state.
    few = min(layout.microbatches, 2 * mesh.of("pp"))
    plain: dict[str, Any] = {"offload": (), "compile": "", "precision": FP32}
    if layout.recompute in (
        "fit",
        "selective",
    ):  # these modes send nothing again
        plain["recompute"] = "none"
    return replace(layout, mesh=mesh, microbatches=few, **plain)


def _few(model: Model, layout: Layout) -> Model:
    """Return a model with the first piece of every kind, and more if there are stages
    to fill."""
    # The kinds of the model's pieces, and the first of each.
    kinds, most = alike(model), len(model.pieces)
    chosen = {kinds.index(kind) for kind in kinds}
    for piece in range(most):
        if len(chosen) < min(most, layout.pp * layout.chunks):
            chosen.add(piece)
    return replace(
        model,
        pieces=copy.deepcopy(tuple(model.pieces[n] for n in sorted(chosen))),
    )


def _stages(names: Sequence[str], stages: int) -> tuple[range, ...]:
    """Divide pieces among stages; pieces of one block, which share its name, stay
    together."""
    starts = [
        n for n, name in enumerate(names) if not n or name != names[n - 1]
    ]
    ends = [
        *(starts[len(starts) * i // stages] for i in range(stages)),
        len(names),
    ]
    return tuple(range(a, b) for a, b in pairwise(ends))


# ---- placements of values


class _Known(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stubs
    """The placements of every value, by storage; updated as operations run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage: views of one buffer share the runs of its bytes.
        # (start byte, end byte, placements)
        self.runs: dict[int, list[tuple[int, int, Places]]] = {}

    def of(self, x: Tensor) -> Places:
        """Return the placement of a whole value."""
        return _joined([places for _, _, places in self.within(x)])

    def within(self, x: Tensor) -> list[tuple[int, int, Places]]:
        """Return the runs of a value's storage that overlap it, relative to its
        start."""
        # In bytes from the start of the storage.
        start, stop = _span(x)
        runs = self.runs.get(storage_of(x), [])
        return [
            (max(a, start) - start, min(b, stop) - start, p)
            for a, b, p in runs
            if a < stop and start < b
        ]

    def set(
        self, x: Tensor, places: Places, within: Run | None = None
    ) -> None:
        start, stop = _span(x)
        if within:
            start, stop = start + within[0], start + within[1]
        runs = self.runs.setdefault(storage_of(x), [])
        # Elements of other values lie between those of a strided one, so both
        # are joined.
        if not x.is_contiguous() and not within:
            places = _joined([places, self.of(x)])
        # What lies before and behind the written run keeps its placement.
        kept = [(a, min(b, start), p) for a, b, p in runs if a < start]
        kept += [(max(a, stop), b, p) for a, b, p in runs if b > stop]
        runs[:] = sorted([*kept, (start, stop, places)])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        schema = func._schema.arguments
        # Arguments that the operation writes to, by its schema, such as `self`
        # of `add_`.
        written = [
            value
            for argument, value in zip(schema, args, strict=False)
            if argument.alias_info and argument.alias_info.is_write
        ]
        outs = [
            kwargs[a.name]
            for a in schema
            if a.name in kwargs and a.alias_info and a.alias_info.is_write
        ]
        # What is overwritten does not count as an input.
        read = [
            x for key, x in kwargs.items() if not any(x is out for out in outs)
        ]
        mine = args[1:] if name in _OVERWRITES else args
        inputs = [
            x for x in tree_leaves([mine, read]) if isinstance(x, Tensor)
        ]
        after = self._by_run(name, inputs, _joins_tokens(name, args))
        # A result in new storage is new; one in old storage is a view, whose
        # placement is known.
        before = {
            storage_of(x)
            for x in tree_leaves([args, kwargs])
            if isinstance(x, Tensor)
        }
        result = func(*args, **kwargs)
        for x in tree_leaves([written, outs, result]):
            fresh = isinstance(x, Tensor) and storage_of(x) not in before
            if fresh:
                # Storage may be reused by a later value: what an earlier one
                # had is forgotten.
                self.runs.pop(storage_of(x), None)
            if fresh or any(
                x is each for each in tree_leaves([written, outs])
            ):
                for run, places in after:
                    self.set(x, places, run)
        return result

    def _by_run(
        self, name: str, inputs: Sequence[Tensor], joins: bool
    ) -> list[tuple[Run | None, Places]]:
        """Return the placement of an operation's output. In flat buffers every run is a
        separate weight."""
        alike = (
            len({(x.shape, x.dtype) for x in inputs}) == 1
            and inputs[0].dim() == 1
        )
        if not (
            alike
            and name in _ADDS | _OVERWRITES | _ALONE
            and all(x.is_contiguous() for x in inputs)
        ):
            return [
                (
                    None,
                    _after(
                        name, [(x.dim(), self.of(x)) for x in inputs], joins
                    ),
                )
            ]
        runs = [self.within(x) for x in inputs]
        # The ends of all runs of all inputs: between two of them each input
        # has one placement.
        ends = sorted(
            {
                end
                for each in runs
                for start, stop, _ in each
                for end in (start, stop)
            }
        )
        found: list[tuple[Run | None, Places]] = []
        for a, b in pairwise(ends):
            here = [
                _joined(
                    [p for start, stop, p in each if start <= a and b <= stop]
                )
                for each in runs
            ]
            found.append(
                ((a, b), _after(name, [(1, places) for places in here], joins))
            )
        return found


def _span(x: Tensor) -> tuple[int, int]:
    """Return the first and last byte that a value spans in its storage."""
    size, start = x.element_size(), int(x.storage_offset())
    last = sum(
        (int(n) - 1) * int(step)
        for n, step in zip(x.shape, x.stride(), strict=True)
    )
    return start * size, (start + last + 1 if x.numel() else start) * size


def _joined(many: Sequence[Places]) -> Places:
    """Combine the placements of adjacent values."""
    return (
        # The worst of them, as the order of `Placement` is from known to
        # unknown.
        tuple(map(max, *many))
        if len(many) > 1
        else many[0]
        if many
        else NOWHERE
    )


def _joins_tokens(name: str, args: Sequence[Any]) -> bool:
    """True if an operation sums over tokens.

    Tokens are along all dimensions except the last, or along the first two of four (a
    token's experts).
    """
    # Gradients of weights sum over tokens, as do scatters of expert outputs.
    if "backward" in name or name in _SCATTERS:
        return True
    if name not in ("sum", "mean"):
        return False
    dims, many = args[1] if len(args) > 1 else None, args[0].dim()
    return not dims or any(
        # (batch, time, experts of a token, features) has its tokens along the
        # first two.
        dim % many < (2 if many == 4 else many - 1)
        for dim in dims
    )


def _after(
    name: str, known: Sequence[tuple[int, Places]], joins: bool
) -> Places:
    """Return the placement of an operation's output from those of its inputs.

    `known` has each input's number of dimensions. `joins`: see `_joins_tokens`.
    """
    # New tensors are equal on all ranks; zeros stay zero in any sum.
    if name.startswith(_MAKES) or name == "zero_":
        return (ZERO,) * len(AXES) if "zero" in name else NOWHERE
    if not known:
        return NOWHERE
    dims, inputs = zip(*known, strict=True)
    along = zip(*inputs, strict=True)  # one axis after the other
    return tuple(
        _along(name, list(zip(dims, places, strict=True)), joins)
        for places in along
    )


def _along(
    name: str, known: Sequence[tuple[int, Placement]], joins: bool
) -> Placement:
    """Return the placement of an operation's output along one axis."""
    places = [place for _, place in known]
    most = max(places)
    if (
        name in _ADDS
        and most == VARYING
        and any(p == REPLICATED and dims for dims, p in known)
    ):
        return MIXED
    # Sums of equal kinds keep them; a sum with VARYING must still be made over
    # ranks.
    if name in _ADDS | _OVERWRITES or most <= REPLICATED or most == VARYING:
        return most
    # Linear in the only input that differs between ranks: the sum over them
    # may come later.
    linear = sum(p > REPLICATED for p in places) == 1
    if most == SHARDED:  # tokens with `seq`, or a complete gradient
        # A product of two sharded values sums over what they share.
        product = name in _PRODUCTS and sum(p == SHARDED for p in places) > 1
        return VARYING if joins or product else SHARDED
    if most == MIXED and linear and name in _ALONE | _LINEAR:
        return MIXED
    return VARYING


# ---- effects of group calls


class _PlacedGroup(Tally):
    """A group whose calls update the placements of the values that would be sent."""

    known: _Known
    axes: tuple[int, ...]  # along which its ranks lie
    walk: _Walk

    def _begin(self, call: Call) -> Work:
        # an all-gather also places weights
        if self.size > 1 or call.kind == "all_gather":
            self._place(call)
        return super()._begin(call)

    def _place(self, call: Call) -> None:
        """Update the placements after a group call; a barrier changes nothing."""
        known, walk, x = self.known, self.walk, call.x
        out = x if call.out is None else call.out
        match call.kind:
            case "all_reduce":
                # Each weight of a flat buffer has a placement of its own.
                for start, stop, places in known.within(x):
                    known.set(
                        x,
                        self.summed(places, call.op, REPLICATED),
                        (start, stop),
                    )
            case "reduce_scatter":
                length = x.nbytes // self.size
                # This rank's share of the summed buffer, in bytes.
                first = length * self.rank
                for start, stop, places in known.within(x):
                    a, b = (
                        max(start, first) - first,
                        min(stop, first + length) - first,
                    )
                    if a < b:
                        known.set(
                            out, self.summed(places, call.op, SHARDED), (a, b)
                        )
            case "all_gather":
                units = walk.local.every_unit
                unit = next(
                    # An all-gather into the buffer of a unit brings weights,
                    # whose placement the rule table gives.
                    (u for u in units if u.storage() == storage_of(out)),
                    None,
                )
                if unit is None:
                    known.set(
                        out, _along_axes(known.of(x), self.axes, REPLICATED)
                    )
                else:
                    walk.place_weights(unit)
            case "all_to_all":
                known.set(out, _along_axes(known.of(x), self.axes, VARYING))
            case "send":
                walk.sent[self.name] = known.of(x)
            case "receive" if self.name in ("activations", "gradients"):
                # From another stage: what pieces pass to each other has a
                # known placement.
                known.set(x, walk.edge)
            case "receive":
                known.set(
                    x, _along_axes(walk.sent[self.name], self.axes, VARYING)
                )

    # Two facts that no call shows: a rank's slice or share of a common value is its
    # own, and the gradient of a common sum is complete only if all ranks used the sum
    # alike.

    def part(self, x: Tensor, dim: int) -> Tensor:
        y, places = super().part(x, dim), self.known.of(x)
        for axis in self.axes:
            if places[axis] > REPLICATED:
                self.walk.fault(
                    f"a rank takes its part of what was not summed over {AXES[axis]}"
                )
        self.known.set(y, _along_axes(places, self.axes, SHARDED))
        return y

    def share(self, x: Tensor, ranks: int) -> Tensor:
        copies = (AXES.index(COPIES),)

        # Copies of a KV head each serve a share of its queries.
        def set_apart(share: Tensor) -> None:
            places = self.known.of(share)
            self.known.set(share, _along_axes(places, copies, VARYING))

        y = super().share(x, ranks)
        if ranks > 1:
            set_apart(y)
            if x.requires_grad:  # its gradient is a share, too
                x.register_hook(set_apart)  # type: ignore[no-untyped-call]
        return y

    def gradient_of_sum(self, gradient: Tensor) -> None:
        places = self.known.of(gradient)
        for axis in _axes_of(self):
            if places[axis] > REPLICATED:
                self.walk.fault(
                    f"the gradient of a sum was not summed over {AXES[axis]}"
                )

    def summed(self, places: Places, op: str, to: Placement) -> Places:
        """Return the placement of a value after a sum over the group."""
        for axis in (
            self.axes if op in ("sum", "average") and self.walk.strict else ()
        ):
            # A sum of what is equal or complete on all ranks would count it
            # once for each.
            if places[axis] in (REPLICATED, SHARDED):
                what = "the same" if places[axis] == REPLICATED else "finished"
                self.walk.fault(
                    f"a sum over {AXES[axis]} of what is {what} on all its ranks"
                )
            elif places[axis] == MIXED:
                self.walk.fault(
                    f"a sum over {AXES[axis]} counts what all its ranks have alike once for each of them"
                )
        return _along_axes(places, self.axes, to)


def _along_axes(places: Places, axes: Sequence[int], to: Placement) -> Places:
    return tuple(
        # ZERO stays: a sum of zeros is zero on every rank.
        to if i in axes and p != ZERO else p
        for i, p in enumerate(places)
    )


class _PlacedWorld(TallyWorld):
    def __init__(self, walk: _Walk, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.walk = walk

    def _split(
        self,
        name: str,
        groups: list[tuple[int, ...]],
        flows: Sequence[tuple[int, int]],
    ) -> Group:
        ranks = self.own(groups)
        group = _PlacedGroup(name, ranks.index(self.rank), ranks, self.device)
        group.known, group.walk, group.ledger = self.walk.known, self.walk, []
        # The axes along which the members' coordinates differ.
        group.axes = tuple(
            i
            for i, axis in enumerate(AXES)
            if len({self.walk.at(r)[axis] for r in ranks}) > 1
        )
        return group


# ---- one rank's step


class _Placing(Executor):
    """Executes a row on tensors without values."""

    walk: _Walk

    def _perform(self, op: Op) -> None:
        names = [name for name, _ in self.walk.model.pieces]
        self.walk.op = f"{op} ({op.described(names)})"
        super()._perform(op)

    def _pass_on(self, way: str, p: int, to: int, m: int, bundle: Any) -> None:
        self.walk.passes(way, p, to, bundle)
        super()._pass_on(way, p, to, m, bundle)

    def _count(self, op: Op) -> Any:
        # equal numbers of rows on each rank are still different rows
        self.walk.strict = False
        work = super()._count(op)
        self.walk.strict = True
        return self.walk.whole(self, "the count of tokens", "count", work)

    def _agree(self, op: Op) -> Any:
        self.walk.strict = (
            False  # which rank counts which weight is checked separately
        )
        self._agree_elsewhere(op)
        work = super()._agree(op)
        self.walk.strict = True
        return self.walk.whole(self, "the norm", "norm", work)

    def _agree_elsewhere(self, op: Op) -> None:
        """Make the same call as another replica, whose weights this rank's replica
        already counts."""
        units = self.local.units.values()
        replicas = [
            unit.groups.replica
            for unit in units
            # Only replicas beyond the first may count their weights again.
            if unit.groups.replica.size > 1
        ]
        # As the second replica: whatever it counts, the first has counted,
        # too.
        with _as_rank(1, replicas):
            super()._agree(op)
        for number in self.norms:
            group = self.local.units[number].groups.replica
            for axis in _axes_of(group):
                name = self.walk.model.pieces[number % self.program.pieces][0]
                self.walk.fault(
                    f"the norm counts {name} on every replica along {AXES[axis]}"
                )

    def _add_loss(self, y: Tensor) -> None:
        tp = self.local.groups.tp
        for axis in _axes_of(tp):
            if self.walk.known.of(y)[axis] > REPLICATED:
                # A loss that every rank of tp adds would be counted tp times.
                self.walk.fault(f"the loss was not summed over {AXES[axis]}")
        if tp.size > 1:
            known = self.loss._version
            # The version of a tensor grows with each operation in place: the
            # loss was touched.
            with _as_rank(1, [tp]):
                super()._add_loss(y)
            if self.loss._version != known:
                self.walk.fault("the loss is counted on every rank of tp")
        super()._add_loss(y)

    def _sum_choices(self, op: Op) -> Work:
        self.walk.strict = False  # other tokens may well choose equally often
        work = super()._sum_choices(op)
        self.walk.strict = True
        return work

    def _loss_gradients(
        self, chooser: Chooser, key: tuple[int, int]
    ) -> Bundle:
        self.walk.whole_choices(chooser, self.choices[key])
        return super()._loss_gradients(chooser, key)

    def _exchange(self, op: Op) -> Work:
        exchange, group = self.local.exchange, self.local.exchange.tokens
        key = (
            # Keyed by the piece of the experts: the exchange back belongs to
            # the piece after it.
            op.piece if op.piece in exchange.receivers else op.piece - 1,
            op.index,
        )
        # routes are unknown: assume equal numbers of tokens for each rank
        if exchange.pending_counts.pop(key, None):
            tokens, size = (
                len(self.inputs[op.piece, op.index][SENT]),
                group.size,
            )
            # The remainder goes to the first ranks, as anywhere else.
            even = [
                tokens // size + (rank < tokens % size) for rank in range(size)
            ]
            exchange.routes[key] = Routes(even, [even[group.rank]] * size)
        forward = op.kind == ops.EXCHANGE
        bundle = self.inputs[op.piece, op.index] if forward else {}
        if forward and op.piece in exchange.receivers:
            self.walk.sent[str(key)] = self.walk.known.of(bundle[SENT])
        work = super()._exchange(op)
        if not forward or op.piece in exchange.receivers or group.size == 1:
            return work

        def home() -> None:
            # Computed by one of the ranks that share the experts, the result belongs to
            # the sender.
            places, sent = (
                list(self.walk.known.of(bundle[SENT])),
                self.walk.sent[str(key)],
            )
            for axis in _axes_of(group):
                places[axis] = sent[axis]
            self.walk.known.set(bundle[SENT], tuple(places))

        return ChainedWork(work, home)

    def _reduce(self, op: Op) -> Work:
        self.walk.tied(op)
        return super()._reduce(op)

    def _update(self, op: Op) -> None:
        for unit in self.local.of_piece(op.piece, trained=True):
            self.walk.updates(unit)
            # Marks the gradient as used, without an optimizer.
            unit.spend()

    def _numbers(self) -> dict[str, Tensor]:
        # Read at the end of the step; meta tensors have no values.
        return {
            name: torch.zeros(1, device="cpu")
            for name in ("loss", "count", "norm")
        }


class _Walk:
    """Runs one rank of a layout and collects the faults of its step."""

    def __init__(
        self, model: Model, layout: Layout, program: Program, rank: int
    ) -> None:
        self.model, self.layout, self.program, self.rank = (
            model,
            layout,
            program,
            rank,
        )
        self.known, self.found = _Known(), dict[str, None]()
        self.strict, self.op, self.sent = True, "", dict[str, Places]()
        heads = model.counts.get("kv", 0)
        # More ranks than KV heads: `tp8` with 2 heads has 4 copies of each.
        self.copies = layout.tp // heads if heads and layout.tp > heads else 1
        size = self.sizes = {**layout.mesh.coordinates(0)}
        for axis in AXES[:-2]:
            size[axis] = layout.mesh.of(axis)
        # tp is taken apart: which head, and which of its copies.
        size["tp"], size[COPIES] = layout.tp // self.copies, self.copies
        data = ("dp.replicate", "dp.shard", "cp.ring", "cp.ulysses", "ep")
        self.batch = self.varying(*data)
        # Between pieces; with `seq`, tp ranks have parts of the sequence.
        cut = [
            AXES.index(axis)
            for axis in ("tp", COPIES)
            if layout.seq and size[axis] > 1
        ]
        self.edge = _along_axes(self.batch, cut, SHARDED)

    def at(self, rank: int) -> dict[str, int]:
        at = {**dict.fromkeys(AXES, 0), **self.layout.mesh.coordinates(rank)}
        at["tp"], at[COPIES] = divmod(at["tp"], self.copies)
        return at

    def varying(self, *axes: str) -> Places:
        return tuple(
            VARYING if axis in axes and self.sizes[axis] > 1 else REPLICATED
            for axis in AXES
        )

    def fault(self, what: str) -> None:
        self.found.setdefault(f"{self.op}: {what}.")

    def faults(self) -> list[str]:
        world = _PlacedWorld(self, self.rank, self.layout.ranks)
        try:
            with self.known:
                self._step(world)
        finally:
            # Leaves no group behind for the next rank's walk.
            world.clear()
        return list(self.found)

    def _step(self, world: _PlacedWorld) -> None:
        self.local = build_local(world, self.layout, self.model, self.program)
        for unit in self.local.every_unit:
            if unit.buffer is not None:
                self.place_weights(unit)
        self._counts_once()
        executor = _Placing(
            self.local, self.program, self.rank, None, clip=1.0
        )
        executor.walk = self
        executor.step(self._batches(), 1e-3)

    def whole_choices(self, chooser: Chooser, choices: Choices) -> None:
        """Check that a router's losses use counts of whole sequences, or of the whole
        batch."""
        parts = (
            "cp.ring",
            "cp.ulysses",
            *(("tp", COPIES) if self.layout.seq else ()),
        )
        data = (*parts, "dp.replicate", "dp.shard", "ep")
        if chooser.sequence_loss:
            self._whole_counts(choices.of_sequences, parts, "a sequence")
        if chooser.batch_loss:
            self._whole_counts(choices.of_batch, data, "the batch")

    def _whole_counts(
        self, total: Tensor, axes: Sequence[str], what: str
    ) -> None:
        for axis, place in zip(AXES, self.known.of(total), strict=True):
            if axis in axes and self.sizes[axis] > 1 and place > REPLICATED:
                self.fault(
                    f"a router's counts of {what} were not summed over {axis}"
                )

    def _batches(self) -> list[dict[str, Tensor]]:
        shape, layout = self.model.shape, self.layout
        if shape is None:
            raise LayoutError(
                "a model without a shape has no batch to look at: add shape=Shape(...) to it."
            )
        # One row for each microbatch of each data-parallel rank.
        rows = layout.data * layout.microbatches
        if shape.kind == "mlp":
            whole = {"inputs": torch.empty(rows, shape.hidden, device="meta")}
        else:
            multiple = time_multiple(layout)
            # At most 64 tokens, rounded up to what cp and seq divide.
            length = -(-min(shape.sequence, 64) // multiple) * multiple
            ids = torch.empty(rows, length, dtype=torch.long, device="meta")
            names = ["tokens", "targets", "positions"]
            names += ["noise"] * bool(shape.dropout)
            whole = {name: torch.empty_like(ids) for name in names}
        at = self.local.coordinates
        ahead = self.local.ahead
        batches = microbatches(
            whole, layout, at["data"], at["cp"], ahead=ahead
        )
        for batch in batches:
            for x in batch.values():
                self.known.set(x, self.batch)
        return batches

    # ---- weights

    def places_of(self, weight: Weight) -> Places:
        """Return the placement of a weight: the axes that shard it, by the rule
        table."""
        dims = self.model.rules.dims(weight.name, len(weight.shape))
        cut = {axis for axes in self.layout.axes_of(dims) for axis in axes}
        # A weight that tp cuts has other parts on copies, except for the
        # shared KV heads.
        if "tp" in cut and not ("kv" in dims and self.copies > 1):
            cut.add(COPIES)
        return self.varying(
            *(axis for axis in AXES if cut & {axis, axis.split(".")[0]})
        )

    def place_weights(self, unit: Unit) -> None:
        """Mark the unit's gathered weights with their placements."""
        assert unit.buffer is not None
        size = unit.buffer.element_size()
        for weight, offset in zip(unit.order, unit.offsets, strict=True):
            run = (
                offset * size,
                (offset + torch.Size(weight.local).numel()) * size,
            )
            self.known.set(unit.buffer, self.places_of(weight), run)

    def _sums(self, unit: Unit) -> None:
        """Check that a gradient is not about to be summed over an axis that shards its
        weight."""
        for weight in unit.order:
            own, groups = (
                self.places_of(weight),
                [unit.groups.reduce, unit.groups.replica],
            )
            if weight.adds:
                groups.append(unit.groups.also[weight.adds])
            # A weight with parts along an axis has gradients of other elements
            # there.
            for axis in {axis for group in groups for axis in _axes_of(group)}:
                if own[axis] == VARYING:
                    name = AXES[axis]
                    self.fault(
                        f"the gradient of {weight.name}, which {name} cuts, is summed over it"
                    )

    def tied(self, op: Op) -> None:
        """Mark a tied gradient: stages that share a weight have different parts of
        it."""
        for unit in self.local.of_piece(op.piece, trained=True):
            self._sums(unit)
            if unit.groups.tie.size > 1 and unit.full is not None:
                pp = AXES.index("pp")
                for start, stop, places in self.known.within(unit.full):
                    self.known.set(
                        unit.full,
                        _along_axes(places, (pp,), VARYING),
                        (start, stop),
                    )

    def updates(self, unit: Unit) -> None:
        """Check that every gradient is placed like its weight, and complete where it is
        sharded."""
        shards = _axes_of(unit.groups.reduce)
        for weight, start, stop, offset in unit.entries():
            (part,) = unit.gradients([slice(offset, offset + stop - start)])
            places, own = self.known.of(part), self.places_of(weight)
            for axis, name in enumerate(AXES):
                if self.sizes[name] == 1:
                    continue
                # An axis that shards the optimizer gets a complete part of
                # each gradient.
                whole = own[axis] == REPLICATED or axis in shards
                finished = (
                    (ZERO, REPLICATED, SHARDED)
                    if axis in shards
                    else (ZERO, REPLICATED)
                )
                if whole and places[axis] not in finished:
                    self.fault(
                        f"the gradient of {weight.name} was not summed over {name}"
                    )

    def _counts_once(self) -> None:
        """Check that every element of a weight is in the norm once: one rank counts
        copies along tp."""
        others = [
            tensor.cut_weights(
                self.model, self.layout, {**self.local.coordinates, "tp": tp}
            )
            for tp in range(1, self.layout.tp)
        ]
        for unit in self.local.units.values():
            for weight in unit.order:
                # Balancing biases are not in the norm.
                if weight.rate:
                    continue
                own = self.places_of(weight)
                parts = math.prod(
                    self.sizes[axis]
                    for axis in ("tp", COPIES)
                    if own[AXES.index(axis)] == VARYING
                )
                # Each part must be counted by exactly one of the ranks that
                # have it.
                ranks = [weight, *(each[weight.name] for each in others)]
                times = sum(each.counted for each in ranks) / parts
                if times != 1:
                    self.found.setdefault(
                        f"the norm counts {weight.name} {times:g} times."
                    )

    # ---- values

    def passes(
        self, way: str, p: int, to: int, bundle: Mapping[str, Tensor]
    ) -> None:
        what = (
            "the output" if way == ops.FORWARD else "the gradient of the input"
        )
        name = self.model.pieces[p][0]
        for value, x in bundle.items():
            # these are summed where they merge
            places, apart = self.known.of(x), value in (SENT, "gates")
            for axis, axis_name in enumerate(AXES):
                # Backward passes of norms sum over elements, so parts are no longer
                # recognised as such.
                allowed = (
                    MIXED
                    if apart or self.edge[axis] > REPLICATED
                    else REPLICATED
                )
                if (
                    self.edge[axis] == SHARDED
                    and way == ops.FORWARD
                    and value == "x"
                ):
                    allowed = SHARDED
                if places[axis] > allowed:
                    self.fault(
                        f"{what} of {name} was not summed over {axis_name}"
                    )

    def whole(
        self, executor: Executor, what: str, name: str, work: Work | None
    ) -> Work | None:
        """Check after a call that a value is equal on all ranks."""

        def look() -> None:
            for axis, place in zip(
                AXES, self.known.of(getattr(executor, name)), strict=True
            ):
                if place > REPLICATED:
                    self.fault(f"{what} was not summed over {axis}")

        if work is None:
            look()
            return None
        return ChainedWork(work, look)


def _axes_of(group: Group) -> tuple[int, ...]:
    return (
        group.axes
        if isinstance(group, _PlacedGroup) and group.size > 1
        else ()
    )


@contextmanager
def _as_rank(rank: int, groups: Sequence[Group]) -> Iterator[None]:
    """Pretend to be another rank of some groups; only the rank number differs."""
    before = [(group, group.rank) for group in groups]
    for group in groups:
        group.rank = rank
    try:
        yield
    finally:
        for group, own in before:
            group.rank = own
