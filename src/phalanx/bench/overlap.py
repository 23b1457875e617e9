"""How much of one activity disappears behind another: a product beside a copy, and beside a message.

On a GPU the copy has a stream of its own, and host memory is pinned or not: a copy from memory that
may be swapped out goes through a buffer of the driver's, and the host waits. On a CPU a second
thread copies; cores that are all busy hide nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..comm import World
from ..layout.choices import DTYPES
from ..plan import Hidden
from .clock import Clock
from .device import LocalDevice, dtype_of

__all__ = ["Overlap", "measure_copies", "measure_messages"]


@dataclass(frozen=True)
class Overlap:
    """Two activities: seconds of each alone, one after the other, and both at once."""

    name: str
    first: float
    second: float
    after: float
    together: float
    readings: int

    @property
    def hidden(self) -> float:
        """The part of the shorter one that together saves; below 0 they are in each other's way."""
        return (self.after - self.together) / min(self.first, self.second)

    def as_hidden(self) -> Hidden:
        # What is not there cannot be hidden; beyond 1 the four times were disturbed differently.
        return Hidden(self.name, round(min(1.0, self.hidden), 4))


def measure_copies(
    device: LocalDevice, *, size: int, copied: int, dtype: str, limit: float = 20.0
) -> list[Overlap]:
    """A product of size x size beside copies of `copied` bytes, in turn with each alone."""
    work = _product(device, size, dtype)
    if device.kind == "cuda":
        return [_on_streams(device, work, copied, pinned, limit) for pinned in (True, False)]
    return [_on_threads(device, work, copied, limit)]


def _product(device: LocalDevice, size: int, dtype: str) -> Callable[[], None]:
    kind = dtype_of(dtype, device.kind)
    a, b = (torch.randn(size, size, device=device.device).to(kind) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    return multiply


def _on_streams(
    device: LocalDevice, work: Callable[[], None], copied: int, pinned: bool, limit: float
) -> Overlap:
    host = torch.empty(copied, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(copied, dtype=torch.uint8, device=device.device)
    aside = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]

    def copy() -> None:
        there.copy_(host, non_blocking=True)

    def both() -> None:
        here = torch.cuda.current_stream(device.device)
        aside.wait_stream(here)
        work()  # enqueued first, as a pageable copy holds the host
        with torch.cuda.stream(aside):
            copy()
        here.wait_stream(aside)

    name = f"product beside host to device copy, {'pinned' if pinned else 'pageable'}"
    return _measured(Clock(device.device), name, (work, copy, both), limit)


def _on_threads(
    device: LocalDevice, work: Callable[[], None], copied: int, limit: float
) -> Overlap:
    source = torch.ones(copied, dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    def both() -> None:
        aside = threading.Thread(target=copy)
        aside.start()
        work()
        aside.join()

    return _measured(
        Clock(device.device), "product beside copying thread", (work, copy, both), limit
    )


def measure_messages(
    world: World, size: int, sent: int, dtype: str, limit: float = 20.0
) -> list[Overlap]:
    """On every rank a product beside an all-reduce of `sent` bytes. All ranks call it."""
    group = world.split("overlap", [range(world.size)])
    kind = getattr(torch, DTYPES[dtype].torch)
    a, b = (torch.randn(size, size, device=world.device).to(kind) for _ in range(2))
    out, x = torch.empty_like(a), torch.zeros(sent // 4, device=world.device)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    def reduce() -> None:
        group.all_reduce(x)

    def both() -> None:
        work = group.all_reduce(x, wait=False)
        multiply()
        work.wait()

    clock = Clock(world.device, group)
    name = f"product beside all-reduce of {world.size}"
    found = _measured(clock, name, (multiply, reduce, both), limit)
    world.clear()
    return [found]


def _measured(
    clock: Clock,
    name: str,
    works: tuple[Callable[[], None], Callable[[], None], Callable[[], None]],
    limit: float,
) -> Overlap:
    first, second, both = works

    def after() -> None:
        first()
        second()

    one, two, apart, together = clock.measure(first, second, after, both, limit=limit)
    return Overlap(
        name, one.median, two.median, apart.median, together.median, len(together.readings)
    )
