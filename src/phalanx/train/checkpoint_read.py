"""A checkpoint on the disk: whether its files are what its manifest says, and any box of any tensor.

Whoever wants numbers asks for a box of a whole tensor; in which layout it was written does not matter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .checkpoint_file import (
    CHUNK,
    DTYPES,
    CheckpointError,
    chunk_sums,
    raw_bytes,
    read_header,
    read_into,
)
from .checkpoint_manifest import LIMIT, MANIFEST, Box, Logical, Manifest, StoredBox, meet
from .data.folder import Folder

__all__ = ["Reader", "faults", "hash_tensors", "read_manifest", "verify_checkpoint"]

BLOCK = 1 << 24  # numbers that are hashed at once


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder, checked in itself."""
    return parse_manifest(manifest_text(path), path)


def manifest_text(path: Path) -> str:
    return Folder(path, CheckpointError).text(MANIFEST, LIMIT)


def parse_manifest(text: str, path: Path) -> Manifest:
    manifest = Manifest.parse(text, str(path / MANIFEST))
    if path.name.startswith("step-") and path.name != name_of(manifest.progress.step):
        raise CheckpointError(
            f"{path / MANIFEST}: is of step {manifest.progress.step} and lies in {path.name}:"
            " it belongs to another checkpoint."
        )
    return manifest


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08}"


def faults(path: Path, manifest: Manifest, place: int = 0, places: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, or with every `places`-th of them: all their
    bytes are read, and their headers compared with the manifest."""
    folder = Folder(path, CheckpointError)
    held = range(place, len(manifest.files), places)
    wrong = [fault for number in held for fault in _damage(folder, manifest, number)]
    if wrong:
        return wrong
    sound = {}
    for number in held:
        try:
            sound[number] = read_header(folder, manifest.files[number].name)
        except CheckpointError as error:
            wrong.append(str(error))
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            stored = sound[piece.file].get(piece.key) if piece.file in sound else None
            if piece.file not in sound:
                continue
            told = (tensor.dtype, (piece.stop - piece.start,), piece.offset)
            if stored is None or (stored.dtype, (stored.numel,), stored.offset) != told:
                wrong.append(
                    f"{path / manifest.files[piece.file].name}: {piece.key} is not there as the"
                    f" manifest says: {piece.stop - piece.start} numbers of {tensor.dtype} at byte"
                    f" {piece.offset:,}."
                )
    return wrong


def _damage(folder: Folder, manifest: Manifest, number: int) -> Iterator[str]:
    """One line for a file that is gone, or not what was written."""
    told = manifest.files[number]
    path = folder.path / told.name
    try:
        with folder.open(told.name) as file:
            size = file.seek(0, 2)
            file.seek(0)
            known = any(size == each.size for each in manifest.files)
            sums = tuple(chunk_sums(file)) if known else ()
    except (CheckpointError, OSError) as error:
        yield str(error)
        return
    if size == told.size and sums == told.chunks:
        return
    other = next((f.name for f in manifest.files if sums and f.chunks == sums), None)
    if other:
        yield f"{path}: holds what belongs into {other}."
    elif size != told.size:
        yield f"{path}: has {size:,} bytes, {told.size:,} were written."
    else:
        pairs = enumerate(zip(sums, told.chunks, strict=True))
        first = next(n for n, (is_now, was) in pairs if is_now != was)
        yield (
            f"{path}: its bytes from {first * CHUNK:,} on differ from what was written:"
            f" checksum {sums[first][:12]}, not {told.chunks[first][:12]}."
        )


def verify_checkpoint(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint; nothing when it is sound."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return faults(path, manifest)


class Reader:
    """The tensors of a checkpoint, read box by box. Its files have been verified before."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = Folder(path, CheckpointError), manifest
        self.tensors = {(each.kind, each.name): each for each in manifest.tensors}
        self.groups: dict[str, list[StoredBox]] = {}
        self.files: dict[int, BinaryIO] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def whole(self, tensor: Logical) -> Tensor:
        return self.box(tensor, tuple((0, n) for n in tensor.shape))

    def box(self, tensor: Logical, box: Box) -> Tensor:
        """These numbers of a tensor, in its own dtype, on the host."""
        out = torch.empty([b - a for a, b in box], dtype=DTYPES[tensor.dtype])
        if tensor.title not in self.groups:
            self.groups[tensor.title] = tensor.groups()
        for group in self.groups[tensor.title]:
            common = meet(group.box, box)
            if common is None:
                continue
            inside = tuple(slice(a - g, b - g) for (a, b), (g, _) in zip(common, group.box))  # noqa: B905
            target = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, box))  # noqa: B905
            rows = inside[0] if inside else slice(0, 1)
            part = self._rows(tensor, group, rows.start, rows.stop)
            if inside:
                out[target] = part[(slice(None), *inside[1:])]
            else:
                out.copy_(part.view(()))
        return out

    def _rows(self, tensor: Logical, group: StoredBox, first: int, last: int) -> Tensor:
        """Rows of one part, from all the pieces that hold some of them."""
        dims = group.local[1:]
        row = math.prod(dims)
        start, stop = first * row, last * row
        flat = torch.empty(stop - start, dtype=DTYPES[tensor.dtype])
        for piece in group.pieces:
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a < b:
                offset = piece.offset + (a - piece.start) * flat.element_size()
                read_into(self._file(piece.file), offset, flat[a - start : b - start])
        return flat.view(last - first, *dims)

    def _file(self, number: int) -> BinaryIO:
        if number not in self.files:
            opened = self.folder.open(self.manifest.files[number].name)
            self.files[number] = self.stack.enter_context(opened)
        return self.files[number]


def hash_tensors(path: Path) -> dict[str, str]:
    """The SHA-256 of every whole tensor, by title: equal for equal tensors, however they are cut."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        found = {}
        for tensor in sorted(manifest.tensors, key=lambda t: t.title):
            digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
            for box in _blocks(tensor.shape):
                part = reader.box(tensor, box).contiguous()
                digest.update(raw_bytes(part))
            found[tensor.title] = digest.hexdigest()
    return found


def _blocks(shape: Sequence[int]) -> Iterator[Box]:
    """The rows of a tensor, some at a time."""
    if not shape:
        yield ()
        return
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield (start, min(start + step, shape[0])), *((0, n) for n in shape[1:])
