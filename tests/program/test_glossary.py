"""The glossary's table of operations is the table of operations."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.layout import Layout
from phalanx.program.ops import KINDS
from phalanx.program.program import Op

TEXT = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()


def test_the_glossary_lists_every_operation_with_its_meaning_and_an_example_that_parses() -> None:
    rows = re.findall(r"^\| `(.)` \| (.+?) \| `(.+?)` \|$", TEXT, re.M)
    assert [(letter, does) for letter, does, _ in rows] == [
        (kind.letter, kind.does) for kind in KINDS.values()
    ]
    for letter, _, example in rows:
        assert Op.parse(example).kind == letter
        assert str(Op.parse(example)) == example


def test_the_glossary_s_layouts_parse() -> None:
    section = TEXT.split("## The words of a layout")[1]
    rows = re.findall(r"^\| `(.+?)`(?:, .*?)? \| (?!known)", section, re.M)
    assert len(rows) == 14
    for text in rows:
        Layout.parse(text if "pp" in text or "dp" in text else f"dp8 {text}")
