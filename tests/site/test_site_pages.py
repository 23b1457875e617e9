"""The site's pages without a browser: links lead somewhere, nothing is loaded from elsewhere, everything
is escaped, headings are in order, and the verification wall shows any record as it is: red what is wrong,
missing or old."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import build
import pytest
import wall

from phalanx.drawing.page import frame
from phalanx.layout import Layout, Shape
from phalanx.layout.cases import SHAPES
from seeded import FAULTS

LOADS = {
    "src",
    "srcset",
    "poster",
    "data",
    "action",
    "formaction",
    "background",
    "xlink:href",
}


class Seen(HTMLParser):
    """What stands in a page: ids, links, what it loads, headings, images without words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = re.findall(
            r"url\(([^)]*)\)|@import[^;]*", text
        )
        self.headings: list[int] = []
        self.silent: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        if "id" in given:
            assert given["id"] not in self.ids, (
                f"two elements are {given['id']}"
            )
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
    return {
        path: Seen(path.read_text()) for path in sorted(out.rglob("*.html"))
    }


# Which `make site` writes, too.
OTHERS = {
    "playground.html",
    "exercises.html",
    "lab.html",
}


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
            assert target in site or target.name in OTHERS, (
                f"{path.name}: {link}"
            )
            assert not anchor or anchor in site[target].ids, (
                f"{path.name}: {link}"
            )


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Seen]) -> None:
    assert any(page.loads for page in site.values())
    for path, page in site.items():
        for load in page.loads:
            assert load == "data:," or (path.parent / load).is_file(), (
                f"{path.name}: {load}"
            )
        assert "script" not in page.tags
        assert page.silent == []


def test_headings_are_in_order_under_one_title(site: dict[Path, Seen]) -> None:
    for path, page in site.items():
        assert page.headings[0] == 1
        assert page.headings.count(1) == 1, path.name
        assert all(b <= a + 1 for a, b in pairwise(page.headings)), (
            path.name,
            page.headings,
        )


# ---- the wall, of records that are made up

DAY = date(2026, 1, 20)
MADE = {"date": "2026-01-19", "commit": "abc1234", "on": "2 cores"}
GOOD = {"error": 2e-15, "allowed": 2e-5}
SIZES = {"gqa": "4 layers of width 16", "mlp": "2 layers of width 8"}


def comparison(part: str) -> dict[str, Any]:
    """A part of the wall with one layout of two models."""
    backend, dtype, _ = wall.COMPARISONS.get(part, ("threads", "float64", ()))
    cells = {"dp2": {"gqa": GOOD, "mlp": GOOD}}
    return MADE | {
        "backend": backend,
        "dtype": dtype,
        "models": SIZES,
        "cells": cells,
    }


def fault_row(
    verify: str = "step 0: the loss is 2.0, one process has 1.0",
) -> dict[str, Any]:
    loss = [1e-5, 2e-5]
    row = {
        "model": "gqa",
        "layout": "dp2",
        "dtype": "float64",
        "sums": "",
        "loss": loss,
    }
    return row | {"fault": "the count is forgotten", "verify": verify}


def program_row(*check: str) -> dict[str, Any]:
    row = {"model": "mlp", "layout": "pp2 1f1b:2", "edits": [[" 2F0>3", ""]]}
    return row | {"fault": "a send is forgotten", "check": [*check]}


def record() -> dict[str, Any]:
    """A wall on which all is well."""
    parts = {name: comparison(name) for name in wall.TITLES}
    faults = {"faults": MADE | {"rows": [fault_row()]}}
    programs = {"programs": MADE | {"rows": [program_row("rank 1 waits.")]}}
    return parts | faults | programs


class Marked(HTMLParser):
    """The texts of a page that are of a class."""

    def __init__(self, text: str, cls: str) -> None:
        super().__init__()
        self.cls, self.depth, self.texts = cls, 0, list[str]()
        self.feed(text)

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        if self.depth or dict(attrs).get("class") == self.cls:
            self.texts += [] if self.depth else [""]
            self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth = max(0, self.depth - 1)

    def handle_data(self, data: str) -> None:
        if self.depth:
            self.texts[-1] += data


def shown(data: Any, since: int | None = 0) -> str:
    return "".join(wall.page(data, DAY, lambda commit: since))


def red(data: Any) -> list[str]:
    return Marked(shown(data), "bad").texts


def test_a_wall_on_which_all_is_well_says_so_and_has_nothing_red() -> None:
    page = shown({**record(), "faults": MADE | {"rows": [fault_row()] * 3}})
    known = [row for row in Marked(page, "bad").texts if row != "not measured"]
    assert known == []
    assert wall.red(record()) == []
    assert Marked(page, "good").texts == ["Nothing on this wall is red."]
    assert page.count("2e-15") == 2 * 4  # each part in float64, and each model
    assert page.count("0.00") == 2  # in bfloat16 the share of the bound


def test_a_layout_that_differs_is_red_and_named_with_what_differs() -> None:
    data = record()
    data["gloo"]["cells"]["dp2"]["mlp"] = {
        "error": 3.0, "allowed": 1e9, "differs": "step 1: the norm",
    }  # fmt: skip
    assert wall.red(data) == ["gloo mlp dp2"]
    assert {"differs", "1 is red: gloo mlp dp2"} <= {*red(data)}
    assert (
        'title="step 1: the norm\nphalanx verify --model mlp --backend gloo'
        in shown(data)
    )


def test_a_layout_beyond_its_bound_is_red_though_no_difference_is_recorded() -> (
    None
):
    data = record()
    data["bfloat16"]["cells"]["dp2"]["gqa"] = {"error": 0.1, "allowed": 1.2}
    assert wall.red(data) == ["bfloat16 gqa dp2"]
    assert "differs" in red(data)


