"""The pipelines of a model: schedules with their chunks, and the blocks of each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout import Axis, Layout, Mesh, Shape, stage_pieces

__all__ = ["Pipe", "blocks_of", "on_ranks", "pipes", "spread"]

_MOST_CHUNKS = 16


class Pipe(NamedTuple):
    schedule: str
    chunks: int
    stages: tuple[int, ...]  # blocks of each virtual stage, when they are to be said
    first: float
    last: float


@lru_cache(maxsize=512)
def pipes(shape: Shape, pp: int) -> tuple[Pipe, ...]:
    """Schedules with their chunks, and blocks balanced with embedding and head or left even."""
    if pp == 1:
        return (Pipe("accum", 1, (), 0.0, 0.0),)
    found = []
    for schedule, chunks in _schedules(shape.layers, pp):
        plain = Layout(mesh=Mesh((Axis("pp", (pp,)),)), schedule=schedule, chunks=chunks)
        balanced = blocks_of(plain, shape)
        even = spread(shape.layers, pp * chunks)
        for stages, said in ((balanced, ()), *(((even, even),) if even != balanced else ())):
            held = on_ranks(stages, pp, schedule)
            found.append(Pipe(schedule, chunks, said, float(held[0]), float(held[-1])))
    return tuple(found)


def _schedules(layers: int, pp: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    yield "zb-h1", 1
    if 2 * pp <= layers:
        yield "zb-v", 2
    for chunks in range(2, min(_MOST_CHUNKS, layers // pp) + 1):
        whole = layers % (pp * chunks) == 0 or (layers + 2) % (pp * chunks) == 0
        if whole or chunks & (chunks - 1) == 0:
            yield "interleaved", chunks


def blocks_of(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """Blocks of each virtual stage, as the layout tells or balances them."""
    return tuple(
        len([p for p in stage if 0 < p <= shape.layers]) for stage in stage_pieces(layout, shape)
    )


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks as even as can be; where some stages hold one more, these are in the middle."""
    least, more = divmod(layers, stages)
    begin = (stages - more) // 2
    return tuple(least + (begin <= i < begin + more) for i in range(stages))


def on_ranks(stages: Sequence[int], pp: int, schedule: str) -> tuple[int, ...]:
    """Blocks of each rank of a pipeline. Head and embedding are on its last and its first rank; in
    a V both are on the first."""
    if schedule != "zb-v":
        return tuple(sum(stages[r::pp]) for r in range(pp))
    return tuple(stages[r] + stages[2 * pp - 1 - r] for r in range(pp))
