"""The peak FLOP/s of a run's devices, relative to which MFU and HFU are computed."""

from __future__ import annotations

import time

import torch

from ..comm import Group
from ..planner import Machine, device_named
from .rank import Rank

WINDOWS, SECONDS = 5, 0.06  # number and length of the measurement windows


def peak_of(rank: Rank) -> tuple[float, str]:
    """Return the peak FLOP/s of all ranks together and the source of the value.
    Collective."""
    file, precision, world = (
        rank.run.machine,
        rank.part.layout.precision,
        rank.world,
    )
    # A machine file that the user names comes first.
    if file:
        machine = Machine.load(file)
        best = machine.best(precision)  # the fastest matmul measured
        # the manufacturer's value
        known = machine.entry.peak(precision) if machine.entry else 0.0
        known = known or (best.flops if best else 0.0)
        if known:
            return known * world.size, f"{file} for each rank"
    entry = None
    if world.device.type == "cuda":
        entry = device_named(torch.cuda.get_device_name(world.device))
    known = entry.peak(precision) if entry else 0.0
    if entry and known:
        # Ranks that share a GPU share its peak.
        return (
            known * world.size / world.sharing,
            f"{entry.name} as its maker states",
        )
    return _measured_peak(
        rank.part.everyone, rank.precision.compute
    ), "measured"


def _measured_peak(group: Group, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of all ranks of a group while they multiply concurrently.

    Ranks on one CPU share its cores; a window is longer than a scheduler time slice.
    The best of a few windows counts, since a peak is an upper bound.
    """
    # Large enough that starting a kernel does not count.
    size = 8192 if group.device.type == "cuda" else 512
    a, b = (
        torch.randn(size, size, device=group.device).to(dtype)
        for _ in range(2)
    )
    out = torch.empty(size, size, device=group.device, dtype=dtype)
    # A first product outside the windows: libraries load their kernels.
    torch.mm(a, b, out=out)

    def settle() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    rates = list[float]()
    for _ in range(WINDOWS):
        settle()
        # All ranks begin together, because they share cores.
        group.barrier()
        begun, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begun) < SECONDS:
            torch.mm(a, b, out=out)
            settle()
            count += 1
        # 2 n^3 FLOPs for each product.
        rates.append(2.0 * count * size**3 / spent)
    rate = torch.tensor([max(rates)], dtype=torch.float64, device=group.device)
    group.all_reduce(rate)
    return float(rate)
