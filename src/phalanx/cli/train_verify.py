"""Comparisons with one process before the ranks of `phalanx train` start.

With `verify=true` it is a scaled-down run. A model of the user's own that has not been
tried in its layout makes one step.

A comparison runs in a process of its own, on the first rank's host, once for all
starts of the command. Ranks are forked from a process without other threads, but the
trial's ranks are threads; its memory is freed when that process ends. It computes on
the CPU, so that it needs no GPU memory and no network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..api.verify import VerifiedRun, subject_of, verify_run
from ..layout import Layout
from ..layout.run import Run
from .usage import progress

if TYPE_CHECKING:
    from ..comm import World


class RunDiffers(ValueError):
    """Raised if a run differs from one process: names the layout and the first
    difference."""

    exit_code = 1


def refuse_different(run: Run, layout: Layout) -> None:
    """Raise if the scaled-down run in this layout differs from one process."""
    from ..comm import launch

    progress("verify = true: comparing a scaled-down run with one process")
    chosen = replace(run, layout=str(layout))
    found: VerifiedRun
    # One process of its own, whose memory is freed when it ends.
    (found,) = launch(_verified, 1, chosen, apart=True)
    if found.passed:
        progress(found.text)
        return
    wrong = next(verdict for verdict in found.compared if not verdict.passed)
    raise RunDiffers(
        f"verify = true: {wrong.layout or 'one rank'} differs from one process:"
        f" {wrong.first_difference.rstrip('.')}. Nothing was trained."
    )


def refuse_unverified(run: Run, layout: Layout) -> None:
    """Raise if a model of the user's own differs from one process in this layout.

    Nothing is compared if an earlier trial has passed.
    """
    from ..comm import launch
    from ..verification.first import is_verified

    if not run.own or not run.verify_own or run.loss:
        return
    if is_verified(subject_of(run), layout):
        return
    chosen = replace(run, layout=str(layout))
    (untried,) = launch(_tried, 1, chosen, apart=True)
    if untried:
        progress(
            f"{run.own} is not compared with one process before its first step: {untried}"
        )


def _tried(world: World, run: Run) -> str:
    """Try the model, in the process that `launch` started."""
    from ..verification.first import refuse_unverified as refuse_different_step

    return refuse_different_step(subject_of(run), Layout.parse(run.layout))


def _verified(world: World, run: Run) -> VerifiedRun:
    """Run the comparison, in the process that `launch` started."""
    return verify_run(run, on_cpu=True)
