"""Common parts of all commands: options and the refusal of wrong ones, files that are written, the
terminal."""

import argparse
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn, TypeVar

from ..api import TEXT
from ..api import UsageError as UsageError
from ..layout.choices import AUTO, BACKENDS, DEVICES, LOCAL_RANKS, SHM, near_word
from ..layout.files import open_regular, printable, read_text, reason, unmakable
from ..layout.layout import MICROBATCHES
from ..layout.numbers import parse_length
from ..layout.url import redacted

Drawn = TypeVar("Drawn")
_LOG, _PROGRESS = logging.getLogger("phalanx"), logging.getLogger("phalanx.progress")


class Described(Exception):
    """Raised in place of reading the words, where `DESCRIBE` is set: the parser that would read them."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__(parser.prog)
        self.parser = parser


DESCRIBE: ContextVar[bool] = ContextVar("describe", default=False)


class OutputError(Exception):
    """Standard output cannot be written to, and why."""


# ---- options


def whole(
    least: int = 1, most: int = 1 << 24, way_out: str = ""
) -> Callable[[str], int]:
    """The type of an option that takes a whole number."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise UsageError(f"is {text[:60]!r}; write a whole number.")
        many = len(text) > 30  # Python itself refuses to read very many
        if many or not least <= int(text) <= most:
            shown = "a number of very many digits" if many else f"{int(text):,}"
            raise UsageError(
                f"is {shown}; write {least:,} to {most:,}. {way_out}".strip()
            )
        return int(text)

    return parse


def length(text: str) -> int:
    """The type of an option that takes the tokens of a sequence: 4096 or 4Ki."""
    return whole(1, 1 << 28)(str(parse_length(text)))


