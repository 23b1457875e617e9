"""Choices of layout for a number of ranks, grid by grid, without those that cannot win.

A `Layout` is created only when it is asked for. By the prices here these cannot win:
- tensor parallelism beyond the fastest links, if these connect 8 devices or more;
- GPipe and naive pipelines: 1F1B has the bubble of GPipe and holds less;
- ZeRO-2 in a pipeline: it sums after every microbatch, and ZeRO-3 holds even less;
- ZeRO-3 that gathers, or gathers and sums, once per step: it takes as long as ZeRO-2
  without a pipeline, or ZeRO-1, and holds as much within 1 %;
- microbatches whose blocks alone exceed the memory;
- fewer microbatches than half the stages, unless the batch has no more: a larger
  microbatch does not make up for a pipeline that is mostly empty;
- parts of a sequence below 2,048 tokens, unless the batch has too few sequences for
  data parallelism: whole sequences divide the same work without a message.

Experts are divided over as many ranks of ep, or of ep and tp, as divide their number,
each rank with whole experts. Only with ep may one microbatch's tokens travel while
another is computed. Experts are never divided over cp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from ..layout import (
    Axis,
    Layout,
    Mesh,
    Shape,
    legal,
    piece_layout,
    stage_pieces,
)
from ..layout.choices import (
    ACCUM,
    CHUNKS,
    COMPILE,
    GPIPE,
    MATMULS,
    SCHEDULES,
    ZB_H1,
    ZB_H2,
    traits,
)
from ..layout.kinds import parts_of_pieces
from .hardware import Network
from .step import Request

# Axes from the outermost to the innermost, whose ranks are nearest.
ORDERS = ("dp pp cp ep tp", "pp dp cp ep tp")
# Sizes of HSDP groups, besides those that fill a network level.
_SHARDS = (
    8,
    64,
)
_PART = 2048  # tokens of a part of a sequence that are worth a message
_CHUNKS = 16  # the most chunks per stage that are tried
_NEVER = (GPIPE, ZB_H2)  # one holds more than 1F1B, the other twice as much


class Pipeline(NamedTuple):
    """A schedule, its chunks, the blocks of virtual stages, and overlap.

    No stages: the layout balances them. With overlap, a forward runs beside another
    microbatch's backward.
    """

    schedule: str
    chunks: int
    stages: tuple[int, ...]
    overlap: bool = False


class Zero(NamedTuple):
    stage: int
    shards: int  # of dp
    gather: str


class Inner(NamedTuple):
    seq: bool
    recompute: str
    matmul: str = ""
    experts: tuple[str, ...] = ()


class Grid(NamedTuple):
    """Sizes of a mesh's axes, and their order."""

    dp: int
    pp: int
    ring: int
    ulysses: int
    tp: int
    ep: int
    order: str

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """The number of ranks with different sequences, other coordinates fixed."""
        return self.dp * self.ep

    def mesh(self, shards: int) -> Mesh:
        parts = {
            "dp": (self.dp // shards, shards),
            "pp": (self.pp,),
            "cp": (self.ring, self.ulysses),
            "tp": (self.tp,),
            "ep": (self.ep,),
        }
        # A layout without experts does not name ep.
        names = (
            name for name in self.order.split() if name != "ep" or self.ep > 1
        )
        return Mesh(tuple(Axis(name, parts[name]) for name in names))

    def apart(self, name: str) -> int:
        """The distance in ranks between neighbours along an axis."""
        sizes = {
            "dp": self.dp,
            "pp": self.pp,
            "cp": self.cp,
            "tp": self.tp,
            "ep": self.ep,
        }
        # Axes to the right of this one are nested inside it.
        inner = self.order.split()[self.order.split().index(name) + 1 :]
        return math.prod(sizes[axis] for axis in inner)


@dataclass(frozen=True)
class Options:
    """The choices for one grid; a candidate is one of each."""

    grid: Grid
    zeros: tuple[Zero, ...]
    counts: tuple[int, ...]  # microbatches
    pipelines: tuple[Pipeline, ...]
    inners: tuple[Inner, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (
            len(self.zeros),
            len(self.counts),
            len(self.pipelines),
            len(self.inners),
        )


@dataclass(frozen=True)
class Space:
    request: Request
    recomputes: tuple[str, ...] = ("none", "selective", "all")
    offload: tuple[str, ...] = ()
    # sizes of tensor parallelism that are never faster without `seq`
    seq_only: frozenset[int] = frozenset()

    @property
    def near(self) -> int:
        """The number of devices within which tensor parallelism is tried."""
        return max(self.request.hardware.node, 8)

    @cached_property
    def tensor(self) -> list[int]:
        """The sizes of tensor parallelism that the model and the hardware allow."""
        return [
            # Divisors of all ranks, inside the fastest links, that the model's
            # widths allow.
            d
            for d in divisors(self.request.hardware.ranks)
            if d <= self.near and self._legal(d)
        ]

    def _legal(self, tp: int) -> bool:
        layout = Layout(Mesh((Axis("tp", (tp,)),)))
        return self.request.takes(layout) and not legal(
            layout, self.request.shape
        )

    @property
    def least(self) -> float:
        """The shortest microbatch that is tried, in sequences: less than one is a part."""
        return min(1.0, _PART / self.request.sequence)

    @cached_property
    def options(self) -> tuple[Options, ...]:
        return tuple(
            Options(
                grid,
                tuple(self._zeros(grid)),
                counts,
                pipelines(self.request.shape, grid.pp, grid.ep > 1),
                self._inners(grid),
            )
            for grid in self._grids()
            if (counts := tuple(self._counts(grid)))
        )

    def rows(self, grid: Grid, count: int) -> float:
        """Sequences of a microbatch on the rank that has most."""
        # The fullest rank of data parallelism has the rounded-up share.
        return -(-self.request.batch // grid.data) / count

    def layout(self, x: Options, z: int, c: int, p: int, q: int) -> Layout:
        zero, pipe, inner = x.zeros[z], x.pipelines[p], x.inners[q]
        return Layout(
            mesh=x.grid.mesh(zero.shards), seq=inner.seq, zero=zero.stage,
            schedule=pipe.schedule, chunks=pipe.chunks, microbatches=x.counts[c],
            gather=zero.gather, recompute=inner.recompute, offload=self.offload, experts=inner.experts,
            stages=pipe.stages, precision=self.request.precision, matmul=inner.matmul,
            compile=self.compile, overlap=overlaps(pipe, x.counts[c]),
        )  # fmt: skip

    def cut(self, grid: Grid, inner: Inner, *, split: bool) -> Layout:
        """The part of a candidate that its pieces depend on."""
        own = grid.ring, grid.ulysses, grid.tp, grid.ep
        return _cut(*own, inner, split, self.request.precision, self.compile)

    @property
    def compile(self) -> str:
        """The compilation of every candidate.

        8-bit products are tried with compiled rounding, if a compiler fuses it. Wider
        ones beside them are then compiled as well.
        """
        narrow = self.request.matmul
        return COMPILE if narrow and not MATMULS[narrow].power else ""

    def _grids(self) -> Iterator[Grid]:
        r = self.request
        s, ranks = r.shape, r.hardware.ranks
        shares = s.routed.count and "ep" not in r.without
        for tp in self.tensor:
            # Divisors ascend: a longer pipeline would have empty stages, too.
            for pp in divisors(ranks // tp):
                if pp > s.layers or (pp > 1 and "pp" in r.without):
                    break
                for cp in divisors(ranks // tp // pp):
                    data = ranks // (tp * pp * cp)
                    # Every copy needs a sequence, and parts of a sequence must
                    # be worth their messages.
                    if data > r.batch or (
                        cp > 1 and not self._parts(data * cp, cp)
                    ):
                        continue
                    # Routed MLPs are shared evenly, each whole on one rank.
                    shared = (
                        d
                        for d in divisors(data)
                        if d == 1 or (shares and not s.routed.count % d)
                    )
                    for ulysses, ep in product(
                        _ulysses(cp, s.heads // tp, self.near // tp), shared
                    ):
                        ways = {"ring": cp // ulysses, "ulysses": ulysses}
                        if any(
                            ways[way] > 1 for way in r.without & ways.keys()
                        ):
                            continue
                        # Two orders differ only if there are both a pipeline
                        # and data parallelism.
                        for order in ORDERS[
                            : 2 if pp > 1 and data > ep else 1
                        ]:
                            yield Grid(
                                data // ep,
                                pp,
                                cp // ulysses,
                                ulysses,
                                tp,
                                ep,
                                order,
                            )

    def _parts(self, copies: int, cp: int) -> bool:
        """True if a sequence may be so divided: it is long, or sequences are few."""
        r = self.request
        if r.shape.kind != "decoder" or r.sequence < 2 * cp:
            return False
        # Parts are long enough, or a rank would have at most two sequences
        # without them.
        return cp * _PART <= r.sequence or cp * r.batch <= 2 * copies

    def _counts(self, grid: Grid) -> Iterator[int]:
        """Microbatch counts: of 1, 2, 4, ... sequences, and a rank's whole batch."""
        r = self.request
        s, most = r.shape, -(-r.batch // grid.data)
        # A block's intermediate result between its two largest products has to fit.
        one = (
            2.0
            * r.sequence
            / grid.cp
            * (s.ffn if s.kind == "decoder" else s.hidden)
            / grid.tp
        )
        found: set[int] = set()
        # 1, 2, 4, ... sequences a microbatch, and the whole share of a rank.
        for rows in sorted({*(2**i for i in range(most.bit_length())), most}):
            count = min(-(-most // rows), r.batch // grid.data)
            # Fewer microbatches than half the stages: the pipeline would be
            # mostly empty.
            if found and 2 * count < grid.pp:
                return
            if (
                self.rows(grid, count) * one <= r.hardware.memory
                and count not in found
            ):
                found.add(count)
                yield count

    def _zeros(self, grid: Grid) -> Iterator[Zero]:
        yield Zero(0, grid.dp, "step")
        if grid.data * grid.cp == 1:
            return
        network = self.request.hardware.network
        levels = (
            [h.inside for h in network.hops]
            if isinstance(network, Network)
            else []
        )
        apart = grid.apart("dp")
        # The largest HSDP groups that fill each level of links.
        ends = {
            max(d for d in divisors(grid.dp) if d == 1 or d * apart <= inside)
            for inside in levels
        }
        # Groups smaller than dp, except those that would shard nothing.
        shards = {
            d
            for d in (*ends, *_SHARDS)
            if d < grid.dp and grid.dp % d == 0 and d * grid.cp * grid.ep > 1
        }
        for shard in (grid.dp, *sorted(shards, reverse=True)):
            yield Zero(1, shard, "step")
            if grid.pp == 1:
                yield Zero(2, shard, "step")
            yield Zero(3, shard, "micro")
            if grid.pp > 1:
                yield Zero(3, shard, "step")

    def _inners(self, grid: Grid) -> tuple[Inner, ...]:
        seqs = (
            (True, False)
            if grid.tp > 1 and self.request.shape.kind == "decoder"
            else (False,)
        )
        seqs = seqs[:1] if grid.tp in self.seq_only else seqs
        seqs = seqs if "seq" not in self.request.without else (False,)
        matmuls = ("", self.request.matmul) if self.request.matmul else ("",)
        # Whole MLPs divided evenly over ranks, or a part of each on all ranks
        # of tp.
        routed = self.request.shape.routed.count
        even = grid.tp > 1 and routed % (grid.ep * grid.tp) == 0
        shared = [(), ("tp",)] if even and routed else [()]
        every = (
            Inner(*each)
            for each in product(seqs, self.recomputes, matmuls, shared)
        )
        # Experts over tp need `seq`: each rank of tp sends its own tokens.
        return tuple(
            inner for inner in every if inner.seq or not inner.experts
        )


def divisors(n: int) -> list[int]:
    # Divisors come in pairs around the square root.
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _ulysses(cp: int, heads: int, near: int) -> list[int]:
    """No Ulysses, or as much as heads and fastest links allow; a ring covers the rest."""
    return sorted(
        {
            1,
            max(
                u
                for u in divisors(cp)
                if u == 1 or (heads % u == 0 and u <= near)
            ),
        }
    )


@lru_cache(maxsize=4096)
def _cut(
    ring: int,
    ulysses: int,
    tp: int,
    ep: int,
    inner: Inner,
    split: bool,
    precision: str,
    graph: str,
) -> Layout:
    # Pipelines, data parallelism and microbatches change no piece: they are
    # not in the cut.
    mesh = Mesh(
        (Axis("cp", (ring, ulysses)), Axis("ep", (ep,)), Axis("tp", (tp,)))
    )
    return piece_layout(
        Layout(
            mesh,
            seq=inner.seq,
            experts=inner.experts,
            # Any schedule with a split backward costs the same pieces; so do
            # all with a whole one.
            schedule=ZB_H1 if split else ACCUM,
            recompute=inner.recompute,
            precision=precision,
            matmul=inner.matmul,
            compile=graph,
        )
    )


# ---- pipelines


@lru_cache(maxsize=512)
def pipelines(
    shape: Shape, pp: int, routed: bool = False
) -> tuple[Pipeline, ...]:
    """Schedules with their chunks, and blocks either balanced by cost or spread evenly.

    With `routed` tokens, each with and without overlapping microbatches.
    """
    found = []
    for schedule, chunks in (
        _schedules(shape.layers, pp) if pp > 1 else [(ACCUM, 1)]
    ):
        # Such a schedule always overlaps.
        first = traits(schedule).forward_first
        plain = Layout(
            mesh=Mesh((Axis("pp", (pp,)),)), schedule=schedule, chunks=chunks
        )
        # Also blocks spread evenly, where that differs from the balanced
        # division.
        even = spread(shape.layers, pp * chunks)
        blocks = [(), *([even] if even != blocks_of(plain, shape) else [])]
        if routed or not first:
            for overlap in (False, True) if routed and not first else (False,):
                found += [
                    Pipeline(schedule, chunks, each, overlap)
                    for each in blocks
                ]
    return tuple(found)


def overlaps(pipe: Pipeline, count: int) -> bool:
    """True if there are microbatches that can overlap."""
    return pipe.overlap and count > 1


def _schedules(layers: int, pp: int) -> Iterator[tuple[str, int]]:
    for name, schedule in SCHEDULES.items():
        # Schedules that need the whole batch at once, or a search of their
        # own, are not tried.
        skipped = schedule.whole_batch or schedule.searched or name in _NEVER
        if skipped or not schedule.pipelined:
            continue
        for chunks in range(
            schedule.least, min(schedule.most, _CHUNKS, layers // pp) + 1
        ):
            # Chunks that divide the blocks, with or without both ends counted
            # as blocks; powers of two.
            whole = (
                layers % (pp * chunks) == 0
                or (layers + 2) % (pp * chunks) == 0
            )
            if schedule.most < CHUNKS or whole or chunks & (chunks - 1) == 0:
                yield name, chunks


def blocks_of(layout: Layout, shape: Shape) -> tuple[int, ...]:
    """Blocks of each virtual stage, as the layout gives or balances them."""
    pieces = parts_of_pieces(shape, layout.parts_apart)
    return tuple(
        # An expert block is several pieces of one block: count each block
        # once.
        len({pieces[n][0] for n in stage} & {*range(1, 1 + shape.layers)})
        for stage in stage_pieces(layout, shape)
    )


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Blocks spread as evenly as possible; stages with one more are in the middle."""
    least, more = divmod(layers, stages)
    begin = (stages - more) // 2
    return tuple(least + (begin <= i < begin + more) for i in range(stages))
