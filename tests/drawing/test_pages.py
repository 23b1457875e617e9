"""SVG, trace and page: what stands in them is the timeline, and nothing is fetched from anywhere."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import phalanx.drawing
from browser import needs_chromium, opened
from phalanx.drawing import Picture, chrome, page, svg, tag
from phalanx.layout import Layout, plain_pieces
from phalanx.program import (
    Costs,
    Op,
    Sizes,
    Span,
    StepOptions,
    Timeline,
    build,
    simulate,
)

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """</script><script>alert("1")</script> <img src=x onerror='a()'> & "q" {{data}}"""


def timeline(speed: float = 1.0) -> Timeline:
    layout = Layout.parse("dp2 pp2 zero3 1f1b:3")
    pieces = [range(2), range(2, 4)]
    kinds = {"F": 1, "B": 2, "send": 0.5, "G": 1, "S": 1, "U": 0.25}
    costs = Costs(
        {k: v * speed for k, v in kinds.items()},
        share=dict.fromkeys(range(4), 0.5),
    )
    return simulate(
        build(layout, plain_pieces(pieces), StepOptions(agree=False)),
        costs,
        Sizes.counts(4),
    )


PICTURE = Picture(
    "one & <two>", timeline(), held=(2, 1), notes=("a <note>",), unit="pieces"
)
BOTH = Picture("both", timeline(), timeline(1.5), names=("predicted", HOSTILE))
SEEN = [s for s in timeline().spans if s.end > s.start and s.op.kind != "<"]


def squares(drawn: str) -> list[xml.Element]:
    return [
        e
        for e in xml.fromstring(drawn).iter(f"{SVG}rect")
        if e.get("class") == "op"
    ]


def test_every_operation_that_takes_time_is_one_rectangle_as_wide_as_its_time() -> (
    None
):
    found = {}
    for square in squares(svg(PICTURE)):
        title = square.findtext(f"{SVG}title") or ""
        rank = int(re.search(r"rank (\d+)", title)[1])  # type: ignore[index]
        # a gap of one pixel
        found[rank, title.split(":")[0]] = float(square.get("width", 0)) + 1
    assert len(found) == len(SEEN)
    scales = {found[s.rank, str(s.op)] / (s.end - s.start) for s in SEEN}
    assert max(scales) == pytest.approx(min(scales), rel=1e-2)


def test_no_two_rectangles_of_an_svg_cover_each_other() -> None:
    boxes = []
    for e in squares(svg(BOTH)):
        x, y, w, h = (
            float(e.get(k, 0)) for k in ("x", "y", "width", "height")
        )
        boxes.append((y, x, x + w, y + h))
    boxes.sort()
    for (y, _, right, low), (y2, left, _, _) in pairwise(boxes):
        assert (y == y2 and left >= right - 0.01) or y2 >= low - 0.01


@pytest.mark.parametrize("picture", [PICTURE, BOTH], ids=["one", "two"])
def test_nothing_refers_to_another_place(picture: Picture) -> None:
    drawn = svg(picture).replace('xmlns="http://www.w3.org/2000/svg"', "", 1)
    assert not re.search(r"https?://|href|url\(|@import", drawn)
    written = page(picture)
    assert not re.search(
        r"https?:|//[a-z]+\.|@import|url\(|<iframe|<link(?! rel=\"icon\")",
        written,
    )
    assert not re.search(
        r"\ssrc=",
        written.replace("&lt;img src=x", "").replace("u003cimg src=x", ""),
    )


@pytest.mark.parametrize(
    "where", ["title", "notes", "names", "labels", "lane"]
)
def test_whatever_is_said_is_escaped(where: str) -> None:
    spans = (
        Span(
            0, HOSTILE if where == "lane" else "compute", Op("F", 0, 0), 0, 1
        ),
    )
    changed = {
        "title": Picture(HOSTILE, Timeline(spans)),
        "notes": Picture("", Timeline(spans), notes=(HOSTILE,)),
        "names": Picture(
            "", Timeline(spans), Timeline(spans), names=(HOSTILE, HOSTILE)
        ),
        "labels": Picture("", Timeline(spans), labels={0: HOSTILE}),
        "lane": Picture("", Timeline(spans)),
    }[where]
    for drawn in (page(changed), svg(changed)):
        assert "<img" not in drawn
        assert "</script><script>alert" not in drawn
    xml.fromstring(svg(changed))
    said = re.search(r'id="data">(.*?)</script>', page(changed), re.S)
    assert said
    json.loads(said[1])


def test_a_trace_holds_every_span_on_the_track_of_its_rank_and_lane() -> None:
    said = json.loads(chrome(PICTURE))
    names = {
        (e["pid"], e["tid"] if e["name"] == "thread_name" else None): e[
            "args"
        ]["name"]
        for e in said["traceEvents"]
        if e["name"] in ("process_name", "thread_name")
    }
    found = sorted(
        (
            names[e["pid"], e["tid"]],
            names[e["pid"], None],
            e["name"],
            e["ts"],
            e["ts"] + e["dur"],
        )
        for e in said["traceEvents"]
        if e["ph"] == "X"
    )
    wanted = sorted(
        (s.lane, f"rank {s.rank}", str(s.op), s.start * 1e3, s.end * 1e3)
        for s in timeline().spans
    )
    assert [f[:3] for f in found] == [w[:3] for w in wanted]
    assert [f[3:] for f in found] == [pytest.approx(w[3:]) for w in wanted]
    # C: memory over time
    assert {e["ph"] for e in said["traceEvents"]} == {"M", "X", "C"}


def test_messages_in_flight_at_once_cover_each_other_nowhere() -> None:
    """Three sends of a measured step overlap: the first covered the others, and a trace's slices
    overlapped on one thread."""
    times = [(0.0, 9.0), (1.0, 4.0), (2.0, 8.0), (5.0, 6.0)]
    sends = [Op("F", 0, 0)] + [Op(">", 0, n, of="F", peer=1) for n in range(4)]
    lanes = ["compute", *["act 0>1"] * 4]
    spans = tuple(
        Span(0, lane, op, *time)
        for lane, op, time in zip(
            lanes, sends, [(0.0, 1.0), *times], strict=True
        )
    )
    picture = Picture("", Timeline(spans))
    boxes = [
        [float(e.get(k, 0)) for k in ("y", "x", "width")]
        for e in squares(svg(picture))
    ]
    assert len(boxes) == 5
    for (y, left, wide), (y2, left2, _) in pairwise(sorted(boxes)):
        assert y != y2 or left2 >= left + wide - 0.01
    slices = [
        e for e in json.loads(chrome(picture))["traceEvents"] if e["ph"] == "X"
    ]
    assert len(slices) == 5
    by_thread = sorted((e["tid"], e["ts"], e["dur"]) for e in slices)
    for (thread, start, took), (thread2, start2, _) in pairwise(by_thread):
        assert thread != thread2 or start2 >= start + took - 1e-6


def test_two_timelines_are_two_groups_of_processes() -> None:
    said = json.loads(chrome(BOTH))["traceEvents"]
    names = {
        e["pid"]: e["args"]["name"]
        for e in said
        if e["name"] == "process_name"
    }
    assert sorted(names.values()) == sorted(
        f"rank {r} {name}" for r in (0, 1) for name in ("predicted", HOSTILE)
    )
    spans = [e["pid"] for e in said if e["ph"] == "X"]
    assert spans.count(0) == spans.count(2)


def test_the_page_holds_every_operation_and_what_each_rank_holds() -> None:
    said = re.search(r'id="data">(.*?)</script>', page(BOTH), re.S)
    assert said
    data = json.loads(said[1])
    for source, speed in ((0, 1.0), (1, 1.5)):
        found = {
            (t["rank"], t["lane"], s[3], s[0], s[1])
            for t in data["tracks"]
            if t["source"] == source
            for s in t["spans"]
        }
        assert found == {
            (s.rank, s.lane, str(s.op), s.start, s.end)
            for s in timeline(speed).spans
            if s.end > s.start and s.op.kind != "<"
        }
    memory = timeline().memory or {}
    for one in data["memory"][:2]:
        most = max(sum(amounts) for _, *amounts in one["points"])
        assert most == max(
            sum(held.values()) for _, held in memory[one["rank"]]
        )


def test_no_other_file_writes_markup() -> None:
    """There were six writers of SVG and four frames of a page, each with its own escaping."""
    source = Path(phalanx.drawing.__file__).parents[1]
    tags = "svg|rect|text|line|table|tr|td|th|div|span|p|h[1-6]|pre|style|body|html|canvas"
    wrong = [
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if path.name != "markup.py"
        and re.search(rf"</?({tags})[ >]", path.read_text())
    ]
    assert not wrong
    assert '<div class="' not in tag("p", '<div class="x">')


KEYS = """<script>
for (const key of ["n", "n", "ArrowDown", "+", "ArrowRight", "0", "Escape", "n", "n"])
  document.getElementById("lanes").dispatchEvent(new KeyboardEvent("keydown", { key }));
