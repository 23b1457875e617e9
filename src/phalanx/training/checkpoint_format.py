"""The checkpoint format: `manifest.json`, which locates every element of every tensor,
and one safetensors file per rank. See docs/checkpoints.md.

No statement in a file is trusted before it has been checked against the others.
`checkpoint.py` writes checkpoints, and `checkpoint_load.py` decides which rank reads
what.

The safetensors library is not used, though the file format is the same. Its writer
renames a temporary file of mode 0600 over any existing one, without fsync. Its reader
maps the file, so that truncation during a read kills the process (SIGBUS), and it
accepts a header that names a tensor twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import torch
from torch import Tensor

from ..comm.join import versions
from ..layout import Shape
from ..layout.choices import STORED
from ..layout.codec import decode, key
from ..layout.files import parse_json
from .checksums import CHECKSUMS as CHECKSUMS
from .checksums import FASTEST
from .folder import LARGEST, Folder, count

MANIFEST = "manifest.json"
LIMIT = 1 << 28  # maximum bytes of a manifest
FORMAT, VERSION = "phalanx-checkpoint", 2  # version 1 had only SHA-256
CHUNK = 16 << 20  # bytes covered by one checksum
HEADER = 100_000_000  # bytes; the limit of the safetensors library
DIMS = 8
PARTS = 1024  # maximum number of parts of a tensor
# The dtypes of weights. Any other is not part of a model and is refused.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, full) for name, full in STORED.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# dtypes of Hugging Face files that pack values of fewer bits
BYTES = {"U8": torch.uint8}
WEIGHT = "weight"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
_SUM = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_KIND = re.compile(r"[a-z_]{1,40}")
_STEP = re.compile(r"step-(\d{8,18})")
_BLOCK = 1 << 18

Box = tuple[tuple[int, int], ...]  # start and stop in each dimension


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be used or written. Names the file, the
    problem and a way out."""


# ---- the manifest


@dataclass(frozen=True)
class StoredFile:
    """A file as it was written: its size, and a checksum of every `CHUNK` bytes."""

    name: str
    chunks: tuple[str, ...]
    size: int = count(least=8)
    checksum: str = "sha256"

    def problems(self) -> Iterator[str]:
        if not _FILE.fullmatch(self.name):
            yield f"file name {self.name[:80]!r}: names are plain and end in .safetensors."
        if self.checksum not in CHECKSUMS:
            yield (
                f"its checksums are {self.checksum[:40]!r}, but only {', '.join(CHECKSUMS)} can be computed"
                " here. For xxh3_128, `pip install xxhash`."
            )
        if len(self.chunks) != -(-self.size // CHUNK) or not all(
            map(_SUM.fullmatch, self.chunks)
        ):
            yield f"{len(self.chunks)} checksums do not match a size of {self.size:,} bytes."


