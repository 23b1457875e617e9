"""Text to token files, restartably: what is done is written down, and a second start goes on there.

Every few MiB the outputs are brought to the disk and `progress.json` says how long they are; a start
that finds it cuts the outputs to that length and continues with the next document. Below that: the
documents of text, JSON Lines and Parquet files in a fixed order, and the vocabularies that turn them
into tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...layout.files import write_text
from ..folder import Folder, count, decoded
from .token_files import DTYPES, INDEX, SPLITS, DataError, dtype_for, held_out, write_index

PROGRESS = "progress.json"
LIMIT = 1 << 20
AT_ONCE = 1 << 20  # bytes of text that are made tokens together
BETWEEN = 16 << 20  # bytes of text between two marks of progress
LINE = 64 << 20  # bytes of one line of JSON
LONGEST = 1 << 20  # bytes of one document of plain text
SHORTEST = 1 << 10
TOKENIZER = 256 << 20  # bytes of a tokenizer.json


@dataclass(frozen=True)
class Prepared:
    """How far a preparation has come. `key` is of the sources and settings it was begun with."""

    key: str
    source: int = count(0)  # files that are done
    document: int = count(0)  # documents of the next one that are done
    read: int = count(0)  # bytes of text, over all
    tokens: tuple[int, int] = count((0, 0))  # by split
    documents: tuple[int, int] = count((0, 0))
    text: tuple[int, int] = count((0, 0))  # bytes


def prepare(
    source: Path,
    out: Path,
    vocabulary: Vocabulary,
    *,
    share: float,
    field: str = "text",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prepared:
    """Write the token files of a text file or folder; `progress` is called with the
    bytes done and all bytes.

    A folder that this has begun with the same sources is gone on with; a finished one stays.
    """
    sources = find_sources(source)
    key = _key(sources, vocabulary, share, field)
    done = _begun(out, key)
    if (out / INDEX).exists():
        return done
    total = sum(each.size for each in sources)
    with _Writer(out, done, vocabulary, share) as writer:
        for number in range(done.source, len(sources)):
            skip = writer.done.document
            texts = documents(sources[number], field=field, alone=len(sources) == 1)
            before = sum(each.size for each in sources[:number])
            for batch in _batches(islice(texts, skip, None)):
                writer.add(batch)
                progress(min(before + writer.of_source, before + sources[number].size), total)
            writer.next_source()
        writer.mark()
        progress(total, total)
        done = writer.done
    if not done.tokens[0]:
        raise DataError(f"{source} has no text to train on once {share:.0%} of it is held out.")
    write_index(out, vocabulary.size, vocabulary.name, vocabulary.end, done.text)
    return done


def _batches(texts: Iterator[Document]) -> Iterator[list[Document]]:
    batch, size = list[Document](), 0
    for document in texts:
        batch.append(document)
        size += len(document.text)
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key(sources: list[Source], vocabulary: Vocabulary, share: float, field: str) -> str:
    files = [[s.name, s.size, s.changed] for s in sources]
    settings = [files, vocabulary.name, vocabulary.end, share, field]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _begun(out: Path, mark: str) -> Prepared:
    """What was begun here; a fresh start where nothing was."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PROGRESS).exists():
        if any(not each.name.startswith(".") for each in out.iterdir()):
            raise DataError(f"{out} holds something else; choose an empty or new folder.")
        # At once, so that a start that is stopped before its first mark can be gone on with.
        write_text(out / PROGRESS, json.dumps(asdict(Prepared(mark))) + "\n", durable=True)
    table = Folder(out, DataError).json(PROGRESS, LIMIT)
    done = decoded(Prepared, table, str(out / PROGRESS), DataError)
    if done.key != mark:
        raise DataError(
            f"{out} was begun from other sources or with other settings;"
            " choose another folder, or remove this one."
        )
    return done


