"""Predictions against tables of published runs, family by family of sources.

python benchmarks/planner_score.py TABLE.csv..."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.cli.usage import Parser, print_json
from phalanx.cost import cached_costs
from phalanx.plan.profile import profile
from published.predict import runs_of
from published.score import Score, hold_out, score
from published.table import read_table

_EXAMPLES = """\
  planner_score.py measured/*.csv
  planner_score.py runs.csv --profile default --json
  planner_score.py scan.csv --most-ranks 64 --no-held-out"""


def run(argv: Sequence[str]) -> int:
    """Read the tables, predict every row, print how far off each source is."""
    parser = Parser(
        "planner_score.py",
        "Predicts every run of tables in the format of published measurements, and says how far"
        " off it is: per family of sources, never pooled.",
        _EXAMPLES,
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument(
        "--profile", metavar="NAME", help="take every row as this profile's (default: by framework)"
    )
    parser.add_argument("--most-ranks", type=int, default=0, help="leave larger runs out")
    parser.add_argument(
        "--no-held-out", action="store_true", help="skip fitting without each family: faster"
    )
    parser.add_argument("--each", action="store_true", help="every run, with the parts of its step")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--out", metavar="FILE.csv", help="measured and predicted seconds of all runs"
    )
    said = parser.read(list(argv))
    chosen = profile(said.profile) if said.profile else None
    rows = [row for path in said.tables for row in read_table(path, chosen)]
    published, refused = runs_of(rows, cached_costs)
    held = {} if said.no_held_out else hold_out(published)
    found = score(published, refused, rows, most_ranks=said.most_ranks, held=held)
    if said.out:
        _write(said.out, found)
    if said.json:
        runs = {each.family: [run.plain() for run in each.runs] for each in found if said.each}
        told = {"families": [each.plain() for each in found]}
        print_json(told | ({"runs": runs} if said.each else {}))
    else:
        print(_table(found))
        if said.each:
            print("\n" + "\n".join(line for each in found for line in _runs(each)))
    return 0


def _write(path: str, found: Sequence[Score]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("family", "run", "measured", "held", "fitted", "after"))
        for each in found:
            for run in each.runs:
                if run.row.step:
                    times = (run.row.step, run.held, run.step, run.after)
                    lines.writerow((each.family, run.row.name, *(f"{x:.4g}" for x in times)))


def _table(found: Sequence[Score]) -> str:
    lines = [
        "Median relative error of step time. 'held': with numbers fitted on all other families; 'five':",
        "after five rows of its own; 'fitted': with its profile's numbers, which have seen it.",
        "",
        f"{'family':14} {'rows':>5} {'held':>7} {'p80':>7} {'<10%':>6} {'five':>7} {'fitted':>7}",
    ]
    lines += [_error_line(each) for each in found]
    head = ("top-1", "top-3", "top-5", "rule", "random")
    lines += [
        "",
        "Order and loss of the first picks, held out, within groups of equal model, devices, sequence.",
        "",
        f"{'family':14} {'groups':>6} {'tau':>6} " + " ".join(f"{name:>7}" for name in head),
    ]
    lines += [_order(each) for each in found if each.tau is not None or each.regret]
    lines += [
        "",
        "Memory has no fitted numbers. 'refused': of the runs that ran.",
        "",
        f"{'family':14} {'memory':>7} {'precision':>10} {'recall':>7} {'accuracy':>9} {'refused':>8}",
    ]
    lines += [_memory(each) for each in found if each.memory_error is not None or each.oom]
    left = [(each.family, why, count) for each in found for why, count in each.left_out.items()]
    if left:
        lines += ["", "Left out:"]
        lines += [f"  {count:5} of {family}: {why}" for family, why, count in left]
    return "\n".join(lines)


def _runs(each: Score) -> Iterator[str]:
    """Two lines a run: how far off it is, and its layout with the parts of its step."""
    yield f"{each.family}"
    yield f"  {'run':28} {'devices':>7} {'measured':>9} {'predicted':>9} {'off':>7} {'held out':>9}"
    for run in each.runs:
        row, measured = run.row, run.row.step
        yield (
            f"  {f'{row.model} {row.name}'[:28]:28} {row.ranks:7,}"
            f" {f'{measured:.3g} s' if measured else '-':>9} {f'{run.step:.3g} s':>9}"
            f" {f'{100 * (run.step / measured - 1):+.1f}%' if measured else '-':>7}"
            f" {f'{run.held:.3g} s' if run.held else '-':>9}"
        )
        parts = ", ".join(f"{name} {time:.3g}" for name, time in run.parts.items() if time)
        yield f"    {row.case.layout if row.case else ''}: {parts}"
    yield ""


def _error_line(each: Score) -> str:
    held, five, errors = each.held_out, each.after_five, each.errors
    return f"{each.family[:14]:14} {each.predicted:5}" + "".join(
        _percent(value, width)
        for value, width in (
            (held and held.median, 8), (held and held.p80, 8), (held and held.within_10, 7),
            (five and five.median, 8), (errors and errors.median, 8),
        )
    )  # fmt: skip


def _percent(value: Any, width: int) -> str:
    if value is None:
        return f"{'-':>{width}}"
    return f"{100 * value:{width - 1}.1f}%"


def _order(each: Score) -> str:
    regret, rules = each.regret or {}, dict(each.rule_regrets or {})
    random = rules.pop("random", None)
    tau = "-" if each.tau is None else f"{each.tau:.2f}"
    best = min(rules.values()) if rules else None
    columns = [regret.get(1), regret.get(3), regret.get(5), best, random]
    return f"{each.family[:14]:14} {each.groups:6} {tau:>6}" + "".join(
        _percent(x, 8) for x in columns
    )


def _memory(each: Score) -> str:
    oom = each.oom or {}
    names = ("precision", "recall", "accuracy", "refused")
    return (
        f"{each.family[:14]:14}"
        + _percent(each.memory_error, 8)
        + "".join(
            _percent(oom.get(name), width)
            for name, width in zip(names, (11, 8, 10, 9), strict=True)
        )
    )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
