"""The folder `.ranks` of a run: small files through which watchers and observers find
each other.

With several hosts this folder is all that they share. Its files may be anybody's: links
are not followed, irregular or too large files are refused, and files are replaced,
never modified.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".ranks"
ASKED = (
    "asked"  # replaced by an observer on another host to make watchers answer
)
LARGEST = 1 << 23  # maximum bytes of a file
_MOST_FILES = 1 << 14
# O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
_READ = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
)
_APPEND = (
    os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)
# O_EXCL and O_NOFOLLOW: never a file that somebody has put there.
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class SmallFile:
    """A file's content, its owner, and its modification time by the file server's
    clock."""

    raw: bytes
    owner: int
    written: int  # nanoseconds


class RanksFolder:
    """The folder `.ranks` in a run's folder `out`. It is opened anew for each use, as
    it may be replaced."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @contextmanager
    def _opened(self) -> Iterator[int]:
        with opened_folder(self.out) as outer:
            # Relative to the outer folder's descriptor, so that replacing a
            # path in between has no effect.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            folder = os.open(FOLDER, flags, dir_fd=outer)
        try:
            yield folder
        finally:
            os.close(folder)

    def make(self) -> None:
        """Create the folder; a link in its place is removed."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / FOLDER
        # A link could lead the watcher's files anywhere.
        if path.is_symlink():
            path.unlink()
        path.mkdir(exist_ok=True)

    @property
    def owner(self) -> int:
        """The user who owns the folder."""
        with self._opened() as folder:
            return os.fstat(folder).st_uid

    def names(self) -> list[str]:
        """Return the sorted names of its files; empty if the folder does not exist."""
        names = list[str]()
        with (
            suppress(OSError),
            self._opened() as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                # Anybody may fill the folder; the limit bounds time and
                # memory.
                if len(names) == _MOST_FILES:
                    break
                names.append(entry.name)
        return sorted(names)

    def read(self, name: str, most: int = LARGEST) -> SmallFile:
        """Read a regular file of at most `most` bytes; raise OSError for anything
        else."""
        with self._opened() as folder:
            # Opened even to get its time alone: that makes NFS ask the server again.
            file = os.open(name, _READ, dir_fd=folder)
        with os.fdopen(file, "rb") as opened:
            # Checked on the open file: the path may mean another one by now.
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most:
                raise OSError(
                    f"{name} is not a regular file of at most {most:,} bytes"
                )
            # One byte more shows a file that has grown since.
            raw = opened.read(most + 1)
        if len(raw) > most:
            raise OSError(f"{name} has more than {most:,} bytes")
        return SmallFile(raw, status.st_uid, status.st_mtime_ns)

    def write(self, name: str, text: str = "") -> None:
        """Replace a file, or a link in its place."""
        with self._opened() as folder:
            replace_file(folder, name, text)

    def remove(self, name: str) -> None:
        with suppress(OSError), self._opened() as folder:
            os.unlink(name, dir_fd=folder)


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Open a folder; its files stay accessible whatever happens to the path."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def replace_file(folder: int, name: str, text: str) -> None:
    """Replace a file of an open folder atomically, even if it is a link."""
    # Hidden and random, so that neither readers nor other writers meet it.
    beside = f".{name}.{secrets.token_hex(8)}"
    file = os.open(beside, _MAKE, 0o644, dir_fd=folder)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(text)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    # Also after Ctrl-C: a hidden file would stay forever.
    except BaseException:
        with suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise


def append_to_file(folder: int, name: str, text: str) -> None:
    """Append to an existing regular file of an open folder; raise OSError for anything
    else."""
    file = os.open(name, _APPEND, dir_fd=folder)
    with os.fdopen(file, "ab") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is not a regular file")
        opened.write(text.encode())
