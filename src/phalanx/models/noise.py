"""Dropout by a hash of integers, so that layouts and recomputation keep it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WORD = 0xFFFFFFFF
# The number of the embedding, larger than that of any block.
EMBEDDING = (1 << 31) - 1


def _scramble(x: Any) -> Any:
    """A 32-bit hash of 32-bit integers (a Python int, or an int64 tensor).

    The multipliers are below 2^31, so no product leaves 63 bits: signed overflow is undefined in
    compiled C++. They were found by C. Wellons' search for low bias ("hash prospector").
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def _stir(key: Any, salt: Any) -> Any:
    """Derive a new key from a 32-bit key and a number below 2^31."""
    return _scramble((key + salt * 0x9E3779B1) & _WORD)


def token_noise(seed: int, step: int, tokens: Tensor) -> Tensor:
    """A step's noise: a 63-bit key from each token's index in the whole batch."""
    # Bits 32 to 62 hold the seed and the step, bits 0 to 31 the token's index.
    above: int = _stir(_scramble(seed & _WORD), step & (_WORD >> 1)) >> 1
    return tokens + (above << 32)


def block_noise(noise: Tensor, piece: Tensor | int) -> Tensor:
    """The 32-bit keys of one block's tokens, from their noise and its number."""
    folded = _scramble(_scramble(noise & _WORD) ^ ((noise >> 32) & _WORD))
    keys: Tensor = _stir(folded, piece)  # (B, T)
    return keys


class Dropout(nn.Module):
    """Zeroes a share of the features of each token: the same ones in every layout.

    A hash of the token's noise, the `place` in the block and the feature's index in the
    unsharded width decides about each feature. Recomputing therefore draws the same
    mask, and so does a rank that holds only some tokens or heads. Without noise nothing
    is dropped.
    """

    def __init__(self, rate: float, place: int) -> None:
        super().__init__()
        self.rate, self.place = rate, place

    def forward(
        self, x: Tensor, noise: Tensor | None, index: Tensor | None = None
    ) -> Tensor:
        """`x` (B, T, features), `noise` (B, T), `index` (features) or None for 0, 1, 2,
        ...
        """
        if noise is None or self.rate == 0.0:
            return x
        if index is None:
            index = torch.arange(x.shape[-1], device=x.device)
        # Uniform in [0, 2^32) for each feature, which is kept from rate * 2^32 on.
        # (B, T, features)
        draw = _stir(_stir(noise, self.place).unsqueeze(-1), index)
        # `where` keeps one byte per element for backward; a product would keep the mask
        # in x's dtype.
        return torch.where(
            draw >= round(self.rate * 2**32),
            x * (1.0 / (1.0 - self.rate)),
            0.0,
        )
