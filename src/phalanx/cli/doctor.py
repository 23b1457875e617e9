"""`phalanx doctor`: shows this machine, measures it with --out, and shows the catalogue of
devices, links and clusters.

  phalanx doctor                      this machine, and its memory bandwidth
  phalanx doctor --out machine.toml   measure everything, for plans
  phalanx doctor topology [FILE]      links between devices, here or in a file
  phalanx doctor devices [NAME]       manufacturers' specifications, with sources
  phalanx doctor links
  phalanx doctor clusters [NAME]      levels and totals, for example of llama3 or h100x64
  phalanx doctor hierarchy NAME       size and speed of memory, from registers to network
  phalanx doctor hang RUNDIR          position of each rank of a running run, and why it hangs

Exit code 0: done; 1: a collective gave wrong numbers, or a rank failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rank_watch import described, snapshot
from rank_watch.watcher import FILE as HANG

from ..drawing import Bars, bars, text_table
from ..layout import Shape
from ..layout.choices import BF16, FP32, LOCAL_RANKS, MATMUL_RATES
from ..layout.numbers import binary_text, flops_text, rate_text, seconds_text
from ..planner import (
    Cluster,
    Device,
    Place,
    cluster,
    clusters,
    device,
    devices,
    hierarchy,
    link,
    links,
    parse_topology,
    read_topology,
)
from .bench import group_text, of_peak
from .parser import Parser, whole
from .usage import UsageError, complain, progress, read, result, save

HEAD = 128  # head dimension of most models

if TYPE_CHECKING:
    from ..bench import LocalDevice
    from ..planner import Machine


def run(argv: list[str]) -> int:
    # A subject is read by its own parser, which knows its arguments.
    if argv and argv[0] in _SUBJECTS:
        show, name = _SUBJECTS[argv[0]]
        parser = Parser(show.__doc__)
        if name:
            parser.add("name", **name)
        if show is _hierarchy:
            parser.add_output("--out", ".svg", help="write a picture")
        args = parser.read(argv[1:])
        return result(args, *show(args))
    parser = Parser(__doc__)
    add = parser.add
    add(
        "subject",
        nargs="?",
        choices=_SUBJECTS,
        metavar="SUBJECT",
        help=", ".join(_SUBJECTS),
    )
    parser.add_output(
        "--out", ".toml", help="measure everything and write it to this file"
    )
    add("--device")
    add(
        "--ranks",
        type=whole(2, LOCAL_RANKS),
        help="ranks of the largest group to measure",
    )
    add("--backend")
    add("--model", default="124m", help="model whose matmuls are measured")
    add(
        "--limit",
        default=60.0,
        help="approximate time for all measurements of --out",
    )
    add(
        "--with-host",
        action="store_true",
        help="include the host's name in the file",
    )
    args = parser.read(argv)
    # An unknown model is reported before anything is measured.
    Shape.load(args.model)
    from ..bench import local_device

    here = local_device(args.device)
    return _measure(args, here) if args.out else _look(args, here)


Shown = tuple[Mapping[str, object], str]  # figures, and their text


def _hang(args: argparse.Namespace) -> Shown:
    """`phalanx doctor hang`: shows the position and stack of each rank of a running run
    on this host, and explains why it hangs if it does."""
    seen = snapshot(Path(args.name))
    for notice in seen.notices:
        complain(f"phalanx doctor hang: {notice}")
    if not seen.ranks:
        raise UsageError(
            f"no rank of {args.name} is running on this host. Name the `out` folder of a running run."
            f" If the run hung and was ended, see {Path(args.name, HANG)}."
        )
    found, lines = described(seen)
    if seen.elsewhere:
        hosts = ", ".join(seen.elsewhere[:8]) + ", ..." * (
            len(seen.elsewhere) > 8
        )
        lines += ["", f"more ranks run on {hosts}: run the command there"]
    figures = {
        "hangs": found.hangs,
        "ranks": [state.to_json() for state in seen.ranks],
    }
    return figures, "\n".join(lines)


# ---- this machine


def _measure(args: argparse.Namespace, here: LocalDevice) -> int:
    from ..bench import Thoroughness, measure_machine

    ranks, host = args.ranks or 0, args.with_host
    options = Thoroughness(
        args.limit, ranks, args.backend, args.model, with_host=host
    )
    machine = measure_machine(
        here, options, lambda line: progress(f"measuring {line}")
    )
    save(args.out, machine.text())
    lines = [*_identity(here), *_machine_lines(machine), f"wrote {args.out}"]
    return result(args, asdict(machine), "\n".join(lines))


def _look(args: argparse.Namespace, here: LocalDevice) -> int:
    from ..bench import measure_stores, topology_of
    from ..layout.device_environment import SETTINGS

    stores, topology = measure_stores(here), topology_of(here)
    kept = ("kind", "count", "cores", "memory", "free")
    figures = {
        "device": here.name,
        **{name: getattr(here, name) for name in kept},
        "catalogue": here.entry.name if here.entry else None,
        "backends": list(here.backends),
        "links": list(topology.kinds),
        "stores": {store.name: store.bandwidth for store in stores},
    }
    lines = _identity(here)
    for store in stores:
        of = ""
        # A link has no peak of its own in the catalogue.
        if here.entry and store.name in ("copy", "read", "write"):
            of = f" ({of_peak(store.bandwidth, here.entry.memory.bandwidth)})"
        lines.append(f"memory, {store.name}: {rate_text(store.bandwidth)}{of}")
    if here.kind == "cuda":
        lines += [*_attention_lines(here), *topology.lines()]
        lines += [
            f"{name}: {os.environ.get(name, 'not set')}" for name in SETTINGS
        ]
    lines.append("For everything else: phalanx doctor --out machine.toml")
    return result(args, figures, "\n".join(lines))


def _attention_lines(here: LocalDevice) -> Iterator[str]:
    """Yield the attention kernels that a GPU uses."""
    import torch

    from ..models.kernels import kernel_names

    for dtype in torch.bfloat16, torch.float32:
        # Both kernels matter: training may use either dtype.
        names = kernel_names(here.device, dtype, HEAD)
        each = ", ".join(f"{name} ({what})" for what, name in names.items())
        yield f"attention in {str(dtype).removeprefix('torch.')} takes {each}"


def _identity(here: LocalDevice) -> list[str]:
    import torch

    many = f"{here.count} x " if here.count > 1 else ""
    return [
        f"{many}{here.name}: {binary_text(here.memory)}, {binary_text(here.free)} free;"
        f" {here.cores} CPU cores",
        here.known(),
        f"torch {torch.__version__} with {', '.join(here.backends) or 'no backends'}",
    ]


def _machine_lines(machine: Machine) -> Iterator[str]:
    for store in machine.stores:
        yield f"memory, {store.name}: {rate_text(store.bandwidth)}"
    yield f"starting an operation takes {seconds_text(machine.launch)}"
    for dtype in dict.fromkeys(rate.dtype for rate in machine.rates):
        if best := machine.best(dtype):
            peak = machine.entry.peak(dtype) if machine.entry else 0.0
            shape = f"{best.m} x {best.n} x {best.k}"
            yield f"{dtype}: {flops_text(best.flops)} at {shape}; {of_peak(best.flops, peak)}"
    for hidden in machine.hidden:
        yield f"{hidden.name}: {hidden.part:.0%} of the shorter hidden"
    for c in machine.curves:
        speed = f"{seconds_text(c.latency)} a step, {rate_text(c.beyond or c.bandwidth)}"
        yield f"{c.op} of {group_text(c)} over {c.backend}: {speed}, error {c.error:.0%}"


def _topology(args: argparse.Namespace) -> Shown:
    """`phalanx doctor topology`: shows which devices are linked to which."""
    topology = (
        parse_topology(read(args.name, "topology"))
        if args.name
        else read_topology()
    )
    figures = {
        "devices": list(topology.devices),
        "names": list(topology.names),
        "links": [list(row) for row in topology.links],
        "groups": {
            kind: [list(g) for g in topology.groups(kind)]
            for kind in topology.kinds
        },
        "nics": {d: list(topology.nearest_nics(d)) for d in topology.devices},
        "cpus": [list(c) for c in topology.cpus],
        "numa": list(topology.numa),
    }
    return figures, "\n".join(topology.lines())


# ---- the catalogue


def _devices(args: argparse.Namespace) -> Shown:
    """`phalanx doctor devices`: shows the specifications of devices, with sources."""
    chosen = [device(args.name)] if args.name else list(devices().values())
    figures = {
        d.name: asdict(d) | {"peaks": {t: d.peak(t) for t in d.dtypes}}
        for d in chosen
    }
    return figures, "\n".join(
        _device_lines(chosen[0])
    ) if args.name else _devices_text(chosen)


def _devices_text(chosen: Sequence[Device]) -> str:
    """Return one line for each device; peaks are dense."""
    head = (
        "device",
        "bf16 TFLOP/s",
        *MATMUL_RATES,
        FP32,
        "memory",
        "bandwidth",
        "FLOP/byte",
    )
    rows = []
    for d in chosen:
        peaks = [
            f"{d.peak(t) / 1e12:.1f}" if d.peak(t) else "-"
            for t in (BF16, *MATMUL_RATES, FP32)
        ]
        memory = binary_text(d.memory.bytes), rate_text(d.memory.bandwidth)
        rows.append((d.name, *peaks, *memory, f"{d.ridge:.0f}"))
    note = "Peaks are dense. FLOP/byte: below this intensity, in bf16, memory bandwidth limits the speed."
    return f"{text_table(head, rows)}\n{note}"


def _device_lines(device: Device) -> Iterator[str]:
    """Yield one device's specifications, derived values and sources."""
    yield f"{device.title}\n"
    peaks = [
        (dtype, flops_text(device.peak(dtype))) for dtype in device.dtypes
    ]
    yield text_table((), peaks, indent=2).rstrip("\n")
    memory = device.memory
    yield f"  {memory.kind}: {binary_text(memory.bytes)} at {rate_text(memory.bandwidth)}"
    for way in map(link, device.links):
        speeds = f"{rate_text(way.bandwidth)} in one direction, {rate_text(way.both)} both"
        yield f"  {way.title}: {speeds}"
    if chip := device.chip:
        made = f" of {chip.units_made} made" if chip.units_made else ""
        yield f"  {chip.units} units{made}, {chip.units * chip.cores:,} cores,"
        matrix = chip.matrix.get(BF16, 0)
        each = (
            f" x {matrix // chip.matrix_cores} FLOP"
            if chip.matrix_cores
            else ""
        )
        yield (
            f"  {chip.matrix_cores} matrix cores a unit{each} a cycle in bf16:"
            f" {chip.units} x {matrix} x {chip.matrix_clock_ghz} GHz = {flops_text(device.peak(BF16))}"
        )
    if device.pod:
        yield f"  pods of {device.pod:,}"
    if device.note:
        yield f"  {device.note}"
    yield "\nStated, with its source:"
    by_source: dict[str, list[str]] = defaultdict(list)
    for key, number in device.stated().items():
        # A no-break space keeps a name and its number on one line.
        by_source[device.source(key)].append(f"{key}\xa0=\xa0{number:g}")
    for source, numbers in by_source.items():
        yield f"  {source}:"
        for line in wrap(", ".join(numbers), 76):
            yield f"    {line}".replace("\xa0", " ")


