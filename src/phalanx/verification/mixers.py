"""The table of reference implementations of mixers other than attention.

Attention's own reference is in `plain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Shape
from . import plain_delta

Weights = Mapping[str, Tensor]
# The linear layer of a name, applied to x; see `plain.linear`.
Linear = Callable[[str, Tensor], Tensor]
Layer = Callable[[Shape, Weights, Linear, Tensor, Tensor | None], Tensor]
Start = Callable[[str, torch.Size, torch.Generator], Tensor | None]


class PlainMixer(NamedTuple):
    """The reference of a mixer.

    `layer` mixes x (B, T, C) with its documents. `start` draws the initial value of a
    weight that only this mixer has, and returns None for any other. `narrow` are its
    operations with 16-bit results, as in `wide.py`.
    """

    layer: Layer
    start: Start
    narrow: Mapping[str, str]


MIXERS = {
    "delta": PlainMixer(
        plain_delta.delta_layer, plain_delta.delta_start, plain_delta.NARROW
    ),
}


def own_start(
    name: str, size: torch.Size, generator: torch.Generator
) -> Tensor | None:
    """The initial value of a weight that only one of these mixers has, or None."""
    for mixer in MIXERS.values():
        start = mixer.start(name, size, generator)
        if start is not None:
            return start
    return None


def narrow_operations() -> dict[str, str]:
    """The operations with 16-bit results of all these mixers, by function."""
    return {
        function: names
        for mixer in MIXERS.values()
        for function, names in mixer.narrow.items()
    }
