"""What is shown of a trial: text, JSON, one page that asks for nothing, and the verb's exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from browser import needs_chromium, opened
from phalanx.cli.usage import UsageError
from phalanx_lab import command as verb
from phalanx_lab.catalogue import NAMES, PAPERS, Cell, LabError, Size, listing
from phalanx_lab.record import Claim, Interval, LabStep, Value
from phalanx_lab.show import lab_page, lab_text, sent_rows, value_rows
from phalanx_lab.trial import LabTrial, conduct

SMALL = Size(batch=8, width=16, layers=4, steps=2)
FLAGS = [
    "--ranks",
    "2",
    "--batch",
    "8",
    "--width",
    "16",
    "--layers",
    "4",
    "--steps",
    "2",
]


@pytest.fixture(scope="module")
def trials() -> list[LabTrial]:
    return list(conduct(NAMES, SMALL, ranks=2))


class Reader(HTMLParser):
    """Tags that open and close, words, and whatever would make a request or run something."""

    ALONE = frozenset(("meta", "link"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        self.tags.add(tag)
        said = dict(attrs)
        assert not [name for name in said if name.startswith("on")]
        self.links += [
            said[name] or "" for name in ("href", "src") if name in said
        ]
        self.ids += [said["id"] or ""] if "id" in said else []
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(written: str) -> Reader:
    reader = Reader()
    reader.feed(written)
    reader.close()
    assert reader.open == []
    return reader


def with_false_claim(trial: LabTrial) -> LabTrial:
    first, *others = trial.records
    claims = [Claim("two is three", False, "2, not 3"), *first.claims]
    return replace(trial, records=(replace(first, claims=claims), *others))


def test_the_page_is_one_file_that_asks_for_nothing(
    trials: list[LabTrial],
) -> None:
    reader = read(lab_page(trials))
    assert not reader.tags & {"script", "img", "iframe", "object", "embed"}
    # asked for by a click
    papers = {link for link in reader.links if link.startswith("https://")}
    assert papers == {
        PAPERS[name] for t in trials for name in t.experiment.chapter.papers
    }
    assert {
        link for link in reader.links if not link.startswith("#")
    } - papers == {"data:,"}
    assert reader.ids == ["contents", *NAMES, "strategies"]
    assert {link[1:] for link in reader.links if link.startswith("#")} == set(
        reader.ids
    )
    assert "url(" not in lab_page(trials)


def test_the_page_shows_the_source_values_and_pictures_of_every_experiment(
    trials: list[LabTrial],
) -> None:
    for trial in trials:
        written = lab_page([trial])
        words = "".join(read(written).words)
        for line in trial.experiment.source.splitlines():
            assert line.strip() in words
        assert all(
            re.sub("\n\n|`", "", cell.prose) in words
            for cell in trial.experiment.cells
        )
        for title, steps in trial.steps():
            assert title in words
            for _, step in steps:
                assert all(value.hash in written for _, value in step.values)
        assert all(claim.says in words for claim in trial.claims)
        assert "<svg" in written, trial.experiment.name


def test_what_is_told_cannot_become_a_tag(trials: list[LabTrial]) -> None:
    evil = '<script>alert("x")</script>'
    cells = [
        Cell(evil, [f"x = '{evil}'"], 1),
        Cell(evil, [f"# {evil}"], 9, part=evil),
    ]
    story = f"{evil}\n\n    {evil}"
    file = replace(trials[0].experiment, title=evil, story=story, cells=cells)
    record = replace(trials[0].records[0], claims=[Claim(evil, False, evil)])
    first = record.steps[0]
    value = replace(first.values[0][1], name=evil, shape=evil, first=evil)
    shown = (evil, [evil], [[evil]])
    span = Interval("compute", evil, first.start, first.start + 1)
    step = replace(
        first,
        title=evil,
        values=[(evil, value)],
        notes=[evil],
        tables=[shown],
        spans=[span],
    )
    hostile = replace(
        trials[0], experiment=file, records=(replace(record, steps=[step]),)
    )
    reader = read(lab_page([hostile]))
    assert "script" not in reader.tags
    assert "".join(reader.words).count(evil) >= 12


def test_text_shows_the_values_of_every_rank_and_ends_with_one_line_about_the_claims(
    trials: list[LabTrial],
) -> None:
    trial = next(each for each in trials if each.experiment.name == "zero-2")
    shown = lab_text(trial)
    assert re.search(
        r"before  ranks 0-1  weights +4 x \[16, 16\] float64", shown
    )
    assert "rank 1  reduce on everyone" in shown
    count = len(trial.claims)
    assert shown.splitlines()[-1] == f"{count} claims hold"
    lines = lab_text(trial, verbose=True).splitlines()
    assert sum(line.startswith("  ok   ") for line in lines) == count
    wrong = with_false_claim(trial)
    assert lab_text(wrong).splitlines()[-2:] == [
        f"1 of {count + 1} claims fail",
        "  FAIL two is three (2, not 3)",
    ]
    assert "FAIL two is three 2, not 3" in "".join(
        read(lab_page([wrong])).words
    )


def test_equal_ranks_share_a_line_and_others_have_their_own() -> None:
    """An all-reduce was four lines with one value."""
    steps = []
    for rank in range(4):
        own = Value("x", "[1] float32", str(rank), f"own{rank}", 4)
        weight = Value("w", "[1] float32", "7", "same", 4)
        total = Value("x", "[1] float32", "6", "sum", 4)
        half = Value("y", "[1] float32", str(rank // 2), f"h{rank // 2}", 4)
        values = [("before", own), ("before", weight)]
        values += [("after", total), ("after", half)]
        to = {other: 16.0 for other in range(4) if other != rank}
        step = LabStep("s", 0.0, values=values)
        step.sent["all_reduce on everyone"] = to
        if rank == 2:
            step.sent["send on everyone"] = {3: 8.0}
        steps.append((rank, step))
    assert value_rows(steps) == [
        ("before", "ranks 0-3", "w", "[1] float32", "7", "#same"),
        *(
            ("", f"rank {r}", "x", "[1] float32", str(r), f"#own{r}")
            for r in range(4)
        ),
        ("after", "ranks 0-3", "x", "[1] float32", "6", "#sum"),
        ("", "ranks 0-1", "y", "[1] float32", "0", "#h0"),
        ("", "ranks 2-3", "y", "[1] float32", "1", "#h1"),
    ]
    assert sent_rows(steps) == [
        ("ranks 0-1, 3", "all_reduce on everyone", "16 B to each other rank"),
        ("rank 2", "all_reduce on everyone", "16 B to each other rank"),
        ("", "send on everyone", "8 B to 3"),
    ]


def test_every_step_is_shown_below_the_code_that_recorded_it(
    trials: list[LabTrial],
) -> None:
    for trial in trials:
        shown = [step for _, steps in trial.blocks() for step in steps]
        assert sorted(title for title, _ in shown) == sorted(
            title for title, _ in trial.steps()
        )
        code = "\n".join(
            line for cell, _ in trial.blocks() for line in cell.lines
        )
        assert code + "\n" == trial.experiment.source
    collectives = next(t for t in trials if t.experiment.name == "collectives")
    for cell, steps in collectives.blocks():
        for title, _ in steps:
            if not title.startswith("the gradient"):
                code = "".join(line.strip() for line in cell.lines)
                assert f'show("{title}"' in code


def test_without_a_name_the_verb_lists_every_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verb.run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    assert verb.run(["--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(NAMES)


def test_the_docs_list_what_the_verb_lists() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    assert "".join(f"    {line}\n" for line in listing().splitlines()) in docs


def test_a_run_prints_before_after_and_the_check_and_exits_with_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert verb.run(["grid", *FLAGS]) == 0
    out = capsys.readouterr().out
    assert "before" in out
    assert "after" in out
    assert "claims hold" in out
    assert (
        verb.run(
            ["grid", "zero-1", *FLAGS, "--html", str(tmp_path / "lab.html")]
        )
        == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 2
    written = read((tmp_path / "lab.html").read_text())
    assert written.ids == ["contents", "grid", "zero-1", "strategies"]
    assert verb.run(["swap", *FLAGS, "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["experiments"]
    assert said["holds"] is True
    assert [record["rank"] for record in said["records"]] == [0, 1]
    assert said["records"][0]["steps"][0]["values"][0][1]["hash"]


def test_a_claim_that_fails_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
    trials: list[LabTrial],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def false(*_: Any, **__: Any) -> Iterator[LabTrial]:
        yield with_false_claim(trials[0])

    monkeypatch.setattr("phalanx_lab.trial.conduct", false)
    assert verb.run(["collectives", *FLAGS]) == 1
    assert verb.run(["collectives", *FLAGS, "--json"]) == 1
    assert "FAIL two is three" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["zero-9"],
        ["grid", "--ranks", "0"],
        ["--html", "x"],
        ["grid", "--backend", "pigeon"],
        ["grid", "--width", "0"],
        ["data-parallel", "--ranks", "3", "--batch", "8", "--width", "16"],
    ],
)
def test_what_means_nothing_is_refused_with_a_sentence(
    argv: list[str],
) -> None:
    with pytest.raises((UsageError, LabError)) as refused:
        verb.run(argv)
    assert len(str(refused.value)) > 20


@needs_chromium
def test_in_a_browser_the_page_opens_without_a_complaint_and_may_not_ask_for_anything(
    trials: list[LabTrial], tmp_path: Path
) -> None:
    dom, console = opened(lab_page(trials), tmp_path)
    assert console == []
    assert dom.count("<section") == len(NAMES) + 1
    # The page forbids itself every request, so one of its own would be seen on the console.
    asking = lab_page(trials[:1]).replace(
        "</body>", '<img src="http://127.0.0.1:9/x"></body>'
    )
    _, console = opened(asking, tmp_path)
    assert [line for line in console if "Content Security Policy" in line]
