"""Every layout of so many ranks as columns: meshes, ZeRO, microbatches, pipelines, recomputation.

No `Layout` is made until one is asked for. What is left out cannot win, by what is priced here:
tensor parallel beyond the fastest links (where these join 8 devices or more), GPipe and naive
sharding (1F1B has the bubble of the first and holds less), ZeRO-2 in a pipeline (it sums after every
microbatch, where ZeRO-3 holds less still), and microbatches whose blocks alone are larger than the
memory. Fewer microbatches than half the stages are tried only where the batch has no more of them: a
larger microbatch cannot win back a pipeline that is empty most of the time. Parts of a sequence
shorter than 2,048 tokens are tried only where the batch has too few sequences for data parallel:
they divide work that whole sequences divide without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..layout import Axis, Layout, Mesh, Shape
from .columns import SCHEDULES, Case, Columns
from .hardware import Hardware, Network
from .pipes import Pipe, pipes

__all__ = ["ORDERS", "Candidates", "Cut", "Grid", "Space", "candidates"]

ORDERS = ("dp pp cp tp", "pp dp cp tp")  # which neighbours are near: axes, outermost first
_SHARDS = (8, 64)  # HSDP's groups, besides those that fill a level of the network
_PART = 2048  # tokens of a sequence's part that are worth a message


class Cut(NamedTuple):
    """What of a layout a piece can feel."""

    tp: int
    ring: int
    ulysses: int
    seq: bool
    selective: bool
    split: bool  # backward in two operations

    @classmethod
    def of(cls, layout: Layout) -> Cut:
        """What a piece feels of a layout."""
        return cls(
            layout.tp, layout.mesh.of("cp.ring"), layout.mesh.of("cp.ulysses"), layout.seq,
            layout.recompute == "selective", layout.splits_backward,
        )  # fmt: skip

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def base(self) -> Cut:
        """The cut that tells about this one before it is costed."""
        return Cut(self.tp, 1, 1, self.seq, False, False)

    def layout(self, precision: str) -> Layout:
        """As the key under which it is costed."""
        axes = (Axis("cp", (self.ring, self.ulysses)), Axis("tp", (self.tp,)))
        return Layout(
            mesh=Mesh(axes),
            seq=self.seq,
            schedule="zb-h1" if self.split else "accum",
            microbatches=1,
            recompute="selective" if self.selective else "none",
            precision=precision,
        )


@dataclass(frozen=True)
class Space:
    """What is searched."""

    shape: Shape
    hardware: Hardware
    sequence: int
    batch: int
    precision: str = "bf16"
    recomputes: tuple[str, ...] = ("none", "selective", "all")
    offload: tuple[str, ...] = ()
    seq_only: frozenset[int] = frozenset()  # sizes of tensor parallel that are never faster without

    @property
    def tensor(self) -> list[int]:
        """Sizes of tensor parallel that the model and the place allow."""
        fast = max(self.hardware.node, 8)
        return [d for d in _divisors(self.hardware.ranks) if d <= fast and _splits(self.shape, d)]

    @property
    def least(self) -> float:
        """The shortest microbatch that is tried, in sequences: a part of one."""
        return min(1.0, _PART / self.sequence)


class Grid(NamedTuple):
    """Sizes of a mesh and the order of its axes."""

    dp: int
    pp: int
    ring: int
    ulysses: int
    tp: int
    order: str

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    def mesh(self, shards: int) -> Mesh:
        parts = {
            "dp": (self.dp // shards, shards),
            "pp": (self.pp,),
            "cp": (self.ring, self.ulysses),
            "tp": (self.tp,),
        }
        return Mesh(tuple(Axis(name, parts[name]) for name in self.order.split()))

    def apart(self, name: str) -> int:
        """How far neighbours along an axis are from each other."""
        sizes = {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        inner = self.order.split()[self.order.split().index(name) + 1 :]
        return math.prod(sizes[axis] for axis in inner)


class _Zero(NamedTuple):
    stage: int
    shards: int  # of dp
    gather: str


class _Inner(NamedTuple):
    seq: bool
    recompute: str


@dataclass(frozen=True)
class _Options:
    """The choices that one grid has."""

    grid: Grid
    zeros: tuple[_Zero, ...]
    counts: tuple[int, ...]  # microbatches
    pipes: tuple[Pipe, ...]
    inners: tuple[_Inner, ...]


@dataclass(frozen=True)
class Candidates:
    """All of them: columns for `estimate`, and what each one is."""

    space: Space
    columns: Columns
    options: tuple[_Options, ...]
    keys: tuple[tuple[Cut, float], ...]  # what columns.key numbers: a cut and rows
    at: NDArray[np.int32]  # (candidates, 5): options, zero, count, pipe, inner

    def __len__(self) -> int:
        return len(self.at)

    def layout(self, i: int) -> Layout:
        """The layout of one candidate."""
        o, z, c, p, q = map(int, self.at[i])
        options = self.options[o]
        zero, pipe, inner = options.zeros[z], options.pipes[p], options.inners[q]
        return Layout(
            mesh=options.grid.mesh(zero.shards), seq=inner.seq, zero=zero.stage,
            schedule=pipe.schedule, chunks=pipe.chunks, microbatches=options.counts[c],
            gather=zero.gather, recompute=inner.recompute, offload=self.space.offload,
            stages=pipe.stages, precision=self.space.precision,
        )  # fmt: skip

    def idea(self, i: int) -> tuple[object, ...]:
        """What tells one candidate from another, but how its axes are ordered, dp split into
        replicas and shards, and blocks given to stages."""
        o, z, c, p, q = map(int, self.at[i])
        x = self.options[o]
        grid, pipe = x.grid._replace(order=""), x.pipes[p]
        zero = x.zeros[z]._replace(shards=0)
        return grid, zero, x.counts[c], pipe.schedule, pipe.chunks, x.inners[q]

    def case(self, i: int) -> Case:
        """One candidate as whatever else is estimated."""
        options = self.options[self.at[i, 0]]
        pipe = options.pipes[self.at[i, 3]]
        rows = _rows(self.space.batch, options.grid.dp, options.counts[self.at[i, 2]])
        first, last = pipe.first, pipe.last
        return Case(self.space.shape, self.layout(i), rows, self.space.sequence, first, last)


def candidates(space: Space) -> Candidates:
    """Every candidate of a space."""
    options = tuple(_all_options(space))
    keys: dict[tuple[Cut, float], int] = {}
    parts = [_columns(space, number, each, keys) for number, each in enumerate(options)]
    if not parts:
        raise ValueError("a space without candidates")  # one rank alone is always one
    names = list(parts[0][0])
    joined = {name: np.concatenate([part[0][name] for part in parts]) for name in names}
    at = np.concatenate([part[1] for part in parts])
    return Candidates(space, Columns(**joined), options, tuple(keys), at)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _rows(batch: int, dp: int, count: int) -> float:
    """Sequences of a microbatch on the fullest rank."""
    return -(-batch // dp) / count


def _grids(space: Space) -> Iterator[Grid]:
    s, ranks = space.shape, space.hardware.ranks
    fast = max(space.hardware.node, 8)
    for tp in space.tensor:
        for pp in _divisors(ranks // tp):
            if pp > s.layers:
                break
            for cp in _divisors(ranks // tp // pp):
                dp = ranks // (tp * pp * cp)
                if dp > space.batch or (cp > 1 and not _parts(space, dp * cp, cp)):
                    continue
                for ulysses in _ulysses(cp, s.heads // tp, fast // tp):
                    for order in ORDERS[: 2 if pp > 1 and dp > 1 else 1]:
                        yield Grid(dp, pp, cp // ulysses, ulysses, tp, order)


def _parts(space: Space, copies: int, cp: int) -> bool:
    """Whether a sequence is cut in so many parts: they are long, or there are too few sequences."""
    if space.shape.kind != "decoder" or space.sequence < 2 * cp:
        return False
    return cp * _PART <= space.sequence or cp * space.batch <= 2 * copies


def _ulysses(cp: int, heads: int, near: int) -> list[int]:
    """None of it, or as much as the heads and the fastest links allow; a ring for the rest."""
    return sorted({1, max(u for u in _divisors(cp) if u == 1 or (heads % u == 0 and u <= near))})


def _splits(s: Shape, tp: int) -> bool:
    """Whether the model's weights can be cut so, by the rules of `legal`."""
    if s.kind == "mlp":
        return s.hidden % tp == 0
    return s.heads % tp == 0 and s.ffn % tp == 0 and (s.kv_heads % tp == 0 or tp % s.kv_heads == 0)


