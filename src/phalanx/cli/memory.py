"""The layout that `auto` chooses for the available devices, and whether a run fits in
their memory.

The layout is planned if the devices are known; otherwise it is the recipe's.
"""

from dataclasses import replace

from ..api.request import held, held_text, request_for, verdict
from ..api.sharding import less_sent_text, lower_stages, sharding_text
from ..layout import Layout, LayoutError, Run, Shape, recipe
from ..layout.choices import BF16, FP32
from ..layout.host import machine_memory
from ..layout.numbers import bytes_text
from ..planner import Machine, MachineError, cluster, clusters, device_named
from ..planner.hardware import Hardware, hardware_of
from ..planner.link import whole_servers
from ..planner.local import hardware_of_machine, local_profile
from ..planner.search import search
from .before import GIB
from .usage import UsageError

# multiple of a machine's memory: estimates are less certain on a CPU, and it can swap
_CLEARLY = 1.5


def device_memory(gpus: int, ranks: int) -> float:
    """Return the bytes that each of `ranks` has on `gpus` GPUs of this machine, or on
    its CPU if 0."""
    # Ranks on a CPU share its memory.
    if not gpus:
        return machine_memory() / ranks
    import torch

    return torch.cuda.get_device_properties(0).total_memory * gpus / ranks


def estimated(
    run: Run, shape: Shape, layout: Layout, gpus: int, *, force: bool
) -> str:
    """Return the lines about memory that a run prints first. Raise if it cannot fit,
    unless `force`."""
    memory, ranks = device_memory(gpus, layout.ranks), layout.ranks
    # any device will do: memory does not depend on its speed
    known = whole_servers("h100", ranks)
    # A run's own limit takes precedence over what the device has.
    limit, cores = run.memory * GIB or memory, 0 if gpus else ranks
    hardware = replace(hardware_of(known, ranks), memory=limit, cores=cores)
    tokens, precision = run.tokens(shape), layout.precision
    request = request_for(
        shape, hardware, sequence=tokens, precision=precision, model=run.own
    )
    # The run's own optimizer decides the moments, and its device the reserve.
    profile = replace(
        local_profile(layout.precision).with_moments(
            run.optimizer.fewest_moments
        ),
        optimizer=run.optimizer.name,
        context=request.profile.context,
        reserve=request.profile.reserve,
    )
    request = replace(request, profile=profile)
    try:
        choice = held(request, layout)
    except (ValueError, TypeError, RuntimeError) as error:
        if not run.own:
            raise
        return f"memory: unknown, as {run.own} cannot be costed: {str(error).splitlines()[0]}"
    needs = held_text(choice.memory)
    # Ranks of one machine share its memory, so the sum counts on a CPU.
    every = (
        sum(sum(kinds.values()) for kinds in choice.stages) / layout.pp
        or choice.bytes
    )
    least, most = choice.range(profile)
    # A GPU must hold the least; a CPU may swap.
    if not force and (least > memory if gpus else every > _CLEARLY * memory):
        raise UsageError(
            f"{str(layout) or 'one rank'} needs {needs}. Each of {ranks} ranks has"
            f" {bytes_text(memory)}. `phalanx plan` finds layouts that fit; write --force to try this one."
        )
    may = (
        ", and may not fit"
        if gpus and verdict(least, most, memory) == "may not fit"
        else ""
    )
    less_sent = less_sent_text(layout, lower_stages(request, layout), memory)
    faster = f"\nfaster: {less_sent}" if less_sent else ""
    return f"memory: {needs}; each has {bytes_text(memory)}{may}{faster}"


def auto(
    wanted: Run, shape: Shape, ranks: int, gpus: int
) -> tuple[Layout, str]:
    """Return the layout for `ranks` on `gpus` GPUs (0: on the CPU), and how it was
    chosen."""
    import torch

    name = torch.cuda.get_device_name(0) if gpus else ""
    precision = wanted.precision or (BF16 if gpus else FP32)
    # The planner prices one rank on each device.
    shared = 0 < gpus < ranks
    why = "no machine file is named, and the GPU is not in the catalogue"
    if shared:
        why = f"{ranks} ranks share {gpus} GPUs, which cannot be planned"
    try:
        hardware = None if shared else _hardware(wanted.machine, name, ranks)
        if hardware is not None:
            found = _planned(wanted, shape, hardware, precision)
            if found is not None:
                return found
            why = f"no planned layout fits in the memory of {hardware.name}"
    except (MachineError, LayoutError) as error:
        why = str(error).split(".")[0]
    # What could not be planned follows the rule of thumb.
    memory = device_memory(gpus, ranks)
    terms = {"batch": shape.batch, "sequence": wanted.tokens(shape)}
    layout = recipe(shape, ranks, **terms, memory=memory, precision=precision)
    return layout, f"by the recipe ({why}){_stage_text(layout)}"


def _stage_text(layout: Layout) -> str:
    """Explain the ZeRO stage that the recipe chose."""
    reasons = {
        1: "weights and gradients fit whole, and are sent once a step",
        2: "weights fit whole, and are gathered once a step; whole gradients do not fit",
        3: "whole weights and gradients do not fit beside the activations",
    }
    return (
        f"; zero{layout.zero}: {reasons[layout.zero]}" if layout.zero else ""
    )


def _hardware(file: str, gpu: str, ranks: int) -> Hardware | None:
    """Return the measured machine, or the catalogue's cluster of this GPU; None if
    neither is known."""
    if file:
        return hardware_of_machine(Machine.load(file), ranks)
    kind = device_named(gpu) if gpu else None
    # The first cluster of the catalogue that is built of this device.
    family = next(
        (c for c in clusters().values() if kind and c.device == kind.name),
        None,
    )
    return (
        hardware_of(cluster(f"{family.name}x{ranks}"), ranks)
        if family
        else None
    )


def _planned(
    wanted: Run, shape: Shape, hardware: Hardware, precision: str
) -> tuple[Layout, str] | None:
    request = request_for(
        shape,
        hardware,
        sequence=wanted.tokens(shape),
        precision=precision,
        model=wanted.own,
    )
    plan = search(request, top=1)
    if not plan.layouts:
        return None
    best = plan.layouts[0]
    stage = sharding_text(request, best.layout)
    return best.layout, (
        f"planned for {hardware.name}: the fastest of {plan.considered:,}, {best.step:.3g} s a step"
        f"{'; ' if stage else ''}{stage}"
    )
