"""Measures the overlap of a matmul with a copy and with a message.

On a GPU the copy has its own stream, and host memory is pinned or pageable: a copy from
pageable memory goes through a buffer of the driver, and the host waits. On a CPU a
second thread copies; if all cores are busy, nothing is hidden.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..comm import World
from ..layout.choices import DTYPES
from ..planner import Hidden
from .clock import Clock
from .device import LocalDevice, dtype_of

Call = Callable[[], object]


@dataclass(frozen=True)
class Overlap:
    """Two activities: seconds of each alone, of one after the other, and of both at
    once."""

    name: str
    first: float
    second: float
    after: float
    together: float
    readings: int

    @property
    def hidden(self) -> float:
        """The share of the shorter activity that overlap saves; negative if they slow
        each other down."""
        return (self.after - self.together) / min(self.first, self.second)

    def as_hidden(self) -> Hidden:
        # Overlap cannot exceed 1; a larger value means that the four times were
        # disturbed differently.
        return Hidden(self.name, round(min(1.0, self.hidden), 4))


def measure_copies(
    device: LocalDevice,
    *,
    size: int,
    copied: int,
    dtype: str,
    limit: float = 20.0,
) -> list[Overlap]:
    """Measure a size x size matmul beside copies of `copied` bytes, and each alone, in
    turn."""
    product = _product(device.device, size, dtype_of(dtype, device.kind))
    if device.kind == "cpu":
        return [_on_threads(product, copied, limit)]
    return [
        _on_streams(device.device, product, copied, pinned, limit)
        for pinned in (True, False)
    ]


def _product(device: torch.device, size: int, dtype: torch.dtype) -> Call:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # Into the same result each time: no allocation is timed.
    return lambda: torch.mm(a, b, out=out)


def _on_streams(
    device: torch.device,
    product: Call,
    copied: int,
    pinned: bool,
    limit: float,
) -> Overlap:
    host = torch.empty(copied, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(copied, dtype=torch.uint8, device=device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy() -> None:
        target.copy_(host, non_blocking=True)

    def both() -> None:
        here = torch.cuda.current_stream(device)
        # Neither starts before the work issued earlier.
        aside.wait_stream(here)
        product()  # enqueued first, since a pageable copy blocks the host
        with torch.cuda.stream(aside):
            copy()
        # The next reading begins when both have ended.
        here.wait_stream(aside)

    name = f"product beside host to device copy, {'pinned' if pinned else 'pageable'}"
    return _measured(Clock(device), name, product, copy, both, limit)


def _on_threads(product: Call, copied: int, limit: float) -> Overlap:
    source = torch.ones(copied, dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    def both() -> None:
        aside = threading.Thread(target=copy)
        aside.start()
        product()
        aside.join()

    return _measured(
        Clock(), "product beside copying thread", product, copy, both, limit
    )


def measure_messages(
    world: World, size: int, sent: int, dtype: str, limit: float = 20.0
) -> list[Overlap]:
    """Measure a matmul beside an all-reduce of `sent` bytes on every rank.
    Collective."""
    group = world.split("overlap", [range(world.size)])
    product = _product(world.device, size, getattr(torch, DTYPES[dtype].torch))
    # Four bytes for each float32.
    x = torch.zeros(sent // 4, device=world.device)

    def both() -> None:
        work = group.all_reduce(x, wait=False)
        product()
        work.wait()

    name = f"product beside all-reduce of {world.size}"
    clock = Clock(world.device, group)
    overlap = _measured(
        clock, name, product, lambda: group.all_reduce(x), both, limit
    )
    world.clear()
    return [overlap]


def _measured(
    clock: Clock,
    name: str,
    first: Call,
    second: Call,
    both: Call,
    limit: float,
) -> Overlap:
    def after() -> None:
        first()
        second()

    one, two, apart, together = clock.measure(
        first, second, after, both, limit=limit
    )
    readings = len(together.readings)
    return Overlap(
        name, one.median, two.median, apart.median, together.median, readings
    )
