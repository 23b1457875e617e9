"""Every page on a screen of 400 pixels, light and dark: nothing is wider than the screen but what
scrolls by itself, and text keeps its size. (Charts were shrunk to letters of 5 pixels.)"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pytest

from browser import needs_chromium, opened
from phalanx.cli.main import main
from phalanx.drawing import Picture, page
from phalanx.layout import Layout, plain_pieces
from phalanx.program import Costs, Recorded, StepOptions, build, simulate
from phalanx.report import report
from phalanx.report.step import step_extras
from phalanx_lab.catalogue import Size
from phalanx_lab.show import lab_page
from phalanx_lab.trial import conduct

LOOK = """
const inner = document.querySelector("iframe").contentDocument;
const seen = [...inner.querySelectorAll("svg text")].filter((text) => text.getClientRects().length);
const sizes = seen.map((text) => {
  const box = text.closest("svg").getBoundingClientRect();
  const scale = box.width / Number(text.closest("svg").getAttribute("width"));
  return parseFloat(inner.defaultView.getComputedStyle(text).fontSize) * scale;
});
const found = { wide: inner.documentElement.scrollWidth, least: Math.min(99, ...sizes),
  charts: inner.querySelectorAll("svg, canvas").length };
document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
"""


def timeline() -> Picture:
    layout = Layout.parse("dp2 pp2 zero3 1f1b:8")
    return Picture(
        "step",
        simulate(
            build(
                layout,
                plain_pieces([range(2), range(2, 4)]),
                StepOptions(agree=False),
            ),
            Costs({"F": 1, "B": 2}),
        ),
    )


def of_a_run(folder: Path) -> str:
    start = {
        "event": "start",
        "step": 0,
        "layout": "dp2 pp2",
        "model": {"name": "m"},
        "time": 0,
    }
    steps = [
        {"event": "step", "step": n, "loss": 5 - n / 9, "seconds": 0.1}
        for n in range(1, 9)
    ]
    text = "".join(json.dumps(record) + "\n" for record in [start, *steps])
    (folder / "metrics.jsonl").write_text(text)
    program = build(
        Layout.parse("dp2 pp2 zero3 1f1b:8"),
        plain_pieces([range(2), range(2, 4)]),
        StepOptions(agree=False),
    )
    recorded = Recorded(program, simulate(program, Costs({"F": 1, "B": 2})))
    told = json.loads(str(recorded)) | {"step": 1, "layout": "dp2 pp2"}
    (folder / "timeline.json").write_text(json.dumps(told))
    return report(folder, step_extras(folder, None, None)).html()


def of_a_plan(folder: Path) -> str:
    words = (
        "plan --model 124m --cluster h100x8 --batch-tokens 64Ki --json --page"
    )
    assert main([*words.split(), str(folder / "plan.html")]) == 0
    return (folder / "plan.html").read_text()


def of_the_lab() -> str:
    names = ["zero-3", "mixed-precision", "grid"]
    return lab_page(list(conduct(names, Size(8, 16, 4, 2), ranks=4)))


@needs_chromium
@pytest.mark.parametrize("which", ["draw", "report", "plan", "lab"])
def test_a_page_fits_a_screen_of_400_pixels_with_legible_charts(
    which: str, tmp_path: Path
) -> None:
    written = {
        "draw": lambda: page(timeline()),
        "report": lambda: of_a_run(tmp_path),
        "plan": lambda: of_a_plan(tmp_path),
        "lab": of_the_lab,
    }[which]()
    frame = (
        f'<iframe width=400 height=900 srcdoc="{escape(written)}"></iframe>'
    )
    outer = f"<body>{frame}<script>addEventListener('load', () => {{ {LOOK} }})</script></body>"
    dom, _ = opened(outer, tmp_path)
    match = re.search(r"FOUND(.*?)END", dom)
    assert match
    found = json.loads(match[1])
    assert found["charts"] >= 1
    assert found["wide"] <= 400
    assert found["least"] >= 10


def test_every_page_has_a_dark_form_and_says_so() -> None:
    written = page(timeline())
    assert "prefers-color-scheme: dark" in written
    assert "color-scheme: light dark" in written
