"""The sizes of gated delta rule layers (`delta.py`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Value heads, key heads and their features; zero means a default.

    `delta_width` tokens are covered by the convolution, and `delta_chunk` tokens are
    computed at once.
    """

    delta_heads: int = 0
    delta_key_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_width: int = 4
    delta_chunk: int = 64

    def fill_delta(self, head_dim: int) -> None:
        """Put the values that follow from others in place of 0."""
        if not self.delta_heads:
            return
        fill = object.__setattr__
        key_dim = self.delta_key_dim or head_dim
        key_heads = self.delta_key_heads or self.delta_heads
        fill(self, "delta_key_heads", key_heads)
        fill(self, "delta_key_dim", key_dim)
        fill(self, "delta_value_dim", self.delta_value_dim or key_dim)
