"""A run's pictures: what stands in each are the numbers of the data, worked out by hand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.drawing import (
    Picture,
    breakdown_svg,
    memory_svg,
    recorded_picture,
    shards_svg,
    svg,
)
from phalanx.layout import Layout, Shape, plain_pieces, staged_pieces
from phalanx.parallel import build_model
from phalanx.program import (
    KINDS,
    Op,
    Recorded,
    Span,
    StepOptions,
    Timeline,
    build,
    simulate,
)
from phalanx.report import report
from phalanx.report.faults import BINS, faults_svg
from phalanx.report.scaling import scaling_svg, speeds
from phalanx.report.sizes import shards_of, sizes_of_run

SVG = "{http://www.w3.org/2000/svg}"


def tips(drawn: str, tag: str) -> list[tuple[xml.Element, str]]:
    """Every element of a kind that says something under the mouse, with its words."""
    elements = xml.fromstring(drawn).iter(f"{SVG}{tag}")
    return [(e, text) for e in elements if (text := e.findtext(f"{SVG}title"))]


def corners(element: xml.Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in str(element.get("points")).split())
    return [(float(x), float(y)) for x, y in pairs]


# ---- one step

F, B = Op("F", 0, 0), Op("B", 0, 0)
SPANS = (
    Span(0, "gather", Op("G", 0), 0.0, 3.0),  # nothing is computed until 2
    Span(0, "compute", F, 2.0, 5.0),
    Span(0, "act", Op(">", 0, 0, "F", 1), 5.0, 5.5),
    # Exposed from 5.5 to 6 and from 8 to 9.
    Span(0, "reduce", Op("S", 0), 5.0, 9.0),
    Span(0, "compute", B, 6.0, 8.0),
    Span(1, "compute", F, 0.0, 10.0),
)
BY_HAND = {
    ("rank 0", "gather weights"): 2.0, ("rank 0", "forward"): 3.0, ("rank 0", "backward"): 2.0,
    ("rank 0", "message"): 0.5, ("rank 0", "sum gradients"): 1.5, ("rank 0", "idle"): 1.0,
    ("rank 1", "forward"): 10.0,
}  # fmt: skip


def test_the_parts_of_a_step_are_bars_as_long_as_their_time() -> None:
    drawn = breakdown_svg(Picture("", Timeline(SPANS)), 860)
    found = {}
    for bar, words in tips(drawn, "rect"):
        match = re.match(
            r"(rank \d): (.+?) ([\d.]+), ([\d.]+) % of the step", words
        )
        assert match
        assert float(match[4]) == pytest.approx(100 * float(match[3]) / 10)
        name = (
            match[2]
            .replace("send and receive", "message")
            .replace("send", "message")
        )
        found[match[1], name] = float(match[3]), float(bar.get("width", 0)) + 1
    assert {key: time for key, (time, _) in found.items()} == BY_HAND
    scales = {round(width / time) for time, width in found.values()}
    assert len(scales) == 1


def test_what_a_rank_holds_is_an_area_as_high_as_its_bytes() -> None:
    held = (
        (0.0, {"weights": 100.0}),
        (2.0, {"weights": 100.0, "activations": 300.0}),
    )
    memory = {0: (*held, (6.0, {"weights": 100.0, "activations": 50.0}))}
    drawn = memory_svg(Picture("", Timeline(SPANS[:5], memory)), 860)
    # activations, over weights
    (low, _), (high, words) = reversed(tips(drawn, "polygon"))
    assert low.get("data-name") == "activations"
    assert "weights at most 100 B" in words
    floor = max(y for _, y in corners(low))
    # 400 bytes are the whole row. Kinds are stacked by name: activations first, weights on top.
    heights = [floor - y for _, y in corners(low)][1:-1:2]
    assert [h / 96 * 400 for h in heights] == pytest.approx(
        [0, 300, 50], abs=0.1
    )
    tops = [floor - y for _, y in corners(high)][1:-1:2]
    assert [h / 96 * 400 for h in tops] == pytest.approx(
        [100, 400, 150], abs=0.1
    )


def axis_of(drawn: str) -> dict[str, float]:
    """The numbers of a row's own axis, with the heights of their lines above its floor."""
    tree = xml.fromstring(drawn)
    words = [
        e for e in tree.iter(f"{SVG}text") if e.get("class") == "soft end"
    ]
    # Lines of the axis start left of the row and end at its right edge.
    lines = [
        float(e.get("y1", 0))
        for e in tree.iter(f"{SVG}line")
        if e.get("class") == "grid" and e.get("y1") == e.get("y2")
    ]
    floor = max(lines)
    return {str(e.text): floor - y for e, y in zip(words, lines, strict=True)}


