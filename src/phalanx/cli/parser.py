"""Parser of a command's arguments: options shared by commands, and the refusal of wrong
arguments."""

import argparse
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any, NoReturn

from ..api import UsageError
from ..layout.choices import AUTO, BACKENDS, DEVICES, LOCAL_RANKS
from ..layout.layout import MICROBATCHES
from ..layout.numbers import parse_length
from .usage import OLD, nearest_word, try_file, try_folder

_LOG, _PROGRESS = (
    logging.getLogger("phalanx"),
    logging.getLogger("phalanx.progress"),
)


class Described(Exception):
    """Raised instead of parsing if `DESCRIBE` is set; carries the parser that would
    have parsed."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__(parser.prog)
        self.parser = parser


DESCRIBE: ContextVar[bool] = ContextVar("describe", default=False)

# ---- options


def whole(
    least: int = 1, most: int = 1 << 24, way_out: str = ""
) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise UsageError(f"is {text[:60]!r}; write a whole number.")
        # Python refuses to parse numbers of thousands of digits.
        many = len(text) > 30
        if many or not least <= int(text) <= most:
            shown = (
                "a number with too many digits" if many else f"{int(text):,}"
            )
            raise UsageError(
                f"is {shown}; write {least:,} to {most:,}. {way_out}".strip()
            )
        return int(text)

    return parse


def length(text: str) -> int:
    """Parse the number of tokens in a sequence: 4096 or 4Ki."""
    return whole(1, 1 << 28)(str(parse_length(text)))


def real(
    holds: Callable[[float], bool] = math.isfinite,
    meaning: str = "that is finite",
) -> Callable[[str], float]:
    """Return the type of an option that takes a finite number with a further
    condition."""

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
# Options shared by several commands. A command may override any entry. An option with a
# type and no metavar is shown as N.
OPTIONS: dict[str, dict[str, Any]] = {
    "--backend": {"default": AUTO, "choices": BACKENDS, "help": "transport of messages"},
    "--batch": {"type": whole(), "help": "sequences in a step; default the model's"},
    "--device": {"default": AUTO, "choices": DEVICES, "help": "device to compute on"},
    "--layers": {"type": whole(1, 10_000)},
    "--limit": {"type": POSITIVE, "metavar": "SECONDS"},
    "--microbatches": {"type": whole(1, MICROBATCHES), "metavar": "M"},
    "--model": {"metavar": "SHAPE", "help": "a shape's name, or a .toml file"},
    "--ranks": {"type": whole(1, LOCAL_RANKS)},
    "--seed": {"type": whole(0, (1 << 63) - 1), "default": 0},
    "--seq": {"type": length, "help": "tokens in a sequence, such as 4096 or 4Ki; default the model's"},
    "--width": {"type": whole(24, 10_000), "help": "width in columns; default the terminal's"},
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument of a command; `flags` is empty for a positional argument."""

    flags: tuple[str, ...]
    field: str  # in the namespace that `Parser.read` returns
    default: Any
    choices: tuple[Any, ...]
    parse: Callable[[str], Any] | None
    takes_value: bool
    shown: str  # the name in an error


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of exiting and refuses all wrong arguments
    at once.

    It suggests the nearest option for an unknown one, and checks in advance that output
    files can be written.
    """

    def __init__(
        self, text: str | None, *, json: bool = True, **words: str
    ) -> None:
        """Create a parser from a docstring.

        `text` is the command in backquotes, its description and, after an empty line,
        the end of its help. `words` fill in the braces in it.
        """
        # A docstring's indent is no part of its help.
        text = re.sub(r"(?m)^ {4}", "", text or "")
        head, _, epilog = (text.format(**words) if words else text).partition(
            "\n\n"
        )
        # "`phalanx draw`: draws a step" -> "phalanx draw" and "Draws a step".
        prog, _, does = head.lstrip("`").partition("`: ")
        super().__init__(
            prog,
            # An abbreviation would change its meaning with every new option.
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=_wrapped(does[:1].upper() + does[1:]),
            epilog=_wrapped(epilog.rstrip()),
            add_help=False,
        )
        # words that the first argument may be, such as `draw mesh`
        self.subverbs: Collection[str] = ()
        self.arguments: list[Argument] = []
        self._add_argument = self.add_argument
        self._may_be_empty: set[str] = set()
        self._outputs: list[Callable[[argparse.Namespace], None]] = []
        self._wrong: list[str] = []
        self.add("-h", "--help", action="help", help="show this help and exit")
        self.add(
            "-q", "--quiet", action="store_true", help="no progress lines"
        )
        self.add("-v", "--verbose", action="store_true", help="more detail")
        if json:
            self.add(
                "--json",
                action="store_true",
                help="print only the result, as JSON",
            )

    def add(self, *names: str, **changes: Any) -> None:
        """Add an argument, with the settings in `OPTIONS` for its name.

        `empty`: an empty text is a valid value, such as the layout of one rank.
        """
        words = OPTIONS.get(names[0], {}) | changes
        if words.pop("empty", False):
            self._may_be_empty.add(names[0])
        if "action" in words:
            self._add_flag(names, words)
        else:
            self._add_value(names, words)

    def get_default(self, dest: str) -> Any:
        """Return the value of an argument that is not given."""
        for argument in self.arguments:
            if argument.field == dest and argument.default is not None:
                return argument.default
        return super().get_default(dest)

    def _add_flag(self, names: Sequence[str], words: dict[str, Any]) -> None:
        action = self._add_argument(*names, **words)
        self.arguments.append(
            Argument(
                tuple(names), action.dest, None, (), None, False, names[-1]
            )
        )

    def _add_value(self, names: Sequence[str], words: dict[str, Any]) -> None:
        """Add an argument with a value.

        argparse does not get its type, choices or default: it stops at the first wrong
        value and would not report the others.
        """
        choices = tuple(words.pop("choices", None) or ())
        default = words.pop("default", None)
        parse = words.pop("type", None)
        if choices:
            # Shown as {a,b,c} where nothing else names the value.
            words.setdefault("metavar", f"{{{','.join(map(str, choices))}}}")
        elif parse is not None:
            words.setdefault("metavar", "N")
        optional = names[0].startswith("-")
        if optional:
            words["help"] = _with_default(words.get("help", ""), default)
        shown = names[-1] if optional else words.get("metavar", names[0])
        # The argument's place in the list, as it does not exist yet.
        reader = self._reader(len(self.arguments))
        action = self._add_argument(*names, type=reader, **words)
        self.arguments.append(
            Argument(
                flags=tuple(names) if optional else (),
                field=action.dest,
                # A default may be text, and is read like a value that was
                # given.
                default=parse(default)
                if parse and isinstance(default, str)
                else default,
                choices=choices,
                parse=parse,
                takes_value=True,
                shown=shown,
            )
        )

    def _reader(self, index: int) -> Callable[[str], Any]:
        """Return the type passed to argparse: it records a wrong value instead of
        raising."""

        # argparse stops at the first error; this lets it go on.
        def read(text: str) -> Any:
            argument = self.arguments[index]
            try:
                return self._value(argument, text)
            except ValueError as error:
                reason = str(error)
                # Our own messages continue the sentence that begins with the option.
                joint = " " if reason.startswith(("is ", "names ")) else ": "
                self._wrong.append(
                    _sentence(f"{argument.shown}{joint}{reason}")
                )
                return None

        return read

    def _value(self, argument: Argument, text: str) -> Any:
        free = argument.parse is None and not argument.choices
        may_be_empty = self._may_be_empty.intersection(argument.flags)
        # Probably a script's unset variable. Ignoring the option would skip what was
        # asked for.
        if free and argument.flags and not text and not may_be_empty:
            raise UsageError(
                f"is empty; write a value, or leave {argument.shown} out."
            )
        value = text if argument.parse is None else argument.parse(text)
        if argument.choices and value not in argument.choices:
            # A spelling of an earlier version: name the present one.
            if text in OLD:
                raise UsageError(f"{text} is now {OLD[text]}.")
            known = [str(choice) for choice in argument.choices]
            raise UsageError(
                f"is {text[:60]!r}; choose from {', '.join(known)}."
            )
        return value

    def section(self, title: str) -> None:
        """Start a section of the help: later options are listed under this title."""
        self._add_argument = self.add_argument_group(title).add_argument

    def add_output(
        self, flag: str, *suffixes: str, folder: bool = False, **words: Any
    ) -> None:
        """Add an option that names a file or folder to write, checked before the
        command's work."""
        self.add(flag, **{"metavar": "DIR" if folder else "FILE", **words})
        name = flag.lstrip("-").replace("-", "_")

        def attempt(args: argparse.Namespace) -> None:
            path = getattr(args, name)
            # Checked before hours of work, not after them.
            try_folder(path, flag) if folder else try_file(
                path, flag, suffixes
            )

        self._outputs.append(attempt)

    @property
    def options(self) -> dict[str, Argument]:
        """Arguments with a flag, by each of their flags."""
        return {flag: one for one in self.arguments for flag in one.flags}

    def error(self, message: str) -> NoReturn:
        """Refuse the command. Called by argparse."""
        # A missing required argument may have been given, but wrongly.
        self._refuse(
            [*self._wrong, _sentence(message.removeprefix("argument "))]
        )

    def _refuse(self, wrong: Sequence[str]) -> NoReturn:
        # argparse may report what was recorded already.
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
        """Parse the arguments; refuse all wrong ones at once, unknown ones with the
        nearest option.

        `intermixed`: positional arguments may stand between the options.
        """
        if DESCRIBE.get():
            raise Described(self)
        words = self._without_bare_dashes(argv)
        parse = (
            self.parse_known_intermixed_args
            if intermixed
            else self.parse_known_args
        )
        args, rest = parse(words)
        # Unknown options, or else the first positional argument too many.
        for word in [word for word in rest if word[:1] == "-"] or rest[:1]:
            hint = nearest_word(word.split("=")[0], self.options)
            if "--layouts" in self.options and word[:1] != "-":
                hint = " Layouts are named with --layouts."
            self._wrong.append(f"unknown argument {word[:80]!r}.{hint}")
        if self._wrong:
            self._refuse(self._wrong)
        # Defaults last: None shows that an option was not given.
        for argument in self.arguments:
            if getattr(args, argument.field, None) is None:
                setattr(args, argument.field, argument.default)
        for attempt in self._outputs:
            attempt(args)
        _LOG.setLevel(logging.DEBUG if args.verbose else logging.INFO)
        # With --json standard output has nothing but the result.
        args.quiet = args.quiet or getattr(args, "json", False)
        _PROGRESS.setLevel(logging.WARNING if args.quiet else logging.INFO)
        if args.verbose:
            # To standard error.
            logging.basicConfig(format="%(name)s: %(message)s")
        return args

    def _without_bare_dashes(self, argv: Sequence[str]) -> list[str]:
        """Return the words without options whose value is `--`, which are refused.

        argparse would drop the dashes and continue with an empty list.
        """
        # Options that take a value, under all their names.
        valued = {
            flag for flag, one in self.options.items() if one.takes_value
        }
        words: list[str] = []
        for word in argv:
            flag, given, value = word.partition("=")
            # "--out=--"
            if flag in valued and given and value == "--":
                self._wrong.append(f"{flag} is '--'; write a value.")
            # "--out --"
            elif word == "--" and words and words[-1] in valued:
                self._wrong.append(f"{words.pop()} is '--'; write a value.")
            else:
                words.append(word)
        return words


def _wrapped(text: str) -> str:
    """Wrap prose to the terminal's width. Indented lines are examples and are kept."""
    width = max(11, shutil.get_terminal_size().columns - 2)
    lines: list[str] = []
    for prose, group in groupby(
        text.splitlines(), lambda line: line[:1].strip() != ""
    ):
        block = list(group)
        lines += wrap(" ".join(block), width) if prose else block
    return "\n".join(lines)


def _with_default(text: str, default: object) -> str:
    """Return the help of an option, with its default at the end unless it names one."""
    # Numbers and words are worth showing; absence is not.
    if default in (None, False, "") or "default" in text:
        return text
    # argparse reads % as a format.
    return f"{text} (default {default})".strip().replace("%", "%%")


def _sentence(text: str) -> str:
    shown = text if len(text) < 400 else text[:397] + "..."
    return f"{shown.rstrip('.')}."


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
