"""The process that watches the ranks of one host, and ends them when their run hangs.

The first rank of the host starts it. It shares nothing with the ranks except the memory
with their positions, so it works whatever they are stuck in, and it ends when they
have. With several hosts, a watcher whose own ranks make no progress asks the others for
their state. All of them reach the same diagnosis, and each ends the ranks of its own
host.
"""

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from .diagnosis import Diagnosis, diagnose
from .elsewhere import LAST, Elsewhere, Others, answer, answer_for_ever
from .flight import parse_flights
from .hosted import ANSWER, Hosted
from .moment import stamp
from .processes import alive
from .rank_state import RankState
from .ranks_folder import ASKED, append_to_file, opened_folder, replace_file
from .voice import Voice
from .watched_rank import WatchedRank

FILE = "hang.txt"  # in a run's folder: the last hang, with the stacks of all ranks
JOURNAL = "metrics.jsonl"  # in a run's folder, if present: a JSON object on each line
BLIND = 3  # exit code of a watcher that cannot see its ranks
_POLL = 0.1
_DIAGNOSE_EVERY = (
    0.3  # seconds between diagnoses, which read all calls of all ranks
)
_STACKS = 0.5  # seconds to wait for stacks
_FLIGHTS = 2.0  # seconds to wait for the records of NCCL calls
_ANSWER = 1.5  # seconds to wait for the stacks of other hosts
_AHEAD = 3.0  # seconds before the timeout at which other hosts are first asked
_PRINTED = (
    10.0  # seconds that the watcher waits until its last message is printed
)
# Seconds for writing the report of a hang before its ranks are ended; a busy host needs
# one.
_WRITE = 3.0


class Watcher:
    """Watches the ranks of one host until they have ended or are ended."""

    def __init__(self, hosted: Hosted) -> None:
        self.hosted, self.out = hosted, Path(hosted.out)
        self.ranks = [
            WatchedRank(entry, hosted.host) for entry in hosted.ranks
        ]
        others = [host for host in hosted.hosts if host != hosted.host]
        self.elsewhere = Elsewhere(
            self.out, others, hosted.start, hosted.timeout
        )
        self.others = Others()
        self.voice = Voice(hosted.program)
        self.printed = set[str]()  # keys of printed notices
        self.diagnosed = 0.0  # time of the last diagnosis
        # states of the ranks when the run was ended
        self.final: list[RankState] | None = None

    def watch(self) -> Diagnosis | None:
        """Return None when all ranks have ended, or the diagnosis when the run
        hangs."""
        self._begin_to_answer()
        last = time.monotonic()
        while not all(r.over for r in self.ranks):
            time.sleep(_POLL)
            now = time.monotonic()
            if (
                # The watcher was not running either, so the ranks' clocks are
                # moved on.
                now - last > 1.0 + _POLL
            ):  # as after Ctrl-Z, or on a machine that slept
                for r in self.ranks:
                    r.slept(now - last - _POLL)
            last = now
            for r in self.ranks:
                r.look(now, self.hosted.timeout)
            # A timeout of 0 watches without ending anything.
            if self.hosted.timeout and (found := self._found(now)):
                return found
        return None

    def _found(self, now: float) -> Diagnosis | None:
        """Return the diagnosis if the run hangs. Slow but healthy ranks are mentioned
        once."""
        timeout = self.hosted.timeout
        stopped = any(r.is_stopped(now) for r in self.ranks)
        # Shortly before the timeout, so that the answers are there when it has
        # passed.
        ahead = max(timeout / 2, timeout - _AHEAD)
        if stopped or any(r.stands(now, ahead) for r in self.ranks):
            self.others = self.elsewhere.look(now)
        else:
            self.others = Others()
        # Diagnosing costs time; it is only done if a rank has stood still for
        # the timeout.
        if not stopped and not any(r.stands(now, timeout) for r in self.ranks):
            return None
        if now - self.diagnosed < _DIAGNOSE_EVERY:
            return None
        self.diagnosed = now
        states = [r.state(now) for r in self.ranks]
        found = diagnose(
            [*states, *self.others.ranks], timeout, self.others.missing
        )
        # Hosts that may still answer could have the cause among their ranks.
        if found.hangs and not self.others.pending:
            states = self._with_stacks(states)
            others = self._with_stacks_of_others(states)
            # Gathering takes seconds, enough for a slow rank to go on.
            if any(r.reader.mark() != r.mark for r in self.ranks):
                self.final = (
                    None  # some rank made progress while this was gathered
                )
                return None
            # With stacks, and with what the other hosts have told meanwhile.
            last = diagnose([*states, *others.ranks], timeout, others.missing)
            return last if last.hangs else found
        for key, text in found.notices if self._speaks() else ():
            if key not in self.printed:
                self.printed.add(key)
                self.voice.say(text)
        return None

    def _with_stacks(self, states: list[RankState]) -> list[RankState]:
        begins = [r.reader.ask_for_stacks() for r in self.ranks]
        end = time.monotonic() + _STACKS
        while True:
            time.sleep(0.02)
            stacks = [
                r.reader.stack(b)
                for r, b in zip(self.ranks, begins, strict=True)
            ]
            pairs = list(zip(states, stacks, strict=True))
            if time.monotonic() > end or all(
                # A rank that cannot run Python's signal handler is not waited
                # for.
                stack or s.state in "TtDX"
                for s, stack in pairs
            ):
                states = [
                    replace(state, stack=tuple(stack))
                    for state, stack in pairs
                ]
                return self._with_flights(states)

    def _with_flights(self, states: list[RankState]) -> list[RankState]:
        """Ask ranks that wait for their GPUs for the NCCL record; a rank may be unable
        to answer."""
        asked = [n for n, state in enumerate(states) if state.on_device]
        for n in asked:
            self.ranks[n].reader.ask_for_flight()
        end = time.monotonic() + _FLIGHTS
        while asked and time.monotonic() < end:
            time.sleep(0.05)
            for n in list(asked):
                raw = self.ranks[n].reader.flight()
                if raw is not None:
                    states[n] = replace(states[n], flights=parse_flights(raw))
                    asked.remove(n)
        return states

    # ---- other hosts

    def _begin_to_answer(self) -> None:
        hosted = self.hosted
        given = (hosted.folder, hosted.host, hosted.start, self.seen)
        threading.Thread(
            target=answer_for_ever, args=given, daemon=True
        ).start()

    def seen(self) -> list[RankState]:
        """Return the ranks of this host, for observers on other hosts."""
        if self.final is not None:
            return self.final
        now = time.monotonic()
        return [r.state(now) for r in self.ranks]

    def _with_stacks_of_others(self, states: list[RankState]) -> Others:
        """Publish this host's stacks, and wait briefly for those of other hosts."""
        # From here on `seen` answers with these states, as the ranks will be
        # ended.
        self.final = states
        if self.elsewhere.hosts:
            _in_time(
                lambda: self._answer(self.hosted.folder.read(ASKED).written),
                _ANSWER,
            )
        end = time.monotonic() + _ANSWER
        while True:
            others = self.elsewhere.look(time.monotonic())
            if time.monotonic() > end or all(
                r.stack or r.over for r in others.ranks
            ):
                return others
            time.sleep(_POLL)

    def _answer(self, asked: int) -> None:
        hosted = self.hosted
        answer(hosted.folder, hosted.host, hosted.start, asked, self.seen())

    def _speaks(self) -> bool:
        """True if this host reports for all: the first one that answers does."""
        # The first host in the order that all hosts share.
        return self.hosted.host == next(
            host
            for host in self.hosted.hosts
            if host not in self.others.missing
        )

    # ---- the end

    def end(self, found: Diagnosis) -> None:
        """End the ranks of this host, and report why."""
        speaks = self._speaks()
        if speaks:
            # Written first, as the launcher looks for the file once the ranks are gone.
            # A blocked disk, which may be the cause of the hang, does not delay the
            # end.
            writing = _in_time(lambda: _write_down(self.out, found), _WRITE)
        # SIGKILL: a rank that hangs runs no handler of Python.
        for r in self.ranks:
            r.process.send(signal.SIGKILL)
        if speaks:
            where = self.out / FILE
            self.voice.say(
                f"{found.text}\nthe run is ended; stacks of all ranks: {where}"
            )
            writing.join(5.0)
            self.voice.flush(_PRINTED)

    def close(self) -> None:
        """Remove this watcher's files from the run's folder; other hosts are told that
        it has ended."""
        folder = self.hosted.folder
        if self.elsewhere.hosts:
            # The others learn that its ranks have ended, and do not count it
            # as missing.
            _in_time(lambda: self._answer(LAST), _ANSWER)
        else:
            _in_time(
                lambda: folder.remove(f"{self.hosted.host}{ANSWER}"), _ANSWER
            )
        _in_time(lambda: folder.remove(self.hosted.name), _ANSWER)


