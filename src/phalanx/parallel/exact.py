"""A unit whose gradients are added in one fixed tree, whatever the layout.

Each microbatch has a whole gradient of its own, a leaf. An addition puts it into the
tree and makes the sums that it completes (`program/tree.py`). Ranks then send each other
the parts of their sums, and the owner of a part adds those of all ranks by the same
tree. So each element is the same sum of the same terms as on one process.

An expert's tokens come from several ranks of ep, each with a microbatch of its own. The
products of an expert are computed for each of these senders, and a leaf has a part for
each of them. Sums of the tree add all parts; the parts of the whole sum are added to
each other before it is exchanged.

Every weight begins at a multiple of `ALIGNED` elements, as does every shard. Kernels
that update a run of weights round the last elements of a run, which fill no vector,
differently from the others: here a run ends with padding, in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm import Work
from ..program.tree import completed, merges
from .data import Unit, UnitBytes, numel_of
from .groups import UnitGroups
from .tensor import Weight
from .works import ChainedWork

ALIGNED = 64  # elements: a multiple of every vector that a kernel uses


class _ToSender(torch.autograd.Function):
    """A weight as the products of one sender's tokens use it."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, unit: ExactUnit, name: str, sender: int
    ) -> Tensor:
        ctx.unit, ctx.name, ctx.sender = unit, name, sender
        return weight.view_as(weight)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, None, None, None]:
        ctx.unit.views_of(ctx.sender)[ctx.name] += gradient
        return None, None, None, None


@dataclass
class _Leaf:
    """The whole gradient of one microbatch of each sender.

    `fresh` names its matrices without a contribution.
    """

    full: Tensor
    fresh: set[str] = field(default_factory=set)


class ExactUnit(Unit):
    """The weights of one piece on one rank, with gradients summed in the tree."""

    def __init__(self, *given: Any, senders: int = 1, **terms: Any) -> None:
        self.senders = senders
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
    def bytes(self) -> UnitBytes:
        one = super().bytes
        return one._replace(gradient=self.senders * one.gradient)

    def of_sender(self, name: str, weight: Tensor, sender: int) -> Tensor:
        """A weight whose gradient goes to the sender's part of a leaf."""
        y: Tensor = _ToSender.apply(weight, self, name, sender)  # type: ignore[no-untyped-call]
        return y

    def views_of(self, sender: int) -> dict[str, Tensor]:
        """The sender's part of the leaf that is written, by weight."""
        assert self.bound is not None
        part = self._parts_of(self.leaves[self.bound].full)[sender]
        return dict(zip(self.parameters, self._views(part), strict=True))

    def _take_whole(self) -> Tensor:
        return self.pool.take(
            self.senders * self.numel, self.precision.reduce
        )

    def _parts_of(self, full: Tensor) -> Tensor:
        """A whole gradient as (senders, elements)."""
        return full.view(self.senders, self.numel)

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
            self._bind_gradient(self._parts_of(leaf.full)[0])
        else:
            full = self._take_whole()
            leaf = self.leaves[key] = _Leaf(full, {*self._matrices})
            parts = self._parts_of(full)
            self._bind_gradient(parts[0])
            for parameter in self._others:
                assert parameter.grad is not None
                parameter.grad.zero_()
            for run in self._padding:
                parts[0, run].zero_()
            parts[1:].zero_()
        self.fresh, self.bound = leaf.fresh, key

    @torch.no_grad()
    def leaf(self, user: int, microbatch: int) -> list[dict[str, Tensor]]:
        """One microbatch's gradient of each weight, by sender, before it is added."""
        self.open(user, microbatch)
        found = [self.views_of(sender) for sender in range(self.senders)]
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
            return ChainedWork(Work(), lambda: self._own_part_summed(full))
        sent = self._by_rank(full)
        received = self.pool.take(self.numel, self.precision.reduce)
        work = self.copies.all_to_all(received, sent, wait=False)
        return ChainedWork(work, lambda: self._parts_came(sent, received))

    def _over_senders(self, every: Tensor) -> Tensor:
        """The sum of all senders' parts, added in the tree."""
        if self.senders == 1:
            return every
        parts = self._parts_of(every)
        for into, term in merges(self.senders):
            parts[into] += parts[term]
        full = self.pool.take(self.numel, self.precision.reduce)
        full.copy_(parts[0])
        self.pool.give(every)
        return full

    def _by_rank(self, full: Tensor) -> Tensor:
        """A flat gradient in the order of the ranks that its parts go to.

        Shards lie one behind the other. The replicas of a shard divide it, and are
        not neighbours in the group. The old order's buffer is given back, and then
        receives the parts: so a unit never has more than two whole gradients here.
        """
        shards = self.groups.gather.size
        if shards == 1 or self.replicas == 1:
            return full
        sent = self.pool.take(self.numel, self.precision.reduce)
        parts = full.view(shards, self.replicas, -1)
        by_replica = sent.view(self.replicas, shards, -1)
        by_replica.copy_(parts.transpose(0, 1))
        self.pool.give(full)
        return sent

    def _parts_came(self, full: Tensor, received: Tensor) -> None:
        """Add the parts of all ranks in the tree; the sum is this rank's part."""
        parts = received.view(self.copies.size, -1)
        for into, term in merges(self.copies.size):
            parts[into] += parts[term]
        if self.groups.gather.size == 1:
            shard = full
        else:
            shard = self.pool.take(self.part, self.precision.reduce)
            self.pool.give(full)
        self._own_part(shard).copy_(parts[0])
        self.pool.give(received)
        self._own_part_summed(shard)

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
