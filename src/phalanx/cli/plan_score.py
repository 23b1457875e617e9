"""`phalanx plan score`: predicts the runs of a table and shows the error for each
family of sources: step time, order, memory. No bundled number was fitted on your runs;
facts about their software are known.

  phalanx plan score runs.csv
  phalanx plan score runs.csv --rows 5 --each
  phalanx plan score runs.csv --profile profile.toml --json

A table is a CSV file with one row for each run. Required columns are source, hardware,
gpus, layers, hidden, seq, global_batch, one of tp, pp and dp, and a measurement:
step_time_s, tok_s_gpu, tflops_gpu, peak_mem_gb or status. Unreadable rows are listed,
and the others are scored. Exit code 0: done; 2: wrong usage.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ..api.check import spans
from ..cost import cached_costs
from ..drawing import text_table
from ..planner.profile import profile
from ..planner.published import runs_of
from ..planner.score import FamilyScore, held_out, score
from ..planner.table import read_table
from .parser import Parser, whole
from .usage import result


def run(argv: Sequence[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add
    add("tables", nargs="+", metavar="TABLE.csv")
    add(
        "--profile",
        metavar="NAME|FILE",
        help="software profile of every row (default: that of its framework)",
    )
    add("--rows", type=whole(), help="also fit this many rows of each family")
    add("--most-ranks", type=whole(), default=0, help="skip larger runs")
    add(
        "--each",
        action="store_true",
        help="show every run, with the parts of its step",
    )
    args = parser.read(list(argv))
    chosen = profile(args.profile) if args.profile else None
    rows = [row for path in args.tables for row in read_table(path, chosen)]
    published, refused = runs_of(rows, cached_costs)
    start, held = chosen or profile("default"), {}
    # Numbers of each family from a fit without it.
    for family in dict.fromkeys(run.row.family for run in published):
        own = [run for run in published if run.row.family == family]
        held[family] = held_out(start, own, args.rows or 0)
    scores = score(
        published, refused, rows, most_ranks=args.most_ranks, held=held
    )
    figures: dict[str, object] = {
        "families": [each.plain() for each in scores]
    }
    if args.each:
        figures["runs"] = {
            each.family: [run.plain() for run in each.runs] for each in scores
        }
    return result(args, figures, score_text(scores, each_run=args.each))


# A reason that starts with its line number.
_LINE = re.compile(r"line (\d+)[,:] (.*)")

# The heading and the columns of each table.
_ERRORS = (
    "Median relative error of step time. 'held': with numbers fitted to all other families; 'five':"
    "\nafter a fit to five rows of its own; 'fitted': with its profile's numbers, fitted to it.",
    "family rows held p80 <10% five fitted",
)
_ORDER = (
    "Rank correlation, and loss of the first picks, held out, among runs of equal model, devices, sequence.",
    "family groups tau top-1 top-3 top-5 rule random",
)
_MEMORY = (
    "Memory has no fitted numbers. 'refused': share of the successful runs.",
    "family memory precision recall accuracy refused",
)


def score_text(
    scores: Sequence[FamilyScore], *, each_run: bool = False
) -> str:
    """Return tables of errors, order and memory; with `each_run`, of all runs too."""
    ordered = [
        _order(each) for each in scores if each.tau is not None or each.regret
    ]
    remembered = [
        _memory(each)
        for each in scores
        if each.memory_error is not None or each.oom
    ]
    tables = (
        (_ERRORS, map(_errors, scores)),
        (_ORDER, ordered),
        (_MEMORY, remembered),
    )
    parts = [
        f"{title}\n\n{text_table(head.split(), rows)}"
        for (title, head), rows in tables
    ]
    left = [
        (count, f"of {each.family}: {why}")
        for each in scores
        for why, count in _by_reason(each.left_out)
    ]
    if left:
        parts.append(f"Left out:\n{text_table((), left, left='rl', indent=2)}")
    if each_run:
        parts += map(_runs, scores)
    return "\n".join(parts)


def _by_reason(left_out: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yield the number of rows that each reason excludes, with their line numbers if
    known."""
    counts, lines = Counter[str](), defaultdict[str, list[int]](list)
    # "line 12: the reason" -> rows with one reason are counted together.
    for why, count in left_out.items():
        match = _LINE.fullmatch(why)
        reason = match[2] if match else why
        counts[reason] += count
        lines[reason] += [int(match[1])] if match else []
    for reason, count in counts.items():
        where = (
            f"{'line' if count == 1 else 'lines'} {spans(lines[reason])}, "
            if lines[reason]
            else ""
        )
        yield count, f"{where}{reason}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _errors(each: FamilyScore) -> list[object]:
    held, five, fitted = each.held_out, each.after_five, each.errors
    of_held = (
        (held.median, held.p80, held.within_10) if held else (None, None, None)
    )
    errors = (*of_held, five and five.median, fitted and fitted.median)
    return [each.family, each.predicted, *map(_percent, errors)]


def _order(each: FamilyScore) -> list[object]:
    regret, rules = each.regret or {}, dict(each.rule_regrets or {})
    # The chance pick stands beside the rules, not among them.
    random = rules.pop("random", None)
    tau = "-" if each.tau is None else f"{each.tau:.2f}"
    shares = (
        *map(regret.get, (1, 3, 5)),
        min(rules.values(), default=None),
        random,
    )
    return [each.family, each.groups, tau, *map(_percent, shares)]


def _memory(each: FamilyScore) -> list[object]:
    shares = map(
        (each.oom or {}).get, ("precision", "recall", "accuracy", "refused")
    )
    return [each.family, _percent(each.memory_error), *map(_percent, shares)]


def _runs(each: FamilyScore) -> str:
    """Return all runs of a family: the error of each, and its layout with the parts of
    its step."""
    rows = []
    for run in each.runs:
        row, measured = run.row, run.row.step
        seconds = (
            f"{time:.3g} s" if time else "-"
            for time in (measured, run.step, run.held)
        )
        # Without a measurement there is no error.
        off = f"{100 * (run.step / measured - 1):+.1f}%" if measured else "-"
        parts = ", ".join(
            f"{name} {time:.3g}" for name, time in run.parts.items() if time
        )
        step = f"{row.case.layout if row.case else ''}: {parts}"
        rows.append(
            (f"{row.model} {row.name}", f"{row.ranks:,}", *seconds, off, step)
        )
    head = (
        "run",
        "devices",
        "measured",
        "predicted",
        "held out",
        "off",
        "layout",
    )
    return f"{each.family}\n{text_table(head, rows, left='lrrrrrl', indent=2)}"
