"""The process that watches the ranks of one host, and ends them when their run hangs.

It is started by the first rank of the host and shares nothing with the ranks but the memory that they
write their positions to, so it works whatever they are stuck in. It ends when they have. Where a run
has several hosts, each watcher writes what it sees into the run's folder once a rank of its own stands
still; all of them then come to the same diagnosis.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import positions
from .diagnosis import PATIENCE, STOPPED, Diagnosis, RankState, diagnose
from .positions import BEATS, KNOWN, OVER, WORKING, PositionReader, alive, stat_of

FOLDER = ".ranks"  # in a run's folder: who watches which ranks, and what they see
ASKED = "asked"  # in it, a file: who looks from another host touches it, and watchers answer
FILE = "hang.txt"  # in a run's folder: the last hang, with the stacks of all ranks
_POLL = 0.1
# `layout.files` is imported where a run hangs: loading `layout` would double what a watcher's start takes.
_ANSWER = 1.5  # seconds that watchers of other hosts, and stacks, are waited for
# System calls of x86-64 that threads are seen in.
_NAMES = """
    0 read, 1 write, 2 open, 7 poll, 17 pread64, 18 pwrite64, 19 readv, 20 writev, 23 select,
    35 nanosleep, 45 recvfrom, 56 clone, 61 wait4, 74 fsync, 75 fdatasync, 82 rename,
    202 futex (a lock), 230 clock_nanosleep, 232 epoll_wait, 257 openat, 270 pselect6, 271 ppoll,
    435 clone3"""
_CALLS = {each.split()[0]: each.split(None, 1)[1] for each in _NAMES.split(",")}
_ON_FILES = ("0", "1", "17", "18", "19", "20", "74", "75")  # whose first argument is an open file


@dataclass(frozen=True)
class Hosted:
    """The ranks of one host, as others find them: rank, process, its start, and where its memory is."""

    host: str
    out: str
    hosts: tuple[str, ...]  # all of the run, this one included
    timeout: float
    ranks: tuple[tuple[int, int, int, tuple[str, ...]], ...]
    memory: str = ""  # a folder that goes with the process that has started this host's ranks

    @classmethod
    def parse(cls, text: str) -> "Hosted":
        table = json.loads(text)
        host, out, memory = (str(table[name]) for name in ("host", "out", "memory"))
        hosts = tuple(map(str, table["hosts"]))
        ranks = tuple((int(r), int(p), int(s), tuple(map(str, f))) for r, p, s, f in table["ranks"])
        return cls(host, out, hosts, float(table["timeout"]), ranks, memory)

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def path(self) -> Path:
        return Path(self.out, FOLDER, f"{self.host}.json")


class _Watched:
    """One rank of this host."""

    def __init__(self, entry: tuple[int, int, int, tuple[str, ...]], host: str) -> None:
        self.rank, self.pid, self.started, paths = entry
        self.host, self.reader = host, PositionReader(paths)
        if self.reader.words[positions.PID] != self.pid:
            raise OSError(f"{paths[0]} is not the memory of process {self.pid}")
        self.since = time.monotonic()
        self.mark = self.reader.mark()
        self.moved = self.since
        self.effort, self.beat, self.beat_since = 0, 0, self.since
        self.longest = 0.0

    def look(self, now: float, timeout: float = 0.0) -> None:
        """See whether it has gone on. Computing is going on where much may have to be loaded, but in a
        first step not for ever: nothing takes that long there, and calls give up not much later."""
        mark = self.reader.mark()
        working = self.reader.phase in WORKING
        effort = _effort(self.pid) if working else 0
        beat = self.reader.words[positions.BEAT]
        if beat != self.beat:
            self.beat, self.beat_since = beat, now
        self.moved = now if mark != self.mark else self.moved
        known = self.reader.phase in KNOWN
        if timeout and not known and now - self.moved > (PATIENCE - 2) * timeout:
            working = False
        if mark == self.mark and (not working or effort == self.effort):
            return
        waited = self.mark[positions.WAITS - positions.STEP] != 0
        if not waited and not working and self.reader.phase not in OVER:
            self.longest = max(self.longest, now - self.since)
        self.mark, self.effort, self.since = mark, effort, now
        self.reader.words[positions.SINCE] = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e3)
        self.reader.words[positions.LONGEST] = int(self.longest * 1e3)

    def skip(self, seconds: float) -> None:
        """The watcher itself stood still for so long, and perhaps all with it."""
        self.since += seconds
        self.moved += seconds
        self.beat_since += seconds

    @property
    def gone(self) -> bool:
        return not alive(self.pid, self.started)

    def state(self, now: float, stack: Sequence[str] = ()) -> RankState:
        """What there is to know about it now."""
        reader, words = self.reader, self.reader.words
        state, doing, memory = "X", "", 0
        if not self.gone:
            state, doing = _by_kernel(self.pid, words[positions.NATIVE])
            with suppress(OSError, IndexError, ValueError):
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                memory = pages * os.sysconf("SC_PAGE_SIZE")
        return RankState(
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            step=words[positions.STEP],
            phase=reader.phase,
            note=reader.note,
            op=reader.operation,
            still=now - self.since,
            longest=self.longest,
            waits=words[positions.WAITS],
            state=state,
            doing=doing,
            memory=memory,
            locked=now - self.beat_since > 4 * BEATS and state not in "TDX",
            calls=tuple(reader.calls()),
            stack=tuple(stack),
        )


def _by_kernel(pid: int, thread: int) -> tuple[str, str]:
    """The state of a rank's thread, and what the kernel says that it does."""
    state = stat_of(f"/proc/{pid}/task/{thread}")[0]
    words = {"R": "computing", "S": "asleep", "D": "waits for a disk or the kernel", "T": "stopped"}
    return state, "" if state == "X" else f"{words.get(state, state)}{_system_call(pid, thread)}"


