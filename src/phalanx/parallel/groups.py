"""The process groups of a layout: those of a rank, and those of each of its units.

A gradient is summed over every axis on which copies of its weight did different work,
and over no axis that shards the weight. `unit_axes` derives a unit's axes from the rule
table. Units differ in their groups and in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..comm import Group, World
from ..layout import Layout, LayoutError, Mesh
from ..models.routed import Chooser, ReceivingPart
from ..program import Program, ops
from .context import around
from .model import Model

# Disjoint groups of ranks that together contain all ranks.
Ranks = tuple[tuple[int, ...], ...]


class UnitAxes(NamedTuple):
    """The mesh axes over which a unit is sharded, and those of its replicas."""

    shard: tuple[str, ...]
    replica: tuple[str, ...]


class UnitPlace(NamedTuple):
    """A rank's part of a unit: its tp rank, shard index and replica index."""

    tp: int
    shard: int
    replica: int


@dataclass(frozen=True)
class UnitGroups:
    """The groups of one unit.

    `gather`, `reduce` and `scales` contain the same ranks but have a communicator each,
    so that a gather does not queue behind a reduction, nor scales behind gathers.
    """

    gather: Group  # shards of the weights
    reduce: Group  # shards of the gradients
    replica: Group  # ranks that hold the same shard
    tie: Group  # stages of one pipeline that use the same weights
    # By `Weight.adds`: ranks of tp whose copies did different work.
    also: Mapping[str, Group]
    # For an optimizer that needs whole matrices: all ranks that hold parts of the
    # unit's, and the part that each of them holds.
    matrices: Group | None = None
    places: tuple[UnitPlace, ...] = ()
    scales: Group | None = (
        None  # agrees on the scales of weights gathered in 8 bits
    )
    # In a step of `exact`: all ranks that hold shards or copies of the unit.
    copies: Group | None = None


@dataclass(frozen=True)
class Groups:
    """All groups that one rank belongs to, including groups of one rank."""

    tp: Group  # regions of tensor parallelism
    ring: Group  # context parallelism: blocks of keys and values
    ulysses: Group  # context parallelism: all tokens of some heads
    ep: Group  # ranks that share experts
    routes: Group  # the same ranks, for token counts: these never queue behind tokens
    count: Group  # ranks that saw other tokens
    # Stages of one pipeline. Under a V schedule both kinds go both ways, so each needs
    # its own order.
    activations: Group
    gradients: Group
    everyone: Group
    # For the losses of routers: ranks with other tokens of the same sequences, or of
    # the batch.
    sequences: Group | None
    batch: Group | None
    # For every unit, including those of other stages, and for every piece's unit of
    # experts.
    units: tuple[UnitGroups, ...]
    # For the frozen weights of every unit, if each rank keeps them whole.
    whole: tuple[UnitGroups, ...] | None


def unit_axes(model: Model, layout: Layout, unit: int) -> UnitAxes:
    """The layout's data-parallel axes, without those that shard the unit's weights."""
    # dp counts as its two parts, so that a weight may be sharded over one of them.
    parts = {"dp": ("dp.replicate", "dp.shard")}
    axes = [
        tuple(part for axis in chosen for part in parts.get(axis, (axis,)))
        for chosen in (layout.shard_axes, layout.replica_axes)
    ]
    # The axes that shard each weight of the unit; experts are sharded over ep.
    cuts = [
        {
            axis
            for cut in layout.axes_of(model.rules.dims(name, weight.dim()))
            for axis in cut
        }
        for name, weight in model.weights.items()
        if model.unit_of[name] == unit
    ]
    different = {
        UnitAxes(*(tuple(a for a in part if a not in cut) for part in axes))
        for cut in cuts
    }
    if len(different) > 1:
        name = model.pieces[unit % len(model.pieces)][0]
        raise LayoutError(
            f"the weights of {name} are sharded over different axes of data parallelism, but a unit has"
            " one group for all. Put them into pieces of their own."
        )
    return different.pop() if different else UnitAxes(*axes)


