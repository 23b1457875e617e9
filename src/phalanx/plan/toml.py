"""Frozen values to TOML and back, strictly: unknown keys, missing keys and wrong types are refused
together, each with its place and the nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..layout.files import parse_toml, read_text

__all__ = ["MachineError", "dump", "load", "parse", "value"]

T = TypeVar("T")


class MachineError(ValueError):
    """What is wrong with a machine, a device or a cluster that was named or described."""


def load(kind: type[T], path: Path, what: str) -> T:
    """The value that a file of the user's holds."""
    return parse(kind, read_text(path, what, MachineError), f"{what} {path}")


def parse(kind: type[T], text: str, where: str) -> T:
    """The value that TOML text holds; `where` is how an error names the text."""
    return value(kind, parse_toml(text, where, MachineError), where)


def value(kind: type[T], said: Mapping[str, Any], where: str) -> T:
    """The frozen value of a kind from what TOML says of it."""
    wrong: list[str] = []
    found = _value(kind, said, "", wrong)
    if wrong:
        raise MachineError(f"{where}: " + "; ".join(wrong) + ".")
    made: T = found
    return made


def _value(kind: Any, said: Any, place: str, wrong: list[str]) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (kind,) = (part for part in parts if part is not NoneType)
        return _value(kind, said, place, wrong)
    if origin is tuple and isinstance(said, list):
        return tuple(_value(parts[0], x, f"{place}[{i}]", wrong) for i, x in enumerate(said))
    if origin is not None and issubclass(origin, Mapping) and isinstance(said, dict):
        return {key: _value(parts[1], x, f"{place}.{key}", wrong) for key, x in said.items()}
    if is_dataclass(kind) and isinstance(said, dict):
        return _fields(kind, said, place, wrong)
    if kind is float and isinstance(said, int) and not isinstance(said, bool):
        return float(said)
    if origin is None and not is_dataclass(kind) and type(said) is kind:
        return said
    name = kind.__name__ if origin is None else str(origin.__name__)
    wrong.append(f"{place} = {said!r} is a {type(said).__name__}, not a {name}")
    return None


def _fields(kind: Any, said: dict[str, Any], place: str, wrong: list[str]) -> Any:
    hints = get_type_hints(kind)
    dot = f"{place}." if place else ""
    known = {f.name: f for f in fields(kind)}
    for key in said.keys() - known.keys():
        near = difflib.get_close_matches(key, known, 1, 0)[0]
        wrong.append(f"unknown key {dot}{key!s}, nearest is {near}")
    for name, f in known.items():
        if name not in said and f.default is MISSING and f.default_factory is MISSING:
            wrong.append(f"key {dot}{name} is missing")
    before = len(wrong)
    made = {
        key: _value(hints[key], x, f"{dot}{key}", wrong) for key, x in said.items() if key in known
    }
    if before != len(wrong) or len(made) < len(said):
        return None
    try:
        return kind(**made)
    except TypeError:  # a key is missing, which has been said
        return None


def dump(said: object) -> str:
    """A frozen value as TOML that `parse` reads back, floats to six digits. Defaults are left out."""
    return "\n".join(_table(said, "")).strip() + "\n"


def _table(said: Any, place: str) -> list[str]:
    """Plain keys first, then tables, then lists of tables: the order that TOML demands."""
    plain, tables = [], []
    for name, x in _items(said):
        path = f"{place}.{name}" if place else name
        if is_dataclass(x) or isinstance(x, Mapping):
            tables += ["", f"[{path}]", *_table(x, path)]
        elif isinstance(x, tuple) and x and is_dataclass(x[0]):
            for each in x:
                tables += ["", f"[[{path}]]", *_table(each, path)]
        else:
            plain.append(f"{_key(name)} = {_plain(x)}")
    return plain + tables


def _items(said: Any) -> list[tuple[str, Any]]:
    if isinstance(said, Mapping):
        return list(said.items())
    found = []
    for f in fields(said):
        x = getattr(said, f.name)
        made = f.default_factory() if f.default_factory is not MISSING else f.default
        if x is not None and (made is MISSING or x != made):
            found.append((f.name, x))
    return found


def _plain(x: object) -> str:
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, int):
        return str(x)
    if isinstance(x, float):
        # Six digits are more than any clock here gives; inf and nan are words of TOML too.
        short = float(f"{x:.6g}")
        return repr(short)
    if isinstance(x, str):
        return '"' + "".join(map(_letter, x)) + '"'
    assert isinstance(x, tuple)
    return "[" + ", ".join(map(_plain, x)) + "]"


def _letter(c: str) -> str:
    if c in '"\\':
        return f"\\{c}"
    return c if c.isprintable() else f"\\U{ord(c):08x}"


def _key(name: str) -> str:
    return (
        name
        if name.replace("_", "a").replace("-", "a").isalnum() and name.isascii()
        else _plain(name)
    )
