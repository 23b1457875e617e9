"""A plan as one HTML page: memory over throughput of all candidates, the frontier, the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from ..bench.chart import Axis, Series, chart
from ..plan.rivals import Rival
from ..plan.search import Plan
from ..plan.site import Numbers
from .plan_figures import Asked, rates
from .plan_tell import seconds
from .usage import UsageError

__all__ = ["write_page"]

Points = tuple[tuple[float, float], ...]
_CELLS = 24.0  # of a doubling: of the candidates in one cell of so fine a grid one is drawn
_STYLE = """\
body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;
background:#fff;color:#1a1a1a}
svg{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .6rem;text-align:right;border-bottom:1px solid #ddd}
td:last-child,th:last-child{text-align:left}
code{font-size:.92em}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}
td,th{border-color:#3a3d44}}"""


def write_page(path: str, asked: Asked, plan: Plan, beside: Sequence[Rival]) -> None:
    """One file, with no request to anywhere."""
    if Path(path).suffix != ".html":
        raise UsageError(f"--page {path}: a page ends in .html.")
    try:
        Path(path).write_text(page(asked, plan, beside), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from None


def page(asked: Asked, plan: Plan, beside: Sequence[Rival]) -> str:
    """The page's text."""
    name = asked.own or asked.shape.name
    title = f"{name} on {asked.site.name}"
    said = (
        f"{asked.batch:,} sequences of {asked.sequence:,} tokens a step, {asked.precision}."
        f" {plan.considered:,} layouts, {plan.fitting:,} of which fit in"
        f" {plan.room / 1e9:.1f} GB a device."
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}: a plan</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(said)}</p>\n"
        f"{_picture(asked, plan, beside)}\n{_table(asked, plan)}\n</body></html>\n"
    )


def _picture(asked: Asked, plan: Plan, beside: Sequence[Rival]) -> str:
    """What fits and what does not, the frontier, the best and the rules' picks."""
    steps, held = plan.points
    rate = asked.tokens / asked.site.ranks / steps
    near = held < 4 * asked.site.memory
    fits = held <= plan.room
    series = [
        _scatter("does not fit", _thinned(rate[near & ~fits], held[near & ~fits] / 1e9)),
        _scatter("fits", _thinned(rate[fits], held[fits] / 1e9)),
        Series("frontier", (), _frontier(rate[fits], held[fits] / 1e9)),
        _scatter(
            "plain rules",
            tuple(
                (rates(asked, rival.choice).tokens, rival.choice.bytes / 1e9)
                for rival in beside
                if rival.choice
            ),
        ),
        _scatter(
            "the best",
            tuple((rates(asked, c).tokens, c.bytes / 1e9) for c in plan.layouts),
        ),
    ]
    shown = [s for s in series if s.points or s.line]
    return chart(
        "memory over throughput",
        shown,
        Axis("tokens a second and device", lambda x: f"{x:,.0f}", base=2),
        Axis("memory of the fullest device", lambda y: f"{y:.3g} GB", base=2),
        [
            f"Up to {len(series[1].points):,} of {plan.fitting:,} that fit are drawn. The frontier:"
            " no other is both faster and smaller.",
        ],
    )


def _scatter(name: str, points: Points) -> Series:
    """Points that no line joins: the chart draws the (empty) line of a series in its stead."""
    return Series(name, points, points[:1] * 2)


def _thinned(rate: Numbers, held: Numbers) -> Points:
    """One of the points in each cell of a grid, as an eye cannot part them."""
    if not len(rate):
        return ()
    cells = np.stack([np.floor(_CELLS / 2 * np.log2(x)) for x in (rate, held)], axis=1)
    _, first = np.unique(cells, axis=0, return_index=True)
    return tuple((float(rate[i]), float(held[i])) for i in first)


def _frontier(rate: Numbers, held: Numbers) -> Points:
    """From the fastest on: each next one that holds less than all before."""
    found: list[tuple[float, float]] = []
    least = math.inf
    for i in np.lexsort((held, -rate)):
        if held[i] < least:
            least = float(held[i])
            found.append((float(rate[i]), least))
    return tuple(found)


def _table(asked: Asked, plan: Plan) -> str:
    rows = []
    for choice in plan.layouts:
        found = rates(asked, choice)
        cells = (
            seconds(choice.step), f"{found.tokens:,.0f}", f"{found.mfu:.1%}",
            f"{choice.bytes / 1e9:.1f} GB", f"<code>{escape(str(choice.layout))}</code>",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ("step", "tokens/s a device", "MFU", "memory", "layout")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
