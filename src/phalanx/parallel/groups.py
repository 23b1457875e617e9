"""The wires of a layout: which ranks talk to each other about what, opened in one fixed order."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm import Group, World
from ..layout import Layout, LayoutError
from ..program import Program, ops
from .context import around

__all__ = ["Groups", "open_groups"]


@dataclass(frozen=True)
class Groups:
    """Every group that one rank belongs to. A group of one is a wire like any other."""

    tp: Group  # regions of tensor parallelism
    kv: Group  # ranks of tp that hold the same key and value head
    norms: Group  # tp again, for gradients: never between two messages of a region
    ring: Group  # context parallelism: blocks of keys and values
    ulysses: Group  # context parallelism: all tokens of some heads
    gather: Group  # the parts of a unit's weights
    reduce: Group  # the parts of a unit's gradients
    replica: Group  # ranks that hold the same part
    count: Group  # ranks that saw other tokens
    # Stages of one pipeline. Under a V schedule both kinds go both ways, so each has its own order.
    activations: Group
    gradients: Group
    tie: Group  # stages of one pipeline that hold a tied weight; the rest alone
    everyone: Group


def open_groups(
    world: World,
    layout: Layout,
    program: Program,
    *,
    kv_heads: int = 0,
    prefix: str = "",
) -> Groups:
    """All groups of a layout and its program; a collective call of the whole world. With a `prefix`
    of its own a second set can be open beside the first."""
    if world.size != layout.ranks:
        raise LayoutError(
            f"layout {str(layout)!r} is for {layout.ranks} ranks; {world.size} were started."
        )
    mesh = layout.mesh

    def along(name: str, *axes: str) -> Group:
        return world.split(prefix + name, mesh.groups(axes))

    same = layout.tp // kv_heads if kv_heads and layout.tp > kv_heads else 1
    copies = [
        group[i : i + same] for group in mesh.groups(["tp"]) for i in range(0, len(group), same)
    ]
    tied = {program.host[piece] for pair in program.tied for piece in pair}
    tied = tied if len(tied) > 1 else set()
    ties: list[tuple[int, ...]] = []
    for group in mesh.groups(["pp"]):
        ties += [(rank,) for stage, rank in enumerate(group) if stage not in tied]
        ties += [tuple(rank for stage, rank in enumerate(group) if stage in tied)] * bool(tied)

    def pipeline(name: str, *, forward: bool) -> Group:
        flows = _flows(program, forward=forward)
        return world.split(prefix + name, mesh.groups(["pp"]), flows)

    return Groups(
        tp=along("tp", "tp"),
        kv=world.split(prefix + "kv", copies),
        norms=along("norms", "tp"),
        ring=world.split(prefix + "ring", mesh.groups(["cp.ring"]), around(mesh.of("cp.ring"))),
        ulysses=along("ulysses", "cp.ulysses"),
        gather=along("gather", *layout.shard_axes),
        reduce=along("reduce", *layout.shard_axes),
        replica=along("replica", *layout.replica_axes),
        count=along("count", "dp", "cp"),
        activations=pipeline("activations", forward=True),
        gradients=pipeline("gradients", forward=False),
        tie=world.split(prefix + "tie", ties),
        everyone=world.split(prefix + "everyone", [tuple(range(world.size))]),
    )


def _flows(program: Program, *, forward: bool) -> list[tuple[int, int]]:
    """The (from, to) stages between which a program sends activations, or gradients."""
    sends = (op for row in program.rows for op in row if op.kind == ops.SEND)
    ends = ((op.piece, op.peer) for op in sends if (op.of == ops.FORWARD) == forward)
    return sorted({(program.host[piece], program.host[peer]) for piece, peer in ends})
