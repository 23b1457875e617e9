"""Our token files: a JSON index, raw little-endian tokens, document offsets. See docs/data-format.md.

Writing them restartably is in `prepare.py`; here is what they are, how they are opened and verified.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...layout.files import write_text
from ..folder import Fields, Folder
from .corpus import Corpus, DataError, Stream, map_file

__all__ = ["INDEX", "SPLITS", "dtype_for", "open_form", "verify_form", "write_index"]

INDEX = "index.json"
FORMAT, VERSION = "phalanx-tokens", 1
SPLITS = ("train", "validation")
DTYPES: dict[str, np.dtype[Any]] = {
    "u1": np.dtype("u1"),
    "u2": np.dtype("<u2"),
    "u4": np.dtype("<u4"),
}
LIMIT = 1 << 20  # bytes of an index


def dtype_for(vocab: int) -> str:
    """The narrowest type that holds every token."""
    return next((name for name, bits in (("u1", 8), ("u2", 16)) if vocab <= 1 << bits), "u4")


def write_index(
    path: Path, *, vocab: int, tokenizer: str, end: int | None, text_bytes: dict[str, int]
) -> None:
    """Close a folder whose tokens and offsets are written: count, checksum, say what they are."""
    folder, dtype = Folder(path, DataError), dtype_for(vocab)
    splits = {
        name: {
            "tokens": (path / f"{name}.tokens").stat().st_size // DTYPES[dtype].itemsize,
            "documents": (path / f"{name}.documents").stat().st_size // 8 - 1,
            "text_bytes": text_bytes[name],
            "tokens_sha256": folder.sha256(f"{name}.tokens"),
            "documents_sha256": folder.sha256(f"{name}.documents"),
        }
        for name in SPLITS
    }
    said = {
        "format": FORMAT, "version": VERSION, "dtype": dtype, "vocab": vocab,
        "tokenizer": tokenizer, "end": end, "splits": splits,
    }  # fmt: skip
    write_text(path / INDEX, json.dumps(said, indent=1) + "\n", durable=True)


def open_form(path: Path) -> Corpus:
    """The corpus of a prepared folder, its tokens mapped and not read. Sizes and offsets are
    checked here, checksums by `verify_form`."""
    folder = Folder(path, DataError)
    text = folder.text(INDEX, LIMIT)
    index = _index(folder)
    dtype = DTYPES[index.text("dtype")]
    streams = {}
    for name in SPLITS:
        split = index.object("splits").object(name)
        tokens = mapped(folder, f"{name}.tokens", dtype, split.whole("tokens"))
        offsets = mapped(folder, f"{name}.documents", np.dtype("<i8"), split.whole("documents") + 1)
        starts: NDArray[np.int64] = offsets
        check_offsets(folder, f"{name}.documents", starts, len(tokens))
        streams[name] = Stream(tokens, starts)
    held = index.object("splits").object("validation")
    count = held.whole("tokens")
    return Corpus(
        str(path), streams["train"], streams["validation"],
        vocab=index.whole("vocab", 1),
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
        bytes_per_token=held.whole("text_bytes") / count if count else None,
    )  # fmt: skip


def verify_form(path: Path) -> list[str]:
    """What is wrong with a prepared folder, every byte of it read; nothing when it is sound."""
    try:
        open_form(path)
        folder = Folder(path, DataError)
        splits = _index(folder).object("splits")
        return [
            f"{path / f'{name}.{what}'}: its checksum is another than the index says; prepare it again."
            for name in SPLITS
            for what in ("tokens", "documents")
            if folder.sha256(f"{name}.{what}") != splits.object(name).text(f"{what}_sha256")
        ]
    except DataError as error:
        return [str(error)]


def _index(folder: Folder) -> Fields:
    index = folder.json(INDEX, LIMIT)
    if index.text("format") != FORMAT or index.whole("version") != VERSION:
        index.refuse(
            f"is {index.text('format')!r} of version {index.whole('version')};"
            f" this reads {FORMAT!r} of version {VERSION}."
        )
    if index.text("dtype") not in DTYPES:
        index.refuse(f"'dtype' is {index.text('dtype')!r}; choose {', '.join(DTYPES)}.")
    if index.whole("vocab", 1) > 1 << 8 * DTYPES[index.text("dtype")].itemsize:
        index.refuse(f"tokens of type {index.text('dtype')} cannot name {index.whole('vocab')}.")
    return index


def mapped(folder: Folder, name: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """A raw file as an array, if it has exactly so many numbers; nothing is read."""
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != count * dtype.itemsize:
            folder.refuse(
                name,
                f"has {size:,} bytes; {count:,} numbers of {dtype} are {count * dtype.itemsize:,}.",
            )
        if not count:
            return np.empty(0, dtype)
        return map_file(file, folder.path / name, dtype, count)


def check_offsets(folder: Folder, name: str, starts: NDArray[np.int64], total: int) -> None:
    """Offsets begin at 0, never fall, and end where the tokens end."""
    if starts[0] != 0 or starts[-1] != total or bool((np.diff(starts) < 0).any()):
        folder.refuse(
            name, f"the documents' offsets must rise from 0 to {total:,}, the number of tokens."
        )
