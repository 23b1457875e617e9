"""Records of clips: which gradients were clipped, by which norm."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .records import ClipRecord
from .shards import local_of


def clip_record(
    parameters: list[int], most: float, norm: Any, order: float
) -> ClipRecord:
    """A clip of these parameters; the norm is a number or a tensor, perhaps of one mesh coordinate."""
    local = local_of(norm) if isinstance(norm, Tensor) else norm
    return ClipRecord(parameters, most, order, float(local), _part_of(norm))


def _part_of(norm: Any) -> str:
    """Coordinates on the mesh dimensions over which a norm is still a sum of parts."""
    if not isinstance(norm, DTensor):
        return ""
    coordinate = norm.device_mesh.get_coordinate()
    assert coordinate is not None
    return ",".join(
        f"{dim}:{coordinate[dim]}"
        for dim, placement in enumerate(norm.placements)
        if placement.is_partial()
    )


def with_group(
    clips: Sequence[ClipRecord], clip: ClipRecord
) -> list[ClipRecord]:
    """The clips with one of a group. Groups that are clipped by one norm are one clip."""
    if not clips:
        return [clip]
    before = clips[-1]
    same = (before.most, before.norm, before.part)
    apart = set(before.parameters).isdisjoint(clip.parameters)
    if apart and same == (clip.most, clip.norm, clip.part):
        before.parameters += clip.parameters
        return list(clips)
    return [*clips, clip]