def real(
    holds: Callable[[float], bool] = math.isfinite, meaning: str = "that is finite"
) -> Callable[[str], float]:
    """The type of an option that takes a finite number of which something more holds."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise UsageError(f"is {text[:60]!r}; write a number.") from None
        if not (math.isfinite(number) and holds(number)):
            raise UsageError(f"is {number:g}; write a number {meaning}.")
        return number

    return parse


POSITIVE = real(lambda x: x > 0, "above 0")
# Options that several commands have. A command may change what it takes or how it is explained. What
# has a type and no metavar is shown as N.
OPTIONS: dict[str, dict[str, Any]] = {
    "--backend": {"default": AUTO, "choices": BACKENDS, "help": "what carries messages"},
    "--batch": {"type": whole(), "help": "sequences of a step; default the model's"},
    "--device": {"default": AUTO, "choices": DEVICES, "help": "where it computes"},
    "--layers": {"type": whole(1, 10_000)},
    "--limit": {"type": POSITIVE, "metavar": "SECONDS"},
    "--microbatches": {"type": whole(1, MICROBATCHES), "metavar": "M"},
    "--model": {"metavar": "SHAPE", "help": "a shape's name, or a .toml file"},
    "--ranks": {"type": whole(1, LOCAL_RANKS)},
    "--seed": {"type": whole(0, (1 << 63) - 1), "default": 0},
    "--seq": {"type": length, "help": "tokens of a sequence, as 4096 or 4Ki; default the model's"},
    "--width": {"type": whole(24, 10_000), "help": "columns; default the terminal's"},
}  # fmt: skip
# Spellings of earlier versions, of commands, options and values, and what to write instead.
OLD = {"--wire": "--backend", "shared": SHM, "--stack": "--profile", "weigh": "cost"}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps prose to the terminal; indented lines are examples and stay as they are. The help of an
    option ends with its default."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for prose, group in groupby(
            text.splitlines(), lambda line: line[:1].strip() != ""
        ):
            block = list(group)
            lines += wrap(" ".join(block), width) if prose else block
        return "\n".join(indent + line for line in lines)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.option_strings and action.default not in (
            None,
            False,
            "",
            argparse.SUPPRESS,
        )
        return (
            f"{text} (default %(default)s)".strip()
            if shown and "default" not in text
            else text
        )


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, names the option nearest to an unknown one, and tries
    whether the files that a command will write can be written."""

    def __init__(self, text: str | None, *, json: bool = True, **words: str) -> None:
        """`text` is a docstring: the command in backquotes, what it does and, after an empty line, what
        its help ends with. `words` stand in it in braces."""
        text = re.sub(r"(?m)^ {4}", "", text or "")
        head, _, epilog = (text.format(**words) if words else text).partition("\n\n")
        prog, _, does = head.lstrip("`").partition("`: ")
        super().__init__(prog, allow_abbrev=False, formatter_class=_Formatter)
        self.description, self.epilog = does[:1].upper() + does[1:], epilog.rstrip()
        # words that the first argument may be, as `draw mesh`
        self.subverbs: Collection[str] = ()
        self._section: argparse._ActionsContainer = self
        self.add("-q", "--quiet", action="store_true", help="no progress lines")
        self.add("-v", "--verbose", action="store_true", help="more detail")
        if json:
            self.add(
                "--json",
                action="store_true",
                help="the result as JSON, and nothing else",
            )
        self._written: list[Callable[[argparse.Namespace], None]] = []
        self._wrong: list[str] = []
        self._may_be_empty: set[str] = set()

    def add(self, *names: str, **changes: Any) -> None:
        """An argument; what `OPTIONS` has by its name is taken from there. `empty`: an empty text is a
        value, such as the layout of one rank."""
        words = OPTIONS.get(names[0], {}) | changes
        if words.pop("empty", False):
            self._may_be_empty.add(names[0])
        if "type" in words:
            shown = {} if words.get("choices") else {"metavar": "N"}
            words = {**shown, **words, "type": _sentence(words["type"])}
        self._section.add_argument(*names, **words)

    def section(self, title: str) -> None:
        """Starts a section of the help: later options are listed under this title."""
        self._section = self.add_argument_group(title)

    def add_output(
        self, flag: str, *suffixes: str, folder: bool = False, **words: Any
    ) -> None:
        """An option that names a file or a folder to write, tried before the command's work."""
        self.add(flag, **{"metavar": "DIR" if folder else "FILE", **words})
        name = flag.lstrip("-").replace("-", "_")

        def attempt(args: argparse.Namespace) -> None:
            path = getattr(args, name)
            try_folder(path, flag) if folder else try_file(path, flag, suffixes)

        self._written.append(attempt)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A value that is wrong is written down, so that all are refused at once."""
        if problem := self._no_value(action, arg_strings):
            self._wrong.append(problem)
            return None
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._wrong.append(_explained(str(error)))
            return None

    def _no_value(self, action: argparse.Action, values: Sequence[str]) -> str:
        """Explains what an option was given in place of a value, or returns ""."""
        if not action.option_strings:
            return ""
        flag = action.option_strings[-1]
        # argparse drops the dashes of `--batch=--` and goes on with an empty list.
        if "--" in values:
            return f"{flag} is '--'; write a value."
        # A script's unset variable. To go on without the option would leave out what was asked for.
        free = (
            action.type is None
            and not action.choices
            and flag not in self._may_be_empty
        )
        if free and "" in values:
            return f"{flag} is empty; write a value, or leave {flag} out."
        return ""

    def error(self, message: str) -> NoReturn:
        # What is required may have been given, wrongly.
        self._refuse([*self._wrong, _explained(message)])

    def _refuse(self, wrong: Sequence[str]) -> NoReturn:
        shown = list(dict.fromkeys(wrong))
        if len(shown) > 1:
            shown = [
                f"{len(shown)} arguments are wrong:",
                *(f"- {text}" for text in shown),
            ]
        end = "\n" if len(shown) > 1 else " "
        raise UsageError("\n".join(shown) + f"{end}See `{self.prog} --help`.")

    def read(
        self, argv: Sequence[str], *, intermixed: bool = False
    ) -> argparse.Namespace:
        """The arguments; all that are wrong are refused, unknown ones with the nearest option.
        `intermixed`: positional arguments may stand between the options."""
        if DESCRIBE.get():
            raise Described(self)
        parse = (
            self.parse_known_intermixed_args if intermixed else self.parse_known_args
        )
        args, rest = parse(list(argv))
        known = [option for action in self._actions for option in action.option_strings]
        for word in [word for word in rest if word[:1] == "-"] or rest[:1]:
            hint = nearest_word(word.split("=")[0], known)
            if "--layouts" in known and word[:1] != "-":
                hint = " Layouts are named with --layouts."
            self._wrong.append(f"unknown argument {word[:80]!r}.{hint}")
        if self._wrong:
            self._refuse(self._wrong)
        for attempt in self._written:
            attempt(args)
        _LOG.setLevel(logging.DEBUG if args.verbose else logging.INFO)
        args.quiet = args.quiet or getattr(args, "json", False)
        _PROGRESS.setLevel(logging.WARNING if args.quiet else logging.INFO)
        if args.verbose:
            logging.basicConfig(format="%(name)s: %(message)s")  # on standard error
        return args


def _explained(message: str) -> str:
    """Rewrites an error of argparse as one of our sentences."""
    message = re.sub(r"^argument ([^:]+): (?=is |names )", r"\1 ", message)
    message = message.removeprefix("argument ")
    for old, new in OLD.items():
        if f"invalid choice: {old!r}" in message:
            message = f"{message.partition(':')[0]} {old} is now {new}"
    shown = message if len(message) < 400 else message[:397] + "..."
    return f"{shown.rstrip('.')}."


def _sentence(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse shows the words of this one kind of error only."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def chosen(
    parser: Parser,
    argv: Sequence[str],
    commands: Mapping[str, Callable[[list[str]], int]],
) -> int:
    """Run the command that the first word names."""
    if argv and argv[0] in commands:
        return commands[argv[0]](list(argv[1:]))
    parser.subverbs = commands
    parser.add("what", nargs="?", metavar="WHAT", help=", ".join(commands))
    word = parser.read(argv[:1]).what or ""
    names = f"{', '.join(commands)}.{nearest_word(word, commands)}"
    raise UsageError(f"`{parser.prog} WHAT`: WHAT is one of {names}")


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
