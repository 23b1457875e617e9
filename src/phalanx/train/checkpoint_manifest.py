"""What a checkpoint contains: where the run was, its whole tensors, and which numbers of them are in
which file. See docs/checkpoints.md.

A manifest from anywhere is used only after every number in it has been checked against the others and
against the files. Then any box of any tensor can be read, in whatever layout it was written.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..layout import Shape
from .checkpoint_file import (
    CHUNK,
    DIMS,
    DTYPES,
    CheckpointError,
    File,
    chunk_sums,
    raw_bytes,
    read_header,
    read_into,
)
from .folder import Fields, Folder, parse_json

MANIFEST = "manifest.json"
LIMIT = 1 << 28  # bytes of a manifest
FORMAT, VERSION = "phalanx-checkpoint", 1
PARTS = 1024  # of a tensor, at most
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
_KIND = re.compile(r"[a-z_]{1,40}")
WEIGHT = "weight"

Span = tuple[int, int]
Box = tuple[Span, ...]


@dataclass(frozen=True)
class Progress:
    """Where a run is: all that it needs, beside its tensors, to go on.

    `step` is the next one, `cursor` how many sequences were taken, `seed` what all random numbers
    are drawn from, `data` the fingerprint of the corpus. `config` and `state` are the run's own and
    only kept: how it was set up, and what else changes while it runs (a loss scale).
    """

    step: int
    cursor: int = 0
    seed: int = 0
    data: str = ""
    layout: str = ""
    shape: Shape | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Numbers `start` to `stop` of a part of a tensor, flattened: they are at byte `offset` of a file.

    The part is the shard of one tensor-parallel rank: the `box` of the whole, padded at each dim's
    end to the lengths `local`.
    """

    file: int
    key: str
    offset: int
    box: Box
    local: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Logical:
    """A whole tensor: a weight, or what the optimizer keeps for one (`kind` says which)."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def whole(self) -> Box:
        return tuple((0, n) for n in self.shape)

    def parts(self) -> list[list[Piece]]:
        """The pieces of each part, in order: together they are the whole part."""
        parts: dict[tuple[Box, tuple[int, ...]], list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda p: p.start):
            parts.setdefault((piece.box, piece.local), []).append(piece)
        return list(parts.values())


@dataclass(frozen=True)
class Manifest:
    """`optimizer` names the one whose tensors are kept, `updates` counts its steps."""

    progress: Progress
    tensors: tuple[Logical, ...]
    files: tuple[File, ...]
    optimizer: str = ""
    updates: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        progress = self.progress
        body: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            **{key: getattr(progress, key) for key in ("step", "cursor", "seed", "data", "layout")},
            "shape": None if progress.shape is None else asdict(progress.shape),
            "config": dict(progress.config),
            "state": dict(progress.state),
            "optimizer": self.optimizer,
            "updates": self.updates,
            "versions": dict(self.versions) or _versions(),
            "files": [vars(each) for each in self.files],
            "tensors": [to_json(each) for each in self.tensors],
        }
        return json.dumps({"sha256": _sum(body), "body": body}, indent=0)

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """The manifest that a text is, if nothing in it contradicts anything else."""
        signed = parse_json(text, where, CheckpointError)
        body = signed.object("body")
        if signed.text("sha256") != _sum(body.values):
            signed.refuse("was changed after it was written: its own checksum is another.")
        if body.text("format") != FORMAT or body.whole("version") != VERSION:
            body.refuse(f"is not a {FORMAT} of version {VERSION}.")
        files = tuple(map(File.parse, body.objects("files")))
        names = [each.name for each in files]
        wrong = [n for n in names if not _FILE.fullmatch(n)]
        if wrong or len(set(names)) < len(names):
            body.refuse(
                f"file name {(wrong or names)[0][:80]!r}: names are plain, end in .safetensors"
                " and are there once."
            )
        tensors = tuple(_logical(each, files) for each in body.objects("tensors"))
        if len({each.title for each in tensors}) < len(tensors):
            body.refuse("a tensor is there twice.")
        updates = body.values.get("updates")
        if updates is not None and (type(updates) not in (int, float) or updates < 0):
            body.refuse(f"'updates' is {str(updates)[:40]}; a count belongs there.")
        versions = {str(k): str(v) for k, v in body.object("versions").values.items()}
        return cls(_progress(body), tensors, files, body.text("optimizer"), updates, versions)

    @classmethod
    def merged(cls, progress: Progress, reports: list[str]) -> Manifest:
        """One manifest of what all ranks have written; see `report`."""
        files, tensors = list[File](), dict[str, Logical]()
        updates, optimizers = set[float](), set[str]()
        for rank, text in enumerate(reports):
            fields = parse_json(text, f"rank {rank}", CheckpointError)
            optimizers |= {fields.text("optimizer")} - {""}
            updates |= set(fields.list("updates"))
            if fields.values["file"] is None:
                continue
            file = len(files)
            files.append(File.parse(fields.object("file")))
            for each in fields.objects("tensors"):
                tensor = _tensor(each, file + 1)
                known = tensors.setdefault(tensor.title, replace(tensor, pieces=()))
                pieces = tuple(replace(piece, file=file) for piece in tensor.pieces)
                tensors[tensor.title] = replace(known, pieces=known.pieces + pieces)
        if len(updates) > 1 or len(optimizers) > 1:
            raise CheckpointError(
                f"the ranks have made {sorted(updates)} updates with {sorted(optimizers)}; a"
                " checkpoint has one number and one optimizer."
            )
        optimizer, count = next(iter(optimizers), ""), next(iter(updates), None)
        return cls(progress, tuple(tensors.values()), tuple(files), optimizer, count)


def report(
    file: File | None,
    tensors: Iterable[Logical],
    optimizer: str = "",
    updates: Iterable[float] = (),
) -> str:
    """What a rank has written into its file, for `Manifest.merged`; no file when it owns nothing."""
    return json.dumps(
        {
            "file": file and vars(file),
            "tensors": [to_json(each) for each in tensors],
            "optimizer": optimizer,
            "updates": list(updates),
        }
    )


def to_json(tensor: Logical) -> dict[str, object]:
    return vars(tensor) | {"pieces": [vars(piece) for piece in tensor.pieces]}


def _sum(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    torch_version, python = str(torch.__version__), platform.python_version()
    return {"phalanx": version("phalanx"), "torch": torch_version, "python": python}


def _progress(body: Fields) -> Progress:
    shape = None
    if body.values.get("shape") is not None:
        sizes = body.object("shape")
        try:
            shape = Shape(**sizes.values)
        except (TypeError, ValueError) as error:
            sizes.refuse(f"is no shape: {error}")
    scale = body.object("state").values.get("loss_scale")
    if scale is not None and not _is_loss_scale(scale):
        body.refuse(
            f"'loss_scale' is {str(scale)[:60]}; a scale from 1 to 2**60 and the steps since it"
            " changed belong there."
        )
    step, cursor, seed = (body.whole(key) for key in ("step", "cursor", "seed"))
    config, state = body.object("config").values, body.object("state").values
    return Progress(
        step, cursor, seed, body.text("data"), body.text("layout"), shape, config, state
    )


def _is_loss_scale(value: object) -> bool:
    """Whether this is what fp16 keeps: the scale, and for how many steps it has held."""
    match value:
        case [int() | float() as scale, int() as steady]:
            return 1 <= scale <= 2.0**60 and 0 <= steady < 1 << 62 and type(steady) is int
    return False


def _logical(fields: Fields, files: tuple[File, ...]) -> Logical:
    tensor = _tensor(fields, len(files))
    for piece in tensor.pieces:
        file = files[piece.file]
        end = piece.offset + (piece.stop - piece.start) * DTYPES[tensor.dtype].itemsize
        if end > file.size:
            fields.refuse(
                f"{tensor.title}: its numbers end at byte {end:,} of {file.name}, which has"
                f" {file.size:,}."
            )
    _check_cover(tensor, fields)
    return tensor


def _tensor(fields: Fields, files: int) -> Logical:
    shape = fields.wholes("shape")
    if len(shape) > DIMS:
        fields.refuse(f"'shape' has {len(shape):,} dims; at most {DIMS} can be right.")
    pieces = tuple(_piece(each, len(shape), files) for each in fields.objects("pieces"))
    tensor = Logical(fields.text("kind"), fields.text("name"), fields.text("dtype"), shape, pieces)
    if tensor.dtype not in DTYPES or not _KIND.fullmatch(tensor.kind):
        fields.refuse(
            f"{tensor.title[:80]!r} of type {tensor.dtype[:20]!r} is no tensor of a model."
        )
    return tensor


def _piece(fields: Fields, dims: int, files: int) -> Piece:
    box = []
    for span in fields.list("box"):
        right = isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)
        if not right or not 0 <= span[0] < span[1]:
            fields.refuse(f"'box' has {str(span)[:40]}; a start and a later stop belong there.")
        box.append((span[0], span[1]))
    file, offset, key = fields.whole("file"), fields.whole("offset", 8), fields.text("key")
    local, start, stop = fields.wholes("local"), fields.whole("start"), fields.whole("stop", 1)
    if file >= files:
        fields.refuse(f"there is no file {file} of {files}.")
    fits = len(box) == len(local) == dims
    fits = fits and all(b - a <= n for (a, b), n in zip(box, local, strict=True))
    if not fits or not start < stop <= math.prod(local):
        fields.refuse(
            f"box {box}, local {list(local)}, {start} to {stop} do not fit together for {dims} dims."
        )
    return Piece(file, key, offset, tuple(box), local, start, stop)


def _check_cover(tensor: Logical, fields: Fields) -> None:
    """Every number of the tensor is in exactly one piece."""
    parts = tensor.parts()
    for part in parts:
        at, numbers = 0, math.prod(part[0].local)
        for piece in part:
            if piece.start != at:
                what = "twice" if piece.start < at else "nowhere"
                fields.refuse(f"{tensor.title}: numbers around {at:,} of a part are {what}.")
            at = piece.stop
        if at != numbers:
            fields.refuse(f"{tensor.title}: a part ends at {at:,} of {numbers:,}.")
        if any(b > n for (_, b), n in zip(part[0].box, tensor.shape, strict=True)):
            fields.refuse(f"{tensor.title}: a part lies outside its shape {list(tensor.shape)}.")
    if len(parts) > PARTS:
        fields.refuse(f"{tensor.title}: {len(parts)} parts; at most {PARTS} can be right.")
    boxes = [part[0].box for part in parts]
    held = sum(math.prod(b - a for a, b in box) for box in boxes)
    if held != math.prod(tensor.shape) or _any_meet(boxes):
        fields.refuse(
            f"{tensor.title}: its parts hold {held:,} numbers, each once; its shape"
            f" {list(tensor.shape)} has {math.prod(tensor.shape):,}."
        )


def _any_meet(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes have something in common."""
    # All pairs at once: as many as a manifest may have would take Python half a minute.
    both = np.ones((len(boxes), len(boxes)), bool)
    for dim in zip(*boxes, strict=True):
        starts, stops = np.array(dim, np.int64).T
        both &= starts[:, None] < stops
    both &= both.T
    return int(both.sum()) > len(boxes)