def test_memory_has_an_axis_in_bytes_and_the_limit_of_the_device() -> None:
    memory = {0: ((0.0, {"weights": 3e6}), (2.0, {"weights": 4e6}))}
    near = Picture("", Timeline(SPANS[:5], memory), limit=8e6)
    drawn = memory_svg(near, 860)
    # 8 MB, the limit, are the whole row of 96 pixels: a number each 2 MB.
    assert axis_of(drawn) == pytest.approx(
        {"0 B": 0, "2 MB": 24, "4 MB": 48, "6 MB": 72, "8 MB": 96}
    )
    (limit,) = (
        e
        for e in xml.fromstring(drawn).iter(f"{SVG}line")
        if e.get("class") == "limit"
    )
    (area,) = (e for e, _ in tips(drawn, "polygon"))
    floor = max(y for _, y in corners(area))
    assert floor - float(limit.get("y1", 0)) == pytest.approx(96, abs=0.1)
    assert "The fullest rank holds 4 MB, 50 % of the 8 MB" in drawn
    assert "that a rank may use (the dashed line)." in drawn
    # A limit of 80 GB would leave no height to what is held.
    far = memory_svg(Picture("", near.timeline, limit=80e9), 860)
    assert list(axis_of(far)) == ["0 B", "1 MB", "2 MB", "3 MB", "4 MB"]
    assert 'class="limit"' not in far
    assert "0.005 % of the 80 GB that a rank may use." in far


def test_kinds_of_a_step_differ_in_letters_and_texture_not_in_colour_alone() -> (
    None
):
    """Counting tokens, agreeing on the norm and waiting were three grey bars."""
    spans = (
        Span(0, "agree", Op("N"), 0.0, 3.0),
        Span(0, "compute", F, 3.0, 6.0),
        Span(0, "agree", Op("A"), 6.0, 9.0),
        Span(1, "compute", F, 0.0, 12.0),
    )
    drawn = breakdown_svg(Picture("", Timeline(spans)), 860)
    tree = xml.fromstring(drawn)
    texts = [e.text for e in tree.iter(f"{SVG}text")]
    assert "count tokens 25.0 %" in texts
    assert "agree on norm 25.0 %" in texts
    # The legend has each letter, and the empty box of idle time.
    assert {"N", "F", "A", "idle"} <= set(texts)
    looks = {}
    elements = list(tree)
    for element, following in pairwise(elements):
        tip = element.findtext(f"{SVG}title") or ""
        if tip.startswith("rank 0: "):
            striped = following.get("class") == "stripes"
            look = (element.get("fill"), element.get("class"), striped)
            looks[tip.partition(": ")[2].rpartition(", ")[0]] = look
    assert len(looks) == 4
    assert len(set(looks.values())) == 4


def test_all_kinds_of_one_colour_have_a_texture_of_their_own() -> None:
    spans = [
        Span(0, "compute", Op(kind), float(n), n + 1.0)
        for n, kind in enumerate(KINDS)
        if kind != "<"  # the other end of a message
    ]
    tree = xml.fromstring(
        breakdown_svg(Picture("", Timeline(tuple(spans))), 4e3)
    )
    looks = set()
    for element, following in pairwise(tree):
        if element.get("class") == "op":
            # The moves of the path's stripes, without their places.
            path = following.get("d", "")
            stripes = tuple(re.findall(r"[vh]", path))
            looks.add((element.get("fill"), stripes))
    assert len(looks) == len(spans)


def test_a_message_lasts_from_its_sending_until_it_is_received() -> None:
    """Its sender looks after it when the step is over: it was a bar over the whole step, and 100 times
    as long as predicted."""
    program = build(
        Layout.parse("pp2 gpipe:2"),
        plain_pieces([range(1), range(1, 2)]),
        StepOptions(agree=False),
    )
    right = simulate(program)
    end = max(s.end for s in right.spans)
    late = tuple(
        s._replace(end=end) if s.op.kind == ">" else s for s in right.spans
    )
    early = tuple(
        s._replace(start=0.0) if s.op.kind == "<" else s for s in late
    )
    measured = Recorded(program, Timeline(early)).measured()
    assert measured.spans == right.spans
    picture = recorded_picture(Recorded(program, Timeline(early)))
    assert {row[0]: row[3] for row in picture.differences} == {
        "forward": "+0.0 %", "backward": "+0.0 %", "idle": "+0.0 %"
    }  # fmt: skip


def test_a_whole_step_fits_its_width_however_short_its_operations_are() -> (
    None
):
    spans = [
        Span(0, "compute", Op("F", 0, n), n, n + 1e-3) for n in range(1000)
    ]
    drawn = xml.fromstring(svg(Picture("", Timeline(tuple(spans))), 860))
    boxes = [e for e in drawn.iter(f"{SVG}rect") if e.get("class") == "op"]
    assert len(boxes) == 1000
    assert drawn.get("width") == "860"
    assert all(float(e.get("x", 0)) < 860 for e in boxes)