@dataclass(frozen=True)
class StoredShard:
    """Elements `start` to `stop` of a flattened part of a tensor, at byte `offset` of a
    file.

    The part is what one tensor-parallel rank holds: a `box` of the whole tensor, padded
    at the end of each dimension to the lengths `local`.
    """

    key: str
    box: Box
    local: tuple[int, ...] = count()
    file: int = count()
    offset: int = count()
    start: int = count()
    stop: int = count(least=1)

    def problems(
        self, dims: int, itemsize: int, files: Sequence[StoredFile]
    ) -> Iterator[str]:
        if any(not 0 <= start < stop for start, stop in self.box):
            yield f"'box' is {str(self.box)[:80]}; expected a start and a later stop."
        # A box lies within the padded part that a rank of tp holds.
        fits = len(self.box) == len(self.local) == dims and all(
            b - a <= n for (a, b), n in zip(self.box, self.local, strict=True)
        )
        if not fits or not self.start < self.stop <= math.prod(self.local):
            yield (
                f"box {self.box}, local {self.local}, {self.start} to {self.stop} do not fit together"
                f" for {dims} dims."
            )
        if self.file >= len(files):
            yield f"there is no file {self.file} of {len(files)}."
        end, file = (
            self.offset + (self.stop - self.start) * itemsize,
            files[self.file],
        )
        if end > file.size:
            yield f"its elements end at byte {end:,} of {file.name}, which has {file.size:,}."


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor: a weight, or a weight's optimizer state, as `kind` says."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...] = count()
    shards: tuple[StoredShard, ...] = key((), name="pieces")

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def whole(self) -> Box:
        return tuple((0, n) for n in self.shape)

    def parts(self) -> list[list[StoredShard]]:
        """The shards of each part in order, which together cover the part."""
        # Parts are told apart by their box: copies were left out when they
        # were written.
        parts: dict[tuple[Box, tuple[int, ...]], list[StoredShard]] = {}
        for shard in sorted(self.shards, key=lambda s: s.start):
            parts.setdefault((shard.box, shard.local), []).append(shard)
        return list(parts.values())

    def problems(self, files: Sequence[StoredFile]) -> Iterator[str]:
        if self.dtype not in DTYPES or not _KIND.fullmatch(self.kind):
            yield f"has type {self.dtype[:20]!r}, so it is not a tensor of a model."
        if len(self.shape) > DIMS:
            yield f"has {len(self.shape):,} dims; the maximum is {DIMS}."
        for shard in self.shards:
            yield from shard.problems(
                len(self.shape), DTYPES[self.dtype].itemsize, files
            )
        yield from self._uncovered()

    def _uncovered(self) -> Iterator[str]:
        """Describe elements of the tensor that are not in exactly one shard."""
        parts = self.parts()
        for part in parts:
            # The shards of a part follow one another without gaps, from 0 to
            # its end.
            at, count = 0, math.prod(part[0].local)
            for shard in part:
                if shard.start != at:
                    what = "stored twice" if shard.start < at else "missing"
                    yield f"elements around {at:,} of a part are {what}."
                at = shard.stop
            if at != count:
                yield f"a part ends at {at:,} of {count:,}."
            if any(
                b > n
                for (_, b), n in zip(part[0].box, self.shape, strict=True)
            ):
                yield f"a part lies outside its shape {list(self.shape)}."
        # `_any_meet` compares all pairs of parts, so their number is limited.
        if len(parts) > PARTS:
            yield f"{len(parts)} parts; the maximum is {PARTS}."
        boxes = [part[0].box for part in parts]
        count = sum(math.prod(b - a for a, b in box) for box in boxes)
        # As many elements as the tensor has, and no two boxes in common: all
        # are covered once.
        if count != math.prod(self.shape) or _any_meet(boxes):
            yield (
                f"its parts hold {count:,} elements and must cover its shape {list(self.shape)} once:"
                f" {math.prod(self.shape):,} elements."
            )


def _any_meet(boxes: Sequence[Box]) -> bool:
    """True if any two boxes overlap."""
    # All pairs in one numpy operation: Python would need half a minute for the largest
    # manifest.
    both = np.ones((len(boxes), len(boxes)), bool)
    for dim in zip(*boxes, strict=True):
        # In each dimension, boxes i and j overlap if each begins before the
        # other ends.
        starts, stops = np.array(dim, np.int64).T
        both &= starts[:, None] < stops
    # More than the diagonal: a box always overlaps itself.
    both &= both.T
    return int(both.sum()) > len(boxes)


RUN_ID = "id"  # its key in a manifest's `config`
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def run_id_of(config: object) -> str:
    """Return the run id in a manifest's `config`, or ""."""
    value = config.get(RUN_ID) if isinstance(config, Mapping) else None
    return value if is_run_id(value) else ""


def is_run_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None


@dataclass(frozen=True)
class Progress:
    """The position of a run: everything except its tensors that it needs to continue.

    `step` is the next step, `cursor` the number of sequences consumed, `seed` the
    source of all random numbers, and `data` the fingerprint of the corpus. `config`
    (the run's settings) and `state` (other changing values, such as the loss scale)
    belong to the run and are only stored.
    """

    step: int = count()
    cursor: int = count(0)
    seed: int = count(0)
    data: str = ""
    layout: str = ""
    shape: Shape | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        """The id of the run that made the checkpoint; "" if an earlier version made
        it."""
        return run_id_of(self.config)


