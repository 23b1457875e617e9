"""What the bench reads against a straight timing, and fits against sizes they have not seen.

Ratios of times on a busy machine mean little, so these run apart, with `make slow`.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from phalanx.bench import Clock, Sample, Sweep, fit, measure_collectives
from phalanx.comm import World, workers
from phalanx.planner import bus_factor

pytestmark = pytest.mark.slow


def both_ways(world: World, size: int, turns: int) -> tuple[float, float]:
    """Medians of the bench's reading and of a plain one of the same call, taken in turn."""
    group = world.split("both", [range(world.size)])
    x = torch.zeros(size // 4)
    clock = Clock("cpu", group)
    ours, plain = [], []
    for _ in range(turns):
        ours.append(clock.agree([clock.read(lambda: group.all_reduce(x))])[0])
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(x)
        plain.append(clock.agree([time.perf_counter() - began])[0])
    world.clear()
    return statistics.median(ours), statistics.median(plain)


@pytest.mark.parametrize("size", [1 << 20, 16 << 20])
def test_bus_bandwidth_is_that_of_a_straight_timing_of_the_same_call(
    size: int,
) -> None:
    with workers(2, backend="gloo", threads_per_rank=1) as run:
        run(both_ways, size, 5)
        ours, plain = run(both_ways, size, 60)[0]
    bus = [bus_factor("all_reduce", 2) * size / t for t in (ours, plain)]
    assert bus[0] == pytest.approx(bus[1], rel=0.10)


def test_curves_predict_sizes_that_they_have_not_seen() -> None:
    ops = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")
    sizes = tuple(1 << i for i in range(10, 26))
    with workers(2, backend="gloo", threads_per_rank=1) as run:
        found: list[Sample] = run(
            measure_collectives, Sweep(ops, sizes, ((2, 1),), repeats=15)
        )[0]
    off = []
    for op in ops:
        mine = [s for s in found if s.op == op]
        curve = fit(mine[::2], "gloo")
        off += [
            abs(curve.seconds(s.bytes) / s.seconds - 1) for s in mine[1::2]
        ]
    assert statistics.median(off) < 0.25
