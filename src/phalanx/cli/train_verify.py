"""`phalanx train verify=true`: compares a scaled-down run with one process before its
ranks start.

The comparison runs in a process of its own, on the first rank's host, once for all
starts of the command. Ranks are forked from a process without other threads, but the
trial's ranks are threads; its memory is freed when that process ends. It computes on
the CPU, so that it needs no GPU memory and no network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..api.verify import VerifiedRun, verify_run
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
    (found,) = launch(_verified, 1, chosen, apart=True)
    if found.passed:
        progress(found.summary)
        return
    wrong = next(verdict for verdict in found.compared if not verdict.passed)
    raise RunDiffers(
        f"verify = true: {wrong.layout or 'one rank'} differs from one process:"
        f" {wrong.first_difference.rstrip('.')}. Nothing was trained."
    )


def _verified(world: World, run: Run) -> VerifiedRun:
    """Run the comparison, in the process that `launch` started."""
    return verify_run(run, on_cpu=True)
