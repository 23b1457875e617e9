"""A piece of the model on one rank, cut from autograd at its edges.

Forward keeps a piece's input and output; backward is an explicit call from the output's gradient to
the input's. While a forward runs, a hook packs every saved view of a weight as (unit, place), and
unpacks it from whatever buffer holds the unit then: so a dropped unit is really free in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .shard import Unit

__all__ = ["Piece"]


class _Packed(NamedTuple):
    unit: Unit
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Piece:
    """One piece: runs forward, backward, and again."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        takes: Sequence[str],
        *,
        first: bool,
        last: bool,
    ) -> None:
        self.module, self.units, self.takes = module, tuple(units), tuple(takes)
        self.first, self.last = first, last
        self.kept: dict[int, tuple[Tensor | None, Tensor]] = {}

    def forward(
        self, microbatch: int, x: Tensor | None, batch: Mapping[str, Tensor], *, keep: bool
    ) -> Tensor:
        """The piece's output; with `keep` also what its backward needs."""
        named = {name: batch[name] for name in self.takes if name in batch}
        if not keep:
            with torch.no_grad():
                return self._call(x, named)
        edge = x
        if x is not None and x.is_floating_point():
            edge = x.detach().requires_grad_()
        with torch.enable_grad(), self._packing():
            y = self._call(edge, named)
        self.kept[microbatch] = (edge, y)
        return y.detach()

    def _call(self, x: Tensor | None, named: Mapping[str, Tensor]) -> Tensor:
        y: Tensor = self.module(**named) if self.first else self.module(x, **named)
        return y

    def backward(self, microbatch: int, gradient: Tensor) -> Tensor | None:
        """Add to the units' gradients and return the input's; what was kept is let go."""
        edge, y = self.kept.pop(microbatch)
        for unit in self.units:
            unit.open()
        if y.requires_grad:
            torch.autograd.backward(y, gradient)
        return None if edge is None else edge.grad

    def _packing(self) -> AbstractContextManager[Any]:
        units = [u for u in self.units if not u.resident]
        if not units:
            return nullcontext()
        homes = {u.buffer.untyped_storage().data_ptr(): u for u in units if u.buffer is not None}

        def pack(tensor: Tensor) -> Tensor | _Packed:
            unit = homes.get(tensor.untyped_storage().data_ptr())
            if unit is None:
                return tensor
            return _Packed(unit, int(tensor.storage_offset()), tensor.shape, tensor.stride())

        def unpack(packed: Tensor | _Packed) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            assert packed.unit.buffer is not None, (
                f"backward needs unit {packed.unit.number}, which is dropped"
            )
            return packed.unit.buffer.as_strided(packed.shape, packed.stride, packed.offset)

        return saved_tensors_hooks(pack, unpack)
