"""Frozen dataclasses to and from TOML: run files, shapes, measured machines, profiles.

Reading is strict. All mistakes in a file are reported at once, each with its line, the
value and a way out. The field types of a dataclass define what a file may contain:
numbers, text, nested tables, lists of tables, mappings, optional values. `key` adds a
value's meaning and bounds. Printing and the JSON Schema use the same fields. Conflicts
between keys are checked by the file's class.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from .choices import near_word
from .files import DEPTH, parse_toml, read_text, unwritable
from .numbers import whole_spellings
from .url import redacted

SHOWN = 20  # mistakes listed for one file; of further ones only the number
T = TypeVar("T")

# for each type: its name in messages, an example, its name in JSON Schema
_KINDS: dict[Any, tuple[str, str, str]] = {
    int: ("a whole number", "100", "integer"),
    float: ("a number", "0.1", "number"),
    bool: ("true or false", "true", "boolean"),
    str: ("text", '"text"', "string"),
    tuple: ("a list", "[]", "array"),
    list: ("a list", "[]", "array"),
    dict: ("a table", "{}", "object"),
    NoneType: ("nothing", "", "null"),
}
# Names of limits here, and in JSON Schema.
_BOUNDS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "above": "exclusiveMinimum",
}
QUOTES = "\"' \t"
_NAME = r"""(?:[\w-]+|"[^"]*"|'[^']*')"""
_PATH = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
# A table's head, `[a.b]` or `[[a.b]]`, or the key of a line, `a.b = ...`.
_LINE = re.compile(rf"\s*(?:(\[\[?)\s*({_PATH})\s*\]|({_PATH})\s*=)")


class Mistake(NamedTuple):
    """One mistake in a file: its place, a description, and how to correct it."""

    place: str
    what: str
    way_out: str

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.what}. {self.way_out}"


