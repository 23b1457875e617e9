"""The report: what it shows is what the journal says, nothing is fetched, everything is escaped."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from browser import needs_chromium, opened
from phalanx.drawing import ChartAxis, Series, chart
from phalanx.layout import Layout, plain_pieces
from phalanx.program import Costs, Recorded, StepOptions, build, simulate
from phalanx.report import ReportError
from phalanx.report import report as report_of
from phalanx.report.step import step_extras

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """</script></pre><script>alert(1)</script><img src=x onerror='a()'> "q" & {body}"""


def report(folder: Path) -> str:
    return report_of(folder, step_extras(folder, None, None)).html()


def journal(hostile: str = "") -> list[dict[str, Any]]:
    """Ten steps as pp2, killed; from step 5 on as dp2; a validation at the end of each."""

    def start(step: int, layout: str) -> dict[str, Any]:
        return {
            "event": "start",
            "time": 10.0 * step,
            "step": step,
            "steps": 12,
            "layout": layout,
            "ranks": 2,
            "parameters": 1234,
            "data": hostile or "python",
            "model": {"name": hostile or "tiny"},
            "peak_flops": 2e12,
            "peak_from": hostile or "measured",
            "flops": {"model": 100.0, "full": 110.0},
            "versions": {"torch": hostile or "2.13"},
        }

    def step(
        number: int, loss: float, memory: int = 3 * 2**20
    ) -> dict[str, Any]:
        return {
            "event": "step",
            "time": 10.0 * number,
            "step": number,
            "steps": 1,
            "loss": loss,
            "seconds": 0.5,
            "mfu": 0.3,
            "hfu": 0.4,
            "memory": memory,
            "tokens_per_second": 100.0,
        }

    ranks = [
        {"promised": {"weights": 2048.0}, "measured": {"weights": 1024.0}}
    ]
    return [
        start(0, "pp2"),
        *(step(n, 5 - n / 4) for n in range(1, 6)),
        *(step(n, 5 - n / 4, 9 * 2**20) for n in range(6, 11)),
        {
            "event": "skip",
            "time": 4,
            "step": 4,
            "why": hostile or "not finite",
        },
        start(5, "dp2 zero3"),
        *(step(n, 5 - n / 4) for n in range(6, 13)),
        {"event": "memory", "time": 5, "step": 6, "ranks": ranks},
        {
            "event": "validation",
            "time": 9,
            "step": 12,
            "loss": 2.5,
            "bits_per_byte": 3.6,
        },
        {
            "event": "sample",
            "time": 9,
            "step": 12,
            "prompt": "def ",
            "text": "<f>",
        },
        {"event": "end", "time": 130, "step": 12, "loss": 2.0},
    ]


def written(folder: Path, hostile: str = "") -> Path:
    lines = "".join(json.dumps(record) + "\n" for record in journal(hostile))
    (folder / "metrics.jsonl").write_text(lines + '{"event": "st')
    (folder / "run.toml").write_text(f"steps = 12 # {hostile}")
    program = build(
        Layout.parse("dp2 zero3"),
        plain_pieces([range(4)]),
        StepOptions(agree=False),
    )
    recorded = Recorded(
        program, simulate(program, Costs({"F": 1e-3, "B": 2e-3, "G": 1e-3}))
    )
    told = json.loads(str(recorded)) | {"step": 6, "layout": "dp2 zero3"}
    (folder / "timeline.json").write_text(json.dumps(told))
    return folder


def test_the_page_says_what_the_journal_says(tmp_path: Path) -> None:
    page = report(written(tmp_path))
    for said in (
        "tiny, 1,234 parameters, on python; step 12 of 12, ended",
        "2 starts; the last as dp2 zero3 on 2 ranks",
        # 12 steps of half a second, 5 of them lost, in 341 s by the calendar.
        "goodput 1.76 % of 341 s: steps 1.76 %, lost steps 0.733 %, down 13.5 %, other 84 %",
        "validation loss 2.5000 nats per token, 3.6000 bits per byte",
        "What the model writes",
        "def &lt;f&gt;",
        "a peak of 2 TFLOP/s over all ranks (measured)",
        "causal attention",
        "would be higher by 10.0 %",
        "2 KiB</td><td>1 KiB",
        "3 MiB",
        "start: pp2",
        "restart: dp2 zero3",
        "not finite",
        "steps = 12",
        "torch 2.13",
        "1 group of 2 ranks along dp, named by a letter",
        "makespan",
        # The first of two processes has no end.
        "<td>killed</td>",
        "<td>dp2 zero3, 2 ranks</td>",
        "<td>loss 2.5000, 3.6000 bits per byte</td>",
        "What happened in that step",
        "computed for",
    ):
        assert said in page, said


def test_what_was_done_in_vain_is_faint_and_counts_in_no_summary(
    tmp_path: Path,
) -> None:
    page = report(written(tmp_path))
    loss = page.split('class="scroll phone"')[0]
    (faint,) = re.findall(r'<polyline points="([^"]*)"[^>]*opacity', loss)
    assert len(faint.split()) == 6  # steps 5 to 10 of the first start
    lines = re.findall(r'<polyline points="([^"]*)"', loss)
    assert sorted(len(line.split()) for line in lines) == [5, 6, 7]
    assert "9 MiB" not in page


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    page = report(written(tmp_path)).replace(
        'xmlns="http://www.w3.org/2000/svg"', ""
    )
    assert not re.search(
        r"https?:|//[a-z]+\.|@import|url\(|<iframe|\ssrc=", page
    )
    # The timeline, its data, and what tells of marks.
    assert page.count("<script") == 3
    assert re.findall(r"<link[^>]*>", page) == [
        '<link rel="icon" href="data:,">'
    ]
    assert "default-src 'none'" in page


def test_whatever_stands_in_the_files_is_escaped(tmp_path: Path) -> None:
    page = report(written(tmp_path, HOSTILE))
    assert page.count("<script") == 3
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 5


@pytest.mark.parametrize(
    "record",
    [
        {"event": "step", "step": "x", "loss": "nan", "seconds": None},
        {
            "event": "start",
            "step": None,
            "layout": HOSTILE,
            "model": 3,
            "flops": [],
            "versions": 1,
        },
        {"event": "memory", "ranks": [1, {"promised": 2}]},
        {"event": HOSTILE, "step": [HOSTILE]},
        {"event": ["step"], "step": 3},
        {"event": {"step": 1}},
        {"event": "data", "text": "half of a surrogate pair: \ud800"},
        {"event": "\udfff", "step": 3, "time": 5},
    ],
)
def test_a_record_that_is_not_as_it_should_be_spoils_nothing(
    record: dict[str, Any], tmp_path: Path
) -> None:
    written(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"time": 1, **record}) + "\n")
    (tmp_path / "timeline.json").write_text("{}")
    page = report(tmp_path)
    assert "<img" not in page
    assert page.endswith("</html>\n")
    assert page.encode()  # a file can hold it


def test_one_rank_is_counted_in_the_singular_and_unknown_buffers_are_left_out(
    tmp_path: Path,
) -> None:
    records = journal()
    for record in records:
        if record["event"] == "start":
            record["ranks"] = 1
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    page = report(tmp_path)
    assert "on 1 rank<" in page
    assert "1 ranks" not in page
    # The journal does not say how large its idle buffers were.
    assert "Activations are not included. The peak memory" in page


def test_a_folder_without_a_run_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ReportError, match=r"is not the folder of a run.*phalanx train"
    ):
        report(tmp_path)


def test_a_chart_puts_points_in_proportion_and_shows_every_mark() -> None:
    points = ((0.0, 1.0), (5.0, 2.0), (10.0, 4.0))
    linear = ChartAxis("step", base=0), ChartAxis("u", base=0)
    drawn = chart(
        "t", [Series("a", points)], *linear, marks=[(5.0, "here & now")]
    )
    tree = xml.fromstring(drawn)
    dots = [
        (float(c.get("cx", 0)), float(c.get("cy", 0)))
        for c in tree.iter(f"{SVG}circle")
    ]
    assert dots[1][0] - dots[0][0] == pytest.approx(dots[2][0] - dots[1][0])
    assert 2 * (dots[0][1] - dots[1][1]) == pytest.approx(
        dots[1][1] - dots[2][1], abs=0.2
    )
    assert "here & now" in [t.text for t in tree.iter(f"{SVG}text")]


def test_a_chart_of_one_point_and_of_none_are_drawn_too() -> None:
    linear = ChartAxis("step", base=0), ChartAxis("u", base=0)
    assert (
        chart("t", [Series("a", [(3.0, 0.0)])], *linear).count("<circle") == 1
    )
    xml.fromstring(chart("t", [Series("a", ())], *linear))


def test_a_logarithmic_chart_has_no_place_for_zero() -> None:
    drawn = chart(
        "t",
        [Series("a", [(0.0, 1.0), (1.0, 1.0), (4.0, 8.0)])],
        ChartAxis("x"),
        ChartAxis("y"),
    )
    assert drawn.count("<circle") == 2


def test_before_the_first_step_the_page_says_that_nothing_was_recorded(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(journal()[0]) + "\n")
    assert "loss: nothing has been recorded" in report(tmp_path)


@needs_chromium
def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    dom, console = opened(report(written(tmp_path, HOSTILE)), tmp_path)
    assert console == []
    assert dom.count("<h2>") == 13
    # each start, and again what was repeated; wide and narrow
    assert dom.count("<polyline") == 24
    assert dom.count("<canvas") == 1
