"""Files of a folder that somebody else may have written: opened only when they are what they say.

Names are plain, links do not lead out, sizes are checked before anything is read, and a field of a JSON
object has the type that belongs there. Nothing here ever runs what it reads.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..layout import files

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
BLOCK = 1 << 20
LIMIT = 1 << 62  # no size and no count is as large


@dataclass(frozen=True)
class Folder:
    """A folder whose files are opened by plain names; refusals are of the type `error`."""

    path: Path
    error: type[ValueError]

    def refuse(self, name: str, why: str) -> NoReturn:
        raise self.error(f"{self.path / name}: {why}")

    def open(self, name: str) -> BinaryIO:
        """A regular file of this folder, open for reading."""
        if not _PLAIN.fullmatch(name):
            raise self.error(
                f"{self.path}: the file name {name[:80]!r} is not plain; a name has letters,"
                " digits, '.', '-' and '_' and stays in its folder."
            )
        path = self.path / name
        try:
            if path.is_symlink() and self.path.resolve() not in path.resolve().parents:
                self.refuse(name, "is a link out of its folder; put the file itself there.")
            return files.open_regular(path)
        except OSError as error:
            self.refuse(name, f"cannot be opened: {files.reason(error)}.")
        except RuntimeError as error:  # links in a ring, before Python 3.13
            self.refuse(name, f"cannot be opened: {error}.")

    def text(self, name: str, limit: int) -> str:
        """A file's text, if it has at most `limit` bytes."""
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                self.refuse(name, f"has {size:,} bytes; at most {limit:,} can be right.")
            content = file.read()
        try:
            return content.decode()
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


def parse_json(text: str, where: str, error: type[ValueError]) -> Fields:
    """The object that a JSON text is, to be read field by field."""
    return Fields(files.parse_json(text, where, error), where, error)


@dataclass(frozen=True)
class Fields:
    """A JSON object read field by field; what is missing or of another type is refused by name."""

    values: Mapping[str, Any]
    where: str
    error: type[ValueError]

    def refuse(self, why: str) -> NoReturn:
        raise self.error(f"{self.where}: {why}")

    def _get(self, key: str, kind: type, what: str) -> Any:
        value = self.values.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = repr(value)[:60] if key in self.values else "missing"
            self.refuse(f"{key!r} is {shown}; {what} belongs there.")
        return value

    def text(self, key: str) -> str:
        return str(self._get(key, str, "a text"))

    def whole(self, key: str, least: int = 0) -> int:
        value = int(self._get(key, int, "a whole number"))
        if not least <= value < LIMIT:
            self.refuse(f"{key!r} is {value}; it is at least {least} and below 2**62.")
        return value

    def wholes(self, key: str, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers from 0."""
        values = self.list(key)
        right = all(type(n) is int and 0 <= n < LIMIT for n in values)
        if not right or count not in (None, len(values)):
            many = "" if count is None else f"{count} "
            self.refuse(f"{key!r} is {str(values)[:60]}; {many}whole numbers from 0 belong there.")
        return tuple(values)

    def list(self, key: str) -> list[Any]:
        values: builtins.list[Any] = self._get(key, list, "a list")
        return values

    def object(self, key: str) -> Fields:
        return Fields(self._get(key, dict, "an object"), f"{self.where}: {key}", self.error)

    def objects(self, key: str) -> builtins.list[Fields]:
        """A list of objects."""
        values = self.list(key)
        for n, value in enumerate(values):
            if not isinstance(value, dict):
                self.refuse(f"{key}[{n}] is {str(value)[:60]}; an object belongs there.")
        return [Fields(x, f"{self.where}: {key}[{n}]", self.error) for n, x in enumerate(values)]
