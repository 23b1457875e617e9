"""The peak rate of a run's devices: MFU and HFU are shares of it."""

from __future__ import annotations

import time

import torch

from ..comm import Group
from ..plan import Machine, device_named
from .rank import Rank

WINDOWS, SECONDS = 5, 0.06  # of measuring it


def peak_of(rank: Rank) -> tuple[float, str]:
    """FLOP/s of all ranks together, and the source of the number. Every rank calls it."""
    file, precision, world = rank.run.machine, rank.part.layout.precision, rank.world
    if file:
        machine = Machine.load(file)
        best = machine.best(precision)  # the fastest product that was measured
        # as its maker states it
        known = machine.entry.peak(precision) if machine.entry else 0.0
        known = known or (best.flops if best else 0.0)
        if known:
            return known * world.size, f"{file} for each rank"
    entry = None
    if world.device.type == "cuda":
        entry = device_named(torch.cuda.get_device_name(world.device))
    known = entry.peak(precision) if entry else 0.0
    if entry and known:
        return known * world.size / world.sharing, f"{entry.name} as its maker states"
    return _measured_peak(rank.part.everyone, rank.precision.compute), "measured"


def _measured_peak(group: Group, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks of a group together, each multiplying at the same time as the others.

    Together, because ranks on one CPU share its cores: a window is longer than a turn of theirs.
    The best of a few windows, since a peak is a ceiling.
    """
    size = 8192 if group.device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=group.device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=group.device, dtype=dtype)
    torch.mm(a, b, out=out)

    def settle() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)

    rates = list[float]()
    for _ in range(WINDOWS):
        settle()
        group.barrier()
        begun, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begun) < SECONDS:
            torch.mm(a, b, out=out)
            settle()
            count += 1
        rates.append(2.0 * count * size**3 / spent)
    rate = torch.tensor([max(rates)], dtype=torch.float64, device=group.device)
    group.all_reduce(rate)
    return float(rate)
