"""The table of other trainers' options: trainers.toml as values.

A trainer has options for quantities (tp, batch, layers, ...) and for choices. A choice
is a word of a group, such as `zero3` of `zero`, and takes one or several options
together.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from .choices import no_such
from .mesh import LayoutError

FLAGS, TOML, JSON, YAML = "flags", "toml", "json", "yaml"
Options = Mapping[str, Any]
# Quantities above 1 that a file must be able to express.
WAYS = ("tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Rule:
    """A trainer's rule for its own options: a row of `divides`, `equals` or `needs`."""

    text: str
    terms: Mapping[str, Any]


@dataclass(frozen=True)
class Trainer:
    """One row of the table."""

    name: str
    title: str
    versions: str
    format: str
    profile: str  # software profile that prices its steps
    known_by: tuple[str, ...]
    compiled: str = ""  # profile for compiled blocks, if it differs
    launch: str = ""
    even_stages: bool = False  # every stage has equally many layers
    shards_by_size: bool = False  # a shard size of 1 means DDP
    parts_if_mixed: bool = False  # omit sizes of plain data parallelism
    written: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Options = field(default_factory=dict)
    words: Mapping[str, Mapping[str, tuple[Options, ...]]] = field(
        default_factory=dict
    )
    near: Mapping[str, str] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    divides: tuple[Rule, ...] = ()
    equals: tuple[Rule, ...] = ()
    needs: tuple[Rule, ...] = ()

    @property
    def sized(self) -> bool:
        """True if its files contain the sizes of a model."""
        return "layers" in self.written

    @cached_property
    def options(self) -> frozenset[str]:
        """Every option of the table."""
        # Every name under which a quantity is read.
        names = {name for each in self.read.values() for name in each}
        rows = (
            row
            for words in self.words.values()
            for each in words.values()
            for row in each
        )
        return frozenset(names.union(*rows))

    @cached_property
    def values(self) -> Mapping[str, list[Any]]:
        """Values of the options that make choices, except flags without a value."""
        found: dict[str, list[Any]] = {}
        rows = (
            row
            for words in self.words.values()
            for each in words.values()
            for row in each
        )
        for row in rows:
            for key, value in row.items():
                found.setdefault(key, []).append(value)
        # A flag without a value is only there or not.
        plain = {
            key: [x for x in each if x is not True]
            for key, each in found.items()
        }
        # Options whose every value is listed: an unlisted one has no word.
        return {
            key: values
            for key, values in plain.items()
            if values and len(values) == len(found[key])
        }

    @property
    def without(self) -> frozenset[str]:
        """The ways to split a model that its files cannot express."""
        named = {way for way in ("tp", "pp", "ep") if way in self.written}
        named |= {
            way for way in ("ring", "ulysses") if way in self.words["cp"]
        }
        named |= {"seq"} if "seq" in self.words["seq"] else set()
        return frozenset({"tp", "pp", "ep", "ring", "ulysses", "seq"} - named)

    def key(self, quantity: str) -> str:
        """The name of a quantity's option in errors."""
        # Without an option for ranks, a fault names the one for nodes.
        if quantity == "ranks" and quantity not in self.read:
            quantity = "nodes" if "nodes" in self.read else "the ranks"
        names = self.read.get(quantity, ())
        return self.written.get(quantity) or (names[0] if names else quantity)

    def refusal(self, group: str, word: str) -> str:
        """Explain why the trainer has no option for a choice."""
        known = self.cannot.get(f"{group}:{word}") or self.cannot.get(group)
        return known or f"{self.title} has no option for it"


def _rules(rows: list[dict[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule(str(row["rule"]), row) for row in rows)


def _trainer(name: str, row: dict[str, Any]) -> Trainer:
    # "tp: --tensor-model-parallel-size --tp": names in one text, the one to
    # write first.
    numbers = {
        quantity: text.split() for quantity, text in row.pop("numbers").items()
    }
    words = {
        group: {word: tuple(options) for word, options in choices.items()}
        for group, choices in row.pop("words").items()
    }
    rules: dict[str, Any] = {
        kind: _rules(row.pop(kind, []))
        for kind in ("divides", "equals", "needs")
    }
    return Trainer(
        name=name,
        known_by=tuple(row.pop("known_by")),
        written={
            # A name with "+" is read but never written.
            q: names[0]
            for q, names in numbers.items()
            if names[0][0] != "+"
        },
        read={
            q: tuple(x.lstrip("+") for x in names)
            for q, names in numbers.items()
        },
        words=words,
        **rules,
        **row,
    )


@cache
def trainers() -> Mapping[str, Trainer]:
    """All trainers of the table, by name."""
    text = (
        Path(__file__).with_name("trainers.toml").read_text(encoding="utf-8")
    )
    return {
        name: _trainer(name, row) for name, row in tomllib.loads(text).items()
    }


def trainer_named(name: str) -> Trainer:
    """The trainer with this name."""
    known = trainers()
    if name not in known:
        raise LayoutError(
            f"{no_such('trainer', name, known)} Trainers are {', '.join(known)}."
        )
    return known[name]
