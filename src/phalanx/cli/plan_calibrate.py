"""`phalanx plan calibrate`: the six numbers of a profile refitted on runs of one's own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..cost import cached_costs, cut_of
from ..draw import text_table
from ..layout.codec import dump
from ..plan import Machine, cluster
from ..plan.calibrate import Timed, Trial, by_model, calibrated, read_run
from ..plan.hardware import Hardware, hardware_of
from ..plan.local import hardware_of_machine, local_profile
from ..plan.profile import FITTED, Profile, profile
from .usage import Parser, UsageError, print_json, say, try_file, write

__all__ = ["run"]

_EXAMPLES = """\
  phalanx doctor --out machine.toml --backend gloo
  phalanx plan calibrate runs/a runs/b --machine machine.toml --out profile.toml
  phalanx plan calibrate runs/* --cluster h100x8 --profile phalanx

A run needs two lines of steps in its metrics.jsonl or more; the first one warms up and is left out.
Six numbers want runs that differ: in tp, in pp, in ZeRO. What the runs do not tell stays as it was.
Exit code 0: done; 2: wrong usage."""


def run(argv: Sequence[str]) -> int:
    """Read the runs, refit, print each run's error before and after, write the profile."""
    parser = Parser(
        "phalanx plan calibrate",
        "Refits the planner's profile on runs of your own, and says how far off it was and is.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUNDIR")
    add("--machine", metavar="FILE", help="what doctor --out measured (default machine.toml)")
    add("--cluster", metavar="NAME", help="a catalogued cluster instead, as h100x64")
    add("--backend", default="", metavar="NAME", help="whose curves of the machine file: gloo, shm")
    add("--profile", metavar="NAME|FILE", help="where the fit begins; default ours")
    add("--out", metavar="FILE", help="profile.toml, for phalanx plan --profile FILE")
    add("--json", action="store_true")
    args = parser.read(list(argv))
    if args.cluster and args.machine:
        raise UsageError("--cluster and --machine both say where the runs ran; name one.")
    try_file(args.out, formats=(".toml",))
    trials = [read_run(Path(folder)) for folder in args.runs]
    groups = [_timed(those, args) for those in by_model(trials)]
    before = _begin(args, groups[0].hardware, trials)
    after = calibrated(before, groups)
    if args.out:
        write(args.out, {".toml": partial(dump, short=True)}, after)
    rows = _rows(groups, before, after)
    if args.json:
        print_json({"runs": rows, "profile": {name: getattr(after, name) for name in FITTED}})
    else:
        say(_told(rows, before, after, args.out))
    return 0


def _timed(trials: Sequence[Trial], args: Namespace) -> Timed:
    ranks = trials[0].case.layout.ranks
    if args.cluster:
        hardware = hardware_of(cluster(args.cluster), ranks)
    else:
        file = args.machine or "machine.toml"
        if not Path(file).is_file():
            raise UsageError(
                f"there is no machine file {file}. Measure one: phalanx doctor --out {file};"
                " or name a cluster: --cluster h100x64."
            )
        hardware = hardware_of_machine(Machine.load(file), ranks, args.backend)
    return Timed(
        trials, hardware, partial(cached_costs, target="cpu" if hardware.cores else "cuda"), cut_of
    )


def _begin(args: Namespace, hardware: Hardware, trials: Sequence[Trial]) -> Profile:
    """Where the fit begins: what was named, else ours, as it is on such a device."""
    if args.profile or not hardware.cores:
        named = profile(args.profile or "phalanx")
        device = cluster(args.cluster).device if args.cluster else ""
        return replace(named.on(device), by_device={})
    return local_profile(trials[0].case.layout.precision)


def _rows(groups: Sequence[Timed], before: Profile, after: Profile) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for group in groups:
        old, new = group.under(before).step, group.under(after).step
        for i, trial in enumerate(group.trials):
            found.append(
                {
                    "run": trial.name,
                    "layout": str(trial.case.layout),
                    "seconds": trial.seconds,
                    "before": float(old[i] / trial.seconds - 1),
                    "after": float(new[i] / trial.seconds - 1),
                }
            )
    return found


def _told(
    rows: Sequence[dict[str, object]], before: Profile, after: Profile, out: str | None
) -> str:
    runs = [
        (r["run"], f"{r['seconds']:.4g}s", f"{r['before']:+.0%}", f"{r['after']:+.0%}", r["layout"])
        for r in rows
    ]
    fitted = [(n, f"{getattr(before, n):.3g}", "->", f"{getattr(after, n):.3g}") for n in FITTED]
    lines = [
        text_table(("run", "step", "before", "after", "layout"), runs, left="lrrrl"),
        text_table((), fitted, left="lrll").rstrip("\n"),
    ]
    if len(rows) < len(FITTED):
        lines.append(f"{len(rows)} runs for {len(FITTED)} numbers: use them near these runs only.")
    return "\n".join([*lines, *([f"written: {out}"] if out else [])])
