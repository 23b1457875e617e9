"""Checkpoints that are uploaded: whole or not there, gone on from elsewhere, pruned as here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from loop_worlds import losses, records, small, trained, weights
from remote_worlds import (
    PASSWORD,
    Faulty,
    Flat,
    Vault,
    at_once,
    kill,
    no_part,
    own,
    put,
    remote_of,
    sound_there,
    uploaded,
)

from phalanx.cli.main import main
from phalanx.comm import World, launch
from phalanx.layout.run import Run, RunError
from phalanx.training import remote_task
from phalanx.training.checkpoint import steps
from phalanx.training.checkpoint_format import (
    CheckpointError,
    verify_checkpoint,
)
from phalanx.training.checkpoint_remote import Uploader
from phalanx.training.remote_folder import RemoteFolder
from phalanx.training.remote_task import Abandoned, Answer, Task, on_first_rank

CONSTANT = "optimizer.schedule=constant"  # which does not depend on the number of steps


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint at each of five steps."""
    out = tmp_path_factory.mktemp("saved") / "run"
    trained(
        small(
            out,
            "checkpoint.every=1",
            "checkpoint.keep=5",
            "validation.batches=0",
        ),
        "dp2 zero1",
    )
    return out


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go."""
    out = tmp_path_factory.mktemp("truth") / "run"
    trained(small(out, "steps=6", CONSTANT, "validation.batches=0"), "fp64")
    return out


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with at_once(monkeypatch):
        yield


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_run_goes_on_where_nothing_is_left_of_it(
    scheme: str, truth: Path, tmp_path: Path
) -> None:
    url = (
        f"memory://bucket/{tmp_path.name}"
        if scheme == "memory"
        else f"file://{tmp_path}/there"
    )
    words = (f"checkpoint.remote={url}", "checkpoint.every=1", CONSTANT)
    first, second = (tmp_path / name / "run" for name in ("first", "second"))
    for out in (first, second):
        out.parent.mkdir()
    trained(small(first, *words), "fp64")
    assert RemoteFolder(url).steps() == [5, 4]  # pruned as here
    assert [r["error"] for r in records(first, "upload")][-1] == ""
    shutil.rmtree(first)
    trained(small(second, "steps=6", *words), "fp64")
    assert "resuming at step 5" in records(second, "resume")[0]["text"]
    assert losses(second)[6] == losses(truth)[6]
    assert weights(second, 6) == weights(truth, 6)


def test_what_is_damaged_here_is_fetched_and_what_is_damaged_there_passed_over(
    saved: Path, tmp_path: Path
) -> None:
    folder, there = tmp_path / "run" / "checkpoints", tmp_path / "there"
    shutil.copytree(saved / "checkpoints", folder)
    for n in (3, 4, 5):
        put(f"file://{there}", folder / f"step-0000000{n}")
    for path in (
        folder / "step-00000005",
        there / "step-00000005",
        folder / "step-00000004",
    ):
        file = path / "rank-00001.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    run = small(
        tmp_path / "run",
        f"checkpoint.remote=file://{there}",
        "validation.batches=0",
    )
    trained(run, "dp2 zero1")
    assert (
        "resuming at step 4" in records(tmp_path / "run", "resume")[0]["text"]
    )
    said = " ".join(r["text"] for r in records(tmp_path / "run", "damaged"))
    assert "are not what was written" in said
    assert (folder / "set-aside-step-00000004").is_dir()


def test_every_call_of_an_upload_fails_once_and_the_upload_is_made_again(
    saved: Path, tmp_path: Path
) -> None:
    assert uploaded(saved, [1, 2], f"faulty://{tmp_path}/all") == ["", ""]
    count = Faulty.calls
    assert count > 20
    for n in range(1, count + 1):
        there = tmp_path / str(n)
        Faulty.calls, Faulty.fails = 0, n
        Faulty.before = staticmethod(
            lambda name, path, there=there: no_part(there)
        )
        assert uploaded(saved, [1, 2], f"faulty://{there}") == ["", ""], n
        assert sound_there(there) == ["step-00000002"], n


def killed_in_call(number: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that SIGKILL ends in its call of this number; whether it came there."""
    child = os.fork()
    if not child:
        try:
            Faulty.calls, Faulty.fails, Faulty.how = 0, number, kill
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_an_upload_that_is_killed_anywhere_leaves_no_part_and_holds_up_no_start(
    saved: Path, tmp_path: Path
) -> None:
    ended, number = set[str](), 1
    while True:
        there = tmp_path / str(number)
        killed = killed_in_call(
            number, partial(uploaded, saved, [1, 3], f"faulty://{there}")
        )
        no_part(there)
        ended.add(" ".join(sound_there(there)) if there.exists() else "")
        # The next start takes another course since step 1, and owns the folder at once.
        assert uploaded(saved, [2], f"faulty://{there}") == [""]
        assert sound_there(there) == ["step-00000002"]
        left = {path.parent.name for path in there.rglob("*.safetensors")}
        assert left <= {"step-00000002", "step-00000003"}, number
        names = {path.name for path in there.glob("step-00000003/*manifest*")}
        assert names <= {"set-aside-manifest.json", "manifest.json.writing"}
        if not killed:
            break
        number += 1
    assert number > 40
    assert ended == {
        "",
        "step-00000001",
        "step-00000003 step-00000001",
        "step-00000003",
    }


