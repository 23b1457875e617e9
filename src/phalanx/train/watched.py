"""A run whose ranks are watched: each writes its positions, and the first rank of every host starts a
process that notices when they stand still (`phalanx.hang`)."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import phalanx

from ..comm import World
from ..comm.agree import exchange
from ..comm.threads import ThreadWorld
from ..hang import Hosted, Positions
from ..hang.diagnosis import PATIENCE
from ..hang.positions import started_at
from ..layout.files import write_text
from ..layout.run import Run
from .checkpoint_memory import memory_folder

# Nothing that a launcher sets: who looks for its ranks by their environment finds ranks only.
_ENVIRONMENT = {
    name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ
}
_START = "import sys; sys.path.insert(0, {!r}); from phalanx.hang.watcher import main; main()"


def call_timeout(run: Run) -> float:
    """Seconds that a call of a group may wait: longer than any wait that the watcher takes for healthy,
    so that the watcher speaks first. What is left to it is a watcher that was killed."""
    return (PATIENCE + 1) * run.hang.timeout if run.hang.timeout else 7 * 86400.0


@contextmanager
def watched(world: World, run: Run) -> Iterator[Positions]:
    """Write down where this rank is, and have it watched. Every rank of the world comes here."""
    positions = Positions(world.rank)
    if isinstance(world, ThreadWorld):  # of one process: a debugger shows it whole
        yield positions
        positions.close("ended")
        return
    mine = [world.rank, os.getpid(), started_at(os.getpid()), positions.paths]
    group = world.split("watched", [range(world.size)])
    texts = exchange(group, json.dumps([host(), mine]))
    world.release("watched")
    hosts: dict[str, list[Any]] = {}
    for name, rank in map(json.loads, texts):
        hosts.setdefault(name, []).append(rank)
    ranks = hosts[host()]
    positions.watched = all(rank[3] for rank in ranks) and run.hang.timeout > 0
    if ranks[0][0] == world.rank and all(rank[3] for rank in ranks):
        out, memory = Path(run.out).resolve(), memory_folder(run) or ""
        _start_watcher(
            Hosted(host(), str(out), tuple(hosts), run.hang.timeout, tuple(ranks), str(memory))
        )
    world.record(positions)
    how = "failed"
    try:
        yield positions
        how = "ended"
    finally:
        positions.close(how)
        world.record(None)


def host() -> str:
    """The processes that can see each other: those of one host, and there of one container."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}-{space}".replace("/", "-")


def _start_watcher(hosted: Hosted) -> None:
    with suppress(OSError):  # for those who look from outside
        hosted.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(hosted.path, str(hosted))
    root = str(Path(phalanx.__file__).parents[1])
    command = [sys.executable, "-S", "-c", _START.format(root)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=_ENVIRONMENT, text=True
    )
    assert process.stdin is not None
    with suppress(OSError):  # it has been killed: the run goes on without
        process.stdin.write(str(hosted))
        process.stdin.close()
    # It ends after its ranks; where the process lives on, somebody has to ask how it ended.
    threading.Thread(target=process.wait, daemon=True).start()


def tell_compilations(positions: Positions) -> None:
    """Have torch's compiler say when it is at work."""
    from torch._dynamo.callback import callback_handler

    phases = ExitStack()
    callback_handler.register_start_callback(
        lambda _: phases.enter_context(positions.phase("compiling"))
    )
    callback_handler.register_end_callback(lambda _: phases.close())
