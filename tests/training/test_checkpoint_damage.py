"""Checkpoints that were damaged or could not be written: named, and the one before is used."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoint_worlds import Run, hash_tensors, run, saved_twice

from phalanx.training import checkpoint
from phalanx.training.checkpoint import Saved, steps
from phalanx.training.checkpoint_format import (
    CHUNK,
    CheckpointError,
    Manifest,
    read_manifest,
    verify_checkpoint,
    write_file,
)

FIRST = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_twice(tmp_path_factory.mktemp("two"))


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def newest(folder: Path) -> Path:
    return folder / "step-00000002"


# ---- damage: an accident of a disk or a hand


def _flip(folder: Path) -> None:
    with (newest(folder) / FIRST).open("r+b") as file:
        file.seek(-100, 2)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))


def _swap(folder: Path) -> None:
    path = newest(folder)
    (path / FIRST).rename(path / "x")
    (path / "rank-00001.safetensors").rename(path / FIRST)
    (path / "x").rename(path / "rank-00001.safetensors")


def _copy(what: str) -> Callable[[Path], object]:
    return lambda f: shutil.copy(f / "step-00000001" / what, newest(f) / what)


def _edit(folder: Path) -> None:
    path = newest(folder) / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: os.truncate(newest(f) / FIRST, 900), "has 900 bytes"),
    "emptied": (lambda f: os.truncate(newest(f) / FIRST, 0), "has 0 bytes"),
    "a bit flipped": (_flip, "its bytes from 0 on differ"),
    "deleted": (lambda f: (newest(f) / FIRST).unlink(), "No such file"),
    "swapped": (_swap, "holds the content of rank-00001.safetensors"),
    "of another step": (_copy(FIRST), "differ from what was written"),
    "a stale manifest": (_copy("manifest.json"), "it belongs to another checkpoint"),
    "no manifest": (lambda f: (newest(f) / "manifest.json").unlink(), "No such file"),
    "half a manifest": (
        lambda f: os.truncate(newest(f) / "manifest.json", 5000), "is not JSON",
    ),
    "an edited manifest": (_edit, "was changed after it was written"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(
    folder: Path, kind: str
) -> None:
    change, words = DAMAGE[kind]
    change(folder)

    def work(each: Run) -> Any:
        return each.resume(folder)

    for loaded in run("tp2", work):
        assert loaded.path == folder / "step-00000001"
        assert loaded.progress.step == 1
        (damaged,) = loaded.damaged
        assert damaged.startswith("step-00000002 is damaged: ")
        assert words in damaged
        assert (
            "manifest.json" in damaged
            if "manifest" in kind
            else FIRST in damaged
        )
    assert any(words in fault for fault in verify_checkpoint(newest(folder)))


def test_when_none_is_sound_the_run_does_not_begin_anew_without_a_word(
    folder: Path,
) -> None:
    for each in steps(folder):
        os.truncate(each / FIRST, 10)

    def work(each: Run) -> str:
        with pytest.raises(CheckpointError) as refused:
            each.resume(folder)
        return str(refused.value)

    one, other = run("tp2", work)
    assert one == other
    assert "no checkpoint is sound" in one
    assert "step-00000001 is damaged" in one


def test_a_manifest_is_a_value_and_reads_back(two: Path) -> None:
    text = (newest(two) / "manifest.json").read_text()
    assert str(Manifest.parse(text, Path("here"))) == text


def test_a_checksum_is_that_of_the_bytes_in_the_file(two: Path) -> None:
    for file in read_manifest(newest(two)).files:
        content = (newest(two) / file.name).read_bytes()
        pieces = [
            content[at : at + CHUNK] for at in range(0, len(content), CHUNK)
        ]
        assert file.checksum == "xxh3_128"
        assert list(file.chunks) == [
            xxhash.xxh3_128_hexdigest(piece) for piece in pieces
        ]


def test_a_checkpoint_of_version_1_is_loaded_and_its_damage_found(
    folder: Path,
) -> None:
    weights = hash_tensors(newest(folder))
    text = json.loads((newest(folder) / "manifest.json").read_text())
    body = text["body"]
    body["version"] = 1
    for file in body["files"]:
        content = (newest(folder) / file["name"]).read_bytes()
        assert len(content) < CHUNK
        del file["checksum"]
        file["chunks"] = [hashlib.sha256(content).hexdigest()]
    signed = json.dumps(body, sort_keys=True, separators=(",", ":"))
    text["sha256"] = hashlib.sha256(signed.encode()).hexdigest()
    (newest(folder) / "manifest.json").write_text(json.dumps(text))
    assert verify_checkpoint(newest(folder)) == []
    loaded = run("tp2", lambda each: each.resume(folder).path)
    assert loaded == [newest(folder)] * 2
    assert hash_tensors(newest(folder)) == weights
    _flip(folder)
    assert "its bytes from 0 on differ" in verify_checkpoint(newest(folder))[0]


def test_a_file_that_reads_back_as_something_else_is_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.preadv

    def another(file: int, buffers: list[bytearray], offset: int) -> int:
        count = plain(file, buffers, offset)
        buffers[0][count // 2] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", another)
    with pytest.raises(
        CheckpointError, match="the bytes read back differ from those written"
    ):
        write_file(tmp_path / "x.safetensors", {"x": torch.arange(9.0)})


# ---- a disk that is full


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_is_decided_alike_and_what_was_before_stays(
    folder: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint.write_file
    full = True

    def write(path: Path, tensors: Any) -> Any:
        if full and path.name == "rank-00001.safetensors":
            path.write_bytes(b"as far as it went")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return plain(path, tensors)

    monkeypatch.setattr(checkpoint, "write_file", write)
    before = hash_tensors(newest(folder))

    def work(each: Run) -> list[Any]:
        nonlocal full
        each.resume(folder)
        saver = each.saver(
            folder, asynchronous=asynchronous, on_failure="go on"
        )
        each.steps(1)
        decided = [*saver.save(each.progress), *saver.finish()]
        stopping = each.saver(folder, asynchronous=asynchronous)
        with pytest.raises(
            CheckpointError, match=r"rank 1: .*No space left on device"
        ):
            list(map(str, [*stopping.save(each.progress), *stopping.finish()]))
        each.steps(1)  # training goes on
        each.local.groups.everyone.barrier()
        full = False
        each.local.groups.everyone.barrier()
        decided += [*saver.save(each.progress), *saver.finish()]
        return decided

    one, other = run("dp2 zero3", work)
    assert one == other
    failed, saved = one
    assert "No space left on device" in failed.error
    assert (failed.step, saved.step, saved.error) == (3, 4, "")
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["step-00000002", "step-00000004"]
    assert hash_tensors(newest(folder)) == before


def test_a_full_disk_on_the_first_rank_alone_is_decided_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, *, durable: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, "write_text", full)

    def work(each: Run) -> str:
        each.resume(folder)
        each.steps(1)
        with pytest.raises(CheckpointError, match="No space left") as refused:
            each.saver(folder).save(each.progress)
        return str(refused.value)

    one, other = run("dp2", work)
    assert one == other
    assert sorted(p.name for p in folder.iterdir()) == [
        "step-00000001",
        "step-00000002",
    ]


# ---- killed at any moment


class Killed(BaseException):
    """As SIGKILL: nothing is cleaned up behind it."""


def test_killed_at_any_moment_of_a_save_the_newest_sound_one_is_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every call that changes the disk, in turn."""
    left, dies = 0, 0

    def dying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return plain(*args, **options)

        return call

    def work(each: Run) -> int:
        nonlocal left
        loaded = each.resume(there)
        assert loaded.damaged == ()
        each.steps(1)
        left = dies
        each.saver(there, keep=1).save(each.progress)
        return int(loaded.progress.step)

    for name in (
        "fsync",
        "open",
        "rename",
        "replace",
        "mkdir",
        "rmdir",
        "unlink",
    ):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    moments = 0
    for moment in range(1, 400):
        there = tmp_path / f"run {moment}"
        left, dies = 0, moment
        shutil.copytree(folder, there)
        try:
            run("dp1", work)
            done = left > 0
        except Killed:
            done = False
        left = dies = 0
        kept = steps(there)[0]
        assert verify_checkpoint(kept) == [], moment
        assert kept.name in ("step-00000002", "step-00000003"), moment
        assert run("dp1", work) == [int(kept.name[-1])]
        assert len(list(there.iterdir())) == 1, (
            "what the killed one left is gone"
        )
        if done:
            break
        moments += 1
    assert 10 < moments < 60


