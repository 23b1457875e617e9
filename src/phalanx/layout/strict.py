"""Frozen dataclasses from TOML and back, strictly: every mistake at once, each with its place, the
value and the way out.

A field made by `key` carries what it means and what it may be; from that come the checks, the
printed file and the JSON Schema. What a particular file's keys mean together is told elsewhere.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from .files import DEPTH, parse_toml, unwritable

__all__ = ["Mistake", "Said", "dump", "key", "read", "schema", "section", "toml_value"]

SHOWN = 20  # unknown keys of a table that are told one by one
T = TypeVar("T")
Where = Callable[[str], str]

_KINDS: dict[Any, tuple[str, str, str]] = {  # what it is called, an example, JSON Schema's name
    int: ("a whole number", "100", "integer"),
    float: ("a number", "0.1", "number"),
    bool: ("true or false", "true", "boolean"),
    str: ("text", '"text"', "string"),
    tuple[float, float]: ("two numbers", "[0.9, 0.95]", "array"),
}
_CALLED: dict[Any, str] = {dict: "a table", **{kind: told[0] for kind, told in _KINDS.items()}}


class Mistake(NamedTuple):
    """One thing that is wrong with a file: where, what, and how to write it."""

    place: str
    what: str
    way_out: str

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.what}. {self.way_out}"


def key(
    default: Any,
    what: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    name: str = "",
) -> Any:
    """A field with its meaning and bounds. `name` is what a file calls it, if not as we do."""
    told = {"what": what, "least": least, "most": most, "above": above}
    return field(default=default, metadata={**told, "choices": choices, "name": name})


def section(cls: type[T], what: str) -> T:
    """A table of keys inside a file."""
    made: T = field(default=cls(), metadata={"what": what, "name": ""})
    return made


class Said:
    """What a file and the `key=value` arguments after it say, and where each key was said."""

    def __init__(self, text: str, overrides: tuple[str, ...] = (), file: str = "") -> None:
        self.mistakes: list[Mistake] = []
        self.table: dict[str, Any] = {}
        self._lines, self._file = text.splitlines(), file
        self._arguments: dict[str, str] = {}
        try:
            self.table = parse_toml(text, "this", ValueError)
        except ValueError as error:
            what, _, way_out = str(error).rstrip(".").partition(". ")
            self.mistakes.append(Mistake(file, what, way_out or "See docs/training.md"))
        for override in overrides:
            self._override(override)

    def _override(self, argument: str) -> None:
        name, equals, value = argument.partition("=")
        path = name.strip().split(".")
        if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in path):
            way_out = "Write key=value, as in steps=100 or optimizer.lr=3e-4"
            shown = argument if len(argument) < 60 else argument[:57] + "..."
            self.mistakes.append(Mistake("argument", f"{shown!r} sets nothing", way_out))
            return
        if len(path) > DEPTH:
            what = f"a key of {len(path)} parts; there is none of more than two"
            self.mistakes.append(Mistake("argument", what, "Write key=value, as in steps=100"))
            return
        table = self.table
        for part in path[:-1]:
            inner = table.get(part)
            if not isinstance(inner, dict):
                inner = table[part] = {}
            table = inner
        try:
            table[path[-1]] = _value(value.strip())
        except ValueError as error:
            what, _, way_out = str(error).rstrip(".").partition(". ")
            self.mistakes.append(
                Mistake("argument", f"{name[:60]}: {what}", way_out or "Write less")
            )
        shown = argument if len(argument) < 100 else argument[:97] + "..."
        self._arguments[".".join(path)] = f"argument {shown!r}"

    def where(self, dotted: str) -> str:
        """The line or the argument that sets a key."""
        for said, place in self._arguments.items():
            if dotted == said or said.startswith(dotted + "."):
                return place
        table = dotted.rpartition(".")[0]
        at = ""
        for number, line in enumerate(self._lines, 1):
            if header := re.match(r"\s*\[([\w.\-]+)\]", line):
                at = header[1]
                if at == dotted:
                    return f"{self._file} line {number}".strip()
            elif found := re.match(r"\s*([\w.\-]+)\s*=", line):
                full = ".".join(filter(None, (at, found[1])))
                if full in (dotted, table):
                    return f"{self._file} line {number}".strip()
        return self._file


def _value(text: str) -> Any:
    """A value as TOML reads it, or else the text itself: nobody wants to quote in a shell."""
    if re.fullmatch(r"[+-]?[0-9_]{20,}", text):
        raise ValueError("it is a whole number beyond 64 bits. Write less")
    try:
        return parse_toml(f"x = {text}", "this", ValueError)["x"]
    except ValueError as error:
        if "is not TOML" not in str(error):
            raise
        return text


def read(
    cls: type[T], table: Mapping[str, Any], where: Where, prefix: str = ""
) -> tuple[T, list[Mistake]]:
    """The value that a table tells, defaults where it tells nothing usable, and all mistakes."""
    hints = get_type_hints(cls)
    known = {_name(f): f for f in fields(cls)}  # type: ignore[arg-type]
    found: list[Mistake] = []
    said: dict[str, Any] = {}
    left = 0
    for name, value in table.items():
        dotted = prefix + name
        if name not in known:
            if len(found) < SHOWN:
                found.append(_unknown(cls, dotted, value, where))
            else:
                left += 1
            continue
        one = known[name]
        hint = hints[one.name]
        if is_dataclass(hint):
            if not isinstance(value, dict):
                keys = ", ".join(f"{dotted}.{inner}" for inner in _names(hint))
                what = f"{dotted} = {_shown(value)} is {_kind(value)}"
                found.append(Mistake(where(dotted), what, f"It is a table; write {keys}"))
                continue
            assert isinstance(hint, type)
            said[one.name], more = read(hint, value, where, f"{dotted}.")
            found += more
        elif isinstance(hint, type(int | str)):
            kinds = tuple(get_origin(kind) or kind for kind in get_args(hint))
            if isinstance(value, str) and (bad := unwritable(value)):
                what = f"{dotted} = {_shown(value)} has the character {bad}"
                found.append(Mistake(where(dotted), what, "Leave it out"))
            elif isinstance(value, kinds):
                said[one.name] = value  # what it says is for the file's own checks
            else:
                what = f"{dotted} = {_shown(value)} is {_kind(value)}"
                wanted = " or ".join(_CALLED.get(kind, str(kind)) for kind in kinds)
                found.append(Mistake(where(dotted), what, f"Write {wanted}"))
        else:
            wrong = _wrong(dotted, value, hint, one.metadata)
            found += [Mistake(where(dotted), *wrong)] if wrong else []
            if not wrong:
                said[one.name] = _made(value, hint)
    if left:
        what = f"{left:,} more keys that there are not"
        found.append(
            Mistake(where(prefix.rstrip(".")), what, "Mend the first ones, then see again")
        )
    return cls(**said), found


def _name(one: Any) -> str:
    name: str = one.metadata.get("name") or one.name
    return name


def _names(cls: Any) -> list[str]:
    return [_name(f) for f in fields(cls)]


def every_key(cls: Any, prefix: str = "") -> Iterator[str]:
    """All keys of a file, dotted."""
    hints = get_type_hints(cls)
    for one in fields(cls):
        if is_dataclass(hints[one.name]):
            yield from every_key(hints[one.name], f"{prefix}{_name(one)}.")
        else:
            yield prefix + _name(one)


def _unknown(cls: Any, dotted: str, value: Any, where: Where) -> Mistake:
    dotted = dotted if len(dotted) < 80 else dotted[:77] + "..."
    prefix, _, last = dotted.rpartition(".")
    names = [f"{prefix}.{n}".lstrip(".") for n in _names(cls)]
    leaf = _elsewhere(last)
    exact = [full for full in leaf if full.rpartition(".")[2] == last]
    near = exact or difflib.get_close_matches(dotted, names, 1, 0.6) or leaf
    way_out = f"Did you mean {near[0]!r}?" if near else f"Keys here are {', '.join(names)}"
    if not prefix and (word := _IN_THE_LAYOUT.get(last.lower())):
        way_out = f"The layout says it: {word}"
    return Mistake(
        where(dotted), f"{dotted} = {_shown(value)}: there is no key {dotted!r}", way_out
    )


# What others keep in a key of its own, and where a layout has it.
_IN_THE_LAYOUT = {
    **dict.fromkeys(("precision", "dtype", "amp", "mixed_precision", "bf16", "fp16", "fp32", "tf32"),
                    'layout="bf16", or fp16, tf32, fp32, fp64, as in layout="dp2 bf16"'),
    **dict.fromkeys(("microbatch", "microbatches", "micro_batch", "micro_batch_size", "accum",
                     "gradient_accumulation", "gradient_accumulation_steps", "accumulation"),
                    'layout="accum:4" cuts the batch into 4 microbatches; with pp it is 1f1b:4'),
    **dict.fromkeys(("fsdp", "zero", "zero_stage", "ddp", "hsdp", "sharding"),
                    'layout="dp8 zero3" is FSDP over 8 ranks, layout="dp8" is DDP'),
    **dict.fromkeys(("tp", "tensor_parallel", "pp", "pipeline_parallel", "dp", "data_parallel", "cp",
                     "context_parallel", "sp", "ep"), 'layout="dp2 pp2 tp2"'),
    **dict.fromkeys(("recompute", "activation_checkpointing", "gradient_checkpointing"),
                    'layout="recompute:all", or recompute:selective'),
    **dict.fromkeys(("offload", "cpu_offload"), 'layout="offload:activations"'),
}  # fmt: skip


def _elsewhere(last: str) -> list[str]:
    from .run import Run  # the one file with sections; asked only once something is wrong

    leaves = {dotted.rpartition(".")[2]: dotted for dotted in every_key(Run)}
    return [leaves[near] for near in difflib.get_close_matches(last, leaves, 1, 0.6)]


def _wrong(dotted: str, value: Any, hint: Any, told: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a value and how to write it; None if nothing is."""
    called, example, _ = _KINDS[hint]
    if isinstance(value, str) and (bad := unwritable(value)):
        return f"{dotted} = {_shown(value)} has the character {bad}", "Leave it out"
    if not _fits(value, hint):
        return (
            f"{dotted} = {_shown(value)} is {_kind(value)}",
            f"Write {called}, as in {dotted} = {example}",
        )
    if told.get("choices") and value not in told["choices"]:
        near = difflib.get_close_matches(str(value), told["choices"], 1, 0.4)
        hint_ = f" Did you mean {near[0]!r}?" if near else ""
        return (
            f"{dotted} = {_shown(value)} is unknown",
            f"Choose {', '.join(told['choices'])}.{hint_}",
        )
    for number in value if isinstance(value, list) else [value]:
        out = _outside(number, told)
        if out:
            return f"{dotted} = {_shown(value)} is out of bounds", f"Write {out}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    if hint == tuple[float, float]:
        return isinstance(value, list) and len(value) == 2 and all(_fits(v, float) for v in value)
    if hint is float:
        finite = isinstance(value, int | float) and abs(value) < float("inf")
        return finite and not isinstance(value, bool)
    return isinstance(value, hint) and isinstance(value, bool) == (hint is bool)


