"""Widths of the planner's ranges, fitted on published runs, and their coverage of
held-out runs.

    python benchmarks/planner_intervals.py               # fits, leaves each family out, prints
    python benchmarks/planner_intervals.py --write       # and writes src/phalanx/planner/intervals.toml
    python benchmarks/planner_intervals.py TABLE.csv...  # predicts families anew: published/intervals.csv

A row of `intervals.csv` has the measured and predicted time of a run, and how strongly
each cause of uncertainty applies to it. Families used in the fit of the planner's
numbers are predicted with the family held out (`scored.csv`). Each family's runs are
also predicted as if their software were unknown.
"""

from __future__ import annotations

import csv
import math
import sys
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from phalanx.cost import cached_costs
from phalanx.drawing import text_table
from phalanx.planner.calibrate import spread_over
from phalanx.planner.hardware import PredictionError
from phalanx.planner.interval import CAUSES, amounts, widths
from phalanx.planner.profile import SoftwareProfile, profile
from phalanx.planner.published import MOST, PublishedRun, predict, runs_of
from phalanx.planner.table import read_table

RUNS = Path(__file__).parent / "published" / "intervals.csv"
SCORED = Path(__file__).parent / "published" / "scored.csv"
WIDTHS = (
    Path(__file__).parents[1]
    / "src"
    / "phalanx"
    / "planner"
    / "intervals.toml"
)
UNKNOWN = "unknown"  # stands for the software in a group's name
_ROWS = 40  # per group
OLD = (0.86, 1.14)  # the fixed range of earlier versions

# Prior width below and above the prediction, held the more strongly the fewer families
# inform it. Chosen after looking at the tables. Software whose norms or attention are
# kernels is faster by 10 to 15 % each than such software is assumed to be if unknown.
_USUAL: Mapping[str, tuple[float, float]] = {
    "base": (0.11, 0.13), "software": (0.25, 0.18), "device": (0.25, 0.15), "attention": (0.3, 0.3),
    "matmul": (0.15, 0.15), "narrow": (0.08, 0.08), "experts": (0.15, 0.3), "scale": (0.008, 0.012),
    "tensor": (0.1, 0.25), "messages": (0.3, 0.4), "offload": (0.3, 0.3), "machine": (0.12, 0.12),
}  # fmt: skip
_HELD = 0.02  # strength of the prior
# Widths that cover 80 % of the runs they were fitted on cover fewer of a held-out
# family. The fit therefore aims at 88 %, chosen by the coverage of held-out families.
_MISSED = 0.12
_UNKNOWN_WEIGHT = (
    0.3  # of a group whose software is known but treated as unknown
)
_FAR = 0.3  # a run further outside, as a logarithm, pulls no harder
_SMOOTH = 0.01
_MOVES, _STEP = 900, 0.02

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """Published run with its prediction."""

    family: str
    group: str
    name: str
    measured: float
    predicted: float
    amounts: tuple[float, ...]  # in the order of CAUSES

    @property
    def unknown(self) -> bool:
        return self.group.endswith(UNKNOWN)

    @property
    def off(self) -> float:
        return math.log(self.measured / self.predicted)


# ---- predictions


def collected(tables: Sequence[str]) -> Iterator[Run]:
    """Yield the runs of tables, with their software as named and with it unknown."""
    with open(SCORED, newline="", encoding="utf-8") as file:
        held = {
            (x["family"], x["run"]): float(x["held"])
            for x in csv.DictReader(file)
        }
    for path in tables:
        for chosen in (None, profile("default")):
            groups: dict[str, list[PublishedRun]] = defaultdict(list)
            rows = read_table(path, chosen)
            named = (
                {row.line: row.profile for row in read_table(path)}
                if chosen
                else {}
            )
            wanted = [
                row
                for row in rows
                if row.step
                and row.ranks <= MOST.get(row.family, row.ranks)
                and (chosen is None or named[row.line].known)
            ]
            for run in runs_of(wanted, cached_costs)[0]:
                groups[_group(run, chosen)].append(run)
            for group, runs in groups.items():
                for run in spread_over(runs, _ROWS):
                    if (
                        one := _run(run, group, held if chosen is None else {})
                    ) is not None:
                        yield one


def _group(run: PublishedRun, chosen: SoftwareProfile | None) -> str:
    """Return the group of a run: its source, device, software, and whether it has
    experts."""
    row, experts = run.row, run.run.case.shape.experts > 0
    software = UNKNOWN if chosen else row.software or "not named"
    kind = f"{row.device}{', experts' * experts}"
    return f"{row.family}, {kind}: {software}"


