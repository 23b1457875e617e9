"""A watcher that dies, is stopped or stands still, and the rank that started it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rank_watch import Hosted, Positions, watcher_process
from rank_watch.hosted import RankProcess
from rank_watch.hosts import RankHome, hosts_of, machine_name, place
from rank_watch.positions import LOOKED
from rank_watch.processes import started_at
from rank_watch.watcher_process import WatcherProcess


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Positions]:
    monkeypatch.setattr(watcher_process, "_LOOK_EVERY", 0.02)
    made = Positions(0)
    yield made
    made.close("ended")


def hosted_by(positions: Positions, out: Path) -> Hosted:
    entry = RankProcess(
        0, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    return Hosted("a", str(out), ("a",), 60.0, (entry,))


@pytest.fixture
def start(
    positions: Positions,
) -> Iterator[Callable[[Hosted], WatcherProcess]]:
    """Starts a watcher. At the end of the test it is killed, whatever it was made to do."""
    started: list[WatcherProcess] = []

    def make(hosted: Hosted) -> WatcherProcess:
        started.append(WatcherProcess(hosted, positions))
        return started[-1]

    yield make
    for watcher in started:
        watcher.close()
        until(lambda watcher=watcher: end_of(watcher))


def end_of(watcher: WatcherProcess) -> bool:
    """Kills what the watcher's thread may have started in the meantime; true once it has ended."""
    if watcher._process is not None:
        watcher._process.kill()
    watcher._thread.join(0.01)
    return not watcher._thread.is_alive()


def until(true: Callable[[], object]) -> None:
    waits = threading.Event()
    for _ in range(3000):
        if true():
            return
        waits.wait(0.01)
    raise AssertionError("it did not come")


def pid_of(watcher: WatcherProcess) -> int:
    assert watcher._process is not None
    return watcher._process.pid


def looks_again(positions: Positions) -> None:
    """Returns when a watcher has looked at the rank from now on."""
    before = positions.words[LOOKED]
    until(lambda: positions.words[LOOKED] > before)


@pytest.mark.parametrize(
    ("number", "what"), [(signal.SIGKILL, "was killed by signal 9"), (signal.SIGSTOP, "was stopped")]
)  # fmt: skip
def test_a_watcher_that_is_killed_or_stopped_is_started_again(
    tmp_path: Path,
    positions: Positions,
    start: Callable[[Hosted], WatcherProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    what: str,
) -> None:
    monkeypatch.setattr(watcher_process, "_STOPPED", 0.1)
    watcher = start(hosted_by(positions, tmp_path))
    looks_again(positions)
    first = pid_of(watcher)
    with caplog.at_level(logging.WARNING):
        os.kill(first, number)
        until(lambda: positions.notices)
    assert what in positions.notices[0]
    assert "started again" in positions.notices[0]
    assert what in caplog.text
    until(lambda: pid_of(watcher) != first)
    looks_again(positions)
    assert not started_at(first)
    assert len(positions.notices) == 1


def test_signals_that_ask_a_run_to_save_leave_its_watcher(
    tmp_path: Path,
    positions: Positions,
    start: Callable[[Hosted], WatcherProcess],
) -> None:
    watcher = start(hosted_by(positions, tmp_path))
    looks_again(positions)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT"):
        os.kill(pid_of(watcher), getattr(signal, name))
    looks_again(positions)
    assert not positions.notices


def test_a_watcher_that_does_not_look_is_replaced(
    tmp_path: Path,
    positions: Positions,
    start: Callable[[Hosted], WatcherProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher_process, "_SILENT", 0.2)
    monkeypatch.setattr(
        watcher_process, "_START", "import time; time.sleep(1e6) # {!r}"
    )
    start(hosted_by(positions, tmp_path))
    until(lambda: positions.notices)
    assert "has not looked at the ranks" in positions.notices[0]


def test_a_watcher_that_cannot_be_started_is_mentioned_once(
    tmp_path: Path,
    positions: Positions,
    start: Callable[[Hosted], WatcherProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions.watched = True
    monkeypatch.setattr(
        watcher_process.sys, "executable", str(tmp_path / "nothing")
    )
    watcher = start(hosted_by(positions, tmp_path))
    watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    *tries, last = positions.notices
    assert all(
        "could not be started; it is started again" in text for text in tries
    )
    assert "hangs are not noticed" in last
    assert not positions.watched


def test_a_watcher_of_ranks_that_it_cannot_see_says_so(
    tmp_path: Path,
    positions: Positions,
    start: Callable[[Hosted], WatcherProcess],
) -> None:
    entry = RankProcess(0, os.getpid(), 1, tuple(positions.paths))
    watcher = start(Hosted("a", str(tmp_path), ("a",), 60.0, (entry,)))
    watcher._thread.join(60)
    assert "ended with code 3" in positions.notices[0]
    assert "hangs are not noticed" in positions.notices[-1]


# ---- hosts


def homes(*machines: tuple[str, str]) -> list[RankHome]:
    return [
        RankHome(machine, where, RankProcess(rank, 100 + rank, 1, ()), rank)
        for rank, (machine, where) in enumerate(machines)
    ]


def names(found: dict[str, list[RankProcess]]) -> dict[str, list[int]]:
    return {
        name: [each.rank for each in ranks] for name, ranks in found.items()
    }


def test_hosts_are_those_whose_ranks_see_each_other_whatever_their_names() -> (
    None
):
    plain = homes(("a", "1"), ("a", "1"), ("b", "2"), ("b", "2"))
    together = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert names(hosts_of(plain, together)) == {"a": [0, 1], "b": [2, 3]}
    one_name = hosts_of(
        homes(("a", "1"), ("a", "1"), ("a", "2"), ("a", "2")), together
    )
    assert list(names(one_name).values()) == [[0, 1], [2, 3]]
    assert all(name.startswith("a-") for name in one_name)
    # Of a snapshot of one machine, even the start of the machine is the same.
    clones = hosts_of(
        homes(("a", "1"), ("a", "1"), ("a", "1"), ("a", "1")), together
    )
    assert list(names(clones).values()) == [[0, 1], [2, 3]]
    # Who sees in one direction only is on no common host.
    assert len(hosts_of(homes(("a", "1"), ("a", "1")), [[0, 1], [1]])) == 2


def test_a_rank_is_seen_by_the_number_in_its_memory(
    positions: Positions,
) -> None:
    positions.words[24] = 77
    entry = RankProcess(
        1, os.getpid(), started_at(os.getpid()), tuple(positions.paths)
    )
    mine = RankHome("a", place(), RankProcess(0, 1, 1, ()), 1)
    assert mine.sees(RankHome("b", place(), entry, 77))
    assert not mine.sees(RankHome("b", place(), entry, 78))
    assert not mine.sees(RankHome("b", "elsewhere", entry, 77))


@pytest.mark.parametrize(
    "name", ["a/b", "..", ".x", "", "a b", "\u00e4", "x" * 300]
)
def test_any_name_of_a_machine_is_the_name_of_a_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    made = machine_name()
    assert (
        Hosted.parse(str(Hosted(made, "out", (made,), 1.0, ()))).host == made
    )
