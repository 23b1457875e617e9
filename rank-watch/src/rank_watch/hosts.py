"""Groups the ranks of a run by host: ranks whose processes can read each other's
memory.

Cloned machines share a name, and a snapshot of a running one even shares its boot id,
so ranks that may be on one host test it: each reads a random number in the others'
memory.
"""

import hashlib
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from .hosted import RankProcess
from .positions import TOKEN
from .processes import Process
from .reader import PositionReader


@dataclass(frozen=True)
class RankHome:
    """A rank, the name of its machine, and properties shared by all processes on its
    host.

    `token` is the random number in its memory.
    """

    machine: str
    place: str
    process: RankProcess
    token: int

    def sees(self, other: "RankHome") -> bool:
        """True if this process, which belongs to this rank, can read another rank's
        memory."""
        if self.process.rank == other.process.rank:
            return True
        # Equal places are necessary, as process numbers of another namespace
        # mean other processes.
        return (
            # The proof: only a process of this host has the random number in
            # its memory.
            self.place == other.place
            and _token_of(other.process) == other.token
        )


def _token_of(rank: RankProcess) -> int:
    """Return the random number in a rank's memory; 0 if this process cannot read it."""
    with suppress(OSError):
        reader = PositionReader(Process(rank.pid, rank.started), rank.files)
        try:
            return reader.word(TOKEN)
        finally:
            reader.close()
    return 0


def place() -> str:
    """Return a text shared by processes of one host: boot id, process namespace and
    shared memory."""
    parts = []
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    with suppress(OSError):
        shared = os.stat("/dev/shm")
        parts.append(f"{shared.st_dev}:{shared.st_ino}")
    # Without /proc only the name can tell hosts apart.
    return " ".join(parts) or socket.gethostname()


def machine_name() -> str:
    """Return this machine's name in a form that can be part of a file name."""
    # The name becomes part of a file's name in the run's folder.
    name = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)
    return name.lstrip(".-")[:64] or "host"


def hosts_of(
    homes: Sequence[RankHome], sees: Sequence[Sequence[int]]
) -> dict[str, list[RankProcess]]:
    """Return the ranks of each host by its name. `sees[rank]`: the other ranks that it
    can read."""
    hosts: list[list[RankHome]] = []
    for rank, home in enumerate(homes):
        # Joins the first host whose first rank it can read and that can read
        # it; else it is a new host.
        for members in hosts:
            first = members[0].process.rank
            if first in sees[rank] and rank in sees[first]:
                members.append(home)
                break
        else:
            hosts.append([home])
    named = zip(_names([members[0] for members in hosts]), hosts, strict=True)
    return {
        name: [home.process for home in members] for name, members in named
    }


def _names(homes: Sequence[RankHome]) -> list[str]:
    """Return the hosts' names: their machines', with a suffix if several machines share
    a name."""
    machines = Counter(home.machine for home in homes)
    used = Counter[str]()
    names = []
    for home in homes:
        name = home.machine
        if machines[name] > 1:
            # Cloned machines: the place tells them apart, and a number those
            # that share even that.
            name += f"-{hashlib.sha256(home.place.encode()).hexdigest()[:6]}"
        used[name] += 1
        names.append(f"{name}#{used[name]}" if used[name] > 1 else name)
    return names
