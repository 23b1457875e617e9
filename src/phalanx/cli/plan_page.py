"""A plan as one HTML page: memory over throughput of all candidates, the frontier, the
best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..api.plan_text import utilization
from ..drawing import (
    ChartAxis,
    Html,
    Series,
    chart,
    figure,
    frame,
    paragraphs,
    table,
    tag,
)
from ..layout.numbers import bytes_text, seconds_text
from ..planner.search import Baseline, Plan
from ..planner.step import Choice, Request

_Array = NDArray[np.float64]
Points = list[tuple[float, float]]
# grid cells for each factor of two; one candidate is drawn for each cell
_CELLS = 24.0


def page(request: Request, plan: Plan, beside: Sequence[Baseline]) -> str:
    title = f"{request.name} on {request.hardware.name}"
    summary = (
        f"{request.batch:,} sequences of {request.sequence:,} tokens a step, {request.precision}."
        f" {plan.considered:,} layouts, {plan.fitting:,} of which fit in"
        f" {plan.room / 1e9:.1f} GB a device."
    )
    picture = figure(partial(_chart, request, plan, beside))
    return frame(title, paragraphs([summary]), picture, _table(request, plan))


def _chart(
    request: Request, plan: Plan, beside: Sequence[Baseline], width: float
) -> Html:
    """Draw the layouts that fit and those that do not, the frontier, the best, and
    simple rules' choices."""
    steps, held = plan.points
    # Tokens per second and device, and GB of the fullest rank.
    rate, held = request.tokens / request.hardware.ranks / steps, held / 1e9
    # What needs four times the memory or more is far outside the picture.
    fits, near = held <= plan.room / 1e9, held < 4e-9 * request.hardware.memory
    rules = [
        (baseline.rule, baseline.choice)
        for baseline in beside
        if baseline.choice
    ]
    drawn = _thinned(rate, held, fits)
    bounded = partial(_bounded, plan, rate, held)
    series = [
        bounded("fits", drawn),
        bounded("does not fit", _thinned(rate, held, near & ~fits)),
        Series("frontier", _frontier(rate[fits], held[fits]), dots=False),
        _chosen(request, "plain rules", rules),
        _chosen(
            request,
            "best",
            [(f"number {n}", c) for n, c in enumerate(plan.layouts, 1)],
        ),
    ]
    return chart(
        "memory over throughput",
        [s for s in series if s.points],
        ChartAxis("tokens/s a device", lambda x: f"{x:,.0f}", base=2),
        ChartAxis("memory of the fullest", lambda y: f"{y:.3g} GB", base=2),
        [
            f"Up to {len(drawn):,} of {plan.fitting:,} that fit are drawn. No layout is both faster"
            " and smaller than one on the frontier."
        ],
        width=width,
    )


def _bounded(
    plan: Plan, rate: _Array, held: _Array, name: str, chosen: Sequence[int]
) -> Series:
    """Return a series of candidates at their bounds, each with its layout and why it is
    not among the best."""
    tips, more = [], []
    first = plan.layouts[0].step if plan.layouts else math.nan
    for i in chosen:
        # Bounds: no simulation may be faster or smaller.
        tips.append(
            f"{plan.named(i)}, at most {rate[i]:,.0f} tokens/s, at least {held[i]:.3g} GB"
        )
        step, room = float(plan.points[0][i]), plan.room / 1e9
        if name == "fits":
            why = (
                f"Its step takes at least {seconds_text(step)}; number 1 takes"
            )
            more.append(
                f"{why} {seconds_text(first)}, {step / first - 1:+.1%} by this bound."
            )
        else:
            more.append(
                f"It needs {held[i] / room:.2f} times the {room:.1f} GB available."
            )
    points = [(float(rate[i]), float(held[i])) for i in chosen]
    return Series(name, points, joined=False, tips=tips, more=more)


def _chosen(
    request: Request, name: str, choices: Sequence[tuple[str, Choice]]
) -> Series:
    points = [
        (utilization(request, c).tokens, c.bytes / 1e9) for _, c in choices
    ]
    tips = [
        f"{what}, {rate:,.0f} tokens/s, {held:.3g} GB: {c.layout}"
        for (what, c), (rate, held) in zip(choices, points, strict=True)
    ]
    more = [_explained(c) for _, c in choices]
    return Series(name, points, joined=False, tips=tips, more=more, large=True)


def _explained(choice: Choice) -> str:
    """Explain a simulated layout's time and memory."""
    shares = (
        (name, time / choice.step) for name, time in choice.parts.items()
    )
    parts = (f"{name} {share:.1%}" for name, share in shares if share > 5e-4)
    held = (
        f"{kind} {bytes_text(size)}"
        for kind, size in choice.memory.items()
        if size
    )
    return f"A step of {seconds_text(choice.step)}: {', '.join(parts)}.\nMemory: {', '.join(held)}."


def _thinned(
    rate: _Array, held: _Array, shown: NDArray[np.bool_]
) -> list[int]:
    """Return the fastest point in each cell of a grid; the eye cannot separate points
    of one cell."""
    # The fastest first, so that `unique` keeps it for its cell.
    order = np.flatnonzero(shown)
    order = order[np.argsort(-rate[order], kind="stable")]
    # Cells of equal width in logarithms, as the axes are.
    cells = np.stack(
        [np.floor(_CELLS / 2 * np.log2(x[order])) for x in (rate, held)],
        axis=1,
    )
    _, first = np.unique(cells, axis=0, return_index=True)
    return [int(i) for i in order[first]]


def _frontier(rate: _Array, held: _Array) -> Points:
    """Return the frontier, fastest first: each point needs less memory than all faster
    ones."""
    found: Points = []
    least = math.inf
    # Fastest first, and of equally fast ones the smallest.
    for i in np.lexsort((held, -rate)):
        if held[i] < least:
            least = float(held[i])
            found.append((float(rate[i]), least))
    return found


def _table(request: Request, plan: Plan) -> str:
    rows = []
    for choice in plan.layouts:
        found = utilization(request, choice)
        rates = (
            f"{found.tokens:,.0f}",
            f"{found.mfu:.1%}",
            f"{choice.bytes / 1e9:.1f} GB",
        )
        rows.append(
            (tag("code", choice.layout), seconds_text(choice.step), *rates)
        )
    return table(
        ("layout", "step", "tokens/s a device", "MFU", "memory"), rows
    )