def _all_options(space: Space) -> Iterator[_Options]:
    for grid in _grids(space):
        counts = tuple(_counts(space, grid))
        if counts:
            yield _Options(
                grid,
                tuple(_zeros(space, grid, max(counts))),
                counts,
                pipes(space.shape, grid.pp),
                tuple(_inners(space, grid)),
            )


def _counts(space: Space, grid: Grid) -> Iterator[int]:
    """Microbatches of one sequence, of two, four ..., and the batch of a rank as one."""
    s, most = space.shape, -(-space.batch // grid.dp)
    # What a block makes between its two largest products has to be somewhere.
    one = 2.0 * space.sequence / grid.cp * (s.ffn if s.kind == "decoder" else s.hidden) / grid.tp
    found: set[int] = set()
    for rows in sorted({*(2**i for i in range(most.bit_length())), most}):
        count = min(-(-most // rows), space.batch // grid.dp)
        if found and 2 * count < grid.pp:
            return
        if _rows(space.batch, grid.dp, count) * one <= space.hardware.memory and count not in found:
            found.add(count)
            yield count


def _zeros(space: Space, grid: Grid, count: int) -> Iterator[_Zero]:
    yield _Zero(0, grid.dp, "step")
    if grid.dp * grid.cp == 1:
        return
    apart = grid.apart("dp")
    levels = (
        [h.inside for h in space.hardware.network.hops]
        if isinstance(space.hardware.network, Network)
        else []
    )
    ends = {
        max(d for d in _divisors(grid.dp) if d == 1 or d * apart <= inside) for inside in levels
    }
    shards = {d for d in (*ends, *_SHARDS) if d < grid.dp and grid.dp % d == 0 and d * grid.cp > 1}
    for shard in (grid.dp, *sorted(shards, reverse=True)):
        yield _Zero(1, shard, "step")
        if grid.pp == 1:
            yield _Zero(2, shard, "step")
        yield _Zero(3, shard, "micro")
        if grid.pp > 1 or count > 1:
            yield _Zero(3, shard, "step")


def _inners(space: Space, grid: Grid) -> Iterator[_Inner]:
    seqs = (True, False) if grid.tp > 1 and space.shape.kind == "decoder" else (False,)
    seqs = seqs[:1] if grid.tp in space.seq_only else seqs
    for seq, recompute in product(seqs, space.recomputes):
        yield _Inner(seq, recompute)


def _columns(
    space: Space, number: int, x: _Options, keys: dict[tuple[Cut, float], int]
) -> tuple[dict[str, NDArray[np.generic]], NDArray[np.int32]]:
    """The product of a grid's choices."""
    sizes = (len(x.zeros), len(x.counts), len(x.pipes), len(x.inners))
    z, c, p, q = (axis.reshape(-1) for axis in np.indices(sizes, np.int32))
    at = np.stack([np.full_like(z, number), z, c, p, q], axis=1)
    zeros, pipes = _zero_columns(x), _pipe_columns(space.shape, x)
    split = np.array([pipe.schedule.startswith("zb") for pipe in x.pipes], int)
    key = np.array(
        [
            [[keys.setdefault(_key(space, x, n, s, inner), len(keys)) for inner in x.inners]
             for s in range(2 if split.any() else 1)]
            for n in x.counts
        ]
    )  # fmt: skip
    grid, ranks = x.grid, space.hardware.ranks
    one = np.ones(len(z))
    segment = [float(i.recompute[6:]) if i.recompute.startswith("every") else 1.0 for i in x.inners]
    found: dict[str, NDArray[np.generic]] = {
        "key": key[c, split[p], q].astype(float),
        "layers": one * space.shape.layers,
        "tied": np.full(len(z), space.shape.tied),
        "pp": one * grid.pp,
        "pp_apart": one * (grid.apart("pp") if grid.pp > 1 else ranks),
        "microbatches": np.array(x.counts, float)[c],
        "again": np.array([float(i.recompute != "none") for i in x.inners])[q],
        "whole": np.array([i.recompute not in ("none", "selective") for i in x.inners])[q],
        "segment": np.array(segment)[q],
        "offload_optimizer": np.full(len(z), "optimizer" in space.offload),
    }
    found |= {name: column[z] for name, column in zeros.items()}
    found |= {name: column[p] for name, column in pipes.items()}
    return found, at


def _key(space: Space, x: _Options, count: int, split: int, inner: _Inner) -> tuple[Cut, float]:
    g = x.grid
    cut = Cut(g.tp, g.ring, g.ulysses, inner.seq, inner.recompute == "selective", bool(split))
    return cut, _rows(space.batch, g.dp, count)


def _zero_columns(x: _Options) -> dict[str, NDArray[np.generic]]:
    g = x.grid
    ranks = g.dp * g.pp * g.cp * g.tp
    near = g.apart("dp") if g.dp > 1 else ranks
    shard = [float(z.shards) for z in x.zeros]
    return {
        "replicas": np.array([g.dp / s for s in shard]),
        "shards": np.array([s * g.cp for s in shard]),
        "shard_apart": np.array([float(g.tp if g.cp > 1 else near) for _ in shard]),
        "replica_apart": np.array([float(near * s if g.dp > 1 else ranks) for s in shard]),
        "zero": np.array([float(z.stage) for z in x.zeros]),
        "gather_micro": np.array([z.gather == "micro" for z in x.zeros]),
        "reduce_micro": np.array([z.stage >= 2 for z in x.zeros]),
    }


def _pipe_columns(shape: Shape, x: _Options) -> dict[str, NDArray[np.generic]]:
    pp, layers = x.grid.pp, shape.layers
    first = np.array([pipe.first or layers / pp for pipe in x.pipes])
    last = np.array([pipe.last or layers / pp for pipe in x.pipes])
    rest = np.ceil((layers - first - last) / max(1, pp - 2)) if pp > 2 else np.zeros_like(first)
    most = np.maximum(np.maximum(first, last), rest)
    return {
        "chunks": np.array([float(pipe.chunks) for pipe in x.pipes]),
        "schedule": np.array([float(SCHEDULES.index(pipe.schedule)) for pipe in x.pipes]),
        "first": first,
        "last": last,
        "most": most,
    }
