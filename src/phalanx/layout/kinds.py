"""Kinds of pieces: pieces that do the same work on weights of the same sizes.

Costs and prices are found once for each kind. A step adds up the costs of its pieces'
kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from .mlps import sizes_of_blocks

if TYPE_CHECKING:
    from .shape import Shape

Value = TypeVar("Value")
Other = TypeVar("Other")


@dataclass(frozen=True)
class ByKind(Generic[Value]):
    """One value for each kind of piece, and the kind of each of the model's pieces.

    Kinds are numbered in the order in which they occur: the embedding's first, the
    head's last, those of blocks in between.
    """

    values: tuple[Value, ...]
    kinds: tuple[int, ...]  # of each piece

    @classmethod
    def equal_blocks(
        cls, embed: Value, block: Value, head: Value, layers: int
    ) -> Self:
        """The values of a model whose blocks are all of one kind."""
        return cls((embed, block, head), (0, *[1] * layers, 2))

    def __getitem__(self, piece: int) -> Value:
        return self.values[self.kinds[piece]]

    def __iter__(self) -> Iterator[Value]:
        """The values of all pieces, in their order."""
        return (self.values[kind] for kind in self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def embed(self) -> Value:
        return self.values[0]

    @property
    def head(self) -> Value:
        return self.values[-1]

    @property
    def blocks(self) -> tuple[Value, ...]:
        """One value for each kind of block."""
        return self.values[1:-1]

    def map(self, of: Callable[[Value], Other]) -> ByKind[Other]:
        return ByKind(tuple(map(of, self.values)), self.kinds)


class BlockKind(NamedTuple):
    """Everything in which the blocks of one shape can differ."""

    frozen: bool
    mlp: str  # the layer within tokens, by its name in the table of MLPs
    window: int  # tokens that a token attends to; 0: all
    mixer: str  # the layer between tokens, by its name in a shape


def block_kind(shape: Shape, piece: int) -> BlockKind:
    mixer, mlp = shape.mixer(piece), shape.mlp(piece)
    return BlockKind(
        piece in shape.frozen,
        "" if mlp is None else mlp.name,
        shape.window(piece),
        "" if mixer is None else mixer.name,
    )


class BlockPart(StrEnum):
    """The part of a model's piece that a program's piece computes."""

    WHOLE = "whole"
    # Of a block that routes tokens: attention and routing; the routed MLPs, applied to
    # tokens received from other ranks; and their results, added to the residual stream.
    ROUTING = "routing"
    ROUTED = "routed"
    MERGING = "merging"


# The parts of a block that routes tokens, in the order of the data.
PARTS_APART = (BlockPart.ROUTING, BlockPart.ROUTED, BlockPart.MERGING)


def parts_of_pieces(
    shape: Shape, apart: bool
) -> tuple[tuple[int, BlockPart], ...]:
    """For each piece of a program, the shape's piece and the part of it.

    If routed MLPs are `apart`, a block with them is three pieces, between which tokens
    travel.
    """
    every = range(shape.pieces)
    parts = {
        p: PARTS_APART if apart and shape.routes(p) else (BlockPart.WHOLE,)
        for p in every
    }
    return tuple((piece, part) for piece in every for part in parts[piece])


@lru_cache(maxsize=64)
def one_block_of_each(shape: Shape) -> tuple[Shape, tuple[int, ...]]:
    """The shape with one block of each kind, and each piece's equal in it."""
    blocks = [block_kind(shape, piece) for piece in range(1, 1 + shape.layers)]
    # In order of first use, as the shape's keys require.
    kinds = list(dict.fromkeys(blocks))
    # In both shapes, blocks that predict later tokens are like the last one.
    if shape.predictors:
        kinds.remove(blocks[-1])
        kinds.append(blocks[-1])
    few = replace(
        shape,
        layers=len(kinds),
        windows=tuple(kind.window for kind in kinds) if shape.windows else (),
        mixers=tuple(kind.mixer for kind in kinds) if shape.mixers else (),
        **sizes_of_blocks([kind.mlp for kind in kinds]),
        freeze=_frozen(shape, kinds),
    )
    # Blocks of the small shape are numbered from 1: piece 0 is the embedding.
    numbers = {kind: number for number, kind in enumerate(kinds, 1)}
    ahead = []
    for piece in range(1 + shape.layers, shape.pieces - 1):
        # As many modules follow in both shapes.
        same = piece - shape.layers + few.layers
        if shape.is_block(piece):
            same = numbers.get(block_kind(shape, piece), same)
        ahead.append(same)
    return few, (
        0,
        *(numbers[kind] for kind in blocks),
        *ahead,
        few.pieces - 1,
    )


def _frozen(shape: Shape, kinds: Sequence[BlockKind]) -> tuple[str, ...]:
    """The names of the frozen pieces of a shape with one block of each of these kinds."""
    ends = tuple(name for name in ("embed", "head") if name in shape.freeze)
    return (
        *ends,
        *(
            f"layers.{number}"
            for number, kind in enumerate(kinds)
            if kind.frozen
        ),
    )
