"""A transformer block: a mixer and an MLP, each added to the residual stream.

`mixers.py` and `mlps.py` are the tables of both kinds of layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .noise import Dropout, block_noise
from .norm import norm_of
from .side_by_side import SideBySide
from .sizes import DecoderSizes


class NumberedPart(nn.Module):
    """A block of the decoder, or a part of one.

    `piece` is the block's number in the model and seeds its dropout. It is a tensor
    because an int that differs from block to block would make torch.compile compile
    each block anew.
    """

    piece: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        # The underscore hides the number: blocks that differ in nothing else are of one
        # kind.
        self._number = number
        self.register_buffer("piece", torch.tensor([number]), persistent=False)

    def own_noise(self, noise: Tensor | None) -> Tensor | None:
        return None if noise is None else block_noise(noise, self.piece)

    def reset_buffers(self) -> None:
        """Number the block again, after `to_empty` has left its number undefined."""
        self.piece.fill_(self._number)


class Block(NumberedPart):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Norms may also, or only, follow attention and the MLP. A norm that is None is
    absent.
    """

    def __init__(
        self,
        piece: int,
        attn: nn.Module,
        mlp: nn.Module,
        sizes: DecoderSizes,
    ) -> None:
        super().__init__(piece)
        norm = partial(norm_of, sizes.norm, sizes.hidden, sizes.eps)
        before, behind = sizes.norms != "post", sizes.norms != "pre"
        self.attn_norm = norm() if before else None
        self.mlp_norm = norm() if before else None
        self.attn_post_norm = norm() if behind else None
        self.mlp_post_norm = norm() if behind else None
        self.attn, self.mlp = attn, mlp
        # Without a norm, the residual connection reads the input too.
        for part in (attn, mlp):
            if isinstance(part, SideBySide):
                part.only_reader = before and not part.reads_elsewhere
        # Dropout stands outside attn and mlp. So sums over ranks that complete their
        # outputs run first, and where the residual stream is sharded in time, its noise
        # is sharded with it.
        self.attn_dropout = Dropout(sizes.dropout, place=1)
        self.mlp_dropout = Dropout(sizes.dropout, place=2)

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor,
        angles: Tensor | None = None,
        documents: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        noise = self.own_noise(noise)
        x = attend(self, x, positions, angles, documents, document_ids, noise)
        m = self.mlp(through(self.mlp_norm, x))
        return add_mlp(self, x, m, noise)


# ---- shared by blocks and their parts


def through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def attend(
    block: Any,
    x: Tensor,
    positions: Tensor,
    angles: Tensor | None,
    documents: Tensor | None,
    document_ids: Tensor | None,
    noise: Tensor | None,
) -> Tensor:
    """The first half of a block: attention and its residual connection."""
    # (B, T, hidden); with `seq`, x holds this rank's part of the time dim
    normed = through(block.attn_norm, x)
    a = block.attn(normed, positions, documents, noise, angles, document_ids)
    a = through(block.attn_post_norm, a)
    if noise is not None:
        a = block.attn_dropout(a, noise)
    y: Tensor = x + a
    return y


def add_mlp(
    block: Any,
    x: Tensor,
    m: Tensor,
    noise: Tensor | None,
) -> Tensor:
    """The end of a block: adds the MLP's output `m` (B, T, hidden) to the residual."""
    m = through(block.mlp_post_norm, m)
    if noise is not None:
        m = block.mlp_dropout(m, noise)
    y: Tensor = x + m
    return y
