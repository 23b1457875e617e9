"""The order of an epoch: a permutation that is computed, so that nothing is stored and any place of
it can be asked for.

A Feistel network permutes the numbers of 2k bits; one that leaves 0..size-1 is sent through again
until it is back (cycle walking: Black and Rogaway 2002), which takes four rounds on average at most.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Permutation"]

ROUNDS = 8
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """The numbers 0 to size - 1 in an order that (seed, epoch) decide."""

    size: int
    seed: int
    epoch: int

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        said = hashlib.sha512(f"order:{self.seed}:{self.epoch}".encode()).digest()
        return tuple(int.from_bytes(said[8 * n : 8 * n + 8], "big") for n in range(ROUNDS))

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of a permutation of {self.size}")
        half = max(1, ((self.size - 1).bit_length() + 1) // 2)
        mask = (1 << half) - 1
        while True:
            left, right = place >> half, place & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            place = left << half | right
            if place < self.size:
                return place


def _mixed(x: int) -> int:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): every bit depends on every bit."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31
