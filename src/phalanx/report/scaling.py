"""Tokens per second over the number of ranks: measured, planned, and ideal scaling from
the smallest run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..drawing import ChartAxis, Html, Series, chart
from ..layout.numbers import si_text
from .page import number, records_of, stretches


@dataclass(frozen=True, eq=False)
class Speed:
    """One start of a run: its layout and its speed.

    The speed is the median of the logged tokens per second, without the first line,
    which covers the warm-up.
    """

    run: str
    layout: str
    ranks: int
    rate: float
    start: Mapping[str, Any]


def speeds(folders: Sequence[Path]) -> tuple[Speed, ...]:
    """Return the speed of every start that logged at least two steps."""
    found = []
    for folder in folders:
        for start, steps in stretches(records_of(folder)):
            rates = [
                x
                for x in (number(step, "tokens_per_second") for step in steps)
                if x > 0
            ]
            ranks = start.get("ranks")
            if (
                len(rates) > 1
                and isinstance(ranks, int)
                and 0 < ranks < 1 << 20
            ):
                layout = str(start.get("layout") or "one rank")
                # The first line covers the warm-up.
                found.append(
                    Speed(folder.name, layout, ranks, median(rates[1:]), start)
                )
    return tuple(found)


def scaling_svg(
    runs: Sequence[Speed],
    planned: Callable[[Speed], float | None],
    width: float,
) -> Html:
    """Draw the chart; empty if all runs have the same number of ranks."""
    runs = sorted(runs, key=lambda run: (run.ranks, run.rate))
    if len({run.ranks for run in runs}) < 2:
        return Html("")
    plans = [(run, rate) for run in runs if (rate := planned(run))]
    # The fastest of the smallest runs is the measure of the ideal.
    first = max(
        (run for run in runs if run.ranks == runs[0].ranks),
        key=lambda run: run.rate,
    )
    ends = (first.ranks, runs[-1].ranks)
    # As many times the tokens as there are times the ranks.
    ideal = tuple((float(n), first.rate * n / first.ranks) for n in ends)

    def series(name: str, each: Sequence[tuple[Speed, float]]) -> Series:
        points = [(float(run.ranks), rate) for run, rate in each]
        tips = [
            f"{run.layout} on {run.ranks} ranks, {rate:,.0f} tokens/s,"
            f" {rate / (first.rate * run.ranks / first.ranks):.0%} of ideal; {run.run}"
            for run, rate in each
        ]
        return Series(name, points, joined=False, tips=tips)

    shown = [
        series("measured", [(run, run.rate) for run in runs]),
        *([series("planned", plans)] if plans else []),
        Series("ideal scaling", (), ideal),
    ]
    return chart(
        "tokens per second over ranks",
        shown,
        ChartAxis("ranks", "{:.0f}".format, base=2),
        ChartAxis("tokens per second", si_text, base=2),
        width=width,
    )
