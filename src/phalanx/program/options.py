"""The choices of a step that neither its layout nor its model makes: those of its run."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Run
from ..layout.optimizers import OPTIMIZERS
from .memory import Sizes
from .simulate import Costs


@dataclass(frozen=True)
class StepOptions:
    """Options of a step: its update, schedule and recomputation.

    `whole_matrices`: the optimizer updates whole matrices. `agree`: all
    ranks agree on the gradient norm, and that it is finite, before any update; every
    run does, with or without clipping and loss scaling. Without `overlaps`, gradients
    summed once a step are summed after the rank has computed all of it. Without
    `gathers_at_once`, weights gathered once a step are gathered one by one, `prefetch`
    uses ahead.

    A searched schedule is the best for these `costs`, where each rank keeps at most
    `held` microbatches. Runs search with equal costs. `recompute:fit` needs `sizes` and
    a `limit` in bytes.
    """

    whole_matrices: bool = False
    agree: bool = True
    overlaps: bool = True
    gathers_at_once: bool = True
    # For a searched schedule alone.
    costs: Costs | None = None
    held: tuple[float, ...] | None = None
    # For recompute:fit alone.
    sizes: Sizes | None = None
    limit: float = float("inf")


def options_for(optimizer: str) -> StepOptions:
    """The options of a run with the optimizer of that name."""
    return StepOptions(whole_matrices=OPTIMIZERS[optimizer].whole_matrices)


def options_of(run: Run) -> StepOptions:
    """The options of a run: the only place where its keys become choices of a step."""
    return options_for(run.optimizer.name)