def meet(a: Iterable[Span], b: Iterable[Span]) -> Box | None:
    """What two boxes have in common; None when it is nothing."""
    common = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


# ---- a checkpoint's folder


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08}"


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


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint's folder, checked in itself."""
    return parse_manifest(manifest_text(path), path)


def verify_checkpoint(path: Path) -> list[str]:
    """Everything that is wrong with a checkpoint; nothing when it is sound."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return faults(path, manifest)


def faults(path: Path, manifest: Manifest, rank: int = 0, ranks: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint, or with this rank's share of them: all their
    bytes are read, and their headers compared with the manifest."""
    folder = Folder(path, CheckpointError)
    own = range(rank, len(manifest.files), ranks)
    wrong = [fault for number in own if (fault := _damage(folder, manifest, number))]
    if wrong:
        return wrong
    headers = {}
    for number in own:
        try:
            headers[number] = read_header(folder, manifest.files[number].name)
        except CheckpointError as error:
            wrong.append(str(error))
    for tensor in manifest.tensors:
        for piece in (p for p in tensor.pieces if p.file in headers):
            stored = headers[piece.file].get(piece.key)
            numel = piece.stop - piece.start
            expected = (tensor.dtype, numel, piece.offset)
            if stored is None or (stored.dtype, stored.numel, stored.offset) != expected:
                wrong.append(
                    f"{path / manifest.files[piece.file].name}: {piece.key} is not there as the"
                    f" manifest says: {numel} numbers of {tensor.dtype} at byte {piece.offset:,}."
                )
    return wrong


