"""The path of a device's bytes: registers, caches, memory, links, network."""

from dataclasses import dataclass

from .device import Device
from .link import clusters, link


@dataclass(frozen=True)
class Place:
    """One level: its capacity, its bandwidth, and how that was computed."""

    name: str
    bytes: float  # 0: no meaningful limit
    bandwidth: float  # bytes per second of one device; for links, both directions added
    how: str

    @property
    def to_read(self) -> float:
        return self.bytes / self.bandwidth


def hierarchy(device: Device) -> tuple[Place, ...]:
    """The levels from the inside out. Those missing in the data file are left out."""
    memory, chip = device.memory, device.chip
    how = (
        f"{memory.bus_bits} bits x {memory.gbit_per_pin} Gbit/s"
        if memory.bus_bits
        else "stated"
    )
    found = [Place(memory.kind, memory.bytes, memory.bandwidth, how)]
    if chip and chip.l2_mib and chip.l2_gb_s:
        how = device.source("chip.l2_gb_s").split(":")[0]
        found.insert(
            0, Place("L2", chip.l2_mib * 2.0**20, chip.l2_gb_s * 1e9, how)
        )
    if chip:
        cycles, at = (
            chip.units * chip.clock_ghz * 1e9,
            f"a cycle at {chip.clock_ghz} GHz",
        )
        for name, kib, per_cycle in (
            ("L1 / shared", chip.l1_kib, chip.l1_bytes_per_cycle),
            ("registers", chip.registers_kib, chip.register_bytes_per_cycle),
        ):
            if kib and per_cycle:
                how = f"{chip.units} x {kib} KiB; {per_cycle} bytes {at}"
                found.insert(
                    0,
                    Place(
                        name,
                        chip.units * kib * 1024.0,
                        cycles * per_cycle,
                        how,
                    ),
                )
    family = next(
        (c for c in clusters().values() if c.device == device.name), None
    )
    if family is None:
        ways = map(link, device.links[:1])
        return (
            *found,
            *(
                Place(way.title, 0.0, way.both, "both directions")
                for way in ways
            ),
        )
    joined = 1
    for level in family.levels:
        joined *= level.size
        name = f"{level.name}, {link(level.link).title.split(',')[0]}"
        how = f"{joined} devices, " if level.size else ""
        how += f"both directions; {level.bandwidth / 1e9:.4g} GB/s in one"
        found.append(
            Place(name, joined * device.memory.bytes, 2 * level.bandwidth, how)
        )
    return tuple(found)
