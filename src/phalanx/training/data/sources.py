"""Reads files of text and chats in blocks that can be processed independently.

Formats: JSON lines (also .gz and .zst), JSON arrays, Parquet, folders saved by
`datasets` (Arrow) and plain text. Each file is cut into blocks of about a MiB, always
at the same places; `rows.py` interprets them. An unreadable file, or an unreadable rest
of one, raises `BadFile` with the place.
"""

import codecs
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...layout.files import open_regular, reason
from ..folder import Folder
from .token_files import SPLITS, DataError

BLOCK = 1 << 20  # bytes of a block
LINE = 64 << 20  # maximum bytes of a line of JSON
# bytes of a plain-text document: at most LONGEST, and SHORTEST if one small file is
# split
LONGEST = 1 << 20
SHORTEST = 1 << 10
# Files of a folder that `datasets` saved.
_SAVED = (
    "state.json",
    "dataset_info.json",
)
_SPLITS = "dataset_dict.json"
_LIMIT = 64 << 20  # maximum bytes of a description
_PACKED = (".gz", ".zst")
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_NOT_READ = (".csv", ".tsv", ".xls", ".xlsx")


class BadFile(ValueError):
    """Raised for an unreadable part of a file, with its place and the reason. The
    blocks before it are good."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place}: {why}")


@dataclass(frozen=True)
class Source:
    """One file to read: its name below the folder, and what shows that it has not
    changed.

    `kind` is lines, array, parquet, arrow or text. `split` is set if the folder assigns
    the file to a part of the data: 0 for training, 1 for validation.
    """

    path: Path
    name: str
    size: int
    changed: int
    kind: str
    split: int | None = None


@dataclass(frozen=True)
class Table:
    """An Arrow record batch. Pickling sends only these rows, even if they are a slice
    of a larger batch."""

    batch: Any

    def __reduce__(self) -> Any:
        pyarrow, ipc = map(importlib.import_module, ("pyarrow", "pyarrow.ipc"))
        sink = pyarrow.BufferOutputStream()
        # A stream writes the rows of a slice alone, where pickle would send
        # the whole buffer.
        with ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        return _sent_table, (sink.getvalue().to_pybytes(),)


def _sent_table(content: bytes) -> Table:
    with importlib.import_module("pyarrow.ipc").open_stream(content) as reader:
        return Table(reader.read_next_batch())


@dataclass(frozen=True)
class SourceBlock:
    """Some documents of a source as stored: lines, text, JSON objects or a table.

    The first document is number `first`; `behind` bytes of the file have been read.
    """

    source: Source
    first: int
    content: bytes | list[Any] | Table
    behind: int
    lines: int = 0  # the number of lines, for text of lines


def find_sources(path: Path) -> list[Source]:
    """Return the file, or every file below a folder, sorted by name. Links that lead
    out are refused."""
    if not path.exists():
        raise DataError(f"{path} does not exist. Name a file or a folder.")
    sources = list(
        _below(path, path, None)
        if path.is_dir()
        else [_source(path, path.parent)]
    )
    if not sources:
        raise DataError(f"{path} holds no file.")
    # By the parts of the path: "a/b" before "a-b", on every machine.
    return sorted(sources, key=lambda source: source.name.split("/"))


def _below(root: Path, folder: Path, split: int | None) -> Iterator[Source]:
    if all((folder / name).is_file() for name in _SAVED):
        files = Folder(folder, DataError)
        for each in files.json(_SAVED[0], _LIMIT).get("_data_files") or ():
            name = str(
                each.get("filename") if isinstance(each, dict) else each
            )
            # refuses names that lead out of this folder
            files.open(name).close()
            yield _source(folder / name, root, split)
        return
    # A folder of splits, one folder each.
    if (folder / _SPLITS).is_file():
        # A test split is neither trained on nor read.
        parts = [folder / name for name in SPLITS if (folder / name).is_dir()]
        for number, part in enumerate(parts):
            # A single split says nothing about what is held out.
            yield from _below(root, part, number if len(parts) > 1 else None)
        return
    for path in sorted(folder.iterdir()):
        # Hidden files are caches and leftovers of tools.
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield _source(path, root, split)
        # Linked folders are left out: they may lead in circles or out.
        elif not path.is_symlink():
            yield from _below(root, path, split)


def _source(path: Path, root: Path, split: int | None = None) -> Source:
    # A link inside the folder, as caches of downloads have, is followed.
    if path.is_symlink() and root.resolve() not in path.resolve().parents:
        raise DataError(
            f"{path}: is a link out of its folder; put the file itself there."
        )
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file.")
    status, plain = (
        path.stat(),
        # "data.jsonl.gz" is a file of lines, whatever packs it.
        path.with_suffix("") if path.suffix in _PACKED else path,
    )
    kinds = {".jsonl": "lines", ".ndjson": "lines", ".json": "array"}
    kind = kinds.get(plain.suffix) or _TABLES.get(path.suffix, "text")
    name = path.relative_to(root).as_posix()
    return Source(path, name, status.st_size, status.st_mtime_ns, kind, split)


def blocks(
    source: Source, columns: tuple[str, ...] = (), *, alone: bool = False
) -> Iterator[SourceBlock]:
    """Yield the blocks of a file. Of tables, only `columns` are read, or all if empty.

    A long plain text is cut at line ends into documents of about a MiB. If it is the
    only source (`alone`), it is cut into about 64, so that some of it can be held out.
    """
    if source.path.suffix in _NOT_READ:
        raise BadFile(
            str(source.path),
            "is a table that is not read; make it .jsonl or .parquet",
        )
    if source.kind in _TABLES.values():
        yield from _tables(source, columns)
        return
    with _opened(source.path) as (file, raw):
        if source.kind == "array":
            yield from _objects(source, file, raw)
        elif source.kind == "lines":
            yield from _lines(source, file, raw)
        else:
            # About 64 documents at least, so that a part of 5 % can be held
            # out.
            longest = (
                max(SHORTEST, min(LONGEST, source.size // 64))
                if alone
                else LONGEST
            )
            yield from _texts(source, file, raw, longest)


# ---- bytes


class _Unpacked(io.RawIOBase):
    """The decompressed content of a .gz or .zst file with any number of members.

    A truncated file is an error; zstandard's own reader takes it for the end.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.rest = file, path, b""
        self.ready = memoryview(b"")
        self.unpacker: Any = None
        self.errors: tuple[type[Exception], ...] = (zlib.error,)
        # 31: a gzip header and a window of 32 KiB.
        self.begin: Any = lambda: zlib.decompressobj(31)
        if path.suffix == ".zst":
            zstandard = needed("zstandard", path, "to read .zst")
            self.begin = lambda: zstandard.ZstdDecompressor().decompressobj()
            self.errors = (zstandard.ZstdError,)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self.ready:
            # A little at a time: 16 KiB can decompress to many MiB of zeros.
            packed = self.rest or self.file.read(1 << 14)
            self.rest = b""
            if not packed:
                # An open member at the end of the file.
                if self.unpacker is not None:
                    raise BadFile(
                        str(self.path),
                        "is truncated: its compressed content has no end",
                    )
                return 0
            self.unpacker = self.unpacker or self.begin()
            try:
                self.ready = memoryview(self.unpacker.decompress(packed))
            except self.errors as error:
                raise BadFile(str(self.path), f"is damaged: {error}") from None
            # A file may have several members, as `cat a.gz b.gz` makes.
            if self.unpacker.eof:
                self.rest, self.unpacker = self.unpacker.unused_data, None
        count = min(len(into), len(self.ready))
        into[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for its decompressed content and for itself, whose position tells how
    far it was read."""
    try:
        with open_regular(path) as raw:
            packed: Any = (
                _Unpacked(raw, path) if path.suffix in _PACKED else None
            )
            yield (io.BufferedReader(packed, BLOCK) if packed else raw), raw
    except OSError as error:
        raise BadFile(str(path), f"cannot be read: {reason(error)}") from None


def needed(module: str, place: object, what: str) -> Any:
    """Import an optional module, or raise with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise DataError(
            f"{place}: {what} install {name}: pip install {name}."
        ) from None


def _texts(
    source: Source, file: BinaryIO, raw: BinaryIO, longest: int
) -> Iterator[SourceBlock]:
    # `rest` holds the begun character at the end of the previous document.
    number, rest = 0, b""
    while content := rest + file.read(max(0, longest - len(rest))):
        if not number and b"\0" in content[:8192]:
            raise BadFile(
                str(source.path), "is not text: it has bytes of zero"
            )
        # Documents end at line ends, if a line does.
        content += b"" if content.endswith(b"\n") else file.readline(longest)
        # A line without end is cut, but never within a UTF-8 character.
        tail = content[-4:]
        # The bytes that form whole characters: the rest is the begun one.
        cut = (
            len(content)
            - len(tail)
            + codecs.utf_8_decode(tail, "ignore", False)[1]
        )
        content, rest = content[:cut], content[cut:]
        if not content:  # the file ends within a character
            content, rest = rest, b""
        # A byte-order mark belongs to the file, not to its first document.
        text = content.removeprefix(codecs.BOM_UTF8) if not number else content
        yield SourceBlock(source, number, text, raw.tell())
        number += 1


def _lines(
    source: Source, file: BinaryIO, raw: BinaryIO
) -> Iterator[SourceBlock]:
    first = 1
    while content := file.read(BLOCK):
        # A block ends at the end of a line.
        content += b"" if content.endswith(b"\n") else file.readline(LINE)
        if len(content) >= LINE:
            raise BadFile(
                f"{source.path}, line {first}",
                f"is longer than {LINE:,} bytes",
            )
        # three times as fast as bytes.count
        lines = int(
            np.count_nonzero(np.frombuffer(content, np.uint8) == ord("\n"))
        )
        # The last line may lack its newline.
        lines += not content.endswith(b"\n")
        yield SourceBlock(
            source,
            first,
            content.removeprefix(codecs.BOM_UTF8),
            raw.tell(),
            lines,
        )
        first += lines


def _objects(
    source: Source, file: BinaryIO, raw: BinaryIO
) -> Iterator[SourceBlock]:
    """Yield the elements of a JSON array. A .json file may also hold JSON lines."""
    # `utf-8-sig` skips a byte-order mark.
    reader = codecs.getreader("utf-8-sig")(file)
    decoder, number, batch, size = json.JSONDecoder(), 0, list[Any](), 0
    place, wrong = str(source.path), None
    try:
        text = reader.read(BLOCK).lstrip()
        # An object first: JSON lines in a .json file, or one object over many
        # lines.
        if text[:1] == "{":
            file.seek(0)
            try:
                json.loads(file.readline(LINE))
            except ValueError:
                why = "is one object of JSON over many lines; write an array of objects, or lines"
                raise BadFile(place, why) from None
            file.seek(0)
            yield from _lines(source, file, raw)
            return
        if text[:1] != "[":
            raise BadFile(
                place, "is not a JSON array; objects in [ ] or lines are read"
            )
        at, ended = 1, False
        while True:
            place = f"{source.path}, element {number}"
            # Commas and white space between elements.
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if text[at : at + 1] == "]":
                break
            try:
                value, stop = decoder.raw_decode(text, at)
            # Not complete here: read on before judging it.
            except ValueError:
                stop = len(text)
            # A value that ends where the text does may continue in the unread part.
            if stop >= len(text) and not ended:
                # Twice as much each time, so that long elements take linear
                # time.
                more = reader.read(max(BLOCK, len(text) - at))
                text, at, ended = text[at:] + more, 0, not more
                if len(text) > LINE:
                    raise BadFile(
                        place,
                        f"has no end within {LINE:,} characters, or is not JSON",
                    )
                continue
            if stop >= len(text):
                raise BadFile(place, "is not JSON, or is cut")
            batch.append(value)
            size, at, number = size + stop - at, stop, number + 1
            if size >= BLOCK:
                # `first` is the number of the batch's first element.
                yield SourceBlock(
                    source, number - len(batch), batch, raw.tell()
                )
                batch, size = [], 0
    # What was read before a fault is yielded before the fault is raised.
    except BadFile as error:
        wrong = error
    except (ValueError, RecursionError) as error:
        wrong = BadFile(place, f"is not JSON: {error}")
    if batch:
        yield SourceBlock(source, number - len(batch), batch, raw.tell())
    if wrong:
        raise wrong from None


# ---- tables


def _tables(source: Source, columns: tuple[str, ...]) -> Iterator[SourceBlock]:
    pyarrow = needed("pyarrow", source.path, "to read Parquet and Arrow")
    number = 0
    try:
        for batch, total in _batches(source, columns):
            # Rows of about a MiB, by the mean size of this batch's rows.
            step = max(1, batch.num_rows * BLOCK // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, step):
                part, first = batch.slice(start, step), number
                number += part.num_rows
                # The share of the rows read, as bytes of the file; a stream's
                # total is unknown.
                behind = source.size * number // max(number, total)
                yield SourceBlock(source, first, Table(part), behind)
    except (pyarrow.ArrowException, OSError) as error:
        what = (
            str(error).splitlines()[0] if str(error) else type(error).__name__
        )
        raise BadFile(
            f"{source.path}, row {number}", f"cannot be read: {what}"
        ) from None


def _batches(
    source: Source, columns: tuple[str, ...]
) -> Iterator[tuple[Any, int]]:
    """Yield a table's record batches, and the number of rows of the file if it is
    known, else 0."""
    if source.kind == "parquet":
        with importlib.import_module("pyarrow.parquet").ParquetFile(
            source.path
        ) as file:
            wanted = _wanted(source, file.schema_arrow.names, columns)
            # Batches of 1,024 rows bound memory; row groups may have
            # gigabytes.
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                yield batch, file.metadata.num_rows
        return
    pyarrow, ipc = map(importlib.import_module, ("pyarrow", "pyarrow.ipc"))
    with pyarrow.memory_map(os.fspath(source.path)) as mapped:
        # the stream format, in which `datasets` saves
        for batch in ipc.open_stream(mapped):
            yield batch.select(_wanted(source, batch.schema.names, columns)), 0


def _wanted(
    source: Source, names: list[str], columns: tuple[str, ...]
) -> list[str]:
    # Only the first column has to exist: tools are optional.
    if columns and columns[0] not in names:
        known = ", ".join(names[:8])
        raise BadFile(
            str(source.path),
            f"has no column {columns[0]!r}; it has {known}. Use --field",
        )
    return [name for name in names if not columns or name in columns]
