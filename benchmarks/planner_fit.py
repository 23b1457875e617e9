"""The numbers of every profile, fitted on tables of published runs, as they stand in profiles.toml.

    python benchmarks/planner_fit.py TABLE.csv...

One set for each profile and device. Runs on more than 64 devices of a scan, and runs near the limit of
memory, are pathological and do not count.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np

from phalanx.cost import cached_costs
from phalanx.plan.fit import fit
from phalanx.plan.profile import FITTED, SoftwareProfile
from published.predict import PublishedRun, logged, runs_of
from published.score import some
from published.table import Row, read_table

LIMIT = 0.85  # of a device's memory: what a plan may use
FULL = 0.8  # of a device's memory: beyond it an allocator may thrash


def counts(row: Row) -> bool:
    """Whether a run tells of its software: it ended, and was not starved of memory or network."""
    if row.step <= 0 or row.hardware is None:
        return False
    if row.source.startswith("ultrascale") and row.ranks > 64:
        return False
    return row.memory < FULL * row.hardware.memory or not row.source.startswith("ultrascale")


def fitted(runs: list[PublishedRun]) -> SoftwareProfile:
    """The profile of some runs; every source counts one, however many rows it has."""
    sizes: dict[str, int] = defaultdict(int)
    for run in runs:
        sizes[run.row.source] += counts(run.row)
    weights = [counts(run.row) / max(1, sizes[run.row.source]) for run in runs]
    return remembered(fit(runs[0].row.profile, runs, weights=weights), runs)


def remembered(profile: SoftwareProfile, runs: list[PublishedRun]) -> SoftwareProfile:
    """The profile with `kept` as the measured peaks have it: the median error is smallest."""
    known = [run for run in runs if run.row.memory or run.row.out_of_memory]

    def off(kept: float) -> float:
        tried, found, wrong = replace(profile, kept=kept), [0.0], 0
        for run in known:
            choice, row = run.choice(tried), run.row
            if row.memory:
                found.append(abs(logged(choice, tried) / row.memory - 1))
            room = LIMIT * run.costed.hardware.memory
            wrong += (choice.bytes > room or row.empty) != row.out_of_memory
        return float(np.median(found)) + wrong / max(1, len(known)) + 1e-3 * abs(kept - 1)

    return replace(profile, kept=min(np.arange(0.5, 2.01, 0.1).round(2), key=off))


def tell(profile: SoftwareProfile, device: str) -> None:
    numbers = ", ".join(f"{name} = {getattr(profile, name):g}" for name in (*FITTED, "kept"))
    print(f"[{profile.name}] by_device.{device or 'any'} = {{ {numbers} }}", flush=True)


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_table(path)]
    published, _ = runs_of(rows, cached_costs)
    profiles: dict[tuple[str, str], list[PublishedRun]] = defaultdict(list)
    for run in published:
        profiles[run.row.profile.name, run.row.device].append(run)
    found = []
    for (_, device), runs in sorted(profiles.items()):
        found.append(fitted(some([run for run in runs if counts(run.row)] or runs)))
        tell(found[-1], device)
    print(f"[default] = {{ {usual(found)} }}")


def usual(profiles: list[SoftwareProfile]) -> str:
    """What a profile that nobody has measured is taken to be: the medians of those that were."""
    return ", ".join(f"{n} = {np.median([getattr(s, n) for s in profiles]):.3g}" for n in FITTED)


if __name__ == "__main__":
    main()