def _damage(folder: Folder, manifest: Manifest, number: int) -> str:
    """One line for a file that is gone, or not what was written."""
    file = manifest.files[number]
    path = folder.path / file.name
    try:
        with folder.open(file.name) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            known = any(size == each.size for each in manifest.files)
            sums = tuple(chunk_sums(opened)) if known else ()
    except (CheckpointError, OSError) as error:
        return str(error)
    if size == file.size and sums == file.chunks:
        return ""
    if other := next((f.name for f in manifest.files if sums and f.chunks == sums), None):
        return f"{path}: holds what belongs into {other}."
    if size != file.size:
        return f"{path}: has {size:,} bytes, {file.size:,} were written."
    pairs = enumerate(zip(sums, file.chunks, strict=True))
    first = next(n for n, (now, written) in pairs if now != written)
    return (
        f"{path}: its bytes from {first * CHUNK:,} on differ from what was written:"
        f" checksum {sums[first][:12]}, not {file.chunks[first][:12]}."
    )


class Reader:
    """The tensors of a checkpoint, read box by box. Its files have been verified before."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = Folder(path, CheckpointError), manifest
        self.tensors = {(each.kind, each.name): each for each in manifest.tensors}
        self.files: dict[int, BinaryIO] = {}
        self.stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def whole(self, tensor: Logical) -> Tensor:
        return self.box(tensor, tensor.whole)

    def box(self, tensor: Logical, box: Box) -> Tensor:
        """These numbers of a tensor, in its own dtype, on the host."""
        out = torch.empty([b - a for a, b in box], dtype=DTYPES[tensor.dtype])
        for part in tensor.parts():
            common = meet(part[0].box, box)
            if common is None:
                continue
            if not common:  # a tensor without dims
                out.copy_(self._rows(tensor, part, 0, 1).view(()))
                continue
            inside = _slices(common, part[0].box)
            rows = self._rows(tensor, part, inside[0].start, inside[0].stop)
            out[_slices(common, box)] = rows[:, *inside[1:]]
        return out

    def _rows(self, tensor: Logical, part: list[Piece], first: int, last: int) -> Tensor:
        """Rows of one part, from all the pieces that hold some of them."""
        dims = part[0].local[1:]
        row = math.prod(dims)
        start, stop = first * row, last * row
        flat = torch.empty(stop - start, dtype=DTYPES[tensor.dtype])
        for piece in part:
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


def _slices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in one around it."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def hash_tensors(path: Path) -> dict[str, str]:
    """The SHA-256 of every whole tensor, by title: equal for equal tensors, however they are cut."""
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        return dict(sorted(_hashes(reader)))


def _hashes(reader: Reader) -> Iterator[tuple[str, str]]:
    for tensor in reader.manifest.tensors:
        digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(raw_bytes(reader.whole(tensor)))
        yield tensor.title, digest.hexdigest()
