"""Legality of a layout for a model: all violations, and the nearest legal layouts.

Arithmetic only. Sizes that can be padded (vocabulary, sequence, batch, shards) are no
reason.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any

from .choices import (
    ACCUM,
    GPIPE,
    GRAPHS,
    NAIVE,
    ONE_F_ONE_B,
    SCHEDULES,
    traits,
)
from .exact import (
    no_subtree,
    split_heads,
    uncut_time,
    unequal_parts,
    uneven_microbatches,
)
from .layout import Layout
from .mesh import Axis, LayoutError, Mesh
from .mixers import rows_in
from .mlps import mlps_in, sharing_violations
from .shape import Shape
from .violation import Violation, divisor_list, divisors


def legal(
    layout: Layout, shape: Shape, *, batch: int = 0, sequence: int = 0
) -> tuple[Violation, ...]:
    """Every rule that this layout breaks for this model. Empty if it can be trained."""
    rules = (
        _tensor,
        _pipeline,
        _context,
        _batch,
        _sharding,
        _exact,
        _graphs,
    )
    # A run may have its own batch and sequence; otherwise those of the shape.
    sizes = batch or shape.batch, sequence or shape.sequence
    return tuple(
        violation
        for rule in rules
        for violation in rule(layout, shape, *sizes)
    )


def _tensor(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    yield from sharing_violations(x, s)
    if x.seq and (x.tp == 1 or s.kind == "mlp"):
        why = "tp=1" if x.tp == 1 else "a model without norms"
        yield Violation(
            "seq",
            f"seq has nothing to shard with {why}.",
            "Leave seq out, or use tp2.",
        )
    if x.overlap and (x.ep_ranks == 1 or x.microbatches == 1):
        why = "ep=1" if x.ep_ranks == 1 else "one microbatch"
        way_out = "Leave overlap out, or use ep2 and two microbatches or more."
        yield Violation(
            "overlap", f"overlap has nothing to hide with {why}.", way_out
        )
    # A model of MLPs alone has no blocks.
    if s.kind == "mlp":
        if s.hidden % x.tp:
            what = f"tp={x.tp} does not divide hidden={s.hidden}."
            yield Violation("width", what, f"Use tp {divisor_list(s.hidden)}.")
        return
    for row in rows_in(s):
        yield from row.violations(x, s)
    for mlp in mlps_in(s):
        yield from mlp.violations(x, s)


def _pipeline(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    stages, given = x.virtual_stages, f"stages:{'-'.join(map(str, x.stages))}"
    if x.stages and (len(x.stages) != stages or sum(x.stages) != s.layers):
        what = f"{given} is {len(x.stages)} stages of {sum(x.stages)} blocks; pp={x.pp} x"
        what += f" {x.chunks} chunks needs {stages} stages, the model has {s.layers} blocks."
        way_out = "Name one count for every stage, together as many as the model has blocks."
        yield Violation("stages", what, way_out)
    # The first stage has the embedding and the last one the head, so they may
    # have no block.
    elif 0 in x.stages[1:-1]:
        way_out = "Only the first and the last stage, with the embedding and the head, may have 0."
        yield Violation(
            "stages", f"{given} leaves a middle stage empty.", way_out
        )
    elif not x.stages and stages > s.layers:
        what = f"pp={x.pp} x {x.chunks} chunks is {stages} stages for {s.layers} blocks."
        yield Violation(
            "stages", what, f"Use at most {s.layers} stages together."
        )
    kind = traits(x.schedule)
    if x.pp > 1 and not kind.pipelined:
        what = f"{x.schedule}:{x.microbatches} is for one stage; pp={x.pp} needs a schedule."
        others = ", ".join(
            name for name, each in SCHEDULES.items() if each.pipelined
        )
        way_out = (
            f"Write {ONE_F_ONE_B}:{x.microbatches}, or another of {others}."
        )
        yield Violation("schedule", what, way_out)
    if x.pp == 1 and kind.pipelined:
        what = f"{x.schedule}:{x.microbatches} schedules a pipeline; the mesh has no pp."
        yield Violation(
            "schedule", what, f"Write {ACCUM}:{x.microbatches}, or add pp2."
        )
    if kind.whole_batch and x.microbatches > 1:
        what = f"{x.schedule}:{x.microbatches}: {x.schedule} takes the batch whole."
        yield Violation(
            "schedule", what, f"Write {NAIVE}, or {GPIPE}:{x.microbatches}."
        )


def _context(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    if x.cp == 1:
        return
    if s.kind == "mlp":
        yield Violation(
            "cp",
            f"cp={x.cp}: an MLP has no sequence to shard.",
            "Use dp instead of cp.",
        )
        return
    # Each rank holds a part from the start of a sequence and one from its end.
    if sequence < 2 * x.cp:
        what = f"a sequence of {sequence} tokens is shorter than 2 x cp={2 * x.cp}:"
        what += " each rank holds a part from its start and one from its end."
        yield Violation(
            "sequence", what, f"Use cp {max(1, sequence // 2)} or less."
        )


# Fewer sequences than this cannot be divided: ranks would have none.
def _batch(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    if batch < (least := x.data * x.microbatches):
        over = (
            f"dp={x.dp}"
            + f" x ep={x.ep}" * (x.ep > 1)
            + f" x {x.microbatches} microbatches"
        )
        what = f"a batch of {batch} gives {over} less than one sequence each."
        fewer = f"{max(1, batch // x.data)} microbatches with dp={min(x.dp, batch)}"
        way_out = f"Use a batch of {least} or more, or at most {fewer}."
        yield Violation("batch", what, way_out)
    if s.batch_loss and x.microbatches > 1:
        what = "batch_loss needs the counts of a whole batch before the first backward, but"
        what += f" {x.microbatches} microbatches are not all forward by then."
        yield Violation("batch", what, "Use one microbatch, or sequence_loss.")


def _sharding(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    if x.mesh.of("dp.replicate") > 1 and not x.zero:
        axis = next(a for a in x.mesh.axes if a.name == "dp")
        what = f"{axis} splits replicas from shards, but zero0 shards nothing."
        yield Violation(
            "hsdp", what, f"Write dp{x.dp}, or add zero1, zero2 or zero3."
        )
    # Weights kept whole have nothing to gather again.
    if x.gather == "micro" and x.zero != 3 and "weights" not in x.offload:
        what = f"gather:micro needs weights that are dropped after use; zero{x.zero} keeps them."
        yield Violation("gather", what, "Use zero3, or gather:step.")


def _exact(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    if not x.exact:
        return
    if s.batch_loss and x.data > 1:
        what = "exact: batch_loss counts the choices of all ranks' microbatches, so one"
        what += (
            " process, with one microbatch after the other, has another loss."
        )
        yield Violation("exact", what, "Use sequence_loss, or one rank of dp.")
    if apart := no_subtree(x):
        yield Violation("exact", *apart)
    if uneven := uneven_microbatches(x, batch):
        yield Violation("exact", *uneven)
    if uncut := uncut_time(x, s):
        yield Violation("exact", *uncut)
    elif split := split_heads(x, s):
        yield Violation("exact", *split)
    for unequal in unequal_parts(x, s):
        yield Violation("exact", *unequal)


def _graphs(
    x: Layout, s: Shape, batch: int, sequence: int
) -> Iterator[Violation]:
    if x.compile == GRAPHS and s.experts:
        what = f"compile:graphs for a model with {s.experts} experts: the number of tokens"
        what += " of each depends on the data, and a graph has fixed shapes."
        yield Violation("compile", what, "Use compile.")


def nearest(
    layout: Layout,
    shape: Shape,
    *,
    batch: int = 0,
    sequence: int = 0,
    most: int = 3,
) -> tuple[Layout, ...]:
    """Legal layouts with equally many ranks, those with the fewest changes first."""
    # A dict keeps the first of equal layouts, in order.
    others = dict.fromkeys(_neighbours(layout, shape, batch or shape.batch))
    fits = [
        x
        for x in others
        if not legal(x, shape, batch=batch, sequence=sequence)
    ]
    return tuple(
        # Ties by text, so that the answer is always the same.
        sorted(fits, key=lambda x: (_distance(x, layout), str(x)))[:most]
    )


def _neighbours(x: Layout, s: Shape, batch: int) -> Iterator[Layout]:
    """Other meshes of the same size, each with the same choices if they still apply."""
    # The user's own order of axes first, then the axes that are missing there.
    order = [a.name for a in x.mesh.axes if a.name != "ep"]  # dp is as close
    order += [name for name in ("dp", "pp", "cp", "tp") if name not in order]
    inner = (
        x.mesh.of("dp.shard")
        if x.mesh.of("dp.replicate") > 1 and x.zero
        else 0
    )
    # No Ulysses, or as much as the layout had.
    ulysses = {1, x.mesh.of("cp.ulysses")}
    for dp, pp, cp, tp in _factors(x.ranks, 4):
        size = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
        # Meshes that this model cannot use at all are skipped before layouts
        # are built.
        if (
            pp > s.layers + 1
            or tp > s.heads * s.hidden
            or (cp > 1 and s.kind == "mlp")
        ):
            continue
        for u, seq, chunks in product(ulysses, {x.seq, False}, {x.chunks, 1}):
            if cp % u:
                continue
            parts = {
                "dp": (1, dp),
                "pp": (pp,),
                "cp": (cp // u, u),
                "tp": (tp,),
            }
            if inner and dp % inner == 0:
                parts["dp"] = (dp // inner, inner)
            mesh = Mesh(tuple(Axis(n, parts[n]) for n in order if size[n] > 1))
            shared = tuple(
                a for a in x.experts if size[a] > 1 and (seq or a != "tp")
            )
            # A given division of blocks fits only a mesh with as many stages.
            sizes = {"mesh": mesh, "seq": seq and tp > 1, "experts": shared}
            yield from _refit(x, {**sizes, "stages": ()}, chunks, batch)
            if x.stages and pp == x.pp:
                yield from _refit(x, sizes, chunks, batch)


def _refit(
    x: Layout, sizes: Mapping[str, Any], chunks: int, batch: int
) -> Iterator[Layout]:
    """The layout with these sizes, a schedule for them and microbatches for the batch."""
    with suppress(LayoutError):
        yield from _scheduled(replace(x, **sizes), chunks, batch)


def _scheduled(x: Layout, chunks: int, batch: int) -> Iterator[Layout]:
    own = x.schedule if traits(x.schedule).pipelined else ONE_F_ONE_B
    gather = x.gather if x.zero == 3 or "weights" in x.offload else ""
    for schedule in {own, ONE_F_ONE_B} if x.pp > 1 else {ACCUM}:
        kind = traits(schedule)
        # No more microbatches than a rank has sequences.
        m = (
            1
            if kind.whole_batch
            else min(x.microbatches, max(1, batch // x.dp))
        )
        of_stage = min(max(chunks, kind.least), kind.most)
        # Fields may contradict each other on the new mesh: such a neighbour is
        # left out.
        with suppress(LayoutError):
            yield replace(
                x,
                schedule=schedule,
                chunks=of_stage,
                microbatches=m,
                gather=gather,
            )


def _factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (n,)
        return
    for first in divisors(n):
        for rest in _factors(n // first, parts - 1):
            yield (first, *rest)


def _distance(a: Layout, b: Layout) -> float:
    """The distance of two layouts: doublings of each axis, then every other choice."""
    # Doubling an axis counts 1, another choice 1/2, doubling the microbatches
    # 1/4.
    axes: float = sum(
        abs(math.log2(a.mesh.of(n) / b.mesh.of(n)))
        for n in (
            "dp.replicate",
            "dp.shard",
            "pp",
            "cp.ring",
            "cp.ulysses",
            "tp",
        )
    )
    chosen = {field.name for field in fields(Layout)} - {
        "mesh",
        "microbatches",
    }
    others = sum(getattr(a, name) != getattr(b, name) for name in chosen)
    return float(axes + 0.5 * others) + 0.25 * abs(
        math.log2(a.microbatches / b.microbatches)
    )
