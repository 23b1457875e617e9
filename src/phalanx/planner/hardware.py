"""The hardware of a program: seconds for a matmul, a byte and a message.

Two kinds of constants meet here: those of the *device* (its best measured matmul rate,
its memory, its attention kernel) and those of the *cluster* (the share of each link's
rate that is reached, the latency of a step). A `SoftwareProfile` describes how the
software uses them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from ..layout.choices import BF16, DTYPES, MATMUL_RATES
from ..program import AttentionLoad, Product
from .curve import FACTORS
from .device import Device, MachineError
from .link import Cluster, link

# Assumptions for a device whose best matmul, or attention kernel, was not measured.
# Share of the stated peak, unless other formats of the device reach less of theirs.
REACHED = 0.75
FLASH = 0.6  # share of the best matmul rate
# The most FLOPs per cycle of each streaming multiprocessor in kernels with Ampere's
# tensor-core instructions (mma.sync): newer devices run these no faster, whatever their
# peak. From the 200 and 335 TFLOP/s that FlashAttention-1 and -2 reach on an H100,
# which has twice an A100's peak per cycle.
_AMPERE_FLOPS = {"flash-1": 828.0, "flash-2": 1387.0}
STREAM = (
    0.85  # share of the memory's stated bandwidth in long reads and writes
)
FP4 = "fp4"  # NVFP4 and MXFP4, which only tables of published runs have
NARROW = (*MATMUL_RATES, FP4)  # formats of matmuls that inputs are rounded to
# Bytes of an element of a matmul's inputs. 16 elements of NVFP4 share a scale of 8 bits.
_WIDTHS = {name: float(dtype.bytes) for name, dtype in DTYPES.items()}
_WIDTHS[FP4] = 0.5 + 1 / 16
# Extra bytes for each element of a narrow matmul's inputs, moved by the kernels that
# round them. NVFP4 has a scale for the whole tensor as well: each tensor, an input of two
# matmuls, is read once more for its largest value (NVIDIA 2025, Pretraining LLMs with
# NVFP4). Assumed: no time was measured.
_QUANTISED = dict.fromkeys(MATMUL_RATES, 1.0) | {FP4: 2.0}
# Tiles of a matmul, and the relative rate of each size.
_TILES = ((128, 256), (128, 128), (64, 128))
_TILE_RATE = (1.0, 0.97, 0.8)
_TO_HOST = ("pcie", "nvlink-c2c")
HOST_LINK = (
    25e9  # bytes per second to a host, if the catalogue names no link to it
)
# The number of keys at which causal attention runs at half its rate, on an A100 whose
# 108 units reach 189 TFLOP/s (Dao 2023, figures 4 and 7). A tile starts and ends in a
# fixed time, in which a faster unit would have treated more keys.
_RAMP = 512.0
_RAMP_RATE = 189e12 / 108
# The longest sequence of the papers' figures: there, catalogued rates hold with a ramp
# of 512 keys.
_MEASURED_KEYS = 16384
# A ring sends in chunks, and the first has to travel all the way round: bytes of it in
# a long message, or a share of a short one, which NCCL cuts finer (three measured A100
# servers, an H200).
_FILL, _FILLED = 8e6, 0.25
# The forward of fused attention reaches more than its backward. On an H100, cuDNN
# reached 535 and 428 TFLOP/s, FlashAttention-2 309 and 251 (benchmarks/README.md).
# Catalogued rates are those of both together, 2 and 5 matmuls: factors on them.
_FORWARD_FASTER = 1.18
_BACKWARD = 5 / (7 - 2 / _FORWARD_FASTER)
# Slowdown of attention with narrow heads, as a power of their size relative to 128:
# heads of 64 reach 171 TFLOP/s where 128 reach 189 (Dao 2023, figure 4, A100);
# generation 3 loses more (Shah et al. 2024).
_NARROW, _NARROW_3 = 0.15, 0.35
# Share of the computing rate lost while messages travel beside it: the kernels that
# send and sum them occupy multiprocessors and memory bandwidth.
SLOWED = 0.25
_DEPTH = (
    80.0  # the k at which a matmul's start and end cost as much as its middle
)


def lost_beside(computing: float, messages: float) -> float:
    """Seconds by which computation is longer because messages travel beside it.

    A share of the messages' seconds, and at most the loss if they travel all the time.
    """
    return min(SLOWED * messages, computing * SLOWED / (1 - SLOWED))


class PredictionError(RuntimeError):
    """Raised for a prediction that cannot be right: a mistake of the planner."""


class Rates(Protocol):
    """Seconds for the computations of one device."""

    def product(self, p: Product, dtype: str) -> float: ...

    def attention(
        self, a: AttentionLoad, dtype: str, kernel: str
    ) -> float: ...

    def move(self, size: float) -> float: ...

    @property
    def launch(self) -> float: ...


@dataclass(frozen=True)
class Roofline:
    """A catalogued device: a roofline by shape, with wave quantization."""

    device: Device
    launch: float = 5e-6

    @staticmethod
    def multiplies(dtype: str) -> bool:
        """True if there is a price for matmuls in a format."""
        return dtype in _WIDTHS

    def reached(self, dtype: str) -> float:
        """FLOP/s of the best matmul: measured, or assumed from the peak."""
        # A catalogued rate is in TFLOP/s; all rates here are in FLOP/s.
        found = self.device.reached_tflops.get(dtype, 0.0) * 1e12
        found = found or self._usual_part() * self.device.peak(dtype)
        if not found:
            raise MachineError(
                f"{self.device.title} states no rate of {dtype}."
            )
        return found

    def _usual_part(self) -> float:
        """The assumed share of the peak in a format without measurements."""
        measured = self.device.reached_tflops.items()
        return min(
            [
                REACHED,
                *(
                    1e12 * rate / self.device.peak(name)
                    for name, rate in measured
                ),
            ]
        )

    def product(self, p: Product, dtype: str) -> float:
        if dtype not in _WIDTHS:
            raise MachineError(f"there is no price for {dtype} matmuls.")
        width = _WIDTHS[dtype]
        # Elements of both factors, which the matmul reads.
        taken = p.batch * (p.m * p.k + p.k * p.n)
        rate = self.reached(dtype) * self._shape(p)
        # The roofline: the longer of computing, and reading both factors and
        # writing the result.
        time = max(
            p.flops / rate, self.move(width * (taken + p.batch * p.m * p.n))
        )
        return time + self.move(_QUANTISED.get(dtype, 0.0) * taken)

    def _shape(self, p: Product) -> float:
        """The share of the best rate, by whole tiles, whole waves and depth."""
        units = self.device.chip.units if self.device.chip else 1
        best = 0.0
        for (tall, wide), rate in zip(_TILES, _TILE_RATE, strict=True):
            rows, cols = math.ceil(p.m / tall), math.ceil(p.n / wide)
            tiles = rows * cols * p.batch
            # Tiles at the edges compute as much as full ones, and a partly
            # filled last wave takes as long.
            filled = p.m * p.n / (rows * tall * cols * wide)
            waves = tiles / units
            best = max(best, rate * filled * waves / math.ceil(waves))
        return float(best * p.k / (p.k + _DEPTH))

    def attention(self, a: AttentionLoad, dtype: str, kernel: str) -> float:
        generation = self.attention_measured(kernel)
        rate = 1e12 * self.device.attention_tflops.get(generation, 0.0)
        rate = rate or self._assumed_attention(dtype, kernel)
        # Rates are those of heads of 128; narrower heads are slower.
        power = _NARROW_3 if generation == "flash-3" else _NARROW
        narrow = min(1.0, (a.head_dim / 128) ** power)
        half = self._half_rate_keys(rate)
        long = rate * (_MEASURED_KEYS + half) / (_MEASURED_KEYS + _RAMP)
        long *= _FORWARD_FASTER if a.products <= 2 else _BACKWARD
        short = half * (1.0 if a.causal else 0.5)
        return float(a.flops / (long * narrow * a.keys / (a.keys + short)))

    def _half_rate_keys(self, rate: float) -> float:
        """The number of keys at which causal attention runs at half its rate."""
        chip = self.device.chip
        faster = rate / chip.units / _RAMP_RATE if chip else 1.0
        # A kernel that is slower on the same device does not start earlier.
        return _RAMP * max(1.0, faster)

    def attention_measured(self, kernel: str) -> str:
        """The newest measured attention kernels up to those requested, or ""."""
        # Names sort by generation: "flash-1" < "flash-2" < "flash-3".
        known = self.device.attention_tflops
        return max((name for name in known if name <= kernel), default="")

    def _assumed_attention(self, dtype: str, kernel: str) -> float:
        """FLOP/s of an attention kernel that was not measured on this device."""
        usual = BF16 if self.device.peak(BF16) else dtype
        rate, chip = FLASH * self.reached(usual), self.device.chip
        if chip is None or kernel not in _AMPERE_FLOPS:
            return rate
        return min(
            rate,
            _AMPERE_FLOPS[kernel] * chip.units * chip.matrix_clock_ghz * 1e9,
        )

    def move(self, size: float) -> float:
        return size / (STREAM * self.device.memory.bandwidth)


@dataclass(frozen=True)
class Hop:
    """One level of links: bytes per second of a rank, and seconds per step."""

    inside: int  # devices that this level connects in total
    # Bus bandwidth of all-gather and reduce-scatter within it, and of one pair.
    rate: float
    reduce: float  # bus bandwidth of all-reduce
    latency: float
    # The remaining share of bandwidth, by the number of lower units connected.
    faded: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Network:
    """Links in levels, the innermost first.

    Each lower unit has a port for each of its devices, so a group with g members in a
    server drives g ports at once.
    """

    hops: tuple[Hop, ...]
    start: float = 12e-6  # seconds before the first byte of any collective

    def seconds(
        self, op: str, size: float, ranks: float, apart: float
    ) -> float:
        """Seconds of a collective over `ranks` ranks, each `apart` from the next."""
        if op == "send":
            hop = next(
                (hop for hop in self.hops if apart < hop.inside), self.hops[-1]
            )
            return self.start + hop.latency + size / hop.rate
        if ranks <= 1:
            return 0.0
        if op == "all_to_all":
            return self._all_to_all(size, ranks, apart)
        passes = 1.0 if op in ("broadcast", "reduce") else FACTORS[op](ranks)
        bandwidth, delay = self._path(op, ranks, apart)
        return (
            self.start
            + delay
            + passes * (size + min(_FILL, _FILLED * size)) / bandwidth
        )

    def _all_to_all(self, size: float, ranks: float, apart: float) -> float:
        """Seconds in which every rank sends each other rank its part of `size`.

        Unlike the bytes of a ring, those of another server are one rank's own: they
        leave by its own port, beside those that stay inside.
        """
        _, delay = self._path("all_to_all", ranks, apart)
        members, slowest = 1.0, 0.0
        for hop in self.hops:
            inside = min(max(math.floor(hop.inside / apart), 1.0), ranks)
            units = inside / members
            if units > 1.0:
                # All that leaves a server passes every level outside of it.
                reached = ranks if hop is not self.hops[0] else inside
                share = (reached - members) / ranks
                rate = hop.rate * _left(hop.faded, units)
                slowest = max(slowest, share * size / rate)
            members = inside
        return self.start + delay + slowest

    def _path(self, op: str, n: float, apart: float) -> tuple[float, float]:
        """The narrowest level's bandwidth, and the total latency of the steps."""
        members = 1.0  # the group's ranks inside one lower unit
        bandwidth, delay = math.inf, 0.0
        for hop in self.hops:
            # How many of the group's ranks share one unit of this level, given
            # their distance.
            inside = min(max(math.floor(hop.inside / apart), 1.0), n)
            units = inside / members
            if units > 1.0:
                rate = hop.reduce if op == "all_reduce" else hop.rate
                bandwidth = min(
                    bandwidth, rate * members * _left(hop.faded, units)
                )
                steps = units - 1
                # A tree is chosen where a ring would take more steps.
                if op == "all_reduce":
                    steps = 2 * min(steps, 2 * math.log2(units))
                delay += steps * hop.latency
            members = inside
        if math.isinf(bandwidth):
            raise PredictionError(
                f"no link joins a group of {n:g} ranks, each {apart:g} ranks from the next, among the"
                f" {self.hops[-1].inside if self.hops else 1:,} devices of this cluster"
            )
        return bandwidth, delay


