"""A run's ranks as seen by an outside process.

The run may belong to another user, and its folder may contain anything, even with
malicious intent. Only facts that the kernel confirms are trusted: that the process
exists, started at the recorded time, belongs to the user who wrote the file, and has a
rank's memory open. Only such a process is sent a signal, the one that requests stacks,
and only if it has a handler for it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .diagnosis import Diagnosis, diagnose
from .elsewhere import answers, ask
from .hosted import Hosted, RankProcess, entries_of
from .positions import DEVICE_LONGEST, DEVICE_WAITS, LONGEST, SINCE
from .rank_state import RankState
from .ranks_folder import RanksFolder, SmallFile
from .watched_rank import WatchedRank

_SMALL = 1 << 20  # maximum bytes of a host's file
_MOST = 1 << 14  # maximum processes examined
_WAIT = 0.1


@dataclass(frozen=True)
class Snapshot:
    """The ranks of a run on this host, its timeout, the hosts whose ranks are not
    visible here, and notices about the owner of the ranks."""

    ranks: tuple[RankState, ...]
    timeout: float
    elsewhere: tuple[str, ...]
    notices: tuple[str, ...] = ()


def snapshot(
    folder: Path, seconds: float = 1.0, *, stacks: bool = True
) -> Snapshot:
    """Observe a run's ranks on this host for `seconds`."""
    ranks_folder = RanksFolder(folder)
    files = list(_hosted(ranks_folder))
    states, here, notices = list[RankState](), set[str](), list[str]()
    seen = set[int]()  # process ids: a file may name one many times
    for hosted, file in files:
        # At most `_MOST` processes in all, whatever the files claim.
        entries = [entry for entry in hosted.ranks if entry.pid not in seen][
            : _MOST - len(seen)
        ]
        seen.update(entry.pid for entry in entries)
        watched = list(_watched(hosted, entries, file, notices))
        if watched:
            here.add(hosted.host)
            # A signal interrupts the process: only one whose owner also owns
            # the folder is asked.
            asks = stacks and _may_signal(ranks_folder, file)
            states += _states(watched, seconds, stacks=asks)
    newest = _newest(files)
    elsewhere = (
        [host for host in newest.hosts if host not in here] if newest else []
    )
    timeout = newest.timeout if newest else 60.0
    return Snapshot(
        tuple(states), timeout, tuple(elsewhere), tuple(dict.fromkeys(notices))
    )


def described(seen: Snapshot) -> tuple[Diagnosis, list[str]]:
    """Explain why the observed ranks make no progress, if so; and return lines that
    show each of them."""
    # A timeout of 0 ends nothing; a reader still wants to know whether the run
    # stands still.
    found = diagnose(seen.ranks, seen.timeout or 60.0)
    lines = (
        [*found.lines]
        if found.hangs
        else ["the run makes progress", *found.lines]
    )
    lines += [line for state in seen.ranks for line in ("", *state.lines)]
    return found, lines


def _hosted(folder: RanksFolder) -> Iterator[tuple[Hosted, SmallFile]]:
    """Yield the valid files in which hosts record their ranks."""
    for name in entries_of(folder):
        with suppress(OSError, ValueError):
            file = folder.read(name, _SMALL)
            hosted = Hosted.parse(file.raw)
            # A file under another name is not one that a host wrote.
            if hosted.name == name:
                yield hosted, file


def _newest(files: Sequence[tuple[Hosted, SmallFile]]) -> Hosted | None:
    """Return the file of the run's last start; killed starts leave their files
    behind."""
    newest = max(files, key=lambda each: each[1].written, default=None)
    return newest[0] if newest else None


def _watched(
    hosted: Hosted,
    entries: Sequence[RankProcess],
    file: SmallFile,
    notices: list[str],
) -> Iterator[WatchedRank]:
    """Yield the ranks that the kernel confirms; append notices about the others."""
    me = os.geteuid()
    for entry in entries:
        try:
            yield WatchedRank(entry, hosted.host, file.owner)
        except PermissionError:
            notices.append(
                f"{hosted.host}: ranks of user {file.owner} are not shown: their processes cannot be"
                f" read by user {me}, or are not theirs"
            )
        except OSError:  # it has ended, or is not a process
            continue
        else:
            # What the ranks say of themselves is shown, but marked as somebody
            # else's words.
            if file.owner != me:
                notices.append(
                    f"the run belongs to user {file.owner}: what is shown of it is what that user's"
                    " processes say"
                )


def _may_signal(folder: RanksFolder, file: SmallFile) -> bool:
    """True if the owner of these ranks also owns the run's folder."""
    with suppress(OSError):
        return folder.owner == file.owner
    return False


def _states(
    watched: Sequence[WatchedRank], seconds: float, *, stacks: bool
) -> Iterator[RankState]:
    # Asked first, as the answers take time; they are read after the
    # observation.
    begins = [r.reader.ask_for_stacks() if stacks else -1 for r in watched]
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        time.sleep(0.05)
        for r in watched:
            with suppress(OSError):
                r.look(time.monotonic())
    for r, begin in zip(watched, begins, strict=True):
        with suppress(OSError):
            words, now = r.reader.words(), time.monotonic()
            # no progress during the observation
            if r.since <= begun and words[SINCE] > 0:
                # Milliseconds in the page, seconds here.
                r.since = min(r.since, words[SINCE] / 1e3)
            r.longest = max(r.longest, words[LONGEST] / 1e3)
            r.device_longest = max(
                r.device_longest, words[DEVICE_LONGEST] / 1e3
            )
            r.device_waits = max(0, words[DEVICE_WAITS])
            yield r.state(now, r.reader.stack(begin) if stacks else ())
        r.reader.close()


def ask_elsewhere(
    folder: Path, here: Sequence[str], seconds: float = 0.0
) -> tuple[list[RankState], list[str]]:
    """Return the ranks on other hosts that share the folder, and the hosts without an
    answer in `seconds`.

    Asking again returns answers that arrived in between.
    """
    ranks_folder = RanksFolder(folder)
    newest = _newest(list(_hosted(ranks_folder)))
    others = (
        [host for host in newest.hosts if host not in here] if newest else []
    )
    if not newest or not others:
        return [], []
    ask(ranks_folder)
    end = time.monotonic() + seconds
    while True:
        found = answers(ranks_folder, others, newest.start)
        if len(found) == len(others) or time.monotonic() > end:
            states = [state for _, ranks in found.values() for state in ranks]
            return states, [host for host in others if host not in found]
        time.sleep(_WAIT)
