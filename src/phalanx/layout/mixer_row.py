"""The row of a mixer: everything about a block's layer between tokens that needs no tensors.

Attention is a mixer, and so is any layer that replaces it. `mixers.py` is the table of
the rows. All other files read a row instead of naming a mixer other than attention.

The classes are in `models/mixers.py`, their cores under cp in `parallel/mixers.py`, and
the references of `verify` in `verification/mixers.py`. Bytes, kept tensors and messages are
in no row: `cost` finds them by running the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .block_weight import BlockWeight
from .codec import Mistake
from .layout import Layout
from .violation import Violation

if TYPE_CHECKING:
    from .shape import Shape


def _nothing(shape: Shape) -> None:
    """Fills no sizes."""


def _no_sizes(shape: Shape, head: int) -> Mapping[str, Any]:
    return {}


def _no_counts(shape: Shape) -> Mapping[str, int]:
    return {}


def _no_mistakes(shape: Shape) -> Iterator[Mistake]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class MixerRow:
    """Everything about a mixer that needs no tensors."""

    name: str  # in `mixers` of a shape
    work_name: str  # in a list of FLOPs
    hub_name: str  # in `layer_types` of a Hugging Face folder
    # Its weights in order of use, and its linears that may carry adapters.
    weights: Callable[[Shape], Iterator[BlockWeight]]
    linears: tuple[str, ...]
    # One token's multiply-adds outside linear layers, in a sequence of this length.
    work: Callable[[Shape, int], int]
    # The rules that a layout breaks.
    violations: Callable[[Layout, Shape], Iterator[Violation]]
    # Each token attends to earlier tokens: `work` counts pairs of tokens, and a window
    # limits it.
    pairs: bool = False
    cached: bool = False  # generation over ranks has a cache for it
    # The mixer's own sizes. `fill` derives missing ones, `mistakes` checks them, and
    # `shrunk` shrinks them for heads of `head` features.
    own_keys: type | None = None
    fill: Callable[[Shape], None] = _nothing
    mistakes: Callable[[Shape], Iterator[Mistake]] = _no_mistakes
    shrunk: Callable[[Shape, int], Mapping[str, Any]] = _no_sizes
    # The number of units of each dim that tp shards by whole units.
    unit_counts: Callable[[Shape], Mapping[str, int]] = _no_counts
