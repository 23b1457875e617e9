"""The layouts that several tests compare, chosen once in a process."""

from __future__ import annotations

from functools import cache

from phalanx.layout import Layout
from phalanx.verify import SHAPES, covering, every_layout


@cache
def covered(name: str, ranks: int) -> tuple[Layout, ...]:
    """Layouts of a shape on up to so many ranks that have every two choices which occur together."""
    return covering(every_layout(SHAPES[name], ranks), 1)
