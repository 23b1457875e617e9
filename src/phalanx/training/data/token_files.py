"""Token files: our own (docs/data-format.md), nanoGPT's and llm.c's `.bin`, Megatron's
`.bin` with `.idx`, and the Python library as bytes. Each is opened as a corpus: a
sequence of documents in a training and a held-out part.

Files are mapped into memory. `prepare.py` makes tokens from text, and `batches.py` cuts
sequences from a corpus.
"""

import hashlib
import math
import os
import struct
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...layout.choices import PYTHON
from ...layout.codec import decode, key
from ...layout.files import reason
from ..folder import Folder, count
from .digests import SourceRecord, described, fingerprint

HELD_OUT = 0.05
Tokens = NDArray[np.generic]


class DataError(ValueError):
    """Raised for unusable data: names the file, the problem and a way out."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents one after another. Document d spans `starts[d]` to `starts[d + 1]` of
    the stream.

    `tokens` may also hold documents of the other part; then document d begins at
    `origins[d]` in it. `answers` is 1 for tokens that are trained on; if it is None,
    all are.
    """

    tokens: Tokens
    starts: NDArray[np.int64]
    origins: NDArray[np.int64] | None = None
    answers: NDArray[np.uint8] | None = None

    @property
    def size(self) -> int:
        refuse_cut(self.starts)
        return int(self.starts[-1])

    def read_answers(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a mask of the tokens that are trained on."""
        if self.answers is None:
            return np.ones(stop - start, bool)
        return _unmapped(self.answers)[start:stop].astype(bool)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return tokens `start` to `stop`."""
        tokens = _unmapped(self.tokens)
        # The stream is its own array.
        if self.origins is None:
            return tokens[start:stop].astype(np.int64)
        first, edges = self._documents(start, stop)
        after = first + len(edges) - 1
        # How much further each document lies in the mixed array.
        shift = self.origins[first:after] - self.starts[first:after]
        runs = zip(shift, edges, edges[1:], strict=False)
        parts = [
            tokens[by + a : by + b].astype(np.int64)
            for by, a, b in runs
            if a < b
        ]
        return np.concatenate(parts)

    def read_documents(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the number of each token's document, from `start` to `stop`."""
        first, edges = self._documents(start, stop)
        numbers = np.arange(first, first + len(edges) - 1)
        return np.repeat(numbers, np.diff(edges))

    def _documents(
        self, start: int, stop: int
    ) -> tuple[int, NDArray[np.int64]]:
        """Return the first document of the tokens asked for, and the borders of all of
        them, clipped to these tokens."""
        starts = _unmapped(self.starts)
        # The documents that contain the first and the last token.
        first, last = np.searchsorted(starts, (start, stop - 1), "right") - 1
        return int(first), np.clip(starts[first : last + 2], start, stop)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of one data source. `vocab` is 0 if the files do not give it.

    `mark` is a cheap fingerprint: it covers file sizes and beginnings, or all of a text
    in memory. `bytes_per_token` is that of the held-out part and converts a loss per
    token to bits per byte. `weight` is the relative share of sequences among several
    corpora. `files` are the mapped files with their roles; `reading` describes how they
    are decoded.
    """

    name: str
    train: Stream
    validation: Stream
    vocab: int
    mark: str
    bytes_per_token: float | None = None
    weight: int = 0
    files: tuple[tuple[str, Path], ...] = ()
    reading: str = ""
    pairs: bool = (
        False  # documents 2n and 2n + 1 are a chosen and a rejected answer
    )

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the content. Reads the files, at most 16 GiB of them."""
        return fingerprint(describe([self]))

    @property
    def record(self) -> SourceRecord:
        """This source as a checkpoint records it, without its files."""
        content = "" if self.files else self.mark
        sizes = self.train.size, self.validation.size
        return SourceRecord(
            self.name, self.reading, content, self.weight, *sizes
        )


def describe(corpora: Sequence[Corpus]) -> list[SourceRecord]:
    """Return the checkpoint's records of these sources, with digests of their files."""
    try:
        return described([(corpus.record, corpus.files) for corpus in corpora])
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot be read: {reason(error)}."
        ) from None


def open_corpus(source: str | Path, *, share: float = HELD_OUT) -> Corpus:
    """Open the corpus at a path.

    It may be `python` (the library's text), a prepared folder, a folder with nanoGPT's
    train.bin and val.bin, raw tokens (.bin, .uint16, .uint32), or a `.bin` with its
    `.idx`. `share` is held out if the files do not define a held-out part.
    """
    if source == "python":
        return open_library(share)
    path = Path(source)
    if (path / INDEX).is_file():
        return open_prepared(path)
    # nanoGPT: one document each, as these files have no boundaries.
    if all((path / name).is_file() for name in _NANOGPT):
        parts = [_bin(path / name) for name in _NANOGPT]
        train, validation = (
            Stream(x, np.array((0, len(x)), np.int64)) for x, _ in parts
        )
        mark = hashlib.sha256(
            "".join(mark for _, mark in parts).encode()
        ).hexdigest()
        files = tuple((name, path / name) for name in _NANOGPT)
        reading = " and ".join(_reading(tokens) for tokens, _ in parts)
        return Corpus(
            str(path), train, validation, 0, mark, files=files, reading=reading
        )
    # Megatron: either of the two files names both.
    if path.suffix in (".bin", ".idx") and path.with_suffix(".idx").is_file():
        return _open_megatron(path, share)
    if path.suffix in (".bin", *RAW) and path.is_file():
        tokens, mark = _bin(path)
        # These files have no document boundaries: runs of 64 Ki tokens stand for
        # documents.
        ends = np.append(np.arange(0, len(tokens), RUN), len(tokens))
        streams, files = _split(tokens, ends, share), (("", path),)
        return Corpus(
            str(path), *streams, 0, mark, files=files, reading=_reading(tokens)
        )
    what = (
        "is not there"
        if not path.exists()
        else "holds no tokens that are known"
    )
    raise DataError(
        f"{path} {what}. Text becomes tokens by `phalanx data prepare {path} --out DIR`; read as"
        " they are: DIR, .bin with .idx, .bin, .uint16, .uint32, a folder with train.bin and"
        " val.bin, or 'python'."
    )


_NANOGPT = ("train.bin", "val.bin")


def _reading(tokens: Tokens) -> str:
    """Describe how tokens are decoded from their file: dtype and offset."""
    begin = tokens.offset if isinstance(tokens, np.memmap) else 0
    return f"{tokens.dtype}" + (f" from byte {begin:,}" if begin else "")


def has_tokens(path: Path) -> bool:
    """True if the path holds tokens; anything else is text or chats to be prepared."""
    named = path.suffix in (".bin", ".idx", *RAW) and path.is_file()
    return (
        named
        or (path / INDEX).is_file()
        or all((path / n).is_file() for n in _NANOGPT)
    )


def map_file(
    folder: Folder,
    name: str,
    dtype: np.dtype[Any],
    count: int,
    offset: int = 0,
) -> NDArray[Any]:
    """Map `count` values of a file, from `offset` to its end, without reading them."""
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        # Exact sizes: a longer or shorter file is not what its index
        # describes.
        if size != offset + count * dtype.itemsize:
            folder.refuse(
                name,
                f"has {size:,} bytes; {count:,} numbers of {dtype} are {count * dtype.itemsize:,},"
                f" from byte {offset:,} on.",
            )
        # An empty file cannot be mapped.
        if not count:
            return np.empty(0, dtype)
        mapped: np.memmap[Any, Any] = np.memmap(
            file, dtype, "r", offset, (count,)
        )
        # Numpy sets it only for a path.
        mapped.filename = str(folder.path / name)
        return mapped


def refuse_cut(mapped: NDArray[Any]) -> None:
    """Refuse a mapped file that was truncated since: reading the lost part would kill
    the process (SIGBUS)."""
    mapping: Any = getattr(mapped, "_mmap", None)
    if not isinstance(mapped, np.memmap) or mapping is None:
        return
    # The size of the file now, through the mapping's own descriptor.
    wanted, size = mapped.offset + mapped.nbytes, mapping.size()
    if size < wanted:
        raise DataError(
            f"{mapped.filename}: has {size:,} bytes, and had {wanted:,} when it was opened: it was cut"
            " while in use. Restore it; the same command then continues."
        )


def _unmapped(mapped: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of a mapped file as an ordinary array, to be read at once.

    Each slice of a `memmap` is one itself, which takes ten times as long to make.
    """
    refuse_cut(mapped)
    return np.asarray(mapped)


def _rises(offsets: NDArray[np.int64], last: int) -> bool:
    return (
        # Offsets start at 0, never fall, and end with the last token.
        offsets[0] == 0
        and offsets[-1] == last
        and not (np.diff(offsets) < 0).any()
    )


def held_out(names: Iterable[str], share: float) -> NDArray[np.bool_]:
    """Return a mask of the held-out documents, by name and independent of their
    order."""
    # A document is held out or not whatever else is in the data.
    # Compared as bytes: the first eight of a digest are a number below 2**64, like the
    # limit.
    limit = min(math.ceil(share * 2**64), 2**64 - 1).to_bytes(8, "big")
    below = (
        hashlib.sha256(n.encode("utf-8", "replace")).digest() < limit
        for n in names
    )
    return np.fromiter(below, bool)


def _split(
    tokens: Tokens,
    ends: NDArray[np.int64],
    share: float,
    names: Sequence[str] = (),
) -> tuple[Stream, Stream]:
    """Split documents that lie mixed in one array into the two parts.

    `ends` starts with 0; documents without names are identified by number.
    """
    chosen = held_out(names or map(str, range(len(ends) - 1)), share)

    def part(mask: NDArray[np.bool_]) -> Stream:
        # Documents of a part stand one after another in the stream of that
        # part.
        starts = np.concatenate(([0], np.cumsum(np.diff(ends)[mask]))).astype(
            np.int64
        )
        return Stream(tokens, starts, ends[:-1][mask])

    return part(~chosen), part(chosen)


# ---- our own files: a JSON index, raw little-endian tokens, document offsets

INDEX = "index.json"
AS_BYTES = "bytes"  # the tokenizer that makes each byte a token
FORMAT, VERSION = "phalanx-tokens", 1
SPLITS = ("train", "validation")
# the file of a split with the mask of trained tokens of chats
ANSWERS = "answers"
DTYPES: dict[str, np.dtype[Any]] = {
    n: np.dtype(f"<{n}") for n in ("u1", "u2", "u4")
}
LIMIT = 1 << 20  # bytes of an index


@dataclass(frozen=True)
class Split:
    """One part of a prepared folder: counts and checksums of its files."""

    tokens_sha256: str
    documents_sha256: str
    tokens: int = count()
    documents: int = count()
    text_bytes: int = count()
    answers_sha256: str = ""  # "" if every token is trained on


@dataclass(frozen=True)
class Splits:
    train: Split
    validation: Split


@dataclass(frozen=True)
class Index:
    """`index.json` of a prepared folder."""

    format: str
    version: int
    tokenizer: str
    splits: Splits
    dtype: str = key(choices=tuple(DTYPES))
    vocab: int = key(minimum=1, maximum=1 << 32)
    end: int | None = key(minimum=0)
    # Two documents after each other are a chosen and a rejected answer to one prompt.
    pairs: bool = False


def dtype_for(vocab: int) -> str:
    """Return the narrowest dtype that holds every token."""
    return next(
        (name for name, bits in (("u1", 8), ("u2", 16)) if vocab <= 1 << bits),
        "u4",
    )


def open_prepared(path: Path) -> Corpus:
    """Open the corpus of a prepared folder. Sizes and offsets are checked here,
    checksums by `verify_prepared`."""
    folder = Folder(path, DataError)
    index = _index(folder)
    train, validation = (_stream(folder, index, name) for name in SPLITS)
    held = index.splits.validation
    each = held.text_bytes / held.tokens if held.tokens else None
    files = []
    for name in SPLITS:
        answers = (
            [ANSWERS] if getattr(index.splits, name).answers_sha256 else []
        )
        roles = [
            f"{name}.{what}" for what in ("tokens", "documents", *answers)
        ]
        files += [(role, path / role) for role in roles]
    mark, reading = (
        folder.sha256(INDEX),
        f"{index.dtype} of a vocabulary of {index.vocab:,}",
    )
    return Corpus(
        str(path),
        train,
        validation,
        index.vocab,
        mark,
        each,
        files=tuple(files),
        reading=reading,
        pairs=index.pairs,
    )


def _index(folder: Folder) -> Index:
    where, table = str(folder.path / INDEX), folder.json(INDEX, LIMIT)
    if (table.get("format"), table.get("version")) != (FORMAT, VERSION):
        folder.refuse(
            INDEX,
            f"is not an index that this reads: {FORMAT!r} of version {VERSION}.",
        )
    index = decode(Index, table, where, DataError)
    # A narrow dtype could not hold the largest token.
    if index.vocab > 1 << 8 * DTYPES[index.dtype].itemsize:
        folder.refuse(
            INDEX, f"tokens of type {index.dtype} cannot name {index.vocab}."
        )
    return index


def tokenizer_of(path: str) -> str:
    """Return the name of the tokenizer that a corpus was prepared with, or "" if its
    files do not say."""
    if path == PYTHON:
        return AS_BYTES
    if not (Path(path) / INDEX).is_file():
        return ""
    return _index(Folder(Path(path), DataError)).tokenizer


def _stream(folder: Folder, index: Index, name: str) -> Stream:
    split: Split = getattr(index.splits, name)
    tokens = map_file(
        folder, f"{name}.tokens", DTYPES[index.dtype], split.tokens
    )
    starts = map_file(
        folder, f"{name}.documents", np.dtype("<i8"), split.documents + 1
    )
    # Offsets that fall would lead reads out of the file.
    if not _rises(starts, len(tokens)):
        folder.refuse(
            f"{name}.documents",
            f"the documents' offsets must rise from 0 to {len(tokens):,}, the number of tokens.",
        )
    if not split.answers_sha256:
        return Stream(tokens, starts)
    answers = map_file(
        folder, f"{name}.{ANSWERS}", np.dtype("u1"), split.tokens
    )
    return Stream(tokens, starts, None, answers)


def verify_prepared(path: Path) -> list[str]:
    """List faults in a prepared folder after reading every byte; empty if it is
    intact."""
    try:
        open_prepared(path)
        folder = Folder(path, DataError)
        splits = _index(folder).splits
        return [
            # An empty checksum means that the split has no such file.
            f"{path / f'{name}.{what}'}: its checksum is not that of the index; prepare it again."
            for name, split in asdict(splits).items()
            for what in ("tokens", "documents", ANSWERS)
            if (sha256 := split[f"{what}_sha256"])
            and folder.sha256(f"{name}.{what}") != sha256
        ]
    except DataError as error:
        return [str(error)]


# ---- nanoGPT and llm.c

RUN = 1 << 16
# llm.c's headers: 256 int32, of which the first three are magic number, version and
# token count.
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
HEADER = 1024
RAW = {".uint16": "<u2", ".uint32": "<u4"}  # beside .bin


def _bin(path: Path) -> tuple[Tokens, str]:
    """Return the tokens of a raw file, and a mark of its size and beginning."""
    folder = Folder(path.parent, DataError)
    with folder.open(path.name) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(HEADER)
    mark = hashlib.sha256(head + str(size).encode()).hexdigest()
    # Shorter files have no header of llm.c.
    magic, version, count = (
        struct.unpack_from("<3i", head) if len(head) == HEADER else (0, 0, 0)
    )
    if (magic, version) in LLM_C:
        if count < 1:
            folder.refuse(
                path.name, f"its header has a count of {count:,} tokens."
            )
        dtype = np.dtype(LLM_C[magic, version])
        return map_file(folder, path.name, dtype, count, HEADER), mark
    dtype = np.dtype(RAW.get(path.suffix, "<u2"))
    if size % dtype.itemsize or not size:
        what = f"has {size:,} bytes; {dtype} tokens are a multiple of {dtype.itemsize}."
        folder.refuse(path.name, what)
    tokens = map_file(folder, path.name, dtype, size // dtype.itemsize)
    # Every second value: the high halves, if 32-bit tokens were read as 16-bit
    # ones.
    high, low = tokens[1 : 1 << 15 : 2], tokens[: 1 << 15 : 2]
    # A vocabulary below 2^19 has high halves below 8, and low ones beyond a
    # byte.
    halves = len(high) >= 16 and int(high.max()) < 8 and int(low.max()) >= 256
    if path.suffix == ".bin" and halves:
        folder.refuse(
            path.name,
            "every second number is below 8, as in a file of uint32. Name it .uint32, or .uint16 if"
            " that is what it is.",
        )
    return tokens, mark


# ---- Megatron-LM's IndexedDataset

MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def _open_megatron(path: Path, share: float) -> Corpus:
    """Open a Megatron `.bin` with the `.idx` beside it."""
    folder = Folder(path.parent, DataError)
    name = f"{path.stem}.idx"
    with folder.open(name) as file:
        size = os.fstat(file.fileno()).st_size
        # 9 bytes of magic, then version (8), dtype (1), and two counts (8
        # each).
        head = file.read(34)
        if len(head) < 34 or head[:9] != MEGATRON:
            folder.refuse(
                name, "is no Megatron index: it does not begin with MMIDIDX."
            )
        version, code, sequences, count = struct.unpack_from("<QBQQ", head, 9)
        if version != 1 or code not in MEGATRON_DTYPES:
            folder.refuse(
                name,
                f"has version {version} and dtype {code}; 1 and integers are read.",
            )
        # 4 bytes of length and 8 of position for each sequence, 8 for each
        # document.
        wanted = 34 + 12 * sequences + 8 * count
        # Checked before anything is allocated: a header may contain any count.
        if count < 1 or size not in (wanted, wanted + sequences):
            folder.refuse(
                name,
                f"has {sequences:,} sequences, {count:,} documents and {size:,} bytes;"
                f" {wanted:,} would be right.",
            )
        content = head + file.read(wanted - 34)
    # The index holds each sequence's length and first byte, then the starts of
    # documents.
    lengths = np.frombuffer(content, "<i4", sequences, 34)
    pointers = np.frombuffer(content, "<i8", sequences, 34 + 4 * sequences)
    documents = np.frombuffer(content, "<i8", count, 34 + 12 * sequences)
    dtype = np.dtype(MEGATRON_DTYPES[code])
    # In tokens, where the file's own pointers count bytes.
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if bool((lengths < 0).any()):
        folder.refuse(name, "a sequence has a negative length.")
    tokens = map_file(folder, f"{path.stem}.bin", dtype, int(offsets[-1]))
    if bool((pointers != offsets[:-1] * dtype.itemsize).any()):
        folder.refuse(
            name, "its sequences do not follow one another in the file."
        )
    if not _rises(documents, sequences):
        folder.refuse(
            name, f"its documents must rise from 0 to {sequences:,} sequences."
        )
    mark = hashlib.sha256(content).hexdigest()
    files = tuple(
        (suffix, path.with_suffix(suffix)) for suffix in (".bin", ".idx")
    )
    # Documents consist of sequences: their starts in tokens.
    streams = _split(tokens, offsets[documents], share)
    return Corpus(
        str(path), *streams, 0, mark, files=files, reading=_reading(tokens)
    )


# ---- the text that every machine has: the Python standard library, with bytes as
# tokens

BYTES = 256
# Installed packages differ from machine to machine; tests are mostly data.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "__pycache__",
}


@lru_cache(maxsize=2)
def open_library(share: float = HELD_OUT) -> Corpus:
    """Open the Python library as a corpus of about 10 MB, in which each module is a
    document."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, below, files in os.walk(root):
        # Sorted in place: `os.walk` descends in this order, on every file
        # system.
        below[:] = sorted(set(below) - _LEFT_OUT)
        paths += [
            path
            for file in sorted(files)
            if (path := Path(folder, file)).suffix == ".py"
        ]
    texts = {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in paths
        if p.is_file()
    }
    if not texts:
        raise DataError(
            f"{root} has no source files of the Python library; name a file or folder."
        )
    whole = b"".join(texts.values())
    ends = np.cumsum([0, *map(len, texts.values())])
    streams = _split(np.frombuffer(whole, np.uint8), ends, share, list(texts))
    mark = hashlib.sha256(whole).hexdigest()
    # `replace` only for names that are not UTF-8.
    # The names of the modules decide which are held out.
    names = hashlib.sha256(
        "\n".join(texts).encode("utf-8", "replace")
    ).hexdigest()
    reading = f"bytes of modules {names[:16]}"
    return Corpus(
        "python", *streams, BYTES, mark, bytes_per_token=1.0, reading=reading
    )
