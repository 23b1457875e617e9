"""Thirteen modules that nobody adapted equal their plain scripts, or are refused as the docs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ten_modules import LAYOUTS, MODULES, compared

PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"
ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.M
)
CELLS = {row[0]: row[1:] for row in ROWS if row[0] in MODULES}
# Mamba's scan is computed in float32, whatever the weights.
WITHIN = dict.fromkeys(MODULES, 1e-12) | {"Mamba (transformers)": 1e-6}


def test_the_page_lists_every_module() -> None:
    assert [*CELLS] == [*MODULES]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_trained_or_refused_as_the_page_says(
    name: str, layout: str
) -> None:
    for library in ("transformers", "timm"):
        if f"({library})" in name:
            pytest.importorskip(library)
    cell = CELLS[name][LAYOUTS.index(layout)]
    found = compared(name, layout)
    if re.fullmatch(r"\de[+-]\d\d", cell):
        assert not found.refused
        assert found.error < WITHIN[name]
    else:
        assert found.refused == cell
