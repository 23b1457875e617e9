"""What all verbs share: how arguments are read, how a user's mistake is told, how JSON is printed."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

__all__ = ["Parser", "UsageError", "flags", "print_json", "read", "screen", "write"]


Drawn = TypeVar("Drawn")


class UsageError(ValueError):
    """A command that means nothing: what is wrong with it and how to write it."""


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and names the flag nearest to an unknown one."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def read(self, argv: list[str]) -> argparse.Namespace:
        """The arguments; what is left over is refused with the nearest flag."""
        said, rest = self.parse_known_args(argv)
        if not rest:
            return said
        known = [o for action in self._actions for o in action.option_strings]
        near = difflib.get_close_matches(rest[0].split("=")[0], known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"{rest[0]!r} means nothing here.{hint} See `{self.prog} --help`.")


def flags(said: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the named flags that were given, as they are written."""
    return [f"--{n.replace('_', '-')}" for n in names if getattr(said, n) not in (None, False)]


def read(path: str, what: str) -> str:
    """The text of a user's file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"the {what} {path} is not text.") from None


def write(
    path: str, formats: Mapping[str, Callable[[Drawn], str]], drawn: Drawn, flag: str = "--out"
) -> None:
    """Write a picture, or anything else, in the format that the file's suffix names."""
    suffix = Path(path).suffix
    if suffix not in formats:
        raise UsageError(f"{flag} {path}: the suffix says the format; use {', '.join(formats)}.")
    try:
        Path(path).write_text(formats[suffix](drawn), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from None


def screen(width: int | None) -> tuple[int, bool]:
    """How many columns to fill, and whether in colour: only a terminal has any."""
    if width is not None and width < 24:
        raise UsageError(f"--width is {width}; a picture needs 24 columns or more.")
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if terminal else 80
    # https://no-color.org: the variable's presence counts, unless it is empty.
    return width or max(24, columns), terminal and not os.environ.get("NO_COLOR")


def print_json(said: Mapping[str, object]) -> None:
    json.dump(said, sys.stdout, indent=1)
    sys.stdout.write("\n")
