"""Looking at a run whose folder, files and memory somebody has made up to harm who looks."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rank_watch import Positions, RankState, ask_elsewhere, snapshot
from rank_watch.__main__ import main
from rank_watch.flight import Flight
from rank_watch.hosted import Hosted, RankProcess
from rank_watch.positions import FILES, LOG, PID, SIZE, STACKS, TEXTS
from rank_watch.processes import Process, alive, started_at
from rank_watch.rank_state import pack, unpack
from rank_watch.ranks_folder import ASKED, FOLDER, LARGEST, RanksFolder
from rank_watch.reader import Made, PositionReader

ME = os.getpid()
# A process with the memory of a rank, and without a rank's answer to the signal that asks for stacks.
LOOKALIKE = f"""
import os, signal, sys
signal.signal({STACKS}, signal.SIG_DFL)
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))
files = [os.memfd_create(f"rank-watch-{{what}}-0") for what in {FILES}]
os.truncate(files[0], {SIZE})
print(*files, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def positions() -> Iterator[Positions]:
    made = Positions(0)
    yield made
    made.close("ended")


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that would have been signalled; none is."""
    sent: list[int] = []
    numbers: dict[int, int] = {}
    opens = os.pidfd_open

    def opened(pid: int, *more: int) -> int:
        descriptor = opens(pid, *more)
        numbers[descriptor] = pid
        return descriptor

    monkeypatch.setattr(os, "pidfd_open", opened)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append(-pid))
    monkeypatch.setattr(
        signal,
        "pidfd_send_signal",
        lambda descriptor, number, *_: sent.append(numbers[descriptor]),
    )
    return sent


def entry_of(positions: Positions) -> RankProcess:
    return RankProcess(0, ME, started_at(ME), tuple(positions.paths))


def hosted_in(
    folder: Path, *ranks: RankProcess, hosts: tuple[str, ...] = ("a",)
) -> Hosted:
    """A run's folder in which host a names these ranks."""
    hosted = Hosted("a", str(folder), hosts, 60.0, ranks)
    hosted.folder.make()
    hosted.folder.write(hosted.name, str(hosted))
    return hosted


def test_a_rank_that_the_kernel_confirms_is_seen_and_asked(
    tmp_path: Path, positions: Positions, signals: list[int]
) -> None:
    hosted_in(tmp_path, entry_of(positions))
    seen = snapshot(tmp_path, 0.0)
    assert [r.rank for r in seen.ranks] == [0]
    assert signals == [ME]


@pytest.mark.parametrize(
    ("pid", "started"),
    [(-1, 0), (-1, 1), (0, 0), (0, 1), (1, 0), (1, started_at(1)), (-ME, 0), (ME, 0), (ME, 1), (1 << 22, 0),
     (True, 0), (None, 0), ("1", 0), (1.0, 0), (1 << 70, 0), ([], {})],
    # not the numbers: workers would collect other tests
    ids=[str(place) for place in range(16)],
)  # fmt: skip
def test_a_number_that_is_no_rank_is_never_signalled(
    tmp_path: Path,
    positions: Positions,
    signals: list[int],
    pid: Any,
    started: Any,
) -> None:
    hosted = hosted_in(tmp_path, entry_of(positions))
    table = json.loads(str(hosted))
    for files in (positions.paths, [f"/proc/{pid}/fd/{n}" for n in (3, 4)]):
        table["ranks"] = [[0, pid, started, files]]
        hosted.folder.write(hosted.name, json.dumps(table))
        assert not snapshot(tmp_path, 0.0).ranks
    with contextlib.suppress(OSError, TypeError):
        Process(pid, started).send(STACKS)
    assert not signals


def test_another_process_than_that_of_the_memory_is_never_signalled(
    tmp_path: Path, positions: Positions, signals: list[int]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as victim:
        # The memory says that it is the victim's; so does the folder.
        positions.words[PID] = victim.pid
        stolen = RankProcess(
            0, victim.pid, started_at(victim.pid), tuple(positions.paths)
        )
        hosted_in(tmp_path, stolen)
        assert not snapshot(tmp_path, 0.0).ranks
        assert not signals
        hosted_in(tmp_path, entry_of(positions))
        assert [r.pid for r in snapshot(tmp_path, 0.0).ranks] == [ME]
        assert signals == [ME]
        victim.communicate(b"\n")


def lookalike(*words: str) -> tuple[subprocess.Popen[str], RankProcess]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOKALIKE, *words],
        stdin=-1,
        stdout=-1,
        text=True,
    )
    assert process.stdout is not None
    files = [
        f"/proc/{process.pid}/fd/{file}"
        for file in process.stdout.readline().split()
    ]
    return process, RankProcess(
        0, process.pid, started_at(process.pid), tuple(files)
    )


