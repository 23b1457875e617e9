"""The place of a tensor's local part in the whole tensor, from a DTensor's placements or a flat buffer."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sketch import NUMBERS, PRIME, coverage, sketch


@dataclass(frozen=True)
class Block:
    """A product of sets of global indices, one along each axis, in a run of a flat local tensor.

    Elements `first` and following of the flat tensor have the shape `sizes`. They may be more than the
    indices, as padding follows.
    """

    first: int
    sizes: tuple[int, ...]
    indices: tuple[Tensor, ...]

    @cached_property
    def cover(self) -> int:
        return coverage(self.indices)

    @property
    def count(self) -> int:
        return math.prod(along.numel() for along in self.indices)

    def of(self, flat: Tensor) -> Tensor:
        """The elements of this block, without padding."""
        run = flat[self.first : self.first + math.prod(self.sizes)]
        real = tuple(slice(along.numel()) for along in self.indices)
        return run.view(self.sizes)[real]


@dataclass(frozen=True)
class Place:
    """The elements of a whole tensor that this rank holds, as disjoint blocks of its local tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    blocks: tuple[Block, ...]
    # Coordinates on the mesh dimensions over which the local tensors are summands, not copies.
    summand: str = ""

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        indices: tuple[Tensor, ...],
        summand: str = "",
    ) -> "Place":
        """The place of a local tensor that has these indices along its axes."""
        sizes = tuple(along.numel() for along in indices)
        return cls(shape, (Block(0, sizes, indices),), summand)

    @property
    def indices(self) -> tuple[Tensor, ...]:
        """The indices along each axis of a local tensor that is not flat."""
        (block,) = self.blocks
        return block.indices

    @cached_property
    def cover(self) -> int:
        """A number to which disjoint places add up: see `sketch.coverage`."""
        return sum(block.cover for block in self.blocks) % PRIME

    @cached_property
    def count(self) -> int:
        return sum(block.count for block in self.blocks)

    def sketch(self, local: Tensor) -> Tensor:
        """The sum of squares and the sketch of a local tensor at this place."""
        flat = local.reshape(-1)
        each = [sketch(x.of(flat), x.indices) for x in self.blocks]
        if not each:
            return flat.new_zeros(1 + NUMBERS, dtype=torch.float64)
        return torch.stack(each).sum(0)

    def text(self) -> str:
        """The indices as slices, such as [0:8, :]."""
        texts = []
        for block in self.blocks:
            both = zip(self.shape, block.indices, strict=True)
            slices = [_slices(along, size) for size, along in both]
            texts.append(f"[{', '.join(slices)}]")
        return " + ".join(texts)


def flat_place(
    shape: tuple[int, ...],
    indices: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    start: int,
    stop: int,
) -> Place:
    """The place of elements `start` to `stop` of a flattened tensor, as flat buffers are cut.

    The flattened tensor has the shape `sizes` and the global `indices` along its axes, then padding.
    """
    blocks, first = [], 0
    for ranges in _boxes(sizes, start, stop):
        chosen = []
        for (low, high), along in zip(ranges, indices, strict=True):
            chosen.append(along[low:high])
        extent = tuple(high - low for low, high in ranges)
        blocks.append(Block(first, extent, tuple(chosen)))
        first += math.prod(extent)
    return Place(shape, tuple(blocks))


def _boxes(
    sizes: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """A range of a flattened tensor as boxes: for each the range along each axis."""
    if start >= stop:
        return
    if not sizes:
        yield ()
        return
    # Elements in one index of the first axis.
    inner = math.prod(sizes[1:])
    row, into = divmod(start, inner)
    if into:
        end = min(stop, (row + 1) * inner)
        for rest in _boxes(sizes[1:], into, end - row * inner):
            yield ((row, row + 1), *rest)
        row += 1
    last, beyond = divmod(stop, inner)
    if row < last:
        yield ((row, last), *((0, size) for size in sizes[1:]))
    # A range inside one row is done already.
    if beyond and last >= row:
        for rest in _boxes(sizes[1:], 0, beyond):
            yield ((last, last + 1), *rest)


@lru_cache(maxsize=4096)
def whole_place(shape: tuple[int, ...]) -> Place:
    return Place.of(shape, tuple(torch.arange(size) for size in shape))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_of(tensor: Tensor) -> Place:
    """The place of a tensor's local part. A plain tensor is taken for a whole one.

    The indices of each axis are split as the placements split a tensor. Offsets would not do: the
    shard of a packed weight is strided (`_StridedShard`), and has no single offset.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole_place(shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    # This rank is outside the mesh and holds nothing.
    if coordinate is None:
        return Place.of(shape, tuple(torch.arange(0) for _ in shape))
    indices = [torch.arange(size) for size in shape]
    summand = []
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            # Local tensors are summands along this mesh dimension.
            summand.append(f"{dim}:{coordinate[dim]}")
        elif not placement.is_replicate():
            axis = placement.dim % len(shape)  # type: ignore[attr-defined]
            shards = _split(
                placement, indices[axis], axis, len(shape), mesh.size(dim)
            )
            # One mesh dimension after the other: a later one splits what an
            # earlier one has left.
            indices[axis] = shards[coordinate[dim]]
    return Place.of(shape, tuple(indices), ",".join(summand))


def _split(
    placement: object, along: Tensor, axis: int, axes: int, parts: int
) -> list[Tensor]:
    """The indices along one axis, split as the placement splits a tensor into shards."""
    # In the shape of the tensor, as the placement splits along its own axis.
    view = [1] * axes
    view[axis] = along.numel()
    shards, _ = placement._split_tensor(  # type: ignore[attr-defined]
        along.reshape(view), parts, with_padding=False, contiguous=True
    )
    split = [shard.reshape(-1) for shard in shards]
    # Fewer elements than ranks: the last ranks hold nothing.
    return split + [along[:0]] * (parts - len(split))


def _slices(along: Tensor, size: int) -> str:
    if along.numel() == size:
        return ":"
    if along.numel() == 0:
        return "0:0"
    # "0:4+8:12": places where indices do not follow each other.
    breaks = (along.diff() != 1).nonzero().reshape(-1).tolist()
    firsts = [0, *(at + 1 for at in breaks)]
    lasts = [*breaks, along.numel() - 1]
    ranges = [
        f"{int(along[first])}:{int(along[last]) + 1}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return "+".join(ranges if len(ranges) < 5 else [*ranges[:3], "..."])