def _system_call(pid: int, thread: int) -> str:
    with suppress(OSError, ValueError, IndexError):
        number, *values = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if number not in ("running", "-1") and os.uname().machine == "x86_64":
            of = ""
            if number in _ON_FILES:
                of = f" of {os.readlink(f'/proc/{pid}/fd/{int(values[0], 16)}')}"
            return f" in {_CALLS.get(number, f'system call {number}')}{of}"
    with suppress(OSError):
        if (channel := Path(f"/proc/{pid}/task/{thread}/wchan").read_text()) not in ("", "0"):
            return f" in {channel}"
    return ""


def _effort(pid: int) -> int:
    """What grows as a process works at what its positions do not show: ticks and bytes."""
    total = sum(map(int, stat_of(f"/proc/{pid}")[11:15]))
    with suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text().splitlines()[:2]:
            total += int(line.split()[1]) >> 16
    return total


class Watcher:
    """The ranks of one host, watched until they have ended or are ended."""

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted
        self.ranks = [_Watched(entry, hosted.host) for entry in hosted.ranks]
        self.told: set[str] = set()
        self.published = 0.0
        self.missing: list[str] = []  # hosts that do not answer

    def watch(self) -> Diagnosis | None:
        """Return when all ranks have ended, or with the diagnosis when they hang."""
        threading.Thread(target=self._answer, daemon=True).start()
        last = time.monotonic()
        while not all(r.reader.phase in OVER or r.gone for r in self.ranks):
            time.sleep(_POLL)
            now = time.monotonic()
            if now - last > 1.0 + _POLL:  # as after Ctrl-Z, or on a machine that slept
                for r in self.ranks:
                    r.skip(now - last - _POLL)
            last = now
            for r in self.ranks:
                r.look(now, self.hosted.timeout)
            if self.hosted.timeout and self._stands(now) and (found := self._found(now)):
                return found
        return None

    def _stands(self, now: float) -> bool:
        """Whether it is worth to look closer."""
        timeout = self.hosted.timeout
        still = [(r.pid, now - r.since) for r in self.ranks if r.reader.phase not in OVER]
        return any(
            seconds > timeout
            or (seconds > min(timeout, STOPPED) and stat_of(f"/proc/{pid}")[0] == "T")
            for pid, seconds in still
        )

    def _found(self, now: float) -> Diagnosis | None:
        states = [r.state(now) for r in self.ranks]
        others, self.missing = self._others(states, now)
        found = diagnose([*states, *others], self.hosted.timeout, self.missing)
        if found.hangs:
            states = self._with_stacks(states)
            others, self.missing = self._others(states, time.monotonic(), final=True)
            return diagnose([*states, *others], self.hosted.timeout, self.missing)
        for line in found.lines if self._speaks() else ():
            about = line.partition(" for ")[0]
            if about not in self.told:
                self.told.add(about)
                _print(line)
        return None

    def _with_stacks(self, states: list[RankState]) -> list[RankState]:
        begins = [r.reader.ask_for_stacks() for r in self.ranks]
        end = time.monotonic() + 0.5
        while True:
            time.sleep(0.02)
            stacks = [r.reader.stack(b) for r, b in zip(self.ranks, begins, strict=True)]
            pairs = list(zip(states, stacks, strict=True))
            if time.monotonic() > end or all(stack or s.state in "TDX" for s, stack in pairs):
                return [replace(state, stack=tuple(stack)) for state, stack in pairs]

    # ---- other hosts

    def _speaks(self) -> bool:
        """The first host that answers speaks for all."""
        return self.hosted.host == next(h for h in self.hosted.hosts if h not in self.missing)

    def _others(
        self, states: Sequence[RankState], now: float, *, final: bool = False
    ) -> tuple[list[RankState], list[str]]:
        """What the other hosts see, and which of them do not answer."""
        others = [host for host in self.hosted.hosts if host != self.hosted.host]
        if not others:
            return [], []
        if final or now - self.published > 0.5:
            from ..layout.files import write_text

            self.published = now
            text = json.dumps({"time": time.time(), "ranks": [s.to_json() for s in states]})
            path = Path(self.hosted.out, FOLDER, f"{self.hosted.host}.seen.json")
            writing = threading.Thread(target=write_text, args=(path, text), daemon=True)
            writing.start()
            writing.join(2.0)  # and go on without, where the disk blocks it

        def fresh(table: Any) -> bool:
            return bool(abs(time.time() - table["time"]) < self.hosted.timeout + 60)

        return _read(Path(self.hosted.out), others, "seen", fresh, _ANSWER)

    def _answer(self) -> None:
        """Write what is seen for those who look from other hosts, each time they ask. In a thread, and
        with readers of its own: a file system that does not answer holds up nothing else."""
        out, answered = Path(self.hosted.out), 0
        while True:
            time.sleep(_ANSWER / 2)
            with suppress(OSError):
                asked = Path(out, FOLDER, ASKED).stat().st_mtime_ns
                if asked != answered:
                    from ..layout.files import write_text

                    states = [r.to_json() for r in snapshot(out, 0.1, stacks=False)[0]]
                    path = Path(out, FOLDER, f"{self.hosted.host}.answer.json")
                    write_text(path, json.dumps({"asked": asked, "ranks": states}))
                    answered = asked

    # ---- the end

    def end(self, found: Diagnosis) -> None:
        """Say why, end the ranks of this host, and write it down."""
        speaks, out = self._speaks(), Path(self.hosted.out)
        writing = threading.Thread(target=_write_down, args=(out, found), daemon=True)
        if speaks:
            _print(f"{found.text}\nthe run is ended; stacks of all ranks: {out / FILE}")
            writing.start()
            writing.join(0.3)  # who has started the ranks looks for it when they go
        for r in self.ranks:
            if not r.gone:
                with suppress(OSError):
                    os.kill(r.pid, signal.SIGKILL)
        if speaks:
            writing.join(5.0)  # the disk may be what is blocked


