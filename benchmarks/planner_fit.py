"""The numbers of every stack, fitted on tables of published runs, as they stand in stacks.toml.

    python benchmarks/planner_fit.py TABLE.csv...

One set for each stack and device. Runs on more than 64 devices of a scan, and runs near the limit of
memory, are pathological and do not count.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np

from phalanx.cost import cut_of, weighs
from phalanx.plan.fit import fit
from phalanx.plan.stack import FITTED, Stack
from published.predict import RunGroup, groups_of
from published.table import Row, read_table

LIMIT = 0.85  # of a device's memory: what a plan may use
FULL = 0.8  # of a device's memory: beyond it an allocator may thrash


def counts(row: Row) -> bool:
    """Whether a run tells of its software: it ended, and was not starved of memory or network."""
    if row.step <= 0 or row.site is None:
        return False
    if row.source.startswith("ultrascale") and row.ranks > 64:
        return False
    return row.memory < FULL * row.site.memory or not row.source.startswith("ultrascale")


def even(groups: list[RunGroup]):
    """Weights under which every source counts one, however many rows it has."""
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        for row in group.rows:
            sizes[row.source] += counts(row)
    return lambda g: np.array([counts(r) / max(1, sizes[r.source]) for r in g.rows])


def remembered(stack: Stack, groups: list[RunGroup]) -> Stack:
    """The stack with `kept` as the measured peaks have it: the median error is smallest."""

    def off(kept: float) -> float:
        found, wrong, known = [0.0], 0, 1
        for group in groups:
            estimates = group.under(replace(stack, kept=kept))
            told = estimates.told(stack)
            for b, t, row in zip(estimates.bytes, told, group.rows, strict=True):
                if row.memory:
                    found.append(abs(t / row.memory - 1))
                if row.memory or row.out_of_memory:
                    known += 1
                    wrong += (b > LIMIT * group.site.memory or row.empty) != row.out_of_memory
        return float(np.median(found)) + wrong / known + 1e-3 * abs(kept - 1)

    return replace(stack, kept=min(np.arange(0.5, 2.01, 0.05).round(2), key=off))


def tell(stack: Stack, device: str) -> None:
    numbers = ", ".join(f"{name} = {getattr(stack, name):g}" for name in (*FITTED, "kept"))
    print(f"[{stack.name}] by_device.{device or 'any'} = {{ {numbers} }}", flush=True)


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_table(path)]
    groups, _ = groups_of(rows, weighs, cut_of)
    stacks: dict[tuple[str, str], list[RunGroup]] = defaultdict(list)
    for group in groups:
        stacks[group.rows[0].stack.name, group.rows[0].device].append(group)
    found = []
    for (_, device), those in sorted(stacks.items()):
        found.append(remembered(fit(those[0].rows[0].stack, those, use=even(those)), those))
        tell(found[-1], device)
    print(f"[default] = {{ {usual(found)} }}")


def usual(stacks: list[Stack]) -> str:
    """What a stack that nobody has measured is taken to be: the medians of those that were."""
    return ", ".join(f"{n} = {np.median([getattr(s, n) for s in stacks]):.3g}" for n in FITTED)


if __name__ == "__main__":
    main()
