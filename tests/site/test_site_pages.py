"""The site's pages without a browser: links lead somewhere, nothing is loaded from elsewhere, everything
is escaped, headings are in order, and the verification wall shows what was measured."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import build
import pytest
import wall

from phalanx.draw.page import frame
from phalanx.layout import Layout
from seeded import FAULTS

LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background", "xlink:href"}


class Seen(HTMLParser):
    """What stands in a page: ids, links, what it loads, headings, images without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = re.findall(r"url\(([^)]*)\)|@import[^;]*", text)
        self.headings: list[int] = []
        self.silent: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        if "id" in given:
            assert given["id"] not in self.ids, f"two elements are {given['id']}"
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loads += [given[name] for name in LOADS & given.keys()]
        self.loads += [given["href"]] if tag != "a" and "href" in given else []
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img" and not given.get("alt"):
            self.silent.append(given.get("src", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Seen]:
    """The pages that are written from Markdown and from the wall's data."""
    out = tmp_path_factory.mktemp("site")
    build.documents(out)
    build.verification_wall(out)
    return {path: Seen(path.read_text()) for path in sorted(out.rglob("*.html"))}


OTHERS = {"playground.html", "lab.html"}  # which `make site` writes, too


def test_every_link_leads_to_a_page_and_its_heading_or_is_a_citation(
    site: dict[Path, Seen],
) -> None:
    assert len(site) > 25
    for path, page in site.items():
        for link in page.links:
            to, _, anchor = link.partition("#")
            if re.match("https://", to):
                continue
            target = (path.parent / to).resolve() if to else path
            assert target in site or target.name in OTHERS, f"{path.name}: {link}"
            assert not anchor or anchor in site[target].ids, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Seen]) -> None:
    assert any(page.loads for page in site.values())
    for path, page in site.items():
        for load in page.loads:
            assert load == "data:," or (path.parent / load).is_file(), f"{path.name}: {load}"
        assert "script" not in page.tags
        assert page.silent == []


def test_headings_are_in_order_under_one_title(site: dict[Path, Seen]) -> None:
    for path, page in site.items():
        assert page.headings[0] == 1
        assert page.headings.count(1) == 1, path.name
        assert all(b <= a + 1 for a, b in pairwise(page.headings)), (path.name, page.headings)


# ---- the wall


@pytest.fixture(scope="module")
def data() -> Any:
    return json.loads(wall.FILE.read_text())


# What goes beyond its bound by a fifth, in the gradient of one norm's bias. The wall says so.
BEYOND = {("bfloat16", "odd", words) for words in ("tp2", "tp4", "tp2 recompute:selective")}


def test_the_wall_has_a_cell_for_every_layout_and_model_and_but_three_agree(data: Any) -> None:
    for part, (_, dtype, models) in wall.COMPARISONS.items():
        cells = data[part]["cells"]
        assert list(cells) == [str(layout) for layout in wall.LAYOUTS]
        for layout in wall.LAYOUTS:
            for model in models:
                cell = cells[str(layout)][model]
                if "none" not in cell:
                    assert dtype != "float64" or cell["error"] <= 1e-10
                    assert ("differs" in cell) == (cell["allowed"] > 1)
                    assert ("differs" in cell) == ((dtype, model, str(layout)) in BEYOND)
    assert {row["fault"] for row in data["faults"]["rows"]} <= {fault.name for fault in FAULTS}
    assert all(row["verify"] for row in data["faults"]["rows"])


def test_mistakes_in_lists_are_found_as_the_wall_says(data: Any) -> None:
    found = json.loads(json.dumps(wall.changed_programs()["rows"]))
    assert found == data["programs"]["rows"]
    assert all(row["check"] for row in found)


def test_reported_mistakes_name_seeded_ones(data: Any) -> None:
    known = {row["fault"] for part in ("faults", "programs") for row in data[part]["rows"]}
    for mistake in wall.MISTAKES["reported"]:
        assert set(mistake.get("seeded", ())) <= known
        assert ("why" in mistake) != ("seeded" in mistake)


def test_some_cells_of_the_wall_are_measured_again(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last digits of another machine; a layout that no longer agrees is seen at once."""
    few = Layout.parse_many("dp2 zero1; tp2 seq; pp2 zb-h1:3")
    monkeypatch.setattr(wall, "LAYOUTS", few)
    monkeypatch.setitem(wall.COMPARISONS, "threads", ("threads", "float64", ("gqa",)))
    for layout, row in wall.compared("threads")["cells"].items():
        assert row["gqa"]["error"] < 100 * data["threads"]["cells"][layout]["gqa"]["error"]


def test_everything_on_the_wall_is_escaped(data: Any) -> None:
    hostile = '</script><script>alert("1")</script><img src=x onerror="a()">'

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: changed(v) for k, v in value.items()}
        if isinstance(value, list):
            return [changed(v) for v in value]
        return hostile if isinstance(value, str) else value

    text = changed(data)
    for part in (*wall.COMPARISONS, wall.OWN_CODE):
        cell = {"error": 2.0, "allowed": 2.0, "differs": hostile}
        text[part] |= {"models": [hostile], "cells": {hostile: {hostile: cell}}}
    for part in ("faults", "programs"):  # by their names others find them
        for row, right in zip(text[part]["rows"], data[part]["rows"], strict=True):
            row["fault"] = right["fault"]
    page = Seen(frame(hostile, *wall.page(text)))
    assert not page.tags & {"script", "img"}
    assert page.loads == ["data:,"]
