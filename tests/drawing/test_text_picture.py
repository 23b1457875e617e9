"""The picture in a terminal: exact, within its width, and readable without colour."""

from __future__ import annotations

import re

import pytest

from phalanx.drawing import Picture, text
from phalanx.layout import Layout, Mesh, plain_pieces
from phalanx.program import (
    Costs,
    Op,
    Span,
    StepOptions,
    Timeline,
    build,
    simulate,
)

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def timeline(
    name: str, stages: int, microbatches: int, chunks: int = 0, **kinds: float
) -> Timeline:
    layout = Layout(
        mesh=Mesh.parse(f"pp{stages}"),
        schedule=name,
        microbatches=microbatches,
        chunks=chunks,
    )
    pieces = [range(s, s + 1) for s in range(layout.virtual_stages)]
    share = dict.fromkeys(range(len(pieces)), 1 / layout.chunks)
    return simulate(
        build(layout, plain_pieces(pieces), StepOptions(agree=False)),
        Costs(kinds or {"F": 1, "B": 2}, share=share),
    )


def rows(drawn: str) -> dict[str, str]:
    """Each rank's row, its bands joined by a blank; blanks at the end of a line are put back."""
    found: dict[str, str] = {}
    for band in drawn.split("\n\n"):
        lines = [
            line for line in band.splitlines() if line.startswith("rank ")
        ]
        wide = max(map(len, lines), default=0)
        for line in lines:
            found[line[:7]] = (
                found.get(line[:7], "") + line[7:].ljust(wide - 7) + " "
            )
    return found


def test_1f1b_of_two_stages_looks_like_this() -> None:
    picture = Picture("1f1b", timeline("1f1b", 2, 3), held=(2, 1))
    assert text(picture) == (
        "1f1b\n"
        "\n"
        "       ╷0                  ╷5                  ╷10\n"
        "rank 0 F0─ F1─ ········B0───── F2─ B1───── ····B2─────\n"
        "rank 1 ····F0─ B0───── F1─ B1───── F2─ B2───── ········\n"
        "\n"
        "F forward | B backward | · idle | F0 is the forward of microbatch 0\n"
        "makespan 12, ideal 9, bubble 25.0 %\n"
        "microbatches in flight by stage: 2 1\n"
    )


def test_zero3_of_four_layers_reduces_computes_and_gathers_side_by_side() -> (
    None
):
    layout = Layout.parse("dp2 zero3")
    costs = Costs(
        {"F": 4, "B": 8, "G": 4, "S": 4, "U": 4},
        share=dict.fromkeys(range(4), 0.25),
    )
    drawn = text(
        Picture(
            "zero3",
            simulate(
                build(
                    layout, plain_pieces([range(4)]), StepOptions(agree=False)
                ),
                costs,
            ),
        )
    )
    # 1S has waited for 3S, so 3U follows it; the last updates have nothing left to compute beside.
    assert drawn.splitlines()[3:6] == [
        "rank 0   ····0F0 1F0 2F0 3F0 3B0──── 2B0──── 1B0──── 3U─ 0B0──── 2U─ 1U─ 0U─",
        "  gather 0G─ 1G─ 2G─ 3G─ 2G#1········1G#1····0G#1····························",
        "  reduce ····························3S─ ····2S─ ····1S─ ········0S─ ········",
    ]


