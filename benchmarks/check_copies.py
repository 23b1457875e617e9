"""Cost of comparing all copies of weights and optimizer state, as a share of training.

    OMP_NUM_THREADS=1 python benchmarks/check_copies.py [--size small] [--layouts "dp2; tp2 seq bf16"]

Steps and comparisons alternate on the same ranks within one run, so only their ratio is
meaningful. A share is the part of a run that `train.check_copies = N` takes: one
comparison every N steps.
"""

from __future__ import annotations

import argparse
import statistics
import time

from phalanx.comm import World, launch
from phalanx.layout import Layout, Run
from phalanx.training.copies import Copies
from phalanx.training.rank import Rank

SIZES = {
    "small": "model={layers=4,hidden=64,heads=4,ffn=172,vocab=256,sequence=64}",
    "medium": "model={layers=4,hidden=256,heads=8,ffn=688,vocab=2048,sequence=128}",
    "large": "model={layers=6,hidden=512,heads=8,ffn=1376,vocab=8192,sequence=256}",
}
EVERY = 100  # the default of train.check_copies


def times(
    world: World, layout: str, model: str, batch: int, rounds: int
) -> list[list[float]]:
    """Return the seconds of a step and of a comparison, for each round."""
    run = Run.parse("", "run", (model, f"batch={batch}"))
    rank = Rank(world, run, Layout.parse(layout))
    copies = Copies(rank.part.local, rank.part.updates, rank.part.names)
    everyone, found = rank.part.everyone, []
    for number in range(rounds + 2):
        own = rank.batch(number)
        everyone.barrier()
        begun = time.perf_counter()
        rank.part.trainer.step(own, 1e-3)
        everyone.barrier()
        stepped = time.perf_counter()
        assert copies.differences() == ""
        everyone.barrier()
        found.append([stepped - begun, time.perf_counter() - stepped])
    return found[2:]  # the first rounds allocate buffers and tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts", default="dp2; tp2 seq; pp2 1f1b:2; dp2 bf16"
    )
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(
        "| layout | a comparison, of a step | share of a run that compares every 100 steps |"
    )
    print("|---|--:|--:|")
    for layout in Layout.parse_many(args.layouts):
        terms = str(layout), SIZES[args.size], args.batch, args.rounds
        found = launch(times, layout.ranks, *terms, backend=args.backend)[0]
        ratio = statistics.median(compared / step for step, compared in found)
        share = ratio / (EVERY + ratio)
        print(f"| {layout} | {ratio:.3f} | {share:.3%} |")


if __name__ == "__main__":
    main()
