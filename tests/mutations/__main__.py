"""Small mistakes drawn at random in code that a layout runs, and what notices each.

    make mutations MUTATIONS="--count 20"
    PYTHONPATH=tests python -m mutations --seed 20261126 --count 60 --package models,parallel
    PYTHONPATH=tests python -m mutations --again      # only those that nothing noticed
    PYTHONPATH=tests python -m mutations --summary

Each is judged in a copy of the tree: by import and mypy (what these notice is not counted), by `phalanx
verify` alone in up to three commands that run the statement, and by the nearest tests. Results are JSON
lines; a run that was stopped goes on. The seed is the date if none is given. It takes hours.
"""

from __future__ import annotations

import argparse
import difflib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .judges import (
    Finding,
    Tree,
    by_import_or_types,
    by_tests,
    by_verify,
    copied_tree,
    nearest,
)
from .lines import (
    PACKAGES,
    ROOT,
    Candidate,
    candidates,
    package_of,
    recorded,
    sample,
)

FOLDER = ROOT / "runs" / "mutations"
Result = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    today = int(time.strftime("%Y%m%d"))
    parser.add_argument(
        "--seed",
        type=int,
        default=today,
        help="which are drawn; default: the date",
    )
    parser.add_argument(
        "--count", type=int, default=20, help="how many are drawn"
    )
    parser.add_argument(
        "--package", default=",".join(PACKAGES), help="of which packages"
    )
    parser.add_argument(
        "--commands", type=int, default=3, help="most verify commands of each"
    )
    parser.add_argument(
        "--tests", type=int, default=5, help="most files of tests of each"
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "results.jsonl")
    parser.add_argument(
        "--again", action="store_true", help="judge again what nothing noticed"
    )
    parser.add_argument(
        "--list", action="store_true", help="show what would be judged"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="show the results, judge nothing",
    )
    args = parser.parse_args()
    # so that judges and the copy end with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = read(args.out)
    if not args.summary:
        drawn = chosen(args, results)
        if args.list:
            print("\n".join(candidate.mutation.name for candidate in drawn))
            return
        with copied_tree() as tree:
            for candidate in drawn:
                result = judged(tree, candidate, args.commands, args.tests) | {
                    "seed": args.seed
                }
                results[result["name"]] = result
                with args.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(
                    f"{result['by']} {result['how']}: {result['name']}",
                    flush=True,
                )
    print(summary(results.values()))


def read(path: Path) -> dict[str, Result]:
    """Results by the names of their mutations; a later one stands for an earlier one."""
    lines = path.read_text().splitlines() if path.exists() else []
    each = map(json.loads, lines)
    return {result["name"]: result for result in each}


def chosen(
    args: argparse.Namespace, results: Mapping[str, Result]
) -> list[Candidate]:
    """The first of a sample that have no result; with `again` those that nothing noticed."""
    every = candidates(recorded(FOLDER), args.package.split(","))
    if args.again:
        survived = {
            name
            for name, result in results.items()
            if result["by"] == SURVIVED
        }
        return [each for each in every if each.mutation.name in survived]
    drawn = sample(every, args.seed)[: args.count]
    return [each for each in drawn if each.mutation.name not in results]


SURVIVED, OBVIOUS, BY_VERIFY, BY_TESTS = (
    "survived",
    "obvious",
    "verify",
    "tests",
)


def judged(
    tree: Tree, candidate: Candidate, commands: int, tests: int
) -> dict[str, Any]:
    """The result of one mutation: who noticed it, how, and in which words."""
    mutation, begun = candidate.mutation, time.monotonic()
    cases = candidate.cases[:commands]
    files = nearest(tree, mutation, tests)
    by, found = SURVIVED, None
    with tree.mutated(mutation):
        if found := by_import_or_types(tree):
            by = OBVIOUS
        for case in () if found else cases:
            if found := by_verify(tree, case):
                by = BY_VERIFY
                break
    if not found and (found := by_tests(tree, mutation, files)):
        by = BY_TESTS
    finding = found or Finding(
        "", "; ".join([case.command for case in cases] + [*map(str, files)])
    )
    return {
        "name": mutation.name, "package": package_of(mutation.path),
        "operator": mutation.operator, "line": mutation.lines.start, "by": by, "how": finding.how,
        "command": finding.command, "said": finding.said, "diff": difference(candidate),
        "seconds": round(time.monotonic() - begun), "commit": _commit(),
    }  # fmt: skip


def difference(candidate: Candidate) -> str:
    mutation = candidate.mutation
    right = (ROOT / mutation.path).read_bytes()
    texts = [
        text.decode().splitlines() for text in (right, mutation.applied(right))
    ]
    lines = difflib.unified_diff(
        *texts, mutation.path, mutation.path, lineterm="", n=1
    )
    return "\n".join(lines)


def _commit() -> str:
    log = ["git", "log", "-1", "--format=%h"]
    return subprocess.run(
        log, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def summary(results: Iterable[Result]) -> str:
    """Percentages by package, and the diffs of those that nothing noticed.

    A mistake in `verify` itself is left out of what verify alone notices: with it in place nothing is
    wrong but the judge.
    """
    results = [*results]
    rows = [
        "| package | judged | verify alone | verify or tests | survived |",
        "|---|--:|--:|--:|--:|",
    ]
    by_package: dict[str, list[Result]] = {}
    for result in results:
        by_package.setdefault(result["package"], []).append(result)
    engine = [
        result for result in results if result["package"] != "verification"
    ]
    named = [
        *sorted(by_package.items()),
        ("all but verification", engine),
        ("all", results),
    ]
    rows += [_row(name, group) for name, group in named]
    counts = Counter(f"{r['by']} {r['how']}".strip() for r in results)
    how = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    left = [r for r in results if r["by"] == SURVIVED]
    shown = [f"{r['name']}\n{r['diff']}\n" for r in left]
    return "\n".join([*rows, "", how, "", *shown])


def _row(name: str, results: Iterable[Result]) -> str:
    by = Counter(result["by"] for result in results)
    total = by[BY_VERIFY] + by[BY_TESTS] + by[SURVIVED]
    noticed = by[BY_VERIFY] + by[BY_TESTS]
    shares = [
        f"{count} ({count / max(1, total):.0%})"
        for count in (by[BY_VERIFY], noticed)
    ]
    return f"| {name} | {total} | {' | '.join(shares)} | {by[SURVIVED]} |"


if __name__ == "__main__":
    main()