def test_an_upload_that_fails_for_good_is_told_at_the_end(
    tmp_path: Path,
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("no folder")
    run = small(
        tmp_path / "run", f"checkpoint.remote=file://{blocked}/x", "steps=1"
    )
    outcomes = trained(run, "dp2")
    assert len(set(outcomes)) == 1
    assert outcomes[0].unsaved == ""
    assert str(blocked) in outcomes[0].not_uploaded
    assert records(tmp_path / "run", "upload")[0]["error"]


@pytest.mark.parametrize("scheme", ["memory", "file", "flat"])
def test_a_run_in_a_folder_below_or_above_does_not_count(
    scheme: str, saved: Path, tmp_path: Path
) -> None:
    top = (
        f"file://{tmp_path}/team"
        if scheme == "file"
        else f"{scheme}://{tmp_path.name}/team"
    )
    urls = [top, f"{top}/run1", f"{top}/run1/step-00000009", f"{top}/run10"]
    for step, url in enumerate(urls, 1):
        assert RemoteFolder(url).steps() == []
        put(url, saved / "checkpoints" / f"step-{step:08}")
    for step, url in enumerate(urls, 1):
        assert RemoteFolder(url).steps() == [step]
        RemoteFolder(f"{url}/").prune(step, 1, own)
    assert [RemoteFolder(url).steps() for url in urls] == [[1], [2], [3], [4]]
    put(top, saved / "checkpoints" / "step-00000005")
    RemoteFolder(top).prune(5, 1, own)
    assert [RemoteFolder(url).steps() for url in urls] == [[5], [2], [3], [4]]


@pytest.mark.parametrize("scheme", ["memory", "file", "flat"])
def test_a_new_run_begins_above_the_folder_of_another(
    scheme: str, saved: Path, tmp_path: Path
) -> None:
    top = (
        f"file://{tmp_path}/team"
        if scheme == "file"
        else f"{scheme}://{tmp_path.name}/team"
    )
    put(f"{top}/run1", saved / "checkpoints" / "step-00000005")
    run = small(
        tmp_path / "run",
        f"checkpoint.remote={top}",
        "steps=1",
        "validation.batches=0",
    )
    (outcome,) = trained(run, "")
    assert (outcome.step, outcome.unsaved, outcome.not_uploaded) == (1, "", "")
    assert RemoteFolder(top).steps() == [1]
    assert RemoteFolder(f"{top}/run1").steps() == [5]


def test_a_listing_that_cannot_be_understood_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would begin anew beside its checkpoints."""
    monkeypatch.setattr(
        Flat,
        "ls",
        lambda *args, **words: [{"name": "/elsewhere/step-00000001"}],
    )
    with pytest.raises(
        CheckpointError, match="'/elsewhere/step-00000001', which is not in it"
    ):
        RemoteFolder("flat://bucket/run").steps()


def test_a_password_is_in_no_file_and_in_no_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "there", tmp_path / "run"
    words = [
        f"checkpoint.remote=vault://runner:{PASSWORD}@host{there}", f"out={out}", "layout=", "batch=6",
        "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}", "sequence=18", "validation.batches=0",
    ]  # fmt: skip
    assert main(["train", *words, "steps=2", "checkpoint.every=1"]) == 0
    assert steps(there)
    shutil.rmtree(out / "checkpoints")  # the same command continues from there
    assert main(["train", *words, "steps=3"]) == 0
    assert "resuming at step 2" in records(out, "resume")[0]["text"]
    Vault.broken = True
    assert main(["train", *words, "steps=4"]) == 1
    shutil.rmtree(out / "checkpoints")
    assert main(["train", *words, "steps=4"]) != 0
    assert (
        main(
            [
                "train",
                *[w.replace(PASSWORD, "guess1ed") for w in words],
                "steps=4",
            ]
        )
        != 0
    )
    assert main(["report", str(out)]) == 0
    said = "".join(capfd.readouterr())
    assert "no answer of vault://runner:***@host/x?token=*** ***" in said
    texts = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    for name in (
        "run.toml",
        "metrics.jsonl",
        "report.html",
        "manifest.json",
        "rank-0.log",
    ):
        assert [path for path in texts if path.name == name], name
    for secret in (PASSWORD, "guess1ed"):
        assert secret not in said
        assert not [
            path for path, raw in texts.items() if secret.encode() in raw
        ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("checkpoint.remote=bucket/run", "is no URL"),
        ("checkpoint.remote=nope://bucket", "nope"),
        ("out=s3://bucket/run", "Write checkpoint.remote"),
    ],
)
def test_what_cannot_be_uploaded_to_is_refused_at_once(
    words: str, said: str
) -> None:
    with pytest.raises(RunError, match=said):
        Run.parse("", "run", (words,))


def test_without_fsspec_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(
        util,
        "find_spec",
        lambda name: None if name == "fsspec" else find(name),
    )
    with pytest.raises(RunError, match=r"pip install 'phalanx\[remote\]'"):
        Run.parse("", "run", ("checkpoint.remote=s3://bucket/run",))


# ---- uploads that stand


class Clock:
    """A clock that a test sets, in place of `time.monotonic`."""

    now = 0.0

    @classmethod
    def time(cls) -> float:
        return cls.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    Clock.now = 1000.0
    monkeypatch.setattr(remote_task.time, "monotonic", Clock.time)
    return Clock


def blocked_at(*marks: str) -> tuple[threading.Event, threading.Event]:
    """Have the next call that writes a path with one of these marks stand. The events: it stands; let it
    go on."""
    stands, goes_on = threading.Event(), threading.Event()

    def block(name: str, path: str) -> None:
        if name in ("open", "pipe_file") and any(
            mark in path for mark in marks
        ):
            stands.set()
            assert goes_on.wait(120.0)

    Faulty.before = staticmethod(block)
    return stands, goes_on


def test_work_without_progress_stands_and_slow_work_does_not(
    clock: type[Clock],
) -> None:
    task = Task(lambda task: "")
    for _ in range(5):
        clock.now += 299
        assert not task.stands(300.0)
        task.moved()
    clock.now += 300
    assert task.stands(300.0).startswith(
        "no progress for 300 s (checkpoint.remote_timeout = 300)"
    )
    assert not task.stands(0.0)
    task.abandoned = True
    with pytest.raises(Abandoned):
        task.moved()


def test_tries_that_get_no_further_are_no_progress_and_one_that_moved_much_is(
    clock: type[Clock],
) -> None:
    task = Task(lambda task: "")
    # Each accepts ten calls, and hangs for a while at the eleventh.
    for _ in range(6):
        task.begin_try()
        for _ in range(10):
            task.moved()
        clock.now += 100
    assert task.stands(600.0)
    for _ in range(100):
        task.moved()
    clock.now += 599
    task.begin_try()  # it has to move all of that again
    for _ in range(5):
        clock.now += 599
        task.moved()
        assert not task.stands(600.0)


def test_an_upload_that_stands_is_told_and_the_next_one_goes(
    saved: Path, tmp_path: Path, clock: type[Clock]
) -> None:
    url, folder = f"faulty://{tmp_path}/there", saved / "checkpoints"
    uploader = Uploader(remote_of(url, saved, timeout=300.0), 5)
    stands, goes_on = blocked_at("step-00000001/")
    uploader.offer(folder / "step-00000001")
    assert stands.wait(60.0)
    clock.now += 299
    assert uploader.taken() == []
    assert uploader.current == folder / "step-00000001"
    clock.now += 2
    (result,) = uploader.taken()
    assert (result.step, uploader.current) == (1, None)
    assert result.error.startswith("no progress for 301 s")
    assert uploader.missing == result.error
    uploader.offer(folder / "step-00000002")
    while uploader.under_way(60.0):
        pass
    assert [each.error for each in uploader.taken()] == [""]
    assert uploader.missing == ""
    goes_on.set()  # what was given up does nothing more
    for thread in threading.enumerate():
        if thread.name == "remote":
            thread.join(60.0)
    assert RemoteFolder(url).steps() == [2]
    assert not uploader.stuck
    uploader.close()


def test_only_so_many_uploads_hang_at_a_time(
    saved: Path, tmp_path: Path, clock: type[Clock]
) -> None:
    url, folder = f"faulty://{tmp_path}/there", saved / "checkpoints"
    uploader = Uploader(remote_of(url, saved, timeout=300.0), 5)
    errors = list[str]()
    stands, goes_on = blocked_at("step-")
    for step in (1, 2, 3, 4, 5):
        uploader.offer(folder / f"step-{step:08}")
        assert step == 5 or stands.wait(60.0)
        stands.clear()
        clock.now += 301
        errors += [each.error for each in uploader.taken()]
    assert [error.split(" for")[0] for error in errors[:4]] == [
        "no progress"
    ] * 4
    assert errors[4] == "4 earlier uploads are still hanging"
    goes_on.set()
    uploader.close()


@pytest.mark.parametrize("layout", ["", "dp2"])
def test_the_end_of_a_run_waits_for_a_standing_upload_no_longer_than_was_asked(
    layout: str, tmp_path: Path
) -> None:
    out, there = tmp_path / "run", tmp_path / "there"
    _, goes_on = blocked_at("step-00000003/")
    words = (
        f"checkpoint.remote=faulty://{there}",
        "checkpoint.remote_timeout=0.2",
        "steps=3",
    )
    outcomes = trained(small(out, *words, "validation.batches=0"), layout)
    goes_on.set()
    assert len(set(outcomes)) == 1
    assert outcomes[0].unsaved == ""
    assert "(checkpoint.remote_timeout = 0.2)" in outcomes[0].not_uploaded
    assert "no progress" in records(out, "upload")[0]["error"]
    assert records(out, "end")[0]["step"] == 3
    assert not verify_checkpoint(out / "checkpoints" / "step-00000003")


def test_a_stop_ends_the_wait_for_an_upload(tmp_path: Path) -> None:
    out, there = tmp_path / "run", tmp_path / "there"
    stands, goes_on = blocked_at("step-00000003/")

    def stop() -> None:
        assert stands.wait(60.0)
        while not records(out, "checkpoint"):
            pass
        (out / "STOP").touch()

    stopper = threading.Thread(target=stop)
    stopper.start()
    words = (
        f"checkpoint.remote=faulty://{there}",
        "checkpoint.remote_timeout=0",
        "steps=3",
    )
    outcomes = trained(small(out, *words, "validation.batches=0"), "dp2")
    stopper.join()
    goes_on.set()
    assert len(set(outcomes)) == 1
    assert "ended the wait" in outcomes[0].not_uploaded
    assert outcomes[0].step == 3
    assert not (out / "STOP").exists()


def test_ranks_meet_while_rank_0_waits_for_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits in one call for long, so no call gives up, and the watcher sees all of them move."""
    met, plain, enough = [0], remote_task.broadcast_text, threading.Event()

    def broadcast(group: Any, text: str) -> str:
        met[0] += group.rank == 1
        if met[0] >= 3:
            enough.set()
        return plain(group, text)

    monkeypatch.setattr(remote_task, "broadcast_text", broadcast)
    monkeypatch.setattr(remote_task, "ROUND", 0.0)
    answers = launch(_answers, 2, enough, backend="threads")
    assert answers == [Answer("it came")] * 2
    assert met[0] >= 3


def _answers(world: World, enough: threading.Event) -> Answer:
    group = world.split("all", [range(world.size)])

    def work(task: Task) -> str:
        return "it came" if enough.wait(60.0) else "it did not"

    return on_first_rank(group, work, 60.0, str)


def test_a_checkpoint_that_is_being_uploaded_is_not_removed_from_the_disk(
    tmp_path: Path,
) -> None:
    """Three later ones are saved meanwhile, of which two are kept."""
    out, there = tmp_path / "run", tmp_path / "there"
    stands, goes_on = blocked_at("step-00000001/rank")
    first, seen = out / "checkpoints" / "step-00000001", list[bool]()

    def watch() -> None:
        assert stands.wait(60.0)
        while len(records(out, "checkpoint")) < 4:
            pass
        seen.append(first.exists())
        Faulty.before = staticmethod(lambda name, path: None)
        goes_on.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    words = (
        f"checkpoint.remote=faulty://{there}",
        "checkpoint.every=1",
        "steps=6",
    )
    (outcome,) = trained(small(out, *words, "validation.batches=0"), "")
    watcher.join()
    assert seen == [True]
    results = records(out, "upload")
    assert (results[0]["step"], results[0]["error"]) == (1, "")
    assert outcome.not_uploaded == ""
    assert not first.exists() or len(steps(out / "checkpoints")) == 3


HANGING = """
import sys, threading
import fsspec
from fsspec.implementations.local import LocalFileSystem
from phalanx.cli.main import main

class Hanging(LocalFileSystem):
    protocol = "hanging"
    cachable = False
    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("hanging://"))
    def open(self, path, mode="rb", **words):
        if "step-00000002" in str(path) and mode == "wb":
            print("it stands", file=sys.stderr, flush=True)
            threading.Event().wait()
        return super().open(path, mode, **words)

fsspec.register_implementation("hanging", Hanging)
EARLY
sys.exit(main(sys.argv[1:]))
"""
# Ctrl-C after the last step, and before the wait for the upload begins.
EARLY = """
import signal
from phalanx.training.uploads import Uploads
waits = Uploads.finish
def early(self):
    signal.raise_signal(signal.SIGINT)
    return waits(self)
Uploads.finish = early
"""


@pytest.mark.parametrize(
    ("layout", "early"),
    [
        pytest.param("", "", marks=pytest.mark.slow),
        ("dp2", ""),
        ("", EARLY),
    ],
)
def test_a_process_ends_though_an_upload_hangs_and_ctrl_c_ends_the_wait(
    layout: str, early: str, tmp_path: Path
) -> None:
    program, out = tmp_path / "hanging.py", tmp_path / "run"
    program.write_text(HANGING.replace("EARLY", early))
    words = [
        "train", f"out={out}", f"checkpoint.remote=hanging://{tmp_path}/there", "steps=2", "batch=4",
        "model={layers=1,hidden=16,heads=2,ffn=24,vocab=256}", "sequence=8", "validation.batches=0",
        f"layout={layout}", "checkpoint.remote_timeout=0",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(program), *words], stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stderr is not None
    try:
        assert any(
            "it stands" in line for line in iter(process.stderr.readline, "")
        )
        if not early:
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert "step 2 is saved in" in said
    assert "a signal, or a STOP file, ended the wait" in said
    assert "hang" not in said.replace("hanging://", "")
    assert not (out / "hang.txt").exists()
    assert not verify_checkpoint(out / "checkpoints" / "step-00000002")
