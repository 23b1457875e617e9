"""Predictions against tables of published runs, source by source.

python benchmarks/planner_score.py TABLE.csv..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.cli.usage import Parser, print_json
from phalanx.cost import cached_costs
from phalanx.plan.profile import SoftwareProfile, profile
from published.predict import PublishedRun, runs_of
from published.score import Errors, Score, hold_out, score
from published.table import Row, read_table

_EXAMPLES = """\
  planner_score.py measured/*.csv
  planner_score.py runs.csv --profile default --json
  planner_score.py scan.csv --most-ranks 64 --no-held-out"""
_LEAST = 5  # timed rows of a source before its absence from a fit says anything


def run(argv: Sequence[str]) -> int:
    """Read the tables, predict every row, print how far off each source is."""
    parser = Parser(
        "planner_score.py",
        "Predicts every run of tables in the format of published measurements, and says how far"
        " off it is: per source, never pooled.",
        _EXAMPLES,
    )
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv")
    parser.add_argument(
        "--profile", metavar="NAME", help="take every row as this profile's (default: by framework)"
    )
    parser.add_argument("--most-ranks", type=int, default=0, help="leave larger runs out")
    parser.add_argument(
        "--no-held-out", action="store_true", help="skip fitting without each source: faster"
    )
    parser.add_argument("--each", action="store_true", help="every run, with the parts of its step")
    parser.add_argument("--json", action="store_true")
    said = parser.read(list(argv))
    chosen = profile(said.profile) if said.profile else None
    rows = [row for path in said.tables for row in read_table(path, chosen)]
    published, refused = runs_of(rows, cached_costs)
    held = {} if said.no_held_out else _held(published, rows)
    found = score(published, refused, rows, most_ranks=said.most_ranks, held=held)
    if said.json:
        runs = {each.source: [run.plain() for run in each.runs] for each in found if said.each}
        told = {"sources": [each.plain() for each in found]}
        print_json(told | ({"runs": runs} if said.each else {}))
    else:
        print(_table(found))
        if said.each:
            print("\n" + "\n".join(line for each in found for line in _runs(each)))
    return 0


def _held(
    published: Sequence[PublishedRun], rows: Sequence[Row]
) -> Mapping[str, Callable[[SoftwareProfile], SoftwareProfile]]:
    """For each source with enough runs, its profile as it is without it. A table that no profile was
    fitted on is held out as it stands; it needs another beside it to be fitted without."""
    timed: dict[str, int] = {}
    for each in published:
        timed[each.row.source] = timed.get(each.row.source, 0) + (each.measured > 0)
    if len([source for source in timed if timed[source]]) < 2:
        return {}
    return {
        source: hold_out(published, source)
        for source in dict.fromkeys(row.source for row in rows)
        if timed.get(source, 0) >= _LEAST
    }


def _table(found: Sequence[Score]) -> str:
    lines = [
        "Relative error of step time. 'held' is with the source left out of the fit; 'scaled' after",
        "one scalar. tau is within groups of equal model, devices and sequence.",
        "",
        f"{'source':28} {'rows':>5} {'median':>7} {'mean':>6} {'p90':>6} {'<5%':>5} {'<10%':>5}"
        f" {'held':>6} {'scaled':>6}",
    ]
    lines += [_error_line(each) for each in found]
    lines += ["", f"{'source':28} {'groups':>6} {'tau':>6} {'top-1':>7} {'top-3':>7} {'top-5':>7}"
              f" {'rule':>7} {'random':>7}"]  # fmt: skip
    lines += [_order(each) for each in found if each.tau is not None or each.regret]
    with_memory = [each for each in found if each.memory_error is not None or each.oom]
    if with_memory:
        lines += [
            "",
            f"{'source':28} {'memory':>7} {'precision':>10} {'recall':>7} {'accuracy':>9}",
        ]
        lines += [_memory(each) for each in with_memory]
    left = [(each.source, why, count) for each in found for why, count in each.left_out.items()]
    if left:
        lines += ["", "Left out:"]
        lines += [f"  {count:5} of {source[:28]}: {why}" for source, why, count in left]
    return "\n".join(lines)


def _runs(each: Score) -> Iterator[str]:
    """Two lines a run: how far off it is, and its layout with the parts of its step."""
    yield f"{each.source}"
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
    held, scaled = each.held_out, each.scaled
    return (
        f"{each.source[:28]:28} {each.predicted:5}"
        + _errors(each.errors)
        + _percent(held and held.median, 7)
        + _percent(scaled and scaled.median, 7)
    )


def _errors(errors: Errors | None) -> str:
    if errors is None:
        return f" {'-':>7} {'-':>6} {'-':>6} {'-':>5} {'-':>5}"
    return (
        f" {100 * errors.median:6.1f}% {100 * errors.mean:5.0f}% {100 * errors.p90:5.0f}%"
        f" {100 * errors.within_5:4.0f}% {100 * errors.within_10:4.0f}%"
    )


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
    return f"{each.source[:28]:28} {each.groups:6} {tau:>6}" + "".join(
        _percent(x, 8) for x in columns
    )


def _memory(each: Score) -> str:
    oom = each.oom or {}
    names = ("precision", "recall", "accuracy")
    return (
        f"{each.source[:28]:28}"
        + _percent(each.memory_error, 8)
        + "".join(
            _percent(oom.get(name), width) for name, width in zip(names, (11, 8, 10), strict=True)
        )
    )


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
