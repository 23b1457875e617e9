"""Costs a piece by running it on meta tensors, over a group that sends nothing.

There is no formula per model: the layout cuts the piece as in training, and the same
lines compute, keep and send. Gradient sums in operation S do not count as a piece's
own. These are data parallelism's, and those of norms and of repeated k and v heads
along tp.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..comm import Message, TallyWorld
from ..layout import Layout, LayoutError, Mesh, StagedPieces, piece_layout
from ..layout.choices import DTYPES, PRECISIONS
from ..models.ahead import HIDDEN, look_ahead
from ..models.routed import CHOICES, ReceivingPart
from ..parallel import Model, Piece, Precision, Unit, time_multiple
from ..parallel.batch import edge_shape
from ..parallel.block_parts import cut_blocks
from ..parallel.exchange import SENT
from ..parallel.kinds import alike, one_of_each
from ..parallel.local import LocalModel, build_local
from ..parallel.low_precision import matmul_named
from ..parallel.pieces import Bundle
from ..parallel.recompute import Selected
from ..parallel.rows import model_rows
from ..program import PieceCost, build
from .scales import PREFIX, Known, Scales
from .target import Target, fuse

# Shape and dtype of a tensor on meta.
Like = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Found:
    """Results that costings of one model share.

    `outputs` are those of operations, by the tensors given. `pieces` are costs and
    outputs of pieces, by everything that these depend on.
    """

    outputs: Known = field(default_factory=dict)
    pieces: dict[Any, tuple[PieceCost, dict[str, Like]]] = field(
        default_factory=dict
    )


COMPUTE = {name: getattr(torch, DTYPES[name].torch) for name in PRECISIONS}


def piece_costs(
    model: Model,
    layout: Layout,
    rows: int,
    *,
    sequence: int = 0,
    target: str = "cuda",
) -> tuple[PieceCost, ...]:
    """The costs of all pieces on one rank, with `rows` sequences in a microbatch.

    Pieces that are alike are run once, and the model is not changed. If ranks of a
    group differ, the one with the most work counts. Only layouts that split the
    backward (zb) have a separate input_gradient and weight_gradient. Otherwise the
    whole backward counts as input_gradient, or as weight_gradient for a piece without
    an input.
    """
    (costs,) = cost_kinds(
        model, layout, (rows,), sequence=sequence, target=target
    )
    # A layout that keeps routed MLPs apart makes three pieces of a block.
    cut = cut_blocks(model, piece_layout(layout))
    return tuple(costs[kind] for kind in alike(cut))


def cost_kinds(
    model: Model,
    layout: Layout,
    rows: Sequence[int],
    *,
    sequence: int = 0,
    target: str = "cuda",
    found: Found | None = None,
    kinds: Container[int] | None = None,
) -> list[tuple[PieceCost, ...]]:
    """One PieceCost for each kind of piece, for each number of rows.

    Pass the same `found` when costing many layouts of one model, at one sequence length
    and for one target. With `kinds`, only these kinds are costed. The model must then
    have no experts, whose pieces take outputs of earlier pieces.
    """
    if model.shape is None:
        raise LayoutError(
            "a model without a shape cannot be costed: add shape=Shape(...) to it."
        )
    # 1. One piece of each kind, cut as the layout cuts it, in one pipeline stage.
    cut = piece_layout(layout)
    few = one_of_each(cut_blocks(model, cut))
    pieces = StagedPieces(model_rows(few, cut), (range(len(few.pieces)),))
    program = build(cut, pieces)
    compute = COMPUTE[cut.precision]
    # Masters and gradient sums are in float32 or wider.
    wide = torch.promote_types(compute, torch.float32)
    found = Found() if found is None else found
    assert kinds is None or not model.shape.routed.count
    blocks = range(1, len(few.pieces) - 1)
    # The last rank of a ring merges most; along tp all ranks are equal.
    world = TallyWorld(cut.mesh.rank(cp=cut.cp - 1), cut.ranks)
    try:
        precision = Precision(compute, wide, wide, matmul_named(cut.matmul))
        # 2. Built as in training, for one rank of a world that only counts messages.
        held = build_local(
            world, cut, few, program, precision=precision, prefix=PREFIX
        )
        for _, module in few.pieces:
            fuse(module.modules(), target)
        # 3. Each piece forward and backward, for every number of rows.
        every = []
        for count in rows:
            batch = held.complete(_batch(few, cut, count, sequence, compute))
            # between pieces: (B, T / cp, hidden), or (B, T / cp / tp, hidden) with seq
            edge = edge_shape(
                batch, model.shape.hidden, cut.tp if cut.seq else 1
            )
            costs, comes = list[PieceCost](), dict[str, Like]()
            like = edge, compute
            for n in range(len(few.pieces)):
                if kinds is not None and n not in kinds:
                    continue
                piece = held.pieces[n]
                key = n, count, cut.parts_apart, felt_cut(piece, cut)
                if key not in found.pieces:
                    cost, out = run(
                        piece,
                        into(piece, like, comes),
                        batch,
                        world.ledger,
                        found.outputs,
                        target=target,
                        selected=cut.recompute == "selective" and n in blocks,
                        # The head is mostly the loss, which stays outside the
                        # compiled graph.
                        compiled=bool(cut.compile) and n in blocks,
                    )
                    cost = with_derived(cost, held, piece, batch)
                    found.pieces[key] = cost, out
                cost, out = found.pieces[key]
                costs.append(cost)
                # Outputs of a block's parts are the inputs of the next part.
                comes |= out
            every.append(tuple(costs))
    finally:
        world.clear()
    return every


def felt_cut(piece: Piece, cut: Layout) -> Layout:
    """The part of a cut that this piece's cost depends on.

    Only routed MLPs depend on the number of ranks that share them: tokens travel between
    pieces, so the other pieces neither hold less nor send more.
    """
    if isinstance(piece.module, ReceivingPart) or any(
        map(_is_routed, piece.units)
    ):
        return cut
    axes = tuple(axis for axis in cut.mesh.axes if axis.name != "ep")
    return replace(cut, mesh=Mesh(axes))


def _is_routed(unit: Unit) -> bool:
    """True for the unit of a piece's routed MLPs beside its own unit."""
    return unit.number != unit.piece


