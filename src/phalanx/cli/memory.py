"""Whether a layout fits in the memory of its devices: what the program that a plan builds holds at
its peak. Costing pieces loads torch where their costs are not cached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ..cost import cached_costs
from ..layout import Layout, Run, Shape
from ..layout.choices import BF16, DTYPES, FP32
from ..layout.numbers import bytes_text
from ..plan.hardware import Hardware, hardware_of
from ..plan.link import joined
from ..plan.local import local_profile, profile_for
from ..plan.step import Choice, Pricer, Request
from .before import GIB, machine_memory, moments
from .usage import UsageError

_CLEARLY = 1.5  # times a machine's memory: what ranks of a CPU hold is known less well, and swaps


def request_for(
    shape: Shape,
    hardware: Hardware,
    *,
    batch: int = 0,
    sequence: int = 0,
    precision: str = "",
    model: str = "",
) -> Request:
    """What is planned with our own software; in bf16 on a GPU unless `precision` names another."""
    precision = precision or (FP32 if hardware.cores else BF16)
    sequence = sequence or shape.sequence
    if shape.positions != "learned":
        shape = replace(shape, sequence=sequence)
    return Request(
        shape, hardware, profile_for(hardware, None, precision),
        partial(cached_costs, target=hardware.target), sequence, batch or shape.batch, precision,
        model=model,
    )  # fmt: skip


def held(request: Request, layout: Layout) -> Choice:
    """What a layout's ranks hold, as `plan --explain` says it; on a CPU without its times."""
    room = 0.0 if request.hardware.cores else math.inf
    return Pricer(replace(request, precision=layout.precision)).choose(layout, room)


def held_text(kinds: Mapping[str, float]) -> str:
    """`50.7 GB on the fullest rank: weights 2.27 GB, gradients 4.54 GB, ...`."""
    parts = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds.items() if size)
    return f"{bytes_text(sum(kinds.values()))} on the fullest rank: {parts}"


def device_memory(gpus: int, ranks: int) -> float:
    """Bytes for each of some ranks on so many GPUs, or 0 of them, of this machine."""
    if not gpus:
        return machine_memory() / ranks
    import torch

    return torch.cuda.get_device_properties(0).total_memory * gpus / ranks


def estimated(run: Run, shape: Shape, layout: Layout, gpus: int, *, force: bool) -> str:
    """The line on memory that a run begins with. What cannot fit is refused, unless by force."""
    memory, ranks = device_memory(gpus, layout.ranks), layout.ranks
    known = joined("h100", ranks)  # any device: what is held does not depend on how fast it is
    hardware = replace(
        hardware_of(known), memory=run.memory * GIB or memory, cores=0 if gpus else ranks
    )
    request = request_for(
        shape, hardware, sequence=run.tokens(shape), precision=layout.precision, model=run.own
    )
    state, width = local_profile(layout.precision), max(4, DTYPES[layout.precision].bytes)
    profile = replace(
        state,
        optimizer_bytes=state.optimizer_bytes - (2 - moments(run)) * width,
        context=request.profile.context,
        reserve=request.profile.reserve,
    )
    try:
        choice = held(replace(request, profile=profile), layout)
    except (ValueError, TypeError, RuntimeError) as error:
        if not run.own:
            raise
        return f"memory: not known, as {run.own} cannot be costed: {str(error).splitlines()[0]}"
    needs = held_text(choice.memory)
    every = sum(sum(kinds.values()) for kinds in choice.stages) / layout.pp or choice.bytes
    if not force and (choice.bytes > memory if gpus else every > _CLEARLY * memory):
        raise UsageError(
            f"{layout} needs {needs}. Each of {ranks} ranks has {bytes_text(memory)}. `phalanx plan`"
            " finds layouts that fit; write --force to try this one."
        )
    return f"memory: {needs}; each has {bytes_text(memory)}"
