"""`phalanx plan calibrate`: refits the planner's profile on runs of your own, and shows
the remaining error.

  phalanx doctor --out machine.toml --backend gloo
  phalanx plan calibrate runs/a runs/b --machine machine.toml --out profile.toml
  phalanx plan calibrate runs/* --cluster h100x8 --profile phalanx --rows 5
  phalanx plan calibrate table.csv --rows 5 --out profile.toml

A run needs at least two step lines in its metrics.jsonl; the first covers the warm-up
and is ignored. Tables are those of `phalanx plan score`; their rows name their devices,
and one framework is fitted. The fit first scales all compute by one factor; fitting
further numbers takes runs that differ in tp, pp and ZeRO stage. The file also contains
the range of a step that the runs show, each predicted without itself. The numbers stay
if a fit would improve these predictions by less than a tenth. Exit code 0: done; 2:
wrong usage, or unsuitable runs.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..api.request import where
from ..cost import cached_costs
from ..drawing import text_table
from ..layout.codec import dump
from ..planner.calibrate import (
    Calibration,
    CostedRun,
    by_model,
    calibration,
    costed,
    read_run,
    spread_over,
)
from ..planner.interval import StepRange, amounts, interval, with_own_range
from ..planner.local import profile_for
from ..planner.profile import FITTED, NUMBERS, SoftwareProfile, profile
from ..planner.published import runs_of, why_not
from ..planner.table import read_table
from .parser import Parser, whole
from .usage import UsageError, result, save


def run(argv: Sequence[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add("runs", nargs="+", metavar="RUNDIR|TABLE.csv")
    add(
        "--machine",
        metavar="FILE",
        help="file that doctor --out wrote (default machine.toml)",
    )
    add(
        "--cluster",
        metavar="NAME",
        help="a cluster of the catalogue instead, such as h100x64",
    )
    curves = "backend whose curves are used: gloo, shm"
    add("--backend", default="", choices=None, metavar="NAME", help=curves)
    add(
        "--profile",
        metavar="NAME|FILE",
        help="starting point of the fit; default: phalanx",
    )
    add(
        "--rows",
        type=whole(),
        help="number of runs to fit; the others are for testing",
    )
    parser.add_output(
        "--out",
        ".toml",
        help="write the profile, for phalanx plan --profile FILE",
    )
    args = parser.read(argv)
    # A table names its own devices, and folders need a machine.
    tables = [name for name in args.runs if name.endswith(".csv")]
    if tables and len(tables) < len(args.runs):
        raise UsageError("name either folders of runs or tables, not both.")
    before, costed_runs = _of_tables(args) if tables else _of_folders(args)
    used = spread_over(costed_runs, args.rows or 0)
    found = calibration(before, used)
    like, ranges = (
        # The range that the runs had before, as one more observation.
        found.like,
        [_range(run, before) for run in used if run.measured > 0],
    )
    after = with_own_range(like(None), found.left_out, ranges)
    if args.out:
        save(args.out, dump(after, short=True))
    rows: list[dict[str, Any]] = [
        {
            "run": run.run.name,
            "layout": str(run.run.case.layout),
            "seconds": run.measured,
            # Relative errors: predicted over measured, minus 1.
            "before": run.step(before) / run.measured - 1,
            "after": run.step(like(run)) / run.measured - 1,
            "used": run in used,
        }
        for run in costed_runs
    ]
    figures = {
        "runs": rows,
        "profile": {name: getattr(after, name) for name in NUMBERS},
        "declined": found.declined,
        "range": [math.exp(-after.own_below), math.exp(after.own_above)]
        if after.own_runs
        else None,
    }
    text = _text(rows, before, after, args.out)
    if found.declined:
        text = f"{_declined(found)}\n{text}"
    return result(args, figures, text)


def _declined(found: Calibration) -> str:
    """Explain why a calibration leaves the numbers as they were."""
    before, tried = (
        f"{fmean(math.expm1(abs(x)) for x in off):.1%}"
        for off in (found.before, found.tried)
    )
    return (
        f"The numbers stay: of {len(found.before)} runs, each predicted after a fit to the others,"
        f" the mean error is {tried}, and {before} without a fit. A fit would gain too little on other runs."
    )


def _range(
    run: CostedRun, before: SoftwareProfile
) -> tuple[StepRange, Mapping[str, float]]:
    """Return the range of a run's step before calibration, and the amounts of its
    causes."""
    choice = run.choice(before)
    profile, case = run.priced(before).profile, run.run.case
    return (
        interval(case, run.hardware, profile, choice.parts),
        amounts(case, run.hardware, profile, choice.parts),
    )


def _of_folders(
    args: Namespace,
) -> tuple[SoftwareProfile, Sequence[CostedRun]]:
    """Return the profile from which the fit starts, and the runs."""
    runs = [read_run(Path(folder)) for folder in args.runs]
    groups = by_model(runs)
    # Runs with other numbers of ranks have other hardware.
    places = [
        where(
            args.cluster,
            args.machine,
            group[0].case.layout.ranks,
            args.backend,
        ).hardware
        for group in groups
    ]
    before = profile_for(
        places[0], args.profile, runs[0].case.layout.precision
    )
    return before, [
        run
        for group, hardware in zip(groups, places, strict=True)
        for run in costed(
            group,
            hardware,
            partial(cached_costs, target=hardware.target),
            before,
        )
    ]


def _of_tables(args: Namespace) -> tuple[SoftwareProfile, Sequence[CostedRun]]:
    """Return the starting profile and the runs of tables.

    The rows are those of `--profile`'s software, or of the first row's.
    """
    chosen = profile(args.profile) if args.profile else None
    rows = [row for path in args.runs for row in read_table(path, chosen)]
    # One fit moves one profile.
    rows = [row for row in rows if row.profile.name == rows[0].profile.name]
    runs, refused = runs_of(rows, cached_costs)
    # Representative rows with a plausible prediction.
    timed = [
        (run, why_not(run, rows[0].profile)) for run in runs if run.counts
    ]
    known = [run for run, why in timed if not why]
    if not known:
        reasons = [
            *refused.values(),
            *(why for _, why in timed),
            "none has a step time",
        ]
        why = reasons[0]
        raise UsageError(
            f"no row of {', '.join(args.runs)} can be fitted: {why}"
        )
    return rows[0].profile, known


def _text(
    rows: Sequence[dict[str, Any]],
    before: SoftwareProfile,
    after: SoftwareProfile,
    out: str | None,
) -> str:
    runs = []
    for r in rows:
        errors = (
            f"{r['seconds']:.4g}s",
            f"{r['before']:+.0%}",
            f"{r['after']:+.0%}",
        )
        runs.append(
            (r["run"], *errors, "fit" if r["used"] else "test", r["layout"])
        )
    fitted = [
        (n, f"{getattr(before, n):.3g}", "->", f"{getattr(after, n):.3g}")
        for n in NUMBERS
    ]
    lines = [
        text_table(
            ("run", "step", "before", "after", "for", "layout"),
            runs,
            left="lrrrll",
        ),
        text_table((), fitted, left="lrll").rstrip("\n"),
    ]
    unseen = [r for r in rows if not r["used"]]
    if unseen:
        # Runs that the fit has not seen show what it is worth.
        off = [
            f"{median(abs(r[when]) for r in unseen):.0%} {when}"
            for when in ("before", "after")
        ]
        what = f"Median error of the {len(unseen)} runs that were not used"
        lines.append(f"{what}: {', '.join(off)}.")
    if after.own_runs:
        low, high = math.exp(-after.own_below), math.exp(after.own_above)
        text = f"Four of five steps of such runs take {low:.2f} to {high:.2f} times what is predicted"
        lines.append(
            f"{text}: {after.own_runs} runs, each predicted without it, are off by as much."
        )
    # Fewer runs than numbers fit any noise.
    if (used := len(rows) - len(unseen)) < len(FITTED):
        lines.append(
            f"{used} runs for {len(FITTED)} numbers: use them near these runs only."
        )
    return "\n".join([*lines, *([f"written: {out}"] if out else [])])
