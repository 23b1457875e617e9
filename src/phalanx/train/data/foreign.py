"""Token files of other projects, read as they are: nanoGPT's and llm.c's `.bin`, Megatron's
`.bin` with `.idx`.

What is held out is a second file where the project has one (`val.bin`), else documents chosen by
their number. nanoGPT's files know no documents: pieces of 64 Ki tokens stand for them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..folder import Folder
from .corpus import HELD_OUT, Corpus, DataError, Stream, map_file, parts

__all__ = ["open_megatron", "open_plain", "open_plain_pair"]

PIECE = 1 << 16
# llm.c's headers: 256 int32, of which the first three are magic, version and the number of tokens.
LLM_C: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
HEADER = 1024
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"),
    5: np.dtype("<i8"), 8: np.dtype("<u2"),
}  # fmt: skip


def open_plain(path: Path, share: float = HELD_OUT) -> Corpus:
    """One `.bin` of nanoGPT or llm.c, a part of its pieces held out."""
    tokens, mark = _plain(path)
    ends = np.append(np.arange(0, len(tokens), PIECE), len(tokens)).astype(np.int64)
    names = [str(n) for n in range(len(ends) - 1)]
    train, validation = parts(tokens, ends, names, share)
    return Corpus(str(path), train, validation, 0, mark)


def open_plain_pair(folder: Path, train: str, validation: str) -> Corpus:
    """`train.bin` and `val.bin` of one folder."""
    (mine, first), (other, second) = (_plain(folder / name) for name in (train, validation))
    mark = hashlib.sha256((first + second).encode()).hexdigest()
    return Corpus(str(folder), _whole(mine), _whole(other), 0, mark)


def _whole(tokens: NDArray[np.generic]) -> Stream:
    return Stream(tokens, np.array((0, len(tokens)), np.int64))


def _plain(path: Path) -> tuple[NDArray[np.generic], str]:
    folder = Folder(path.parent, DataError)
    with folder.open(path.name) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER)
        magic, version, count = struct.unpack_from("<3i", head) if len(head) == HEADER else (0,) * 3
        dtype = LLM_C.get((magic, version))
        if dtype is None:
            if size % 2 or not size:
                folder.refuse(path.name, f"has {size:,} bytes; uint16 tokens are an even number.")
            return map_file(file, path, np.dtype("<u2"), size // 2), _mark(head, size)
        if count < 1 or size != HEADER + count * dtype.itemsize:
            folder.refuse(
                path.name,
                f"its header tells of {count:,} tokens of {dtype}, and it has {size:,} bytes;"
                f" {HEADER + count * dtype.itemsize:,} would be right.",
            )
        return map_file(file, path, dtype, count, HEADER), _mark(head, size)


def _mark(head: bytes, size: int) -> str:
    """What tells two files apart without reading them whole."""
    return hashlib.sha256(head + str(size).encode()).hexdigest()


def open_megatron(path: Path, share: float = HELD_OUT) -> Corpus:
    """A `.bin` with the `.idx` beside it, as Megatron-LM's IndexedDataset writes them."""
    folder = Folder(path.parent, DataError)
    index, tokens_name = f"{path.stem}.idx", f"{path.stem}.bin"
    dtype, lengths, pointers, documents, mark = _index(folder, index)
    with folder.open(tokens_name) as file:
        size = os.fstat(file.fileno()).st_size
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        if bool((lengths < 0).any()) or size != offsets[-1] * dtype.itemsize:
            folder.refuse(
                tokens_name,
                f"has {size:,} bytes; {index} tells of {offsets[-1]:,} tokens of {dtype}.",
            )
        if bool((pointers != offsets[:-1] * dtype.itemsize).any()):
            folder.refuse(index, "its sequences do not follow one another in the file.")
        right = documents[0] == 0 and documents[-1] == len(lengths)
        if not right or bool((np.diff(documents) < 0).any()):
            folder.refuse(index, f"its documents must rise from 0 to {len(lengths):,} sequences.")
        tokens: NDArray[np.generic] = np.empty(0, dtype)
        if size:
            tokens = map_file(file, folder.path / tokens_name, dtype, int(offsets[-1]))
    ends = offsets[documents]
    names = [str(n) for n in range(len(ends) - 1)]
    train, validation = parts(tokens, ends, names, share)
    return Corpus(str(path), train, validation, 0, mark)


def _index(
    folder: Folder, name: str
) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], str]:
    """dtype, then of each sequence length and place in bytes, then where documents begin."""
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(34)
        if len(head) < 34 or head[:9] != MEGATRON:
            folder.refuse(name, "is no Megatron index: it does not begin with MMIDIDX.")
        version, code, sequences, documents = struct.unpack_from("<QBQQ", head, 9)
        if version != 1 or code not in MEGATRON_DTYPES:
            folder.refuse(name, f"has version {version} and dtype {code}; 1 and integers are read.")
        wanted = 34 + 12 * sequences + 8 * documents
        # Before anything is allocated: counts in a header are what anybody can write.
        if documents < 1 or size not in (wanted, wanted + sequences):
            folder.refuse(
                name, f"tells of {sequences:,} sequences and {documents:,} documents and has {size:,}"
                f" bytes; {wanted:,} would be right."
            )  # fmt: skip
        said = head + file.read(wanted - 34)
    lengths = np.frombuffer(said, "<i4", sequences, 34)
    pointers = np.frombuffer(said, "<i8", sequences, 34 + 4 * sequences)
    begins = np.frombuffer(said, "<i8", documents, 34 + 12 * sequences)
    return MEGATRON_DTYPES[code], lengths, pointers, begins, hashlib.sha256(said).hexdigest()