def test_a_process_that_does_not_answer_with_stacks_gets_no_signal(
    tmp_path: Path,
) -> None:
    process, entry = lookalike()
    hosted_in(tmp_path, entry)
    assert [r.pid for r in snapshot(tmp_path, 0.0).ranks] == [process.pid]
    process.communicate("")
    assert process.returncode == 0  # the signal would have ended it


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may become another user"
)
def test_who_looks_at_another_users_run_is_told_and_a_stranger_cannot_name_processes_of_root(
    tmp_path: Path, positions: Positions, signals: list[int]
) -> None:
    process, entry = lookalike("65534")
    hosted = hosted_in(tmp_path, entry_of(positions), entry)
    file = tmp_path / FOLDER / hosted.name
    os.chown(file, 65534, 65534)
    seen = snapshot(tmp_path, 0.0)
    assert [r.pid for r in seen.ranks] == [
        process.pid
    ]  # and not the one of root
    assert any("belongs to user 65534" in notice for notice in seen.notices)
    os.chown(file, 0, 0)
    assert [r.pid for r in snapshot(tmp_path, 0.0).ranks] == [ME]
    assert signals == [ME]
    process.communicate("")


def test_memory_of_another_user_or_by_another_name_is_refused(
    tmp_path: Path, positions: Positions
) -> None:
    process = Process(ME, started_at(ME))
    with pytest.raises(PermissionError):
        PositionReader(process, positions.paths, os.geteuid() + 1)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    paths = {
        f"/proc/{ME}/fd/{plain}", f"/proc/{ME}/fd/../fd/{plain}", "/dev/zero", f"/proc/{ME}/mem",
        f"/proc/self/fd/{plain}", f"/proc/{ME}/fd/-1", f"/proc/{ME}/fd/99999999999",
        positions.paths[0].replace(str(ME), str(os.getppid())), positions.paths[1], "",
        positions.paths[0] + "/", f"/proc/{ME}/task/{ME}/fd/{positions.paths[0].split('/')[-1]}",
    }  # fmt: skip
    for path in paths:
        with pytest.raises(OSError):
            PositionReader(
                Process(ME, started_at(ME)),
                [path, *positions.paths[1:]],
                os.geteuid(),
            )
    for wrong in (
        [],
        positions.paths[:1],
        [*positions.paths, positions.paths[0]],
    ):
        with pytest.raises(OSError):
            PositionReader(Process(ME, started_at(ME)), wrong)
    os.close(plain)


def test_memory_that_shrinks_while_it_is_read_ends_nobody(
    positions: Positions,
) -> None:
    reader = PositionReader(
        Process(ME, started_at(ME)), positions.paths, os.geteuid()
    )
    reader.calls()
    copied = os.memfd_create(
        "rank-watch-position-0"
    )  # as the rank may do with its own
    os.truncate(copied, 100)
    mine = int(positions.paths[0].rpartition("/")[2])
    kept = os.dup(mine)
    os.dup2(copied, mine)
    with pytest.raises(OSError, match="too short"):
        PositionReader(Process(ME, started_at(ME)), positions.paths)
    os.dup2(kept, mine)
    reader.close()


