"""Ranks of a run on other hosts, queried through the run's folder.

To ask, a process replaces the file `asked`. Each host's watcher then writes its state
to HOST.answer.json, with the time of the question by the file server's clock, since
clocks of hosts may differ.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .hosted import ANSWER
from .rank_state import RankState, pack, unpack
from .ranks_folder import ASKED, RanksFolder
from .untrusted import parse_object, whole

# Nanoseconds by which an answer may be older than the question.
FRESH = 10 * 10**9
# Instead of a time: the watcher has ended, and no further answer will come.
LAST = -1
ASK_EVERY = 2.0  # seconds
RECENT = 6.0  # seconds for which a watcher trusts an answer
_POLL = 0.25
_ANSWER_EVERY = 0.75


def ask(folder: RanksFolder) -> None:
    """Ask all hosts again. Without write permission, one only sees answers to other
    questions."""
    with suppress(OSError):
        folder.write(ASKED)


def answer(
    folder: RanksFolder,
    host: str,
    start: str,
    asked: int,
    states: list[RankState],
) -> None:
    """Write the state of a host's ranks as an answer."""
    table = {"asked": asked, "start": start, **pack(states)}
    folder.write(f"{host}{ANSWER}", json.dumps(table))


def answers(
    folder: RanksFolder, hosts: Iterable[str], start: str
) -> dict[str, tuple[int, list[RankState]]]:
    """Return the fresh answers of hosts for this start of the run, each with its
    time."""
    found = dict[str, tuple[int, list[RankState]]]()
    asked = 0
    with suppress(OSError):
        asked = folder.read(ASKED).written
    for host in hosts:
        with suppress(OSError, ValueError, KeyError):
            table = parse_object(folder.read(f"{host}{ANSWER}").raw)
            # Both times are of the file server's clock: modification times of
            # `asked`.
            at = whole(table["asked"], LAST)
            # An earlier start of the same run leaves its answers behind.
            if table["start"] == start and (at == LAST or asked - at < FRESH):
                found[host] = at, unpack(table, host)
    return found


@dataclass(frozen=True)
class Others:
    """A watcher's knowledge of other hosts: their ranks, hosts that do not answer, and
    hosts that may still answer."""

    ranks: tuple[RankState, ...] = ()
    missing: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()


@dataclass
class _Heard:
    """The last answer of a host: its arrival by our clock, and the question it
    answers."""

    at: float
    asked: int
    ranks: list[RankState]


class Elsewhere:
    """The other hosts as a watcher sees them.

    Their files are read in a separate thread, so that an unresponsive file system
    blocks nothing else.
    """

    def __init__(
        self, out: Path, hosts: Sequence[str], start: str, timeout: float
    ) -> None:
        self.folder, self.hosts, self.start = (
            RanksFolder(out),
            list(hosts),
            start,
        )
        # Seconds without an answer after which a host counts as missing. File servers
        # may take a few.
        self.silence = min(30.0, max(5.0, 2 * timeout))
        self._wanted = -1e9  # time of the last query
        self._since = (
            0.0  # start of the current uninterrupted series of queries
        )
        self._heard = dict[str, _Heard]()
        self._thread: threading.Thread | None = None

    def look(self, now: float) -> Others:
        """Return everything known so far. The first call starts asking."""
        if not self.hosts:
            return Others()
        # A pause in the questions: silence before it tells nothing about the
        # hosts.
        if now - self._wanted > 3 * ASK_EVERY:
            self._since = now
        self._wanted = now
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._read, name="elsewhere", daemon=True
            )
            self._thread.start()
        heard = {
            host: each
            # Answers from before this series of questions may be of a host
            # that has gone since.
            for host, each in list(self._heard.items())
            if each.at >= self._since
        }
        ranks = [
            r
            for each in heard.values()
            if now - each.at < RECENT
            for r in each.ranks
        ]
        # A host that has never answered is silent since the series began.
        last = {
            host: heard[host].at if host in heard else self._since
            for host in self.hosts
        }
        missing = [
            host for host, at in last.items() if now - at > self.silence
        ]
        known = [
            host for host, each in heard.items() if now - each.at < RECENT
        ]
        # Neither silent for long enough to be missing, nor heard: the
        # diagnosis waits for them.
        pending = [
            host for host in self.hosts if host not in (*missing, *known)
        ]
        return Others(tuple(ranks), tuple(missing), tuple(pending))

    def _read(self) -> None:
        asked = 0.0
        while True:
            now = time.monotonic()
            # Nobody has wanted to know for a while: no files are read.
            if now - self._wanted < ASK_EVERY:
                if now - asked > ASK_EVERY:
                    asked = now
                    ask(self.folder)
                for host, (at, ranks) in answers(
                    self.folder, self.hosts, self.start
                ).items():
                    known = self._heard.get(host)
                    # Only new content counts as a sign of life; a file stays
                    # when its host is down.
                    if (
                        known is None
                        or at == LAST
                        or known.asked != at
                        or known.ranks != ranks
                    ):
                        self._heard[host] = _Heard(time.monotonic(), at, ranks)
            time.sleep(_POLL)


def answer_for_ever(
    folder: RanksFolder,
    host: str,
    start: str,
    states: Callable[[], list[RankState]],
) -> None:
    """Answer each question, in a thread of the watcher."""
    answered = 0
    while True:
        time.sleep(_ANSWER_EVERY)
        with suppress(OSError, ValueError):
            asked = folder.read(ASKED).written
            # At most one answer to each question, however many ask.
            if asked != answered:
                answer(folder, host, start, asked, states())
                answered = asked
