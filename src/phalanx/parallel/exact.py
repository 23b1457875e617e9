"""A unit whose gradients are added in one fixed tree, whatever the layout.

Each microbatch has a whole gradient of its own, a leaf. An addition puts it into the
tree and makes the sums that it completes (`program/tree.py`). Ranks then send each other
the parts of their sums, and the owner of a part adds those of all ranks by the same
tree. So each element is the same sum of the same terms as on one process.

A leaf may have several slots, and a sum of the tree adds those of the same number:

- An expert's tokens come from several ranks of ep, each with a microbatch of its own.
  The expert's matmuls run separately for each sender, and each sender has a slot. The
  slots of all senders are added before a sum is exchanged.
- With parts of time (`time_parts.py`) each part has a slot. All slots are exchanged.
  The owner of an element first adds the slots of the same part of time, then the parts.
  Experts then have a slot for each part of time of each sender.

Every weight and every shard begins at a multiple of `ALIGNED` elements. A kernel that
updates a run of weights rounds the last elements, which do not fill a vector,
differently from the others. Here every run ends with padding, in every layout, so no
weight is among these elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm import Work
from ..program.tree import completed, merges
from .data import Unit, UnitBytes, numel_of
from .groups import UnitGroups
from .products import Place
from .tensor import Weight
from .works import ChainedWork

ALIGNED = 64  # elements: a multiple of every vector that a kernel uses


class _ToSlot(torch.autograd.Function):
    """A weight whose gradient goes to a slot of the leaf."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, unit: ExactUnit, name: str, slot: int
    ) -> Tensor:
        ctx.unit, ctx.name, ctx.slot = unit, name, slot
        return weight.view_as(weight)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, None]:
        ctx.unit.views_of(ctx.slot)[ctx.name] += gradient
        return None, None, None, None


@dataclass
class _Leaf:
    """The whole gradient of one microbatch, (slots, elements) flattened.

    `fresh` names its matrices without a contribution, and `views` has the weights'
    views of each slot.
    """

    full: Tensor
    views: list[dict[str, Tensor]]
    fresh: set[str] = field(default_factory=set)