def _cuts_frozen(layout: Layout) -> bool:
    """True if frozen weights are sharded too.

    ZeRO-1 and 2 shard what belongs to a gradient, and frozen weights have none.
    Gathering them in each step would bring unchanged values.
    """
    return layout.zero == 3 or layout.weights_on_host


def open_groups(
    world: World,
    layout: Layout,
    model: Model,
    program: Program,
    *,
    prefix: str = "",
) -> Groups:
    """Open all groups of a layout and its program; all ranks call it in one order.

    With a `prefix` of its own, a second set of groups can be open beside the first.
    """
    if world.size != layout.ranks:
        raise LayoutError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; {world.size} were started."
        )
    # The order of the calls below is the order in which every rank opens its
    # communicators, so it must not depend on the rank.
    mesh, everyone = (
        layout.mesh,
        world.split(prefix + "everyone", [tuple(range(world.size))]),
    )

    def along(name: str, *axes: str) -> Group:
        return world.split(prefix + name, mesh.groups(axes))

    def pipeline(name: str, *, forward: bool) -> Group:
        flows = _flows(program, forward=forward)
        return world.split(prefix + name, mesh.groups(["pp"]), flows)

    replicas = layout.copies == layout.ranks
    count = everyone if replicas else along("count", "dp", "cp", "ep")
    whole = None
    if model.frozen and not _cuts_frozen(layout):
        whole = _open_whole(world, layout, model, count, prefix)
    choosers = [
        m
        for _, piece in model.pieces
        for m in piece.modules()
        if isinstance(m, Chooser)
    ]
    # without seq, its ranks see the same tokens
    over_tp = ("tp",) if layout.seq else ()
    sequences = batch = None
    if any(each.sequence_loss for each in choosers):
        sequences = along("sequences", "cp", *over_tp)
    if any(each.batch_loss for each in choosers):
        batch = along("batch", "dp", "cp", "ep", *over_tp)
    return Groups(
        whole=whole,
        sequences=sequences,
        batch=batch,
        tp=_in_tree(along("tp", "tp"), layout),
        # Only neighbours in the ring send to each other.
        ring=_in_tree(
            world.split(
                prefix + "ring",
                mesh.groups(["cp.ring"]),
                around(mesh.of("cp.ring")),
            ),
            layout,
        ),
        ulysses=along("ulysses", "cp.ulysses"),
        ep=along("ep", *layout.ep_axes),
        routes=along("routes", *layout.ep_axes),
        count=count,
        activations=pipeline("activations", forward=True),
        gradients=pipeline("gradients", forward=False),
        everyone=everyone,
        units=_open_units(world, layout, model, program, everyone, prefix),
    )


def _open_units(
    world: World,
    layout: Layout,
    model: Model,
    program: Program,
    everyone: Group,
    prefix: str,
) -> tuple[UnitGroups, ...]:
    """The groups of every unit. Units over the same ranks share their groups."""
    mesh = layout.mesh
    # If all ranks are replicas, a step's count, sums and norm follow one another on
    # every rank in one order.
    opened: dict[tuple[str, Ranks], Group] = {
        ("replica", (everyone.ranks,)): everyone
    }

    # Groups with the same name and ranks are one communicator, whatever the unit.
    def shared(name: str, ranks: Ranks) -> Group:
        number = sum(known == name for known, _ in opened)
        if (name, ranks) not in opened:
            opened[name, ranks] = world.split(
                f"{prefix}{name}{number or ''}", ranks
            )
        return opened[name, ranks]

    # Apart from the regions' group, so that no sum comes between two messages of a
    # region.
    heads = model.counts.get("kv", 0)
    # With tp > kv_heads, `same` neighbouring ranks of tp hold one KV head.
    same = layout.tp // heads if heads and layout.tp > heads else 1
    over_tp = mesh.groups(["tp"])
    whole = {
        op.piece
        for row in program.rows
        for op in row
        if op.kind == ops.TO_OWNERS
    }
    also = {
        # ranks that hold the same KV head
        "kv": _in_tree(shared("kv", _in_runs(over_tp, same)), layout),
        "norms": shared("norms", over_tp),
    }

    def groups_of(unit: int) -> UnitGroups:
        axes = unit_axes(model, layout, unit)
        # Unit n + pieces holds the experts of piece n, and no tied weight.
        users = program.users(unit) if unit < len(model.pieces) else ()
        stages = {program.host[piece] for piece in users}
        matrices = scales = copies = None
        if layout.exact:
            both = mesh.groups((*axes.replica, *axes.shard))
            copies = shared("copies", both)
        if layout.gathers_in_8_bits:
            scales = shared("scales", mesh.groups(axes.shard))
        if unit % len(model.pieces) in whole:
            # Ranks of tp that share experts hold different experts.
            routed = isinstance(
                model.pieces[unit % len(model.pieces)][1], ReceivingPart
            )
            own = {"tp"} - set(layout.ep_axes if routed else ())
            matrices = shared(
                "matrices", mesh.groups((*axes.shard, *axes.replica, *own))
            )
        return UnitGroups(
            gather=shared("gather", mesh.groups(axes.shard)),
            reduce=shared("reduce", mesh.groups(axes.shard)),
            replica=shared("replica", mesh.groups(axes.replica)),
            tie=shared("tie", _stages(mesh.groups(["pp"]), stages)),
            also=also,
            matrices=matrices,
            places=tuple(_place(mesh, axes, rank) for rank in matrices.ranks)
            if matrices
            else (),
            scales=scales,
            copies=copies,
        )

    return tuple(map(groups_of, range(2 * len(model.pieces))))


