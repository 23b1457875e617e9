"""Two runs never change one remote folder, whoever comes back, and no restart waits for a dead one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
from loop_worlds import records, small, trained
from remote_worlds import (
    Faulty,
    Flat,
    at_once,
    listing,
    put,
    remote_of,
    uploaded,
    url_in,
)

from phalanx.cli.main import main
from phalanx.training import remote_owner
from phalanx.training.checkpoint_format import CheckpointError, read_manifest
from phalanx.training.checkpoint_remote import Uploader
from phalanx.training.lock import RunLocked
from phalanx.training.remote_folder import RemoteFolder
from phalanx.training.remote_owner import (
    FolderLost,
    Ownership,
    RemoteOwner,
    RunMark,
    gone,
    new_id,
    run_for,
)

A, B, NONE = "a" * 32, "b" * 32, None
SCHEMES = ["memory", "file", "flat"]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with at_once(monkeypatch):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs by themselves, each with a checkpoint at each of three steps."""
    outs = {
        name: tmp_path_factory.mktemp(name) / "run"
        for name in ("first", "second")
    }
    for seed, out in enumerate(outs.values()):
        words = (
            "steps=3",
            f"seed={seed}",
            "checkpoint.every=1",
            "checkpoint.keep=3",
        )
        trained(small(out, *words, "validation.batches=0"), "")
    return outs


def claimed(url: str, out: Path) -> Ownership:
    """The claim of a start that is at work."""
    owner = remote_of(url, out).owner
    assert owner is not None
    assert owner.claim(RemoteFolder(url)) or owner.claim(RemoteFolder(url))
    return owner


def written(url: str) -> RemoteOwner:
    raw = RemoteFolder(url).read("owner.json", 1 << 20)
    assert raw is not None
    return RemoteOwner.parse(raw, url)


def write(url: str, owner: RemoteOwner | bytes) -> None:
    RemoteFolder(url).write(
        "owner.json", owner if isinstance(owner, bytes) else owner.raw
    )


def elsewhere(owner: RemoteOwner) -> RemoteOwner:
    """The same start, on a machine of which nothing is known here."""
    return replace(owner, machine="another", host="node7", folder=new_id())


def words(url: str, out: Path, *more: str) -> list[str]:
    return [
        "train", f"checkpoint.remote={url}", f"out={out}", "layout=", "batch=6", "sequence=18",
        "model={layers=3,hidden=16,heads=2,ffn=24,vocab=256}", "validation.batches=0", *more,
    ]  # fmt: skip


# ---- whose a folder is