def _links(args: argparse.Namespace) -> Shown:
    """`phalanx doctor links`: shows the bandwidth of every link, in one direction and
    both."""
    rows = []
    for name, x in links().items():
        factor = x.all_reduce_factor
        halved = (
            f"all-reduce sends {factor:g} of a ring's bytes"
            if factor != 1
            else ""
        )
        rows.append(
            (name, x.title, rate_text(x.bandwidth), rate_text(x.both), halved)
        )
    text = text_table(
        ("link", "", "one direction", "both", ""), rows, left="llrrl"
    )
    four = links()["nvlink4"].bandwidth
    for other in (links()["infiniband-ndr"], links()["infiniband-xdr"]):
        text += f"NVLink 4 is {four / other.bandwidth:.2g} times one port of {other.title}.\n"
    return {
        n: asdict(x) | {"bandwidth": x.bandwidth} for n, x in links().items()
    }, text


def _clusters(args: argparse.Namespace) -> Shown:
    """`phalanx doctor clusters`: shows the levels and totals of clusters."""
    chosen = [cluster(args.name)] if args.name else list(clusters().values())
    figures = {c.name: asdict(c) | {"totals": c.totals()} for c in chosen}
    return figures, "\n\n".join(map(_cluster_text, chosen))


def _cluster_text(c: Cluster) -> str:
    """Return the levels from the inside out, and the totals if the size is known."""
    rows = []
    for level in c.levels:
        share = f", {level.share:.2g} of the link" if level.share != 1 else ""
        speed = (
            f"{rate_text(level.bandwidth)} a device in one direction{share}"
        )
        rows.append(
            (
                level.name,
                level.size or "...",
                f"by {link(level.link).title}: {speed}",
            )
        )
    sizes = " x ".join(str(level.size or "...") for level in c.levels)
    text = f"{c.name}: {c.kind.title}, {sizes}\n{text_table((), rows, left='lrl', indent=2)}"
    if c.size:
        t = c.totals()
        cores = f", {t['cores'] / 1e6:.3g}M cores, {t['matrix_cores'] / 1e6:.3g}M matrix cores"
        more = f"{cores * bool(t['cores'])}, {binary_text(t['memory'])}, {flops_text(t['flops'])}"
        text += f"  together: {t['devices']:,} devices{more} in bf16\n"
    return f"{text}  {c.source}"