def _left(faded: Mapping[int, float], units: float) -> float:
    """The share of bandwidth that remains with this many units connected.

    Interpolated over the logarithm between measurements; beyond them, the last.
    """
    if not faded or units <= 1:
        return 1.0
    known = sorted((math.log2(k), math.log(v)) for k, v in faded.items())
    # Linear between the measurements on both sides, in logarithms of units and
    # of shares.
    x = math.log2(units)
    if x <= known[0][0]:
        return math.exp(known[0][1])
    for (x0, y0), (x1, y1) in pairwise(known):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(known[-1][1])


class NetworkTimes(Protocol):
    def seconds(
        self, op: str, size: float, ranks: float, apart: float
    ) -> float: ...


@dataclass(frozen=True)
class Hardware:
    """A number of equal devices, connected by a network."""

    name: str
    ranks: int
    memory: float  # bytes of one device
    rates: Rates
    network: NetworkTimes
    node: int  # devices connected by the fastest links
    peak: Mapping[str, float]  # FLOP/s by dtype, for MFU
    host: float = HOST_LINK  # bytes per second between a device and its host
    measured: bool = False  # rates and peak come from a machine file
    # Cores of a CPU whose ranks share them; 0: every rank has its own device.
    cores: int = 0

    @property
    def target(self) -> str:
        """The device whose kernels compute: "cpu" or "cuda"."""
        return "cpu" if self.cores else "cuda"

    @property
    def crowding(self) -> float:
        """The slowdown of a rank when all ranks compute."""
        return max(1.0, self.ranks / self.cores) if self.cores else 1.0


def hardware_of(cluster: Cluster, ranks: int = 0) -> Hardware:
    """A catalogued cluster as hardware to plan for."""
    device = cluster.kind
    hops, inside = list[Hop](), 1
    for level in cluster.levels:
        inside *= level.size
        rate, faded = (
            level.bandwidth * level.reached,
            {int(k): v for k, v in level.faded.items()},
        )
        # Only switches inside a server, the first level, sum.
        summing = 1.0 if hops else level.reduces
        hops.append(
            Hop(inside, rate, rate * summing, level.latency_us * 1e-6, faded)
        )
    return Hardware(
        name=cluster.name,
        ranks=ranks or cluster.size,
        memory=device.memory.bytes,
        rates=Roofline(device),
        network=Network(tuple(hops)),
        node=cluster.levels[0].size,
        peak={dtype: device.peak(dtype) for dtype in device.dtypes},
        host=next(
            (
                link(x).bandwidth
                for x in device.links
                if x.startswith(_TO_HOST)
            ),
            HOST_LINK,
        ),
    )
