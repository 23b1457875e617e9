"""Layouts of `exact` that combine every two techniques, of up to 16 ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

from phalanx.layout import Layout, LayoutError
from phalanx.layout.cases import fits_exactly
from phalanx.layout.choices import SCHEDULES
from phalanx.layout.shape import Shape

RANKS = 16
# Each technique as words of a layout. Two of one line exclude each other.
MESHES = {
    "dp": ("dp2", "dp2x2"),
    "cp": ("cp2", "cp2:ulysses", "cp4:2x2"),
    "tp": ("tp2", "tp2 seq", "tp4", "tp4 seq", "tp8", "tp8 seq"),
    "ep": ("ep2",),
}
WORDS = {
    "zero": ("zero1", "zero2", "zero3"),
    "recompute": ("recompute:all", "recompute:selective"),
    "offload": ("offload:activations", "offload:weights"),
}
ORDERS = (
    "accum:2",
    *(
        f"pp2 {name}{kind.least if kind.least > 1 and not kind.v_shape else ''}"
        + ("" if kind.whole_batch else ":2")
        for name, kind in SCHEDULES.items()
        if kind.pipelined
    ),
)
Choice = tuple[str, str]  # the line of a technique, and its words
CHOICES: tuple[Choice, ...] = (
    *((line, words) for line, each in MESHES.items() for words in each),
    *((line, words) for line, each in WORDS.items() for words in each),
    *(("order", words) for words in ORDERS),
)


def layout_of(chosen: tuple[Choice, ...], shape: Shape) -> Layout | None:
    """The layout with these techniques, if there is one of at most 16 ranks."""
    lines = {line for line, _ in chosen}
    if len(lines) < len(chosen):
        return None
    # ZeRO needs ranks that share the weights.
    if "zero" in lines and not lines & {"dp", "cp", "ep"}:
        chosen = (*chosen, ("dp", "dp2"))
    # Replicas of shards need something that is sharded.
    if ("dp", "dp2x2") in chosen and "zero" not in lines:
        chosen = (*chosen, ("zero", "zero1"))
    words = " ".join(words for _, words in sorted(chosen, key=_place))
    try:
        # The parts are as many as the ranks that share them.
        plain = Layout.parse(words)
        layout = replace(plain, reduce="", exact=plain.tp, time_parts=plain.cp)
    except LayoutError:
        return None
    few = layout.ranks <= RANKS
    return layout if few and fits_exactly(layout, shape) else None


def _place(choice: Choice) -> int:
    """The place of a technique's words: meshes have dp first, and then pp."""
    return ["dp", "order", "cp", "tp", "ep", *WORDS].index(choice[0])


@cache
def covering_list(shape: Shape) -> tuple[Layout, ...]:
    """Layouts in which every two techniques meet that any layout can combine."""
    missing = {
        frozenset(pair)
        for pair in combinations(CHOICES, 2)
        if layout_of(pair, shape)
    }
    found: dict[Layout, None] = {}
    while missing:
        first = min(missing, key=lambda pair: sorted(map(CHOICES.index, pair)))
        chosen = _extended(tuple(first), missing, shape)
        missing -= {frozenset(pair) for pair in combinations(chosen, 2)}
        layout = layout_of(chosen, shape)
        assert layout is not None
        found[layout] = None
    return tuple(found)


def piece_of_list(shape: Shape, number: int, pieces: int) -> list[Layout]:
    """One of several pieces of the list, each with layouts that are computed alike.

    Layouts with the same microbatches and parts are compared with the same process.
    """

    def alone(x: Layout) -> tuple[int, ...]:
        return x.exact, x.time_parts, x.data * x.microbatches

    layouts = sorted(covering_list(shape), key=alone)
    size = -(-len(layouts) // pieces)
    return layouts[number * size : (number + 1) * size]


def _extended(
    chosen: tuple[Choice, ...], missing: set[frozenset[Choice]], shape: Shape
) -> tuple[Choice, ...]:
    """Add techniques that meet most of the others for the first time."""

    def gain(choice: Choice) -> int:
        return sum(frozenset((choice, each)) in missing for each in chosen)

    for choice in sorted(CHOICES, key=gain, reverse=True):
        more = (*chosen, choice)
        if gain(choice) and layout_of(more, shape):
            chosen = more
    return chosen