SHAPE = Shape(
    name="s",
    layers=2,
    hidden=8,
    heads=2,
    ffn=12,
    vocab=16,
    sequence=4,
    batch=4,
)


def test_what_a_step_holds_is_what_the_model_has_in_bytes() -> None:
    layout = Layout.parse("")
    program = build(
        layout, staged_pieces(layout, SHAPE), StepOptions(agree=False)
    )
    sizes = sizes_of_run(
        partial(build_model, SHAPE), layout, program, 4, "cpu"
    )
    numbers = sum(p.numel() for p in build_model(SHAPE).weights.values())
    points = (simulate(program, sizes=sizes).memory or {})[0]
    assert points[0][1]["weights"] == 4 * numbers
    assert points[0][1]["optimizer"] == 8 * numbers
    # The embedding keeps its 16 tokens' numbers, and puts out 16 x 8 in float32.
    assert (
        max(now.get("activations", 0.0) for _, now in points) > 2 * 16 * 8 * 4
    )
    assert points[-1][1]["activations"] == 0


# ---- shards


def test_each_rank_has_the_rows_that_plain_tensors_say() -> None:
    layout = Layout.parse("dp2 tp2 zero3")
    program = build(
        layout, staged_pieces(layout, SHAPE), StepOptions(agree=False)
    )
    slices = shards_of(partial(build_model, SHAPE), layout, program, 16)
    whole = torch.arange(16 * 8).view(16, 8)
    seen = []
    for rank, words in (
        (s.rank, str(s)) for s in slices if s.weight == "embed.tokens.weight"
    ):
        match = re.match(
            r"rank \d: \S+ \[(\d+):(\d+), (\d+):(\d+)\] of 16 x 8; keeps (\d+):(\d+)",
            words,
        )
        assert match
        a, b, c, d, first, last = map(int, match.groups())
        # the vocabulary over tp
        assert torch.equal(whole[a:b, c:d], whole.chunk(2)[rank % 2])
        seen += whole[a:b, c:d].flatten()[first:last].tolist()
    # Each number has one owner.
    assert sorted(seen) == whole.flatten().tolist()
    drawn = shards_svg(slices, 860)
    texts = list(xml.fromstring(drawn).iter(f"{SVG}text"))
    heads = [e.text for e in texts if e.get("class") == "mid"]
    assert heads == ["rank 0", "rank 1", "rank 2", "rank 3"]
    names = [e.text for e in texts if e.get("class") == "name"]
    assert "embed.tokens.weight  16 x 8" in names
    shown = [words.split(";")[0] for _, words in tips(drawn, "rect")]
    assert len(shown) == len(set(shown))
    first = {}
    for each in slices:
        first.setdefault(
            (re.sub(r"\d+", "*", each.weight), each.rank), str(each)
        )
    assert {
        words.split("; and")[0] for _, words in tips(drawn, "rect")
    } == set(first.values())


# ---- a run


def record(
    event: str, clock: float, began: float, **values: Any
) -> dict[str, Any]:
    return {
        "event": event,
        "time": 1000 + clock,
        "clock": clock,
        "boot": "a",
        "began": began,
        **values,
    }


# Two processes: 100 to 170, killed, and 190 to 250; the second goes on at step 4 of 6.
LOG = [
    record("start", 110, 100, step=0, layout="dp2", ranks=2, spent={"starting": 10.0}),
    record("step", 130, 100, step=4, steps=4, loss=3.5, tokens_per_second=100.0, spent={"in a step": 20.0}),
    record("checkpoint", 140, 100, step=4, spent={"saving": 10.0}),
    record("step", 160, 100, step=6, steps=2, loss=3.25, tokens_per_second=80.0, spent={"in a step": 20.0}),
    record("start", 200, 190, step=4, layout="tp4", ranks=4, spent={"starting": 10.0}),
    record("step", 210, 190, step=6, steps=2, loss=3.125, tokens_per_second=150.0, spent={"in a step": 10.0}),
    record("step", 220, 190, step=8, steps=2, loss=3.0, tokens_per_second=160.0, spent={"in a step": 10.0}),
    record("end", 220, 190, step=8, spent={}),
]  # fmt: skip
SPENT = {
    "steps": 40.0,
    "lost steps": 20.0,
    "starting": 20.0,
    "saving": 10.0,
    "down": 30.0,
}


