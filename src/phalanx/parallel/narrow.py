"""Weights gathered in 8 bits: units whose matrices have one scale for each tile.

A rank rounds its shard before sending it, and matmuls use the gathered bytes as they
are. So the buffer takes half the memory, and nothing is rounded for each matmul. The
values equal those of the whole weight rounded afterwards: a tile that lies in several
ranks' shards uses the maximum over all of them. Scales per row or per 32 elements
differ between a weight and its transpose, which the input's gradient needs; two copies
in 8 bits would save nothing against one in 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Work
from .data import Entry, Precision, Unit
from .groups import UnitGroups
from .low_precision import EightBits, largest_of
from .model import Model
from .pieces import narrowable
from .pool import BufferPool
from .tensor import Weight
from .works import ChainedWork


def narrow_names(model: Model, matmul: object) -> frozenset[str]:
    """The weights only multiplied in 8 bits, with one 8-bit copy both ways."""
    one_copy = isinstance(matmul, EightBits) and matmul.one_copy
    return linear_weights(model) if one_copy else frozenset()


def linear_weights(model: Model) -> frozenset[str]:
    """The weights of blocks that only linear layers read."""
    # transformers' code may read a weight elsewhere than in a matmul.
    if model.original:
        return frozenset()
    names = {parameter: name for name, parameter in model.weights.items()}
    shared = {unit for _, unit in model.tied}
    blocks = [module for _, module in model.pieces[1:-1]]
    weights: list[nn.Parameter] = [
        child._parameters["weight"]  # type: ignore[misc]
        for block in blocks
        for child in narrowable(block)
    ]
    found = {names[weight] for weight in weights if weight.dim() == 2}
    return frozenset(
        name for name in found if model.unit_of[name] not in shared
    )


class NarrowUnit(Unit):
    """A unit with matrices gathered in 8 bits: one byte per element of its buffer.

    The other weights (norms, biases, routers) are always whole here, in the compute
    dtype. An update changes them and each tile's maximum. Once a step, before the first
    gather, an all-reduce of maxima brings both to all ranks, each of which contributes
    its own part.
    """

    scaled = True

    def __init__(
        self,
        number: int,
        weights: Sequence[Weight],
        groups: UnitGroups,
        pool: BufferPool,
        precision: Precision,
        *,
        narrow: frozenset[str],
        **more: Any,
    ) -> None:
        assert isinstance(precision.matmul, EightBits)
        self.matmul, self.run = precision.matmul, precision.matmul.traits.run
        self.narrow = narrow
        super().__init__(number, weights, groups, pool, precision, **more)
        # (out / run, in / run) for a matrix in tiles, the whole shape for other weights
        shapes = {
            w.name: self._squares(w.local) if w.name in narrow else w.local
            for w in weights
        }
        numbers = [math.prod(shape) for shape in shapes.values()]
        device = pool.device
        self.common = torch.empty(
            sum(numbers), dtype=self.precision.compute, device=device
        )
        views = zip(
            shapes.items(), torch.split(self.common, numbers), strict=True
        )
        # For a matrix, the maximum of each tile; for other weights, all values.
        self.views = {name: flat.view(shape) for (name, shape), flat in views}
        self.scales = {
            name: torch.empty(shapes[name], device=device)
            for name in sorted(narrow)
        }
        self.beside = sum(
            x.nbytes for x in (self.common, *self.scales.values())
        )
        self._bind_others()

    def _squares(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(-(-n // self.run) for n in shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.matmul.traits.forward)
        return dtype

    @torch.no_grad()
    def gather(self) -> Work:
        # this rank's part of the gather, one byte for each element
        own = torch.zeros(
            self.part, dtype=torch.uint8, device=self.pool.device
        )
        for (weight, start, stop, at), rows, squares in self._rows():
            # (rows, columns), without the columns that fill up the last tile
            numbers = self.matmul.narrowed(rows, squares).numbers[
                :, : rows.shape[1]
            ]
            numbers = numbers.reshape(-1).view(torch.uint8)
            # elements in the first row of tiles that belong to other ranks
            before = start % (weight.local[1] * self.run)
            own[at : at + stop - start] = numbers[
                before : before + stop - start
            ]
        # Sent as plain bytes: not every backend knows fp8.
        whole = self._take().view(torch.uint8)
        return self.groups.gather.all_gather(
            whole, own, still=True, wait=False
        )

    @torch.no_grad()
    def agree_scales(self) -> Work:
        """Start sending all ranks what updates changed besides the 8-bit values."""
        # -inf is neutral in the maximum: each rank fills in only its own part.
        self.common.fill_(-math.inf)
        for (weight, start, stop, _), part in self._parts():
            if weight.name not in self.narrow:
                self.views[weight.name].view(-1)[start:stop] = part
        for _, rows, squares in self._rows():
            squares.copy_(largest_of(rows, self.run, square=True))
        group = self.groups.scales
        assert group is not None, (
            f"unit {self.number} has no group for its scales"
        )
        return ChainedWork(
            group.all_reduce(self.common, "max", wait=False), self._rescale
        )

    @torch.no_grad()
    def _rescale(self) -> None:
        # Every rank derives the same scales from the agreed maxima.
        for name, scales in self.scales.items():
            scales.copy_(self.matmul.scales(self.views[name]))

    def _parts(self) -> Iterator[tuple[Entry, Tensor]]:
        for entry in self.entries():
            part = self.home[
                entry.offset : entry.offset + entry.stop - entry.start
            ]
            yield entry, part.to(self.pool.device, self.precision.compute)

    def _rows(self) -> Iterator[tuple[Entry, Tensor, Tensor]]:
        """Yield whole rows of each matrix from a tile on, with maxima of tiles.

        Elements that other ranks hold are zero.
        """
        for entry, part in self._parts():
            name, columns = entry.weight.name, entry.weight.local[-1]
            if name not in self.narrow:
                continue
            square = columns * self.run  # elements in a row of tiles
            # Maxima are of whole tiles, so the rows begin with the first one's.
            first, before = divmod(entry.start, square)
            rows = part.new_zeros(
                -(-entry.stop // columns) - first * self.run, columns
            )
            rows.view(-1)[before : before + len(part)] = part
            yield (
                entry,
                rows,
                self.views[name][first : first + -(-len(rows) // self.run)],
            )

    def drop(self) -> None:
        super().drop()
        self._bind_others()

    def _bind(self, buffer: Tensor) -> None:
        # Only matrices view the gathered buffer; the other weights view `common`.
        self.buffer = buffer
        for weight, offset in zip(self.order, self.offsets, strict=True):
            if weight.name in self.narrow:
                flat = buffer[offset : offset + math.prod(weight.local)]
                self.parameters[weight.name].data = flat.view(weight.local)

    def _bind_others(self) -> None:
        for name, parameter in self.parameters.items():
            if name not in self.narrow:
                parameter.data = self.views[name]