def test_a_folder_with_checkpoints_is_used_under_its_own_id_or_not_at_all() -> (
    None
):
    ids = (NONE, "", A, B)
    for owner, there, own, akin in product(
        (NONE, A, B), ids, ids, (False, True)
    ):
        run = run_for(owner, there, own, akin=akin)
        folder = there if owner is None else owner
        if there is None:
            assert run == (own or folder or "")  # nothing can be lost
        elif own and folder:
            assert run == (own if own == folder else None)
        elif own is None:
            assert run == (folder or "")  # the run goes on from there
        else:
            assert run == ((own or folder or "") if akin else None)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_with_checkpoints_of_its_own_is_refused_in_the_folder_of_another(
    scheme: str,
    runs: dict[str, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Though the first has ended, and the second is further: it would remove the first one's."""
    url = url_in(scheme, tmp_path / "there")
    assert uploaded(runs["first"], [1, 2], url) == ["", ""]
    before = listing(url)
    second = tmp_path / "second"
    shutil.copytree(runs["second"], second)
    assert main(words(url, second, "steps=5", "seed=1")) == 2
    said = capfd.readouterr().err
    for part in (
        f"RunLocked: {url}", f"folder '{runs['first']}'", f"process {os.getpid()}", "since 20",
        "write another checkpoint.remote",
    ):  # fmt: skip
        assert part in said.replace("Write", "write")
    assert "Traceback" not in said
    assert records(second, "step")[-1]["step"] == 3  # it did not train
    assert listing(url) == before


def test_a_copied_run_file_is_refused_while_the_first_run_is_at_work(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = url_in("file", tmp_path / "there")
    claimed(url, runs["first"])
    before = listing(url)
    assert main(words(url, tmp_path / "second", "steps=2")) == 2
    said = capfd.readouterr().err
    assert "is active there" in said
    assert f"host {written(url).host!r}" in said
    assert "start again when 180 s have passed" in said
    assert listing(url) == before
    assert not records(tmp_path / "second", "start")


def test_a_machine_with_nothing_takes_over_the_id_that_it_finds(
    tmp_path: Path,
) -> None:
    url = url_in("memory", tmp_path)
    outs = [tmp_path / name / "run" for name in ("one", "two", "three")]
    ids = set()
    for number, out in enumerate(outs, 1):
        out.parent.mkdir()
        trained(small(out, f"checkpoint.remote={url}", f"steps={number}"), "")
        ids.add(
            read_manifest(out / "checkpoints" / f"step-{number:08}").run_id
        )
        ids.add(RunMark.read(out).id)
        ids.add(written(url).run)
        shutil.rmtree(out / "checkpoints")
    (only,) = ids
    assert len(only) == 32
    assert (
        "this start continues with run"
        in records(outs[1], "remote")[0]["text"]
    )


def test_a_run_keeps_its_id_without_a_remote_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for last in (1, 2):
        trained(small(out, f"steps={last}"), "dp2")
    assert read_manifest(out / "checkpoints" / "step-00000001").run_id
    assert (
        len(
            {
                read_manifest(p).run_id
                for p in (out / "checkpoints").glob("step-*")
            }
        )
        == 1
    )


# ---- which start of it


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_start_of_the_same_run_is_refused_until_its_heartbeat_is_old(
    scheme: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    url = url_in(scheme, tmp_path)
    write(url, elsewhere(claimed(url, runs["first"]).me))
    with pytest.raises(
        RunLocked,
        match=r"another start of this run is active .*'node7'.* 0 s ago",
    ):
        claimed(url, runs["first"])
    _age(url, remote_owner.STALE - 5)
    with pytest.raises(RunLocked, match=r"17[456] s ago"):
        claimed(url, runs["first"])
    _age(url, remote_owner.STALE + 1)
    owner = claimed(url, runs["first"])
    assert written(url).start == owner.me.start
    # No file that the look at its age has left.
    assert list(listing(url)) == []


def _age(url: str, seconds: float) -> None:
    """Have `owner.json` be so old, by the clock of its store."""
    fs, root = fsspec.core.url_to_fs(f"{url}/owner.json")
    if isinstance(fs, fsspec.implementations.memory.MemoryFileSystem):
        from datetime import timedelta

        fs.store[root].modified -= timedelta(seconds=seconds)
    else:
        now = os.stat(root).st_mtime
        os.utime(root, (now - seconds, now - seconds))


def test_what_the_clocks_of_machines_say_makes_no_owner_old(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    url = url_in("file", tmp_path)
    owner = elsewhere(claimed(url, runs["first"]).me)
    write(
        url,
        replace(
            owner,
            heartbeat="1970-01-01 00:00:00 UTC",
            since="2999-01-01 00:00:00 UTC",
        ),
    )
    with pytest.raises(RunLocked, match="is active there"):
        claimed(url, runs["first"])


@pytest.mark.parametrize("told", [None, -3600.0], ids=["no time", "set back"])
def test_an_owner_of_whom_no_time_is_known_is_watched(
    told: float | None,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that tells no times, or whose clock was set back since."""
    url, now = url_in("file", tmp_path), [0.0]
    monkeypatch.setattr(RemoteFolder, "age", lambda *words: told)
    monkeypatch.setattr(remote_owner.time, "monotonic", lambda: now[0])
    here = claimed(url, runs["first"]).me
    for beats in (False, True):
        owner = replace(elsewhere(here), start=new_id())
        write(url, owner)
        second = remote_of(url, runs["first"]).owner
        assert second is not None
        now[0] = 1.0
        assert not second.claim(RemoteFolder(url))
        now[0] += remote_owner.STALE - 1
        assert not second.claim(RemoteFolder(url))
        now[0] += 2
        if beats:
            write(url, replace(owner, beats=owner.beats + 1))
            with pytest.raises(RunLocked, match="is active there"):
                second.claim(RemoteFolder(url))
        else:
            assert second.claim(RemoteFolder(url))


def test_who_is_known_to_be_gone_is_not_waited_for() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    me = RemoteOwner(
        A,
        new_id(),
        "h",
        os.getpid(),
        remote_owner.started_at(os.getpid()),
        "m",
        "/o",
        B,
        7,
    )
    # Another folder on this machine.
    other = replace(me, start=new_id(), folder=A)
    assert not gone(other, me)
    assert gone(replace(other, pid=dead.pid), me)
    # the number is another process's by now
    assert gone(replace(other, born=other.born + 1), me)
    assert gone(replace(other, ended=True), me)
    assert gone(replace(other, folder=B), me)  # whose lock this start holds
    # a copy of the folder has it not
    assert not gone(replace(other, folder=B, lock=8), me)
    assert not gone(replace(other, machine="n", pid=dead.pid), me)
    assert not gone(
        replace(other, machine="", pid=dead.pid), replace(me, machine="")
    )
    assert not gone(replace(other, folder="", lock=7), replace(me, folder=""))


def test_the_start_that_holds_the_folder_goes_on_at_once_on_another_machine(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """An elastic restart, or a job that was queued again: on another host, in a shared folder."""
    out, url = tmp_path / "run", url_in("file", tmp_path / "there")
    shutil.copytree(runs["first"], out)
    run = small(
        out, f"checkpoint.remote={url}", "steps=4", "validation.batches=0"
    )
    trained(run, "")
    write(
        url,
        replace(
            written(url),
            machine="another",
            host="node7",
            start=new_id(),
            ended=False,
        ),
    )
    (outcome,) = trained(replace(run, steps=5), "")
    assert (outcome.step, outcome.not_uploaded) == (5, "")
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    write(
        url,
        replace(
            written(url),
            machine="another",
            host="node7",
            start=new_id(),
            ended=False,
        ),
    )
    with pytest.raises(RunLocked, match="is active there"):
        trained(replace(run, out=str(copy), steps=6), "")


def test_a_start_whose_process_was_killed_is_not_waited_for(
    tmp_path: Path,
) -> None:
    url, first = url_in("file", tmp_path / "there"), tmp_path / "first"
    code = "import sys; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(url, first, "steps=1000000", "checkpoint.every=5")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("step 20 " in line for line in lines)
    process.kill()
    process.communicate()
    assert not written(url).ended
    newest = RemoteFolder(url).steps()[0]
    shutil.rmtree(first)
    # Nothing is left of it but the remote folder.
    (outcome,) = trained(
        small(tmp_path / "run", f"checkpoint.remote={url}", f"steps={newest}"),
        "",
    )
    assert (outcome.step, outcome.not_uploaded) == (newest, "")


# ---- losing it


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_start_that_has_lost_the_folder_changes_nothing_more_there(
    scheme: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    url = url_in(scheme, tmp_path)
    uploader = Uploader(remote_of(url, runs["first"]), 1)
    folder = runs["first"] / "checkpoints"

    def upload(step: int) -> str:
        uploader.offer(folder / f"step-{step:08}")
        while uploader.under_way(60.0):
            pass
        return "".join(each.error for each in uploader.taken())

    assert upload(1) == ""
    write(url, replace(elsewhere(written(url)), start=new_id()))
    before = listing(url)
    for step in (2, 3):
        assert "has been taken over" in upload(step)
        assert "'node7'" in uploader.missing
    assert listing(url) == before
    assert len(uploader.owner.notices) == 1
    uploader.release().finished.wait(60.0)
    assert written(url).host == "node7"
    assert not written(url).ended


def test_a_folder_that_is_lost_in_the_middle_of_an_upload_gets_no_manifest(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    url = url_in("faulty", tmp_path / "there")
    assert uploaded(runs["first"], [1], url) == [""]

    def take_over(name: str, path: str) -> None:
        if name == "write" and path.endswith(
            "step-00000002/rank-00000.safetensors"
        ):
            Faulty.before = staticmethod(lambda name, path: None)
            write(url, replace(elsewhere(written(url)), start=new_id()))

    Faulty.before = staticmethod(take_over)
    (error,) = uploaded(runs["first"], [2], url)
    assert "has been taken over" in error
    assert RemoteFolder(url).steps() == [1]


def test_a_run_whose_folder_is_taken_trains_on_and_ends_with_code_1(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, url = tmp_path / "run", url_in("faulty", tmp_path / "there")

    def take_over(name: str, path: str) -> None:
        if name == "mv" and "step-00000002/manifest.json" in path:
            Faulty.before = staticmethod(lambda name, path: None)
            write(url, replace(elsewhere(written(url)), start=new_id()))

    Faulty.before = staticmethod(take_over)
    assert main(words(url, out, "steps=4", "checkpoint.every=2")) == 1
    assert "has been taken over" in records(out, "remote")[-1]["text"]
    assert "step 4 is saved in" in (said := capfd.readouterr().err)
    assert "'node7'" in said
    assert records(out, "end")[0]["step"] == 4
    assert RemoteFolder(url).steps() == [2]  # by the call that had begun


def test_two_that_claim_at_once_do_not_both_keep_a_folder(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """The second does everything at one call of the first's; on a store that creates exclusively, and
    on one where the last writer wins."""
    for scheme in ("faulty", "flat"):
        kept = list[tuple[bool, bool]]()
        # the first has made all its calls
        while len(kept) < 3 or kept[-3:] != [(True, False)] * 3:
            url = url_in(scheme, tmp_path / f"{scheme}{len(kept)}")
            first, second = _both_claim(url, runs, len(kept) + 1)
            kept.append((_keeps(first, url), _keeps(second, url)))
            assert sum(kept[-1]) == 1, (scheme, kept)
        assert (False, True) in kept


def _both_claim(
    url: str, runs: dict[str, Path], number: int
) -> tuple[Ownership | None, Ownership | None]:
    """The claims of two starts: the second's within the first's call of this number, or after all."""
    calls, starts = 0, list[Ownership | None]()

    def second(*about: str) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            starts.append(_try(lambda: claimed(url, runs["second"])))

    Faulty.before, Flat.before = staticmethod(second), staticmethod(second)
    first = _try(lambda: claimed(url, runs["first"]))
    Faulty.before = staticmethod(lambda name, path: None)
    Flat.before = staticmethod(lambda: None)
    return first, starts[0] if starts else _try(
        lambda: claimed(url, runs["second"])
    )


def _try(work: Callable[[], Ownership]) -> Ownership | None:
    try:
        return work()
    except RunLocked:
        return None


def _keeps(start: Ownership | None, url: str) -> bool:
    try:
        if start is not None:
            start.confirm(RemoteFolder(url))
        return start is not None
    except FolderLost:
        return False


@pytest.mark.parametrize("scheme", ["faulty", "flat"])
def test_a_start_that_another_has_written_over_does_not_begin(
    scheme: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    """It was the slower one to read, and the first to write."""
    url = url_in(scheme, tmp_path / "there")
    other = elsewhere(
        claimed(url_in("memory", tmp_path / "other"), runs["second"]).me
    )

    def write_over(*about: str) -> None:
        Faulty.before, Flat.before = (
            staticmethod(lambda name, path: None),
            staticmethod(lambda: None),
        )
        raw = RemoteFolder(url).read("owner.json", 1 << 20)
        if raw:
            write(url, other)
        else:
            Faulty.before, Flat.before = (
                staticmethod(write_over),
                staticmethod(write_over),
            )

    Faulty.before, Flat.before = (
        staticmethod(write_over),
        staticmethod(write_over),
    )
    with pytest.raises(
        RunLocked, match=r"another run is active there .*'node7'"
    ):
        claimed(url, runs["first"])
    assert written(url).start == other.start


def test_a_start_that_is_at_work_beats_and_one_that_ends_does_not(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_in("memory", tmp_path)
    owner = claimed(url, runs["first"])
    monkeypatch.setattr(remote_owner, "BEAT", 0.0)
    beaten, texts = threading.Event(), set[bytes]()
    plain = RemoteFolder.write

    def counted(self: RemoteFolder, name: str, raw: bytes) -> None:
        plain(self, name, raw)
        texts.add(raw)
        if len(texts) > 3:
            beaten.set()

    monkeypatch.setattr(RemoteFolder, "write", counted)
    owner.begin_beating(lambda: RemoteFolder(url))
    assert beaten.wait(60.0)
    owner.release(RemoteFolder(url))
    assert written(url).ended


# ---- what else may lie there

HOSTILE = [
    b"", b"{", b"[]", b"null", b"1e999", b"\xff\xfe", b"{}" * 9, b"[" * 100_000, b'{"run": 1}',
    b" " * (1 << 20), json.dumps({"run": A, "start": B, "host": "h", "pid": -1, "born": 0}).encode(),
    json.dumps({"run": "../..", "start": B, "host": "h", "pid": 1, "born": 0}).encode(),
    json.dumps({"run": A, "start": "s" * 9999, "host": "h", "pid": 1, "born": 0}).encode(),
    json.dumps({"run": A, "start": B, "host": "\0", "pid": 1 << 80, "born": 0}).encode(),
    json.dumps({"run": A, "start": B, "host": "\ud800", "pid": 1, "born": 0}).encode(),
    json.dumps({"run": A, "start": B, "host": "h", "pid": 1, "born": 0, "adopted": "all"}).encode(),
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_an_owner_file_that_says_nothing_is_written_again(
    text: bytes,
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, url = tmp_path / "run", url_in("memory", tmp_path)
    shutil.copytree(runs["first"], out)
    owner = claimed(url, out)
    write(url, text)
    owner.confirm(RemoteFolder(url))  # a start that is at work
    assert written(url).start == owner.me.start
    write(url, text)
    assert claimed(url, out).claimed  # the next one in its folder, at once
    write(url, text)
    stranger = remote_of(url, runs["second"]).owner
    assert stranger is not None
    # one that knows nothing gives an owner at work the time to write again
    for _ in range(3):
        assert not stranger.claim(RemoteFolder(url))
    monkeypatch.setattr(remote_owner, "STALE", 0.0)
    assert stranger.claim(RemoteFolder(url))


def test_what_is_not_this_run_s_is_never_removed_renamed_or_gone_on_with(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out, url = tmp_path / "run", url_in("file", tmp_path / "there")
    shutil.copytree(runs["first"], out)
    assert uploaded(out, [1], url) == [""]
    # Of another run: a whole checkpoint, one that is being uploaded, and one that is being removed.
    for step in (2, 3):
        put(url, runs["second"] / "checkpoints" / f"step-{step:08}")
    there = tmp_path / "there"
    for name, step in (("writing", 7), ("removed", 8)):
        folder = there / f"step-{step:08}"
        shutil.copytree(there / "step-00000002", folder)
        (folder / "manifest.json").rename(folder / f"manifest.json.{name}")
    # Of an earlier version, which knows no owner and came later.
    copy = tmp_path / "copy"
    shutil.copytree(runs["second"], copy)
    put(url, _without_id(copy, 3))
    shutil.move(there / "step-00000003", there / "step-00000000")
    put(url, runs["second"] / "checkpoints" / "step-00000003")
    # Of nobody: files without a word of whose they are, and a file where a folder should be.
    (there / "step-00000006").mkdir()
    (there / "step-00000006" / "rank-00000.safetensors").write_bytes(
        b"anybody's"
    )
    (there / "step-00000009").write_bytes(b"no folder")
    (there / "notes.txt").write_bytes(b"mine")
    before = listing(url)
    (error,) = uploaded(out, [2], url)
    assert (
        "step-00000002: belongs to another run and is left untouched" in error
    )
    assert uploaded(out, [1], url) == [""]
    assert listing(url) == before
    # A further step of this run: its own older one goes, and nothing else.
    run = small(
        out,
        f"checkpoint.remote={url}",
        "steps=20",
        "seed=0",
        "checkpoint.keep=2",
    )
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    shutil.rmtree(out / "checkpoints" / "step-00000002")
    (outcome,) = trained(
        replace(run, checkpoint=replace(run.checkpoint, every=10)), ""
    )
    assert (outcome.step, outcome.not_uploaded) == (20, "")
    assert "resuming at step 1 " in records(out, "resume")[-1]["text"]
    assert "step-00000003 there is another run's" in str(
        records(out, "damaged")
    )
    after = listing(url)
    own = {name for name in before if "/step-00000001/" in name}
    assert {name: after.get(name) for name in before if name not in own} == {
        name: raw for name, raw in before.items() if name not in own
    }
    assert not own & set(after)
    assert RemoteFolder(url).steps() == [20, 10, 3, 2, 0]


def test_what_an_earlier_version_uploaded_is_adopted_if_it_is_the_run_s(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out, url = tmp_path / "run", url_in("file", tmp_path / "there")
    shutil.copytree(runs["first"], out)
    for step in (1, 2):
        put(url, _without_id(out, step))
    _without_id(out, 3)
    (out / ".run.id").unlink()
    before = listing(url)
    # Another run, with an id and without one.
    second = tmp_path / "second"
    shutil.copytree(runs["second"], second)
    for _ in range(2):
        with pytest.raises(RunLocked, match="not known to be this run's"):
            claimed(url, second)
        for step in (1, 2, 3):
            _without_id(second, step)
        (second / ".run.id").unlink(missing_ok=True)
    assert listing(url) == before
    owner = claimed(url, out)
    assert "step 2, 1 has no run id" in owner.notices[0]
    owner.release(RemoteFolder(url))
    shutil.rmtree(out / "checkpoints" / "step-00000003")
    (outcome,) = trained(
        small(
            out, f"checkpoint.remote={url}", "steps=4", "checkpoint.every=1"
        ),
        "",
    )
    assert (outcome.step, outcome.not_uploaded) == (4, "")
    # those without an id were its own, and old
    assert RemoteFolder(url).steps() == [4, 3]


def _without_id(out: Path, step: int) -> Path:
    """Make a checkpoint one as earlier versions made it."""
    path = out / "checkpoints" / f"step-{step:08}"
    manifest = read_manifest(path)
    config = {
        key: value for key, value in manifest.config.items() if key != "id"
    }
    (path / "manifest.json").write_text(str(replace(manifest, config=config)))
    return path


def test_a_machine_with_nothing_goes_on_from_what_an_earlier_version_uploaded(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    copy, url = tmp_path / "copy", url_in("memory", tmp_path)
    shutil.copytree(runs["first"], copy)
    put(url, _without_id(copy, 3))
    out = tmp_path / "new" / "run"
    out.parent.mkdir()
    (outcome,) = trained(small(out, f"checkpoint.remote={url}", "steps=4"), "")
    assert (outcome.step, outcome.not_uploaded) == (4, "")
    assert "resuming at step 3" in records(out, "resume")[0]["text"]
    assert RemoteFolder(url).steps() == [4, 3]


# ---- stores that do not do everything


def test_a_store_that_cannot_be_written_is_read_and_told(
    runs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = url_in("faulty", tmp_path / "there")
    assert uploaded(runs["first"], [3], url) == [""]
    before = listing(url)

    def refuse(name: str, path: str) -> None:
        if name not in ("ls", "cat_file", "modified", "size", "open"):
            raise PermissionError(f"{path}: read only")

    Faulty.before = staticmethod(refuse)
    out = tmp_path / "run"
    assert main(words(url, out, "steps=4")) == 1
    assert "resuming at step 3" in records(out, "resume")[0]["text"]
    assert "cannot be claimed yet" in records(out, "remote")[0]["text"]
    assert "read only" in capfd.readouterr().err
    Faulty.before = staticmethod(lambda name, path: None)
    assert listing(url) == before


def test_a_store_that_answers_later_gets_the_next_checkpoint(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out, url = tmp_path / "run", url_in("faulty", tmp_path / "there")
    shutil.copytree(runs["first"], out)
    newest = out / "checkpoints" / "step-00000005"

    def refuse(name: str, path: str) -> None:
        if not newest.exists():
            raise ConnectionError("no route to host")

    Faulty.before = staticmethod(refuse)
    run = small(
        out, f"checkpoint.remote={url}", "steps=6", "checkpoint.every=1"
    )
    (outcome,) = trained(run, "")
    assert (outcome.step, outcome.not_uploaded) == (6, "")
    assert "no route to host" in records(out, "remote")[0]["text"]
    assert 6 in RemoteFolder(url).steps()
    assert written(url).run == RunMark.read(out).id


def test_a_run_that_cannot_read_the_store_and_has_nothing_does_not_begin_anew(
    tmp_path: Path,
) -> None:
    url = url_in("faulty", tmp_path / "there")

    def refuse(name: str, path: str) -> None:
        raise PermissionError("no credentials")

    Faulty.before = staticmethod(refuse)
    with pytest.raises(
        CheckpointError, match="no checkpoint could be fetched"
    ):
        trained(small(tmp_path / "run", f"checkpoint.remote={url}"), "")


def test_a_start_that_is_refused_leaves_no_one_waiting(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """A mistake on a new machine: the run's own must not wait until its heartbeat is old."""
    url = url_in("file", tmp_path / "there")
    assert uploaded(runs["first"], [3], url) == [""]
    other: Any = {
        "hidden": 32,
        "heads": 2,
        "layers": 3,
        "ffn": 24,
        "vocab": 256,
    }
    wrong = replace(
        small(tmp_path / "run", f"checkpoint.remote={url}", "steps=4"),
        model=other,
    )
    with pytest.raises(CheckpointError, match="belongs to a different model"):
        trained(wrong, "")
    assert written(url).ended
