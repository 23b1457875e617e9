"""The folder `.ranks` of a run: small files by which watchers and who looks find each other.

On several hosts the folder is all that they share. Its files may be anybody's: links are followed
nowhere, what is no regular file or too large is refused, and a file is replaced, never written into.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".ranks"
ASKED = "asked"  # who looks from another host replaces it, and watchers answer
LARGEST = 1 << 23  # bytes of a file that are read
_MOST_FILES = 1 << 14
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class SmallFile:
    """A file as it was read: its bytes, its owner, and when it was written, by the file server's clock."""

    raw: bytes
    owner: int
    written: int  # ns


class RanksFolder:
    """The folder `.ranks` in a run's folder `out`, opened anew for each use: it may be replaced."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with opened_folder(self.out) as outer:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folder = os.open(FOLDER, flags, dir_fd=outer)
        try:
            yield folder
        finally:
            os.close(folder)

    def make(self) -> None:
        """Makes the folder; what lies there in its place as a link is removed."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / FOLDER
        if path.is_symlink():
            path.unlink()
        path.mkdir(exist_ok=True)

    @property
    def owner(self) -> int:
        """The user whom the folder belongs to."""
        with self._opened() as folder:
            return os.fstat(folder).st_uid

    def names(self) -> list[str]:
        """The names of its files in order; none where there is no such folder."""
        names = list[str]()
        with suppress(OSError), self._opened() as folder, os.scandir(folder) as entries:
            for entry in entries:
                if len(names) == _MOST_FILES:
                    break
                names.append(entry.name)
        return sorted(names)

    def read(self, name: str, most: int = LARGEST) -> SmallFile:
        """A regular file of at most `most` bytes; anything else is an OSError."""
        with self._opened() as folder:
            # Opened also for its time alone: NFS asks the server anew then.
            file = os.open(name, _READ, dir_fd=folder)
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise OSError(f"{name} is not a regular file of at most {most:,} bytes")
            raw = opened.read(most + 1)
        if len(raw) > most:
            raise OSError(f"{name} has more than {most:,} bytes")
        return SmallFile(raw, status.st_uid, status.st_mtime_ns)

    def write(self, name: str, text: str = "") -> None:
        """Replaces a file, or a link in its place."""
        with self._opened() as folder:
            replace_file(folder, name, text)

    def remove(self, name: str) -> None:
        with suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """The descriptor of a folder, by which its files are named whatever becomes of the path."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def replace_file(folder: int, name: str, text: str) -> None:
    """Gives a file of an open folder this text at once; a link in its place is replaced, too."""
    beside = f".{name}.{secrets.token_hex(8)}"
    file = os.open(beside, _MAKE, 0o644, dir_fd=folder)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise


def append_to_file(folder: int, name: str, text: str) -> None:
    """Appends to a regular file of an open folder; anything else is an OSError, as is no file."""
    file = os.open(name, _APPEND, dir_fd=folder)
    with os.fdopen(file, "ab") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is not a regular file")
        opened.write(text.encode())
