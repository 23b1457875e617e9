"""Watched ranks: each writes its position, and the first rank of every host starts the
watcher."""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path

from .hosted import Hosted, RankProcess
from .hosts import RankHome, hosts_of, machine_name, place
from .positions import TOKEN, Positions
from .processes import started_at
from .watcher_process import WatcherProcess

# sends each rank's text to all ranks, in rank order
Exchange = Callable[[str], Sequence[str]]


@contextmanager
def watched(
    rank: int,
    exchange: Exchange,
    out: str | Path,
    timeout: float = 600.0,
    *,
    memory: str = "",
    program: str = "rank-watch",
) -> Iterator[Positions]:
    """Record where this rank is, and have it watched. Collective over all ranks of the
    program.

    A run without progress for `timeout` seconds beyond its longest operation is ended,
    and `hang.txt` in the folder `out` names the responsible rank; 0 ends nothing.
    `memory` is a folder that is deleted once the process that started the ranks has
    ended.
    """
    positions = Positions(rank)
    # Two exchanges of all ranks: who is where, and who can read whom.
    hosts, start = _meet(rank, exchange, positions)
    positions.host = next(
        name
        for name, ranks in hosts.items()
        if rank in {r.rank for r in ranks}
    )
    ranks = hosts[positions.host]
    # Process 1 of a container cannot be reached by signals from inside it.
    seen = all(each.files and each.pid > 1 for each in ranks)
    positions.watched = seen and timeout > 0
    watcher = None
    if seen and ranks[0].rank == rank:
        hosted = Hosted(
            host=positions.host,
            out=str(Path(out).resolve()),
            hosts=tuple(hosts),
            timeout=timeout,
            ranks=tuple(ranks),
            memory=memory,
            start=start,
            program=program,
        )
        # A folder that cannot be written to costs the view from outside, not
        # the watching.
        with suppress(OSError):  # for outside observers
            hosted.folder.make()
            hosted.folder.write(hosted.name, str(hosted))
        watcher = WatcherProcess(hosted, positions)
    # Anything that raises in the block, or ends it early, leaves "failed".
    how = "failed"
    try:
        yield positions
        how = "ended"
    finally:
        positions.close(how)
        if watcher:
            watcher.close()


def _meet(
    rank: int, exchange: Exchange, positions: Positions
) -> tuple[dict[str, list[RankProcess]], str]:
    """Return the ranks of each host by name, and a random name of this start, the same
    on all ranks."""
    # Not 0, which stands for memory that cannot be read.
    positions.words[TOKEN] = 1 + secrets.randbits(62)
    pid = os.getpid()
    mine = RankProcess(rank, pid, started_at(pid), tuple(positions.paths))
    home = RankHome(machine_name(), place(), mine, positions.words[TOKEN])
    texts = exchange(json.dumps([*astuple(home), secrets.token_hex(8)]))
    tables = [json.loads(text) for text in texts]
    homes = [
        RankHome(machine, where, RankProcess.parse(process), token)
        for machine, where, process, token, _ in tables
    ]
    # Read before anybody may end: nobody passes the second exchange before all have
    # read.
    sees = [other.process.rank for other in homes if home.sees(other)]
    sights = [json.loads(text) for text in exchange(json.dumps(sees))]
    # The first rank's random name serves for all.
    return hosts_of(homes, sights), tables[0][-1]
