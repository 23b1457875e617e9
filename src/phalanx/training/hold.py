"""Locks the folders of a run whose ranks were started by a launcher: rank 0 holds the
lock (`lock.py`)."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..comm import World
from ..comm.agree import agreement, broadcast_text, errors_of
from ..layout.run import Run
from .lock import RunLocked, hold_run, owner_of, unshared
from .stop import StopError, remove_stale_stop


@contextmanager
def hold_from_first_rank(
    world: World, run: Run, *, held: bool
) -> Iterator[None]:
    """Lock the run's folders from rank 0, unless the process that started the ranks has
    done so.

    Collective. If another run has locked them, every rank raises the same error.
    """
    # The command that started local ranks holds the lock for them.
    if held:
        yield
        return
    # Stop files that are older than this belong to an earlier start.
    begun = time.time()
    with agreement(
        world
    ) as facts:  # without agreement the folder is not shared
        facts["out"] = run.out
    start, refusal = world.split("start", [range(world.size)]), ""
    with ExitStack() as stack:
        if world.rank == 0:
            try:
                stack.enter_context(hold_run(Path(run.out), run.checkpoints))
                remove_stale_stop(run, begun, launched=True)
            except (RunLocked, StopError, OSError) as error:
                refusal = str(error)
        # Every rank learns the refusal, and raises it together.
        if refusal := broadcast_text(start, refusal):
            raise RunLocked(refusal)
        owner = broadcast_text(start, owner_of(run.checkpoints))
        # All ranks must see rank 0's lock: otherwise the folder is not shared.
        if unseen := errors_of(start, unshared(run.checkpoints, owner)):
            raise RunLocked("; ".join(unseen[:4]))
        yield