class ExactUnit(Unit):
    """The weights of one piece on one rank, with gradients summed in the tree."""

    def __init__(
        self,
        *given: Any,
        senders: int = 1,
        time_parts: int = 0,
        over_time: Sequence[int] = (),
        **terms: Any,
    ) -> None:
        """`time_parts` of this rank, or 0; `over_time`: the cp place of each copy."""
        self.senders, self.in_time = senders, bool(time_parts)
        self.times = max(1, time_parts)
        self.slots = senders * self.times
        self.over_time = tuple(over_time)
        super().__init__(*given, **terms)
        groups = self.groups
        assert groups.copies is not None
        self.copies = groups.copies
        self.replicas = self.copies.size // groups.gather.size
        # By the piece that uses the unit, and the microbatch.
        self.leaves: dict[tuple[int, int], _Leaf] = {}
        # By the piece, and the run of microbatches that a sum covers.
        self.sums: dict[int, dict[range, Tensor]] = {}
        self.bound: tuple[int, int] | None = None  # the leaf that is written

    # ---- the flat order, with padding behind each weight

    def _room(self, weight: Weight) -> int:
        return -(-numel_of(weight) // ALIGNED) * ALIGNED

    def _divisor(self, groups: UnitGroups) -> int:
        """Every rank adds an equal part, aligned too."""
        assert groups.copies is not None
        return ALIGNED * groups.copies.size

    def _views(self, flat: Tensor) -> list[Tensor]:
        placed = zip(self.order, self.offsets, strict=True)
        return [
            flat[offset : offset + numel_of(weight)].view(weight.local)
            for weight, offset in placed
        ]

    @cached_property
    def _padding(self) -> list[slice]:
        """The runs of the flat order that belong to no weight."""
        starts = [*self.offsets[1:], self.numel]
        ends = [
            offset + numel_of(weight)
            for weight, offset in zip(self.order, self.offsets, strict=True)
        ]
        runs = map(slice, ends or [0], starts)
        return [run for run in runs if run.start < run.stop]

    # ---- gradients

    @property
    def counts_norm(self) -> bool:
        return True

    @cached_property
    def counted_runs(self) -> list[slice]:
        """The runs of this rank's shard that it counts in the gradient norm.

        Sums of squares have no order here, so each replica counts its own part.
        """
        width = self.part // self.replicas
        start = width * self.groups.replica.rank
        clipped = (
            slice(max(run.start, start), min(run.stop, start + width))
            for run in super().counted_runs
        )
        return [run for run in clipped if run.start < run.stop]

    @property
    def bytes(self) -> UnitBytes:
        one = super().bytes
        return one._replace(gradient=self.slots * one.gradient)

    def of_slot(self, name: str, weight: Tensor, slot: int) -> Tensor:
        """A weight whose gradient goes to a slot of the leaf."""
        y: Tensor = _ToSlot.apply(weight, self, name, slot)  # type: ignore[no-untyped-call]
        return y

    def contribute_to_slot(
        self, name: str, a: Tensor, b: Tensor, slot: int, place: Place | None
    ) -> None:
        """Add the product of two matrices to (a part of) a weight's gradient."""
        gradient = self.views_of(slot)[name]
        gradient[place or (slice(None),)] += torch.mm(a, b)

    def views_of(self, slot: int) -> dict[str, Tensor]:
        """A slot of the leaf that is written, by weight."""
        assert self.bound is not None
        return self.leaves[self.bound].views[slot]

    def _new_leaf(self) -> _Leaf:
        size = self.slots * self.numel
        full = self.pool.take(size, self.precision.reduce)
        views = [
            dict(zip(self.parameters, self._views(slot), strict=True))
            for slot in full.view(self.slots, self.numel)
        ]
        return _Leaf(full, views, {*self._matrices})

    @property
    def is_open(self) -> bool:
        return bool(self.leaves) or any(self.sums.values())

    def open(self, user: int = 0, microbatch: int = 0) -> None:
        """Let the backward of a piece write a leaf of its own for each microbatch."""
        key = user, microbatch
        if key == self.bound:
            return
        if key in self.leaves:
            leaf = self.leaves[key]
            self._bind_gradient(leaf.full[: self.numel])
        else:
            leaf = self.leaves[key] = self._new_leaf()
            self._bind_gradient(leaf.full[: self.numel])
            self._clear(leaf)
        self.fresh, self.bound = leaf.fresh, key

    def _clear(self, leaf: _Leaf) -> None:
        """Zero a new leaf, except the matrices of its only slot."""
        if self.slots > 1 or self.in_time:
            leaf.full.zero_()
            leaf.fresh.clear()
            return
        for parameter in self._others:
            assert parameter.grad is not None
            parameter.grad.zero_()
        for run in self._padding:
            leaf.full[run].zero_()

    @torch.no_grad()
    def leaf(self, user: int, microbatch: int) -> list[dict[str, Tensor]]:
        """One microbatch's gradient of each weight, by slot, before it is added."""
        self.open(user, microbatch)
        found = [self.views_of(slot) for slot in range(self.slots)]
        for name in self.fresh:  # no product has written it
            found[0][name].zero_()
        self.fresh.clear()
        return found

    @torch.no_grad()
    def add(self, user: int, microbatch: int, count: int) -> None:
        """Add a leaf to the tree over `count` microbatches."""
        self.leaf(user, microbatch)
        self._unbind_gradient()
        self.bound, self.fresh = None, set()
        leaf = self.leaves.pop((user, microbatch))
        sums = self.sums.setdefault(user, {})
        sums[range(microbatch, microbatch + 1)] = leaf.full
        for left, right in completed(sums, count):
            into, term = sums.pop(left), sums.pop(right)
            into += term
            self.pool.give(term)
            sums[range(left.start, right.stop)] = into

    def exchange_parts(self, user: int) -> Work:
        """Start sending the parts of this rank's sum to the ranks that add them."""
        ((_, every),) = self.sums.pop(user).items()
        full = self._over_senders(every)
        if self.copies.size == 1:
            return ChainedWork(Work(), lambda: self._times_summed(full))
        sent = self._by_rank(full)
        size = self.times * self.numel
        received = self.pool.take(size, self.precision.reduce)
        work = self.copies.all_to_all(received, sent, wait=False)
        return ChainedWork(work, lambda: self._parts_came(sent, received))

    def _over_senders(self, every: Tensor) -> Tensor:
        """The slots of all senders, those of one part of time added in the tree."""
        if self.senders == 1:
            return every
        size = self.times * self.numel
        slots = every.view(self.senders, size)
        for into, term in merges(self.senders):
            slots[into] += slots[term]
        full = self.pool.take(size, self.precision.reduce)
        full.copy_(slots[0])
        self.pool.give(every)
        return full

    def _by_rank(self, full: Tensor) -> Tensor:
        """A flat gradient in the order of the ranks that its parts go to.

        Shards lie one behind the other. The replicas of a shard divide it, and are
        not neighbours in the group. The old order's buffer is given back, and then
        receives the parts: so a unit never has more than two whole gradients here.
        """
        shards = self.groups.gather.size
        apart = shards > 1 and self.replicas > 1
        if not apart and self.times == 1:
            return full
        sent = self.pool.take(self.times * self.numel, self.precision.reduce)
        # (parts of time, shards, replicas, elements) to (replicas, shards, parts of
        # time, elements)
        parts = full.view(self.times, shards, self.replicas, -1)
        by_replica = sent.view(self.replicas, shards, self.times, -1)
        by_replica.copy_(parts.permute(2, 1, 0, 3))
        self.pool.give(full)
        return sent

    def _parts_came(self, full: Tensor, received: Tensor) -> None:
        """Add the parts of all ranks in the tree; the sum is this rank's part."""
        # (copies, parts of time, elements)
        parts = received.view(self.copies.size, self.times, -1)
        total = self._over_copies(parts)
        if self.groups.gather.size == 1 and self.times == 1:
            shard = full
        else:
            shard = self.pool.take(self.part, self.precision.reduce)
            self.pool.give(full)
        self._own_part(shard).copy_(total)
        self.pool.give(received)
        self._own_part_summed(shard)

    def _over_copies(self, parts: Tensor) -> Tensor:
        """The sum of all copies' parts: first those of the same time."""
        firsts: list[Tensor] = []
        for place in sorted(set(self.over_time)):
            same = [
                copy for copy, at in enumerate(self.over_time) if at == place
            ]
            for into, term in merges(len(same)):
                parts[same[into]] += parts[same[term]]
            firsts += parts[same[0]].unbind()
        for into, term in merges(len(firsts)):
            firsts[into] += firsts[term]
        return firsts[0]

    def _times_summed(self, every: Tensor) -> None:
        """Add the parts of time of a gradient that no other rank adds to."""
        if self.times == 1:
            self._own_part_summed(every)
            return
        parts = every.view(self.times, self.numel)
        for into, term in merges(self.times):
            parts[into] += parts[term]
        full = self.pool.take(self.numel, self.precision.reduce)
        full.copy_(parts[0])
        self.pool.give(every)
        self._own_part_summed(full)

    def _own_part_summed(self, shard: Tensor) -> None:
        """Keep a shard for `share_sums`, if the program shares sums; else accept it."""
        if self.replicas_apart:
            self.parts.append(shard)
        else:
            self.summed(shard, shard)

    def _own_part(self, shard: Tensor) -> Tensor:
        """The part of a shard that this rank adds."""
        return shard.view(self.replicas, -1)[self.groups.replica.rank]

    def share_sums(self) -> Work:
        """Start gathering a shard's other parts from its replicas."""
        shard = self.parts.pop(0)
        # Experts may have no copy on another rank.
        if self.replicas == 1:
            return ChainedWork(Work(), lambda: self.summed(shard, shard))
        own = self._own_part(shard)
        work = self.groups.replica.all_gather(shard, own, wait=False)
        return ChainedWork(work, lambda: self.summed(shard, shard))
