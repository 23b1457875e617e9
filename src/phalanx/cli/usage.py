"""Shared parts of all commands: words that are nearly right, output files, the
terminal."""

import argparse
import json
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ..api import TEXT
from ..api import UsageError as UsageError
from ..layout.choices import SHM, near_word
from ..layout.files import (
    open_regular,
    printable,
    read_text,
    reason,
    unmakable,
)
from ..layout.url import redacted

Drawn = TypeVar("Drawn")
_LOG, _PROGRESS = (
    logging.getLogger("phalanx"),
    logging.getLogger("phalanx.progress"),
)


# Spellings of earlier versions, of commands, options and values, and their
# replacements.
OLD = {
    "--wire": "--backend",
    "shared": SHM,
    "--stack": "--profile",
    "weigh": "cost",
}


class OutputError(Exception):
    """Raised if standard output cannot be written to, with the reason."""


def nearest_word(
    word: str, known: Collection[str], cutoff: float = 0.5
) -> str:
    """Return a sentence that suggests the nearest known word, or ""."""
    # A word of an earlier version is no near miss: say what it is now.
    if OLD.get(word) in known:
        return f" It is now {OLD[word]}."
    return near_word(word, known, cutoff).replace("'", "")


# ---- files


def read(path: str, what: str) -> str:
    """Return the text of a user's file."""
    return read_text(path, what, UsageError, TEXT)


def refuse_irregular(file: Path, way_out: str, what: str = "") -> None:
    """Refuse an input file that is a pipe, a folder, or missing."""
    try:
        open_regular(file).close()
    except OSError as error:
        raise UsageError(
            f"{what}cannot read {file}: {reason(error)}. {way_out}"
        ) from None


def save(path: str | Path, text: str) -> None:
    """Write text to what --out names: a file, or a pipe that somebody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK, opening a named pipe that nobody reads would wait forever.
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        with os.fdopen(
            descriptor, "w", encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {reason(error)}. Name another file."
        ) from None
    except ValueError:
        raise UsageError(
            f"cannot write {str(path)!r}: this is not a valid file name."
        ) from None


def write(
    path: str, formats: Mapping[str, Callable[[Drawn], str]], drawn: Drawn
) -> None:
    """Write what --out names, in the format of its suffix."""
    _refuse_suffix(path, tuple(formats), "--out")
    save(path, formats[Path(path).suffix](drawn))


def _refuse_suffix(path: str, suffixes: Sequence[str], flag: str) -> None:
    if suffixes and Path(path).suffix not in suffixes:
        raise UsageError(
            f"{flag} {path}: the suffix selects the format; use {', '.join(suffixes)}."
        )


def try_file(
    path: str | None, flag: str = "--out", formats: Iterable[str] = ()
) -> None:
    """Refuse an output file that cannot be written, or whose suffix names no format.

    A file created for this test is deleted.
    """
    if path is not None:
        _refuse_suffix(path, tuple(formats), flag)
        if why := _unwritable(path):
            raise UsageError(
                f"{flag}: cannot write {path}: {why}. Name another file."
            )


def try_folder(path: str | None, flag: str = "--out") -> None:
    """Refuse an output folder that cannot be created, or in which no file can be
    written."""
    if path is not None and (why := unmakable(path)):
        raise UsageError(
            f"{flag}: cannot write into {path}: it {why}. Name another folder."
        )


def _unwritable(path: str | Path) -> str:
    """Explain why a file cannot be written, or return "". Its content is kept."""
    try:
        # a link is followed, as it will be when the file is written
        real = os.path.realpath(path)
        kind = os.stat(real).st_mode if os.path.exists(real) else None
        if kind is not None and stat.S_ISDIR(kind):
            return "it is a directory"
        # opening and closing a pipe would end its reader
        if kind is not None and not stat.S_ISREG(kind):
            return "" if os.access(real, os.W_OK) else "Permission denied"
        os.close(
            os.open(
                real,
                os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC,
                0o666,
            )
        )
        if kind is None:
            os.unlink(real)
    except OSError as error:
        return reason(error)
    except ValueError:  # NUL, or half of a surrogate pair
        return "this is not a valid file name"
    return ""


# ---- the terminal

_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


def screen(width: int | None = None) -> tuple[int, bool]:
    """Return the width of the terminal, and True if it shows colours."""
    terminal = sys.stdout.isatty()
    # 80 columns where nobody looks at a terminal.
    columns = shutil.get_terminal_size().columns if terminal else 80
    # https://no-color.org: the variable counts if it is present and not empty
    return width or max(24, columns), terminal and not os.environ.get(
        "NO_COLOR"
    )


def say(
    *words: object, end: str = "\n", flush: bool = False, colour: bool = False
) -> None:
    """Print for the user.

    Text from a file or an argument cannot control the terminal: control characters are
    printed as escapes, except the colours of our own pictures (`colour`).
    """
    # Escape sequences of ours are kept; all other text is made printable.
    text = " ".join(map(str, words))
    parts = _COLOURS.split(text) if colour else [text]
    # Odd parts are colours. Characters that no encoding has are escaped by now.
    shown = "".join(
        part if n % 2 else printable(part) for n, part in enumerate(parts)
    )
    try:
        sys.stdout.write(shown + end)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (
        UnicodeEncodeError
    ):  # the terminal cannot show line and dot characters
        sys.stdout.write(shown.encode("ascii", "replace").decode() + end)
    except OSError as error:
        raise OutputError(reason(error)) from None


def progress(*words: object) -> None:
    """Print a progress line, unless --quiet or --json is given.

    If the reader of the output stops (`| head`), the command continues: a started run
    should be trained.
    """
    if not _PROGRESS.isEnabledFor(logging.INFO):
        return
    try:
        say(*words, flush=True)
    except BrokenPipeError:
        silence()


def hush() -> None:
    """Print no more progress: another rank does."""
    _PROGRESS.setLevel(logging.WARNING)


def silence() -> None:
    """Discard buffered and later standard output."""
    # The number of the stream stays open, so no file can get it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """Print a message on standard error, with control characters escaped and secrets in
    URLs hidden."""
    with suppress(OSError):  # standard error may be closed
        print(printable(redacted(text)), file=sys.stderr, flush=True)


def print_json(value: Mapping[str, object]) -> None:
    say(json.dumps(value, indent=1))


def result(
    args: argparse.Namespace,
    figures: Mapping[str, object],
    text: str,
    *,
    good: object = True,
) -> int:
    """Print the result of a command: its figures with --json, else its text. Return the
    exit code."""
    if args.json:
        print_json(figures)
    else:
        say(text.rstrip("\n"))
    return 0 if good else 1
