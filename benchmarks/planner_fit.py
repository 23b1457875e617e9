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

from phalanx.cost import cached_costs, cut_of
from phalanx.plan.fit import fit
from phalanx.plan.profile import FITTED, Profile
from published.predict import RunGroup, groups_of
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


def even(groups: list[RunGroup]):
    """Weights under which every source counts one, however many rows it has."""
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        for row in group.rows:
            sizes[row.source] += counts(row)
    return lambda g: np.array([counts(r) / max(1, sizes[r.source]) for r in g.rows])


def remembered(profile: Profile, groups: list[RunGroup]) -> Profile:
    """The profile with `kept` as the measured peaks have it: the median error is smallest."""

    def off(kept: float) -> float:
        found, wrong, known = [0.0], 0, 1
        for group in groups:
            estimates = group.under(replace(profile, kept=kept))
            told = estimates.told(profile)
            for b, t, row in zip(estimates.bytes, told, group.rows, strict=True):
                if row.memory:
                    found.append(abs(t / row.memory - 1))
                if row.memory or row.out_of_memory:
                    known += 1
                    wrong += (b > LIMIT * group.hardware.memory or row.empty) != row.out_of_memory
        return float(np.median(found)) + wrong / known + 1e-3 * abs(kept - 1)

    return replace(profile, kept=min(np.arange(0.5, 2.01, 0.05).round(2), key=off))


def tell(profile: Profile, device: str) -> None:
    numbers = ", ".join(f"{name} = {getattr(profile, name):g}" for name in (*FITTED, "kept"))
    print(f"[{profile.name}] by_device.{device or 'any'} = {{ {numbers} }}", flush=True)


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_table(path)]
    groups, _ = groups_of(rows, cached_costs, cut_of)
    profiles: dict[tuple[str, str], list[RunGroup]] = defaultdict(list)
    for group in groups:
        profiles[group.rows[0].profile.name, group.rows[0].device].append(group)
    found = []
    for (_, device), those in sorted(profiles.items()):
        found.append(remembered(fit(those[0].rows[0].profile, those, use=even(those)), those))
        tell(found[-1], device)
    print(f"[default] = {{ {usual(found)} }}")


def usual(profiles: list[Profile]) -> str:
    """What a profile that nobody has measured is taken to be: the medians of those that were."""
    return ", ".join(f"{n} = {np.median([getattr(s, n) for s in profiles]):.3g}" for n in FITTED)


if __name__ == "__main__":
    main()
