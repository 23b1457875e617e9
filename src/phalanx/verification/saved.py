"""Checks of a trial's checkpoints: content, detection of damage, and retention.

The safetensors library reads the content, and this file places it element by element.
Every kind of damage to a file, and every wrong entry of a manifest or a header, must be
found before a checkpoint is loaded.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..training.checkpoint_format import verify_checkpoint

MANIFEST = "manifest.json"
# Bytes that one checksum covers, by docs/checkpoints.md.
COVERED = 16 << 20
# Tensors of the part of a checkpoint that is damaged.
TENSORS = 4
# Wrong values of each kind of entry.
WRONG = 3
# Entries of a manifest that describe the run and not the files.
_FREE = {
    "config",
    "versions",
    "state",
    "data",
    "layout",
    "shape",
    "seed",
    "cursor",
    "updates",
    "optimizer",
}
# The loader compares names with those of the model.
_NAMES = {"tensors.name", "tensors.kind"}
# Version 1 is still read.
_EARLIER = 1

Json = Any
# The keys and indices that lead to a value inside of a JSON text.
Place = tuple[str | int, ...]


def saved_faults(
    path: Path, step: int, weights: Mapping[str, Tensor]
) -> Iterator[str]:
    """Describe mistakes in a checkpoint: weights other than those of the step, and damage
    that its check does not find."""
    name = f"step-{step:08}"
    if path.name != name:
        yield f"the checkpoint of step {step} is {path.name}; expected {name}"
    if found := verify_checkpoint(path):
        yield f"{path.name} is called damaged: {found[0]}"
    body = json.loads((path / MANIFEST).read_text())["body"]
    if body["step"] != step:
        yield f"{path.name} is of step {body['step']}"
    yield from _file_faults(path, body)
    yield from _weight_faults(path, body, weights)


def kept_faults(
    folder: Path, steps: Sequence[int], set_aside: Sequence[int]
) -> Iterator[str]:
    """Compare the checkpoints in a run's folder with the steps that it must keep."""
    names = [f"step-{step:08}" for step in steps]
    names += [f"set-aside-step-{step:08}" for step in set_aside]
    there = {each.name for each in folder.iterdir() if each.is_dir()}
    there = {name for name in there if "step-" in name or name[0] == "."}
    if there != {*names}:
        yield f"{folder.name} has the checkpoints {sorted(there)}; expected {sorted(names)}"


def add_broken(folder: Path, step: int, later: int) -> None:
    """Add a damaged copy of a checkpoint as that of a later step, and the remains of a
    save that was killed."""
    path = folder / f"step-{step:08}"
    copy = folder / f"step-{later:08}"
    shutil.copytree(path, copy)
    signed = json.loads((path / MANIFEST).read_text())
    _sign(signed["body"] | {"step": later}, copy)
    name = signed["body"]["files"][0]["name"]
    # The last element of a weight or a moment: the values could be used.
    _flip(name, (copy / name).stat().st_size - 1, copy)
    shutil.copytree(path, folder / f".saving-{later:08}")


# ---- content


def _file_faults(path: Path, body: Json) -> Iterator[str]:
    """Compare sizes and checksums with those of the files."""
    listed = {MANIFEST, *(file["name"] for file in body["files"])}
    there = {each.name for each in path.iterdir()}
    if there != listed:
        yield f"{path.name} has the files {sorted(there)}, its manifest lists {sorted(listed)}"
    for file in body["files"]:
        raw = (path / file["name"]).read_bytes()
        if file["size"] != len(raw):
            yield f"{file['name']} has {len(raw)} bytes; the manifest says {file['size']}"
        if file["chunks"] != _sums(raw, file["checksum"]):
            yield f"{file['name']} has other checksums than the manifest says"


def _sums(raw: bytes, checksum: str) -> list[str]:
    digest = hashlib.sha256 if checksum == "sha256" else xxhash.xxh3_128
    chunks = (raw[at : at + COVERED] for at in range(0, len(raw), COVERED))
    return [digest(chunk).hexdigest() for chunk in chunks]


