"""The duration of a collective by size: measured latency per step, and bandwidth.

The two forms are the textbook ones (Thakur, Rabenseifner, Gropp 2005). A *ring* passes
parts around: few bytes, as many steps as ranks. A *tree* halves the distance: few
steps, more bytes. For one group size both are the same straight line; they differ in
their growth with the number of ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

# The bytes that each rank has to send for each byte of S, in any implementation. S is a
# rank's input of all-reduce, reduce-scatter, reduce and all-to-all, its output of
# all-gather, the root's whole for scatter and gather, and the message of broadcast and
# send.
_PARTS = ("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather")
FACTORS: dict[str, Callable[[float], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(_PARTS, lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce", "send"), lambda n: 1.0),
}


def bus_factor(op: str, ranks: int) -> float:
    """The factor that makes algorithm bandwidth S/t comparable with a link's."""
    return FACTORS[op](ranks)


def steps(op: str, form: str, ranks: int) -> int:
    """The number of messages that follow one another."""
    if op == "send":
        # A ring visits every other rank, and a tree has ceil(log2 n) levels.
        return 1
    around = ranks - 1 if form == "ring" else math.ceil(math.log2(ranks))
    return 2 * around if op == "all_reduce" else around


def moved(op: str, form: str, ranks: int) -> float:
    """The multiple of S that passes through one rank's link, one message after another."""
    if form == "tree":
        # Each level of a tree passes the whole message; all-reduce goes up and
        # down.
        depth = math.ceil(math.log2(ranks))
        if op in ("all_reduce", "broadcast", "reduce"):
            return depth * (2.0 if op == "all_reduce" else 1.0)
        if op == "all_to_all":  # Bruck: half of everything in every step
            return depth / 2
    return bus_factor(op, ranks)


@dataclass(frozen=True)
class Curve:
    """A fitted curve of an operation and group: latency per step, bandwidth per rank.

    `apart` is the distance between the group's ranks in the world; 1 means neighbours.
    """

    op: str
    backend: str
    ranks: int
    form: str  # "ring" or "tree": the growth of its time with the ranks
    latency: float  # seconds per step
    bandwidth: float  # bytes per second
    error: float  # median relative error on the fitted measurements
    least: int  # bytes: smallest and largest size that was measured
    most: int
    apart: int = 1
    # Above `bend` bytes the bandwidth differs: caches end, protocols change. 0: never.
    bend: int = 0
    beyond: float = 0.0

    def seconds(self, size: float) -> float:
        start = steps(self.op, self.form, self.ranks) * self.latency
        passes = moved(self.op, self.form, self.ranks)
        if not self.bend or size <= self.bend:
            return start + passes * size / self.bandwidth
        # The bytes up to the bend have one rate, the rest the other.
        near = passes * self.bend / self.bandwidth
        return start + near + passes * (size - self.bend) / self.beyond

    def bus(self, size: float) -> float:
        return bus_factor(self.op, self.ranks) * size / self.seconds(size)
