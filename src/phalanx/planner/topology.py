"""Links between devices, parsed from `nvidia-smi topo -m`."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

# From near to far, in the words of nvidia-smi.
KINDS: dict[str, str] = {
    "NV": "NVLink, the number of links follows",
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges, without the CPU",
    "PHB": "a PCIe host bridge, that is the CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
_ORDER = list(KINDS)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class TopologyError(ValueError):
    """A text that is not a topology: the line, and what was expected there."""


@dataclass(frozen=True)
class Topology:
    """Devices and NICs, and the kind of link between each pair (`NV18`, `PIX`, ...)."""

    names: tuple[str, ...]  # devices first, then NICs
    # In the order of names; X for the same device.
    links: tuple[tuple[str, ...], ...]
    cpus: tuple[tuple[int, ...], ...] = ()  # by device: the nearest CPUs
    numa: tuple[int | None, ...] = ()  # by device
    nics: tuple[tuple[str, str], ...] = ()  # name of each NIC: NIC0 is mlx5_0

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.startswith("GPU"))

    def between(self, a: str, b: str) -> str:
        return self.links[self.names.index(a)][self.names.index(b)]

    @property
    def kinds(self) -> tuple[str, ...]:
        devices = range(len(self.devices))
        found = {self.links[i][j] for i in devices for j in devices if i != j}
        return tuple(sorted(found, key=lambda kind: (_far(kind), kind)))

    def groups(self, kind: str) -> tuple[tuple[str, ...], ...]:
        """Groups of devices that reach each other over this kind of link or nearer."""
        left, found = list(self.devices), []
        while left:
            group = [left.pop(0)]
            # The group grows while the loop walks it: neighbours of neighbours
            # are members.
            for member in group:
                near = [
                    d
                    for d in left
                    if _far(self.between(member, d)) <= _far(kind)
                ]
                left = [d for d in left if d not in near]
                group += near
            found.append(tuple(sorted(group, key=self.names.index)))
        return tuple(found)

    def nearest_nics(self, device: str) -> tuple[str, ...]:
        """The names of the NICs that a device reaches over its nearest kind of link."""
        nics = [name for name in self.names if name not in self.devices]
        # All NICs over the same nearest kind of link, not only one of them.
        least = min(
            (_far(self.between(device, nic)) for nic in nics), default=0
        )
        called = dict(self.nics)
        return tuple(
            called.get(nic, nic)
            for nic in nics
            if _far(self.between(device, nic)) == least
        )

    def lines(self) -> list[str]:
        """Groups and neighbours as lines of text."""
        if not self.devices:
            return ["no GPUs"]
        lines = []
        for kind in self.kinds:
            groups = [g for g in self.groups(kind) if len(g) > 1]
            what = KINDS[re.sub(r"\d", "", kind)]
            what = what.replace(
                ", the number of links follows", f", {kind[2:]} links"
            )
            lines.append(
                f"{kind} ({what}): " + "; ".join(map(" ".join, groups))
            )
        for i, device in enumerate(self.devices):
            near = self.nearest_nics(device)
            notes = [f"NIC {', '.join(near)}"] if near else []
            notes += (
                [f"CPUs {_ranges(self.cpus[i])}"]
                if self.cpus and self.cpus[i]
                else []
            )
            numa = self.numa[i] if self.numa else None
            notes += [f"NUMA node {numa}"] if numa is not None else []
            if notes:
                lines.append(f"{device}: {', '.join(notes)}")
        return lines


def _far(kind: str) -> int:
    # "NV18" -> "NV": the number of links does not change the order.
    return _ORDER.index(re.sub(r"\d", "", kind))


def read_topology() -> Topology:
    """The topology that this machine's driver reports; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Topology((), ())
    done = subprocess.run(
        [program, "topo", "-m"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr).strip().splitlines() or [
            "nothing"
        ]
        raise TopologyError(
            f"nvidia-smi topo -m failed with code {done.returncode}: {output[0].rstrip('.')}."
        )
    return parse_topology(done.stdout)


def parse_topology(text: str) -> Topology:
    """Parse the output of `nvidia-smi topo -m`."""
    # The output of a terminal contains escape sequences.
    lines = [_ESCAPES.sub("", line).rstrip() for line in text.splitlines()]
    if any(line.startswith("No devices were found") for line in lines):
        return Topology((), ())
    start = next(
        (i for i, line in enumerate(lines) if line.split()[:1] == ["GPU0"]),
        None,
    )
    if start is None:
        first = next((line for line in lines if line.strip()), "")
        raise TopologyError(
            "this is not the output of nvidia-smi topo -m: no row of columns begins with GPU0."
            f" It begins {first[:60]!r}."
        )
    # Up to `CPU Affinity`, whose cells are found by their position. No other cell
    # contains a blank, so tabs and a terminal's blanks both separate cells.
    names = tuple(re.split(r"\bCPU\b", lines[start])[0].split())
    rows: list[tuple[str, ...]] = []
    rest: list[list[str]] = []
    # Rows are numbered as an editor shows them, from 1 after the header.
    for number, line in enumerate(
        lines[start + 1 : start + 1 + len(names)], start + 2
    ):
        cells = line.split()
        rows.append(_row(cells, names, len(rows), number))
        rest.append(cells[1 + len(names) :])
    _check_square(names, rows)
    devices = sum(name.startswith("GPU") for name in names)
    return Topology(
        names,
        tuple(rows),
        tuple(_cpus(cells[0] if cells else "") for cells in rest[:devices]),
        tuple(
            int(c[1]) if len(c) > 1 and c[1].isdigit() else None
            for c in rest[:devices]
        ),
        # The legend under the table: "NIC0: mlx5_0".
        tuple(re.findall(r"^\s*(NIC\d+):\s*(\S+)", "\n".join(lines), re.M)),
    )


def _row(
    cells: list[str], names: tuple[str, ...], place: int, number: int
) -> tuple[str, ...]:
    name = names[place]
    if not cells or cells[0] != name:
        seen = repr(cells[0]) if cells else "nothing"
        raise TopologyError(
            f"line {number}: {seen} instead of the row of {name}."
        )
    links = tuple(cells[1 : 1 + len(names)])
    if len(links) < len(names):
        raise TopologyError(
            f"line {number}: {name} has {len(links)} links instead of {len(names)}."
        )
    for other, kind in zip(names, links, strict=True):
        good = (
            kind == "X"
            if other == name
            else re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", kind)
        )
        if not good:
            raise TopologyError(
                f"line {number}: {kind!r} between {name} and {other} is not a kind of link;"
                f" kinds are NV1, NV2, ..., {', '.join(_ORDER[1:])}, and X for the same device."
            )
    return links


def _check_square(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    if len(rows) < len(names):
        raise TopologyError(
            f"the text ends before the row of {names[len(rows)]}."
        )
    # A link is the same from both ends.
    for i, row in enumerate(rows):
        for j, kind in enumerate(row):
            if rows[j][i] != kind:
                raise TopologyError(
                    f"{names[i]} has {kind} to {names[j]}, but {names[j]} has {rows[j][i]} to {names[i]}."
                )


def _cpus(text: str) -> tuple[int, ...]:
    """`0-2,8` as 0, 1, 2, 8; any other text as no CPU, since drivers also write N/A."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        return ()
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return tuple(found)


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(
        str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts
    )
