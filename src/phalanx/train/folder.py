"""Files of a folder that somebody else may have written: opened only when they are what they say.

Names are plain, links do not lead out, sizes are checked before anything is read, and JSON has the
types that a dataclass of ours states. Nothing here ever runs what it reads.
"""

import hashlib
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..layout import files
from ..layout.codec import key

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
LARGEST = (1 << 62) - 1  # no size and no count is larger


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
                self.refuse(
                    name, "is a link out of its folder; put the file itself there."
                )
            return files.open_regular(path)
        except OSError as error:
            self.refuse(name, f"cannot be opened: {files.reason(error)}.")
        except RuntimeError as error:  # links in a ring, before Python 3.13
            self.refuse(name, f"cannot be opened: {error}.")

    def text(self, name: str, limit: int) -> str:
        """A file's text, if it has at most `limit` bytes."""
        # which refuses a name that is not plain, and a link out
        self.open(name).close()
        return files.read_text(self.path / name, "file", self.error, limit)

    def json(self, name: str, limit: int) -> dict[str, Any]:
        """A file's JSON object, if it has at most `limit` bytes."""
        return files.parse_json(
            self.text(name, limit), str(self.path / name), self.error
        )

    def sha256(self, name: str) -> str:
        with self.open(name) as file:
            opened: Any = file  # file_digest's own type is narrower than BinaryIO
            return hashlib.file_digest(opened, "sha256").hexdigest()


def count(default: Any = MISSING, least: int = 0) -> Any:
    """A field for a whole number, or several."""
    return key(default, minimum=least, maximum=LARGEST)
