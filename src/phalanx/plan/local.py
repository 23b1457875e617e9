"""The measured machine as a place to plan for: rates between those measured, messages by its curves.

Ranks of a CPU share its cores and its memory. Two things follow that no device of one's own knows:
messages are measured best among as many ranks as will run, and a rank that waits in a pipeline
leaves its core to the others (`crowded`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..program import AttentionLoad, Product
from .columns import Columns
from .device import MachineError
from .estimate import Estimates
from .hardware import HOST_LINK, Hardware, Numbers
from .machine import Machine, Rate
from .profile import Profile, profile

__all__ = ["Curves", "Measured", "crowded", "local_profile", "hardware_of_machine"]

_NEAR = {"tf32": "fp32", "fp16": "bf16"}  # told by another dtype where it was not measured itself
_ATTENTION = 0.6  # of the product's rate: what a fused kernel is assumed to reach
_BYTES = {"fp64": 8.0, "bf16": 2.0, "fp16": 2.0}  # of a number; others have 4


@dataclass(frozen=True)
class Measured:
    """What one device computes, by its machine file."""

    machine: Machine
    known: Mapping[str, tuple[Rate, ...]]  # by dtype
    _told: dict[tuple[str, float, float, float], float] = field(default_factory=dict, compare=False)

    def rate(self, dtype: str, m: float, n: float, k: float) -> float:
        """FLOP/s of a product: the mean of the measured ones in logarithms, the near ones first."""
        key = dtype, m, n, k
        if key not in self._told:
            self._told[key] = self._between(*key)
        return self._told[key]

    def _between(self, dtype: str, m: float, n: float, k: float) -> float:
        total = weight = 0.0
        for one in self.rates(dtype):
            sizes = ((m, one.m), (n, one.n), (k, one.k))
            far = sum(math.log(max(1, mine) / its) ** 2 for mine, its in sizes)
            if far < 1e-12:
                return one.flops
            total += math.log(one.flops) / far
            weight += 1.0 / far
        return math.exp(total / weight)

    def rates(self, dtype: str) -> tuple[Rate, ...]:
        found = self.known.get(dtype) or self.known.get(_NEAR.get(dtype, ""), ())
        if not found:
            raise MachineError(
                f"{self.machine.name} has no measured product in {dtype};"
                f" it has {', '.join(self.known) or 'none at all'}."
                " Measure it: phalanx doctor --out FILE."
            )
        return found

    def product(self, p: Product, dtype: str) -> float:
        return float(p.flops / self.rate(dtype, p.m, p.n, p.k))

    def attention(self, a: AttentionLoad, dtype: str) -> float:
        rate = self.rate(dtype, a.queries, a.keys, a.head_dim)
        return float(a.flops / (_ATTENTION * rate))

    def move(self, size: float) -> float:
        return size / self.machine.memory_bandwidth

    @property
    def launch(self) -> float:
        return self.machine.launch


@dataclass(frozen=True)
class Curves:
    """Messages by the machine's curves. `ranks` run on it: where they share cores, a small group is
    as slow as it was found beside the others, which is how curves of groups apart were measured."""

    machine: Machine
    ranks: int
    backend: str = ""

    def seconds(self, op: str, size: Numbers, ranks: Numbers, apart: Numbers) -> Numbers:
        """Time of a collective over groups of `ranks`, each `apart` from the next."""
        sizes, groups, gaps = np.broadcast_arrays(
            np.asarray(size, float), np.asarray(ranks, float), np.asarray(apart, float)
        )
        flat = [
            self._one(op, float(s), int(n), int(far))
            for s, n, far in zip(sizes.flat, groups.flat, gaps.flat, strict=True)
        ]
        return np.array(flat, float).reshape(sizes.shape)

    def _one(self, op: str, size: float, ranks: int, apart: int) -> float:
        if ranks < 2:
            return 0.0
        group = 2 if op == "send" else ranks
        shares = self.machine.kind == "cpu"
        gap = max(1, self.ranks // group) if shares and op != "send" else apart
        return self.machine.curve(op, group, backend=self.backend, apart=gap).seconds(size)


def hardware_of_machine(machine: Machine, ranks: int = 0, backend: str = "") -> Hardware:
    """The machine of a file as a place to run so many ranks; 0: one for each device or core."""
    cpu = machine.kind == "cpu"
    cores = max(1, machine.cores // machine.threads) if cpu else 0
    ranks = ranks or cores or machine.count
    if not machine.rates or not machine.memory_bandwidth:
        raise MachineError(
            f"{machine.name} has no measured matrix products or memory bandwidth."
            " Measure them: phalanx doctor --out FILE."
        )
    if machine.kind != "cpu" and ranks > machine.count:
        raise MachineError(
            f"{machine.name} has {machine.count} devices, not {ranks}; ask for {machine.count}."
        )
    known: dict[str, tuple[Rate, ...]] = {}
    for rate in machine.rates:
        known[rate.dtype] = (*known.get(rate.dtype, ()), rate)
    return Hardware(
        name=machine.name,
        ranks=ranks,
        memory=machine.memory / ranks if cpu else machine.memory,
        rates=Measured(machine, known),
        network=Curves(machine, ranks, backend),
        node=ranks,
        peak={dtype: max(r.flops for r in rates) for dtype, rates in known.items()},
        host=machine.host_bandwidth or HOST_LINK,
        cores=cores,
    )


def local_profile(precision: str = "fp32") -> Profile:
    """Ours on a CPU: no driver, nothing that an allocator keeps, messages that need the cores too."""
    width = _BYTES.get(precision, 4.0)
    homes = (
        0.0 if width == 4.0 else 8.0 if width == 8.0 else 4.0
    )  # a copy in full beside narrow ones
    averages = 16.0 if width == 8.0 else 8.0
    return replace(
        profile("phalanx"),
        by_device={},
        weight_bytes=width,
        gathered_bytes=width,
        gradient_bytes=max(width, 4.0),
        reduce_bytes=max(width, 4.0),
        optimizer_bytes=averages + (homes if width < 4.0 else 0.0),
        hides_data=0.0,
        hides_tensor=0.0,
        context=0.0,
        reserve=1.0,
    )


def crowded(found: Estimates, c: Columns, hardware: Hardware) -> Estimates:
    """The estimates where ranks share cores: those of a pipeline that wait leave theirs to the others.

    `price` makes each rank slower by ranks / cores, as if all were always at work. With q cores for
    a pipeline, a stage that is alone has a core of its own: the step lasts at least as long as all
    the work does on q cores, and while k < q stages are at work, (q - k) / q of that time is lost.
    """
    if not hardware.cores or hardware.ranks <= hardware.cores:
        return found
    shared = hardware.ranks / hardware.cores
    cores = c.pp / shared
    m = c.microbatches
    busiest = (found.compute + found.tensor) / m
    whole = found.bubble + busiest  # exact for the schedules whose bubble is the whole ramp
    needed = np.maximum(whole / c.pp, busiest / shared)
    part = np.where(c.pp > 1, needed / busiest, 1.0)
    most = int(c.pp.max(initial=1))
    lost = sum(
        (np.where(k < c.pp, np.maximum(0.0, 1.0 - k / cores), 0.0) for k in range(1, most)),
        np.zeros_like(m),
    )
    left = 2.0 * lost / (np.maximum(c.pp - 1, 1.0) * shared)
    return replace(
        found,
        compute=found.compute * part,
        tensor=found.tensor * part,
        bubble=np.where(c.pp > 1, found.bubble * left, found.bubble),
        update=found.update * shared,  # every rank updates at once
    )
