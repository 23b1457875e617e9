"""The weights of a block, as the rows of mixers and MLPs describe them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class BlockWeight(NamedTuple):
    """A weight: its name in the block, its dims by name, their lengths."""

    name: str
    dims: str
    lengths: tuple[int, ...]


def linear_weights(
    name: str, into: int, out: int, dims: str, *, bias: bool
) -> Iterator[BlockWeight]:
    """A linear layer's weights. `dims` name the weight's output and input features."""
    yield BlockWeight(f"{name}.weight", dims, (out, into))
    if bias:
        yield BlockWeight(f"{name}.bias", dims.split()[0], (out,))
