"""What the docs say of the planner's errors, against the runs that it is said of."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from math import hypot, log
from pathlib import Path
from statistics import fmean, median

import pytest

from phalanx.cost import cached_costs
from phalanx.planner.interval import CAUSES, widths
from phalanx.planner.profile import profile
from phalanx.planner.published import runs_of
from phalanx.planner.table import read_table

ROOT = Path(__file__).resolve().parents[2]


def off() -> dict[str, dict[str, list[float]]]:
    """Relative errors by family, of each way to predict."""
    found: dict[str, dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    with open(ROOT / "benchmarks/published/scored.csv", newline="") as file:
        for row in csv.DictReader(file):
            for way in ("held", "fitted", "after"):
                if float(row[way]):  # 0: a row that the fit has seen
                    error = abs(float(row[way]) / float(row["measured"]) - 1)
                    found[row["family"]][way].append(error)
    return found


def test_the_shown_ranges_hold_four_of_five_published_runs() -> None:
    groups: dict[str, list[bool]] = defaultdict(list)
    with open(ROOT / "benchmarks/published/intervals.csv", newline="") as file:
        for row in csv.DictReader(file):
            strengths = [
                (cause, float(row.get(cause) or 0)) for cause in CAUSES
            ]
            low, high = (
                hypot(*(amount * side[cause] for cause, amount in strengths))
                for side in (widths().below, widths().above)
            )
            off = log(float(row["measured"]) / float(row["predicted"]))
            groups[row["group"]].append(-low <= off <= high)
    named = [
        fmean(inside)
        for group, inside in groups.items()
        if not group.endswith("unknown")
    ]
    assert 0.78 <= fmean(named) < 0.9
    assert fmean(part >= 0.6 for part in named) >= 0.8


def test_the_table_of_the_docs_is_that_of_the_runs() -> None:
    text = (ROOT / "docs/scored.md").read_text()
    said = re.findall(
        r"^\| (\w+) \| (\d+) \| ([\d.]+) % \| [\d.]+ % \| ([\d.]+) % \| ([\d.]+) % \|$",
        text,
        re.M,
    )
    families = off()
    assert [name for name, *_ in said] == sorted(families)
    for name, rows, *errors in said:
        assert int(rows) == len(families[name]["held"])
        for way, error in zip(
            ("held", "after", "fitted"), errors, strict=True
        ):
            assert 100 * median(families[name][way]) == pytest.approx(
                float(error), abs=0.051
            )


def test_the_readme_has_the_range_of_the_families_errors() -> None:
    table = (ROOT / "docs/scored.md").read_text()
    held = re.findall(r"^\| \w+ \| \d+ \| ([\d.]+) % \|", table, re.M)
    errors = sorted(map(float, held))
    text = " ".join((ROOT / "README.md").read_text().split())
    (families,) = re.findall(r"published runs come from (\d+) families", text)
    (told,) = re.findall(
        r"median error of a family is ([\d.]+) to ([\d.]+) %", text
    )
    assert int(families) == len(errors)
    assert [*map(float, told)] == [errors[0], errors[-1]]


UNSEEN = ROOT / "benchmarks/published/unseen.csv"


def test_every_run_that_was_never_fitted_can_be_read() -> None:
    rows = read_table(UNSEEN)
    assert [row.why for row in rows] == [""] * len(rows)
    assert all(row.step for row in rows)


@pytest.mark.slow
def test_errors_of_runs_that_were_never_fitted_are_those_of_the_docs() -> None:
    text = (ROOT / "docs/scored.md").read_text()
    number = r"([-+]?[\d.]+)"
    told = rf"^\| (\w+) \| [^|]+ \| (\d+) \| [^|]+ \| {number} % \| {number} to {number} % \| {number} % \|$"
    runs, refused = runs_of(read_table(UNSEEN), cached_costs)
    assert not refused
    off: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        steps = (
            run.choice(numbers).step
            for numbers in (run.row.profile, profile("default"))
        )
        named, default = (100 * (step / run.row.step - 1) for step in steps)
        off[run.row.family].append((named, default))
    said = re.findall(told, text, re.M)
    assert [name for name, *_ in said] == sorted(off)
    for name, rows, *errors in said:
        named, default = zip(*off[name], strict=True)
        right = (
            median(map(abs, named)),
            min(named),
            max(named),
            median(map(abs, default)),
        )
        assert int(rows) == len(named)
        assert [float(e) for e in errors] == pytest.approx(right, abs=0.06)
