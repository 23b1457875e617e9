"""Links between devices, each number with its source, and clusters built of them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ..layout.choices import BF16, near_word, no_such
from .device import MACHINES, Device, MachineError, catalogue, device, devices


@dataclass(frozen=True)
class Link:
    """The rate of one kind of link between a device and its peers."""

    title: str
    source: str
    lanes: int
    gbit: float  # per lane, in one direction
    efficiency: float = 1.0  # the share that encoding leaves
    all_reduce_factor: float = (
        1.0  # relative to a ring's traffic, if the switch sums
    )
    name: str = ""

    @property
    def bandwidth(self) -> float:
        # Gbit/s of all lanes in one direction, as bytes per second.
        return self.lanes * self.gbit / 8 * self.efficiency * 1e9

    @property
    def both(self) -> float:
        """Bytes per second, both directions added: the advertised number of NVLink."""
        return 2 * self.bandwidth


@dataclass(frozen=True)
class Level:
    """`size` connected units of the level below, such as 8 devices in a server."""

    name: str
    link: str
    size: int = 0  # 0: all that are left
    share: float = 1.0
    reached: float = 0.8  # share of that rate in a ring's collectives
    # all-reduce relative to all-gather; above 1 if the switch sums
    reduces: float = 1.0
    latency_us: float = 4.0  # of one step of a ring
    # The remaining share of bandwidth, by the number of units connected.
    faded: Mapping[str, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Bytes per second, device and direction, if all send across this level."""
        return link(self.link).bandwidth * self.share


@dataclass(frozen=True)
class Cluster:
    """Devices connected in levels, the innermost first."""

    device: str
    source: str
    levels: tuple[Level, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return math.prod(level.size for level in self.levels)

    @property
    def kind(self) -> Device:
        return device(self.device)

    def totals(self) -> dict[str, float]:
        """Cores, matrix cores, bytes of memory and bf16 FLOP/s of all devices."""
        kind, chip = self.kind, self.kind.chip
        return {
            "devices": self.size,
            "cores": self.size * chip.units * chip.cores if chip else 0,
            "matrix_cores": self.size * chip.units * chip.matrix_cores
            if chip
            else 0,
            "memory": self.size * kind.memory.bytes,
            "flops": self.size * kind.peak(BF16),
        }


@cache
def links() -> dict[str, Link]:
    return catalogue(Link, MACHINES / "links.toml")


def link(name: str) -> Link:
    if name not in links():
        raise MachineError(no_such("link", name, links(), cutoff=0.0))
    return links()[name]


@cache
def clusters() -> dict[str, Cluster]:
    """Every family of clusters, by name. The outermost level of most has no size yet."""
    return catalogue(Cluster, MACHINES / "clusters.toml")


def cluster(name: str) -> Cluster:
    """The cluster of a name such as `llama3`, or of a family and a size: `h100x64`."""
    # "h100x64" -> "h100" and "64"; "llama3" -> "llama3" and None.
    match, known = re.fullmatch(r"(.+?)(?:x([0-9]{1,7}))?", name), clusters()
    family, count = (
        (match[1], int(match[2] or 0))
        if match and name not in known
        else (name, 0)
    )
    # A device without a catalogued cluster: "rtx-4090x8".
    if family not in known and family in devices() and count:
        return joined(family, count)
    if family not in known:
        raise MachineError(
            f"unknown cluster {name[:60]!r}.{near_word(family, known)} Families are {', '.join(known)};"
            " write h100x64 for 64 devices of one."
        )
    whole = known[family]
    if not count and not whole.size:
        raise MachineError(
            f"{name!r} does not give the number of devices: write {family}x64 for 64."
        )
    return replace(
        whole, name=name, levels=_filled(whole, count or whole.size)
    )


def joined(name: str, count: int, server: int = 8) -> Cluster:
    """A cluster of a device without a catalogued one.

    Its fastest link inside a server, and an assumed 100 Gb/s Ethernet for each server.
    """
    kind = device(name)
    size = kind.pod or server
    levels = (
        # All devices of a server share its network port.
        Level("devices", kind.links[0], size),
        Level("network", "ethernet-100", 0, 1 / size),
    )
    whole = Cluster(kind.name, f"the links of {kind.name}", levels, kind.name)
    return replace(
        whole, name=f"{kind.name}x{count}", levels=_filled(whole, count)
    )


def whole_servers(name: str, ranks: int, server: int = 8) -> Cluster:
    """The smallest such cluster for `ranks`; its last server may be partly used.

    For estimates on an unnamed cluster.
    """
    kind = device(name)
    size = kind.pod or server
    count = ranks if ranks <= size else math.ceil(ranks / size) * size
    return replace(joined(name, count, server), name=f"{kind.name}x{ranks}")


def _filled(whole: Cluster, count: int) -> tuple[Level, ...]:
    made, left = [], count
    for level in whole.levels:
        # A level without a size takes all units that are left.
        size = min(level.size or left, left)
        if left % size:
            raise MachineError(
                f"{whole.name}x{count}: {left} do not fill levels of {size} ({level.name});"
                f" use a multiple of {size}."
            )
        made.append(replace(level, size=size))
        left //= size
    if left > 1:
        raise MachineError(
            f"{whole.name} has {whole.size} devices, not {count}."
        )
    # A level of one unit connects nothing; a single device keeps its innermost
    # level.
    return tuple(level for level in made if level.size > 1) or (made[0],)