def test_a_cell_that_was_not_measured_is_red_and_one_that_does_not_fit_is_a_dash() -> (
    None
):
    data = record()
    del data["shm"]["cells"]["dp2"]["gqa"]
    data["shm"]["cells"]["dp2"]["mlp"] = {
        "none": "tp=3 does not divide heads=4"
    }
    assert wall.red(data) == ["shm gqa dp2"]
    assert "missing" in red(data)
    assert f"<td>{wall.NONE}</td>" in shown(data)


@pytest.mark.parametrize("part", [*wall.TITLES, "faults", "programs"])
def test_a_part_that_was_not_measured_is_red(part: str) -> None:
    data = record()
    del data[part]
    assert wall.red(data) == [f"{part} was not measured"]
    assert "Not measured." in red(data)


def test_a_mistake_that_nothing_finds_is_red() -> None:
    data = record()
    data["faults"]["rows"].append(fault_row(verify=""))
    data["programs"]["rows"].append(program_row())
    assert wall.red(data) == [
        "faults the count is forgotten",
        "programs a send is forgotten",
    ]
    assert red(data).count("nothing") == 2
    assert "verify finds 1 of 2," in shown(data)


@pytest.mark.parametrize(
    ("made", "since", "words", "old"),
    [
        (
            "2026-01-20",
            0,
            "2026-01-20 (today), commit abc1234; 0 commits",
            False,
        ),
        (
            "2026-01-19",
            3,
            "2026-01-19 (a day ago), commit abc1234; 3 commits",
            False,
        ),
        (
            "2026-01-06",
            9,
            "2026-01-06 (14 days ago), commit abc1234; 9 commits",
            False,
        ),
        (
            "2026-01-05",
            None,
            "2026-01-05 (15 days ago), commit abc1234. 2 cores.",
            True,
        ),
    ],
)
def test_each_part_has_its_commit_and_age_and_an_old_one_is_red(
    made: str, since: int | None, words: str, old: bool
) -> None:
    data = record()
    data["threads"]["date"] = made
    page = shown(data, since)
    assert words in page
    assert any(words in text for text in Marked(page, "bad").texts) == old


def test_columns_have_the_sizes_of_their_small_models() -> None:
    page = shown(record())
    assert "Llama style" in page
    assert page.count(f'title="{SIZES["gqa"]}"') == 5
    assert page.count(f"<td>{SIZES['mlp']}</td>") == 5


def test_sizes_are_those_of_the_shape() -> None:
    shape = Shape(
        "x",
        layers=3,
        hidden=32,
        heads=4,
        kv_heads=2,
        vocab=50,
        sequence=12,
        batch=5,
    )
    experts = replace(shape, experts=6, top_k=2, expert_ffn=20)
    assert wall.sizes_of(shape) == (
        "3 layers of width 32, 4 heads of 8, 2 of keys and values, MLPs of width 128,"
        " a vocabulary of 50, 5 sequences of 12 tokens"
    )
    assert "6 experts of width 20, 2 a token" in wall.sizes_of(experts)
    assert wall.sizes_of(SHAPES["mlp"]) == "4 layers of width 16, 25 rows"


def test_commits_since_one_that_git_does_not_know_are_unknown() -> None:
    assert wall.commits_since("0123456789abcdef") is None
    assert wall.commits_since("") is None


def test_mistakes_in_lists_are_found_by_check() -> None:
    assert [
        row["fault"]
        for row in wall.changed_programs()["rows"]
        if not row["check"]
    ] == []


def test_reported_mistakes_name_seeded_ones() -> None:
    known = {fault.name for fault in FAULTS}
    known |= {mistake["fault"] for mistake in wall.MISTAKES["program"]}
    for mistake in wall.MISTAKES["reported"]:
        assert set(mistake.get("seeded", ())) <= known
        assert ("why" in mistake) != ("seeded" in mistake)


def test_a_layout_that_differs_is_measured_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wall, "LAYOUTS", Layout.parse_many("dp2; tp2"))
    monkeypatch.setitem(
        wall.COMPARISONS, "threads", ("threads", "float64", ("gqa",))
    )
    row_region = next(
        fault for fault in FAULTS if fault.name.startswith("row region")
    )
    with row_region.patch():
        found = wall.compared("threads")
    assert wall.red(record() | {"threads": found}) == ["threads gqa tp2"]
    assert (
        "step 0: the output of embed"
        in found["cells"]["tp2"]["gqa"]["differs"]
    )
    assert found["cells"]["dp2"]["gqa"]["allowed"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("part", wall.PARTS)
def test_what_the_wall_shows_agrees_when_it_is_measured_now(part: str) -> None:
    assert wall.red(record() | {part: wall.PARTS[part]()}) == []


def test_everything_on_the_wall_is_escaped() -> None:
    hostile = '</script><script>alert("1")</script><img src=x onerror="a()">'

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: v if k == "date" else changed(v) for k, v in value.items()
            }
        if isinstance(value, list):
            return [changed(v) for v in value]
        return hostile if isinstance(value, str) else value

    text = changed(record())
    for part in (*wall.COMPARISONS, wall.OWN_CODE):
        cell = {"error": 2.0, "allowed": 2.0, "differs": hostile}
        text[part] |= {
            "models": {hostile: hostile},
            "cells": {hostile: {hostile: cell}},
        }
    page = Seen(frame(hostile, *wall.page(text, DAY, lambda commit: None)))
    assert not page.tags & {"script", "img"}
    assert page.loads == ["data:,"]