class _Writer:
    """The four output files, as far as progress tells, and from there on."""

    def __init__(self, out: Path, done: Prepared, vocabulary: Vocabulary, share: float) -> None:
        self.out, self.done, self.vocabulary, self.share = out, done, vocabulary, share
        self.dtype = DTYPES[dtype_for(vocabulary.size)]
        self.of_source = 0
        self.marked = done.read
        self.files: list[tuple[BinaryIO, BinaryIO]] = []

    def __enter__(self) -> _Writer:
        for split, name in enumerate(SPLITS):
            tokens = self._cut(f"{name}.tokens", self.done.tokens[split] * self.dtype.itemsize)
            count = self.done.documents[split]
            ends = self._cut(f"{name}.documents", 8 * (count + 1) if count else 0)
            if not count:
                ends.write(np.zeros(1, "<i8").tobytes())
            self.files.append((tokens, ends))
        return self

    def _cut(self, name: str, size: int) -> BinaryIO:
        path = self.out / name
        file = path.open("r+b" if path.exists() else "w+b")
        if path.stat().st_size < size:
            raise DataError(
                f"{path} is shorter than {PROGRESS} says; remove {self.out} and begin anew."
            )
        file.truncate(size)
        file.seek(size)
        return file

    def __exit__(self, *_: object) -> None:
        for pair in self.files:
            for file in pair:
                file.close()

    def add(self, batch: list[Document]) -> None:
        """Append documents, each to its part; now and then mark the progress."""
        done = self.done
        counts = np.array([done.tokens, done.documents, done.text])  # (3, splits)
        encoded = self.vocabulary.encode([document.text for document in batch])
        for document, numbers in zip(batch, encoded, strict=True):
            split = int(held_out(document.name, self.share))
            counts[:, split] += len(numbers), 1, len(document.text)
            tokens, ends = self.files[split]
            tokens.write(numbers.astype(self.dtype).tobytes())
            ends.write(counts[0, split].astype("<i8").tobytes())
        size = sum(len(document.text) for document in batch)
        self.of_source += size
        pairs: Any = dict(
            zip(("tokens", "documents", "text"), map(tuple, counts.tolist()), strict=True)
        )
        count, read = done.document + len(batch), done.read + size
        self.done = replace(done, document=count, read=read, **pairs)
        if self.done.read - self.marked >= BETWEEN:
            self.mark()

    def next_source(self) -> None:
        self.of_source = 0
        self.done = replace(self.done, source=self.done.source + 1, document=0)

    def mark(self) -> None:
        """Bring all to the disk, then say so: never the other way round."""
        for pair in self.files:
            for file in pair:
                file.flush()
                os.fsync(file.fileno())
        self.marked = self.done.read
        write_text(self.out / PROGRESS, json.dumps(asdict(self.done)) + "\n", durable=True)


# ---- documents


