"""Where a program would run: what a product, a byte and a message cost there, in seconds.

Two layers of constants meet here, each from its own kind of data: the *device* (the best rate of
products that was measured on it, its memory, its attention kernel) and the *cluster* (what is left
of each link's rate, the latency of a step). What the running software does with them is a `Profile`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..program import AttentionLoad, Product
from .device import Device, MachineError
from .link import Cluster, link

__all__ = ["Chip", "Hop", "Network", "Numbers", "Hardware", "Group", "hardware_of"]

Numbers = NDArray[np.float64]

# What is assumed of a device whose best product, or attention kernel, nobody has measured.
REACHED = 0.75  # of the stated peak
FLASH = 0.6  # of the best product
STREAM = 0.85  # of the memory's stated bandwidth that long reads and writes see
_QUANTISED = 1.0  # bytes more for each number of what a product in fp8 takes: cut by who made it
_TILES = ((128, 256), (128, 128), (64, 128))  # of a product, and how well each size runs
_TILE_RATE = (1.0, 0.97, 0.8)
_TO_HOST = ("pcie", "nvlink-c2c")
HOST_LINK = 25e9  # bytes a second to a host, where the catalogue names no link to it
_DEPTH = 160.0  # k at which a product's start and end cost as much as its middle


class Rates(Protocol):
    """What one device computes, in seconds."""

    def product(self, p: Product, dtype: str) -> float: ...

    def attention(self, a: AttentionLoad, dtype: str) -> float: ...

    def move(self, size: float) -> float: ...

    @property
    def launch(self) -> float: ...


@dataclass(frozen=True)
class Chip:
    """A catalogued device: roofline by shape, with wave quantisation."""

    device: Device
    launch: float = 5e-6

    def reached(self, dtype: str) -> float:
        """FLOP/s of the best product: measured, or assumed from the peak."""
        said = self.device.reached_tflops.get(dtype, 0.0) * 1e12
        found = said or REACHED * self.device.peak(dtype)
        if not found:
            raise MachineError(f"{self.device.title} states no rate of {dtype}.")
        return found

    def product(self, p: Product, dtype: str) -> float:
        width = 1 if dtype == "fp8" else 4 if dtype in ("fp32", "tf32") else 2
        taken = p.batch * (p.m * p.k + p.k * p.n)
        rate = self.reached(dtype) * self._shape(p)
        time = max(p.flops / rate, self.move(width * (taken + p.batch * p.m * p.n)))
        return time + (self.move(_QUANTISED * taken) if dtype == "fp8" else 0.0)

    def _shape(self, p: Product) -> float:
        """Part of the best rate that a shape can reach: whole tiles, whole waves, enough depth."""
        units = self.device.chip.units if self.device.chip else 1
        best = 0.0
        for (tall, wide), rate in zip(_TILES, _TILE_RATE, strict=True):
            rows, cols = math.ceil(p.m / tall), math.ceil(p.n / wide)
            tiles = rows * cols * p.batch
            filled = p.m * p.n / (rows * tall * cols * wide)
            waves = tiles / units
            best = max(best, rate * filled * waves / math.ceil(waves))
        return float(best * p.k / (p.k + _DEPTH))

    def attention(self, a: AttentionLoad, dtype: str) -> float:
        said = self.device.flash_tflops * 1e12
        rate = said or FLASH * self.reached("bf16")
        narrow = min(1.0, (a.head_dim / 128) ** 0.35)  # a narrow head feeds the tensor cores worse
        return float(a.flops / (rate * narrow))

    def move(self, size: float) -> float:
        return size / (STREAM * self.device.memory.bandwidth)


@dataclass(frozen=True)
class Hop:
    """One level of links as collectives see it: bytes a second of a rank, seconds of a step."""

    inside: int  # devices that this level joins in all
    gather: float  # bus bandwidth of all-gather and reduce-scatter within it
    reduce: float  # of all-reduce
    send: float  # of one pair
    latency: float
    faded: Mapping[int, float] = field(default_factory=dict)  # by lower units joined: what is left


@dataclass(frozen=True)
class Network:
    """Links in levels, the innermost first. Each lower unit has a port for each of its devices, so
    a group with g members in a server drives g ports at once."""

    hops: tuple[Hop, ...]
    start: float = 12e-6  # seconds before the first byte of any collective

    def seconds(self, op: str, size: Numbers, ranks: Numbers, apart: Numbers) -> Numbers:
        """Time of a collective over groups of `ranks`, each `apart` from the next."""
        if op == "send":
            return self._send(size, apart)
        n = np.maximum(np.asarray(ranks, float), 1.0)
        bandwidth, delay = self._path(op, n, np.asarray(apart, float))
        passes = np.where(n > 1, (n - 1) / n, 0.0) * (2.0 if op == "all_reduce" else 1.0)
        if op in ("broadcast", "reduce"):
            passes = np.where(n > 1, 1.0, 0.0)
        time = np.where(n > 1, self.start + delay, 0.0) + passes * size / bandwidth
        return np.asarray(time, float)

    def _path(self, op: str, n: Numbers, apart: Numbers) -> tuple[Numbers, Numbers]:
        """Bandwidth of the narrowest level that the group crosses, and the steps' latencies."""
        members = np.ones_like(n)  # members of the group inside one lower unit
        bandwidth, delay = np.full_like(n * apart, np.inf), np.zeros_like(n * apart)
        for hop in self.hops:
            inside = np.clip(np.floor(hop.inside / apart), 1.0, n)
            units = inside / members
            rate = hop.reduce if op == "all_reduce" else hop.gather
            here = rate * members * _left(hop.faded, units)
            crossed = units > 1.0
            bandwidth = np.where(crossed, np.minimum(bandwidth, here), bandwidth)
            steps = np.maximum(units - 1, 0.0)
            if op == "all_reduce":  # a tree is chosen where a ring's steps would tell
                steps = 2 * np.minimum(steps, 2 * np.log2(np.maximum(units, 1.0)))
            delay = delay + steps * hop.latency
            members = inside
        return np.where(np.isinf(bandwidth), 1.0, bandwidth), delay

    def _send(self, size: Numbers, apart: Numbers) -> Numbers:
        last = self.hops[-1]
        rate, delay = (
            np.full_like(apart, last.send, float),
            np.full_like(apart, last.latency, float),
        )
        for hop in reversed(self.hops):
            near = np.asarray(apart) < hop.inside
            rate, delay = np.where(near, hop.send, rate), np.where(near, hop.latency, delay)
        return np.asarray(self.start + delay + size / rate, float)


