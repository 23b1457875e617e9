"""The row of an optimizer: everything about it that needs no tensors.

A row says what the optimizer keeps for a weight, what it computes, and which keys of a
run file are its own. `optimizers.py` is the table of the rows. All other files read a
row, and name no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from .choices import BF16


class Matmuls(NamedTuple):
    """Equal matmuls of an m x k by a k x n matrix, in one step.

    `times` is a mean over steps, so it may be a fraction.
    """

    times: float
    m: int
    k: int
    n: int

    @property
    def multiply_adds(self) -> float:
        return self.times * self.m * self.k * self.n


class OwnedTensor(NamedTuple):
    """A tensor that the owner of a matrix keeps for it, and no other rank does.

    `sides` are two letters: `r` is the matrix's number of rows, `c` its number of
    columns. `rr` is a square tensor of size rows x rows.
    """

    kind: str  # its name in a checkpoint
    sides: str

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        length = {"r": rows, "c": columns}
        return length[self.sides[0]], length[self.sides[1]]


@dataclass(frozen=True)
class MatrixRow:
    """The update of whole matrices, each by the rank that owns it.

    Gradients travel to the owners before an update and its results travel back.
    `matmuls` are those of one matrix in a step, by its rows and columns. Elements of
    matrices have the moments `sharded`, on the ranks that hold the elements.
    """

    title: str  # in a sentence about its work
    matmuls: Callable[[int, int], tuple[Matmuls, ...]]
    sharded: tuple[str, ...] = ()
    owned: tuple[OwnedTensor, ...] = ()
    # In which a GPU computes and sends; a CPU keeps the weights' dtype.
    gpu_dtype: str = BF16

    def work(self, rows: int, columns: int) -> float:
        """The multiply-adds of a matrix in one step."""
        return sum(each.multiply_adds for each in self.matmuls(rows, columns))

    def owned_elements(self, rows: int, columns: int) -> int:
        """The elements of all tensors that the owner of a matrix keeps for it."""
        return sum(prod(each.shape(rows, columns)) for each in self.owned)


@dataclass(frozen=True)
class OptimizerRow:
    """Everything about an optimizer that needs no tensors.

    `moments` are the tensors kept for a weight that is no matrix. `keys` of a run file
    have an effect on this optimizer and not on all. `variants` are further settings that `verify`
    compares.
    """

    name: str  # in a run file
    stored: str  # in a checkpoint
    moments: tuple[str, ...]
    matrices: MatrixRow | None = None
    keys: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    counts: bool = True  # a checkpoint holds its number of updates

    @property
    def whole_matrices(self) -> bool:
        return self.matrices is not None

    @property
    def owned(self) -> tuple[OwnedTensor, ...]:
        return self.matrices.owned if self.matrices else ()

    @property
    def every_moment(self) -> tuple[str, ...]:
        """The kinds of tensors in a checkpoint beside weights."""
        sharded = self.matrices.sharded if self.matrices else ()
        owned = (each.kind for each in self.owned)
        return tuple(dict.fromkeys((*self.moments, *sharded, *owned)))

    def kept(self, *, matrix: bool) -> tuple[str, ...]:
        """The tensors kept for each element of a weight, or of a whole matrix."""
        if matrix and self.matrices:
            return self.matrices.sharded
        return self.moments
