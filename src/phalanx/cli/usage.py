"""Common parts of all commands: words that are nearly right, files that are written, the terminal."""

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
from ..layout.files import open_regular, printable, read_text, reason, unmakable
from ..layout.url import redacted

Drawn = TypeVar("Drawn")
_LOG, _PROGRESS = logging.getLogger("phalanx"), logging.getLogger("phalanx.progress")


# Spellings of earlier versions, of commands, options and values, and what to write instead.
OLD = {"--wire": "--backend", "shared": SHM, "--stack": "--profile", "weigh": "cost"}


class OutputError(Exception):
    """Standard output cannot be written to, and why."""


def nearest_word(word: str, known: Collection[str], cutoff: float = 0.5) -> str:
    """A sentence that proposes what somebody may have meant."""
    if OLD.get(word) in known:
        return f" It is now {OLD[word]}."
    return near_word(word, known, cutoff).replace("'", "")


# ---- files


def read(path: str, what: str) -> str:
    """The text of a user's file."""
    return read_text(path, what, UsageError, TEXT)


def refuse_irregular(file: Path, way_out: str, what: str = "") -> None:
    """Refuse a file to read that is a pipe, a folder, or not there."""
    try:
        open_regular(file).close()
    except OSError as error:
        raise UsageError(
            f"{what}cannot read {file}: {reason(error)}. {way_out}"
        ) from None


def save(path: str | Path, text: str) -> None:
    """Write what --out names: a file, or a pipe that somebody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK a named pipe that nobody reads would be waited for without end.
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
            f"cannot write {str(path)!r}: no file can have this name."
        ) from None


def write(
    path: str, formats: Mapping[str, Callable[[Drawn], str]], drawn: Drawn
) -> None:
    """Write what --out names in the format of its suffix."""
    _refuse_suffix(path, tuple(formats), "--out")
    save(path, formats[Path(path).suffix](drawn))


def _refuse_suffix(path: str, suffixes: Sequence[str], flag: str) -> None:
    if suffixes and Path(path).suffix not in suffixes:
        raise UsageError(
            f"{flag} {path}: the suffix says the format; use {', '.join(suffixes)}."
        )


def try_file(
    path: str | None, flag: str = "--out", formats: Iterable[str] = ()
) -> None:
    """Refuse what an option names, if no file can be written there, or not in a format that its
    suffix names. A file that was made to try it is removed."""
    if path is not None:
        _refuse_suffix(path, tuple(formats), flag)
        if why := _unwritable(path):
            raise UsageError(f"{flag}: cannot write {path}: {why}. Name another file.")


def try_folder(path: str | None, flag: str = "--out") -> None:
    """Refuse what an option names, if there can be no folder in which files can be written."""
    if path is not None and (why := unmakable(path)):
        raise UsageError(
            f"{flag}: cannot write into {path}: it {why}. Name another folder."
        )


def _unwritable(path: str | Path) -> str:
    """Explains why a file cannot be written, or returns "". The file's content is kept."""
    try:
        # A link is followed, as it will be when the file is written.
        real = os.path.realpath(path)
        kind = os.stat(real).st_mode if os.path.exists(real) else None
        if kind is not None and stat.S_ISDIR(kind):
            return "it is a directory"
        # Opening and closing a pipe would end whoever reads it.
        if kind is not None and not stat.S_ISREG(kind):
            return "" if os.access(real, os.W_OK) else "Permission denied"
        os.close(
            os.open(
                real, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
            )
        )
        if kind is None:
            os.unlink(real)
    except OSError as error:
        return reason(error)
    except ValueError:  # NUL, or half of a surrogate pair
        return "no file can have this name"
    return ""


# ---- the terminal

_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


def screen(width: int | None = None) -> tuple[int, bool]:
    """The width of the terminal, and whether it shows colours."""
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if terminal else 80
    # https://no-color.org: the variable's presence counts, unless it is empty.
    return width or max(24, columns), terminal and not os.environ.get("NO_COLOR")


def say(
    *words: object, end: str = "\n", flush: bool = False, colour: bool = False
) -> None:
    """Print for the user. What came from a file or an argument cannot steer the terminal: control
    characters are printed as escapes, but for the colours of a picture of ours (`colour`)."""
    text = " ".join(map(str, words))
    parts = _COLOURS.split(text) if colour else [text]
    # Colours are the odd parts. What no encoding can write is an escape by now.
    shown = "".join(part if n % 2 else printable(part) for n, part in enumerate(parts))
    try:
        sys.stdout.write(shown + end)
        if flush:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except UnicodeEncodeError:  # a terminal that cannot show our lines and dots
        sys.stdout.write(shown.encode("ascii", "replace").decode() + end)
    except OSError as error:
        raise OutputError(reason(error)) from None


def progress(*words: object) -> None:
    """A line on how a long command goes; none with --quiet or --json. Where nobody reads it any more
    (`| head`) the command does not end: a run that was started is to be trained."""
    if not _PROGRESS.isEnabledFor(logging.INFO):
        return
    try:
        say(*words, flush=True)
    except BrokenPipeError:
        silence()


def hush() -> None:
    """No more lines of progress: another rank prints them."""
    _PROGRESS.setLevel(logging.WARNING)


def silence() -> None:
    """Discards buffered and later standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """A message on standard error; nothing in it can steer the terminal, and secrets of URLs are hidden."""
    with suppress(OSError):  # where nobody listens
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
    """Print the result of a command, its figures with --json, else its text; the exit code."""
    if args.json:
        print_json(figures)
    else:
        say(text.rstrip("\n"))
    return 0 if good else 1
