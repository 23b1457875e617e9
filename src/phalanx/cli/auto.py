"""The layout that `auto` means in training: planned where the machine is known, else the recipe's."""

from ..api.request import request_for
from ..layout import Layout, LayoutError, Run, Shape, recipe
from ..layout.choices import BF16, FP32
from ..plan import Machine, MachineError, cluster, clusters, device_named
from ..plan.hardware import Hardware, hardware_of
from ..plan.local import hardware_of_machine
from ..plan.search import search


def auto(wanted: Run, shape: Shape, ranks: int, gpus: int) -> tuple[Layout, str]:
    """The layout for ranks that compute on so many GPUs, 0: on the CPU; who chose it and why."""
    import torch

    name = torch.cuda.get_device_name(0) if gpus else ""
    precision = wanted.precision or (BF16 if gpus else FP32)
    shared = 0 < gpus < ranks
    why = "no machine file is named and the GPU is not catalogued"
    if shared:
        why = f"{ranks} ranks share {gpus} GPUs, which no plan knows"
    try:
        hardware = None if shared else _hardware(wanted.machine, name, ranks)
        if hardware is not None:
            found = _planned(wanted, shape, hardware, precision)
            if found is not None:
                return found
            why = f"nothing fits in the memory of {hardware.name} by the plan"
    except (MachineError, LayoutError) as error:
        why = str(error).split(".")[0]
    memory = torch.cuda.get_device_properties(0).total_memory * gpus / ranks if gpus else 0.0
    terms = {"batch": shape.batch, "sequence": wanted.tokens(shape)}
    layout = recipe(shape, ranks, **terms, memory=memory, precision=precision)
    return layout, f"by the recipe ({why})"


def _hardware(file: str, gpu: str, ranks: int) -> Hardware | None:
    """The measured machine, or the catalogue's cluster of this GPU; none if neither is known."""
    if file:
        return hardware_of_machine(Machine.load(file), ranks)
    kind = device_named(gpu) if gpu else None
    family = next((c for c in clusters().values() if kind and c.device == kind.name), None)
    return hardware_of(cluster(f"{family.name}x{ranks}"), ranks) if family else None


def _planned(
    wanted: Run, shape: Shape, hardware: Hardware, precision: str
) -> tuple[Layout, str] | None:
    request = request_for(
        shape, hardware, sequence=wanted.tokens(shape), precision=precision, model=wanted.own
    )
    plan = search(request, top=1)
    if not plan.layouts:
        return None
    best = plan.layouts[0]
    return best.layout, (
        f"planned for {hardware.name}: the fastest of {plan.considered:,}, {best.step:.3g} s a step"
    )