def test_the_strip_has_the_seconds_of_each_part_where_they_were_spent() -> (
    None
):
    drawn = faults_svg(LOG, 860)
    areas = {str(e.get("data-name")): e for e, _ in tips(drawn, "polygon")}
    assert set(areas) == set(SPENT)
    # The first is at the bottom, and each is drawn over those that are stacked on it.
    below = [0.0] * BINS
    floor = max(y for _, y in corners(areas["steps"]))
    times = {}
    for name in (
        n for n in ("steps", "lost steps", "starting", "saving", "down")
    ):
        tops = [(floor - y) / 56 for _, y in corners(areas[name])][1:-1:2]
        assert len(tops) == BINS
        shares = [top - low for top, low in zip(tops, below, strict=True)]
        assert sum(shares) * 120 / BINS == pytest.approx(SPENT[name], abs=0.05)
        times[name] = [
            n * 120 / BINS for n, share in enumerate(shares) if share > 0.01
        ]
        below = tops
    assert (
        min(times["lost steps"]),
        max(times["lost steps"]),
    ) == pytest.approx((40, 60), abs=0.6)
    assert (min(times["down"]), max(times["down"])) == pytest.approx(
        (60, 90), abs=0.6
    )
    said = [words for _, words in tips(drawn, "rect")]
    assert "killed after step 6, 60 s" in said
    assert "checkpoint at step 4, 40 s" in said
    assert "process 2: tp4, 90 s to 120 s" in said


def run_of(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in records)
    )
    return folder


def test_the_loss_is_what_was_written_and_words_of_restarts_stand_above_it(
    tmp_path: Path,
) -> None:
    pictures = report(run_of(tmp_path / "run", LOG)).pictures()
    drawn = xml.fromstring(pictures["loss.svg"])
    lines = [e for e in drawn.iter(f"{SVG}polyline") if e.get("data-values")]
    told = [str(e.get("data-values")).split("; ") for e in lines]
    # the second of the first is faint
    assert told == [["4, 3.5", "6, 3.25"], ["6, 3.125", "8, 3"]]
    words = [
        e
        for e in drawn.iter(f"{SVG}text")
        if (e.text or "").partition(":")[0] in ("start", "restart")
    ]
    assert [e.text for e in words] == ["start: dp2", "restart: tp4"]
    top = min(
        float(e.get("y2", 0))
        for e in drawn.iter(f"{SVG}line")
        if e.get("class") == "grid"
    )
    highest = min(y for line in lines for _, y in corners(line))
    assert max(float(e.get("y", 0)) for e in words) < top
    assert top <= highest + 0.1  # coordinates have one or two digits


def test_words_of_many_restarts_do_not_cover_each_other(
    tmp_path: Path,
) -> None:
    many = [
        record("start", n, n, step=n, layout=f"dp{n}", ranks=n)
        for n in range(1, 40)
    ]
    steps = [
        record("step", 50, 50, step=n, steps=1, loss=1.0)
        for n in range(40, 60)
    ]
    drawn = xml.fromstring(
        report(run_of(tmp_path / "run", many + steps)).pictures()["loss.svg"]
    )
    words = [
        e for e in drawn.iter(f"{SVG}text") if "start: dp" in (e.text or "")
    ]
    boxes = sorted(
        (float(e.get("y", 0)), float(e.get("x", 0)), len(e.text or "") * 6)
        for e in words
    )
    assert len(words) > 8
    for (y, x, wide), (y2, x2, _) in pairwise(boxes):
        assert y != y2 or x + wide <= x2
    marked = {
        text
        for e in drawn.iter(f"{SVG}line")
        if (text := e.findtext(f"{SVG}title"))
    }
    assert len(marked) == 39  # each is under the mouse


def test_speed_over_ranks_is_the_median_of_each_start(tmp_path: Path) -> None:
    slow = record(
        "step", 165, 100, step=6, steps=1, tokens_per_second=90.0, loss=3.0
    )
    runs = speeds([run_of(tmp_path / "run", [*LOG[:4], slow, *LOG[4:]])])
    # Without the first line: of 80 and 90, and of 160 alone.
    assert [(r.ranks, r.layout, r.rate) for r in runs] == [
        (2, "dp2", 85.0),
        (4, "tp4", 160.0),
    ]
    drawn = scaling_svg(runs, {runs[1]: 340.0}.get, 860)
    said = [words for _, words in tips(drawn, "circle")]
    assert said == [
        "measured: dp2 on 2 ranks, 85 tokens/s, 100% of ideal; run",
        "measured: tp4 on 4 ranks, 160 tokens/s, 94% of ideal; run",
        "planned: tp4 on 4 ranks, 340 tokens/s, 200% of ideal; run",
    ]
    heights = [float(e.get("cy", 0)) for e, _ in tips(drawn, "circle")]
    (ideal,) = (
        corners(e) for e in xml.fromstring(drawn).iter(f"{SVG}polyline")
    )
    # To a logarithm: 340 is one doubling above 170, which is what twice the ranks would reach.
    assert heights[0] == pytest.approx(ideal[0][1], abs=0.1)
    assert ideal[1][1] - heights[2] == pytest.approx(
        ideal[0][1] - ideal[1][1], abs=0.2
    )
