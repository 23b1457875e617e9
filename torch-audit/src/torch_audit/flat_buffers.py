"""Parameters in DeepSpeed's flat buffers: the run of a buffer that belongs to each parameter.

ZeRO gives its optimizer flat tensors that no module holds. Each parameter knows its part: by `_hp_mapping`
in stages 1 and 2, where a buffer is cut anywhere, and by its partition and its optimizer in stage 3. Only
attributes are read, and nothing of DeepSpeed is imported.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from .shards import Place, flat_place, whole_place


def in_flat_buffer(parameter: Any) -> bool:
    """True for a module's parameter that ZeRO trains in a flat buffer."""
    return hasattr(parameter, "_hp_mapping") or hasattr(
        parameter, "_z3_optimizer"
    )


def runs_of(
    parameter: Any, buffers: Iterable[Tensor]
) -> Iterator[tuple[Tensor, slice, Place]]:
    """The buffer that holds this rank's part of a parameter, the run in it, and its place in the whole.

    None if another rank holds all of it, or if the part is in none of these buffers.
    """
    if hasattr(parameter, "_z3_optimizer"):
        yield from _of_stage_3(parameter, buffers)
        return
    mapping = parameter._hp_mapping
    if mapping is None:
        return
    part, inside = mapping.lp_fragment_address, mapping.hp_fragment_address
    shape = tuple(parameter.shape)
    place = _range(shape, part.start, part.start + part.numel)
    # The fragment is a view of its buffer.
    memory = mapping.hp_fragment.untyped_storage().data_ptr()
    for buffer in buffers:
        if buffer.untyped_storage().data_ptr() == memory:
            run = slice(inside.start, inside.start + inside.numel)
            yield buffer, run, place


def _of_stage_3(
    parameter: Any, buffers: Iterable[Tensor]
) -> Iterator[tuple[Tensor, slice, Place]]:
    optimizer = parameter._z3_optimizer
    key = optimizer.get_param_id(parameter)
    group, first, size = optimizer.grad_position[key]
    holder = optimizer.fp32_partitioned_groups_flat[group]
    # Ranks have equal parts, of which the last is padded.
    rank = parameter.ds_process_group.rank()
    shape = tuple(parameter.ds_shape)
    whole = math.prod(shape)
    start = min(rank * size, whole)
    stop = min(start + size, whole)
    for buffer in buffers:
        if buffer is holder:
            run = slice(first, first + stop - start)
            yield buffer, run, _range(shape, start, stop)


def _range(shape: tuple[int, ...], start: int, stop: int) -> Place:
    return flat_place(shape, whole_place(shape).indices, shape, start, stop)
