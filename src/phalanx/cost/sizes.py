"""Bytes of a layout's pieces and units, for the memory of `check` and `simulate`.

Pieces are costed as elsewhere in this package. Units know the sizes of their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..comm import TallyWorld
from ..layout import Layout
from ..layout.choices import GLOO, GRAPHS
from ..layout.optimizers import USUAL_OPTIMIZER, OptimizerChoice
from ..parallel import Model, Precision, Unit
from ..parallel.batch import edge_shape, microbatches
from ..parallel.block_parts import cut_blocks
from ..parallel.kinds import alike
from ..parallel.local import LocalModel, build_local
from ..parallel.matrices import owned_elements
from ..program import PieceCost, Program, Sizes, ops
from .pieces import Like, into, run, with_derived
from .scales import PREFIX, Known

Batch = Mapping[str, Tensor]


def sizes_of(
    make: Callable[[], Model],
    layout: Layout,
    program: Program,
    batch: Batch,
    precision: Precision,
    *,
    optimizer: OptimizerChoice = USUAL_OPTIMIZER,
    target: str = "cpu",
    backend: str = "",
) -> Sizes:
    """The bytes of every piece and unit of a layout, for its largest microbatch.

    `batch` is the batch of a step on any device: only shapes and dtypes count. With
    target `cpu`, norms are the model's own, and CUDA's fused norm keeps as much.
    `backend` is the backend of messages, if known: gloo holds on to what was sent.
    """
    whole = {name: x.to("meta") for name, x in batch.items()}
    kinds, known = alike(cut_blocks(make(), layout)), dict[Any, Any]()
    pieces: dict[int, PieceCost] = {}
    units: dict[int, list[Unit]] = {}
    # Each row's first rank, whose share of the batch is the largest.
    for row in range(len(program.rows)):
        world = TallyWorld(program.owner.index(row), layout.ranks)
        model = make()
        try:
            held = build_local(
                world,
                layout,
                model,
                program,
                precision=precision,
                prefix=PREFIX,
            )
            # Microbatches differ by at most one row, and the first is the longest.
            own = microbatches(
                whole,
                layout,
                held.coordinates["data"],
                held.coordinates["cp"],
                ahead=held.ahead,
            )[0]
            own = held.complete(own)
            width = model.shape.hidden if model.shape else 0
            edge = (
                edge_shape(own, width, layout.tp if layout.seq else 1),
                precision.compute,
            )
            # Pieces of which only a part is recomputed keep `selected` bytes.
            parts = {
                op.piece
                for op in program.rows[row]
                if op.kind == ops.RECOMPUTE_PART
            }
            pieces |= _costed(
                held, kinds, edge, own, world, known, target, parts
            )
        finally:
            world.clear()
        # A tied unit is held by several rows.
        for number in {**held.units, **held.frozen}:
            units.setdefault(number, held.weights(number))
    costed = [pieces[p] for p in range(program.pieces)]
    found = replace(
        _of_units(units, program.pieces, layout, optimizer),
        kept=tuple(w.kept for w in costed),
        input=tuple(w.input for w in costed),
        kept_after_i=tuple(w.kept_after_i for w in costed),
        temporary=tuple(w.temporary for w in costed),
        edge=tuple(w.edge for w in costed),
        selected=tuple(w.selected for w in costed),
        derived=tuple(w.derived for w in costed),
        sends_stay=backend == GLOO,
    )
    if layout.compile != GRAPHS:
        return found
    # Blocks are compiled. Microbatches may differ by a row.
    rows = next(iter(whole.values())).shape[0]
    uneven = rows % (layout.data * layout.microbatches) > 0
    return found.in_graphs(range(1, program.pieces - 1), shapes=1 + uneven)


def _costed(
    held: LocalModel,
    kinds: tuple[int, ...],
    edge: Like,
    batch: Batch,
    world: TallyWorld,
    known: Known,
    target: str,
    parts: Container[int],
) -> dict[int, PieceCost]:
    """Costs of the rank's pieces; of those that are alike, one is run.

    A part of each piece in `parts` is recomputed.
    """
    found: dict[int, PieceCost] = {}
    comes: dict[str, Like] = {}
    for number, piece in held.pieces.items():
        like = next((n for n in found if kinds[n] == kinds[number]), None)
        if like is not None:
            found[number] = found[like]
            continue
        taken, part = into(piece, edge, comes), number in parts
        found[number], out = run(
            piece,
            taken,
            batch,
            world.ledger,
            known,
            target=target,
            selected=part,
        )
        found[number] = with_derived(found[number], held, piece, batch)
        # Outputs of a block's parts, for the parts behind them.
        comes |= out
    return found


def _of_units(
    units: Mapping[int, Sequence[Unit]],
    pieces: int,
    layout: Layout,
    optimizer: OptimizerChoice,
) -> Sizes:
    def each(
        bytes: Callable[[Unit], int], *, frozen: bool = False
    ) -> tuple[float, ...]:
        # A piece's units: its own, and that of its experts.
        own = [
            [*units.get(n, ()), *units.get(n + pieces, ())]
            for n in range(pieces)
        ]
        return tuple(
            float(sum(bytes(u) for u in some if frozen or not u.frozen))
            for some in own
        )

    def always(unit: Unit) -> int:
        """Bytes that always stay: home, extra buffers, weights never freed."""
        held = unit.bytes
        # A resident unit has its whole weights always, less the home inside of them.
        stay = held.weights - held.shared if unit.resident else 0
        return held.home + held.beside + stay

    def moments(unit: Unit) -> int:
        """Number of moment elements that the optimizer keeps for this rank's part."""
        # Elements of matrices have the moments of the optimizer for matrices.
        of_matrices = len(optimizer.moments(matrix=True)) * unit.moved
        others = len(optimizer.moments()) * (unit.part - unit.moved)
        matrices = optimizer.row.matrices
        owned = owned_elements(unit, matrices) if matrices else 0
        return of_matrices + others + owned

    parts = each(lambda unit: unit.bytes.gradient_shard)
    homes = each(lambda unit: unit.bytes.gradient_home)
    return Sizes(
        kept=(),
        input=(),
        home=each(always, frozen=True),
        gathered=each(
            lambda unit: 0 if unit.resident else unit.bytes.weights,
            frozen=True,
        ),
        gradient=each(lambda unit: unit.bytes.gradient),
        gradient_shard=parts if layout.shards > 1 else (),
        gradient_home=homes if any(homes) else (),
        optimizer=each(
            lambda unit: moments(unit) * unit.precision.master.itemsize
        ),
        # what is sent, what comes back, and the results
        matrices=each(
            lambda unit: 3 * unit.moved * unit.precision.master.itemsize
        ),
    )
