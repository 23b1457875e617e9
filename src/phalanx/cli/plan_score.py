"""`phalanx plan score`: predicts the runs of a table and says how far off each family of sources is: time,
order, memory. No bundled number was fitted on your runs; facts of their software are known.

  phalanx plan score runs.csv
  phalanx plan score runs.csv --rows 5 --each
  phalanx plan score runs.csv --profile profile.toml --json

A table is a CSV file with a row for each run: at least source, hardware, gpus, layers, hidden, seq,
global_batch, one of tp, pp and dp, and what was measured: step_time_s, tok_s_gpu, tflops_gpu,
peak_mem_gb or status. Rows that cannot be read are named, and the others are scored.
Exit code 0: done; 2: wrong usage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..cost import cached_costs
from ..plan.profile import profile
from ..plan.published import runs_of
from ..plan.score import FamilyScore, held_out, score
from ..plan.table import read_table
from .usage import Parser, result, whole


def run(argv: Sequence[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add("tables", nargs="+", metavar="TABLE.csv")
    add("--profile", metavar="NAME|FILE", help="of every row (default: by its framework)")
    add("--rows", type=whole(), help="also after a fit on so many of each family")
    add("--most-ranks", type=whole(), default=0, help="leave larger runs out")
    add("--each", action="store_true", help="every run, with the parts of its step")
    args = parser.read(list(argv))
    chosen = profile(args.profile) if args.profile else None
    rows = [row for path in args.tables for row in read_table(path, chosen)]
    published, refused = runs_of(rows, cached_costs)
    start, held = chosen or profile("default"), {}
    for family in dict.fromkeys(run.row.family for run in published):
        own = [run for run in published if run.row.family == family]
        held[family] = held_out(start, own, args.rows or 0)
    scores = score(published, refused, rows, most_ranks=args.most_ranks, held=held)
    figures: dict[str, object] = {"families": [each.plain() for each in scores]}
    if args.each:
        figures["runs"] = {each.family: [run.plain() for run in each.runs] for each in scores}
    return result(args, figures, score_text(scores, each_run=args.each))


def score_text(scores: Sequence[FamilyScore], *, each_run: bool = False) -> str:
    """Tables of errors, of order, and of memory; with `each_run` all runs after them."""
    lines = [_table(scores)]
    if each_run:
        lines += [line for each in scores for line in _runs(each)]
    return "\n".join(lines)


def _table(found: Sequence[FamilyScore]) -> str:
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


def _runs(each: FamilyScore) -> Iterator[str]:
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


def _error_line(each: FamilyScore) -> str:
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


def _order(each: FamilyScore) -> str:
    regret, rules = each.regret or {}, dict(each.rule_regrets or {})
    random = rules.pop("random", None)
    tau = "-" if each.tau is None else f"{each.tau:.2f}"
    best = min(rules.values()) if rules else None
    columns = [regret.get(1), regret.get(3), regret.get(5), best, random]
    return f"{each.family[:14]:14} {each.groups:6} {tau:>6}" + "".join(
        _percent(x, 8) for x in columns
    )


def _memory(each: FamilyScore) -> str:
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
