"""Checked values from files and memory that anybody may have written.

A run's folder may belong to another user, and so may the memory that its files name.
Every value read there must have the type, range and size that the caller states;
otherwise `Untrusted` is raised. Text is returned printable and on one line, so that it
cannot control a terminal or imitate output.
"""

import json
from typing import Any, NoReturn

LARGEST = (1 << 63) - 1


class Untrusted(ValueError):
    """Raised for a value that no rank and no watcher would have written."""


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Parse a JSON object. NaN, infinity and too deep nesting are refused."""
    try:
        table = json.loads(
            raw.decode() if isinstance(raw, bytes) else raw,
            # Python's JSON accepts NaN and Infinity, which the standard lacks.
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise Untrusted(f"not JSON: {error}") from None
    if not isinstance(table, dict):
        raise Untrusted("not a JSON object")
    return table


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def whole(value: Any, least: int = 0, most: int = LARGEST) -> int:
    """Check an integer of this range; a bool is refused."""
    # `type is`: a bool is an instance of int.
    if type(value) is not int or not least <= value <= most:
        raise Untrusted(f"not an integer from {least} to {most}")
    return value


def number(value: Any, most: float = 1e12) -> float:
    """Check a finite number from 0 to `most`."""
    # this comparison is false for NaN, too
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise Untrusted(f"not a number from 0 to {most:g}")
    return float(value)


def flag(value: Any) -> bool:
    """Check a bool; 0 and 1 are refused."""
    if type(value) is not bool:
        raise Untrusted("not true or false")
    return value


def text(value: Any, most: int = 4096) -> str:
    """Check a text of at most `most` characters, and return it unchanged."""
    if not isinstance(value, str) or len(value) > most:
        raise Untrusted(f"not text of at most {most} characters")
    return value


def line(value: Any, most: int = 4096) -> str:
    """Check a text of at most `most` characters, and return it as one printable
    line."""
    return one_line(text(value, most))


def items(value: Any, most: int) -> list[Any]:
    """Check a list of at most `most` values."""
    if not isinstance(value, list) or len(value) > most:
        raise Untrusted(f"not a list of at most {most} values")
    return value


def one_line(words: str) -> str:
    """Replace every non-printable character by an escape."""
    if words.isprintable():
        return words
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in words
    )
