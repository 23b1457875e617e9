"""Files of a folder that somebody else may have written: opened only when they are what they say.

Names are plain, links do not lead out, sizes are looked at before anything is read, and JSON is
JSON without surprises. Nothing here ever runs what it reads.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

__all__ = ["Fields", "Folder", "parse_json", "sync_folder", "write_text"]

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
BLOCK = 1 << 20


@dataclass(frozen=True)
class Folder:
    """A folder whose files are opened by plain names; `error` is the family of its refusals."""

    path: Path
    error: type[ValueError]

    def refuse(self, name: str, why: str) -> NoReturn:
        raise self.error(f"{self.path / name}: {why}")

    def open(self, name: str) -> BinaryIO:
        """A regular file of this folder, open for reading, unbuffered."""
        if not _PLAIN.fullmatch(name):
            raise self.error(
                f"{self.path}: the file name {name[:80]!r} is not plain; a name has letters,"
                " digits, '.', '-' and '_' and stays in its folder."
            )
        path = self.path / name
        try:
            if path.is_symlink() and self.path.resolve() not in path.resolve().parents:
                self.refuse(name, "is a link out of its folder; put the file itself there.")
            # Without O_NONBLOCK a named pipe in place of the file would hold us for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a ring, before 3.13
            reason = getattr(error, "strerror", None) or str(error)
            self.refuse(name, f"cannot be opened: {reason}.")
        file = os.fdopen(descriptor, "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            self.refuse(name, "is not a regular file.")
        return file

    def text(self, name: str, limit: int) -> str:
        """A file's text, if it has at most `limit` bytes."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                self.refuse(name, f"has {size:,} bytes; at most {limit:,} can be right.")
            read = _all(file)
        try:
            return read.decode()
        except UnicodeDecodeError as error:
            self.refuse(name, f"is not text: byte {error.start} is not UTF-8.")

    def json(self, name: str, limit: int) -> Fields:
        """A file's JSON object, if it has at most `limit` bytes."""
        return parse_json(self.text(name, limit), str(self.path / name), self.error)

    def sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with self.open(name) as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()


def _all(file: BinaryIO) -> bytes:
    blocks = []
    while block := file.read(BLOCK):
        blocks.append(block)
    return b"".join(blocks)


def parse_json(text: str, where: str, error: type[ValueError]) -> Fields:
    """The object that a JSON text is. Keys said twice, NaN and anything but an object are refused."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is said twice")
        return found

    def no_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        said = json.loads(text, object_pairs_hook=once, parse_constant=no_constant)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where}: is not usable JSON: {wrong}.") from None
    if not isinstance(said, dict):
        raise error(f"{where}: holds a JSON {type(said).__name__} where an object belongs.")
    return Fields(said, where, error)


@dataclass(frozen=True)
class Fields:
    """A JSON object read field by field; what is missing or of another type is refused by name."""

    said: Mapping[str, object]
    where: str
    error: type[ValueError]

    def refuse(self, why: str) -> NoReturn:
        raise self.error(f"{self.where}: {why}")

    def _get(self, key: str, kind: type, what: str) -> object:
        value = self.said.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            shown = repr(value)[:60] if key in self.said else "missing"
            self.refuse(f"{key!r} is {shown}; {what} belongs there.")
        return value

    def text(self, key: str) -> str:
        value = self._get(key, str, "a text")
        assert isinstance(value, str)
        return value

    def whole(self, key: str, least: int = 0) -> int:
        value = self._get(key, int, "a whole number")
        assert isinstance(value, int)
        if not least <= value < 1 << 62:
            self.refuse(f"{key!r} is {value}; it is at least {least} and below 2**62.")
        return value

    def wholes(self, key: str, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers from 0."""
        found = self.list(key)
        right = all(type(n) is int and 0 <= n < 1 << 62 for n in found)
        if not right or count not in (None, len(found)):
            many = "" if count is None else f"{count} "
            self.refuse(f"{key!r} is {str(found)[:60]}; {many}whole numbers from 0 belong there.")
        return tuple(n for n in found if isinstance(n, int))

    def list(self, key: str) -> list[object]:
        value = self._get(key, list, "a list")
        assert isinstance(value, list)
        return value

    def object(self, key: str) -> Fields:
        value = self._get(key, dict, "an object")
        assert isinstance(value, dict)
        return Fields(value, f"{self.where}: {key}", self.error)

    def objects(self, key: str) -> builtins.list[Fields]:
        """A list of objects."""
        found = []
        for n, value in enumerate(self.list(key)):
            if not isinstance(value, dict):
                self.refuse(f"{key}[{n}] is {str(value)[:60]}; an object belongs there.")
            found.append(Fields(value, f"{self.where}: {key}[{n}]", self.error))
        return found


def write_text(path: Path, text: str) -> None:
    """The file has this text, all of it and on the disk, or what it had before."""
    beside = path.with_name(f".{path.name}.writing")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """What was created, renamed or removed in a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