def _in_tree(group: Group, layout: Layout) -> Group:
    """The group, whose sums have one order in a layout of `exact`."""
    group.in_tree = layout.exact > 0
    return group


def _open_whole(
    world: World, layout: Layout, model: Model, count: Group, prefix: str
) -> tuple[UnitGroups, ...]:
    """The groups of every unit whose ranks keep it whole.

    Ranks with the same part of the model are replicas. Experts have fewer of them, as
    ranks that share experts hold different ones.
    """
    mesh = layout.mesh
    # Nothing is sharded: all ranks with the same weights are replicas.
    alone = world.split(f"{prefix}alone", mesh.groups(()))
    every = mesh.groups(("dp", "cp", "ep"))
    opened: dict[Ranks, Group] = {every: count}

    def groups_of(unit: int) -> UnitGroups:
        axes = unit_axes(model, layout, unit)
        ranks = mesh.groups((*axes.shard, *axes.replica))
        if ranks not in opened:
            opened[ranks] = world.split(f"{prefix}whole", ranks)
        return UnitGroups(alone, alone, opened[ranks], alone, {})

    return tuple(map(groups_of, range(2 * len(model.pieces))))


def _place(mesh: Mesh, axes: UnitAxes, rank: int) -> UnitPlace:
    shards, replicas = (
        mesh.group(rank, axes.shard),
        mesh.group(rank, axes.replica),
    )
    return UnitPlace(
        mesh.coordinates(rank).get("tp", 0),
        shards.index(rank),
        replicas.index(rank),
    )


def _in_runs(groups: Ranks, size: int) -> Ranks:
    """Split groups into runs of `size` neighbours."""
    return tuple(
        g[i : i + size] for g in groups for i in range(0, len(g), size)
    )


def _stages(pipelines: Ranks, stages: set[int]) -> Ranks:
    """Group the ranks of these stages in each pipeline; all others stay alone."""
    together = stages if len(stages) > 1 else set[int]()
    groups: list[tuple[int, ...]] = []
    for pipeline in pipelines:
        # Stages in ascending order, as a split asks for.
        groups += [
            (rank,)
            for stage, rank in enumerate(pipeline)
            if stage not in together
        ]
        groups += [
            tuple(pipeline[stage] for stage in sorted(together))
        ] * bool(together)
    return tuple(groups)


def _flows(program: Program, *, forward: bool) -> list[tuple[int, int]]:
    """The (from, to) stages between which a program sends activations, or gradients."""
    sends = (op for row in program.rows for op in row if op.kind == ops.SEND)
    ends = (
        (op.piece, op.peer)
        for op in sends
        if (op.of == ops.FORWARD) == forward
    )
    return sorted(
        {(program.host[piece], program.host[peer]) for piece, peer in ends}
    )
