"""Candidates as columns: one array for each choice, so that thousands are estimated at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ..layout import Layout, Shape
from ..layout.choices import SCHEDULES as CHUNKS
from .hardware import Numbers
from .pipes import blocks_of, on_ranks

__all__ = ["SCHEDULES", "Case", "Columns", "case_of", "columns_of"]

# A column holds a schedule's number among these names.
SCHEDULES = tuple(CHUNKS)


@dataclass(frozen=True)
class Case:
    """One way to train: a shape, a layout, rows of a microbatch, tokens of a sequence."""

    shape: Shape
    layout: Layout
    rows: float
    sequence: int
    first: float = 0.0  # blocks of the first and the last stage; 0: as even as can be
    last: float = 0.0
    dtype: str = ""  # of products; "": the layout's

    @property
    def tokens(self) -> float:
        """Of one step."""
        x = self.layout
        return self.rows * x.microbatches * x.dp * self.sequence


@dataclass(frozen=True)
class Columns:
    """Every choice as an array; `key` says which costed and priced pieces a candidate uses."""

    key: Numbers
    layers: Numbers
    tied: NDArray[np.bool_]
    pp: Numbers
    chunks: Numbers
    schedule: Numbers
    microbatches: Numbers
    replicas: Numbers  # of shards, or of whole weights
    shards: Numbers  # dp.shard x cp
    shard_apart: Numbers
    replica_apart: Numbers
    pp_apart: Numbers
    zero: Numbers
    gather_micro: NDArray[np.bool_]
    reduce_micro: NDArray[np.bool_]
    again: Numbers  # 1: what a block computed is computed again, whole or in part
    whole: NDArray[np.bool_]  # whole: only inputs are kept
    segment: Numbers  # blocks that are restored together
    most: Numbers  # blocks of the fullest stage, of the first and of the last
    first: Numbers
    last: Numbers
    offload_optimizer: NDArray[np.bool_]

    def take(self, rows: NDArray[np.intp] | NDArray[np.bool_]) -> Columns:
        return Columns(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.key)


def case_of(shape: Shape, layout: Layout, *, batch: int = 0, sequence: int = 0) -> Case:
    """A layout as our own engine runs it: its microbatches, and its stages as it cuts them."""
    rows = -(-(batch or shape.batch) // layout.dp) / layout.microbatches
    sequence = sequence or shape.sequence
    if layout.pp == 1:
        return Case(shape, layout, rows, sequence)
    held = on_ranks(blocks_of(layout, shape), layout.pp, layout.schedule)
    return Case(shape, layout, rows, sequence, float(held[0]), float(held[-1]))


def columns_of(cases: Sequence[Case], keys: Iterable[int]) -> Columns:
    """Columns of cases that are at hand one by one."""
    rows = [_row(case, key) for case, key in zip(cases, keys, strict=True)]
    return Columns(
        **{
            f.name: np.array([row[f.name] for row in rows], bool if "bool_" in f.type else float)
            for f in fields(Columns)
        }
    )


def _row(case: Case, key: int) -> dict[str, float | bool]:
    x = case.layout
    first, last, most = _fullest(case)
    return {
        "key": float(key),
        "layers": float(case.shape.layers),
        "tied": case.shape.tied,
        "pp": float(x.pp),
        "chunks": float(x.chunks),
        "schedule": float(SCHEDULES.index(x.schedule)),
        "microbatches": float(x.microbatches),
        "replicas": float(x.mesh.of("dp.replicate")),
        "shards": float(x.mesh.of("dp.shard") * x.cp),
        "shard_apart": float(_apart(x, "cp" if x.cp > 1 else "dp.shard")),
        "replica_apart": float(_apart(x, "dp.replicate")),
        "pp_apart": float(_apart(x, "pp")),
        "zero": float(x.zero),
        "gather_micro": x.gather == "micro",
        "reduce_micro": x.reduce == "micro",
        "again": float(x.recompute != "none"),
        "whole": x.recompute not in ("none", "selective"),
        "segment": float(_segment(x, most)),
        "most": most,
        "first": first,
        "last": last,
        "offload_optimizer": "optimizer" in x.offload,
    }


def _fullest(case: Case) -> tuple[float, float, float]:
    """Blocks of the first stage, of the last and of the fullest."""
    pp, layers = case.layout.pp, case.shape.layers
    if case.first or case.last:
        rest = math.ceil((layers - case.first - case.last) / max(1, pp - 2)) if pp > 2 else 0
        return case.first, case.last, float(max(case.first, case.last, rest))
    even = layers / pp
    return even, even, float(-(-layers // pp))


def _segment(x: Layout, blocks: float) -> int:
    """Blocks between two inputs that are kept."""
    if x.recompute == "sqrt":
        return max(1, round(math.sqrt(blocks)))
    return int(x.recompute[6:]) if x.recompute.startswith("every=") else 1


def _apart(x: Layout, part: str) -> int:
    """How far neighbours along a part of the mesh are from each other."""
    stride = 1
    for axis in reversed(x.mesh.axes):
        for name, size in reversed(list(zip(axis.part_names, axis.parts, strict=True))):
            if name == part or axis.name == part:
                return stride
            stride *= size
    return stride
