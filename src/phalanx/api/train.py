"""Trains a run as one rank of a world, from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..layout import Run

if TYPE_CHECKING:
    from ..comm import World
    from ..training.loop import Outcome


def train(
    world: World, run: Run, layout: str = "", quiet: bool = False
) -> Outcome:
    """Train a run to the end, or until asked to stop. Collective.

        phalanx.train(phalanx.join(), phalanx.Run.load("run.toml"))

    world: this rank's connection to the others
    run: the run, from a file or from keys
    layout: layout as text; by default the run's for the world's number of ranks. `auto` then means
        the recipe, since only the command plans
    quiet: print nothing
    """
    from ..comm import agreement
    from ..layout import Layout
    from ..training.loop import train as train_rank
    from ..training.program import layout_for
    from ..verification.first import refuse_unverified
    from .verify import subject_of

    # All ranks learn of a refusal before anybody joins a group.
    with agreement(world):
        chosen = (
            Layout.parse(layout) if layout else layout_for(run, world.size)
        )
        # Only a model of the user's own is tried, and not with a loss such as
        # DPO.
        tried = run.own and run.verify_own and not run.loss
        if tried and not world.rank:
            refuse_unverified(subject_of(run), chosen)
    return train_rank(world, run, layout, quiet)