class FileError(ValueError):
    """A file that cannot be used, with every mistake in it. Secrets in URLs are hidden."""

    def __init__(self, name: str, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(
            Mistake(*map(redacted, mistake)) for mistake in mistakes
        )
        mistakes = self.mistakes
        count = (
            f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "a mistake"
        )
        lines = "\n".join(
            "- " + str(m).replace("\n", "\n  ") for m in mistakes
        )
        super().__init__(f"{name} has {count}.\n{lines}")


# ---- the keys of a class


def key(
    default: Any = MISSING,
    description: str = "",
    *,
    minimum: float | None = 0,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    name: str = "",
) -> Any:
    """A dataclass field with its meaning and bounds.

    `name` is its key in a file, if different.
    """
    # `above` excludes its bound and takes the place of the minimum of 0.
    bounds = {
        "minimum": minimum if above is None else None,
        "maximum": maximum,
        "above": above,
    }
    more = {"description": description, "choices": choices, "name": name}
    return field(default=default, metadata=bounds | more)


class _Key(NamedTuple):
    attribute: str
    type: Any
    default: Any  # MISSING: a file must have it
    description: str
    limits: Mapping[str, Any]


@cache  # a manifest has many thousands of tables of one class
def _keys(cls: Any) -> dict[str, _Key]:
    hints, made = get_type_hints(cls), {}
    for f in fields(cls):
        # A default made by a factory is made once: values are frozen.
        default = (
            f.default if f.default_factory is MISSING else f.default_factory()
        )
        description = f.metadata.get("description", "")
        one = _Key(f.name, hints[f.name], default, description, f.metadata)
        made[f.metadata.get("name") or f.name] = one
    return made


def every_key(cls: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a file, dotted."""
    for name, one in _keys(cls).items():
        inner = is_dataclass(one.type)
        # A table's own keys stand in for it: "optimizer.lr".
        yield from (
            every_key(one.type, f"{prefix}{name}.")
            if inner
            else [prefix + name]
        )


# ---- from text to a value


def text_of(
    path: str | Path, what: str, error: type[FileError], way_out: str
) -> str:
    """The text of a user's file. `what` names the kind of file in an error."""

    def refuse(why: str) -> FileError:
        return error(str(path), [Mistake("", why.rstrip("."), way_out)])

    return read_text(path, what, refuse)


def load(
    cls: type[T],
    path: str | Path,
    what: str,
    error: type[FileError],
    pointers: Mapping[str, str] | None = None,
    **given: Any,
) -> T:
    """Read the value from a user's file."""
    text = text_of(path, what, error, "Name a file that can be read")
    return parse(cls, text, str(path), error, pointers, **given)


def parse(
    cls: type[T],
    text: str,
    file: str,
    error: type[FileError],
    pointers: Mapping[str, str] | None = None,
    **given: Any,
) -> T:
    """Read the value from TOML text; `given` are values for missing keys.

    `pointers` are the ways out for keys that other libraries have.
    """
    reader = Reader(cls, text, file, pointers=pointers)
    value: T = (
        reader.table(cls, given | reader.given)
        if not reader.mistakes
        else _WRONG
    )
    if reader.mistakes:
        raise error(file, reader.mistakes)
    return value


def decode(
    cls: type[T], table: Mapping[str, Any], name: str, error: type[ValueError]
) -> T:
    """Read the value from a table without text: from JSON, or from inside another file.

    If `error` is not a `FileError`, all mistakes are in its text.
    """
    reader = Reader(cls)
    value: T = reader.table(cls, table)
    if reader.mistakes:
        wrong = FileError(
            name, [mistake._replace(place="") for mistake in reader.mistakes]
        )
        raise (
            error(name, wrong.mistakes)
            if issubclass(error, FileError)
            else error(str(wrong))
        )
    return value


_WRONG: Any = object()  # marks a value with a mistake


class Reader:
    """Reads a file and the `key=value` arguments after it into values of a class.

    `given` is the table that they make. All mistakes are collected. `pointers` are ways
    out for unknown keys, by name: old keys, and those of other libraries. `texts` names
    keys that are a text or a table; an argument for a key of the table keeps the text
    under the name given here.
    """

    def __init__(
        self,
        root: type,
        text: str = "",
        file: str = "",
        overrides: tuple[str, ...] = (),
        pointers: Mapping[str, str] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        self._texts = texts or {}
        self.given: dict[str, Any] = {}
        self._root, self._text, self._file = root, text, file
        self._pointers = pointers or {}
        self._arguments: dict[str, str] = {}
        self._mistakes: list[Mistake] = []
        # Tables whose keys a mistake has listed: once is enough.
        self._listed: set[str] = set()
        # A text that is no TOML is a mistake like others: arguments are still
        # checked.
        try:
            self.given = parse_toml(text, "this", ValueError)
        except ValueError as error:
            self._text = ""
            self._refused(file, error, "See docs/training.md")
        for argument in overrides:
            self._override(argument)

    @property
    def mistakes(self) -> list[Mistake]:
        if (more := len(self._mistakes) - SHOWN) <= 0:
            return self._mistakes
        last = Mistake(
            self._file, f"{more:,} more mistakes", "Fix the first ones first"
        )
        return [*self._mistakes[:SHOWN], last]

    def _refused(self, place: str, error: ValueError, way_out: str) -> None:
        what, _, own_way_out = str(error).rstrip(".").partition(". ")
        self._mistakes.append(Mistake(place, what, own_way_out or way_out))

    def _override(self, argument: str) -> None:
        # "optimizer.lr=3e-4" -> the path ["optimizer", "lr"] and the text
        # "3e-4".
        name, equals, text = argument.partition("=")
        path = name.strip().split(".")
        named = len(path) <= DEPTH and all(
            re.fullmatch(r"[\w-]+", part) for part in path
        )
        if not equals or not named:
            what = f"{_cut(redacted(argument, whole=True), 60)!r} sets nothing"
            way_out = "Write key=value, as in steps=100 or optimizer.lr=3e-4"
            self._mistakes.append(Mistake("argument", what, way_out))
            return
        # Walk to the innermost table, and make those that the file does not
        # have.
        inner = self.given
        for part in path[:-1]:
            before = inner.get(part)
            if not isinstance(before, dict):
                # `model = "FILE.py:GPT"` and `model.n_layer=6` -> a table that
                # keeps the class.
                kept = isinstance(before, str) and part in self._texts
                inner[part] = {self._texts[part]: before} if kept else {}
            inner = inner[part]
        try:
            # The value is TOML, so that 3, 3e-4, true and [1, 2] have their
            # types.
            inner[path[-1]] = parse_toml(
                f"{path[-1]} = {text}", name[:60], ValueError
            )[path[-1]]
        except ValueError as error:
            # Numbers and nesting beyond a limit are no text, and stay
            # mistakes.
            if re.search("digits|64 bits|deep", str(error)):
                self._refused("argument", error, "Write less")
            else:  # plain text: nobody wants to quote in a shell
                inner[path[-1]] = text.strip()
        # Hide secrets before cutting the text: half a URL is hard to recognise.
        shown = _cut(redacted(argument, whole=True), 100)
        self._arguments[".".join(path)] = f"argument {shown!r}"

    def place(self, path: str) -> str:
        """The place where a key is set: the line or argument, else its table, else the file."""
        whole = path
        while path:
            # An argument stands for its key and everything below it.
            for name, argument in self._arguments.items():
                if path == name or name.startswith(path + "."):
                    return argument
            if path in self._lines:
                return f"{self._file} line {self._lines[path]}".strip()
            # Not found: look for the table around it. "rates[1].m" ->
            # "rates[1]" -> "rates".
            item = re.search(r"\[[0-9]+\]$", path)
            path = path[: item.start()] if item else path.rpartition(".")[0]
        return self._file or whole

    @cached_property
    def _lines(self) -> dict[str, int]:
        """The line of each key and table; `rates[1].m` is in the second [[rates]]."""
        lines: dict[str, int] = {}
        # The index of the latest table of each list of tables.
        lists: dict[str, int] = {}
        current = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            match = _LINE.match(line)
            if not match:
                continue
            # A table's head starts at the root, and a key belongs to the table
            # before it.
            path = "" if match[1] else current
            for part in re.findall(_NAME, match[2] or match[3]):
                # A name inside a list of tables means its latest entry.
                path += f"[{lists[path]}]" if path in lists else ""
                path = f"{path}.{part.strip(QUOTES)}".lstrip(".")
                # The first line of a path counts, as TOML allows no second
                # one.
                lines.setdefault(path, number)
            if match[1] == "[[":
                lists[path] = lists.get(path, -1) + 1
                path += f"[{lists[path]}]"
                lines[path] = number
            current = path if match[1] else current
        return lines

    def _wrong(self, path: str, what: str, way_out: str) -> Any:
        self._mistakes.append(Mistake(self.place(path), what, way_out))
        return _WRONG

    def table(
        self, cls: Any, given: Mapping[str, Any], prefix: str = ""
    ) -> Any:
        """The instance, with defaults for wrong values; `_WRONG` if impossible."""
        known = _keys(cls)
        values: dict[str, Any] = {}
        before = len(self._mistakes)
        # Unknown and wrong keys do not end the loop: all mistakes are reported
        # at once.
        for name, value in given.items():
            if name in known:
                read = self._value(
                    known[name].type, value, prefix + name, known[name].limits
                )
                values |= (
                    {} if read is _WRONG else {known[name].attribute: read}
                )
            else:
                self._unknown(cls, prefix + name, value)
        required = {
            name: one for name, one in known.items() if one.default is MISSING
        }
        for name, one in required.items():
            if name not in given:
                way_out = _way_out(one.type, prefix + name)
                self._wrong(
                    prefix + name, f"{prefix}{name} is missing", way_out
                )
        if any(one.attribute not in values for one in required.values()):
            return _WRONG
        # The class checks keys against each other only if each is valid alone.
        try:
            return cls(**values)
        # values that are valid alone but contradict each other
        except FileError as error:
            # After other mistakes this one may only be a consequence of them.
            alone = before == len(self._mistakes)
            for mistake in error.mistakes if alone else ():
                self._wrong(
                    prefix + mistake.place,
                    prefix + mistake.what,
                    mistake.way_out,
                )
            return _WRONG

    def _value(
        self, hint: Any, value: Any, path: str, limits: Mapping[str, Any]
    ) -> Any:
        """Convert a value to its field's type."""
        # A short cut for plain integers, of which large files have most.
        if hint is int and type(value) is int and not limits:
            return value
        parts = _parts(hint)
        if isinstance(value, str) and (bad := unwritable(value)):
            what = f"{path} = {_shown(value)} has the character {bad}"
            return self._wrong(path, what, "Leave it out")
        if not _fits(value, hint):
            what = f"{path} = {_shown(value)} is {_kind(value)}"
            spelled = (
                whole_spellings(value)
                if hint is int and isinstance(value, str)
                else ""
            )
            return self._wrong(
                path,
                what,
                f"Write {spelled}" if spelled else _way_out(hint, path),
            )
        # The first type of a union that the value has.
        if isinstance(hint, UnionType):
            part = next(part for part in parts if _fits(value, part))
            return self._value(part, value, path, limits)
        if is_dataclass(hint):
            return self.table(hint, value, f"{path}.")
        # One type for all items of `tuple[int, ...]`, or one for each of
        # `tuple[float, float]`.
        if _plain(hint) is tuple:
            kinds = parts[:1] * len(value) if parts[-1] is ... else parts
            pairs = enumerate(zip(kinds, value, strict=True))
            value = tuple(
                self._value(kind, x, f"{path}[{i}]", {})
                for i, (kind, x) in pairs
            )
            if _WRONG in value:
                return _WRONG
        elif parts and _plain(hint) is dict:
            value = {
                k: self._value(parts[1], x, f"{path}.{k}", {})
                for k, x in value.items()
            }
            if _WRONG in value.values():
                return _WRONG
        if limits and (problem := _problem(value, path, limits)):
            return self._wrong(path, *problem)
        # TOML may give an integer where a number is asked for.
        return float(value) if hint is float else value

    def _unknown(self, cls: Any, path: str, value: Any) -> None:
        path = _cut(path, 80)
        prefix, _, last = path.rpartition(".")
        names = [f"{prefix}.{name}".lstrip(".") for name in _keys(cls)]
        # Reversed, so that of equal last names the first key of the class
        # wins.
        leaves = {
            name.rpartition(".")[2]: name
            for name in reversed([*every_key(self._root)])
        }
        near = [leaves[last]] if last in leaves else []
        # The search is slow, and further mistakes are not shown.
        if not near and len(self._mistakes) < SHOWN:
            near = difflib.get_close_matches(path, names, 1, 0.6)
            near = near or [
                leaves[n]
                for n in difflib.get_close_matches(last, leaves, 1, 0.6)
            ]
        # A pointer for the whole path goes before one for its last part.
        pointers = self._pointers
        if pointer := pointers.get(path) or pointers.get(last.lower()):
            way_out = pointer
        elif near:
            way_out = f"Did you mean {near[0]!r}?"
        elif prefix in self._listed:
            way_out = "The keys here are listed above"
        else:
            way_out = f"Keys here are {', '.join(names)}"
            self._listed.add(prefix)
        self._wrong(
            path,
            f"{path} = {_shown(value)}: there is no key {path!r}",
            way_out,
        )


def out_of_bounds(value: Any) -> list[Mistake]:
    """Mistakes in the fields of an instance that a program made, each field on its own."""
    mistakes = []
    for name, one in _keys(value.__class__).items():
        if problem := _problem(
            getattr(value, one.attribute), name, one.limits
        ):
            mistakes.append(Mistake(name, *problem))
    return mistakes


def _problem(
    value: Any, path: str, limits: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Describe what is wrong with a value of the right type, or return None."""
    choices = limits.get("choices")
    if choices and value not in choices:
        known, hint = (
            ", ".join(filter(None, choices)),
            near_word(str(value), choices),
        )
        return f"{path} = {_shown(value)} is unknown", f"Choose {known}.{hint}"
    low, high, above = (limits.get(name) for name in _BOUNDS)
    # A tuple's bounds hold for each of its numbers.
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if (low is not None and number < low) or (
            high is not None and number > high
        ):
            # Whole numbers with thousands separators, others as short as
            # possible.
            first, last = (
                f"{x:,}" if isinstance(x, int) else f"{x or 0:g}"
                for x in (low, high)
            )
            bounds = (
                f"{first} or more" if high is None else f"{first} to {last}"
            )
            bounds = f"{last} or less" if low is None else bounds
        elif above is not None and not above < number < math.inf:
            bounds = f"more than {above:g}"
        else:
            continue
        return f"{path} = {_shown(value)} is out of bounds", f"Write {bounds}"
    return None


# ---- types of fields


_parts = cache(get_args)


@cache
def _plain(hint: Any) -> Any:
    """The Python type in which TOML represents a field's type."""
    plain = get_origin(hint) or hint
    return dict if plain is Mapping or is_dataclass(plain) else plain


def _fits(value: Any, hint: Any) -> bool:
    """True if a value has this type, ignoring the contents of lists and tables."""
    if isinstance(hint, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    # A union was handled above; `get_args` of tuple[X, ...] ends in an
    # ellipsis.
    plain, parts = _plain(hint), _parts(hint)
    if hint is Any or plain is NoneType:
        return hint is Any or value is None
    if plain is tuple:
        count = None if parts[-1] is ... else len(parts)
        return isinstance(value, list | tuple) and count in (None, len(value))
    # A bool is an int in Python: refuse it where a number is meant.
    if isinstance(value, bool) or plain is bool:
        return isinstance(value, bool) and plain is bool
    if plain is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, plain)


def _way_out(hint: Any, path: str) -> str:
    """Explain how to write a value of this type."""
    if is_dataclass(hint):
        return f"It is a table; write {', '.join(every_key(hint, f'{path}.'))}"
    union = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [_KINDS[_plain(kind)] for kind in union if kind is not NoneType]
    if len(kinds) > 1:
        return "Write " + " or ".join(called for called, *_ in kinds)
    called, example, _ = kinds[0]
    if hint == tuple[float, float]:
        # The one pair among the keys has an example of its own.
        called, example = "two numbers", "[0.9, 0.95]"
    return f"Write {called}, as in {path} = {example}"


def _cut(text: str, length: int) -> str:
    return text if len(text) < length else text[: length - 3] + "..."


def _shown(value: Any) -> str:
    return _cut(redacted(json.dumps(value, default=str)), 60)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    return _KINDS.get(type(value), ("a date",))[0]


# ---- from a value to text


def changed_repr(value: Any) -> str:
    """Return the call that makes a dataclass, without the fields that have their defaults."""
    written = []
    for each in fields(value):
        own = getattr(value, each.name)
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        if own == default:
            continue
        shown = changed_repr(own) if is_dataclass(own) else repr(own)
        written.append(f"{each.name}={redacted(shown)}")
    return f"{type(value).__name__}({', '.join(written)})"


def dump(value: Any, *, short: bool = False) -> str:
    """The TOML text that reads back as this value, with each key's meaning.

    With `short` there are no comments and no keys at their default, and floats have six
    digits, more than any clock resolves.
    """
    return "\n".join(_dumped(value, "", short)).strip() + "\n"


def _dumped(value: Any, path: str, short: bool) -> Iterator[str]:
    """Plain keys, then tables, then lists of tables: the order that TOML requires."""
    tables = []
    keys = {} if isinstance(value, Mapping) else _keys(value.__class__)
    items = (
        {n: getattr(value, one.attribute) for n, one in keys.items()}
        if keys
        else value
    )
    for name, item in items.items():
        # Defaults are left out, and so is None, which TOML cannot write.
        if short and name in keys and item in (None, keys[name].default):
            continue
        described = name in keys and keys[name].description and not short
        comment = f"  # {keys[name].description}" if described else ""
        # One entry tells whether a tuple is a list of tables.
        first = item[0] if isinstance(item, tuple) and item else item
        if is_dataclass(first) or (isinstance(item, Mapping) and item):
            tables.append((_quoted(name), item, comment))
        else:  # TOML has no null: the key becomes a comment
            unset = "# " if item is None else ""
            yield f"{unset}{_quoted(name)} = {toml_value(item, short)}{comment}"
    for name, item, comment in tables:
        inner = f"{path}.{name}".lstrip(".")
        for one in item if isinstance(item, tuple) else (item,):
            head = f"[[{inner}]]" if one is not item else f"[{inner}]{comment}"
            yield from ("", head, *_dumped(one, inner, short))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any, short: bool = False) -> str:
    """A value on one line of TOML."""
    if isinstance(value, Mapping):
        pairs = (
            f"{_quoted(name)} = {toml_value(item, short)}"
            for name, item in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item, short) for item in value) + "]"
    if isinstance(value, float):  # JSON's NaN and Infinity are not TOML's
        return repr(float(f"{value:.6g}") if short else value)
    if value is None:
        return ""
    # A JSON string is a TOML basic string, except that invisible characters
    # must be escaped.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def schema(cls: Any, title: str = "") -> dict[str, Any]:
    """The JSON Schema of a file's keys."""
    properties, required = {}, []
    for name, one in _keys(cls).items():
        # The same bounds in JSON Schema's words.
        limits = {
            json_name: one.limits.get(ours)
            for ours, json_name in _BOUNDS.items()
        }
        properties[name] = _typed(
            one.type, {k: x for k, x in limits.items() if x is not None}
        )
        properties[name]["description"] = one.description
        if one.limits.get("choices"):
            properties[name]["enum"] = list(one.limits["choices"])
        if one.default is MISSING:
            required.append(name)
        elif not is_dataclass(one.type):
            plain = (
                list(one.default)
                if isinstance(one.default, tuple)
                else one.default
            )
            properties[name]["default"] = plain
    made = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    made |= {"required": required} if required else {}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
    }
    return head | made if title else made


def _typed(hint: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """A type in JSON Schema's words."""
    parts = get_args(hint)
    if is_dataclass(hint):
        return schema(hint)
    # Bounds belong to numbers alone.
    limits = limits if {int, float} & {hint, *parts} else {}
    if isinstance(hint, UnionType):
        return {"type": [_KINDS[_plain(part)][2] for part in parts], **limits}
    made: dict[str, Any] = (
        {} if hint is Any else {"type": _KINDS[_plain(hint)][2]}
    )
    if _plain(hint) is tuple:
        made |= {"items": _typed(parts[0], limits)}
        count = (
            {}
            if parts[-1] is ...
            else {"minItems": len(parts), "maxItems": len(parts)}
        )
        return made | count
    if parts and _plain(hint) is dict:
        return made | {"additionalProperties": _typed(parts[1], limits)}
    return made | limits
