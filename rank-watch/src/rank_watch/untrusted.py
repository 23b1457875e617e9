"""Checked values out of files and memory that anybody may have written.

A run's folder may belong to another user, and so may the memory that its files name. Whatever is read
there has the type, the range and the size that the caller states, or reading it raises `Untrusted`.
Text comes back printable and on one line, so that it cannot steer a terminal or fake a line of output.
"""

import json
from typing import Any, NoReturn

LARGEST = (1 << 63) - 1


class Untrusted(ValueError):
    """A value that no rank and no watcher would have written."""


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """The JSON object that `raw` is. NaN and infinity are refused, as is what nests too deep."""
    try:
        table = json.loads(
            raw.decode() if isinstance(raw, bytes) else raw,
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
    """An integer of that range; a bool is none."""
    if type(value) is not int or not least <= value <= most:
        raise Untrusted(f"not an integer from {least} to {most}")
    return value


def number(value: Any, most: float = 1e12) -> float:
    """A finite number from 0 to `most`."""
    # The comparison is also false for NaN.
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise Untrusted(f"not a number from 0 to {most:g}")
    return float(value)


def flag(value: Any) -> bool:
    """A bool; 0 and 1 are none."""
    if type(value) is not bool:
        raise Untrusted("not true or false")
    return value


def text(value: Any, most: int = 4096) -> str:
    """Text of at most `most` characters, as it is."""
    if not isinstance(value, str) or len(value) > most:
        raise Untrusted(f"not text of at most {most} characters")
    return value


def line(value: Any, most: int = 4096) -> str:
    """Text of at most `most` characters, as one printable line."""
    return one_line(text(value, most))


def items(value: Any, most: int) -> list[Any]:
    """A list of at most `most` values."""
    if not isinstance(value, list) or len(value) > most:
        raise Untrusted(f"not a list of at most {most} values")
    return value


def one_line(words: str) -> str:
    """The words with every character that is not plainly printable written as an escape."""
    if words.isprintable():
        return words
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in words
    )