def _outside(number: Any, told: Mapping[str, Any]) -> str:
    least, most, above = told.get("least"), told.get("most"), told.get("above")
    if (least is not None and number < least) or (most is not None and number > most):
        first, last = (f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (least, most or 0))
        return f"{first} or more" if most is None else f"{first} to {last}"
    if above is not None and number <= above:
        return f"more than {above:g}"
    return ""


def _made(value: Any, hint: Any) -> Any:
    if hint == tuple[float, float]:
        return float(value[0]), float(value[1])
    return float(value) if hint is float else value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    return _CALLED.get(type(value), "a date")


def dump(value: Any, prefix: str = "") -> str:
    """The TOML file that reads back as this value, every key with what it means."""
    lines: list[str] = []
    inner: list[str] = []
    for one in fields(value):
        mine, name = getattr(value, one.name), _name(one)
        what = one.metadata.get("what", "")
        if is_dataclass(mine):
            inner.append(f"\n[{prefix}{name}]" + (f"  # {what}" if what else ""))
            inner.append(dump(mine, f"{prefix}{name}."))
        else:
            lines.append(f"{name} = {toml_value(mine)}" + (f"  # {what}" if what else ""))
    return "\n".join([*lines, *inner]) + ("" if prefix else "\n")


def toml_value(value: Any) -> str:
    """A value in one line of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml_value(v)}" for name, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)  # JSON's NaN and Infinity are none of TOML's
    # TOML's basic strings are JSON's, but for DEL, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def schema(cls: Any, title: str = "") -> dict[str, Any]:
    """The JSON Schema of a file's keys."""
    hints = get_type_hints(cls)
    made: dict[str, Any] = {}
    for one in fields(cls):
        hint, told = hints[one.name], one.metadata
        if is_dataclass(hint):
            made[_name(one)] = {**schema(hint), "description": told.get("what", "")}
            continue
        if hint not in _KINDS:
            made[_name(one)] = {"description": told.get("what", ""), "default": one.default}
            continue
        entry: dict[str, Any] = {"type": _KINDS[hint][2], "description": told.get("what", "")}
        if hint == tuple[float, float]:
            entry |= {"items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        bounds = {"least": "minimum", "most": "maximum", "above": "exclusiveMinimum"}
        limits = {bounds[k]: told[k] for k in bounds if told.get(k) is not None}
        if hint == tuple[float, float]:
            entry["items"] |= limits
        else:
            entry |= limits
        entry |= {"enum": list(told["choices"])} if told.get("choices") else {}
        default = one.default
        made[_name(one)] = {
            **entry,
            "default": list(default) if isinstance(default, tuple) else default,
        }
    said: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": made}
    if title:
        said = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **said}
    return said