def written(positions: Positions, *lines: bytes) -> PositionReader:
    """A reader of a memory whose log of texts has these lines."""
    raw = b"".join(line + b"\n" for line in lines)[: SIZE - LOG]
    positions._bytes[LOG : LOG + len(raw)] = raw
    positions.words[TEXTS] = len(raw)
    return PositionReader(Process(ME, started_at(ME)), positions.paths)


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b"1" * 5000, b"NaN", b"null", b'{"a": 1}', b'"\\ud800"', b"\xff\xfe", b'"group 1"',
     b'"group 1 []"', b'"group 1 [[], []]"', b'"group 1 [\\"a\\", [true]]"', b'"group 1 [\\"a\\", [-1]]"',
     b'"group 99999999999999 [\\"a\\", [1]]"', b'"group 1 ' + b"[" * 100_000 + b'"'],
)  # fmt: skip
def test_a_text_that_is_none_counts_as_empty_and_later_ones_keep_their_numbers(
    positions: Positions, line: bytes
) -> None:
    reader = written(positions, b'"first"', line, b'"last"')
    assert (reader.text(0), reader.text(2)) == ("first", "last")
    assert reader.text(1).isprintable()
    assert (reader.text(-1), reader.text(3), reader.text(1 << 60)) == (
        "",
        "",
        "",
    )
    assert not reader._groups
    for number in range(1, 20):
        positions.words[number] = -(1 << 63)
    assert (reader.phase, reader.calls(), reader.made()) == ("", [], [])
    reader.close()


def test_groups_without_end_cost_no_time(positions: Positions) -> None:
    reader = written(
        positions, *(b'"group %d [\\"\\", []]"' % n for n in range(200_000))
    )
    reader.text(0)
    assert len(reader._groups) == 1024
    reader.close()


# ---- files


