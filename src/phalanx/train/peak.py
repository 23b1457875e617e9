"""The rate at which a device multiplies matrices, measured: what MFU is a part of."""

from __future__ import annotations

import time

import torch
from torch import Tensor

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
    rates = []
    for _ in range(WINDOWS):
        _wait(group.device)
        group.barrier()
        rates.append(_window(a, b, out))
    rate = torch.tensor([max(rates)], dtype=torch.float64, device=group.device)
    group.all_reduce(rate)
    return float(rate)


def _window(a: Tensor, b: Tensor, out: Tensor) -> float:
    """FLOP/s of as many products as fit in a moment."""
    begun, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - begun) < SECONDS:
        torch.mm(a, b, out=out)
        _wait(a.device)
        count += 1
    return 2.0 * count * a.shape[0] ** 3 / spent


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
