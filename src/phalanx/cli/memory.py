"""Whether a run fits in the memory of the devices that are here."""

from dataclasses import replace

from ..api.request import held, held_text, request_for, verdict
from ..layout import Layout, Run, Shape
from ..layout.choices import DTYPES
from ..layout.host import machine_memory
from ..layout.numbers import bytes_text
from ..plan.hardware import hardware_of
from ..plan.link import joined
from ..plan.local import local_profile
from .before import GIB, moments
from .usage import UsageError

_CLEARLY = 1.5  # times a machine's memory: what ranks of a CPU hold is known less well, and swaps


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
    limit, cores = run.memory * GIB or memory, 0 if gpus else ranks
    hardware = replace(hardware_of(known), memory=limit, cores=cores)
    tokens, precision = run.tokens(shape), layout.precision
    request = request_for(shape, hardware, sequence=tokens, precision=precision, model=run.own)
    state, width = local_profile(layout.precision), max(4, DTYPES[layout.precision].bytes)
    profile = replace(
        state,
        optimizer_bytes=state.optimizer_bytes - (2 - moments(run)) * width,
        muon=run.optimizer.name == "muon",
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
    least, most = choice.range(profile)
    if not force and (least > memory if gpus else every > _CLEARLY * memory):
        raise UsageError(
            f"{layout} needs {needs}. Each of {ranks} ranks has {bytes_text(memory)}. `phalanx plan`"
            " finds layouts that fit; write --force to try this one."
        )
    may = ", and may not fit" if gpus and verdict(least, most, memory) == "may not fit" else ""
    return f"memory: {needs}; each has {bytes_text(memory)}{may}"