def _left(faded: Mapping[int, float], units: Numbers) -> Numbers:
    """What is left of the bandwidth when so many units are joined: between those measured, by
    their logarithm; beyond them, the last."""
    if not faded:
        return np.ones_like(units)
    known = sorted((float(k), v) for k, v in faded.items())
    xs, ys = [math.log2(k) for k, _ in known], [math.log(v) for _, v in known]
    left = np.exp(np.interp(np.log2(np.maximum(units, 1.0)), xs, ys))
    return np.where(units > 1, left, 1.0)


class Group(Protocol):
    """What messages cost, in seconds; sizes and groups may be arrays."""

    def seconds(self, op: str, size: Numbers, ranks: Numbers, apart: Numbers) -> Numbers: ...


@dataclass(frozen=True)
class Hardware:
    """So many devices of a kind, joined by a network."""

    name: str
    ranks: int
    memory: float  # bytes of one device
    rates: Rates
    network: Group
    node: int  # devices that the fastest links join
    peak: Mapping[str, float]  # FLOP/s by dtype, for MFU
    host: float = HOST_LINK  # bytes a second between a device and its host
    cores: int = 0  # of a CPU whose ranks share them; 0: every rank has a device of its own


def hardware_of(cluster: Cluster, ranks: int = 0) -> Hardware:
    """A catalogued cluster as a place to run."""
    device = cluster.kind
    hops, inside = [], 1
    for number, level in enumerate(cluster.levels):
        inside *= level.size
        port, left = level.bandwidth, level.reached
        summing = level.reduces if not number else 1.0
        hops.append(
            Hop(
                inside=inside,
                gather=port * left,
                reduce=port * left * summing,
                send=port * left,
                latency=level.latency_us * 1e-6,
                faded={int(k): v for k, v in level.faded.items()},
            )
        )
    return Hardware(
        name=cluster.name,
        ranks=ranks or cluster.size,
        memory=device.memory.bytes,
        rates=Chip(device),
        network=Network(tuple(hops)),
        node=cluster.levels[0].size,
        peak={dtype: device.peak(dtype) for dtype in device.dtypes},
        host=next((link(x).bandwidth for x in device.links if x.startswith(_TO_HOST)), HOST_LINK),
    )
