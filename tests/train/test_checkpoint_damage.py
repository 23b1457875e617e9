"""Checkpoints that were damaged, forged or could not be written: named, refused, and the one before
is used. A forged one has right checksums: whoever forges can compute them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worlds import Run, run

from phalanx.train import checkpoint
from phalanx.train.checkpoint import CheckpointError, steps
from phalanx.train.checkpoint_file import chunk_sums
from phalanx.train.checkpoint_manifest import Manifest
from phalanx.train.checkpoint_read import hash_tensors, verify_checkpoint

FIRST = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2 in two files each."""
    folder = tmp_path_factory.mktemp("two")

    def work(each: Run) -> None:
        saver = each.saver(folder)
        for _ in range(2):
            each.steps(1)
            saver.save(each.progress)

    run("dp2 zero3", work)
    return folder


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    shutil.copytree(two, tmp_path / "run")
    return tmp_path / "run"


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
    "swapped": (_swap, "holds what belongs into rank-00001.safetensors"),
    "of another step": (_copy(FIRST), "differ from what was written"),
    "a stale manifest": (_copy("manifest.json"), "it belongs to another checkpoint"),
    "no manifest": (lambda f: (newest(f) / "manifest.json").unlink(), "No such file"),
    "half a manifest": (
        lambda f: os.truncate(newest(f) / "manifest.json", 5000), "not usable JSON",
    ),
    "an edited manifest": (_edit, "was changed after it was written"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(folder: Path, kind: str) -> None:
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
        assert "manifest.json" in damaged if "manifest" in kind else FIRST in damaged
    assert any(words in fault for fault in verify_checkpoint(newest(folder)))


def test_when_none_is_sound_the_run_does_not_begin_anew_without_a_word(folder: Path) -> None:
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


# ---- hostile: everything fits its checksum


def sign(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and make its checksum right."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    said = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    (path / "manifest.json").write_text(json.dumps(said))


def forge(path: Path, content: bytes) -> None:
    """Put other bytes into a file, as many as there were, and make its checksums right."""
    content = content.ljust((path / FIRST).stat().st_size, b"\0")
    (path / FIRST).write_bytes(content)
    with (path / FIRST).open("rb") as file:
        sums = list(chunk_sums(file))
    sign(path, lambda body: body["files"][0].update(size=len(content), chunks=sums))


def header(path: Path, change: Callable[[dict[str, Any]], object], *, raw: bytes = b"") -> None:
    """Change the header of a file."""
    content = (path / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    said = json.loads(content[8 : 8 + length])
    change(said)
    text = raw or json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (length - len(text))
    forge(path, len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensor(change: dict[str, Any], title: str = "embed.tokens.weight") -> Callable[[Path], None]:
    def found(body: dict[str, Any]) -> None:
        next(t for t in body["tensors"] if t["name"] == title).update(change)

    return lambda path: sign(path, found)


def piece(change: dict[str, Any]) -> Callable[[Path], None]:
    def found(body: dict[str, Any]) -> None:
        each = next(t for t in body["tensors"] if t["name"] == "embed.tokens.weight")
        each["pieces"][0].update(change)

    return lambda path: sign(path, found)


def named(name: str) -> Callable[[Path], None]:
    return lambda path: sign(path, lambda body: body["files"][0].update(name=name))


def stored(change: dict[str, Any]) -> Callable[[Path], None]:
    def found(said: dict[str, Any]) -> None:
        next(iter(said.values())).update(change)

    return lambda path: header(path, found)


def link(target: str) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        (path / FIRST).unlink()
        (path / FIRST).symlink_to(target)

    return put


def ring(path: Path) -> None:
    (path / FIRST).unlink()
    (path / FIRST).symlink_to(path / FIRST)


def pipe(path: Path) -> None:
    (path / FIRST).unlink()
    os.mkfifo(path / FIRST)


class Payload:
    """A pickle that, opened, would leave a trace."""

    trace = "opened"

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (self.trace,)


PICKLE = pickle.dumps(Payload())
HUGE = (1 << 62).to_bytes(8, "little")
DEEP = b'{"a":' * 30_000


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pickle for a file": (lambda p: forge(p, PICKLE), "is no safetensors file"),
    "a pickle for the manifest": (
        lambda p: (p / "manifest.json").write_bytes(PICKLE), "is not text|not usable JSON",
    ),
    "a name that climbs": (named("../../etc/passwd.safetensors"), "names are plain"),
    "an absolute name": (named("/etc/passwd"), "names are plain"),
    "a name with a zero": (named("rank\x00.safetensors"), "names are plain"),
    "one name twice": (named("rank-00001.safetensors"), "said once"),
    "a pickle's name": (named("data.pkl"), "names are plain"),
    "a link out": (link("/etc/passwd"), "link out of its folder"),
    "a link to a device": (link("/dev/zero"), "link out of its folder"),
    "a link to itself": (ring, "cannot be opened|link out"),
    "a pipe": (pipe, "not a regular file"),
    "a huge header": (lambda p: forge(p, HUGE + b"{}"), "says that its header has"),
    "a header longer than the file": (
        lambda p: forge(p, (1 << 20).to_bytes(8, "little") + b"{}"), "its header has 1,048,576",
    ),
    "a header that is no text": (lambda p: header(p, id, raw=b"\xff\xfe"), "header is not text"),
    "a header without end": (
        lambda p: forge(p, len(DEEP).to_bytes(8, "little") + DEEP), "not usable JSON",
    ),
    "a key twice": (lambda p: header(p, id, raw=b'{"a":{},"a":{}}'), "a key is said twice"),
    "tensors that overlap": (
        lambda p: header(p, lambda s: list(s.values())[1].update(
            data_offsets=[0, list(s.values())[1]["data_offsets"][1]
                          - list(s.values())[1]["data_offsets"][0]])),
        "shares bytes|leaves bytes",
    ),
    "offsets that go back": (stored({"data_offsets": [80, 0]}), "bytes, and"),
    "offsets below zero": (stored({"data_offsets": [-8, 0]}), "whole numbers from 0"),
    "offsets that are not numbers": (stored({"data_offsets": ["0", 8.5]}), "whole numbers from 0"),
    "objects for numbers": (stored({"dtype": "O"}), "numbers of type 'O'"),
    "another type of one size": (stored({"dtype": "I64"}), "numbers of type 'I64'"),
    "half as wide": (stored({"dtype": "F32"}), "takes"),
    "a shape beyond all memory": (stored({"shape": [1 << 40, 1 << 40]}), "takes"),
    "many dims": (stored({"shape": [1] * 5000}), "5000 dims"),
    "a manifest of another type": (tensor({"dtype": "F32"}), "not there as the manifest says"),
    "a type that is none": (tensor({"dtype": "object"}), "is no tensor of a model"),
    "a kind that is none": (tensor({"kind": "../x"}), "is no tensor of a model"),
    "a larger shape": (tensor({"shape": [1 << 30, 16]}), "its parts hold"),
    "a missing part": (tensor({"pieces": []}), "its parts hold 0 numbers"),
    "a part of no file": (piece({"file": 7}), "there is no file 7 of 2"),
    "a part beyond the file": (piece({"offset": 1 << 40}), "its numbers end at byte"),
    "a part of other bytes": (piece({"offset": 4096}), "not there as the manifest says"),
    "a part of another tensor": (piece({"key": "weight/head.norm.bias"}), "not there as the"),
    "a part that is told twice": (piece({"start": 0, "stop": 1}), "are nowhere|are twice"),
    "a part with a negative box": (piece({"box": [[-1, 37], [0, 16]]}), "a start and a later stop"),
    "a part of other dims": (piece({"box": [[0, 37]]}), "do not fit together"),
    "a newer format": (lambda p: sign(p, lambda b: b.update(version=2)), "of version 1"),
    "a shape that is none": (lambda p: sign(p, lambda b: b.update(shape={"x": 1})), "is no shape"),
    "true for a number": (lambda p: sign(p, lambda b: b.update(step=True)), "a whole number"),
    "a state that no optimizer keeps": (
        lambda p: sign(p, lambda b: b.update(optimizer="Evil")), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_runs_nothing_and_is_refused_in_a_sentence(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = HOSTILE[kind]
    path = newest(folder)
    monkeypatch.chdir(folder)
    change(path)

    def load(each: Run) -> str:
        before = {n: u.home.clone() for n, u in each.holding.units.items()}
        with pytest.raises(CheckpointError) as refused:
            checkpoint.load(folder, each.holding, each.updates, path=path)
        assert all(bool((before[n] == u.home).all()) for n, u in each.holding.units.items())
        return str(refused.value)

    (said,) = run("dp1", load)
    assert pytest.raises(CheckpointError, match=words or "state of Evil").matches(
        CheckpointError(said)
    ), said
    assert not (folder / Payload.trace).exists()
    if words:
        assert verify_checkpoint(path)
        assert len(said) < 2000


def test_the_payload_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLE)
    assert (tmp_path / Payload.trace).is_dir()


def test_a_manifest_is_a_value_and_reads_back(two: Path) -> None:
    text = (newest(two) / "manifest.json").read_text()
    assert str(Manifest.parse(text, "here")) == text


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
        saver = each.saver(folder, asynchronous=asynchronous, on_failure="go on")
        each.steps(1)
        decided = [*saver.save(each.progress), *saver.finish()]
        stopping = each.saver(folder, asynchronous=asynchronous)
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left on device"):
            list(map(str, [*stopping.save(each.progress), *stopping.finish()]))
        each.steps(1)  # training goes on
        each.holding.wires.everyone.barrier()
        full = False
        each.holding.wires.everyone.barrier()
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
    def full(path: Path, text: str) -> None:
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
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000001", "step-00000002"]


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

    for name in ("fsync", "open", "rename", "mkdir", "rmdir", "unlink"):
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
        assert len(list(there.iterdir())) == 1, "what the killed one left is gone"
        if done:
            break
        moments += 1
    assert 10 < moments < 60
