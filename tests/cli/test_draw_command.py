"""`phalanx draw`: its figures against textbook and papers, its files, and what it says."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.draw import run
from phalanx.cli.usage import UsageError
from phalanx.program import Program, check

Capture = pytest.CaptureFixture[str]


def figures(capsys: Capture, *words: str) -> dict[str, object]:
    assert main(["draw", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "p, m", [(1, 1), (2, 2), (4, 1), (4, 4), (4, 8), (6, 16)]
)
def test_the_bubble_is_that_of_the_textbook(
    capsys: Capture, name: str, p: int, m: int
) -> None:
    # Huang et al. 2019, Narayanan et al. 2019: (P - 1) / (m + P - 1).
    f = figures(
        capsys,
        name,
        "--stages",
        str(p),
        "--microbatches",
        str(m),
        "--costs",
        "F=1,B=2",
    )
    assert (f["stages"], f["microbatches"], f["chunks"], f["steps"]) == (
        p,
        m,
        1,
        1,
    )
    assert f["makespan"] == pytest.approx(3 * (m + p - 1))
    assert f["ideal"] == pytest.approx(3 * m)
    assert f["bubble_fraction"] == pytest.approx((p - 1) / (m + p - 1))
    held = [m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)]
    assert f["peak_held"] == pytest.approx(held)
    assert check(Program.parse(str(f["program"]))).held == pytest.approx(held)


@pytest.mark.parametrize("layers", [None, 16])
@pytest.mark.parametrize("p, m, v", [(2, 4, 2), (4, 8, 2), (3, 6, 3)])
def test_an_interleaved_bubble_is_v_times_smaller(
    capsys: Capture, p: int, m: int, v: int, layers: int | None
) -> None:
    # Narayanan et al. 2021: (P - 1) / (v m + P - 1) where P divides m; a chunk costs 1/v.
    words = ["--stages", str(p), "--microbatches", str(m), "--chunks", str(v)]
    if layers and layers % (p * v) == 0:
        words += ["--layers", str(layers)]
    f = figures(capsys, "interleaved", *words)
    assert f["chunks"] == v
    assert f["bubble_fraction"] == pytest.approx((p - 1) / (v * m + p - 1))


def test_zb_h1_exceeds_the_ideal_by_p_minus_1_and_h2_gains_over_steps_unless_clipped(
    capsys: Capture,
) -> None:
    # Qi et al. 2023, with F = I = W = 1.
    words = ["--stages", "4", "--microbatches", "8", "--costs", "F=1,I=1,W=1"]
    h1 = figures(capsys, "zb-h1", *words)
    assert h1["makespan"] == pytest.approx(3 * 8 + 3)
    plain = figures(capsys, "1f1b", *words[:4])["peak_held"]
    assert max(h1["peak_held"]) == max(plain) == 4  # type: ignore[call-overload]
    h2 = figures(capsys, "zb-h2", *words, "--repeat", "3")
    assert h2["makespan"] == pytest.approx(3 * 24 + 3)
    assert h2["inner_idle"] == pytest.approx([0, 0, 0, 0])
    clipped = figures(capsys, "zb-h2", *words, "--repeat", "3", "--clip")
    assert clipped["makespan"] == pytest.approx(3 * (24 + 3))
    assert "the barrier undoes the gain" in " ".join(clipped["notes"])  # type: ignore[arg-type]
    assert h2["notes"] == []


def test_searched_loses_to_nothing_under_the_same_limit(
    capsys: Capture,
) -> None:
    words = [
        "--stages",
        "4",
        "--microbatches",
        "6",
        "--costs",
        "F=1,I=1,W=1,send=0.1",
    ]
    found = figures(capsys, "searched", *words, "--memory-limit", "4")
    assert max(found["peak_held"]) <= 4  # type: ignore[call-overload]
    for name in ("1f1b", "zb-h1"):
        assert found["makespan"] <= figures(capsys, name, *words)["makespan"]  # type: ignore[operator]


def test_recompute_to_fit_recomputes_more_on_earlier_stages(
    capsys: Capture,
) -> None:
    words = [
        "1f1b",
        "--stages",
        "4",
        "--layers",
        "16",
        "--recompute",
        "fit",
        "--memory-limit",
        "6",
    ]
    rows = Program.parse(str(figures(capsys, *words)["program"])).rows
    again = [len({op.piece for op in row if op.kind == "R"}) for row in rows]
    assert again == sorted(again, reverse=True)
    assert again[0] > 0
    assert again[-1] == 0


def test_a_layout_is_drawn_from_its_model_and_zero3_shows_its_gathers(
    capsys: Capture,
) -> None:
    costs = ["--costs", "F=1,B=2,G=0.5,S=0.5"]
    assert (
        main(["draw", "dp2 pp2 zero3 1f1b:4", "--model", "tiny", *costs]) == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("dp2 pp2 zero3 1f1b:4 on tiny\n")
    assert "  gather" in out
    assert "  reduce" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["naive", "accum"])
def test_one_at_a_time_is_drawn_too(capsys: Capture, name: str) -> None:
    f = figures(capsys, name, "--microbatches", "3")
    assert (f["stages"], f["microbatches"]) == (
        (4, 1) if name == "naive" else (1, 3)
    )
    assert f["bubble_fraction"] == pytest.approx(
        0.75 if name == "naive" else 0
    )


def test_output_that_is_no_terminal_has_no_colour(capsys: Capture) -> None:
    assert main(["draw", "1f1b"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_program_goes_out_as_text_and_comes_back_as_the_same_picture(
    capsys: Capture, tmp_path: Path
) -> None:
    place = str(tmp_path / "step.txt")
    words = [
        "interleaved",
        "--stages",
        "2",
        "--microbatches",
        "4",
        "--chunks",
        "2",
    ]
    before = figures(capsys, *words, "--out", place)
    after = figures(capsys, "program", place)
    assert {k: v for k, v in after.items() if k != "title"} == {
        k: v for k, v in before.items() if k != "title"
    }


def test_the_suffix_names_the_format(capsys: Capture, tmp_path: Path) -> None:
    for suffix in ("svg", "html", "json", "txt"):
        place = tmp_path / f"step.{suffix}"
        assert (
            main(["draw", "1f1b", "--stages", "2", "--out", str(place)]) == 0
        )
        assert f"wrote {place}" in capsys.readouterr().out
    xml.parse(tmp_path / "step.svg")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert '"memory":[{"rank":0' in (tmp_path / "step.html").read_text()
    Program.parse((tmp_path / "step.txt").read_text())


@pytest.mark.parametrize(
    "what", [["zb-h1", "--stages", "3"], ["mesh", "dp4 tp4"]], ids=" ".join
)
def test_a_picture_is_drawn_for_a_phone(
    tmp_path: Path, what: list[str]
) -> None:
    place = tmp_path / "narrow.svg"
    words = [*what, "--width", "400", "--out", str(place)]
    assert main(["draw", *words]) == 0
    root = xml.parse(place).getroot()
    assert float(root.attrib["width"]) <= 400
    assert "font: 11px" in place.read_text()


@pytest.mark.parametrize("width", ["24", "80"])
@pytest.mark.parametrize(
    "what", [["1f1b", "--stages", "4"], ["mesh", "dp4"]], ids=" ".join
)
def test_a_picture_that_is_too_narrow_for_its_names_is_drawn_wider(
    tmp_path: Path, what: list[str], width: str
) -> None:
    place = tmp_path / "narrow.svg"
    assert main(["draw", *what, "--width", width, "--out", str(place)]) == 0
    root = xml.parse(place).getroot()
    wide = float(root.attrib["width"])
    assert 80 < wide < 320
    space = "{http://www.w3.org/2000/svg}"
    for bar in root.iter(f"{space}rect"):
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= wide


def test_a_page_refuses_a_width(tmp_path: Path) -> None:
    place = tmp_path / "step.html"
    with pytest.raises(UsageError, match=r"--width is for text and \.svg"):
        run(["1f1b", "--width", "300", "--out", str(place)])
    assert not place.exists()


def test_somebodys_own_schedule_is_drawn_from_its_file(
    capsys: Capture, tmp_path: Path
) -> None:
    place = tmp_path / "mine.py"
    place.write_text(
        "from phalanx.program import Op\n"
        "def lazy(stages, microbatches, chunks):\n"
        "    return [[Op(k, r, m) for m in range(microbatches) for k in 'FB'] for r in range(stages)]\n"
    )
    f = figures(
        capsys, f"{place}:lazy", "--stages", "2", "--microbatches", "2"
    )
    assert f["makespan"] == pytest.approx(2 * 2 * 3)


def test_the_table_of_recomputation_is_what_the_literature_says(
    capsys: Capture,
) -> None:
    # Chen et al. 2016: at most one extra forward, N/C inputs and C pieces, least at sqrt N.
    f = figures(capsys, "recompute", "--layers", "16")
    lines = {line["recompute"]: line for line in f["table"]}  # type: ignore[attr-defined]
    assert lines["none"]["time"] == 48
    assert all(line["time"] <= 48 + 16 for line in lines.values())
    for c in (2, 4, 8, 16):
        # The last segment's input is a piece's.
        assert lines[f"every={c}"]["peak"] == c + 16 / c - 1
    assert (
        min(line["peak"] for line in lines.values())
        == lines["sqrt"]["peak"]
        == 7
    )
    assert main(["draw", "recompute", "--layers", "16"]) == 0
    assert re.search(
        r"sqrt +12 +60 +1\.250 +7 +4 +3\n", capsys.readouterr().out
    )


def test_a_mesh_is_drawn_and_its_json_names_each_ranks_part(
    capsys: Capture, tmp_path: Path
) -> None:
    f = figures(
        capsys, "mesh", "dp2", "tp2", "zero3", "--weight", "heads=8 embed=4"
    )
    assert f["groups"] == {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    ranks = f["ranks"]
    assert isinstance(ranks, list)
    assert [(r["part"]["heads"], r["shard"]) for r in ranks] == [
        ([0, 4], [0, 8]), ([4, 8], [0, 8]), ([0, 4], [8, 16]), ([4, 8], [8, 16])
    ]  # fmt: skip
    assert (
        main(["draw", "mesh", "dp2 tp2", "--out", str(tmp_path / "m.svg")])
        == 0
    )
    xml.parse(tmp_path / "m.svg")
    capsys.readouterr()
    assert main(["draw", "mesh", "dp2 pp2 tp2"]) == 0
    assert "{0 4} {1 5} {2 6} {3 7}" in capsys.readouterr().out
