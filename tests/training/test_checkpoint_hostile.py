"""Forged checkpoints, with right checksums: whoever forges can compute them. Each is refused in a
sentence, before a weight is touched, and runs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worlds import Run, saved_twice

from phalanx.comm import AloneWorld
from phalanx.training.checkpoint_format import (
    CHUNK,
    CheckpointError,
    verify_checkpoint,
)
from phalanx.training.checkpoint_load import load

FIRST = "rank-00000.safetensors"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_twice(tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def rank() -> Run:
    """One for all cases: no load changes it."""
    return Run(AloneWorld(), "dp1")


@pytest.fixture
def folder(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "run"))


def sign(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and make its checksum right."""
    body = json.loads((path / "manifest.json").read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    said = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    (path / "manifest.json").write_text(json.dumps(said))


def terabyte(path: Path) -> None:
    """Make a file sparse and huge; its checksums need not be right."""
    size = 1 << 40
    os.truncate(path / FIRST, size)
    sums = ["0" * 32] * (size // CHUNK)
    sign(path, lambda body: body["files"][0].update(size=size, chunks=sums))


def forge(path: Path, content: bytes) -> None:
    """Put other bytes into a file, as many as there were, and make its checksums right."""
    content = content.ljust((path / FIRST).stat().st_size, b"\0")
    (path / FIRST).write_bytes(content)
    sums = [
        hashlib.sha256(content[at : at + CHUNK]).hexdigest()
        for at in range(0, len(content), CHUNK)
    ]
    told = {"size": len(content), "chunks": sums, "checksum": "sha256"}
    sign(path, lambda body: body["files"][0].update(told))


def header(
    path: Path, change: Callable[[dict[str, Any]], object], *, raw: bytes = b""
) -> None:
    """Change the header of a file."""
    content = (path / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    said = json.loads(content[8 : 8 + length])
    change(said)
    text = raw or json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (length - len(text))
    forge(path, len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensor(
    change: dict[str, Any], title: str = "embed.tokens.weight"
) -> Callable[[Path], None]:
    def found(body: dict[str, Any]) -> None:
        next(t for t in body["tensors"] if t["name"] == title).update(change)

    return lambda path: sign(path, found)


def piece(change: dict[str, Any]) -> Callable[[Path], None]:
    def found(body: dict[str, Any]) -> None:
        each = next(
            t for t in body["tensors"] if t["name"] == "embed.tokens.weight"
        )
        each["pieces"][0].update(change)

    return lambda path: sign(path, found)


def named(name: str) -> Callable[[Path], None]:
    return lambda path: sign(
        path, lambda body: body["files"][0].update(name=name)
    )


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
    "a pickle for a file": (lambda p: forge(p, PICKLE), "is not a safetensors file"),
    "a pickle for the manifest": (
        lambda p: (p / "manifest.json").write_bytes(PICKLE), "is not text|is not JSON",
    ),
    "a name that climbs": (named("../../etc/passwd.safetensors"), "names are plain"),
    "an absolute name": (named("/etc/passwd"), "names are plain"),
    "a name with a zero": (named("rank\x00.safetensors"), r"has the character \\x00"),
    "one name twice": (named("rank-00001.safetensors"), "may occur once"),
    "a pickle's name": (named("data.pkl"), "names are plain"),
    "a link out": (link("/etc/passwd"), "link out of its folder"),
    "a link to a device": (link("/dev/zero"), "link out of its folder"),
    "a link to itself": (ring, "cannot be opened|link out"),
    "a pipe": (pipe, "not a regular file"),
    "a huge header": (lambda p: forge(p, HUGE + b"{}"), "gives its header"),
    "a header longer than the file": (
        lambda p: forge(p, (1 << 20).to_bytes(8, "little") + b"{}"), "gives its header 1,048,576",
    ),
    "a header that is not text": (lambda p: header(p, id, raw=b"\xff\xfe"), "header is not text"),
    "a header without end": (
        lambda p: forge(p, len(DEEP).to_bytes(8, "little") + DEEP), "more than 32 deep",
    ),
    "a key twice": (lambda p: header(p, id, raw=b'{"a":{},"a":{}}'), "a key occurs twice"),
    "tensors that overlap": (
        lambda p: header(p, lambda s: list(s.values())[1].update(
            data_offsets=[0, list(s.values())[1]["data_offsets"][1]
                          - list(s.values())[1]["data_offsets"][0]])),
        "shares bytes|leaves bytes",
    ),
    "offsets that go back": (stored({"data_offsets": [80, 0]}), "bytes, but"),
    "offsets below zero": (stored({"data_offsets": [-8, 0]}), "out of bounds"),
    "offsets that are not numbers": (stored({"data_offsets": ["0", 8.5]}), "Write a whole number"),
    "objects for numbers": (stored({"dtype": "O"}), 'dtype = "O" is unknown'),
    "another type of one size": (stored({"dtype": "I64"}), 'dtype = "I64" is unknown'),
    "half as wide": (stored({"dtype": "F32"}), "takes"),
    "a shape beyond all memory": (stored({"shape": [1 << 40, 1 << 40]}), "takes"),
    "many dims": (stored({"shape": [1] * 5000}), "5000 dims"),
    "a manifest of another type": (tensor({"dtype": "F32"}), "not stored as the manifest says"),
    "a type that is none": (tensor({"dtype": "object"}), "is not a tensor of a model"),
    "a kind that is none": (tensor({"kind": "../x"}), "is not a tensor of a model"),
    "a larger shape": (tensor({"shape": [1 << 30, 16]}), "its parts hold"),
    "a missing part": (tensor({"pieces": []}), "its parts hold 0 elements"),
    "a part of no file": (piece({"file": 7}), "there is no file 7 of 2"),
    "a part beyond the file": (piece({"offset": 1 << 40}), "its elements end at byte"),
    "a part of other bytes": (piece({"offset": 4096}), "not stored as the manifest says"),
    "a part of another tensor": (piece({"key": "weight/head.norm.bias"}), "not stored as the"),
    "a part that is told twice": (piece({"start": 0, "stop": 1}), "are missing|are stored twice"),
    "a part with a negative box": (piece({"box": [[-1, 37], [0, 16]]}), "a start and a later stop"),
    "a part of other dims": (piece({"box": [[0, 37]]}), "do not fit together"),
    "a checksum that nobody knows": (
        lambda p: sign(p, lambda b: b["files"][0].update(checksum="sum")), "pip install xxhash",
    ),
    "a newer format": (lambda p: sign(p, lambda b: b.update(version=3)), "of version 1 or 2"),
    "a terabyte that takes no place": (terabyte, "and its tensors take"),
    "a shape that is none": (
        lambda p: sign(p, lambda b: b.update(shape={"x": 1})), "there is no key 'shape.x'",
    ),
    "true for a number": (lambda p: sign(p, lambda b: b.update(step=True)), "a whole number"),
    "a state that no optimizer keeps": (
        lambda p: sign(p, lambda b: b.update(optimizer="Evil")), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_runs_nothing_and_is_refused_in_a_sentence(
    folder: Path, kind: str, rank: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = HOSTILE[kind]
    path = folder / "step-00000002"
    shutil.rmtree(folder / "step-00000001")
    monkeypatch.chdir(folder)
    change(path)

    before = {n: u.home.clone() for n, u in rank.local.units.items()}
    with pytest.raises(
        CheckpointError, match=words or "state of Evil"
    ) as error:
        load(folder, rank.local, rank.updates)
    assert all(
        bool((before[n] == u.home).all()) for n, u in rank.local.units.items()
    )
    assert not (folder / Payload.trace).exists()
    if words:
        assert verify_checkpoint(path)
        assert len(str(error.value)) < 2000


def test_the_payload_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLE)
    assert (tmp_path / Payload.trace).is_dir()
