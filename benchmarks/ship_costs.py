"""The costs of named sizes that come with the package, costed anew.

    python benchmarks/ship_costs.py           # all of SEARCHES
    python benchmarks/ship_costs.py 8b 405b   # these sizes
    python benchmarks/ship_costs.py --stamp   # after a change of code that changes no cost

Searches a plan for each size on usual clusters, and writes the cuts that the searches
and the checks of `planner_times.py` ask for to `src/phalanx/cost/named`. Run it when
`tests/cost/test_shipped.py` finds that a cost has changed.

With `--stamp` it computes a few cuts of each shipped file anew. If they equal the shipped ones,
it writes today's digest of the code into the file, else it ends with exit code 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from phalanx.api.plan import request
from phalanx.cost.cache import (
    cached_costs,
    code_digest,
    cost_file,
    cost_identity,
    costed_cuts,
)
from phalanx.cost.shipped import (
    as_json,
    read_shipped,
    shipped_file,
    write_shipped,
)
from phalanx.layout import Layout, Shape
from phalanx.planner.search import baselines, search

TARGET = "cuda"
# Clusters and sequence lengths (0: the size's own) that a size is searched for.
SEARCHES: dict[str, tuple[tuple[str, int], ...]] = {
    "8b": (("h100x64", 0), ("h100x8", 0), ("h100x512", 0)),
    "405b": (("h100x16384", 0), ("h100x16384", 131_072)),
    "1t-gpt": (("h100x98304", 0),),
}
_TOKENS = {"405b": 16 * 2**20}  # in a step
# Cuts that `phalanx check` asks for.
_CHECKED = (
    "bf16",
    "tp8 bf16",
    "tp8 zb-h1:1 bf16",
    "tp8 seq bf16",
    "tp8 seq zb-h1:1 bf16",
)


def main() -> None:
    words = sys.argv[1:]
    stamped = "--stamp" in words
    names = [word for word in words if word != "--stamp"]
    for name in names or SEARCHES:
        if stamped:
            stamp(name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            ship(name, Path(folder))


def stamp(name: str) -> None:
    """Write today's digest into a size's files, if a few cuts have the costs that they hold."""
    for sequence in dict.fromkeys(each for _, each in SEARCHES[name]):
        shape = Shape.load(name)
        if sequence:
            shape = replace(shape, sequence=sequence)
        file = shipped_file(name, shape.sequence)
        held = read_shipped(file)
        cuts = sorted(held["cuts"])
        # The last in this order has selective recomputation where any has.
        few = [cuts[0], cuts[len(cuts) // 2], cuts[-1]]
        layouts = map(Layout.parse, few)
        computed = as_json(
            costed_cuts(shape, list(layouts), shape.sequence, TARGET)
        )
        changed = [cut for cut in few if computed[cut] != held["cuts"][cut]]
        if changed:
            raise SystemExit(
                f"{file.name}: the costs of {changed} have changed;"
                f" run: python benchmarks/ship_costs.py {name}"
            )
        identity = cost_identity(shape, shape.sequence, TARGET)
        write_shipped(name, identity, code_digest(), held["cuts"])
        print(f"{file.name}: {few} have the same costs; stamped", flush=True)


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
        written = write_shipped(name, identity, code_digest(), cuts)
        print(
            f"{written.name}: {len(cuts)} cuts, {written.stat().st_size:,} bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
