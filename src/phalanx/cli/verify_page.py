"""Verdicts of `phalanx verify` as a matrix of combined features, and as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..drawing import (
    Html,
    MatrixCell,
    figure,
    frame,
    matrix_svg,
    paragraphs,
    table,
    tag,
)
from ..layout.choices import PRECISIONS

if TYPE_CHECKING:
    from ..verification import Verdict

_GOOD, _NEAR, _BAD = "#8fd3b6", "#f0d080", "#e8896b"
_COLOURS = (
    (_GOOD, "agree"),
    (_NEAR, "agree, by less than a factor of 10"),
    (_BAD, "some differ"),
)


def features(layout: str) -> tuple[str, ...]:
    """Return a layout's features without sizes and dtypes: axes, ZeRO stage, schedule,
    other words."""
    kept = (word for word in layout.split() if word not in PRECISIONS)
    words = (
        # "dp2x2" -> "dp", "cp4:2x2" -> "cp".
        re.sub(r"^(dp|pp|cp|tp|ep)[0-9x]+(:[0-9x]+)?", r"\1", word)
        for word in kept
    )
    return tuple(
        # "1f1b:4" -> "1f1b": numbers of microbatches are no features.
        dict.fromkeys(re.sub(r":[0-9]+$", "", word) for word in words)
    ) or ("one rank",)


def verified_svg(
    title: str, verdicts: Sequence[Verdict], width: float
) -> Html:
    """Draw a cell for every two features that some layout combines; the diagonal counts
    single features."""
    having = [
        (set(features(v.layout)), v) for v in verdicts if not v.cannot_fit
    ]
    order = ["dp", "pp", "cp", "tp", "ep"]
    # Axes first, in the order of a mesh, then other words.
    names = sorted(
        {name for has, _ in having for name in has},
        key=lambda name: (
            order.index(name) if name in order else len(order),
            name,
        ),
    )

    def cell(a: str, b: str) -> MatrixCell | None:
        # Layouts that combine both features.
        both = [v for has, v in having if a in has and b in has]
        if not both:
            return None
        worst, failed = (
            max(both, key=lambda v: v.max_rel_error),
            sum(not v.passed for v in both),
        )
        # Above a tenth of the tolerance.
        near = max((v.of_allowed for v in both), default=0.0) > 0.1
        pair = a if a == b else f"{a} with {b}"
        tip = f"{pair}: {len(both)} layouts, {failed} differ; error at most"
        tip += f" {worst.max_rel_error:.1e}, in {worst.layout or 'one rank'}"
        return MatrixCell(
            str(len(both)), _BAD if failed else _NEAR if near else _GOOD, tip
        )

    notes = [
        "The number counts the layouts with both features; an empty pair was not compared."
    ]
    return (
        matrix_svg(title, names, cell, _COLOURS, notes, width)
        if names
        else Html("")
    )


def verified_page(
    title: str, summary: str, verdicts: Sequence[Verdict]
) -> str:
    """Return a page with the matrix, and every layout below it, those that differ
    first."""
    rows = []
    # Differences first, then the largest errors.
    for v in sorted(verdicts, key=lambda v: (v.passed, -v.max_rel_error)):
        word = (
            "cannot fit"
            if v.cannot_fit
            else "agrees"
            if v.passed
            else "differs"
        )
        mark = tag(
            "span",
            word,
            cls="good" if v.passed else "" if v.cannot_fit else "bad",
        )
        error = (
            f"{v.max_rel_error:.1e}" if math.isfinite(v.max_rel_error) else ""
        )
        rows.append(
            (
                tag("code", v.layout or "one rank"),
                v.ranks,
                mark,
                error,
                v.first_difference,
            )
        )
    head = (
        "layout",
        "ranks",
        "",
        "largest relative error",
        "first difference",
    )
    body = (
        figure(partial(verified_svg, title, verdicts)),
        table(head, rows, left=True),
    )
    return frame(title, paragraphs([summary]), *(body if verdicts else ()))
