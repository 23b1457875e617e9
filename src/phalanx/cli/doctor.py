"""`phalanx doctor`: what this machine is, measured on request; and the catalogue of others."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..draw import Bars, Part, bars
from ..layout import Shape
from ..layout.choices import BACKENDS, DEVICES
from ..layout.numbers import binary_text, flops_text, rate_text, seconds_text
from .before import refuse_ranks
from .doctor_catalogue import clusters_text, device_text, devices_text, hierarchy_text, links_text
from .outputs import try_file
from .usage import Parser, UsageError, complain, print_json, read, say, write

if TYPE_CHECKING:
    from ..bench import Found
    from ..plan import Machine, Place, Store, Topology

__all__ = ["run"]

_EPILOG = """\
  phalanx doctor                            what this machine is; measures its memory bandwidth
  phalanx doctor --out machine.toml         measures all of it; the file is what plans read
  phalanx doctor topology [FILE]            who is linked to whom, here or as nvidia-smi topo -m told
  phalanx doctor devices [NAME]             the catalogue: what makers state, with sources
  phalanx doctor links
  phalanx doctor clusters [NAME]            levels and totals, as of llama3 or h100x64
  phalanx doctor hierarchy NAME [--out F.svg]   registers to network: size and speed of each

Exit code 0: done; 1: a collective gave wrong numbers, or a rank failed; 2: wrong usage."""

_SUBJECTS = ("topology", "devices", "links", "clusters", "hierarchy")


def run(argv: list[str]) -> int:
    """Tell of this machine, or of one of the catalogue."""
    parser = Parser(
        "phalanx doctor", "What this machine is and how fast; what others are.", _EPILOG
    )
    add = parser.add_argument
    add("subject", nargs="?", choices=_SUBJECTS, metavar="SUBJECT", help=", ".join(_SUBJECTS))
    add(
        "name", nargs="?", metavar="NAME", help="a device, a cluster, or a recorded topology's file"
    )
    add("--out", metavar="FILE", help="machine.toml, or .svg with hierarchy")
    add("--device", default="auto", choices=DEVICES, help="default auto")
    add("--ranks", type=int, default=0, metavar="N", help="of the largest group measured")
    add("--backend", default="auto", choices=BACKENDS, help="what carries messages; default auto")
    add("--model", default="124m", metavar="SHAPE", help="whose products are measured")
    add("--limit", type=float, default=60.0, help="seconds for all measurements of --out, about")
    add("--with-host", action="store_true", help="write the host's name into the file")
    add("--json", action="store_true")
    args = parser.read(argv)
    if args.subject is None:
        return _here(args)
    if args.out and args.subject != "hierarchy":
        raise UsageError(f"--out does not go with {args.subject}.")
    if args.subject == "topology":
        return _topology(args)
    return _catalogue(args)


# ---- this machine


def _here(args: argparse.Namespace) -> int:
    if not args.limit > 0:
        raise UsageError("--limit is more than 0.")
    refuse_ranks(args.ranks or None, 2)
    Shape.load(args.model)
    if args.out and not args.out.endswith(".toml"):
        raise UsageError(f"--out {args.out}: a machine file is .toml.")
    try_file(args.out)
    from ..bench import WrongResult, examine, find
    from ..bench.doctor import Examination, topology_of
    from ..comm import RankFailed

    found = find(args.device)
    if not args.out:
        return _look(args, found, topology_of(found))
    asked = Examination(args.limit, args.ranks, args.backend, args.model, with_host=args.with_host)

    def measuring(line: str) -> None:
        if not args.json:
            say(f"measuring {line}", flush=True)

    try:
        machine = examine(found, asked, measuring)
    except (WrongResult, RankFailed) as failed:
        complain(str(failed))
        return 1
    write(args.out, {".toml": lambda m: m.text()}, machine)
    if args.json:
        print_json(asdict(machine))
    else:
        say("\n".join([*_identity(found), *_measured(machine), f"written: {args.out}"]))
    return 0


def _look(args: argparse.Namespace, found: Found, topology: Topology) -> int:
    from ..bench import measure_stores

    stores = measure_stores(found)
    if args.json:
        entry = found.entry
        print_json(
            {
                "device": found.name,
                "kind": found.kind,
                "count": found.count,
                "cores": found.cores,
                "memory": found.memory,
                "free": found.free,
                "catalogue": entry.name if entry else None,
                "backends": list(found.backends),
                "links": list(topology.kinds),
                "stores": {store.name: store.bandwidth for store in stores},
            }
        )
        return 0
    lines = [*_identity(found), *_stores(stores, found)]
    lines += topology.told() if found.kind == "cuda" else []
    say("\n".join([*lines, "For everything else: phalanx doctor --out machine.toml"]))
    return 0


def _identity(found: Found) -> list[str]:
    import torch

    many = f"{found.count} x " if found.count > 1 else ""
    return [
        f"{many}{found.name}: {binary_text(found.memory)}, {binary_text(found.free)} free;"
        f" {found.cores} CPU cores",
        found.known(),
        f"torch {torch.__version__} with {', '.join(found.backends) or 'no backends'}",
    ]


def _stores(stores: tuple[Store, ...], found: Found) -> list[str]:
    from ..bench import judged

    lines = []
    for store in stores:
        of = ""
        if found.entry and store.name in ("copy", "read", "write"):
            of = f" ({judged(store.bandwidth, found.entry.memory.bandwidth)})"
        lines.append(f"memory, {store.name}: {rate_text(store.bandwidth)}{of}")
    return lines


def _measured(machine: Machine) -> list[str]:
    lines = [f"memory, {s.name}: {rate_text(s.bandwidth)}" for s in machine.stores]
    lines.append(f"starting an operation takes {seconds_text(machine.launch)}")
    for dtype in dict.fromkeys(r.dtype for r in machine.rates):
        best = machine.best(dtype)
        if best:
            from ..bench import judged

            peak = machine.entry.peak(dtype) if machine.entry else 0.0
            shape = f"{best.m} x {best.n} x {best.k}"
            lines.append(
                f"{dtype}: {flops_text(best.flops)} at {shape}; {judged(best.flops, peak)}"
            )
    lines += [f"{h.name}: {h.part:.0%} of the shorter hidden" for h in machine.hidden]
    lines += [
        f"{c.op} of {c.ranks}{f'x{c.apart}' if c.apart > 1 else ''} over {c.backend}:"
        f" {seconds_text(c.latency)} a step, {rate_text(c.beyond or c.bandwidth)}, error {c.error:.0%}"
        for c in machine.curves
    ]
    return lines


def _topology(args: argparse.Namespace) -> int:
    from ..plan import parse_topology, read_topology

    found = parse_topology(read(args.name, "topology")) if args.name else read_topology()
    if args.json:
        print_json(
            {
                "devices": list(found.devices),
                "names": list(found.names),
                "links": [list(row) for row in found.links],
                "groups": {kind: [list(g) for g in found.groups(kind)] for kind in found.kinds},
                "nics": {d: list(found.nearest_nics(d)) for d in found.devices},
                "cpus": [list(c) for c in found.cpus],
                "numa": list(found.numa),
            }
        )
    else:
        say("\n".join(found.told()))
    return 0


# ---- the catalogue


def _catalogue(args: argparse.Namespace) -> int:
    from ..plan import cluster, clusters, device, devices, hierarchy, links

    if args.subject == "hierarchy":
        if not args.name:
            raise UsageError("hierarchy of which device? As in `phalanx doctor hierarchy h100`.")
        places = hierarchy(device(args.name))
        if args.out:
            title = f"{device(args.name).title}, from the inside out"
            write(args.out, {".svg": lambda p: _hierarchy_svg(title, p)}, places)
        if args.json:
            print_json({"places": [asdict(place) for place in places]})
        else:
            say(hierarchy_text(device(args.name)))
        return 0
    if args.subject == "links":
        if args.json:
            print_json({n: asdict(x) | {"bandwidth": x.bandwidth} for n, x in links().items()})
        else:
            say(links_text())
        return 0
    if args.subject == "clusters":
        chosen = [cluster(args.name)] if args.name else list(clusters().values())
        if args.json:
            print_json({c.name: asdict(c) | {"totals": c.totals()} for c in chosen})
        else:
            say(clusters_text(chosen))
        return 0
    named = [device(args.name)] if args.name else list(devices().values())
    if args.json:
        print_json({d.name: asdict(d) | {"peaks": {t: d.peak(t) for t in d.dtypes}} for d in named})
    else:
        say(device_text(named[0]) if args.name else devices_text(named))
    return 0


def _hierarchy_svg(title: str, places: Sequence[Place]) -> str:
    """One bar a level, as long as the logarithm of its bandwidth, from the inside at the top."""
    logs = [math.log10(place.bandwidth) for place in places]
    low = math.floor(min(logs)) - 0.5
    rows = []
    for place, log in zip(places, logs, strict=True):
        held = (
            f"{binary_text(place.bytes)}, read in {seconds_text(place.to_read)}"
            if place.bytes
            else ""
        )
        below = " · ".join(words for words in (held, place.how) if words)
        part = Part(place.name, log - low, tip=place.how)
        rows.append(Bars(place.name, [part], rate_text(place.bandwidth), below))
    return bars(title, rows, ["Each bar is as long as the logarithm of the bytes a second."])
