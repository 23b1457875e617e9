"""Plain rules that pick among layouts that somebody has tried: what a planner has to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .table import PublishedRow


def _data_parallel(row: PublishedRow) -> Any:
    """The most data parallel, recomputed, the biggest microbatch."""
    case = row.case
    assert case is not None
    x = case.layout
    return (-x.dp, x.recompute == "none", -x.zero, -case.rows)


def _smallest(row: PublishedRow) -> Any:
    """The smallest tp and pp that ran, the biggest microbatch. Knowing what ran is a gift to it."""
    case = row.case
    assert case is not None
    x = case.layout
    return (row.out_of_memory, x.tp * x.pp, x.tp, -case.rows)


def _recipe(row: PublishedRow) -> Any:
    """Large models sharded and recomputed, small ones plain; tensor parallel inside a node."""
    case = row.case
    assert case is not None
    x = case.layout
    large = case.shape.total > 1e9
    wanted = 1 if case.shape.total < 50e9 and row.ranks <= 1000 else 8
    return (
        abs(x.tp - wanted),
        x.pp,
        -x.zero if large else x.zero,
        (x.recompute == "none") == large,
        -case.rows,
    )


RULES: dict[str, Callable[[PublishedRow], Any]] = {
    "data parallel": _data_parallel,
    "smallest tp pp": _smallest,
    "recipe": _recipe,
}