CASES = [
    ("gpipe", 4, 4, 0, {}),
    ("1f1b", 6, 16, 0, {}),
    ("interleaved", 3, 7, 3, {}),
    ("zb-h2", 4, 12, 0, {"F": 1, "I": 1, "W": 1}),
    ("zb-v", 4, 8, 2, {"F": 1, "I": 1, "W": 1}),
    ("1f1b", 4, 8, 0, {"F": 1, "B": 2, "send": 0.37}),
    ("1f1b", 16, 128, 0, {}),
    ("gpipe", 2, 2, 0, {"F": 1e-6, "B": 0.7}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("width", [24, 80, 131])
def test_no_line_is_wider_than_asked_and_the_rows_of_all_ranks_are_as_long(
    case, width
) -> None:  # type: ignore[no-untyped-def]
    name, stages, microbatches, chunks, costs = case
    picture = Picture(
        "x " * 100, timeline(name, stages, microbatches, chunks, **costs)
    )
    drawn = text(picture, width=width)
    assert max(map(len, drawn.splitlines())) <= width
    lengths = {len(row) for row in rows(drawn).values()}
    assert len(lengths) == 1
    assert lengths.pop() > 0


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_every_computation_is_named_exactly_once(case) -> None:  # type: ignore[no-untyped-def]
    name, stages, microbatches, chunks, costs = case
    t = timeline(name, stages, microbatches, chunks, **costs)
    drawn = rows(text(Picture("", t), width=100))
    for rank in t.ranks:
        said = re.findall(
            r"\d*[FBIW]\d+", re.sub("[─·]", " ", drawn[f"rank {rank} "[:7]])
        )
        names = [
            str(s.op) if chunks else f"{s.op.kind}{s.op.index}"
            for s in t.computing[rank]
        ]
        assert said == names


@pytest.mark.parametrize("microbatches", [12, 24, 36, 96])
def test_narrow_cells_say_less_and_never_another_name(
    microbatches: int,
) -> None:
    t = timeline("interleaved", 6, microbatches, 3, F=1, B=2)
    drawn = rows(text(Picture("", t)))
    for rank in t.ranks:
        said = set(re.findall(r"\d*[FB]\d+", drawn[f"rank {rank} "[:7]]))
        names = {
            n
            for s in t.computing[rank]
            for n in (str(s.op), f"{s.op.kind}{s.op.index}")
        }
        assert said <= names


def test_idle_columns_are_the_bubble() -> None:
    t = timeline("gpipe", 4, 4)
    drawn = rows(text(Picture("", t), width=200))
    idle = sum(row.count("·") for row in drawn.values())
    # 16 of 28 cells are used: P = m = 4
    assert t.bubble_fraction == pytest.approx(12 / 28)
    assert idle / sum(len(row) - 1 for row in drawn.values()) == 12 / 28


def test_colour_changes_no_character() -> None:
    picture = Picture(
        "t", timeline("interleaved", 2, 4, 2, F=1, B=2, send=0.5)
    )
    plain, coloured = text(picture), text(picture, colour=True)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    assert [
        x.rstrip() for x in ANSI.sub("", coloured).splitlines()
    ] == plain.splitlines()


def test_a_measurement_stands_under_its_prediction_with_the_difference_by_kind() -> (
    None
):
    predicted, measured = (
        timeline("gpipe", 2, 2),
        timeline("gpipe", 2, 2, F=1.5, B=2),
    )
    drawn = text(Picture("both", predicted, measured))
    labels = [
        line.split()[0]
        for line in drawn.splitlines()
        if line.startswith(("rank", "  meas"))
    ]
    assert labels == ["rank", "measured"] * 2
    # Of the 9 that both ranks take: 2 of 18, and 1 of 18 more in which they wait.
    assert re.search(r"forward +4 +6 +\+11\.1 %", drawn)
    assert re.search(r"idle +6 +7 +\+5\.6 %", drawn)
    assert re.search(r"backward +8 +8 +\+0\.0 %", drawn)


def test_messages_are_shown_where_they_are_sent_only() -> None:
    drawn = text(Picture("", timeline("gpipe", 2, 1, F=2, B=2, send=1)))
    assert drawn.count("act 0>1") == 1
    assert drawn.count("grad 1>0") == 1


def test_an_empty_timeline_is_drawn_as_nothing() -> None:
    assert "makespan 0" in text(Picture("none", Timeline(())))
    instant = Timeline((Span(0, "compute", Op("F", 0, 0), 0.0, 0.0),))
    assert "makespan 0" in text(Picture("instant", instant))
