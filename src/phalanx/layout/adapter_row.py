"""The row of an adapter: everything about it that needs no tensors.

An adapter's output is added to that of a linear layer. The adapters' weights are
trained, and all other weights are frozen. `adapters.py` is the table of the rows. All
other files read a row instead of naming an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .rules import ADAPTER, AXIS_OF

if TYPE_CHECKING:
    from .shape import Shape


class AdapterWeight(NamedTuple):
    """A matrix of an adapter.

    `sides` are two letters: `o` is the linear's number of outputs, `i` that of its
    inputs, and `r` the adapter's rank.
    """

    name: str
    sides: str

    def dims(self, linear: Sequence[str]) -> str:
        """The names of the dims beside a linear with dims (out, into)."""
        out, into = linear
        # Beside a sharded weight, each rank of tp uses the whole matrix for different
        # work.
        rank = ADAPTER if {out, into} & AXIS_OF.keys() else "-"
        of_side = {"o": out, "i": into, "r": rank}
        return " ".join(of_side[side] for side in self.sides)

    def lengths(self, linear: Sequence[int], rank: int) -> tuple[int, ...]:
        """The lengths of the dims beside a linear of shape (out, into)."""
        out, into = linear
        of_side = {"o": out, "i": into, "r": rank}
        return tuple(of_side[side] for side in self.sides)


@dataclass(frozen=True)
class AdapterRow:
    """Everything about a kind of adapter that needs no tensors.

    `keys` are the keys of a shape, each with its key in a run file. The first is the
    rank, which is 0 without adapters; `targets` lists linears, or none for all.
    """

    name: str  # in a sentence
    key: str  # the table in a run file, and a part of its weights' names
    keys: Mapping[str, str]
    targets: str
    weights: tuple[AdapterWeight, ...]
    # The keys of a shape from a run's table; empty if it chooses no adapters.
    sizes: Callable[[Any], dict[str, Any]]
    small_rank: int  # in a scaled-down run
    # Columns of others' tables with the rank, and the rank that they usually mean.
    columns: tuple[str, ...]
    usual_rank: int

    @property
    def rank(self) -> str:
        """The key of a shape that holds the rank."""
        return next(iter(self.keys))

    def settings(self, shape: Shape) -> dict[str, Any]:
        """The shape's values of the other keys, by the names of a run's table."""
        return {
            key.removeprefix(f"{self.key}."): getattr(shape, own)
            for own, key in self.keys.items()
            if own not in (self.rank, self.targets)
        }

    @property
    def mark(self) -> str:
        """The part of a weight's name that marks an adapter's weight."""
        return f".{self.key}."

    def rank_of(self, shape: Shape) -> int:
        """The rank of a shape's adapters; 0: it has none of this kind."""
        rank: int = getattr(shape, self.rank)
        return rank

    def with_rank(
        self, shape: Shape, rank: int, targets: tuple[str, ...] = ()
    ) -> Shape:
        """The shape with adapters of this kind; without targets, in those it names."""
        sizes: dict[str, Any] = {self.rank: rank}
        if targets:
            sizes[self.targets] = targets
        return replace(shape, **sizes)

    def targets_of(self, shape: Shape) -> tuple[str, ...]:
        """The linear layers that a shape names; empty: every one in its blocks."""
        named: tuple[str, ...] = getattr(shape, self.targets)
        return named
