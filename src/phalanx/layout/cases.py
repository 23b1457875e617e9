"""Layouts to compare by default: small shapes with awkward traits, legal layouts."""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Any

from .choices import ACCUM, FP32, FP64, SCHEDULES
from .codec import decode
from .exact import exact_batch
from .layout import Layout
from .legal import legal
from .mesh import Axis, LayoutError, Mesh
from .shape import Shape, ShapeError
from .violation import divisors

AXES = ("dp", "pp", "cp", "tp", "ep")
_WORDS = """; recompute:selective; offload:activations; gather:step; offload:weights; recompute:sqrt;
    reduce:micro; prefetch:0; offload:optimizer,activations prefetch:3; gather:micro; reduce:step"""
# One more option for a layout, in turn; the first one adds nothing.
_BESIDES = [Layout.written(words) for words in _WORDS.split(";")]
_DATA = tomllib.loads(
    Path(__file__).with_name("cases.toml").read_text(encoding="utf-8")
)
_SIZES: dict[str, Any] = {
    name: _DATA["small"] | more for name, more in _DATA["shapes"].items()
}
SHAPES = {
    name: decode(Shape, {"name": name, **sizes}, name, ShapeError)
    for name, sizes in (_SIZES | {"mlp": _DATA["mlp"]}).items()
}
# These exceed thresholds of the code that the others do not reach.
LARGER = {
    name: decode(
        Shape, {"name": name, **_DATA["least"], **more}, name, ShapeError
    )
    for name, more in _DATA["larger"].items()
}


def every_layout(
    shape: Shape,
    ranks: int,
    *,
    axes: str = " ".join(AXES),
    besides: bool = False,
) -> tuple[Layout, ...]:
    """All legal layouts of up to `ranks` ranks over these axes, and ep for experts.

    With `besides`, each has one more option, in turn, if that is legal: the same number
    of layouts, in which every option occurs with every choice.
    """
    # Without routed MLPs ep has nothing to share, and every size of it would be
    # illegal.
    free = set(axes.split()) - ({"ep"} if not shape.routed.count else set())
    plain = tuple(
        x
        for x in dict.fromkeys(_all(shape, ranks, free))
        if not legal(x, shape)
    )
    # Options go round independently of layouts, so each meets every kind of
    # choice.
    turns: Any = zip(plain, cycle(_BESIDES if besides else [{}]), strict=False)
    each = [(x, replace(x, **option)) for x, option in turns]
    # Where the additional option is illegal, the plain layout stays.
    return tuple(dict.fromkeys(x if legal(y, shape) else y for x, y in each))


def exact_layouts(
    shape: Shape, ranks: int, parts: int = 1
) -> tuple[Layout, ...]:
    """Legal layouts of `exact` of up to `ranks` ranks; each has one more option, in turn.

    Each rank has one or four microbatches. With more than one part, all have tp and
    products in so many parts.
    """
    plain: dict[Layout, None] = {}
    axes = {"dp", "pp", "tp"} if parts > 1 else {"dp", "pp"}
    axes |= {"ep"} if shape.routed.count else set()
    for x in _all(shape, ranks, axes):
        if (x.tp > 1) != (parts > 1) or parts % x.tp:
            continue
        few = 1 if x.microbatches == 1 else 4
        exact = replace(
            x, precision=FP32, microbatches=few, reduce="", exact=parts
        )
        if fits_exactly(exact, shape):
            plain[exact] = None
    turns: Any = zip(plain, cycle(_BESIDES), strict=False)
    found: dict[Layout, None] = {}
    for x, option in turns:
        with suppress(LayoutError):
            y = replace(x, **option)
            x = y if fits_exactly(y, shape) else x
        found[x] = None
    return tuple(found)


def fits_exactly(layout: Layout, shape: Shape) -> bool:
    """True if a layout is legal for a batch with two rows in each microbatch."""
    return not legal(layout, shape, batch=exact_batch(layout))


def _all(shape: Shape, ranks: int, axes: set[str]) -> Iterator[Layout]:
    recomputes = ("none", "all", "every=2") if "pp" in axes else ("none",)
    for dp, pp, cp, tp, ep in _grids(ranks, [name in axes for name in AXES]):
        for inner, ulysses in product(divisors(dp), divisors(cp)):
            mesh = Mesh((
                Axis("dp", (dp // inner, inner)), Axis("pp", (pp,)),
                Axis("cp", (cp // ulysses, ulysses)), Axis("tp", (tp,)), Axis("ep", (ep,)),
            ))  # fmt: skip
            # Replicas of one shard each shard nothing.
            if inner == 1 and dp > 1:
                continue
            for zero, seq, order, recompute, overlap in product(
                range(4),
                (False, True),
                _orders(pp),
                recomputes,
                # Overlap needs another rank of ep: a slice of one entry
                # without it.
                (False, True)[:ep],
            ):
                x = Layout(mesh, seq, zero, *order, precision=FP64)
                yield replace(x, recompute=recompute, overlap=overlap)


def _grids(ranks: int, free: list[bool]) -> Iterator[tuple[int, ...]]:
    """Axis sizes with a product up to `ranks`; an axis that is not free has size 1."""
    if not free:
        yield ()
        return
    # Sizes of the first axis; the rest of the ranks is left to the others.
    for size in range(1, ranks + 1) if free[0] else (1,):
        for others in _grids(ranks // size, free[1:]):
            yield size, *others


def _orders(pp: int) -> list[tuple[str, int, int]]:
    """(schedule, chunks, microbatches); no number of stages here divides 3."""
    if pp == 1:
        return [(ACCUM, 1, 1), (ACCUM, 1, 3)]
    kinds = [
        (name, kind) for name, kind in SCHEDULES.items() if kind.pipelined
    ]
    return [
        (name, kind.least, 1 if kind.whole_batch else 3)
        for name, kind in kinds
    ]


def _features(x: Layout) -> dict[str, object]:
    return {
        "dp": x.dp, "shard": x.mesh.of("dp.shard"), "pp": x.pp, "ring": x.mesh.of("cp.ring"),
        "ulysses": x.mesh.of("cp.ulysses"), "tp": x.tp, "ep": x.ep, "seq": x.seq, "zero": x.zero,
        "experts": x.experts, "overlap": x.overlap, "order": (x.schedule, x.chunks, x.microbatches),
        "recompute": x.recompute, "offload": x.offload, "gather": x.gather, "reduce": x.reduce,
        "prefetch": x.prefetch,
    }  # fmt: skip


def covering(layouts: tuple[Layout, ...], least: int) -> tuple[Layout, ...]:
    """At least `least` layouts that still combine every two choices that co-occur.

    It is filled up evenly.
    """
    # Pairs are numbered as they occur, so a set of pairs is an integer, and a
    # union is `|`.
    bits: dict[object, int] = {}  # a bit for each pair of choices
    pairs = {
        x: sum(
            1 << bits.setdefault(p, len(bits))
            for p in combinations(_features(x).items(), 2)
        )
        for x in layouts
    }
    missing = (1 << len(bits)) - 1
    chosen: dict[Layout, None] = {}
    # A greedy set cover: the layout with the most pairs that no chosen one has
    # yet.
    while missing:
        best = max(layouts, key=lambda x: (pairs[x] & missing).bit_count())
        chosen[best] = None
        missing &= ~pairs[best]
    # Then layouts at even distances in the list.
    step = max(1, len(layouts) // max(1, least))
    for x in layouts[::step]:
        if len(chosen) >= least:
            break
        chosen[x] = None
    return tuple(chosen)