def _hierarchy(args: argparse.Namespace) -> Shown:
    """`phalanx doctor hierarchy`: shows size and speed of memory from registers to the
    network."""
    title = device(args.name).title
    levels = hierarchy(device(args.name))
    if args.out:
        save(args.out, _hierarchy_svg(f"{title}, from the inside out", levels))
    rows = []
    for p in levels:
        size, read = (
            (binary_text(p.bytes), seconds_text(p.to_read))
            if p.bytes
            else ("-", "-")
        )
        rows.append((p.name, size, rate_text(p.bandwidth), read, p.how))
    table = text_table(
        ("level", "size", "bandwidth", "to read all", ""), rows, left="lrrrl"
    )
    return {
        "places": [asdict(level) for level in levels]
    }, f"{title}\n\n{table}"


def _hierarchy_svg(title: str, levels: Sequence[Place]) -> str:
    """Draw one bar for each level, innermost on top; its length is the logarithm of the
    bandwidth."""
    # From half a power of ten below the slowest.
    logs = [math.log10(level.bandwidth) for level in levels]
    low = math.floor(min(logs)) - 0.5
    rows = []
    for level, log in zip(levels, logs, strict=True):
        size = f"{binary_text(level.bytes)}, read in {seconds_text(level.to_read)}"
        below = " · ".join(
            words for words in (size * bool(level.bytes), level.how) if words
        )
        speed = rate_text(level.bandwidth)
        rows.append(Bars(level.name, log - low, speed, below, tip=level.how))
    return bars(
        title,
        rows,
        ["The length of a bar is the logarithm of its bytes per second."],
    )


_NAME = {
    "nargs": "?",
    "metavar": "NAME",
    "help": "only this one; default: all",
}
_FILE = {
    "nargs": "?",
    "metavar": "FILE",
    "help": "output of nvidia-smi topo -m; default: this machine",
}
_DEVICE = {"metavar": "NAME", "help": "a device, such as h100"}
_RUN = {"metavar": "RUNDIR", "help": "the `out` folder of a run on this host"}
# The function that shows each subject, and its argument.
_SUBJECTS: dict[
    str, tuple[Callable[[argparse.Namespace], Shown], dict[str, str]]
] = {
    "topology": (_topology, _FILE),
    "devices": (_devices, _NAME),
    "links": (_links, {}),
    "clusters": (_clusters, _NAME),
    "hierarchy": (_hierarchy, _DEVICE),
    "hang": (_hang, _RUN),
}
