"""What the benchmarks share: contenders that take steps in turn, medians, spread, and a table.

Timing on a small shared machine is noisy. Only ratios within one run count, so all contenders live in
one world of processes and take their steps in turn; each step is timed between two barriers and the
slowest rank counts.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.shm.arena import Reserved
from phalanx.comm.shm.local import ShmWorld
from phalanx.cost.live import Live

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One contender's times in seconds, one for each round, and its most bytes on a rank."""

    name: str
    times: tuple[float, ...]
    peak: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.times)


class Peak(Live):
    """The most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.bytes())
        return out


def in_turn(steps: Mapping[str, Step], rounds: int, *, warmup: int = 2) -> dict[str, list[float]]:
    """Every contender's step times, taken in turn; the slowest rank's count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            step()
            mine = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if number >= warmup:
                times[name].append(float(mine))
    return times


def beside(timeout: float = 300.0) -> ShmWorld:
    """A world through shared memory of the processes that gloo has brought together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reserved = Reserved(size)
    said = torch.zeros(200, dtype=torch.uint8)
    path = reserved.path.encode()
    said[: len(path)] = torch.tensor(list(path), dtype=torch.uint8)
    dist.broadcast(said, 0)
    world = ShmWorld(bytes(said.tolist()).rstrip(b"\0").decode(), reserved.extent, rank,
                        timeout=timeout)  # fmt: skip
    reserved.close()
    return world


def alone(step: Step) -> Step:
    """A step that only the first rank takes while the others wait: one process by itself."""
    return lambda: step() if dist.get_rank() == 0 else None


def table(title: str, rows: Sequence[Row], baseline: str) -> str:
    """Markdown: median, the middle half's spread, the ratio to the baseline, and memory."""
    base = next(row.median for row in rows if row.name == baseline)
    lines = [
        f"### {title}",
        "",
        f"| | ms, median (quartiles) | ratio to {baseline} | peak MB per rank |",
        "|---|---|---|---|",
    ]
    for row in rows:
        low, _, high = statistics.quantiles(row.times, n=4)
        memory = f"{row.peak / 1e6:.0f}" if row.peak else ""
        lines.append(
            f"| {row.name} | {row.median * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"
            f" | {row.median / base:.2f} | {memory} |"
        )
    return "\n".join(lines)


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{platform.machine()}, {cores} cores, torch {torch.__version__}, 1 thread a rank, load"
        f" {load:.1f} at the start; `{' '.join(['python', *sys.argv])}`"
    )