def _in_time(work: Callable[[], object], seconds: float) -> threading.Thread:
    """Start work on files that may block, and wait at most `seconds` for its end."""

    def do() -> None:
        with suppress(OSError, ValueError):
            work()

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


def _write_down(out: Path, found: Diagnosis) -> None:
    """Write the report of a hang, and a record in the run's journal if there is one."""
    with opened_folder(out) as folder:
        with suppress(OSError):
            replace_file(folder, FILE, "\n".join(found.full) + "\n")
        # The leading newline ends a line that a rank may have left unfinished.
        record = {
            "event": "hang",
            **stamp(),
            "ranks": found.ranks,
            "text": found.text,
        }
        append_to_file(folder, JOURNAL, f"\n{json.dumps(record)}\n")


def _remove_memory(folder: Path) -> None:
    """Delete in-memory checkpoints when the process named in the folder's name has
    ended.

    Until then it may restart its ranks.
    """
    # "phalanx-memory-PID-STARTED-MARK": the process's number and its start in
    # clock ticks.
    owner, started = map(int, folder.name.split("-")[2:4])
    while alive(owner, started) and folder.exists():
        time.sleep(_POLL)
    shutil.rmtree(folder, ignore_errors=True)


def _ignore_signals() -> None:
    """Ignore the signals that ask ranks to save and end: the watcher ends after
    them."""
    names = (
        "SIGINT",
        "SIGTERM",
        "SIGHUP",
        "SIGUSR1",
        "SIGUSR2",
        "SIGQUIT",
        "SIGTTOU",
    )
    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def main() -> int:
    """Watch the ranks that standard input names."""
    _ignore_signals()
    try:
        hosted = Hosted.parse(sys.stdin.read())
        watcher = Watcher(hosted)
    # No trace: the rank that started it reports the exit code.
    except (OSError, ValueError):
        return BLIND
    if (found := watcher.watch()) is not None:
        watcher.end(found)
    watcher.close()
    if hosted.memory:
        _remove_memory(Path(hosted.memory))
    return 0
