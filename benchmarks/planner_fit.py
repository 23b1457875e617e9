"""Numbers of every software profile, fitted on tables of published runs, as in
profiles.toml.

    python benchmarks/planner_fit.py TABLE.csv...

`default` is one set for all families of sources. A profile's own numbers start there
and are held there the more strongly the fewer runs it has.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from phalanx.cost import cached_costs
from phalanx.planner.calibrate import LongestPath
from phalanx.planner.profile import FITTED, SoftwareProfile
from phalanx.planner.published import PublishedRun, runs_of
from phalanx.planner.table import read_table
from published.held_out import START, shared, some


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_table(path)]
    published, _ = runs_of(rows, cached_costs)
    known = some(published)
    met: dict[int, list[LongestPath]] = {}
    default = shared(known, met, START)
    tell("default", default)
    profiles: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in known:
        profiles[run.row.profile.name].append(run)
    for name, runs in sorted(profiles.items()):
        tell(name, shared(runs, met, default, physics=0.0))


def tell(name: str, found: SoftwareProfile) -> None:
    print(f"[{name}]")
    print(
        "\n".join(
            f"{number} = {getattr(found, number):g}" for number in FITTED
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