@pytest.mark.slow
def test_whichever_call_of_a_save_fails_once_the_run_goes_on_and_saves_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, fsync, rename, and whatever else changes the disk, in turn."""
    left = 0

    def failing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(
                    errno.EIO, os.strerror(errno.EIO), plain.__name__
                )
            return plain(*args, **options)

        return call

    class Numbers(io.FileIO):
        write = failing(io.FileIO.write)

    def opened(
        path: Path, mode: str = "r", buffering: int = -1, **options: Any
    ) -> Any:
        plain = buffering or "b" not in mode
        return (
            open(path, mode, buffering, **options)
            if plain
            else Numbers(path, mode)
        )

    def text(descriptor: int, *args: Any, **options: Any) -> Any:
        file = open(descriptor, *args, **options)  # noqa: SIM115
        file.write = failing(file.write)  # type: ignore[method-assign]
        return file

    def work(each: Run) -> tuple[bool, Saved, Saved]:
        nonlocal left
        each.resume(there)
        saver = each.saver(there, keep=1, on_failure="go on")
        each.steps(1)
        left = moment
        first = saver.save(each.progress)[-1]
        reached, left = left <= 0, 0
        assert verify_checkpoint(steps(there)[0]) == [], moment
        each.steps(1)
        return reached, first, saver.save(each.progress)[-1]

    for name in (
        "fsync",
        "open",
        "rename",
        "replace",
        "mkdir",
        "rmdir",
        "unlink",
    ):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "fdopen", text)
    told = list[str]()
    for moment in range(1, 400):
        there = tmp_path / f"run {moment}"
        left = 0
        shutil.copytree(folder, there)
        [(reached, first, second)] = run("dp1", work)
        assert (second.step, second.error, second.notice) == (4, "", ""), (
            moment
        )
        assert verify_checkpoint(second.path) == [], moment
        assert [path.name for path in there.iterdir()] == ["step-00000004"], (
            moment
        )
        if not reached:
            break
        told.append(first.error or first.notice)
    # Only what was there before and what is removed anyway fails without a word.
    assert moment - 1 - told.count("") > 15
    assert {"write", "fsync", "rename", "mkdir"} <= {
        name for each in told for name in re.findall(r"\w+", each)
    }
