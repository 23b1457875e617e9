"""Parameters that Megatron-LM has cut: by the attributes of a parameter, and by its optimizer's map.

Tensor parallelism marks each parameter that it cuts with an axis and a stride. The distributed optimizer
trains a range of each flattened parameter, in a tensor that no module holds. Only attributes are read, and
nothing of Megatron is imported.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .shards import Place, flat_place, whole_place

_STATE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Shard:
    """The range of a flattened parameter that an optimizer's tensor holds."""

    tensor: Tensor
    start: int
    stop: int

    def run_of(self, parameter: Tensor) -> tuple[Tensor, slice, Place]:
        """The tensor, the run in it, and the place of the run in the whole parameter."""
        whole = cut_place(parameter) or whole_place(tuple(parameter.shape))
        place = flat_place(
            whole.shape,
            whole.indices,
            tuple(parameter.shape),
            self.start,
            self.stop,
        )
        return self.tensor, slice(0, self.stop - self.start), place


def is_cut(parameter: Any) -> bool:
    """True for a parameter that tensor parallelism has cut."""
    marked = getattr(parameter, "tensor_model_parallel", False)
    return bool(marked) and _STATE in sys.modules


def tensor_rank(parameter: Any) -> tuple[int, int]:
    """This process's rank in the group that has cut a parameter, and the size of the group."""
    state: Any = sys.modules[_STATE]
    # Experts' weights have a group of their own, and are not reduced with the others.
    if getattr(parameter, "allreduce", True):
        return (
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        )
    return (
        state.get_expert_tensor_parallel_rank(),
        state.get_expert_tensor_parallel_world_size(),
    )


def cut_place(parameter: Any) -> Place | None:
    """The place of a parameter that tensor parallelism has cut, or None if it has not."""
    if not is_cut(parameter):
        return None
    rank, ranks = tensor_rank(parameter)
    axis, stride = parameter.partition_dim, parameter.partition_stride
    shape = list(parameter.shape)
    shape[axis] *= ranks
    indices = [torch.arange(size) for size in shape]
    # The axis is cut into `stride` runs of as many chunks as ranks; a rank has one chunk of each run.
    chunks = indices[axis].chunk(ranks * stride)
    indices[axis] = torch.cat(chunks[rank::ranks])
    return Place.of(tuple(shape), tuple(indices))


def in_grad_buffer(parameter: Any) -> bool:
    """True for a parameter whose gradient Megatron keeps in a buffer, from which ranks take their ranges."""
    return hasattr(parameter, "main_grad")


def optimizer_shards(tensors: Iterable[Tensor]) -> dict[int, Shard]:
    """The optimizer's tensor for each parameter that it trains in another one, by the parameter's id."""
    if _STATE not in sys.modules:
        return {}
    own = {id(tensor) for tensor in tensors}
    found = {}
    for optimizer in _distributed_optimizers():
        for parameter, tensor in _pairs(optimizer):
            if id(tensor) in own:
                ranges = optimizer._get_model_param_range_map(parameter)
                part = ranges["param"]
                found[id(parameter)] = Shard(tensor, part.start, part.end)
    return found


def _distributed_optimizers() -> Iterator[Any]:
    for found in gc.get_objects():
        # type() instead of isinstance(): proxies answer the latter by loading what they stand for.
        if hasattr(type(found), "_get_model_param_range_map"):
            yield found


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of the model, each with the tensor that the optimizer trains in its place."""
    both = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        # Parameters in 16 bits have a copy in float32.
        (
            optimizer.model_float16_groups,
            optimizer.shard_fp32_from_float16_groups,
        ),
    )
    for models, shards in both:
        for parameters, tensors in zip(models, shards, strict=True):
            yield from zip(parameters, tensors, strict=True)
