"""`phalanx schema`: prints the JSON Schema, with its version, of what a command prints
with --json.

Without a name, the commands that have a schema are listed.

  phalanx schema check
  phalanx schema plan-explain    of `phalanx plan --explain`
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .parser import Parser
from .usage import UsageError, nearest_word, say

# One paragraph for each output: `name?: type` is an optional field, `{*: type}` a table
# with any keys. `python tests/cli/test_schemas.py` generates it from what commands
# print; removing a field or changing its type makes a new version.
_FILE = Path(__file__).parent / "outputs.txt"
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[\w*-]+|[{}\[\],:|?]')


def run(argv: list[str]) -> int:
    parser = Parser(__doc__, json=False)
    parser.add(
        "name",
        nargs="*",
        metavar="COMMAND",
        help="such as check, or plan cost",
    )
    name = "-".join(parser.read(argv).name)
    outputs = described()
    if not name:
        say("\n".join(outputs))
        return 0
    if name not in outputs:
        raise UsageError(
            f"unknown schema {name[:60]!r}.{nearest_word(name, outputs)}"
        )
    say(json.dumps(schema_of(name, outputs[name]), indent=1))
    return 0


def described() -> dict[str, str]:
    """Return the described outputs, each with the text of its type."""
    paragraphs = _FILE.read_text(encoding="utf-8").strip().split("\n\n")
    parts = (paragraph.partition(": ") for paragraph in paragraphs)
    # "name: type", one paragraph each.
    return {name: text for name, _, text in parts}


def schema_of(name: str, text: str) -> dict[str, Any]:
    """Return the JSON Schema of an output from the text of its type."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"phalanx/{name}/1",
        "title": f"phalanx {name.replace('-', ' ')} --json",
    }
    return head | _Reader(text).type()


class _Reader:
    """Parses the text of a type, word by word."""

    def __init__(self, text: str) -> None:
        self._words = _WORD.findall(text)
        self._at = 0

    def _next(self) -> str:
        self._at += 1
        word: str = self._words[self._at - 1]
        return word

    def _takes(self, word: str) -> bool:
        """Consume a word if it comes next."""
        comes = self._words[self._at : self._at + 1] == [word]
        self._at += comes
        return comes

    def type(self) -> dict[str, Any]:
        """Parse a type, or several alternatives separated by bars."""
        kinds = [self._one()]
        # "int | null" -> anyOf of both.
        while self._takes("|"):
            kinds.append(self._one())
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}

    def _one(self) -> dict[str, Any]:
        word = self._next()
        if word == "[":
            return self._list()
        if word != "{":
            return {"type": word}
        # "{*: type}": any keys, one type of values.
        if self._takes("*"):
            self._next()  # the colon
            table = {"type": "object", "additionalProperties": self.type()}
            self._next()  # the bracket
            return table
        return self._record()

    def _list(self) -> dict[str, Any]:
        if self._takes("]"):
            return {"type": "array"}
        items = self.type()
        self._next()  # the bracket
        return {"type": "array", "items": items}

    def _record(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        required: list[str] = []
        # "name?: type" may be missing.
        for name in self._names():
            if not self._takes("?"):
                required.append(name)
            self._next()  # the colon
            fields[name] = self.type()
        return {"type": "object", "properties": fields, "required": required}

    def _names(self) -> Iterator[str]:
        """Yield the name of each field; afterwards the closing bracket is consumed."""
        while not self._takes("}"):
            self._takes(",")
            word = self._next()
            # A name that is no word is in quotes.
            yield json.loads(word) if word.startswith('"') else word
