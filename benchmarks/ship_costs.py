"""The costs of named sizes that come with the package, costed anew.

    python benchmarks/ship_costs.py           # all of SEARCHES
    python benchmarks/ship_costs.py 8b 70b    # these sizes

Searches a plan for each size on usual clusters, and writes the cuts that the searches
and the checks of `planner_times.py` ask for to `src/phalanx/cost/named`. Run it when
`tests/cost/test_shipped.py` finds that a cost has changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from phalanx.api.plan import request
from phalanx.cost.cache import cached_costs, cost_file, cost_identity
from phalanx.cost.shipped import write_shipped
from phalanx.layout import Layout
from phalanx.plan.search import baselines, search

TARGET = "cuda"
# Clusters and sequence lengths (0: the size's own) that a size is searched for.
SEARCHES: dict[str, tuple[tuple[str, int], ...]] = {
    "1b": (("rtx-4090x4", 0), ("h100x8", 0)),
    "8b": (("h100x64", 0), ("h100x8", 0), ("h100x512", 0)),
    "70b": (("h100x64", 0), ("h100x256", 0), ("h100x1024", 0)),
    "405b": (("h100x16384", 0), ("h100x16384", 131_072)),
    "1t-gpt": (("h100x98304", 0),),
    "8x7b": (("h100x64", 0),),
}
_TOKENS = {"405b": 16 * 2**20}  # in a step
# Cuts that `phalanx check` asks for.
_CHECKED = ("", "tp8", "tp8 zb-h1", "tp8 seq", "tp8 seq zb-h1")


def main() -> None:
    for name in sys.argv[1:] or SEARCHES:
        with tempfile.TemporaryDirectory() as folder:
            ship(name, Path(folder))


def ship(name: str, folder: Path) -> None:
    """Cost the cuts of a size's searches in an empty cache, and write them."""
    costs = partial(cached_costs, target=TARGET, place=folder, shipped=False)
    found = {}
    for cluster, sequence in SEARCHES[name]:
        tokens = _TOKENS.get(name)
        words = {"batch_tokens": tokens} if tokens else {}
        asked = request(name, cluster, sequence=sequence or None, **words)
        asked = replace(asked, piece_costs=costs)
        search(asked)
        baselines(asked)
        if not sequence:
            checked = map(Layout.parse, _CHECKED)
            costs(asked.shape, checked, sequence=asked.sequence)
        found[asked.sequence] = asked.shape
    for sequence, shape in found.items():
        file = cost_file(shape, sequence, TARGET, folder)
        cuts = json.loads(file.read_text())
        identity = cost_identity(shape, sequence, TARGET)
        written = write_shipped(name, identity, cuts)
        print(
            f"{written.name}: {len(cuts)} cuts, {written.stat().st_size:,} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
