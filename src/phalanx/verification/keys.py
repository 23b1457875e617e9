"""Tests of a run file's keys: valid values are kept, and wrong ones are refused."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..layout.run import Run

NAME = "run.toml"
# Values that no key of this kind may have: of another type, or not a finite number.
_NOT_A_NUMBER = ("maybe", "-1", "nan", "1e400", "[[1]]", "{a=1}")
_NOT_A_TEXT = ("[[1]]", "{a=1}")
# Reading a run loads or looks up the values of these keys.
_LOOKED_UP = {"model", "data", "layout", "out"}


def key_faults(run: Run) -> Iterator[str]:
    """Describe keys whose wrong values are accepted, or whose valid values are lost."""
    folder = Run.parse("", "configs/small.toml").out
    if folder != "runs/small":
        yield f"a run of configs/small.toml writes to {folder!r}"
    text = str(run)
    draw = random.Random(text)
    for key, value in _leaves(tomllib.loads(text)):
        wrong = (
            _NOT_A_NUMBER if isinstance(value, int | float) else _NOT_A_TEXT
        )
        words = [f"{key}={value}" for value in wrong]
        # Most often a wrong value, else a key that does not exist.
        word = draw.choice([*words, f"{key}x=1"])
        said = _refusal(text, word)
        if key.rpartition(".")[2] not in said:
            yield f"a run with {word} is not refused with this key: {said or 'it is accepted'}"
        if isinstance(value, bool):
            yield from _lost(text, key, not value)


def _leaves(
    table: dict[str, Any], inside: str = ""
) -> Iterator[tuple[str, Any]]:
    """The keys and values of a table and its tables, without those of the model."""
    for name, value in table.items():
        key = f"{inside}{name}"
        if key in _LOOKED_UP:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _refusal(text: str, word: str) -> str:
    """The error of a run with one more word on its command line; "" if it is accepted."""
    try:
        Run.parse(text, NAME, (word,))
    except ValueError as error:
        return str(error)
    return ""


def _lost(text: str, key: str, value: bool) -> Iterator[str]:
    """Change a key's value, write the run as text and compare the value read back."""
    word = f"{key}={json.dumps(value)}"
    try:
        changed = Run.parse(text, NAME, (word,))
    # Some keys exclude one another.
    except ValueError:
        return
    read: Any = asdict(Run.parse(str(changed), NAME))
    for name in key.split("."):
        # `async` is no name in Python.
        read = read["asynchronous" if name == "async" else name]
    if read is not value:
        yield f"a run with {word} is read back with {read!r}"