def _run(
    run: PublishedRun, group: str, held: Mapping[tuple[str, str], float]
) -> Run | None:
    row, known = run.row, widths().devices
    try:
        choice = predict(run, row.profile)
    except (ValueError, PredictionError):
        return None
    step = (
        held.get((row.family, row.name), 0.0) if row.device in known else 0.0
    )
    found = amounts(run.run.case, run.hardware, row.profile, choice.parts)
    strengths = tuple(found.get(cause, 0.0) for cause in CAUSES)
    return Run(
        row.family, group, row.name, row.step, step or choice.step, strengths
    )


def write_runs(runs: Sequence[Run]) -> None:
    with open(RUNS, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(
            ("family", "group", "run", "measured", "predicted", *CAUSES)
        )
        for run in runs:
            numbers = (run.measured, run.predicted, *run.amounts)
            lines.writerow(
                (
                    run.family,
                    run.group,
                    run.name,
                    *(f"{x:.4g}" for x in numbers),
                )
            )


def read_runs() -> list[Run]:
    with open(RUNS, newline="", encoding="utf-8") as file:
        return [
            Run(
                row["family"], row["group"], row["run"], float(row["measured"]),
                float(row["predicted"]), tuple(float(row.get(cause) or 0) for cause in CAUSES),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


# ---- the fit


def fitted(runs: Sequence[Run]) -> Floats:
    """Fit the widths of every cause, (below and above, causes).

    They minimize Winkler's interval score, in which a run outside costs 2 / 0.12 times
    its distance; a prior holds every width near its usual value.
    """
    squares = np.array([run.amounts for run in runs]) ** 2  # (runs, causes)
    off, weight = np.array([run.off for run in runs]), _weights(runs)
    # (2, causes)
    start = np.log(np.array([_USUAL[cause] for cause in CAUSES]).T)
    at, mean, spread = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for move in range(1, _MOVES + 1):
        width = np.exp(at)
        slope = 2 * _HELD * (at - start)
        for side, outside in enumerate((-off, off)):
            reach = np.sqrt(squares @ width[side] ** 2)
            far = outside - reach
            misses = np.where(far < _FAR, _sigmoid(far / _SMOOTH), 0.0)
            pull = weight * (1 - 2 / _MISSED * misses) / reach
            slope[side] += (pull @ squares) * width[side] ** 2
        # Adam (Kingma and Ba 2014), because the score is not smooth.
        mean = 0.9 * mean + 0.1 * slope
        spread = 0.999 * spread + 0.001 * slope**2
        step = _STEP * (1.0 if move < 0.7 * _MOVES else 0.2)
        at -= (
            step
            * (mean / (1 - 0.9**move))
            / (np.sqrt(spread / (1 - 0.999**move)) + 1e-8)
        )
    return np.exp(at)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -40, 40))))


def _weights(runs: Sequence[Run]) -> Floats:
    """Return the weights of runs: groups count equally, but small groups and groups of
    a large family count less."""
    sizes = Counter(run.group for run in runs)
    family = {run.group: (run.family, run.unknown) for run in runs}
    groups = Counter(family.values())
    weights = np.array(
        [
            min(1.0, math.sqrt(sizes[run.group] / 4))
            * (_UNKNOWN_WEIGHT if run.unknown else 1.0)
            / (sizes[run.group] * math.sqrt(groups[family[run.group]]))
            for run in runs
        ]
    )
    return np.asarray(weights / weights.sum())


def reaches(runs: Sequence[Run], width: Floats) -> tuple[Floats, Floats]:
    """Return the extent of each run's range below and above its prediction, as
    logarithms."""
    squares = np.array([run.amounts for run in runs]) ** 2
    return np.sqrt(squares @ width[0] ** 2), np.sqrt(squares @ width[1] ** 2)


def covered(runs: Sequence[Run], width: Floats) -> tuple[float, float, float]:
    """Return the share of runs inside their range, and the mean ends of the ranges as
    factors."""
    off = np.array([run.off for run in runs])
    below, above = reaches(runs, width)
    inside = np.mean((off >= -below) & (off <= above))
    return (
        float(inside),
        float(np.mean(np.exp(-below))),
        float(np.mean(np.exp(above))),
    )


def old_covered(runs: Sequence[Run]) -> float:
    """Return the share of runs inside the fixed range of earlier versions."""
    return fmean(
        OLD[0] <= run.measured / run.predicted <= OLD[1] for run in runs
    )


@dataclass(frozen=True)
class Coverage:
    """Share of a group's runs inside their range: the former fixed range, widths fitted
    on all families, and on all but its own."""

    group: str
    runs: int
    old: float
    fitted: float
    held: float
    low: float
    high: float


