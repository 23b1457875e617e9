"""A run whose ranks are watched: each writes its position, and the first rank of every host starts a
process that notices when they make no progress (`phalanx.hang`)."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple
from pathlib import Path

from ..comm import World
from ..comm.agree import exchange
from ..comm.threads import ThreadWorld
from ..hang import Hosted, Positions
from ..hang.diagnosis import PATIENCE
from ..hang.hosted import RankProcess
from ..hang.positions import TOKEN
from ..hang.processes import started_at
from ..layout.run import Run
from .checkpoint_memory import memory_folder
from .flight import flight_record
from .hosts import RankHome, hosts_of, machine_name, place
from .watcher_process import WatcherProcess


def call_timeout(run: Run) -> float:
    """Seconds that a call of a group may wait: longer than any wait that the watcher takes for healthy,
    so that the watcher speaks first. What is left to it is a watcher that was killed."""
    return (PATIENCE + 1) * run.hang.timeout if run.hang.timeout else 7 * 86400.0


@contextmanager
def watched(world: World, run: Run) -> Iterator[Positions]:
    """Writes down where this rank is, and has it watched. Every rank of the world comes here."""
    positions = Positions(world.rank)
    if isinstance(world, ThreadWorld):  # of one process: a debugger shows it whole
        yield positions
        positions.close("ended")
        return
    hosts, start = _meet(world, positions)
    positions.host = next(
        name for name, ranks in hosts.items() if world.rank in {r.rank for r in ranks}
    )
    ranks = hosts[positions.host]
    # Process 1 of a container is out of reach for signals that are sent inside it.
    seen = all(rank.files and rank.pid > 1 for rank in ranks)
    positions.watched = seen and run.hang.timeout > 0
    watcher = None
    if seen and ranks[0].rank == world.rank:
        out, memory = Path(run.out).resolve(), memory_folder(run) or ""
        hosted = Hosted(
            positions.host,
            str(out),
            tuple(hosts),
            run.hang.timeout,
            tuple(ranks),
            str(memory),
            start,
        )
        with suppress(OSError):  # for those who look from outside
            hosted.folder.make()
            hosted.folder.write(hosted.name, str(hosted))
        watcher = WatcherProcess(hosted, positions)
    if world.device.type == "cuda":
        positions.flight = flight_record
    world.record(positions)
    how = "failed"
    try:
        yield positions
        how = "ended"
    finally:
        positions.close(how)
        if watcher:
            watcher.close()
        world.record(None)


def _meet(
    world: World, positions: Positions
) -> tuple[dict[str, list[RankProcess]], str]:
    """The ranks of each host by its name, and a random name of this start of the run: the same on all
    ranks."""
    positions.words[TOKEN] = 1 + secrets.randbits(62)
    pid = os.getpid()
    mine = RankProcess(world.rank, pid, started_at(pid), tuple(positions.paths))
    home = RankHome(machine_name(), place(), mine, positions.words[TOKEN])
    group = world.split("watched", [range(world.size)])
    texts = exchange(group, json.dumps([*astuple(home), secrets.token_hex(8)]))
    tables = [json.loads(text) for text in texts]
    homes = [
        RankHome(machine, where, RankProcess.parse(process), token)
        for machine, where, process, token, _ in tables
    ]
    # All read before anybody may end: in the second exchange all have come past it.
    sees = [other.process.rank for other in homes if home.sees(other)]
    sights = [json.loads(text) for text in exchange(group, json.dumps(sees))]
    world.release("watched")
    return hosts_of(homes, sights), tables[0][-1]


def tell_compilations(positions: Positions) -> None:
    """Has torch's compiler say when it is at work."""
    from torch._dynamo.callback import callback_handler

    phases = ExitStack()
    callback_handler.register_start_callback(
        lambda _: phases.enter_context(positions.phase("compiling"))
    )
    callback_handler.register_end_callback(lambda _: phases.close())
