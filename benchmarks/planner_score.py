"""Predictions against tables of published runs, with each family of sources held out of
the fit.

    python benchmarks/planner_score.py TABLE.csv...

Prints the same table as `phalanx plan score`, with numbers fitted on all other
families. With `--no-fit` the numbers are those of `default` in profiles.toml, which is
the same, and much faster, for families that `default` was not fitted on.
"""

from __future__ import annotations

import csv
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from phalanx.cli.plan_score import score_text
from phalanx.cost import cached_costs
from phalanx.planner.published import runs_of
from phalanx.planner.score import FamilyScore, score
from phalanx.planner.table import read_table
from published.held_out import hold_out, unfitted

_CHUNK = 8  # rows given to a process at once: rows of one program are adjacent


def run(argv: Sequence[str]) -> int:
    """Read the tables, fit without each family, predict every row, and print and write
    the errors."""
    parser = ArgumentParser("planner_score.py")
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument(
        "--only",
        metavar="FAMILY,...",
        help="score these, held out of all tables",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="processes"
    )
    parser.add_argument(
        "--no-fit",
        action="store_true",
        help="take the numbers of `default` as they are",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.csv",
        help="what was measured and predicted of each run",
    )
    args = parser.parse_args(argv)
    rows = [row for path in args.tables for row in read_table(path)]
    published, refused = runs_of(rows, cached_costs)
    only = (
        args.only.split(",")
        if args.only
        else sorted({run.row.family for run in published})
    )
    scores: list[FamilyScore] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        each = partial(pool.map, chunksize=_CHUNK) if args.jobs > 1 else map
        held = (
            unfitted(published, only)
            if args.no_fit
            else hold_out(published, only, each)
        )
        for family in only:
            mine = [n for n, row in enumerate(rows) if row.family == family]
            runs = [run for run in published if run.row.family == family]
            why = {
                mine.index(n): why for n, why in refused.items() if n in mine
            }
            scores += score(
                runs, why, [rows[n] for n in mine], held=held, each=each
            )
            if args.out:  # after each family, because this takes long
                _write(args.out, scores)
    print(score_text(scores))
    return 0


def _write(path: str, scores: Sequence[FamilyScore]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(
            (
                "family",
                "run",
                "measured",
                "held",
                "fitted",
                "after",
                "gb",
                "predicted_gb",
            )
        )
        for each in scores:
            for run in each.runs:
                if run.row.step:
                    times = (run.row.step, run.held, run.step, run.after)
                    memory = (run.row.memory / 1e9, run.reported / 1e9)
                    numbers = (f"{x:.4g}" for x in (*times, *memory))
                    lines.writerow((each.family, run.row.name, *numbers))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