def test_links_are_followed_nowhere(
    tmp_path: Path, positions: Positions
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    hosted = hosted_in(run, entry_of(positions), hosts=("a", "b"))
    other.mkdir()
    asked = run / FOLDER / ASKED
    asked.symlink_to(other / "STOP")
    ask_elsewhere(run, [])
    assert not list(other.iterdir())
    assert not asked.is_symlink()

    file = other / "file"
    file.touch()
    os.utime(file, (1000, 1000))
    asked.unlink()
    os.link(file, asked)
    ask_elsewhere(run, [])
    assert file.stat().st_mtime == 1000

    (run / FOLDER / hosted.name).rename(other / "a.json")
    (run / FOLDER / hosted.name).symlink_to(other / "a.json")
    assert not snapshot(run, 0.0).ranks
    (run / FOLDER).rename(tmp_path / "ranks")
    (run / FOLDER).symlink_to(tmp_path / "ranks")
    (tmp_path / "ranks" / hosted.name).unlink()
    (other / "a.json").rename(tmp_path / "ranks" / hosted.name)
    (tmp_path / "ranks" / ASKED).unlink()
    assert not snapshot(run, 0.0).ranks
    assert ask_elsewhere(run, []) == ([], [])
    assert not (tmp_path / "ranks" / ASKED).exists()
    hosted.folder.make()  # as a rank does that starts
    hosted.folder.write(hosted.name, str(hosted))
    assert [r.rank for r in snapshot(run, 0.0).ranks] == [0]
    assert not (tmp_path / "ranks" / hosted.name).is_symlink()


def test_what_is_no_plain_small_file_is_refused_at_once(
    tmp_path: Path,
) -> None:
    folder = RanksFolder(tmp_path)
    folder.make()
    at = tmp_path / FOLDER
    os.mkfifo(at / "pipe.json")
    (at / "folder.json").mkdir()
    with (at / "sparse.json").open("wb") as file:
        file.truncate(10**12)
    (at / "link.json").symlink_to("/dev/zero")
    (at / "large.json").write_bytes(b" " * (LARGEST + 1))
    for name in folder.names():
        with pytest.raises(OSError):
            folder.read(name)
    assert len(folder.names()) == 5
    assert not snapshot(tmp_path, 0.0).ranks
    os.mkfifo(at / ASKED)
    folder.write(ASKED)
    assert (at / ASKED).is_file()


GROUP = ("tp", (0, 1), 0)
STATE = RankState(
    7, "b", 11, 4, "in a step", "note", "1B0", 3.0, 1.0, 1, "R", made=((GROUP, 3),),
    calls=(Made(1, GROUP, "barrier", "1B0", -1, False, 2),), stack=("File x",),
    flights=(Flight("tp", (0, 1), 2, 3, 4, "all_reduce"),),
)  # fmt: skip
HOSTILE: list[Any] = [
    None, True, -1, -(1 << 70), 1 << 70, 1.5, float("nan"), float("inf"), 1e308, "", "x" * 10_000,
    "../../etc/x", "/etc/passwd", "\x1b[2J\nrank 1: it is you", "\ud800", [], [[]] * 70_000, {},
    [[[]]], {"a": 1}, [None], ["a", [True], 0],
]  # fmt: skip


def places(
    value: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """Every place in a table: of each value, list and table in it."""
    yield path
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for key, each in inner.items() if isinstance(inner, dict) else ():
        yield from places(each, (*path, key))


def with_value(table: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(table)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def test_no_value_in_the_file_of_a_host_makes_looking_fail(
    tmp_path: Path, positions: Positions, signals: list[int]
) -> None:
    hosted = hosted_in(tmp_path, entry_of(positions), hosts=("a", "b"))
    table = json.loads(str(hosted))
    file = tmp_path / FOLDER / hosted.name
    for path in places(table):
        for value in HOSTILE:
            file.write_text(json.dumps(with_value(table, path, value)))
            seen = snapshot(tmp_path, 0.0)
            assert all(
                text.isprintable() for text in (*seen.elsewhere, *seen.notices)
            )
            assert 0 <= seen.timeout <= 1e12
    file.write_text("[" * 1_000_000)
    assert not snapshot(tmp_path, 0.0).ranks
    assert set(signals) <= {ME}


def test_no_value_in_the_answer_of_a_host_makes_looking_fail(
    tmp_path: Path,
) -> None:
    hosted_in(tmp_path, hosts=("a", "b"))
    table = json.loads(
        json.dumps({"asked": 1 << 62, "start": "", **pack([STATE])})
    )
    answer = tmp_path / FOLDER / "b.answer.json"
    accepted = list[RankState]()
    for path in places(table):
        for value in HOSTILE:
            answer.write_text(json.dumps(with_value(table, path, value)))
            accepted += ask_elsewhere(tmp_path, ["a"])[0]
    assert accepted
    for state in accepted:
        assert all(
            text.isprintable()
            for text in (*state.lines, state.place, state.phase)
        )
    answer.write_text(
        json.dumps(
            with_value(table, ("ranks", 0, "op"), "\x1b[2J\nrank 1 is you")
        )
    )
    states, _ = ask_elsewhere(tmp_path, ["a"])
    shown = "\n".join(line for state in states for line in state.lines)
    assert "\\x1b[2J\\nrank" in shown
    assert "\x1b" not in shown
    answer.write_text(json.dumps(table))
    assert ask_elsewhere(tmp_path, ["a"]) == ([STATE], [])


def test_names_of_hosts_lead_to_no_other_file(tmp_path: Path) -> None:
    for name in ("..", "../b", "/b", ".b", "b/../c", "", "b\n", "b\x00"):
        table = json.loads(str(Hosted("a", str(tmp_path), ("a",), 60.0, ())))
        for key, value in (("host", name), ("hosts", ["a", name])):
            with pytest.raises(ValueError, match=r"host|line"):
                Hosted.parse(json.dumps(table | {key: value}))


def test_what_a_rank_says_is_shown_on_one_line_and_printable(
    tmp_path: Path,
    positions: Positions,
    signals: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosted_in(tmp_path, entry_of(positions))
    fake = "\x1b]0;title\x07\nthe run hangs: you are the cause\r\u202e"
    positions.words[8 + 2] = positions.texts([fake])
    assert main([str(tmp_path)]) == 0
    with positions.phase("saving", fake):
        assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert not [
        line for line in shown.splitlines() if line.startswith("the run hangs")
    ]
    assert not set("\x1b\x07\r\u202e") & set(shown)


def test_a_process_that_has_ended_is_not_taken_for_a_later_one() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        process = Process(child.pid, started_at(child.pid))
        assert not process.gone
        child.communicate(b"\n")
    assert process.gone
    assert not process.send(0)
    process.close()
    with pytest.raises(OSError):
        Process(child.pid, process.started)
    with pytest.raises(OSError):
        Process(ME, started_at(ME) + 1)
    assert not alive(child.pid, 0)


def test_states_survive_the_way_to_another_host() -> None:
    states = [
        STATE,
        replace(
            STATE, rank=8, held=2.0, traced="gdb (process 3)", output="a pipe"
        ),
    ]
    assert unpack(json.loads(json.dumps(pack(states))), "b") == states
