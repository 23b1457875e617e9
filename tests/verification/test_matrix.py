"""The page of verdicts: a cell says how many layouts have both of two choices, and the worst of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from pathlib import Path

from phalanx.cli.main import main
from phalanx.cli.verify_page import features, verified_page, verified_svg
from phalanx.verification import Verdict

SVG = "{http://www.w3.org/2000/svg}"
VERDICTS = (
    Verdict("dp2 zero1 fp64", 2, True, 1e-14, of_allowed=1e-4),
    Verdict("dp2 tp2 seq fp64", 4, True, 3e-13, of_allowed=0.003),
    Verdict(
        "pp2 tp2 1f1b:4 fp64",
        4,
        False,
        0.5,
        "loss of step 0 <b>",
        of_allowed=1e9,
    ),
    Verdict("dp2 recompute:fit fp64", 2, False, 0.0, cannot_fit=True),
)


def test_choices_have_no_sizes() -> None:
    assert features("dp2x2 cp4:2x2 cp2:ulysses interleaved2:8 fp64") == (
        "dp", "cp", "cp:ulysses", "interleaved2",
    )  # fmt: skip
    assert features("fp64") == ("one rank",)


def test_a_cell_counts_the_layouts_that_have_both_and_names_the_worst() -> (
    None
):
    drawn = xml.fromstring(verified_svg("t", VERDICTS, 860))
    cells = {}
    for e in drawn.iter(f"{SVG}rect"):
        if words := e.findtext(f"{SVG}title"):
            pair, _, rest = words.partition(": ")
            cells[pair] = rest, e.get("fill")
    agree, differ = cells["dp"][1], cells["pp"][1]
    assert agree != differ
    assert cells["dp"] == (
        "2 layouts, 0 differ; error at most 3.0e-13, in dp2 tp2 seq fp64",
        agree,
    )
    assert cells["tp"] == (
        "2 layouts, 1 differ; error at most 5.0e-01, in pp2 tp2 1f1b:4 fp64",
        differ,
    )
    assert cells["tp with pp"][1] == cells["1f1b with tp"][1] == differ
    assert cells["seq with tp"][0].startswith("1 layouts, 0 differ")
    # of which nothing was compared
    assert not {"pp with dp", "zero1 with tp"} & set(cells)
    # dp pp tp 1f1b seq zero1, and the pairs that some layout has
    assert len(cells) == 6 + 7


def test_the_page_of_a_command_has_every_layout_and_escapes(
    tmp_path: Path,
) -> None:
    page = tmp_path / "v.html"
    words = [
        "verify",
        "--layouts",
        "dp2; tp2 seq",
        "--steps",
        "1",
        "--quiet",
        "--out",
        str(page),
    ]
    assert main(words) == 0
    shown = re.findall(
        r"<code>([^<]*)</code></td><td>2</td><td><span class=\"good\">agrees",
        page.read_text(),
    )
    assert sorted(shown) == ["dp2 fp64", "tp2 seq fp64"]
    assert "loss of step 0 &lt;b&gt;" in verified_page("t", "", VERDICTS)
