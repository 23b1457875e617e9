"""One file of tensors in the safetensors format, written with a checksum per chunk and read with
every number of its header doubted.

The format is eight bytes of length, a JSON header, raw numbers. We write and read it ourselves, so
that checksums are made as the bytes leave, and a range of a tensor is read without the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..layout.choices import STORED
from .data.folder import Fields, Folder, parse_json

__all__ = [
    "CHUNK", "DTYPES", "CheckpointError", "File", "Stored", "chunk_sums", "read_header", "read_into",
    "write_file",
]  # fmt: skip

CHUNK = 16 << 20
HEADER = 100_000_000  # bytes; the limit of the safetensors library
DIMS = 8
# Numbers that weights are made of. Others are no part of a model, so they are refused.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in STORED.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SUM = re.compile(r"[0-9a-f]{64}")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or made: the file, what is wrong with it, the way out."""


@dataclass(frozen=True)
class File:
    """A file as it was written: its size, and the SHA-256 of each run of `CHUNK` bytes."""

    name: str
    size: int
    chunks: tuple[str, ...]

    @classmethod
    def parse(cls, said: Fields) -> File:
        sums = tuple(str(each) for each in said.list("chunks"))
        found = cls(said.text("name"), said.whole("size", 8), sums)
        if len(sums) != -(-found.size // CHUNK) or not all(map(_SUM.fullmatch, sums)):
            said.refuse(f"{len(sums)} checksums are not those of {found.size:,} bytes.")
        return found


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `offset` is of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> File:
    """Write host tensors to a new file; it is on the disk when this returns."""
    sums: list[str] = []
    digest, room, size = hashlib.sha256(), CHUNK, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for block in _blocks(tensors, metadata):
            left = block
            while left:
                part = left[:room]
                _put(file, part)
                digest.update(part)
                left, room, size = left[len(part) :], room - len(part), size + len(part)
                if not room:
                    sums.append(digest.hexdigest())
                    digest, room = hashlib.sha256(), CHUNK
        if room < CHUNK:
            sums.append(digest.hexdigest())
        os.fsync(descriptor)
    return File(path.name, size, tuple(sums))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The length and the header of a file with these tensors."""
    said: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, x in tensors.items():
        end = offset + x.numel() * x.element_size()
        said[name] = {
            "dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(said, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers stand aligned
    return len(text).to_bytes(8, "little") + text


def _blocks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    yield memoryview(header_of(tensors, metadata))
    for x in tensors.values():
        if x.numel():
            yield raw_bytes(x)


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied."""
    return x.view(-1).view(torch.uint8).numpy().data


def _put(file: BinaryIO, part: memoryview) -> None:
    while part:
        part = part[file.write(part) :]


def chunk_sums(file: BinaryIO) -> Iterator[str]:
    """The checksum of each chunk of a file, from where it stands."""
    while True:
        digest, left = hashlib.sha256(), CHUNK
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        if left < CHUNK:
            yield digest.hexdigest()
        if left:
            return


def read_header(folder: Folder, name: str) -> dict[str, Stored]:
    """The tensors of a file by name, if its header is right in everything: names once, known types,
    sizes that fit, no byte in two tensors or in none."""
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER, size - 8):
            folder.refuse(
                name, f"is no safetensors file: it has {size:,} bytes and says that its header has"
                f" {length:,}."
            )  # fmt: skip
        try:
            text = file.read(length).decode()
        except UnicodeDecodeError:
            folder.refuse(name, "is no safetensors file: its header is not text.")
    header = parse_json(text, str(folder.path / name), folder.error)
    begin = 8 + length
    found, spans = dict[str, Stored](), []
    for key in header.said:
        if key == "__metadata__":
            continue
        found[key], end = _stored(header.object(key), begin)
        spans.append((found[key].offset, end, key))
    at = begin
    for start, end, key in sorted(spans):
        if start != at:
            what = "shares bytes with the one before" if start < at else "leaves bytes unclaimed"
            folder.refuse(name, f"tensor {key[:80]!r} {what}: it begins at {start:,}, not {at:,}.")
        at = end
    if at != size:
        folder.refuse(name, f"has {size:,} bytes; its header tells of {at:,}.")
    return found


def _stored(said: Fields, begin: int) -> tuple[Stored, int]:
    dtype, shape = said.text("dtype"), said.wholes("shape")
    start, end = said.wholes("data_offsets", 2)
    if dtype not in DTYPES:
        said.refuse(f"numbers of type {dtype[:20]!r}; a model has {', '.join(DTYPES)}.")
    if len(shape) > DIMS:
        said.refuse(f"{len(shape)} dims; at most {DIMS} can be right.")
    stored = Stored(dtype, shape, begin + start)
    if end - start != stored.numel * DTYPES[dtype].itemsize:
        said.refuse(
            f"shape {list(shape)} of {dtype} takes {stored.numel * DTYPES[dtype].itemsize:,} bytes,"
            f" and {end - start:,} are given."
        )
    return stored, begin + end


def read_into(file: BinaryIO, offset: int, out: Tensor) -> None:
    """Fill a flat host tensor with the file's bytes from `offset`."""
    if not out.numel():
        return
    left = raw_bytes(out)
    while left:
        got = os.preadv(file.fileno(), [left], offset)
        if not got:
            raise CheckpointError(
                f"{file.name}: ended {len(left):,} bytes early while it was read."
            )
        left, offset = left[got:], offset + got
