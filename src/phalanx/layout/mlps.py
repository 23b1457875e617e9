"""The table of MLPs, the layers within tokens of a block, and their keys in a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .codec import Mistake
from .dense import DENSE
from .experts import EXPERTS, ExpertKeys, sharing_violations
from .mlp_row import MlpRow, RoutedMlps

if TYPE_CHECKING:
    from .shape import Shape

__all__ = ["sharing_violations"]

# The usual one is the last: the others say which blocks have them.
MLPS = (EXPERTS, DENSE)


@dataclass(frozen=True, kw_only=True)
class MlpKeys(ExpertKeys):
    """The keys of a shape about MLPs, other than the width of the usual one."""


def mlp_of_block(shape: Shape, number: int) -> MlpRow:
    """The row of the block of this number, counted from 0."""
    for row in MLPS:
        if row.in_block(shape, number):
            return row
    return DENSE


def mlps_in(shape: Shape) -> tuple[MlpRow, ...]:
    """The rows of the MLPs that a shape's blocks have, in the table's order."""
    if shape.kind != "decoder":
        return ()
    numbers = range(shape.layers)
    names = {mlp_of_block(shape, number).name for number in numbers}
    return tuple(row for row in MLPS if row.name in names)


def mlp_linears(shape: Shape) -> tuple[str, ...]:
    """The linears of MLPs that may carry adapters: those that all blocks' MLPs have."""
    rows = mlps_in(shape)
    every = rows[0].linears if rows else ()
    shared = (name for name in every if all(name in x.linears for x in rows))
    return tuple(shared)


def routed_mlps(shape: Shape) -> RoutedMlps:
    """The MLPs of a block among which tokens are distributed."""
    for row in mlps_in(shape):
        routed = row.routed(shape)
        if routed.count:
            return routed
    return RoutedMlps()


def fill_widths(shape: Shape) -> None:
    """Put values that follow from others in place of 0."""
    for row in MLPS:
        row.fill(shape)


def mlp_mistakes(shape: Shape) -> Iterator[Mistake]:
    """Conflicts between sizes that are valid alone."""
    for row in MLPS:
        yield from row.mistakes(shape)


def sizes_of_blocks(names: Sequence[str]) -> Mapping[str, Any]:
    """The keys with which a shape's blocks have the MLPs of these names, in order."""
    sizes: dict[str, Any] = {}
    for row in MLPS:
        sizes |= row.sizes_of_blocks(names)
    return sizes


def shrunk_mlps(
    shape: Shape, shrink: Callable[[int], int]
) -> Mapping[str, Any]:
    """The sizes of a small form; `shrink` makes a width smaller."""
    sizes: dict[str, Any] = {}
    for row in mlps_in(shape):
        sizes |= row.shrunk(shape, shrink)
    return sizes
