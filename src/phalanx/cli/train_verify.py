"""`phalanx train verify=true`: the comparison of a run in small with one process, before its ranks start.

A process of its own makes it, on the first rank's host, once for all starts of the command. Ranks are forked
from a process without other threads, and the trial's ranks are threads; what it holds is given back when that
process ends. It computes on the CPU, so that it takes no memory of a GPU and no call of a network.
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
    """A run that does not compute what one process does: in which layout, and where first."""

    exit_code = 1


def refuse_different(run: Run, layout: Layout) -> None:
    """Raise if the run in this layout does not compute in small what one process does."""
    from ..comm import launch

    progress("verify = true: the run in small is compared with one process")
    chosen = replace(run, layout=str(layout))
    found: VerifiedRun
    (found,) = launch(_verified, 1, chosen, apart=True)
    if found.passed:
        progress(found.summary)
        return
    wrong = next(verdict for verdict in found.compared if not verdict.passed)
    raise RunDiffers(
        f"verify = true: {wrong.layout or 'one rank'} does not compute what one process does:"
        f" {wrong.first_difference.rstrip('.')}. Nothing was trained."
    )


def _verified(world: World, run: Run) -> VerifiedRun:
    """The comparison, in the process that `launch` has started."""
    return verify_run(run, on_cpu=True)
