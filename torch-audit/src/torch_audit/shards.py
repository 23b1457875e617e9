"""The place of a tensor's local part in the whole tensor, from the placements of a DTensor."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sketch import coverage


@dataclass(frozen=True)
class Place:
    """The elements of a whole tensor that this rank holds: a set of indices along each axis."""

    shape: tuple[int, ...]  # of the whole tensor
    indices: tuple[Tensor, ...]
    # Coordinates on the mesh dimensions over which the local tensors are summands, not copies.
    summand: str = ""

    @cached_property
    def cover(self) -> int:
        """A number to which disjoint places add up: see `sketch.coverage`."""
        return coverage(self.indices)

    @cached_property
    def count(self) -> int:
        # Sets of indices along axes multiply.
        count = 1
        for along in self.indices:
            count *= along.numel()
        return count

    def text(self) -> str:
        """The indices as slices, such as [0:8, :]."""
        parts = []
        for size, along in zip(self.shape, self.indices, strict=True):
            parts.append(_slices(along, size))
        return f"[{', '.join(parts)}]"


@lru_cache(maxsize=4096)
def whole_place(shape: tuple[int, ...]) -> Place:
    return Place(shape, tuple(torch.arange(size) for size in shape))


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
        return Place(shape, tuple(torch.arange(0) for _ in shape))
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
    return Place(shape, tuple(indices), ",".join(summand))


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