class Document(NamedTuple):
    """A name that stays the same wherever the folder lies, and the text, as bytes of UTF-8."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Source:
    """One file to read: its name below the folder, and what tells that it has not changed."""

    path: Path
    name: str
    size: int
    changed: int


def find_sources(path: Path) -> list[Source]:
    """The file, or every file below the folder by name. Links that lead out are refused."""
    if not path.exists():
        raise DataError(f"{path} is not there.")
    root, paths = path.parent, [path]
    if path.is_dir():
        root = path
        paths = [p for p in path.rglob("*") if not p.name.startswith(".") and not p.is_dir()]
    sources = []
    for each in sorted(paths):
        if each.is_symlink() and root.resolve() not in each.resolve().parents:
            raise DataError(f"{each}: is a link out of its folder; put the file itself there.")
        if not each.is_file():
            raise DataError(f"{each}: is not a regular file.")
        status = each.stat()
        name = each.relative_to(root).as_posix()
        sources.append(Source(each, name, status.st_size, status.st_mtime_ns))
    if not sources:
        raise DataError(f"{path} holds no file.")
    return sources


def documents(source: Source, *, field: str, alone: bool) -> Iterator[Document]:
    """The documents of a file. `field` names the text in JSON Lines and Parquet.

    A long plain text is cut at line ends into documents of about a MiB; one that is the whole
    source into about 64, so that some of it can be held out.
    """
    if source.path.suffix == ".jsonl":
        yield from _lines(source, field)
    elif source.path.suffix == ".parquet":
        yield from _rows(source, field)
    else:
        longest = max(SHORTEST, min(LONGEST, source.size // 64)) if alone else LONGEST
        yield from _text(source, longest)


def _text(source: Source, longest: int) -> Iterator[Document]:
    number, lines, size = 0, list[bytes](), 0
    with source.path.open("rb") as file:
        if b"\0" in file.read(8192):
            raise DataError(
                f"{source.path}: is not text; .txt (or any text), .jsonl and .parquet are read."
            )
        file.seek(0)
        while line := file.readline(longest):
            lines.append(line)
            size += len(line)
            if size >= longest:
                yield Document(f"{source.name}:{number}", b"".join(lines))
                number, lines, size = number + 1, [], 0
    if lines:
        yield Document(f"{source.name}:{number}", b"".join(lines))


def _lines(source: Source, field: str) -> Iterator[Document]:
    with source.path.open("rb") as file:
        number = 0
        while line := file.readline(LINE + 1):
            number += 1
            where = f"{source.path}, line {number}"
            if len(line) > LINE:
                raise DataError(f"{where}: is longer than {LINE:,} bytes.")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is not JSON: {error}.") from None
            row = row if isinstance(row, dict) else {}
            text = row.get(field)
            if not isinstance(text, str):
                known = ", ".join(map(repr, list(row)[:8])) or "no keys"
                raise DataError(f"{where}: has no text {field!r}; it has {known}. Use --field.")
            yield Document(f"{source.name}:{number}", text.encode("utf-8", "replace"))


def _rows(source: Source, field: str) -> Iterator[Document]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{source.path}: to read Parquet install pyarrow: pip install pyarrow."
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(source.path) as file:
            if field not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names[:8])
                raise DataError(
                    f"{source.path}: has no column {field!r}; it has {known}. Use --field."
                )
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0):
                    text = value.as_py()
                    if isinstance(text, str):
                        yield Document(f"{source.name}:{number}", text.encode("utf-8", "replace"))
                    elif text is not None:
                        raise DataError(f"{source.path}: column {field!r} holds no text.")
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path}: cannot be read as Parquet: {error}.") from None


# ---- vocabularies


class Vocabulary(Protocol):
    """Turns texts into tokens. `name` and `size` go into the index; `end` closes each document."""

    name: str
    size: int
    end: int | None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]: ...


class Bytes:
    """Every byte is a token, and nothing closes a document: masks keep them apart."""

    name: str = "bytes"
    size: int = 256
    end: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        return [np.frombuffer(text, np.uint8).astype(np.int64) for text in texts]


class Tokenizer:
    """A `tokenizer.json`; the file is data and runs nothing."""

    def __init__(self, path: Path, end: str | None) -> None:
        try:
            tokenizers = importlib.import_module("tokenizers")
        except ImportError:
            raise DataError(
                f"{path}: to read a tokenizer.json install tokenizers: pip install tokenizers."
            ) from None
        text = Folder(path.parent, DataError).text(path.name, TOKENIZER)
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"{path}: is no tokenizer.json: {error}.") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.name = f"tokenizer.json sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        # Ids may have gaps, so the highest one counts and not how many there are.
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.end = None if end is None else self._tokenizer.token_to_id(end)
        if end is not None and self.end is None:
            raise DataError(f"{path}: knows no token {end!r} to close a document with.")

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        decoded = [text.decode("utf-8", "replace") for text in texts]
        encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        closing = [] if self.end is None else [self.end]
        return [np.array(each.ids + closing, np.int64) for each in encoded]


def hub_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a model of Hugging Face; its end-of-text token closes each document."""
    vocabulary = Tokenizer(folder / "tokenizer.json", None)
    end = Folder(folder, DataError).json("config.json", TOKENIZER).get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end  # the others end a turn of a chat
    if type(end) is not int or not 0 <= end < vocabulary.size:
        raise DataError(
            f"{folder / 'config.json'}: 'eos_token_id' is no token of tokenizer.json. Prepare the data"
            f" with another: phalanx data prepare --tokenizer {folder}/tokenizer.json --end TOKEN."
        )
    vocabulary.end = end
    return vocabulary


def open_vocabulary(path: Path | None, end: str | None = None) -> Vocabulary:
    """The tokenizer of a file; bytes without one."""
    if path is not None:
        return Tokenizer(path, end)
    if end is not None:
        raise DataError("bytes have no token to close a document with; give a tokenizer or no end.")
    return Bytes()
