"""The tables of docs/families.md on models in transformers' own code, against the models."""

from __future__ import annotations

import pytest

import families

PAGE = families.PAGE.read_text()
# The others are as quick, and all together take half a minute.
SOME = ("granite", "glm", "stablelm", "bert", "gptj", "lfm2")


@pytest.mark.parametrize(
    "name",
    [
        n if n in SOME else pytest.param(n, marks=pytest.mark.slow)
        for n in families.FAMILIES
    ],
)
def test_the_page_says_what_is_left_whole_or_why_it_is_refused(
    name: str,
) -> None:
    fits, text = families.described(name)
    (line,) = (
        each
        for each in PAGE.splitlines()
        if each.startswith(families.row(name, text))
    )
    assert (line.count("|") == 4) == fits
    if fits:
        agree, of, count = line.split("|")[3].split()
        assert (agree, of) == (count, "of")
        assert int(count) > 7