@dataclass(frozen=True)
class Manifest(Progress):
    """The position of a run, and its tensors.

    `optimizer` names the optimizer whose state is stored; `updates` counts its steps.
    Each rank makes a manifest of the tensors that it wrote, and `merged` joins them.
    """

    optimizer: str = ""
    updates: float | None = key(None, minimum=0)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[StoredFile, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()

    def __str__(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **_table(self)}
        # No indent: only json's compact form has a fast encoder, and manifests have
        # megabytes.
        return json.dumps({"sha256": _sum(body), "body": body}, default=_table)

    @classmethod
    def parse(cls, text: str, folder: Path) -> Manifest:
        """Parse a manifest and check that it is consistent in itself and with its
        folder's name."""
        manifest, where = (
            cls.decode(text, str(folder / MANIFEST)),
            folder / MANIFEST,
        )
        if problem := next(manifest.problems(), ""):
            raise CheckpointError(f"{where}: body: {problem}")
        if folder.name.startswith("step-") and folder.name != name_of(
            manifest.step
        ):
            raise CheckpointError(
                f"{where}: is for step {manifest.step} but lies in {folder.name}: it belongs to another"
                " checkpoint."
            )
        return manifest

    @classmethod
    def decode(cls, text: str, where: str) -> Manifest:
        """Parse a manifest and check its checksum and types, nothing more."""
        signed = parse_json(text, where, CheckpointError)
        body = signed.get("body")
        # The checksum covers the body as it stands in the file.
        if not isinstance(body, dict) or signed.get("sha256") != _sum(body):
            raise CheckpointError(
                f"{where}: was changed after it was written: its checksum does not match."
            )
        # The keys of the envelope are taken out; the rest are the manifest's
        # fields.
        if body.pop("format", "") != FORMAT or body.pop("version", 0) not in (
            1,
            VERSION,
        ):
            raise CheckpointError(
                f"{where}: is not a {FORMAT} of version 1 or {VERSION}."
            )
        return decode(cls, body, f"{where}: body", CheckpointError)

    @classmethod
    def merged(cls, reports: Iterable[Manifest]) -> Manifest:
        """Merge the manifests of all ranks."""
        files, tensors, reports = (
            list[StoredFile](),
            dict[str, StoredTensor](),
            list(reports),
        )
        for report in reports:
            for tensor in report.tensors:
                known = tensors.setdefault(
                    tensor.title, replace(tensor, shards=())
                )
                # Files are numbered over all ranks, in their order.
                shards = tuple(
                    replace(s, file=s.file + len(files)) for s in tensor.shards
                )
                tensors[tensor.title] = replace(
                    known, shards=known.shards + shards
                )
            files += report.files
        # A rank without updates reports neither an optimizer nor a count.
        optimizers = {report.optimizer for report in reports} - {""}
        updates = {report.updates for report in reports} - {None}
        if len(updates) > 1 or len(optimizers) > 1:
            raise CheckpointError(
                f"the ranks made {sorted(map(str, updates))} updates with {sorted(optimizers)}; a"
                " checkpoint has one count and one optimizer."
            )
        return replace(
            reports[0],
            optimizer=next(iter(optimizers), ""),
            updates=next(iter(updates), None),
            versions=versions() | {"python": platform.python_version()},
            files=tuple(files),
            tensors=tuple(tensors.values()),
        )

    def problems(self) -> Iterator[str]:
        """Yield contradictions within the manifest. A check runs only if those before
        it found nothing."""
        # Later checks may rely on what earlier ones have established.
        if len({file.name for file in self.files}) < len(self.files):
            yield f"file names {[file.name[:80] for file in self.files]}: each name may occur once."
        for file in self.files:
            yield from file.problems()
        if len({tensor.title for tensor in self.tensors}) < len(self.tensors):
            yield "a tensor is listed twice."
        for tensor in self.tensors:
            yield from (
                f"{tensor.title[:80]}: {what}"
                for what in tensor.problems(self.files)
            )
        yield from self._empty_files()
        # the scale, and the number of steps for which it has not changed
        match self.state.get("loss_scale"):
            case None:
                pass
            case [int() | float() as scale, int() as steady] if type(
                steady
            ) is int and (1 <= scale <= 2.0**60 and 0 <= steady < LARGEST):
                pass
            case other:
                yield (
                    f"'loss_scale' is {str(other)[:60]}; expected a scale from 1 to 2**60 and the steps since"
                    " it changed."
                )

    def _empty_files(self) -> Iterator[str]:
        """Describe files that are much larger than their tensors.

        A sparse file of a terabyte takes no disk space, but hours to read.
        """
        held = [0] * len(self.files)
        for tensor in self.tensors:
            itemsize = DTYPES[tensor.dtype].itemsize
            for shard in tensor.shards:
                held[shard.file] += (shard.stop - shard.start) * itemsize
        for file, size in zip(self.files, held, strict=True):
            # 8 bytes of length, a header, and the elements.
            if file.size > 8 + HEADER + size:
                yield f"{file.name} has {file.size:,} bytes, and its tensors take {size:,}."


def _table(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON table, one level deep."""
    return {
        each.metadata.get("name") or each.name: getattr(value, each.name)
        for each in fields(value)
    }


def _sum(body: object) -> str:
    # Sorted and compact: one text for one content.
    text = json.dumps(
        body, sort_keys=True, separators=(",", ":"), default=_table
    )
    return hashlib.sha256(text.encode()).hexdigest()


# ---- tensor files


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a file's header; the offsets count from the header's end."""

    # Only known dtypes, so that every entry has a size.
    dtype: str = key(choices=(*DTYPES, *BYTES))
    shape: tuple[int, ...] = count()
    data_offsets: tuple[int, int] = count()

    def problems(self, at: int) -> Iterator[str]:
        """Yield the problems of a tensor that should begin at byte `at`."""
        start, end = self.data_offsets
        size = math.prod(self.shape) * (DTYPES | BYTES)[self.dtype].itemsize
        if len(self.shape) > DIMS:
            yield f"{len(self.shape)} dims; the maximum is {DIMS}."
        if end - start != size:
            yield (
                f"shape {list(self.shape)} of {self.dtype} takes {size:,} bytes, but"
                f" {end - start:,} are given."
            )
        # Every byte belongs to one tensor: neither shared nor unclaimed.
        if start != at:
            what = (
                "shares bytes with"
                if start < at
                else "leaves bytes unclaimed after"
            )
            yield f"{what} the one before: it begins at {start:,}, not {at:,}."


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[StoredFile, dict[str, int]]:
    """Write contiguous host tensors to a new file and fsync it. Return the file and
    each tensor's byte offset.

    A thread reads the chunks back meanwhile and compares them with what was written.
    """
    # safetensors: 8 bytes of length, a JSON header, then the elements.
    header: dict[str, object] = (
        {"__metadata__": dict(metadata)} if metadata else {}
    )
    offsets, end = dict[str, int](), 0
    for name, x in tensors.items():
        offsets[name], end = end, end + x.nbytes
        span = [offsets[name], end]
        header[name] = {
            "dtype": NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": span,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    first = len(text).to_bytes(8, "little") + text
    blocks = [
        memoryview(first),
        *(raw_bytes(x) for x in tensors.values() if x.numel()),
    ]
    checksum = FASTEST
    with (
        # "x": a file that exists is never overwritten. Unbuffered, so that
        # bytes go out as written.
        path.open("xb+", buffering=0) as file,
        ThreadPoolExecutor(1) as thread,
    ):
        sums = []
        for number, chunk in enumerate(_chunks(blocks)):
            for block in chunk:
                left = block
                # Small writes: one of megabytes makes the kernel look for huge pages.
                while left:
                    left = left[file.write(left[:_BLOCK]) :]
            # The chunk is in the page cache, from which the thread reads it
            # back.
            sums.append(
                thread.submit(_compared_sum, checksum, chunk, file, number)
            )
        # Before the checksums are reported: a save that ends is on the disk.
        os.fsync(file.fileno())
        chunks = tuple(each.result() for each in sums)
    # Offsets in the header count from its end, those in the manifest from the
    # file's start.
    begin = len(first)
    written = StoredFile(path.name, chunks, begin + end, checksum)
    return written, {name: begin + at for name, at in offsets.items()}


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy."""
    return x.view(-1).view(torch.uint8).numpy().data


def _chunks(blocks: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Regroup the bytes into runs of `CHUNK`."""
    chunk, free = list[memoryview](), CHUNK
    for block in blocks:
        left = block
        # A block may begin in one chunk and end in another.
        while left:
            chunk.append(left[:free])
            left, free = left[free:], free - len(chunk[-1])
            if not free:
                yield chunk
                chunk, free = [], CHUNK
    if chunk:
        yield chunk


def _compared_sum(
    checksum: str, chunk: Iterable[memoryview], file: BinaryIO, number: int
) -> str:
    """Return a chunk's checksum, after checking that the file reads back the same."""
    digest = CHECKSUMS[checksum]()
    for block in chunk:
        digest.update(block)
    written = str(digest.hexdigest())
    if _chunk_sum(checksum, file, number) != written:
        raise CheckpointError(
            f"{file.name}: the bytes read back differ from those written."
        )
    # Start writing this chunk to the disk now instead of at the fsync: a third less
    # time.
    os.posix_fadvise(
        file.fileno(), number * CHUNK, CHUNK, os.POSIX_FADV_DONTNEED
    )
    return written


def _chunk_sum(checksum: str, file: BinaryIO, number: int) -> str:
    digest, at, block = (
        CHECKSUMS[checksum](),
        number * CHUNK,
        bytearray(_BLOCK),
    )
    # Positional reads, so that threads share the open file.
    while at < (number + 1) * CHUNK and (
        count := os.preadv(file.fileno(), [block], at)
    ):
        digest.update(memoryview(block)[:count])
        at += count
    return str(digest.hexdigest())


def chunk_sums(file: BinaryIO, checksum: str) -> tuple[str, ...]:
    """Return the checksum of each chunk of a file, computed in threads: one alone is
    slower than a disk."""
    numbers = range(-(-os.fstat(file.fileno()).st_size // CHUNK))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        return tuple(threads.map(partial(_chunk_sum, checksum, file), numbers))


def read_into(file: BinaryIO, offset: int, out: Tensor) -> None:
    """Fill a flat host tensor with the file's bytes from `offset` on."""
    left = raw_bytes(out) if out.numel() else None
    while left:
        # A file may be cut while it is read.
        count = os.preadv(file.fileno(), [left], offset)
        if not count:
            raise CheckpointError(
                f"{file.name}: ended {len(left):,} bytes early while it was read."
            )
        left, offset = left[count:], offset + count


def read_header(
    folder: Folder, name: str
) -> dict[str, tuple[HeaderEntry, int]]:
    """Return a file's tensors and their byte offsets by name, if its header is valid.

    A valid header has unique names, known dtypes and matching sizes, and every byte
    belongs to exactly one tensor.
    """
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        # The length is checked before anything is allocated for the header.
        if size < 8 or length > min(HEADER, size - 8):
            folder.refuse(
                name,
                f"is not a safetensors file: it has {size:,} bytes and gives its header"
                f" {length:,} bytes.",
            )
        try:
            text = file.read(length).decode()
        except UnicodeDecodeError:
            folder.refuse(
                name, "is not a safetensors file: its header is not text."
            )
    table = parse_json(text, str(folder.path / name), folder.error)
    # Free text for people; no statement about a tensor.
    table.pop("__metadata__", None)
    places = {
        title: f"{folder.path / name}: {title[:80]!r}" for title in table
    }
    entries = dict[str, HeaderEntry]()
    for title, value in table.items():
        if not isinstance(value, dict):
            raise folder.error(
                f"{places[title]}: is {str(value)[:60]}; a table is expected there."
            )
        entries[title] = decode(
            HeaderEntry, value, places[title], folder.error
        )
    # In the order of their bytes, each must begin where the one before ends.
    begin, at = 8 + length, 0
    for title, entry in sorted(
        entries.items(), key=lambda each: each[1].data_offsets
    ):
        if problem := next(entry.problems(at), ""):
            raise folder.error(f"{places[title]}: {problem}")
        at = entry.data_offsets[1]
    if begin + at != size:
        folder.refuse(
            name, f"has {size:,} bytes; its header describes {begin + at:,}."
        )
    return {
        title: (entry, begin + entry.data_offsets[0])
        for title, entry in entries.items()
    }


# ---- the folder of a checkpoint


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08}"


def step_of(name: str) -> int:
    """Return the step in a checkpoint's folder name; -1 if it is not such a name."""
    match = _STEP.fullmatch(name)
    # Eight digits or more, so that names sort by step.
    return int(match[1]) if match else -1


def file_of(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def is_file_name(name: str) -> bool:
    """True if this can be the name of a tensor file."""
    return _FILE.fullmatch(name) is not None


def manifest_text(path: Path) -> str:
    return Folder(path, CheckpointError).text(MANIFEST, LIMIT)


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest and check its consistency."""
    return Manifest.parse(manifest_text(path), path)


def verify_checkpoint(path: Path) -> list[str]:
    """List everything that is wrong with a checkpoint; empty if it is intact."""
    try:
        return faults(path, read_manifest(path))
    except CheckpointError as error:
        return [str(error)]


def faults(
    path: Path, manifest: Manifest, rank: int = 0, ranks: int = 1
) -> list[str]:
    """List faults in a checkpoint's files, or in this rank's share of them.

    Reads all bytes, and compares the headers with the manifest.
    """
    folder = Folder(path, CheckpointError)
    # Files are dealt out to ranks in turn, so that each reads a share of the
    # bytes.
    own = range(rank, len(manifest.files), ranks)
    wrong = [
        fault for number in own if (fault := damage(folder, manifest, number))
    ]
    headers = {}
    # Headers of damaged files are not looked at: the damage is the reason.
    for number in own if not wrong else ():
        try:
            headers[number] = read_header(folder, manifest.files[number].name)
        except CheckpointError as error:
            wrong.append(str(error))
    # What no shard of the manifest names: another shard was read in its place.
    unnamed = {number: {*entries} for number, entries in headers.items()}
    for tensor in manifest.tensors:
        for shard in (s for s in tensor.shards if s.file in headers):
            count = shard.stop - shard.start
            entry, offset = headers[shard.file].get(shard.key, (None, 0))
            unnamed[shard.file].discard(shard.key)
            # The manifest and the file's own header must tell the same.
            there = (
                (entry.dtype, math.prod(entry.shape), offset)
                if entry
                else None
            )
            if there != (tensor.dtype, count, shard.offset):
                wrong.append(
                    f"{path / manifest.files[shard.file].name}: {shard.key} is not stored as the"
                    f" manifest says: {count} elements of {tensor.dtype} at byte {shard.offset:,}."
                )
    for number, keys in unnamed.items():
        file = path / manifest.files[number].name
        wrong += [
            f"{file}: the manifest has no {key[:80]}."
            for key in sorted(keys)[:1]
        ]
    return wrong


def damage(folder: Folder, manifest: Manifest, number: int) -> str:
    """Describe in one line why a file is missing or damaged; "" if it is intact."""
    file = manifest.files[number]
    path = folder.path / file.name
    try:
        with folder.open(file.name) as opened:
            size = os.fstat(opened.fileno()).st_size
            # A size that no file of the manifest has is wrong in any case:
            # nothing to read.
            known = any(size == each.size for each in manifest.files)
            sums = chunk_sums(opened, file.checksum) if known else ()
    except (CheckpointError, OSError) as error:
        return str(error)
    if size == file.size and sums == file.chunks:
        return ""
    # Two files were exchanged: their content tells which.
    if other := next(
        (f.name for f in manifest.files if sums and f.chunks == sums), None
    ):
        return f"{path}: holds the content of {other}."
    if size != file.size:
        return f"{path}: has {size:,} bytes, {file.size:,} were written."
    # The first chunk that differs, as a place to look at.
    first = next(n for n, each in enumerate(sums) if each != file.chunks[n])
    return (
        f"{path}: its bytes from {first * CHUNK:,} on differ from what was written:"
        f" checksum {sums[first][:12]}, not {file.chunks[first][:12]}."
    )
