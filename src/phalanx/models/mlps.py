"""The table of MLPs: the layers within tokens that a block of the decoder may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from . import dense, experts_block
from .block import Block
from .sizes import DecoderSizes


class MlpKind(NamedTuple):
    """A kind of MLP: how a block gets one, and its lines of the decoder's rule table."""

    # True for a block that has it, by the model's sizes and the block's number.
    in_block: Callable[[DecoderSizes, int], bool]
    make: Callable[[DecoderSizes], nn.Module]
    block: type[Block]
    rules: str
    # If its tokens travel: the parts of the block, in the order of the data, and the
    # whole block with the terms of its losses. The block makes them.
    parts: tuple[type[nn.Module], ...] = ()
    with_losses: type[nn.Module] | None = None


def _routes(sizes: DecoderSizes, number: int) -> bool:
    return sizes.experts > 0 and number >= sizes.dense_layers


def _dense(sizes: DecoderSizes) -> nn.Module:
    return dense.Mlp(sizes, sizes.ffn)


# The first kind that a block has counts. The last is in all other blocks.
MLPS = (
    MlpKind(
        _routes,
        experts_block.experts_of,
        experts_block.ExpertBlock,
        experts_block.RULES,
        experts_block.PARTS,
        experts_block.BlockWithLosses,
    ),
    MlpKind(lambda sizes, number: True, _dense, Block, dense.RULES),
)
# The lines of the last kind match names of the others as well, such as shared MLPs.
RULES = "".join(kind.rules for kind in reversed(MLPS))
# All blocks and parts of blocks, and the blocks that can be split into parts.
BLOCKS = tuple(kind.block for kind in MLPS)
SPLIT = {kind.block: kind.parts for kind in MLPS if kind.parts}
PARTS = tuple(part for parts in SPLIT.values() for part in parts)
WITH_LOSSES = tuple(kind.with_losses for kind in MLPS if kind.with_losses)


def kind_of(sizes: DecoderSizes, number: int) -> MlpKind:
    """The kind of MLP of the block of this number."""
    return next(kind for kind in MLPS if kind.in_block(sizes, number))