def _write_down(out: Path, found: Diagnosis) -> None:
    """The hang as a file, and as a record of the run."""
    from ..layout.files import open_regular, write_text
    from ..layout.goodput import stamp

    with suppress(OSError):
        write_text(out / FILE, "\n".join(found.full) + "\n")
    record = {"event": "hang", **stamp(), "ranks": found.ranks, "text": found.text}
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        with open_regular(out / "metrics.jsonl", flags) as file:
            file.write(f"\n{json.dumps(record)}\n".encode())


def _print(text: str) -> None:
    from ..layout.files import printable

    with suppress(OSError):
        os.write(2, f"phalanx: {printable(text).strip()}".replace("\n", "\n  ").encode() + b"\n")


# ---- from outside


def snapshot(
    folder: Path, seconds: float = 1.0, *, stacks: bool = True
) -> tuple[list[RankState], float, list[str]]:
    """The ranks of a run on this host, its timeout, and the hosts whose ranks are not to be seen."""
    states, timeout, hosts, here = list[RankState](), 60.0, list[str](), set[str]()
    for path in sorted(Path(folder, FOLDER).glob("*.json")):
        watched: list[_Watched] = []
        with suppress(OSError, ValueError, KeyError, TypeError):
            hosted = Hosted.parse(path.read_text())
            live = [entry for entry in hosted.ranks if alive(entry[1], entry[2])]
            watched = [_Watched(entry, hosted.host) for entry in live]
        if not watched:
            continue
        timeout, hosts = hosted.timeout, [*hosted.hosts]
        here.add(hosted.host)
        begins = [r.reader.ask_for_stacks() if stacks else -1 for r in watched]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            for r in watched:
                r.look(time.monotonic())
        for r, begin in zip(watched, begins, strict=True):
            words, now = r.reader.words, time.monotonic()
            if r.since < end - seconds + 0.04 and words[positions.SINCE]:
                r.since = min(r.since, words[positions.SINCE] / 1e3)
            r.longest = max(r.longest, words[positions.LONGEST] / 1e3)
            states.append(r.state(now, r.reader.stack(begin) if stacks else ()))
            r.reader.close()
    return states, timeout, [host for host in hosts if host not in here]


