"""Safe access to a folder that somebody else may have written.

Names are plain, links must not lead out of the folder, sizes are checked before
reading, and JSON must have the types of one of our dataclasses. Nothing that is read is
ever executed.
"""

import hashlib
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ..layout import files
from ..layout.codec import key

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
LARGEST = (1 << 62) - 1  # upper limit of every size and count


@dataclass(frozen=True)
class Folder:
    """A folder whose files are opened by plain names. Refusals raise `error`."""

    path: Path
    error: type[ValueError]

    def refuse(self, name: str, why: str) -> NoReturn:
        raise self.error(f"{self.path / name}: {why}")

    def open(self, name: str) -> BinaryIO:
        """Open a regular file of this folder for reading."""
        if not _PLAIN.fullmatch(name):
            raise self.error(
                f"{self.path}: the file name {name[:80]!r} is not plain; a name has letters,"
                " digits, '.', '-' and '_' and stays in its folder."
            )
        path = self.path / name
        try:
            if (
                # A link inside the folder is followed.
                path.is_symlink()
                and self.path.resolve() not in path.resolve().parents
            ):
                self.refuse(
                    name,
                    "is a link out of its folder; put the file itself there.",
                )
            return files.open_regular(path)
        except OSError as error:
            self.refuse(name, f"cannot be opened: {files.reason(error)}.")
        except RuntimeError as error:  # a loop of links, before Python 3.13
            self.refuse(name, f"cannot be opened: {error}.")

    def text(self, name: str, limit: int) -> str:
        """Return a file's text; refuse more than `limit` bytes."""
        # refuses a name that is not plain, and a link out of the folder
        self.open(name).close()
        return files.read_text(self.path / name, "file", self.error, limit)

    def json(self, name: str, limit: int) -> dict[str, Any]:
        """Return a file's JSON object; refuse more than `limit` bytes."""
        return files.parse_json(
            self.text(name, limit), str(self.path / name), self.error
        )

    def sha256(self, name: str) -> str:
        with self.open(name) as file:
            opened: Any = (
                file  # file_digest's own type is narrower than BinaryIO
            )
            return hashlib.file_digest(opened, "sha256").hexdigest()


def count(default: Any = MISSING, least: int = 0) -> Any:
    """A dataclass field for a whole number, or for several."""
    return key(default, minimum=least, maximum=LARGEST)
