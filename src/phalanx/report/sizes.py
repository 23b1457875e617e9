"""Memory of a run's model: bytes of its pieces and units, and the ranks that hold each
part.

The engine is built for each rank with tensors that take no memory, and asked for both.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..comm import TallyWorld
from ..cost import sizes_of
from ..drawing.shards import Slice
from ..layout import Layout
from ..layout.optimizers import USUAL_OPTIMIZER, OptimizerChoice
from ..parallel import Model
from ..parallel.local import build_local
from ..parallel.low_precision import matmul_named
from ..program import Program, Sizes
from ..training.precision import precision_of


def sizes_of_run(
    make: Callable[[], Model],
    layout: Layout,
    program: Program,
    sequence: int,
    target: str,
    optimizer: OptimizerChoice = USUAL_OPTIMIZER,
) -> Sizes:
    """Return the bytes of each piece and unit, for the largest microbatch."""
    shape, matmul = make().shape, matmul_named(layout.matmul)
    precision = replace(precision_of(layout.precision), matmul=matmul)
    assert shape is not None
    # On meta tensors: shapes without memory.
    ids = torch.empty(shape.batch, sequence, dtype=torch.int64, device="meta")
    names = ["tokens", "targets", "positions"]
    names += ["noise"] * bool(shape.dropout)
    batch = dict.fromkeys(names, ids)
    if shape.kind == "mlp":
        batch = {
            "inputs": torch.empty(shape.batch, shape.hidden, device="meta")
        }
    return sizes_of(
        make,
        layout,
        program,
        batch,
        precision,
        optimizer=optimizer,
        target=target,
    )


def shards_of(
    make: Callable[[], Model], layout: Layout, program: Program, most: int
) -> tuple[Slice, ...]:
    """Return the part of each weight that each of the first `most` ranks computes with,
    and the part it keeps."""
    found = []
    for rank in range(min(layout.ranks, most)):
        # A world that counts messages and sends none.
        world = TallyWorld(rank, layout.ranks)
        try:
            precision = precision_of(layout.precision)
            held = build_local(
                world, layout, make(), program, precision=precision
            )
            for unit in held.every_unit:
                kept = {
                    e.weight.name: (e.start, e.stop) for e in unit.entries()
                }
                for weight in unit.order:
                    # Ranges of each dim on this rank of tp.
                    box = tuple((cut.start, cut.stop) for cut in weight.cuts)
                    found.append(
                        Slice(
                            rank,
                            weight.name,
                            weight.shape,
                            box,
                            # Elements of the flat box that this rank keeps;
                            # None: none.
                            kept.get(weight.name),
                        )
                    )
        finally:
            world.clear()
    return tuple(found)
