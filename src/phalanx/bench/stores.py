"""Bandwidth of the device's own memory, and between host and device."""

from collections.abc import Callable

import torch

from ..planner import Store
from .clock import Clock
from .device import LocalDevice


def measure_stores(
    device: LocalDevice, *, size: int = 0, limit: float = 2.0
) -> tuple[Store, ...]:
    """Measure bytes per second of a copy, a sum (reads only) and a fill (writes only).

    `size`: bytes of each buffer; by default far larger than any cache.
    """
    size = size or (1 << 30 if device.kind == "cuda" else 256 << 20)
    # Buffers of an eighth each, so that all of them fit.
    size = min(size, device.free // 8)
    x = torch.ones(size // 4, device=device.device)
    y = torch.empty_like(x)
    # A call, and how often it passes over a buffer: a copy reads and writes.
    works: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: y.copy_(x), 2),
        "read": (x.sum, 1),
        "write": (lambda: y.fill_(1.0), 1),
    }
    if device.kind == "cuda":
        pinned = torch.empty(size // 4, pin_memory=True)
        plain = torch.empty(size // 4)
        works["host to device, pinned"] = (
            lambda: y.copy_(pinned, non_blocking=True),
            1,
        )
        works["host to device, pageable"] = (lambda: y.copy_(plain), 1)
        works["device to host, pinned"] = (
            lambda: pinned.copy_(x, non_blocking=True),
            1,
        )
    clock = Clock(device.device)
    bytes_of_one = x.numel() * 4
    stores = []
    for name, (work, passes) in works.items():
        (timing,) = clock.measure(work, limit=limit)
        stores.append(Store(name, passes * bytes_of_one / timing.median))
    return tuple(stores)
