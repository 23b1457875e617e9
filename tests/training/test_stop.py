"""How a run is asked to stop: by a signal (exit code 75) or a STOP file (0), whatever that file is, whatever
the clocks say, and on a disk that takes no new file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loop_worlds import records, small, trained

from phalanx.cli.main import main
from phalanx.cli.train import _passed_on
from phalanx.layout.journal import last_record
from phalanx.training import checkpoint, stop
from phalanx.training.checkpoint import steps
from phalanx.training.optimizer import learning_rate
from phalanx.training.stop import (
    STOP,
    PassedOn,
    StopError,
    StopRequests,
    made_between,
)

SMALL = [
    "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}", "batch=2", "sequence=8",
    "validation.batches=0", "layout=fp32", "optimizer.schedule=constant", "steps=9",
]  # fmt: skip
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train in this process, and do something in step 3; the exit code."""

    def command(event: Callable[[Path], object], *words: str) -> int:
        out = tmp_path / "run"

        def rate(choice: Any, at: int, last: int) -> float:
            if at == 2:
                event(out)
            return learning_rate(choice, at, last)

        monkeypatch.setattr("phalanx.training.step.learning_rate", rate)
        return main(["train", *SMALL, f"out={out}", *words])

    return command


# ---- who has asked for it


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_ends_a_run_with_75_and_its_name(
    name: str, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    number = signal.Signals[name]
    # A shell that starts the tests in the background has SIGINT ignored, and a run respects that.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert run(lambda out: os.kill(os.getpid(), number), "--json") == 75
    finally:
        signal.signal(number, before)
    result = json.loads(capfd.readouterr().out)
    assert (result["step"], result["stopped"], result["by"]) == (3, True, name)
    assert records(tmp_path / "run", "stop")[0]["by"] == name


def _touch(file: Path) -> None:
    file.touch()


def _dangling(file: Path) -> None:
    file.symlink_to("nowhere")


def _text(file: Path) -> None:
    file.write_text("please\0\x1b[31m signal KILL")


KINDS: dict[str, Callable[[Path], object]] = {
    "a file": _touch, "a text": _text, "a folder": Path.mkdir, "a pipe": os.mkfifo,
    "a link to nothing": _dangling,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_file_ends_a_run_for_good_whatever_it_is(
    kind: str, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(lambda out: KINDS[kind](out / STOP)) == 0
    assert "asked to stop by STOP: saved at step 3" in capfd.readouterr().out
    assert records(out, "stop")[0]["by"] == STOP
    assert [path.name for path in steps(out / "checkpoints")] == [
        "step-00000003"
    ]
    assert not os.path.lexists(out / STOP)
    assert run(lambda out: None) == 0
    assert records(out, "end")[0]["step"] == 9


def test_a_folder_named_stop_that_holds_files_stops_a_run_and_refuses_the_next(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"

    def make(out: Path) -> None:
        (out / STOP).mkdir()
        (out / STOP / "note").touch()

    assert run(make) == 0
    assert records(out, "stop")[0]["step"] == 3
    os.utime(out / STOP, (1e9, 1e9))
    capfd.readouterr()
    assert run(lambda out: None) == 2
    said = capfd.readouterr().err
    assert said.startswith("StopError: ")
    assert "STOP cannot be removed: Directory not empty" in said
    assert "Traceback" not in said
    with pytest.raises(ValueError, match="STOP cannot be removed"):
        trained(small(out, *SMALL[:3]), "")


# ---- a folder that is removed


def _remove(out: Path) -> None:
    shutil.rmtree(out)


def _rename(out: Path) -> None:
    out.rename(out.with_name("renamed"))


def _remove_the_lock(out: Path) -> None:
    (out / ".run.lock").unlink()


@pytest.mark.parametrize("remove", [_remove, _rename, _remove_the_lock])
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_run_whose_folder_is_removed_saves_its_step_there_and_ends(
    remove: Callable[[Path], None],
    asynchronous: str,
    run: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    # Step 2's save in the background may still be under way, and fail.
    words = [f"checkpoint.async={asynchronous}", "checkpoint.every=2"]
    assert run(remove, *words) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"{out}, or its file .run.lock, was removed or renamed during the run."
    )
    assert "Step 3 is saved in" in line
    assert steps(out / "checkpoints")[0].name == "step-00000003"
    assert run(lambda out: None, *words) == 0
    assert records(out, "start")[-1]["step"] == 3
    assert records(out, "end")[0]["step"] == 9


def test_a_run_leaves_another_run_s_folder_in_the_place_of_its_own_alone(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    locked = '{"host": "another", "pid": 7, "since": "now"}'

    def replace(out: Path) -> None:
        _rename(out)
        out.mkdir()
        (out / ".run.lock").write_text(locked)

    assert run(replace) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"FolderReplaced: {out} was removed or renamed")
    assert (
        "another run is active in its place (host 'another', process 7" in line
    )
    assert [path.name for path in out.iterdir()] == [".run.lock"]
    assert (out / ".run.lock").read_text() == locked


def test_a_file_system_that_numbers_its_files_anew_stops_no_run(
    run: Run, tmp_path: Path
) -> None:
    def copy(out: Path) -> None:
        lock = out / ".run.lock"
        text = lock.read_text()
        lock.rename(out / "old")
        lock.write_text(text)

    assert run(copy) == 0
    assert records(tmp_path / "run", "end")[0]["step"] == 9


def test_a_save_whose_folder_is_removed_meanwhile_does_not_end_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, commit = tmp_path / "run", checkpoint.commit

    def removed(folder: Path, *given: Any) -> str:
        if not records(out, "checkpoint"):
            shutil.rmtree(folder)
        return commit(folder, *given)

    monkeypatch.setattr(checkpoint, "commit", removed)
    assert run(lambda out: None, "checkpoint.every=2") == 0
    saves = records(out, "checkpoint")
    assert [bool(save["error"]) for save in saves] == [
        True,
        False,
        False,
        False,
        False,
    ]
    assert "its folder was deleted during the save" in saves[0]["error"]


def test_a_user_s_file_counts_more_than_a_signal(tmp_path: Path) -> None:
    file = tmp_path / STOP
    (tmp_path / ".run.lock").touch()
    requests = StopRequests(file)
    assert (requests(), requests.by) == (False, "")
    requests.received.append(signal.SIGUSR1)
    assert (requests(), requests.by) == (True, "SIGUSR1")
    passed_on = PassedOn(file)
    assert passed_on.ask(signal.SIGHUP)
    assert requests.by == "SIGUSR1"
    assert StopRequests(file).by == "SIGHUP"
    file.unlink()
    file.touch()
    assert requests.by == STOP
    file.unlink()
    assert requests.by == STOP  # what was asked for stays
    passed_on.close()
    assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]


def test_all_ranks_give_the_same_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone sees the file; the exit code of every rank goes by it."""
    out = tmp_path / "run"

    def rate(choice: Any, at: int, last: int) -> float:
        (out / STOP).touch()
        return learning_rate(choice, at, last)

    monkeypatch.setattr("phalanx.training.step.learning_rate", rate)
    assert [each.by for each in trained(small(out), "dp2")] == [STOP, STOP]


# ---- a disk that takes no file


def test_a_request_needs_no_new_file_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / STOP
    (tmp_path / ".run.lock").touch()
    passed_on = PassedOn(file)

    def full(*given: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        for name in ("open", "write", "pwrite"):
            patched.setattr(os, name, full)
        assert passed_on.ask(signal.SIGTERM)
    assert StopRequests(file).by == "SIGTERM"
    passed_on.close()


def test_a_signal_reaches_ranks_that_no_file_can_be_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Rank:
        def terminate(self) -> None:
            asked.append(self)

    monkeypatch.setattr(
        "multiprocessing.active_children", lambda: [Rank(), Rank()]
    )
    with _passed_on(tmp_path / "gone" / STOP):
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(asked) == 2


# ---- files of earlier runs


def test_a_file_counts_if_all_its_times_lie_between_the_start_and_now() -> (
    None
):
    assert made_between(100.0, 110.0, 105.0, 105.0)
    assert made_between(100.0, 110.0, 100.0, 110.0)
    # Moved here: it was made before.
    assert not made_between(100.0, 110.0, 99.0, 105.0)
    assert not made_between(100.0, 110.0, 99.0, 99.0)
    # Touch -d "10 minutes".
    assert not made_between(100.0, 110.0, 710.0, 105.0)
    # The clock was set back since.
    assert not made_between(100.0, 110.0, 710.0, 710.0)


# A day old, and not ten minutes: the file counts if it is younger than this process, and the tests
# before this one may have taken that long.
@pytest.mark.parametrize("ahead", [-1e9, -86400.0, 600.0, 1e8])
@pytest.mark.parametrize("launched", [True, False])
def test_a_stop_file_with_another_clock_does_not_end_the_next_start(
    ahead: float, launched: bool, run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / STOP).touch()
    os.utime(out / STOP, (time.time() + ahead,) * 2)
    if launched:
        assert not trained(small(out), "")[0].stopped
    else:
        assert run(lambda out: None) == 0
        assert records(out, "end")
    assert not (out / STOP).exists()


@pytest.mark.parametrize("ahead", [-600.0, 0.0, 600.0])
def test_times_are_compared_by_the_file_server_s_clock(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our clock differs from the one that stamps files: what was made after the start still counts."""
    config = small(tmp_path / "run")
    file = Path(config.out, STOP)
    file.parent.mkdir()
    begun = time.time() - ahead
    monkeypatch.setattr(stop.time, "time", lambda: begun + 5.0)
    file.touch()  # now, 5 s after the process began
    assert stop.remove_stale_stop(config, begun) == ""
    assert file.exists()
    later = begun + 5.0
    assert "was left by an earlier run" in stop.remove_stale_stop(
        config, later + 1.0
    )


def test_a_stop_between_two_starts_of_a_launcher_counts(
    tmp_path: Path,
) -> None:
    """A job waits in a queue, or its ranks are started again, when a user asks it to stop."""
    config = small(tmp_path / "run", "steps=9")
    out = Path(config.out)
    trained(small(out, "steps=2", "optimizer.schedule=constant"), "")
    journal = out / "metrics.jsonl"
    ended = journal.read_text()
    journal.write_text(ended.replace('"event": "end"', '"event": "stop"'))
    (out / STOP).touch()
    outcome = trained(
        small(out, "steps=9", "optimizer.schedule=constant"), ""
    )[0]
    assert (outcome.step, outcome.stopped, outcome.by) == (3, True, STOP)
    # After its proper end there is nothing to stop: the file was meant for what is over.
    journal.write_text(ended)
    (out / STOP).touch()
    os.utime(out / STOP, (time.time() - 60,) * 2)
    assert not trained(
        small(out, "steps=9", "optimizer.schedule=constant"), ""
    )[0].stopped


def test_the_last_record_of_a_journal_is_read_from_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert last_record(path) == {}
    path.write_text(
        '{"event": "start"}\n{"event": "stop", "step": 3}\nno record\n[1]\n\n{"ev'
    )
    assert last_record(path) == {"event": "stop", "step": 3}
    path.write_text("x" * (1 << 20) + '\n{"event": "end"}\n')
    assert last_record(path) == {"event": "end"}


def test_a_stop_that_cannot_be_removed_is_an_error_of_the_user_s() -> None:
    assert issubclass(StopError, ValueError)
    assert StopError.__module__.startswith("phalanx.")


# ---- files in the places of ours


@pytest.mark.parametrize(
    "name", [".run.lock", ".ranks.lock", ".run.stop", ".run.held"]
)
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a link to nothing"])
def test_something_else_in_the_place_of_a_file_of_ours_is_a_sentence_or_no_harm(
    name: str,
    kind: str,
    run: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    KINDS[kind](out / name)
    code = run(lambda out: None)
    said = capfd.readouterr().err
    assert "Traceback" not in said
    if name in (".run.lock", ".ranks.lock"):
        assert code == 2
        assert str(out / name) in said
    else:
        assert (code, said) == (0, "")
