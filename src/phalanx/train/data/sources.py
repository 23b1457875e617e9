"""Documents of text, JSON Lines and Parquet files, one after another, in an order of their own."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .corpus import DataError

__all__ = ["Document", "Source", "documents", "find_sources"]

LINE = 64 << 20  # bytes of one line of JSON
LONGEST = 1 << 20  # bytes of one document of plain text
SHORTEST = 1 << 10


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
    root = path if path.is_dir() else path.parent
    paths = [path]
    if path.is_dir():
        paths = [
            Path(folder, file)
            for folder, _, files in os.walk(path)
            for file in files
            if not file.startswith(".")
        ]
    found = []
    for each in sorted(paths):
        if each.is_symlink() and root.resolve() not in each.resolve().parents:
            raise DataError(f"{each}: is a link out of its folder; put the file itself there.")
        if not each.is_file():
            raise DataError(f"{each}: is not a regular file.")
        status = each.stat()
        name = each.relative_to(root).as_posix()
        found.append(Source(each, name, status.st_size, status.st_mtime_ns))
    if not found:
        raise DataError(f"{path} holds no file.")
    return found


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
                said = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is not JSON: {error}.") from None
            text = said.get(field) if isinstance(said, dict) else None
            if not isinstance(text, str):
                known = (
                    ", ".join(map(repr, list(said)[:8])) if isinstance(said, dict) else "no keys"
                )
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
