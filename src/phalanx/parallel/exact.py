"""A unit whose gradients are added in one fixed tree, whatever the layout.

Each microbatch has a whole gradient of its own, a leaf. An addition puts it into the
tree and makes the sums that it completes (`program/tree.py`). Ranks then send each other
the parts of their sums, and the owner of a part adds those of all ranks by the same
tree. So each element is the same sum of the same terms as on one process.

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
from .data import Unit, numel_of
from .groups import UnitGroups
from .tensor import Weight
from .works import ChainedWork

ALIGNED = 64  # elements: a multiple of every vector that a kernel uses


@dataclass
class _Leaf:
    """The whole gradient of one microbatch, and its matrices without a contribution."""

    full: Tensor
    fresh: set[str] = field(default_factory=set)


class ExactUnit(Unit):
    """The weights of one piece on one rank, with gradients summed in the tree."""

    def __init__(self, *given: Any, **terms: Any) -> None:
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
    def is_open(self) -> bool:
        return bool(self.leaves) or any(self.sums.values())

    def open(self, user: int = 0, microbatch: int = 0) -> None:
        """Let the backward of a piece write a leaf of its own for each microbatch."""
        key = user, microbatch
        if key == self.bound:
            return
        if key in self.leaves:
            leaf = self.leaves[key]
            self._bind_gradient(leaf.full)
        else:
            full = self.pool.take(self.numel, self.precision.reduce)
            leaf = self.leaves[key] = _Leaf(full, {*self._matrices})
            self._bind_gradient(full)
            for parameter in self._others:
                assert parameter.grad is not None
                parameter.grad.zero_()
            for run in self._padding:
                full[run].zero_()
        self.fresh, self.bound = leaf.fresh, key

    @torch.no_grad()
    def leaf(self, user: int, microbatch: int) -> dict[str, Tensor]:
        """One microbatch's gradient of each weight, before it is added."""
        self.open(user, microbatch)
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad
            if name in self.fresh:  # no product has written it
                parameter.grad.zero_()
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
        ((_, full),) = self.sums.pop(user).items()
        if self.copies.size == 1:
            return ChainedWork(Work(), lambda: self.summed(full, full))
        sent = self._by_rank(full)
        received = self.pool.take(self.numel, self.precision.reduce)
        work = self.copies.all_to_all(received, sent, wait=False)
        return ChainedWork(work, lambda: self._parts_came(sent, received))

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
        if self.replicas == 1:
            self.summed(shard, shard)
        else:
            self.parts.append(shard)

    def _own_part(self, shard: Tensor) -> Tensor:
        """The part of a shard that this rank adds."""
        return shard.view(self.replicas, -1)[self.groups.replica.rank]

    def share_sums(self) -> Work:
        """Start gathering a shard's other parts from its replicas."""
        shard = self.parts.pop(0)
        own = self._own_part(shard)
        work = self.groups.replica.all_gather(shard, own, wait=False)
        return ChainedWork(work, lambda: self.summed(shard, shard))