</script>"""


@needs_chromium
def test_the_page_runs_in_a_browser_without_a_complaint_and_answers_keys(
    tmp_path: Path,
) -> None:
    picture = replace(BOTH, names=("predicted", "measured"), limit=8.0)
    dom, console = opened(
        page(picture).replace("</body>", KEYS + "</body>"), tmp_path
    )
    assert console == []
    said = re.search(r'id="details"[^>]*>(.*?)</p>', dom, re.S)
    assert said
    assert said[1].startswith(
        "<b>1F0</b> forward of a piece on a microbatch: piece 1, microbatch 0"
    )
    assert "takes 0.5" in said[1]
    # The lanes, and memory of two ranks twice.
    assert dom.count("<canvas") == 1 + 4
    names = re.findall(r'aria-label="Memory of (.*?) over time', dom)
    assert names == [
        "rank 0, predicted", "rank 0, measured", "rank 1, predicted", "rank 1, measured"
    ]  # fmt: skip
    assert "of the 8 B that a rank may use" in dom


@needs_chromium
def test_the_page_forbids_requests_so_that_one_would_be_seen(
    tmp_path: Path,
) -> None:
    away = "http://127.0.0.1:9/x"
    asked = (
        f'<img src="{away}"><script>fetch("{away}").catch(() => 0)</script>'
    )
    _, console = opened(page(PICTURE).replace("</body>", asked), tmp_path)
    refused = [line for line in console if "Content Security Policy" in line]
    assert any("image" in line for line in refused)
    assert any("connect" in line.lower() for line in refused)
