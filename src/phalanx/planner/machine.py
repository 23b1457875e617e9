"""A measured machine: benchmark results as one value, and one TOML file for plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ..layout.codec import dump, key, load, parse
from .curve import Curve
from .device import Device, MachineError, MachineFileError, device


@dataclass(frozen=True)
class Rate:
    """The measured rate of one matmul shape, (m, k) @ (k, n)."""

    dtype: str
    m: int = key(minimum=1)
    n: int = key(minimum=1)
    k: int = key(minimum=1)
    flops: float = key(
        description="floating-point operations a second", above=0
    )

    @property
    def seconds(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.flops


@dataclass(frozen=True)
class Store:
    """A way of moving bytes that is no link: the device's memory, or host to device."""

    name: str
    bandwidth: float = key(
        description="bytes read and written a second", minimum=0
    )


@dataclass(frozen=True)
class Hidden:
    """The share of the shorter of two activities that the longer one hides."""

    name: str
    # 1: all; 0: none; below 0: together they take longer than one after the other.
    part: float = key(
        description="how much of the shorter is hidden",
        minimum=None,
        maximum=1,
    )


@dataclass(frozen=True)
class Machine:
    """One machine on one day. Every number was measured there, by `method`."""

    name: str
    date: str = key(description="as 2026-01-31")
    method: str = key()
    device: str = key(
        description="its name, as the driver or the system gives it"
    )
    kind: str = key(description="cpu or cuda", choices=("cpu", "cuda"))
    count: int = key(description="devices; a CPU is one", minimum=1)
    cores: int = key(minimum=1)
    memory: float = key(description="bytes of one device", above=0)
    host: str = key(
        "", "the host's name, only if its user wants it in the file"
    )
    catalogue: str = key(
        "", "the device's name in the catalogue; empty: unknown there"
    )
    threads: int = key(
        1, "of the process that measured matrix products", minimum=1
    )
    torch: str = ""
    launch: float = key(
        0.0,
        "seconds to start an operation that does next to nothing",
        minimum=0,
    )
    stores: tuple[Store, ...] = ()
    rates: tuple[Rate, ...] = ()
    hidden: tuple[Hidden, ...] = ()
    curves: tuple[Curve, ...] = ()
    links: tuple[str, ...] = key(
        (), "kinds of links between devices, as the driver names them"
    )

    @classmethod
    def parse(cls, text: str, name: str = "the machine") -> Machine:
        """Parse a machine from TOML. Unknown keys and wrong types are refused together."""
        return parse(cls, text, name, MachineFileError)

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        return load(cls, path, "machine file", MachineFileError)

    def text(self) -> str:
        return dump(self, short=True)

    @property
    def entry(self) -> Device | None:
        """The catalogue's entry for the device, or None."""
        return device(self.catalogue) if self.catalogue else None

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second, read and written, of the device's memory; 0: unknown."""
        return self.store("copy")

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between a device and its host; 0 if not measured."""
        copy = self.memory_bandwidth / 2  # a copy on a CPU reads and writes
        return (
            copy
            if self.kind == "cpu"
            else self.store("host to device, pinned")
        )

    def store(self, name: str) -> float:
        """The bandwidth of one way of moving bytes; 0 if not measured."""
        return next((s.bandwidth for s in self.stores if s.name == name), 0.0)

    def best(self, dtype: str) -> Rate | None:
        """The fastest matmul measured in a dtype: the peak of an unknown device."""
        rates = [rate for rate in self.rates if rate.dtype == dtype]
        return max(rates, key=lambda rate: rate.flops, default=None)

    def curve(
        self, op: str, ranks: int, *, backend: str = "", apart: int = 1
    ) -> Curve:
        """The curve of an operation for a group size.

        If it was not measured, the nearest size's curve with the steps and bytes of
        this size.
        """
        known = [
            c
            for c in self.curves
            if c.op == op and (not backend or c.backend == backend)
        ]
        if not known:
            backends = sorted({c.backend for c in self.curves})
            raise MachineError(
                f"{self.name} has no measured {op}{f' over {backend}' if backend else ''};"
                f" it has {', '.join(backends) or 'no collectives'}."
                " Measure it: phalanx doctor --out FILE."
            )
        # A group as far apart first, then the nearest size, and of two equally
        # near the larger.
        near = min(
            known,
            key=lambda c: (c.apart != apart, abs(c.ranks - ranks), -c.ranks),
        )
        return replace(near, ranks=ranks, apart=apart)
