"""Connects a run to the watcher process of each host (`rank_watch`), which ends a run
that hangs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import rank_watch
from rank_watch import Positions
from rank_watch.diagnosis import PATIENCE

from ..comm import World
from ..comm.agree import exchange
from ..comm.threads import ThreadWorld
from ..layout.run import Run
from .checkpoint_memory import memory_folder
from .flight import flight_record


def call_timeout(run: Run) -> float:
    """Return the timeout of a group's calls in seconds.

    It is longer than any wait that the watcher considers healthy, so that the watcher
    reports first; it only matters if the watcher was killed.
    """
    return (
        (PATIENCE + 1) * run.hang.timeout if run.hang.timeout else 7 * 86400.0
    )


@contextmanager
def watched(world: World, run: Run) -> Iterator[Positions]:
    """Record where this rank is, and have it watched. Collective."""
    # ranks are threads of one process, which a debugger shows whole
    if isinstance(world, ThreadWorld):
        positions = Positions(world.rank)
        yield positions
        positions.close("ended")
        return
    group = world.split("watched", [range(world.size)])
    # The watcher deletes checkpoints in memory when the run is gone.
    memory = str(memory_folder(run) or "")
    with rank_watch.watched(
        world.rank,
        partial(exchange, group),
        run.out,
        run.hang.timeout,
        memory=memory,
        program="phalanx",
    ) as positions:
        # The group served to begin: the watcher uses files from here on.
        world.release("watched")
        if world.device.type == "cuda":
            positions.flight = flight_record
        # Groups record their calls for the watcher.
        world.record(positions)
        try:
            yield positions
        finally:
            world.record(None)


def tell_compilations(positions: Positions) -> None:
    """Report the phases in which torch's compiler is at work."""
    from torch._dynamo.callback import callback_handler

    phases = ExitStack()
    callback_handler.register_start_callback(
        lambda _: phases.enter_context(positions.phase("compiling"))
    )
    callback_handler.register_end_callback(lambda _: phases.close())
