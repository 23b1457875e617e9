"""The matrices of a unit, for an optimizer that updates each of them whole.

The rule table says which weights are matrices (`Rules.matrices`). Each matrix has an
owner among the ranks that hold parts of it. Owners are chosen to balance the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..layout.matrices import assign_owners
from ..layout.optimizer_row import MatrixRow
from .data import Unit
from .tensor import Weight


class PackedMatrix(NamedTuple):
    """One of the matrices that a weight packs, such as its query, key or value rows.

    `name` is that of the matrix in a checkpoint: the weight's, and the matrix's number
    among all that the weight holds.
    """

    name: str
    rows: slice
    columns: slice

    @property
    def sides(self) -> tuple[int, int]:
        return (
            self.rows.stop - self.rows.start,
            self.columns.stop - self.columns.start,
        )


class Matrix(NamedTuple):
    """A matrix with one owner: a whole weight, or one expert's part of it."""

    weight: Weight
    start: int  # in the unit's flat order
    expert: int  # among those that the weight stacks, on all ranks; 0 if it stacks none
    work: float = 0.0  # multiply-adds of its update
    owner: int = 0  # rank in the group

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape on each tp rank, including padding."""
        return self.weight.local[-2:]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def parts(self) -> Iterator[PackedMatrix]:
        """Yield the matrices that are updated one by one: this one, or those it packs."""
        boxes = self.weight.matrices
        for number, (rows, columns) in enumerate(boxes):
            place = self.expert * len(boxes) + number
            yield PackedMatrix(f"{self.weight.name}[{place}]", rows, columns)

    def span(self, unit: Unit, shard: int) -> slice:
        """The elements of the matrix in a shard, relative to the shard's start."""
        # The part of [start, stop) that lies in this shard; empty if there is
        # none.
        begin, end = unit.part * shard, unit.part * (shard + 1)
        first = min(max(self.start, begin), end)
        return slice(first - begin, max(min(self.stop, end), first) - begin)


def matrices_of(unit: Unit, row: MatrixRow) -> list[Matrix]:
    """Return the matrices of a unit with their owners.

    Every unit starts with a different rank, since it may have fewer matrices than there
    are ranks.
    """
    found = list[Matrix]()
    for weight, offset in zip(unit.order, unit.offsets, strict=True):
        if not weight.matrices:
            continue
        stacked = weight.cuts[:-2]
        # Padding is not a matrix.
        experts = math.prod(cut.stop - cut.start for cut in stacked)
        first = stacked[0].start if stacked else 0
        work = sum(
            row.work(rows.stop - rows.start, columns.stop - columns.start)
            for rows, columns in weight.matrices
        )
        size = math.prod(weight.local[-2:])
        found += (
            Matrix(weight, offset + n * size, first + n, work)
            for n in range(experts)
        )
    # Heaviest first, to the rank with least work; units start at different
    # ranks.
    owners = assign_owners(
        [matrix.work for matrix in found],
        len(unit.groups.places),
        unit.number * len(found),
    )
    return [
        matrix._replace(owner=owner)
        for matrix, owner in zip(found, owners, strict=True)
    ]


def owned_elements(unit: Unit, row: MatrixRow) -> int:
    """The elements of the tensors that this rank keeps for the matrices that it owns."""
    group = unit.groups.matrices
    if group is None or not row.owned:
        return 0
    mine = (m for m in matrices_of(unit, row) if m.owner == group.rank)
    parts = (part for matrix in mine for part in matrix.parts())
    return sum(row.owned_elements(*part.sides) for part in parts)
