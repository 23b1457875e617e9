"""A device by its maker's data sheet: peaks, memory, links, and the chip's internals.

A data file holds the maker's statements, with the source of each number. Derived values
(peak = units x operations per cycle x clock) are computed here.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from ..layout.choices import BF16
from ..layout.codec import FileError, decode, parse

Entry = TypeVar("Entry")
MACHINES = Path(__file__).parent / "machines"
_OTHERS = ("links", "clusters")


class MachineError(ValueError):
    """Raised for a wrong description or name of a machine, a device or a cluster."""


class MachineFileError(FileError, MachineError):
    """A file about machines that cannot be used, with every mistake in it."""


@dataclass(frozen=True)
class Chip:
    """The inside of a chip.

    `units` are the enabled streaming multiprocessors or compute units; the tables give
    the work of each in a cycle. `vector` runs at `clock_ghz`, `matrix` at
    `matrix_clock_ghz`.
    """

    units: int
    clock_ghz: float
    matrix_clock_ghz: float
    vector: Mapping[str, int]  # FLOPs per cycle and unit, by dtype
    matrix: Mapping[str, int]
    units_made: int = (
        0  # on the die; some are disabled so that more dies are usable
    )
    cores: int = 0  # float32 lanes per unit
    matrix_cores: int = 0  # per unit
    registers_kib: int = 0  # per unit
    l1_kib: int = 0  # per unit, including shared memory
    l1_bytes_per_cycle: int = 0  # per unit
    register_bytes_per_cycle: int = 0  # per unit
    l2_mib: int = 0
    l2_gb_s: float = 0.0


@dataclass(frozen=True)
class Memory:
    """The device's own memory; its bandwidth follows from the bus, or is stated."""

    gib: float
    kind: str
    bus_bits: int = 0
    gbit_per_pin: float = 0.0
    gb_s: float = 0.0

    @property
    def bandwidth(self) -> float:
        return (self.bus_bits / 8 * self.gbit_per_pin or self.gb_s) * 1e9

    @property
    def bytes(self) -> float:
        return self.gib * 2**30


@dataclass(frozen=True)
class Device:
    """One entry of the catalogue. Peaks are dense: sparsity does not count."""

    title: str
    memory: Memory
    sources: Mapping[str, str]  # the sources of numbers, by key or by table
    drivers: tuple[
        str, ...
    ] = ()  # the names that drivers report, matched whole
    links: tuple[str, ...] = ()  # names in links.toml, the fastest first
    # If no chip gives it.
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    # The best matmul that was measured.
    reached_tflops: Mapping[str, float] = field(default_factory=dict)
    # Attention kernels by generation: forward and backward, causal FLOPs, long
    # sequences, heads of 128.
    attention_tflops: Mapping[str, float] = field(default_factory=dict)
    chip: Chip | None = None
    pod: int = 0  # devices that its own links connect
    note: str = ""
    name: str = ""

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls in a dtype; 0 if the maker states none."""
        # Matrix units first, then a stated peak, then vector units: float32
        # may have only the last.
        chip = self.chip
        if chip is not None and dtype in chip.matrix:
            return (
                chip.units * chip.matrix[dtype] * chip.matrix_clock_ghz * 1e9
            )
        if dtype in self.peak_tflops:
            return self.peak_tflops[dtype] * 1e12
        if chip is not None and dtype in chip.vector:
            return chip.units * chip.vector[dtype] * chip.clock_ghz * 1e9
        return 0.0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes with a known peak, fastest first."""
        chip = self.chip
        known = {
            *self.peak_tflops,
            *(chip.matrix if chip else ()),
            *(chip.vector if chip else ()),
        }
        return tuple(
            sorted(known, key=lambda dtype: (-self.peak(dtype), dtype))
        )

    @property
    def ridge(self) -> float:
        """bf16 FLOPs per byte of memory traffic at which both are busy."""
        return self.peak(BF16) / self.memory.bandwidth

    def source(self, place: str) -> str:
        """The source of the number at `memory.gib`: its own, or its table's, or ""."""
        # "chip.l2_gb_s", then "chip": the innermost place with a source.
        while place not in self.sources and "." in place:
            place = place.rpartition(".")[0]
        return self.sources.get(place, "")

    def stated(self) -> dict[str, float]:
        """Every number that the data file states, by its place."""
        return dict(_numbers(self, ""))


def _numbers(value: object, place: str) -> list[tuple[str, float]]:
    # A bool is an int in Python, but not a number of the data file. 0 means
    # not stated.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(place, float(value))] if value else []
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    items = value.items() if isinstance(value, Mapping) else ()
    dot = f"{place}." if place else ""
    return [
        number for key, x in items for number in _numbers(x, f"{dot}{key}")
    ]


def catalogue(kind: type[Entry], path: Path) -> dict[str, Entry]:
    """The entries of a file that comes with phalanx, by name; each also holds its name."""
    return {
        name: decode(
            kind,
            {**table, "name": name},
            f"{path.name}, {name}",
            MachineFileError,
        )
        for name, table in tomllib.loads(
            path.read_text(encoding="utf-8")
        ).items()
    }


@cache
def devices() -> dict[str, Device]:
    paths = sorted(
        path for path in MACHINES.glob("*.toml") if path.stem not in _OTHERS
    )
    found = (
        parse(Device, p.read_text(encoding="utf-8"), p.name, MachineFileError)
        for p in paths
    )
    return {
        path.stem: replace(each, name=path.stem)
        for path, each in zip(paths, found, strict=True)
    }


def device(name: str) -> Device:
    """The device of a catalogue name. `h100` alone means the first that begins so."""
    known = devices()
    if name in known:
        return known[name]
    # "gaudi" -> "gaudi-3", the only one. `_USUAL` decides for "h100".
    begins = [each for each in known if each.startswith(f"{name}-")]
    if len(begins) == 1 or name in _USUAL:
        return known[_USUAL.get(name, begins[0] if begins else "")]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" Did you mean {(begins or near)[0]!r}?" if begins or near else ""
    raise MachineError(
        f"there is no device {name!r} in the catalogue.{hint} It has {', '.join(known)}."
    )


_USUAL = {"h100": "h100-sxm", "a100": "a100-80", "v100": "v100-16"}


def device_named(driver: str) -> Device | None:
    """The entry for exactly the name that a driver gives a device, or None."""
    return next(
        (d for d in devices().values() if driver.strip() in d.drivers), None
    )
