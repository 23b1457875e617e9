"""What a device's bytes pass on their way out: registers, caches, memory, links, network."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .link import clusters, link


@dataclass(frozen=True)
class Place:
    """One level: how much it holds in all, how fast bytes come from it, how that was computed."""

    name: str
    bytes: float  # 0: no bound worth telling
    bandwidth: float  # bytes a second of one device; of links both directions added
    how: str

    @property
    def to_read(self) -> float:
        """Seconds to read all of it once."""
        return self.bytes / self.bandwidth


def hierarchy(device: Device) -> tuple[Place, ...]:
    """The levels from the inside out; those that its data file does not tell are left out."""
    memory = device.memory
    how = f"{memory.bus_bits} bits x {memory.gbit_per_pin} Gbit/s" if memory.bus_bits else "stated"
    return (
        *_inside(device),
        Place(memory.kind, memory.bytes, memory.bandwidth, how),
        *_outside(device),
    )


def _inside(device: Device) -> list[Place]:
    chip = device.chip
    if chip is None:
        return []
    found = []
    cycles = chip.units * chip.clock_ghz * 1e9
    for name, kib, per_cycle in (
        ("registers", chip.registers_kib, chip.register_bytes_per_cycle),
        ("L1 / shared", chip.l1_kib, chip.l1_bytes_per_cycle),
    ):
        if kib and per_cycle:
            how = f"{chip.units} x {kib} KiB; {per_cycle} bytes a cycle at {chip.clock_ghz} GHz"
            found.append(Place(name, chip.units * kib * 1024.0, cycles * per_cycle, how))
    if chip.l2_mib and chip.l2_gb_s:
        how = device.source("chip.l2_gb_s").split(":")[0]
        found.append(Place("L2", chip.l2_mib * 2.0**20, chip.l2_gb_s * 1e9, how))
    return found


def _outside(device: Device) -> list[Place]:
    family = next((c for c in clusters().values() if c.device == device.name), None)
    if family is None:
        return [
            Place(link(name).title, 0.0, link(name).both, "both directions")
            for name in device.links[:1]
        ]
    found, joined = [], 1
    for level in family.levels:
        joined *= level.size
        through = link(level.link)
        how = f"{joined} devices, " if level.size else ""
        found.append(
            Place(
                f"{level.name}, {through.title.split(',')[0]}",
                joined * device.memory.bytes if level.size else 0.0,
                2 * level.bandwidth,
                f"{how}both directions; {level.bandwidth / 1e9:.4g} GB/s in one",
            )
        )
    return found