def _weight_faults(
    path: Path, body: Json, weights: Mapping[str, Tensor]
) -> Iterator[str]:
    """Compare the stored weights with the trained ones, bit by bit."""
    files = [load_file(path / file["name"]) for file in body["files"]]
    stored = {}
    for tensor in body["tensors"]:
        whole, times = _placed(tensor, files)
        if not bool((times == 1).all()):
            title = f"{tensor['kind']}/{tensor['name']}"
            yield f"{path.name} does not store each element of {title} once"
        if tensor["kind"] == "weight":
            stored[tensor["name"]] = whole
    if stored.keys() != weights.keys():
        odd = sorted(stored.keys() ^ weights.keys())
        yield f"{path.name} and the model do not have the same weights: {odd[0]}"
        return
    for name, weight in weights.items():
        if not torch.equal(stored[name], weight):
            yield f"{path.name} stores other values of {name} than were trained"


def _placed(
    tensor: Json, files: list[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """A stored tensor, and how often each element is stored."""
    shape = tensor["shape"]
    times = torch.zeros(shape, dtype=torch.int64)
    whole: Tensor | None = None
    for shard in tensor["pieces"]:
        values = files[shard["file"]][shard["key"]]
        if whole is None:
            whole = torch.full(shape, float("nan"), dtype=values.dtype)
        # The flat part of a rank, with padding at the end of each dimension.
        flat = torch.zeros(shard["local"], dtype=values.dtype).flatten()
        count = torch.zeros(shard["local"], dtype=torch.int64).flatten()
        flat[shard["start"] : shard["stop"]] = values
        count[shard["start"] : shard["stop"]] = 1
        inside = tuple(slice(0, stop - start) for start, stop in shard["box"])
        box = tuple(slice(start, stop) for start, stop in shard["box"])
        mine = count.view(shard["local"])[inside].bool()
        part = flat.view(shard["local"])[inside]
        whole[box] = torch.where(mine, part, whole[box])
        times[box] += mine
    assert whole is not None, f"{tensor['name']} is stored nowhere"
    return whole, times


# ---- damage


def undetected(path: Path) -> Iterator[str]:
    """Describe damage to a part of a checkpoint that is not found."""
    # The same damage whenever the same checkpoint is damaged.
    draw = random.Random(path.name)
    part = path.with_name("part") / path.name
    sound = _part_of(path, part, draw)
    if found := verify_checkpoint(part):
        yield f"a part of {path.name} is called damaged: {found[0]}"
    for what, damage in (
        *_broken_files(part, draw),
        *_wrong_entries(part, draw),
    ):
        damage(part)
        if not verify_checkpoint(part):
            yield f"a checkpoint is taken for a sound one after this damage: {what}"
        for name, raw in sound.items():
            (part / name).write_bytes(raw)
    shutil.rmtree(part.parent)


def _part_of(path: Path, part: Path, draw: random.Random) -> dict[str, bytes]:
    """Write a checkpoint with a few of the tensors of another, and return its files."""
    body = json.loads((path / MANIFEST).read_text())["body"]
    count = min(TENSORS, len(body["tensors"]))
    body["tensors"] = draw.sample(body["tensors"], count)
    part.mkdir(parents=True)
    for number, file in enumerate(body["files"]):
        stored = load_file(path / file["name"])
        shards = [
            shard
            for tensor in body["tensors"]
            for shard in tensor["pieces"]
            if shard["file"] == number
        ]
        tensors = {shard["key"]: stored[shard["key"]] for shard in shards}
        save_file(tensors, part / file["name"])
        raw = (part / file["name"]).read_bytes()
        length, header = _header_of(raw)
        for shard in shards:
            start, _ = header[shard["key"]]["data_offsets"]
            shard["offset"] = 8 + length + start
        file |= {"size": len(raw), "chunks": _sums(raw, file["checksum"])}
    _sign(body, part)
    return {each.name: each.read_bytes() for each in part.iterdir()}


def _header_of(raw: bytes) -> tuple[int, Json]:
    """The length of a safetensors file's header, and the header."""
    length = int.from_bytes(raw[:8], "little")
    return length, json.loads(raw[8 : 8 + length])


Damages = Iterator[tuple[str, Callable[[Path], None]]]


def _broken_files(path: Path, draw: random.Random) -> Damages:
    """Yield damage to whole files: missing, cut, longer, exchanged, or a bit that differs."""
    names = sorted(each.name for each in path.iterdir())
    for name in names:
        size = (path / name).stat().st_size
        at = draw.randrange(size)
        yield f"{name} is missing", partial(_remove, name)
        yield f"half of {name} is missing", partial(_cut, name, size // 2)
        yield (
            f"the last byte of {name} is missing",
            partial(_cut, name, size - 1),
        )
        yield f"{name} is empty", partial(_cut, name, 0)
        yield f"a bit of {name} differs", partial(_flip, name, at)
    data = [name for name in names if name != MANIFEST]
    for name in data:
        yield f"{name} has one more byte", partial(_lengthen, name)
    # Files with the same tensors may be equal.
    if len({(path / name).read_bytes() for name in data[:2]}) > 1:
        yield "two files are exchanged", partial(_exchange, data[0], data[1])


def _remove(name: str, to: Path) -> None:
    (to / name).unlink()


def _cut(name: str, size: int, to: Path) -> None:
    raw = (to / name).read_bytes()
    (to / name).write_bytes(raw[:size])


def _flip(name: str, at: int, to: Path) -> None:
    raw = bytearray((to / name).read_bytes())
    # The lowest bit, by which a digit or a letter becomes another one.
    raw[at] ^= 1
    (to / name).write_bytes(raw)


def _lengthen(name: str, to: Path) -> None:
    raw = (to / name).read_bytes()
    (to / name).write_bytes(raw + b"\0")


def _exchange(first: str, second: str, to: Path) -> None:
    a, b = (to / first).read_bytes(), (to / second).read_bytes()
    (to / first).write_bytes(b)
    (to / second).write_bytes(a)


def _wrong_entries(path: Path, draw: random.Random) -> Damages:
    """Yield manifests and headers with one wrong entry, whose checksums match it."""
    signed = json.loads((path / MANIFEST).read_text())
    for place, wrong in _changes(signed["body"], draw, _FREE):
        body = _with(signed["body"], place, wrong)
        what = f"{_dotted(place)} of the manifest is {wrong!r}"
        yield what, partial(_sign, body)
    for number, file in enumerate(signed["body"]["files"]):
        raw = (path / file["name"]).read_bytes()
        length, header = _header_of(raw)
        for place, wrong in _changes(header, draw, {"__metadata__"}):
            entries = _with(header, place, wrong)
            text = json.dumps(entries, separators=(",", ":"))
            # As long as it was, so that every element keeps its place.
            if len(text) > length:
                continue
            changed = raw[:8] + text.encode().ljust(length) + raw[8 + length :]
            body = deepcopy(signed["body"])
            sums = _sums(changed, file["checksum"])
            body["files"][number]["chunks"] = sums
            what = f"{_dotted(place)} of {file['name']} is {wrong!r}"
            yield what, partial(_replace, file["name"], changed, body)


def _replace(name: str, raw: bytes, body: Json, to: Path) -> None:
    (to / name).write_bytes(raw)
    _sign(body, to)


def _sign(body: Json, to: Path) -> None:
    """Write a manifest with a checksum that matches its body."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    signed = {"sha256": digest, "body": body}
    (to / MANIFEST).write_text(json.dumps(signed))


def _changes(
    value: Json, draw: random.Random, free: set[str]
) -> Iterator[tuple[Place, Json]]:
    """Wrong values, several for each kind of entry, in places that are drawn."""
    alike: dict[str, list[tuple[Place, Json]]] = {}
    for place, leaf in _leaves(value):
        # Kinds of tensors, files and dimensions do not count as kinds of entries.
        kind = ".".join(key for key in place if isinstance(key, str))
        kind = re.sub(r"^[a-z_]+/[^.]*(\.[a-z_]+)?.*$", r"tensor\1", kind)
        if place[0] not in free and kind not in _NAMES:
            alike.setdefault(kind, []).append((place, leaf))
    for kind in sorted(alike):
        place, leaf = draw.choice(alike[kind])
        wrongs = [*_wrong(leaf)]
        for wrong in draw.sample(wrongs, min(WRONG, len(wrongs))):
            if kind != "version" or wrong != _EARLIER:
                yield place, wrong


def _leaves(value: Json, place: Place = ()) -> Iterator[tuple[Place, Json]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*place, key))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _leaves(each, (*place, number))
    else:
        yield place, value


def _wrong(leaf: Json) -> Iterator[Json]:
    """Values of other sizes, signs and types."""
    if isinstance(leaf, int):
        yield from (leaf + 1, leaf - 1, -leaf - 1, str(leaf))
    elif isinstance(leaf, str):
        yield from (leaf + "0", leaf[:-1], 0)


def _with(value: Json, place: Place, wrong: Json) -> Json:
    """A copy of a JSON value with another value at one place."""
    copy = deepcopy(value)
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = wrong
    return copy


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))
