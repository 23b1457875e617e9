"""The rate at which a device multiplies matrices, measured: what MFU is a part of."""

from __future__ import annotations

import time

import torch

from ..bench.clock import Clock
from ..comm import Group

WINDOWS, SECONDS = 5, 0.06


def measured_peak(group: Group, dtype: torch.dtype) -> float:
    """FLOP/s of all ranks of a group together, each multiplying at the same time as the others.

    Together, because ranks on one CPU share its cores: a window is longer than a turn of theirs.
    The best of a few windows, since a peak is a ceiling.
    """
    size = 8192 if group.device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=group.device).to(dtype) for _ in range(2))
    out = torch.empty(size, size, device=group.device, dtype=dtype)
    torch.mm(a, b, out=out)
    clock, rates = Clock(group.device, group), list[float]()
    for _ in range(WINDOWS):
        clock.meet()
        begun, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - begun) < SECONDS:
            torch.mm(a, b, out=out)
            clock.settle()
            count += 1
        rates.append(2.0 * count * size**3 / spent)
    rate = torch.tensor([max(rates)], dtype=torch.float64, device=group.device)
    group.all_reduce(rate)
    return float(rate)