def ask_elsewhere(
    folder: Path, here: Sequence[str], seconds: float = 0.0
) -> tuple[list[RankState], list[str]]:
    """The ranks of a run on other hosts that share its folder, and which of these hosts have not
    answered; waits so long for them. Ask again, and who has answered in between is seen."""
    hosts: dict[str, int] = {}
    for path in Path(folder, FOLDER).glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            hosts |= dict.fromkeys(Hosted.parse(path.read_text()).hosts, 0)
    if not (others := [host for host in hosts if host not in here]):
        return [], []
    asked = Path(folder, FOLDER, ASKED)
    with suppress(OSError):  # who may not write sees what others have asked for
        asked.touch()

    def fresh(table: Any) -> bool:  # both times are those of the file server
        return bool(asked.stat().st_mtime_ns - table["asked"] < 10 * 10**9)

    return _read(folder, others, "answer", fresh, seconds)


def _read(
    folder: Path, hosts: Sequence[str], kind: str, fresh: Callable[[Any], bool], seconds: float
) -> tuple[list[RankState], list[str]]:
    """What the watchers of other hosts have written, and the hosts of which nothing is there; waits so
    long for them."""
    found: dict[str, list[RankState]] = {}
    end = time.monotonic() + seconds
    while True:
        for host in hosts:
            with suppress(OSError, ValueError, KeyError, TypeError):
                table = json.loads(Path(folder, FOLDER, f"{host}.{kind}.json").read_text())
                if fresh(table):
                    found[host] = [RankState.from_json(r) for r in table["ranks"]]
        if len(found) == len(hosts) or time.monotonic() > end:
            states = [state for each in found.values() for state in each]
            return states, [host for host in hosts if host not in found]
        time.sleep(_POLL)


def main() -> int:
    """Watch the ranks that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hosted = Hosted.parse(sys.stdin.read())
    try:
        watcher = Watcher(hosted)
    except OSError:
        return 0  # the ranks are gone already
    if (found := watcher.watch()) is not None:
        watcher.end(found)
    with suppress(OSError):
        hosted.path.unlink()
    if hosted.memory:
        import shutil

        # Until the process that is named in it ends, which may start its ranks again.
        folder = Path(hosted.memory)
        owner, started = map(int, folder.name.split("-")[2:4])
        while alive(owner, started) and folder.exists():
            time.sleep(_POLL)
        shutil.rmtree(folder, ignore_errors=True)
    return 0
