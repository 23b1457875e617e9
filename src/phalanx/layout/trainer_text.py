"""Other trainers' files as flat options: shell scripts, TOML, JSON and YAML.

An option of a nested file is named by its path, such as `training.seq_len`. Nothing is
run. In shell scripts only assignments, `$NAME`, `${NAME:-default}` and integer
arithmetic are understood.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from .files import DEPTH, parse_json, parse_toml
from .mesh import LayoutError
from .trainer_table import FLAGS, JSON, TOML, YAML, Options

SUFFIXES = {".toml": TOML, ".json": JSON, ".yaml": YAML, ".yml": YAML}
_ENTRIES = 20_000  # in a nested file: one YAML alias may expand to very many
# `export TP=4`, and what follows the equals sign.
_ASSIGNED = re.compile(
    r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)"
)
# $NAME, ${NAME}, ${NAME:-default}, ${NAME:=default}.
_NAME = r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^{}]*))?\})"
_SUM = re.compile(r"\$\(\(([\w\s+*/()-]{1,200})\)\)")
_FLAG = re.compile(r"--?[A-Za-z]")
_ROUNDS = 8  # rounds of replacing names inside names
_WORDS = 200_000  # characters of a line after replacing names

# ---- from text


def options_of(text: str, format: str, where: str) -> dict[str, Any]:
    """The options of a file as a flat dictionary."""
    if format == FLAGS:
        return _flags(text)
    if format == TOML:
        nested: Any = parse_toml(text, where, LayoutError)
    elif format == JSON:
        nested = parse_json(text, where, LayoutError)
    else:
        nested = _yaml(text, where)
    if not isinstance(nested, Mapping):
        raise LayoutError(
            f"{where} is no table of options. Name a trainer's own file."
        )
    found: dict[str, Any] = {}
    for key, value in _flat(nested, "", where, 0):
        found[key] = value
        # Counted while it is expanded, because an alias of YAML costs a few
        # bytes.
        if len(found) > _ENTRIES:
            raise LayoutError(f"{where} has more than {_ENTRIES:,} options.")
    return found


def _flat(
    table: Mapping[Any, Any], prefix: str, where: str, depth: int
) -> Iterator[tuple[str, Any]]:
    if depth > DEPTH:
        raise LayoutError(f"{where} nests more than {DEPTH} tables.")
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.", where, depth + 1)
        else:
            yield name, value


def _yaml(text: str, where: str) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise LayoutError(
            f"{where} is YAML, which PyYAML reads: pip install 'phalanx[yaml]'."
        ) from None
    try:
        # `safe_load` creates plain values only, never objects.
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        what = (
            str(error).splitlines()[0] if str(error) else type(error).__name__
        )
        raise LayoutError(f"{where} is not plain YAML: {what}.") from None


def _flags(text: str) -> dict[str, Any]:
    """The options in an argument list or a shell script; the last one of a name counts."""
    values: dict[str, str] = {}
    found: dict[str, Any] = {}
    # A line that ends in a backslash continues in the next.
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        # A list `ARGS=(--tp 4)` is read as its words.
        line = _filled(line, values).replace("=(", "=( ")
        assigned = _ASSIGNED.fullmatch(line)
        if assigned and not assigned[2].lstrip().startswith("("):
            values[assigned[1]] = " ".join(_words(assigned[2]))
        # Options may be in a list, a string, or the command itself.
        found |= _arguments(
            [part for word in _words(line) for part in word.split()]
        )
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a string that continues in the next line
        # Without quotes, words of a text are still found.
        plain = re.sub(r"[\"']", " ", line)
        return [
            word for word in plain.partition(" #")[0].split() if word != "#"
        ]


def _filled(line: str, values: Mapping[str, str]) -> str:
    """The line with names replaced by their values, and integer arithmetic computed."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        default = match[3] if match[3] is not None else match[0]
        return values.get(name, default)

    # Values contain names again, so replace until nothing changes.
    for _ in range(_ROUNDS):
        filled = re.sub(_NAME, value, line)[:_WORDS]
        filled = _SUM.sub(lambda match: _sum(match, values), filled)
        if filled == line:
            break
        line = filled
    return line


def _sum(match: re.Match[str], values: Mapping[str, str]) -> str:
    """The value of $((...)): products and quotients from left to right, then sums."""
    terms = re.sub(
        r"[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), match[1]
    )
    # Only digits and operators: no expression of a script is run.
    if not re.fullmatch(r"\s*-?\d{1,12}(\s*[-+*/]\s*\d{1,12})*\s*", terms):
        return match[0]
    total = 0
    for sign, product in re.findall(r"(^|[-+])\s*([\d\s*/]+)", terms.strip()):
        factors = re.findall(r"([*/]?)\s*(\d+)", product)
        result = 1
        for operator, factor in factors:
            number = int(factor)
            if operator == "/" and not number:
                return match[0]
            result = result // number if operator == "/" else result * number
        total += -result if sign == "-" else result
    return str(total)


def _arguments(words: list[str]) -> dict[str, Any]:
    """Map each `--name` to its value: True, a word, or a list of words."""
    found: dict[str, Any] = {}
    name, values = "", list[str]()
    # The last "--" ends the option before it.
    for word in [*words, "--"]:
        word = word.strip("()")
        if not word:
            continue
        # `$EXTRA_ARGS` is not known, and no value.
        if word != "--" and not _FLAG.match(word):
            values += [word] if name and not word.startswith("$") else []
            continue
        if name:
            found[name] = values[0] if len(values) == 1 else values or True
        flag, equals, value = word.partition("=")
        # "--tensor_parallel" and "--tensor-parallel" are one option.
        name = (
            flag.replace("_", "-")
            if flag.startswith("--") and flag != "--"
            else ""
        )
        values = [value] if equals else []
    return found


# ---- to text


def text_of(options: Options, format: str, launch: str = "") -> str:
    """The text of a file with these options."""
    if format == FLAGS:
        return _script(options, launch)
    nested: dict[str, Any] = {}
    # "parallelism.tensor" -> table "parallelism", key "tensor".
    for key, value in options.items():
        *path, last = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    if format == JSON:
        return json.dumps(nested, indent=2) + "\n"
    lines = _toml(nested) if format == TOML else _yaml_lines(nested)
    return "\n".join(lines).lstrip("\n") + "\n"


def _script(options: Options, launch: str) -> str:
    # Options of torchrun come before the script's own.
    ranks = ("--nnodes", "--nproc-per-node")
    start = [f"{name} {options[name]}" for name in ranks if name in options]
    lines = [" ".join(["torchrun", *start, launch])]
    for name, value in options.items():
        if name not in ranks:
            shown = "" if value is True else f" {shlex.quote(str(value))}"
            lines.append(f"    {name}{shown}")
    return " \\\n".join(lines) + "\n"


def _toml(nested: Mapping[str, Any], path: str = "") -> Iterator[str]:
    # TOML: plain keys of a table before the tables inside it.
    plain = {k: v for k, v in nested.items() if not isinstance(v, Mapping)}
    if path and plain:
        yield f"\n[{path}]"
    for key, value in plain.items():
        # A JSON value is a TOML value here: numbers, texts, booleans and
        # lists.
        yield f"{key} = {json.dumps(value)}"
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _toml(value, f"{path}.{key}" if path else key)


def _yaml_lines(nested: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
