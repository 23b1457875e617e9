"""Files and text from others: read within stated limits, and printed safely.

Opening never waits: a named pipe or a device in place of a file is refused. Links are
followed when a file is read, and replaced, not followed, when one is written. The
nesting of TOML and JSON and the size of their numbers are limited, so that no reader
runs out of stack, time or memory.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Refusal = Callable[[str], Exception]

SMALL = 1 << 20  # bytes of a TOML file: a run, a shape, a machine
DEPTH = 32  # nesting of tables and lists
INTEGER = 1 << 63  # TOML's integers have 64 bits
# Control characters except newline and tab, invisible marks and marks that change the
# direction of writing, and halves of surrogate pairs, which no encoding can write.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
# A key with very many parts. The look-behind keeps the search linear: one start per
# word.
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*"""
_DOTTED = re.compile(rf"(?<![\w-]){_PART}(?:{_PART}){{{DEPTH}}}")
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder",
}  # fmt: skip


def printable(text: str) -> str:
    """The text with characters that could control a terminal escaped, such as \x1b."""
    return _UNPRINTABLE.sub(
        lambda match: match[0].encode("unicode_escape").decode(), text
    )


def unwritable(text: str) -> str:
    """The first character that no path or text file can contain, escaped, or ""."""
    match = re.search("[\0\ud800-\udfff]", text)
    return printable(match[0]) if match else ""


def reason(error: OSError) -> str:
    """The reason for the system's refusal, without the number and the path."""
    return error.strerror or str(error) or type(error).__name__


def open_regular(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file; anything else raises an OSError at once."""
    try:
        # Without O_NONBLOCK, opening a named pipe in place of the file could wait
        # forever.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except ValueError:  # NUL, or half of a surrogate pair
        raise OSError(
            errno.EINVAL, "no file can have this name", str(path)
        ) from None
    # ENXIO: nobody reads this pipe, or it is a socket.
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        what = "it is a named pipe or a socket, not a regular file"
        raise OSError(errno.EINVAL, what, str(path)) from None
    # The kind of the opened file, not of the path, which may have changed
    # since.
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = _KINDS.get(stat.S_IFMT(kind), "no file")
        raise OSError(
            errno.EINVAL, f"it is {what}, not a regular file", str(path)
        )
    return os.fdopen(descriptor, "ab" if flags & os.O_APPEND else "rb")


def read_text(
    path: str | Path, what: str, error: Refusal, limit: int = SMALL
) -> str:
    """The text of a file of at most `limit` bytes. `what` names the file in an error."""

    def refuse(why: str) -> NoReturn:
        raise error(f"cannot read the {what} {path}: {why}.") from None

    try:
        with open_regular(Path(path)) as file:
            size = os.fstat(file.fileno()).st_size
            # One byte more than allowed shows that a file grew after its size
            # was read.
            read = b"" if size > limit else file.read(limit + 1)
    except OSError as wrong:
        refuse(reason(wrong))
    # Files of /proc have size 0: what was read counts as well.
    if max(size, len(read)) > limit:
        refuse(
            f"it has {max(size, len(read)):,} bytes, and at most {limit:,} are read"
        )
    try:
        return read.decode()
    except UnicodeDecodeError as wrong:
        why = f"byte {wrong.start:,} is not UTF-8. Name a text file."
        raise error(f"the {what} {path} is not text: {why}") from None


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's text atomically: it has this text or its old one.

    If `durable`, the text is on disk on return. A link in its place is replaced, not
    followed.
    """
    # In the same folder, since a rename cannot cross file systems.
    beside = path.with_name(f".{path.name}.{os.getpid()}.writing")
    # Left by a killed process with the same number.
    beside.unlink(missing_ok=True)
    # O_EXCL follows no link that somebody has placed there.
    try:
        descriptor = os.open(
            beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
        )
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            # The content has to be on disk before its name is: a crash must
            # not leave an empty file.
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    # The rename itself is an entry of the folder, which is flushed separately.
    if durable:
        sync_folder(path.parent)


def unmakable(folder: str | Path) -> str:
    """Explain why files cannot be written into a folder, or return "".

    The text is the end of a sentence.
    """
    if unwritable(str(folder)):
        return "is a name that no folder can have"
    whole = Path(folder)
    # The nearest folder that exists decides, because the ones below it are
    # made.
    path = next(
        each for each in (whole, *whole.parents) if os.path.lexists(each)
    )
    below = "" if path == whole else f"lies below {str(path)!r}, which "
    if path.is_dir():
        return (
            ""
            # Creating an entry needs write and search permission.
            if os.access(path, os.W_OK | os.X_OK)
            else f"{below}cannot be written to"
        )
    return f"{below}is {'no folder' if path.exists() else 'a link to nothing'}"


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: files created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_toml(text: str, where: str, error: Refusal) -> dict[str, Any]:
    """Parse a TOML text as a table."""
    if _DOTTED.search(text):  # tomllib takes quadratic time for these
        raise error(f"{where}: {_TOO_DEEP}")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise error(f"{where}: {_TOO_DEEP}") from None
    except ValueError as wrong:  # TOMLDecodeError, or too many digits
        raise error(f"{where} is not TOML: {_reworded(wrong)}.") from None
    return _limited(table, where, error)


def parse_json(text: str, where: str, error: Refusal) -> dict[str, Any]:
    """Parse a JSON text as an object. NaN, infinity and a repeated key are refused."""

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    # `dict` would keep the last of equal keys without a word.
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            raise ValueError("a key occurs twice")
        return table

    try:
        table = json.loads(
            text, parse_constant=constant, object_pairs_hook=once
        )
    # A parser recurses once for each level, so deep nesting ends its stack.
    except RecursionError:
        raise error(f"{where}: {_TOO_DEEP}") from None
    except ValueError as wrong:
        raise error(f"{where} is not JSON: {_reworded(wrong)}.") from None
    if not isinstance(table, dict):
        raise error(
            f"{where} is not a JSON object. Name a file that phalanx wrote."
        )
    return _limited(table, where, error)


_TOO_DEEP = f"tables or lists are nested more than {DEPTH} deep. Nest less."


def _reworded(wrong: ValueError) -> str:
    """Python's own message, unless it mentions Python's settings."""
    text = str(wrong).rstrip(".")
    return (
        "a number has more than 4,300 digits"
        if "int_max_str_digits" in text
        else text
    )


def _limited(
    table: dict[str, Any], where: str, error: Refusal
) -> dict[str, Any]:
    """Return the table if nothing in it is too deep or too large."""
    # Level by level instead of by recursion, which deep input would exhaust.
    level: list[Any] = [table]
    for _ in range(DEPTH):
        inner: list[Any] = []
        for each in level:
            for name, x in (
                each.items() if isinstance(each, dict) else enumerate(each)
            ):
                if isinstance(x, dict | list):
                    inner.append(x)
                elif isinstance(x, int) and not -INTEGER <= x < INTEGER:
                    what = (
                        f"{str(name)[:60]!r} is a whole number beyond 64 bits"
                    )
                    raise error(f"{where}: {what}. Write less.")
        level = inner
        if not level:
            return table
    raise error(f"{where}: {_TOO_DEEP}")