def with_derived(
    cost: PieceCost,
    held: LocalModel,
    piece: Piece,
    batch: Mapping[str, Tensor],
) -> PieceCost:
    """The cost with bytes that a rank derives once for all pieces and this one uses."""
    names = [name for name in held.derived if name in piece.takes]
    # A batch without documents has nothing derived from them.
    sizes = [batch[name].nbytes for name in names if name in batch]
    return replace(cost, derived=float(sum(sizes)))


def _batch(
    model: Model,
    layout: Layout,
    rows: int,
    sequence: int,
    compute: torch.dtype,
) -> dict[str, Tensor]:
    assert model.shape is not None
    if model.shape.kind == "mlp":
        return {
            "inputs": torch.empty(
                rows, model.shape.hidden, dtype=compute, device="meta"
            )
        }
    multiple = time_multiple(layout)
    # Padded as in training, then a rank of cp has its share: (rows, T / cp).
    length = (
        -(-(sequence or model.shape.sequence) // multiple)
        * multiple
        // layout.cp
    )
    ids = torch.empty(rows, length, dtype=torch.long, device="meta")
    names = ["tokens", "targets", "positions"]
    names += ["noise"] * bool(model.shape.dropout)
    batch = {name: torch.empty_like(ids) for name in names}
    ahead = model.shape.predictors
    return batch | (look_ahead(batch, ahead) if ahead else {})


def into(
    piece: Piece, edge: Like, comes: Mapping[str, Like]
) -> dict[str, Like]:
    """The inputs of a piece, by name.

    An edge, or outputs of earlier pieces in its block, assuming that each rank receives
    as many tokens as it sends.
    """
    if SENT not in piece.takes:
        if piece.first:
            return {}
        # Hidden states that the head needs besides x.
        beside = {
            name: comes[name]
            for name in piece.takes
            if name == HIDDEN and name in comes
        }
        return {"x": edge, **beside}
    # Counts become routes on the way: (runs, MLPs), here of one sender.
    if "counts" in comes:
        *times, mlps = comes["counts"][0]
        routes = torch.Size((math.prod(times), mlps))
        comes = {**comes, "routes": (routes, torch.long)}
    return {name: comes[name] for name in piece.takes if name in comes}


def _new(likes: Mapping[str, Like]) -> Bundle:
    return {
        name: torch.empty(x[0], dtype=x[1], device="meta")
        for name, x in likes.items()
    }


def run(
    piece: Piece,
    comes: Mapping[str, Like],
    batch: Mapping[str, Tensor],
    ledger: list[Message],
    known: Known,
    *,
    target: str,
    selected: bool = False,
    compiled: bool = False,
) -> tuple[PieceCost, dict[str, Like]]:
    """Run a piece forward and backward on meta; returns its cost and its outputs.

    `comes` are its inputs. With `selected`, its forward keeps a part, and the rest is
    recomputed before the backward.
    """
    for unit in piece.units:
        # Before the recording starts: gathers are operations of their own.
        if unit.buffer is None:
            unit.gather()
        if not unit.frozen:
            unit.open()
        # as in all microbatches but the first, which only writes gradients
        unit.fresh.clear()
    scales = Scales(ledger, known, compiled=compiled)
    with scales, Target(target, scales):
        cost, out = _run(
            piece, comes, batch, scales, deque() if selected else None
        )
    if not (selected and compiled):
        return cost, out
    inside = replace(  # the compiled backward includes what is recomputed
        cost,
        input_gradient=cost.recompute + cost.input_gradient,
        recompute=cost.forward,
        kept=cost.selected,
        temporary=cost.temporary + cost.kept - cost.selected,
        selected=0.0,
    )
    return inside, out


def _run(
    piece: Piece,
    comes: Mapping[str, Like],
    batch: Mapping[str, Tensor],
    scales: Scales,
    selected: Selected | None,
) -> tuple[PieceCost, dict[str, Like]]:
    # Without tied units, whose weights belong to an earlier piece.
    own = [unit for unit in piece.units if unit.piece == piece.units[0].piece]
    # 1. Forward. What stays alive behind it is what it keeps.
    bundle = _new(comes)
    entry = sum(x.untyped_storage().nbytes() for x in bundle.values())
    with scales.on("forward"):
        y = piece.forward(
            0, bundle, batch, keep=selected is None, selected=selected
        )
    out: dict[str, Like] = {name: (x.shape, x.dtype) for name, x in y.items()}
    # Tokens that travel, or x: what the next stage receives.
    sent = y.get(SENT, y["x"]) if "x" in y else y[SENT]
    leaves = 0 if piece.last else sent.numel() * sent.element_size()
    del sent
    part, temporary = 0, 0
    # 2. With `selected`: what the first forward has kept, then the recomputation.
    if selected is not None:
        del y
        part = scales.now
        temporary, scales.most = scales.most - part, part
        with scales.on("recompute"):
            y = piece.forward(0, bundle, batch, keep=True, selected=selected)
    most = scales.most
    del bundle, y
    kept = scales.now
    # 3. The gradients that backward starts from: the outputs', or the loss's scale.
    gradient = _new(
        {name: x for name, x in out.items() if x[1].is_floating_point}
    )
    gradient = (
        piece.seed(0, torch.ones(1, device="meta")) if piece.last else gradient
    )
    # A chooser's loss terms have gradients of their own.
    if piece.chooser:
        (choices,) = _new({CHOICES: out[CHOICES]}).values()
        share = torch.ones(1, device="meta")
        gradient |= piece.chooser.term_gradients(share, choices, choices[:1])
    # 4. Backward, whole or its first half. Peaks are counted above what is kept.
    scales.most = scales.now
    with scales.on("input_gradient"):
        gone = (piece.input_gradient if piece.splits else piece.backward)(
            0, gradient
        )
    temporary, after = max(temporary, max(most, scales.most) - kept), kept
    del gradient, gone
    # 5. The postponed weight gradients.
    if piece.splits:
        after = scales.most = scales.now
        with scales.on("weight_gradient"):
            piece.weight_gradient(0)
        temporary = max(temporary, scales.most - after)
    forward, inside = (
        scales.load("forward"),
        isinstance(piece.module, ReceivingPart),
    )
    cost = PieceCost(
        forward=forward,
        input_gradient=scales.load("input_gradient"),
        weight_gradient=scales.load("weight_gradient"),
        recompute=forward if selected is None else scales.load("recompute"),
        kept=float(kept),
        kept_after_i=float(after),
        input=float(entry),
        temporary=float(temporary),
        weights=float(sum(unit.numel for unit in own)),
        frozen=float(sum(unit.numel for unit in own if unit.frozen)),
        edge=float(leaves),
        selected=float(part),
        routed=float(sum(u.numel for u in own if inside or _is_routed(u))),
    )
    return cost, out