def coverage(runs: Sequence[Run]) -> list[Coverage]:
    """Return the coverage of every group, with its family held out of the fit."""
    everything, found = fitted(runs), list[Coverage]()
    for family in dict.fromkeys(run.family for run in runs):
        without = fitted([run for run in runs if run.family != family])
        groups = dict.fromkeys(
            run.group for run in runs if run.family == family
        )
        for group in groups:
            own = [run for run in runs if run.group == group]
            held, low, high = covered(own, without)
            inside, *_ = covered(own, everything)
            found.append(
                Coverage(
                    group, len(own), old_covered(own), inside, held, low, high
                )
            )
    return found


# ---- text


def toml_text(width: Floats, found: Sequence[Coverage]) -> str:
    """Return the text of `intervals.toml`."""
    named, unknown = (
        [x.held for x in found if x.group.endswith(UNKNOWN) == u]
        for u in (False, True)
    )
    lines = [
        "# Widths of the range of a step, as logarithms, by cause: benchmarks/planner_intervals.py --write.",
        "# The devices whose runs, or whose siblings' runs, the planner's numbers were fitted on:",
        f"devices = {list(widths().devices)}".replace("'", '"'),
        "",
        "# Share of published runs in such a range, with their whole family left out of the fit: means of",
        "# groups whose software was named, and of the same runs with their software taken as unknown.",
        "[covered]",
        f"base = {fmean(named):.2f}",
        f"software = {fmean(unknown):.2f}",
    ]
    for name, values in zip(("below", "above"), width, strict=True):
        lines += ["", f"[{name}]"]
        lines += [
            f"{cause} = {value:.3f}"
            for cause, value in zip(CAUSES, values, strict=True)
        ]
    return "\n".join(lines) + "\n"


def coverage_text(found: Sequence[Coverage]) -> str:
    """Return a table of groups with means, first those whose software is named."""
    parts = []
    for unknown, title in (
        (False, "Software as named"),
        (True, "The same runs, software unknown"),
    ):
        own = [x for x in found if x.group.endswith(UNKNOWN) == unknown]
        rows = [
            (
                x.group, x.runs, *(f"{100 * part:.0f}" for part in (x.old, x.fitted, x.held)),
                f"{x.low:.2f} to {x.high:.2f}",
            )
            for x in sorted(own, key=lambda x: x.group)
        ]  # fmt: skip
        mean = [
            f"{100 * fmean(getattr(x, name) for x in own):.0f}"
            for name in _SHARES
        ]
        ends = f"{fmean(x.low for x in own):.2f} to {fmean(x.high for x in own):.2f}"
        rows.append(("mean of groups", sum(x.runs for x in own), *mean, ends))
        enough = [
            f"{sum(getattr(x, name) >= 0.6 for x in own)}" for name in _SHARES
        ]
        rows.append((f"of {len(own)} groups 60 or more", "", *enough, ""))
        head = (
            "group",
            "runs",
            "+-14 %",
            "fitted",
            "left out",
            "range, left out",
        )
        parts.append(f"{title}\n\n{text_table(head, rows, left='lrrrrr')}")
    return "\n".join(parts)


_SHARES = ("old", "fitted", "held")


def family_text(runs: Sequence[Run]) -> str:
    """Return a table of families with named software, each left out of the fit."""
    rows = []
    for family in sorted({run.family for run in runs}):
        without = fitted([run for run in runs if run.family != family])
        own = [run for run in runs if run.family == family and not run.unknown]
        inside, low, high = covered(own, without)
        ends = f"{low:.2f} to {high:.2f}"
        rows.append((family, len(own), f"{100 * inside:.0f}", ends))
    head = ("family", "runs", "left out", "range, left out")
    return f"Families\n\n{text_table(head, rows, left='lrrr')}"


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("planner_intervals.py")
    parser.add_argument("tables", nargs="*", metavar="TABLE.csv")
    parser.add_argument(
        "--write", action="store_true", help="the widths into intervals.toml"
    )
    args = parser.parse_args(argv)
    if args.tables:
        anew = list(collected(args.tables))
        families = {run.family for run in anew}
        # Families of other tables stay as they were.
        kept = [run for run in read_runs() if run.family not in families]
        write_runs(sorted([*kept, *anew], key=lambda run: run.family))
    runs = read_runs()
    found = coverage(runs)
    text = toml_text(fitted(runs), found)
    if args.write:
        WIDTHS.write_text(text, encoding="utf-8")
    print(coverage_text(found))
    print(family_text(runs))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
