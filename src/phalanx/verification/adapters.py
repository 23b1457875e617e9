"""The table of adapters: the plain computation and initial values of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..layout import Shape
from ..layout.adapters import ADAPTERS
from ..layout.lora import LORA
from .lora import lora_output, lora_start

_OUTPUTS: dict[str, Callable[..., Tensor]] = {LORA.key: lora_output}
_STARTS: dict[str, Callable[..., Tensor]] = {LORA.key: lora_start}


def adapter_output(
    shape: Shape, w: Mapping[str, Tensor], name: str, x: Tensor
) -> Tensor:
    """The term that the adapter of a linear adds to its output."""
    assert shape.adapter is not None
    return _OUTPUTS[shape.adapter.key](shape, w, name, x)


def adapter_start(
    name: str, size: torch.Size, generator: torch.Generator
) -> Tensor:
    """The initial value of an adapter's weight."""
    key = next(row.key for row in ADAPTERS if row.mark in name)
    return _STARTS[key](name, size, generator)
