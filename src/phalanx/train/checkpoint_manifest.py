"""What a checkpoint says of itself: where the run was, its whole tensors, and which numbers of them
are in which file. See docs/checkpoints.md.

A manifest from anywhere is believed only after every number in it has been checked against the
others; whether the files hold what it says is in `checkpoint_read.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version

import numpy as np
import torch

from ..layout import Shape
from .checkpoint_file import DIMS, DTYPES, CheckpointError, File
from .data.folder import Fields, parse_json

__all__ = ["StoredBox", "Logical", "Manifest", "MANIFEST", "Piece", "Progress"]

MANIFEST = "manifest.json"
LIMIT = 1 << 28  # bytes of a manifest
FORMAT, VERSION = "phalanx-checkpoint", 1
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

    The part is what one place of tensor parallelism held: the `box` of the whole, padded at each
    dim's end to the lengths `local`.
    """

    file: int
    key: str
    offset: int
    box: Box
    local: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class StoredBox:
    """All pieces of one part, in order: together they are the whole part."""

    box: Box
    local: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Logical:
    """A whole tensor: a weight, or what the optimizer keeps for one (`kind` says what)."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}"

    def groups(self) -> list[StoredBox]:
        found: dict[tuple[Box, tuple[int, ...]], list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault((piece.box, piece.local), []).append(piece)
        return [
            StoredBox(box, local, tuple(sorted(pieces, key=lambda p: p.start)))
            for (box, local), pieces in found.items()
        ]


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
        said = {f: getattr(progress, f) for f in ("step", "cursor", "seed", "data", "layout")}
        body: dict[str, object] = {
            "format": FORMAT, "version": VERSION, **said,
            "shape": None if progress.shape is None else asdict(progress.shape),
            "config": dict(progress.config), "state": dict(progress.state),
            "optimizer": self.optimizer, "updates": self.updates,
            "versions": dict(self.versions) or _versions(),
            "files": [vars(each) for each in self.files],
            "tensors": [
                vars(each) | {"pieces": [vars(piece) for piece in each.pieces]}
                for each in self.tensors
            ],
        }  # fmt: skip
        return json.dumps({"sha256": _sum(body), "body": body}, indent=0)

    @classmethod
    def parse(cls, text: str, where: str) -> Manifest:
        """The manifest that a text is, if nothing in it contradicts anything else."""
        said = parse_json(text, where, CheckpointError)
        body = said.object("body")
        if said.text("sha256") != _sum(body.said):
            said.refuse("was changed after it was written: its own checksum is another.")
        if body.text("format") != FORMAT or body.whole("version") != VERSION:
            body.refuse(f"is not a {FORMAT} of version {VERSION}.")
        files = tuple(map(File.parse, body.objects("files")))
        names = [each.name for each in files]
        wrong = [n for n in names if not _FILE.fullmatch(n)]
        if wrong or len(set(names)) < len(names):
            body.refuse(
                f"file name {(wrong or names)[0][:80]!r}: names are plain, end in .safetensors"
                " and are said once."
            )
        tensors = tuple(_logical(each, files) for each in body.objects("tensors"))
        if len({each.title for each in tensors}) < len(tensors):
            body.refuse("names a tensor twice.")
        updates = body.said.get("updates")
        if updates is not None and (type(updates) not in (int, float) or updates < 0):  # type: ignore[operator]
            body.refuse(f"'updates' is {str(updates)[:40]}; a count belongs there.")
        versions = {str(k): str(v) for k, v in body.object("versions").said.items()}
        return cls(
            _progress(body), tensors, files, body.text("optimizer"),
            updates, versions,  # type: ignore[arg-type]
        )  # fmt: skip


def _sum(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    return {
        "phalanx": version("phalanx"), "torch": str(torch.__version__),
        "python": platform.python_version(),
    }  # fmt: skip


def _progress(body: Fields) -> Progress:
    shape = body.said.get("shape")
    if shape is not None:
        said = body.object("shape")
        try:
            shape = Shape(**said.said)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            said.refuse(f"is no shape: {error}")
    scale = body.object("state").said.get("loss_scale")
    if scale is not None and not _is_loss_scale(scale):
        body.refuse(
            f"'loss_scale' is {str(scale)[:60]}; a scale above 0 and the steps since it changed"
            " belong there."
        )
    return Progress(
        body.whole("step"), body.whole("cursor"), body.whole("seed"), body.text("data"),
        body.text("layout"), shape, body.object("config").said, body.object("state").said,
    )  # fmt: skip


def _is_loss_scale(kept: object) -> bool:
    """Whether this is what fp16 keeps: the scale, and for how many steps it has held."""
    if not isinstance(kept, list) or len(kept) != 2:
        return False
    scale, steady = kept
    right = type(scale) in (int, float) and 0 < scale < 2.0**64
    return right and type(steady) is int and 0 <= steady < 1 << 62


def _logical(said: Fields, files: tuple[File, ...]) -> Logical:
    shape = said.wholes("shape")
    if len(shape) > DIMS:
        said.refuse(f"'shape' has {len(shape):,} dims; at most {DIMS} can be right.")
    pieces = tuple(_piece(each, len(shape), len(files)) for each in said.objects("pieces"))
    found = Logical(said.text("kind"), said.text("name"), said.text("dtype"), shape, pieces)
    if found.dtype not in DTYPES or not _KIND.fullmatch(found.kind):
        said.refuse(f"{found.title[:80]!r} of type {found.dtype[:20]!r} is no tensor of a model.")
    size = DTYPES[found.dtype].itemsize
    for piece in pieces:
        end = piece.offset + (piece.stop - piece.start) * size
        if end > files[piece.file].size:
            said.refuse(
                f"{found.title}: its numbers end at byte {end:,} of {files[piece.file].name}, which"
                f" has {files[piece.file].size:,}."
            )
    _check_cover(found, said)
    return found


def _piece(said: Fields, dims: int, files: int) -> Piece:
    box = []
    for span in said.list("box"):
        right = isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)
        if not right or not 0 <= span[0] < span[1]:  # type: ignore[index]
            said.refuse(f"'box' has {str(span)[:40]}; a start and a later stop belong there.")
        box.append((span[0], span[1]))  # type: ignore[index]
    piece = Piece(
        said.whole("file"), said.text("key"), said.whole("offset", 8), tuple(box),
        said.wholes("local"), said.whole("start"), said.whole("stop", 1),
    )  # fmt: skip
    if piece.file >= files:
        said.refuse(f"there is no file {piece.file} of {files}.")
    fits = len(box) == len(piece.local) == dims
    fits = fits and all(b - a <= n for (a, b), n in zip(box, piece.local, strict=True))
    if not fits or not piece.start < piece.stop <= math.prod(piece.local):
        said.refuse(
            f"box {box}, local {list(piece.local)}, {piece.start} to {piece.stop} do not fit together"
            f" for {dims} dims."
        )
    return piece


def _check_cover(tensor: Logical, said: Fields) -> None:
    """Every number of the tensor is told exactly once."""
    groups = tensor.groups()
    for group in groups:
        at = 0
        for piece in group.pieces:
            if piece.start != at:
                what = "twice" if piece.start < at else "nowhere"
                said.refuse(f"{tensor.title}: numbers around {at:,} of a part are {what}.")
            at = piece.stop
        if at != math.prod(group.local):
            said.refuse(f"{tensor.title}: a part ends at {at:,} of {math.prod(group.local):,}.")
        if any(b > n for (_, b), n in zip(group.box, tensor.shape, strict=True)):
            said.refuse(f"{tensor.title}: a part lies outside of its shape {list(tensor.shape)}.")
    boxes = [group.box for group in groups]
    if len(boxes) > 1024:
        said.refuse(f"{tensor.title}: {len(boxes)} parts; at most 1024 can be right.")
    held = sum(math.prod(b - a for a, b in box) for box in boxes)
    if held != math.prod(tensor.shape) or _any_meet(boxes):
        said.refuse(
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
