"""Whether what a command will write can be written, tried before its work.

Nothing is left behind: a file or a folder that was made to try it is removed again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..layout.files import reason
from .usage import UsageError, suffix_of

__all__ = ["unmakable", "try_file", "try_folder", "unwritable_file"]


def try_file(path: str | None, flag: str = "--out", formats: Iterable[str] = ()) -> None:
    """Refuse what a flag names, if no file can be written there, or not in a format that its suffix
    names. Nothing is refused if nothing is named."""
    if path is None:
        return
    if formats:
        suffix_of(path, tuple(formats), flag)
    if why := unwritable_file(path):
        raise UsageError(f"{flag}: cannot write {path}: {why}. Name another file.")


def try_folder(path: str | None, flag: str = "--out") -> None:
    """Refuse what a flag names, if there can be no folder in which files can be written."""
    if path is not None and (why := unmakable(path)):
        raise UsageError(f"{flag}: cannot write into {path}: {why}. Name another folder.")


def unwritable_file(path: str | Path) -> str:
    """Why a file cannot be written; empty if it can. What it holds is kept."""
    try:
        # A link is followed, as it will be when the file is written.
        real = os.path.realpath(path)
        kind = os.stat(real).st_mode if os.path.exists(real) else None
        if kind is not None and stat.S_ISDIR(kind):
            return "it is a directory"
        # Opening and closing a pipe would end whoever reads it.
        if kind is not None and not stat.S_ISREG(kind):
            return "" if os.access(real, os.W_OK) else "Permission denied"
        os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
        if kind is None:
            os.unlink(real)
    except OSError as error:
        return reason(error)
    except ValueError:  # NUL, or half of a surrogate pair
        return "no file can have this name"
    return ""


def unmakable(folder: str | Path) -> str:
    """Why a folder cannot be made, or files in it; empty if they can."""
    path = Path(folder)
    missing: list[Path] = []
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        return unwritable_file(path / f".{os.getpid()}.trying")
    except OSError as error:
        return reason(error)
    except ValueError:
        return "no folder can have this name"
    finally:
        for made in missing:  # the innermost first
            with suppress(OSError, ValueError):
                made.rmdir()
