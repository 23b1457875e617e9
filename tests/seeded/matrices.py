"""Seeded faults of an optimizer that needs whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor

from phalanx.parallel.tensor import Weight
from phalanx.training.matrices import MatrixUpdate
from phalanx.training.muon import Muon

from .fault import fault, swapped

UPDATE = "step 0: the weight of layers."


def in_parts(
    parts: Callable[[Weight], Iterable[tuple[slice, ...]]],
) -> AbstractContextManager[None]:
    """Orthogonalize these parts of a weight instead of each matrix."""
    right = MatrixUpdate._wholes

    def wholes(self: MatrixUpdate) -> dict[int, Tensor]:
        found = right(self)
        self.mine = [
            b._replace(
                weight=replace(b.weight, matrices=tuple(parts(b.weight)))
            )  # type: ignore[arg-type]
            for b in self.mine
        ]
        return found

    return swapped(MatrixUpdate, "_wholes", wholes)


@fault(
    "muon: each rank of tp updates only its shard",
    "gqa",
    "tp2",
    UPDATE,
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    return in_parts(lambda weight: [weight.box_at(tp) for tp in range(2)])


@fault(
    "muon: each shard is updated separately",
    "gqa",
    "dp2 zero1",
    UPDATE,
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    def halves(weight: Weight) -> list[tuple[slice, ...]]:
        rows, columns = weight.shape[0], slice(0, weight.shape[1])
        return [
            (slice(0, rows // 2), columns),
            (slice(rows // 2, rows), columns),
        ]

    return in_parts(halves)


@fault(
    "muon: padding rows count in the scale",
    "gqa",
    "dp3 zero1",
    UPDATE,
    optimizer="muon",
)
def _() -> AbstractContextManager[None]:
    right = Muon.scale_of

    def scale_of(self: Muon, rows: int, columns: int) -> float:
        return right(self, -(-rows // 3) * 3, columns)

    return swapped(Muon, "scale_of", scale_of)
