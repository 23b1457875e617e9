"""What all verbs share: how arguments are read, how a user's mistake is told, how JSON is printed."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import NoReturn, TypeVar

from ..layout.files import printable, read_text, reason
from ..layout.layout import MICROBATCHES
from ..layout.mesh import RANKS

__all__ = [
    "OutputError", "Parser", "UsageError", "complain", "flags", "print_json", "read", "report", "save",
    "say", "screen", "silence", "suffix_of", "write",
]  # fmt: skip

Drawn = TypeVar("Drawn")


class UsageError(ValueError):
    """A command that means nothing: what is wrong with it and how to write it."""


class OutputError(Exception):
    """Standard output cannot be written to, and why."""


TEXT = 1 << 26  # bytes of a program, a recorded step, a topology
_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps prose to the terminal; indented lines are examples and stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for prose, group in groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
            block = list(group)
            lines += wrap(" ".join(block), width) if prose else block
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and names the flag nearest to an unknown one."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )

    def error(self, message: str) -> NoReturn:
        shown = message if len(message) < 400 else message[:397] + "..."
        raise UsageError(f"{shown}. See `{self.prog} --help`.")

    def read(self, argv: list[str]) -> argparse.Namespace:
        """The arguments; what is left over is refused with the nearest flag."""
        args, rest = self.parse_known_args(argv)
        if not rest:
            return self.check(args)
        known = [o for action in self._actions for o in action.option_strings]
        near = difflib.get_close_matches(rest[0].split("=")[0], known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        if (now := _RENAMED.get(rest[0].split("=")[0])) in known:
            hint = f" It is now {now}."
        raise UsageError(f"{rest[0][:80]!r} means nothing here.{hint} See `{self.prog} --help`.")

    def check(self, args: argparse.Namespace) -> argparse.Namespace:
        """The arguments, if no number among them is beyond what any command can mean."""
        for action in self._actions:
            number, name = getattr(args, action.dest, None), [*action.option_strings, action.dest]
            most = _MOST.get(action.dest, 1 << 24)
            if type(number) is float and not math.isfinite(number):
                raise UsageError(f"{name[0]} is {number}; write a finite number.")
            if type(number) is int and abs(number) > most:
                shown = str(number) if abs(number) < 10**30 else "a number of very many digits"
                raise UsageError(f"{name[0]} is {shown}; write at most {most:,}.")
        return args


_RENAMED = {"--stack": "--profile"}  # flags that had another name
# The largest numbers that flags may have; beyond them nothing but waiting would come.
_MOST = {
    "ranks": RANKS, "stages": 4096, "microbatches": MICROBATCHES, "chunks": 64, "layers": 10_000,
    "repeat": 10_000, "width": 1 << 20, "seq": 1 << 28, "sequence": 1 << 28, "seed": (1 << 63) - 1,
    "tokens": 1 << 40, "size": 1 << 40,
}  # fmt: skip


def flags(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of the named flags that were given, as they are written."""
    return [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) not in (None, False)]


def read(path: str, what: str, limit: int = TEXT) -> str:
    """The text of a user's file."""
    return read_text(path, what, UsageError, limit)


def save(path: str | Path, text: str) -> None:
    """Write what --out names: a file, or a pipe that somebody reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # Without O_NONBLOCK a named pipe that nobody reads would be waited for without end.
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason(error)}. Name another file.") from None
    except ValueError:
        raise UsageError(f"cannot write {str(path)!r}: no file can have this name.") from None


def write(
    path: str, formats: Mapping[str, Callable[[Drawn], str]], drawn: Drawn, flag: str = "--out"
) -> None:
    """Write a picture, or anything else, in the format that the file's suffix names."""
    save(path, formats[suffix_of(path, tuple(formats), flag)](drawn))


def suffix_of(path: str, formats: Sequence[str], flag: str = "--out") -> str:
    """The suffix of a file to write, if it is one of these."""
    suffix = Path(path).suffix
    if suffix not in formats:
        raise UsageError(f"{flag} {path}: the suffix says the format; use {', '.join(formats)}.")
    return suffix


def screen(width: int | None) -> tuple[int, bool]:
    """How many columns to fill, and whether in colour: only a terminal has any."""
    if width is not None and not 24 <= width <= 10_000:
        raise UsageError(f"--width is {width}; a picture has 24 to 10,000 columns.")
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if terminal else 80
    # https://no-color.org: the variable's presence counts, unless it is empty.
    return width or max(24, columns), terminal and not os.environ.get("NO_COLOR")


def say(*words: object, end: str = "\n", flush: bool = False, colour: bool = False) -> None:
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


def report(*words: object) -> None:
    """A line on how a long command goes. Where nobody reads it any more (`| head`) the command does
    not end: a run that was started is to be trained."""
    try:
        say(*words, flush=True)
    except BrokenPipeError:
        silence()


def silence() -> None:
    """What is still buffered for standard output, and what follows, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str) -> None:
    """A message on standard error; nothing in it can steer the terminal."""
    with suppress(OSError):  # where nobody listens there is nobody to tell
        print(printable(text), file=sys.stderr, flush=True)


def print_json(args: Mapping[str, object]) -> None:
    say(json.dumps(args, indent=1))
