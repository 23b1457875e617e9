"""The row of a block's MLP: everything about it that needs no tensors.

`mlps.py` is the table of the rows. All other files read a row, or ask a shape for its
`routed` MLPs, instead of naming experts.

The modules are in `models/mlps.py`. Bytes, kept tensors and messages are in no row:
`cost` finds them by running the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .block_weight import BlockWeight
from .codec import Mistake
from .layout import Layout
from .violation import Violation

if TYPE_CHECKING:
    from .shape import Shape


@dataclass(frozen=True)
class RoutedMlps:
    """The MLPs of a block among which its tokens are distributed; by default none."""

    count: int = 0  # in a block, over all ranks
    chosen: int = 1  # those that one token passes through
    width: int = 0  # features inside each
    beside: int = (
        0  # features inside the MLP that all tokens pass through as well
    )


class ChoiceLosses(NamedTuple):
    """Flags of the losses over the choices of a sequence, and of the whole batch."""

    sequence: bool = False
    batch: bool = False


def _in_no_block(shape: Shape, number: int) -> bool:
    return False


def _no_keys(names: Sequence[str]) -> Mapping[str, Any]:
    return {}


def _nothing(shape: Shape) -> None:
    """Fills no sizes."""


def _no_mistakes(shape: Shape) -> Iterator[Mistake]:
    yield from ()


def _no_sizes(shape: Shape, shrink: Callable[[int], int]) -> Mapping[str, Any]:
    return {}


def _none_routed(shape: Shape) -> RoutedMlps:
    return RoutedMlps()


def _no_losses(shape: Shape) -> ChoiceLosses:
    return ChoiceLosses()


def _no_results(shape: Shape) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class MlpRow:
    """Everything about a block's MLP that needs no tensors."""

    name: str
    # True for a block with this MLP in place of the usual one; blocks count from 0.
    in_block: Callable[[Shape, int], bool] = _in_no_block
    # The keys with which the blocks of a shape have the MLPs of these names.
    sizes_of_blocks: Callable[[Sequence[str]], Mapping[str, Any]] = _no_keys
    # Its weights in order of use, and its linears that may carry adapters.
    weights: Callable[[Shape], Iterator[BlockWeight]]
    linears: tuple[str, ...]
    # The widths that tp shards, by their keys.
    widths: Callable[[Shape], Mapping[str, int]]
    # The rules that a layout breaks.
    violations: Callable[[Layout, Shape], Iterator[Violation]]
    # Tokens are distributed among several MLPs, which ranks may share. Their weights
    # have names with this prefix.
    routed: Callable[[Shape], RoutedMlps] = _none_routed
    routed_prefix: str = ""
    # Tensors that go from routing to merging without passing through these MLPs.
    results: Callable[[Shape], tuple[str, ...]] = _no_results
    losses: Callable[[Shape], ChoiceLosses] = _no_losses
    # Its own sizes. `fill` derives missing ones and `mistakes` checks them. `shrunk`
    # returns the sizes of a small form; its second argument shrinks a width.
    fill: Callable[[Shape], None] = _nothing
    mistakes: Callable[[Shape], Iterator[Mistake]] = _no_mistakes
    shrunk: Callable[[Shape, Callable[[int], int]], Mapping[str, Any]] = (
        _no_sizes
    )
