"""The catalogue as text: devices, links, clusters, and what lies between registers and network."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ..draw import text_table
from ..layout.numbers import binary_text, flops_text, rate_text, seconds_text
from ..plan import Cluster, Device, hierarchy, link, links

__all__ = ["clusters_text", "device_text", "devices_text", "hierarchy_text", "links_text"]


def devices_text(devices: Sequence[Device]) -> str:
    """A line for each device; peaks are dense."""
    head = ("device", "bf16 TFLOP/s", "fp8", "fp32", "memory", "bandwidth", "FLOP/byte")
    rows = [
        (
            d.name,
            _peak(d, "bf16"),
            _peak(d, "fp8"),
            _peak(d, "fp32"),
            binary_text(d.memory.bytes),
            rate_text(d.memory.bandwidth),
            f"{d.ridge:.0f}",
        )
        for d in devices
    ]
    note = "Peaks count no sparsity. FLOP/byte: below it, in bf16, memory decides the time."
    return f"{text_table(head, rows)}\n{note}"


def _peak(device: Device, dtype: str) -> str:
    peak = device.peak(dtype)
    return f"{peak / 1e12:.1f}" if peak else "-"


def device_text(device: Device) -> str:
    """One device: what follows from its data file, and where every number there is from."""
    lines = [device.title, ""]
    peaks = [(dtype, flops_text(device.peak(dtype))) for dtype in device.dtypes]
    lines += text_table((), peaks, indent=2).splitlines()
    lines.append(
        f"  {device.memory.kind}: {binary_text(device.memory.bytes)} at {rate_text(device.memory.bandwidth)}"
    )
    for name in device.links:
        way = link(name)
        lines.append(
            f"  {way.title}: {rate_text(way.bandwidth)} in one direction, {rate_text(way.both)} both"
        )
    chip = device.chip
    if chip:
        made = f" of {chip.units_made} made" if chip.units_made else ""
        lines.append(f"  {chip.units} units{made}, {chip.units * chip.cores:,} cores,")
        matrix = chip.matrix.get("bf16", 0)
        each = f" x {matrix // chip.matrix_cores} FLOP" if chip.matrix_cores else ""
        lines.append(
            f"  {chip.matrix_cores} matrix cores a unit{each} a cycle in bf16:"
            f" {chip.units} x {matrix} x {chip.matrix_clock_ghz} GHz = {flops_text(device.peak('bf16'))}"
        )
    if device.pod:
        lines.append(f"  pods of {device.pod:,}")
    lines += [f"  {device.note}"] if device.note else []
    lines += ["", "Stated, with its source:"]
    by_source: dict[str, list[str]] = {}
    for place, number in device.stated().items():
        by_source.setdefault(device.source(place), []).append(f"{place}\xa0=\xa0{number:g}")
    for source, numbers in by_source.items():
        filled = wrap(", ".join(numbers), 96, initial_indent="    ", subsequent_indent="    ")
        lines += [f"  {source}:", *(line.replace("\xa0", " ") for line in filled)]
    return "\n".join(lines)


def links_text() -> str:
    """Every link, one direction and both."""
    rows = []
    for name, x in links().items():
        factor = x.all_reduce_factor
        halved = f"all-reduce sends {factor:g} of a ring's bytes" if factor != 1 else ""
        rows.append((name, x.title, rate_text(x.bandwidth), rate_text(x.both), halved))
    head = ("link", "", "one direction", "both", "")
    lines = [text_table(head, rows, left="llrrl").rstrip("\n")]
    four = links()["nvlink4"].bandwidth
    for other in ("infiniband-ndr", "infiniband-xdr"):
        times = four / links()[other].bandwidth
        lines.append(f"NVLink 4 is {times:.2g} times one port of {links()[other].title}.")
    return "\n".join(lines)


def clusters_text(clusters: Sequence[Cluster]) -> str:
    """The levels of each cluster from the inside out, and its totals where its size is known."""
    lines: list[str] = []
    for c in clusters:
        sizes = " x ".join(str(level.size or "...") for level in c.levels)
        lines += [f"{c.name}: {c.kind.title}, {sizes}"]
        rows = []
        for level in c.levels:
            share = f", {level.share:.2g} of the link" if level.share != 1 else ""
            speed = f"{rate_text(level.bandwidth)} a device in one direction{share}"
            rows.append((level.name, level.size or "...", f"by {link(level.link).title}: {speed}"))
        lines += text_table((), rows, left="lrl", indent=2).splitlines()
        lines += _totals(c) if c.size else []
        lines += [f"  {c.source}", ""]
    return "\n".join(lines).rstrip()


def _totals(cluster: Cluster) -> list[str]:
    t = cluster.totals()
    cores = f", {t['cores'] / 1e6:.3g}M cores, {t['matrix_cores'] / 1e6:.3g}M matrix cores"
    return [
        f"  together: {t['devices']:,} devices{cores if t['cores'] else ''},"
        f" {binary_text(t['memory'])}, {flops_text(t['flops'])} in bf16"
    ]


def hierarchy_text(device: Device) -> str:
    """Registers to network: how much is there, how fast it is, how long reading all of it takes."""
    rows = [
        (
            p.name,
            binary_text(p.bytes) if p.bytes else "-",
            rate_text(p.bandwidth),
            seconds_text(p.to_read) if p.bytes else "-",
            p.how,
        )
        for p in hierarchy(device)
    ]
    head = ("level", "size", "bandwidth", "to read all", "")
    return f"{device.title}\n\n{text_table(head, rows, left='lrrrl')}".rstrip("\n")
