"""The training step of a layout: a schedule, then the passes, in this order."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Layout
from .memory import Sizes
from .op import Program, ProgramError
from .passes import (
    expand,
    finish,
    gather,
    messages,
    offload_activations,
    recompute,
    recompute_to_fit,
    reduce,
    tie,
)
from .schedules import schedule
from .search import search
from .simulate import Costs

__all__ = ["build"]


def build(
    layout: Layout,
    stages: Sequence[range],
    tied: tuple[tuple[int, int], ...] = (),
    *,
    agree: bool = False,
    costs: Costs | None = None,
    sizes: Sizes | None = None,
    limit: float = float("inf"),
) -> Program:
    """The program of a layout. `stages` are the pieces of each virtual stage, `tied` the (piece,
    unit) pairs that share a weight. `recompute:fit` needs sizes and a limit in bytes."""
    if layout.schedule == "searched":
        order = search(
            layout.pp, layout.microbatches, layout.chunks, costs or Costs({"F": 1, "I": 1, "W": 1})
        )
    else:
        order = schedule(layout.schedule, layout.pp, layout.microbatches, layout.chunks)
    ordered = Program(order.rows, layout.mesh)
    program = expand(ordered, stages, tied)
    if layout.recompute == "fit":
        if sizes is None:
            raise ProgramError("recompute:fit needs the bytes that pieces keep and a memory limit.")
        program = recompute_to_fit(program, sizes, [limit] * len(program.rows))
    else:
        program = recompute(program, stages, layout.recompute)
    if "activations" in layout.offload:
        program = offload_activations(program)
    program = messages(program)
    if layout.zero or "weights" in layout.offload:
        program = gather(
            program,
            each_use=layout.gather == "micro",
            drop=layout.zero == 3 or "weights" in layout.offload,
            prefetch=layout.prefetch,
        )
    program = reduce(program, each_microbatch=layout.reduce == "micro")
    return finish(tie(program), agree=agree)
