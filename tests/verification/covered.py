"""The layouts that several tests compare, chosen once in a process."""

from __future__ import annotations

from functools import cache
from itertools import cycle

from phalanx.layout import Layout, legal
from phalanx.verification import SHAPES, covering, every_layout


@cache
def covered(name: str, ranks: int) -> tuple[Layout, ...]:
    """Layouts of a shape on up to so many ranks that have every two choices which occur together."""
    return covering(every_layout(SHAPES[name], ranks), 1)


@cache
def shared_out(
    names: tuple[str, ...], sizes: tuple[int, ...]
) -> dict[str, tuple[Layout, ...]]:
    """Layouts of these numbers of ranks that have every two choices of the first shape.

    Each of them is given to one of the shapes in turn, if it fits that shape, or else to
    the first one.
    """
    first = names[0]
    every = every_layout(SHAPES[first], max(sizes))
    layouts = covering(tuple(x for x in every if x.ranks in sizes), 1)
    shares: dict[str, list[Layout]] = {name: [] for name in names}
    for layout, name in zip(layouts, cycle(names), strict=False):
        fits = not legal(layout, SHAPES[name])
        shares[name if fits else first].append(layout)
    return {name: tuple(share) for name, share in shares.items()}
