"""One file of tensors in the safetensors format: written with a checksum for each 16 MiB, and read only
after its header has been checked.

The format is eight bytes with the header's length, a JSON header, raw numbers. Two things keep us from
the library's own writer and reader. Its `save_file` (0.8) renames a temporary file of mode 0600 over
whatever has the name, without fsync. Its reader maps the file, so a file that is cut while it is read
kills the process with SIGBUS, and it accepts a header that names a tensor twice.
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
from .folder import Fields, Folder, parse_json

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
    def parse(cls, fields: Fields) -> File:
        sums = tuple(str(each) for each in fields.list("chunks"))
        file = cls(fields.text("name"), fields.whole("size", 8), sums)
        if len(sums) != -(-file.size // CHUNK) or not all(map(_SUM.fullmatch, sums)):
            fields.refuse(f"{len(sums)} checksums are not those of {file.size:,} bytes.")
        return file


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; `offset` is of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize


def write_file(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> File:
    """Write contiguous host tensors to a new file; it is on the disk when this returns."""
    sums: list[str] = []
    digest, room, size = hashlib.sha256(), CHUNK, 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        for block in _blocks(tensors, metadata):
            left = block
            while left:
                written = file.write(left[:room])  # perhaps not all of it
                digest.update(left[:written])
                left, room, size = left[written:], room - written, size + written
                if not room:
                    sums.append(digest.hexdigest())
                    digest, room = hashlib.sha256(), CHUNK
        if room < CHUNK:
            sums.append(digest.hexdigest())
        os.fsync(descriptor)
    return File(path.name, size, tuple(sums))


def _blocks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    """The bytes of a file: length, header, numbers."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, x in tensors.items():
        start, end = end, end + x.numel() * x.element_size()
        entry = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    yield memoryview(len(text).to_bytes(8, "little") + text)
    yield from (raw_bytes(x) for x in tensors.values() if x.numel())


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied."""
    return x.view(-1).view(torch.uint8).numpy().data


def chunk_sums(file: BinaryIO) -> Iterator[str]:
    """The checksum of each chunk of a file, from its current position."""
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
                name,
                f"is no safetensors file: it has {size:,} bytes and says that its header has"
                f" {length:,}.",
            )
        try:
            text = file.read(length).decode()
        except UnicodeDecodeError:
            folder.refuse(name, "is no safetensors file: its header is not text.")
    header = parse_json(text, str(folder.path / name), folder.error)
    tensors = {
        key: _stored(header.object(key), 8 + length)
        for key in header.values
        if key != "__metadata__"
    }
    at = 8 + length
    for key, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if stored.offset != at:
            what = "shares bytes with" if stored.offset < at else "leaves bytes unclaimed after"
            folder.refuse(
                name,
                f"tensor {key[:80]!r} {what} the one before: it begins at {stored.offset:,}, not {at:,}.",
            )
        at += stored.size
    if at != size:
        folder.refuse(name, f"has {size:,} bytes; its header describes {at:,}.")
    return tensors


def _stored(fields: Fields, begin: int) -> Stored:
    dtype, shape = fields.text("dtype"), fields.wholes("shape")
    start, end = fields.wholes("data_offsets", 2)
    if dtype not in DTYPES:
        fields.refuse(f"numbers of type {dtype[:20]!r}; a model has {', '.join(DTYPES)}.")
    if len(shape) > DIMS:
        fields.refuse(f"{len(shape)} dims; at most {DIMS} can be right.")
    stored = Stored(dtype, shape, begin + start)
    if end - start != stored.size:
        fields.refuse(
            f"shape {list(shape)} of {dtype} takes {stored.size:,} bytes, and {end - start:,} are"
            " given."
        )
    return stored


def read_into(file: BinaryIO, offset: int, out: Tensor) -> None:
    """Fill a flat host tensor with the file's bytes from `offset`."""
    left = raw_bytes(out) if out.numel() else None
    while left:
        count = os.preadv(file.fileno(), [left], offset)
        if not count:
            raise CheckpointError(
                f"{file.name}: ended {len(left):,} bytes early while it was read."
            )
        left, offset = left[count:], offset + count
