"""The ranks of one host, as passed to its watcher and as recorded in the run's
folder."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .ranks_folder import RanksFolder
from .reader import MOST_RANKS
from .untrusted import (
    Untrusted,
    items,
    line,
    number,
    parse_object,
    text,
    whole,
)

_MOST_HOSTS = 1 << 16
_ENTRY = ".json"
ANSWER = ".answer.json"


@dataclass(frozen=True)
class RankProcess:
    """A rank of this host: its process with its start time, and the paths of its
    memory."""

    rank: int
    pid: int
    started: int
    files: tuple[str, ...]

    @classmethod
    def parse(cls, table: Any) -> "RankProcess":
        # The order of the entries in `__str__`.
        rank, pid, started, files = items(table, 4)
        paths = tuple(line(path, 64) for path in items(files, 8))
        return cls(
            whole(rank, 0, MOST_RANKS),
            whole(pid, 0, 1 << 30),
            whole(started),
            paths,
        )


@dataclass(frozen=True)
class Hosted:
    """The ranks of one host.

    `hosts` are all hosts of the run, including this one. `start` is a random name of
    this start of the run, which distinguishes its files from an earlier start's.
    """

    host: str
    out: str
    hosts: tuple[str, ...]
    timeout: float
    ranks: tuple[RankProcess, ...]
    # a folder to be deleted when the process that started this host's ranks has ended
    memory: str = ""
    start: str = ""
    program: str = "rank-watch"  # program in whose name the watcher reports

    @classmethod
    def parse(cls, raw: bytes | str) -> "Hosted":
        """Parse what `str` of such a value returns. Raises `Untrusted` for anything
        else."""
        table = parse_object(raw)
        try:
            entries = items(table["ranks"], MOST_RANKS)
            return cls(
                host_name(table["host"]),
                text(table["out"], 1 << 16),
                tuple(
                    host_name(name)
                    for name in items(table["hosts"], _MOST_HOSTS)
                ),
                number(table["timeout"]),
                tuple(RankProcess.parse(entry) for entry in entries),
                text(table["memory"], 1 << 16),
                line(table["start"], 64),
                line(table["program"], 64),
            )
        except (
            KeyError,
            ValueError,
        ) as error:  # also for entries of the wrong length
            raise Untrusted(f"not the ranks of a host: {error}") from None

    def __str__(self) -> str:
        ranks = [[r.rank, r.pid, r.started, r.files] for r in self.ranks]
        return json.dumps(asdict(self) | {"ranks": ranks})

    @property
    def folder(self) -> RanksFolder:
        return RanksFolder(Path(self.out))

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.host}{_ENTRY}"


def host_name(value: Any) -> str:
    """Check the name of a host; refuse one that could lead out of a folder."""
    name = line(value, 200)
    # No slash and no leading dot: "../x" and ".hidden" are refused.
    if not re.fullmatch(r"\w[\w.#-]*", name, re.ASCII):
        raise Untrusted("not the name of a host")
    return name


def entries_of(folder: RanksFolder) -> list[str]:
    """List the files in which hosts record their ranks."""
    names = [name for name in folder.names() if name.endswith(_ENTRY)]
    # HOST.json, but neither HOST.answer.json nor the hidden file of a write in
    # progress.
    return [
        name
        for name in names
        if not name.startswith(".") and not name.endswith(ANSWER)
    ]
