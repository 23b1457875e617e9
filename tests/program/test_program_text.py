"""Operations and programs as text that a person can edit."""

from itertools import product
from pathlib import Path

import pytest
from program_worlds import per_rank, step

from phalanx.layout import Layout, Mesh, Shape, staged_pieces
from phalanx.program import (
    KINDS,
    Op,
    Program,
    ProgramError,
    StepOptions,
    build,
)

PROGRAMS = Path(__file__).parent / "programs"


def test_every_operation_prints_and_parses_back_and_no_two_print_alike() -> (
    None
):
    ops = [
        Op(k, p, m)
        for k, p, m in product(
            "FBIWRPCKEJOZMGLDSH^X~TQUYV", (0, 2, 13), (0, 1, 27)
        )
    ]
    ops += [Op(k, -1, n) for k, n in product("NA", (0, 3))]
    ops += [
        Op(kind, p, m, of, p + way)
        for kind, p, m, of, way in product(
            "<>", (3, 12), (0, 11), "FBI", (-1, 1)
        )
    ]
    assert {op.kind for op in ops} == set(KINDS)
    assert len({str(op) for op in ops}) == len(ops)
    for op in ops:
        assert Op.parse(str(op)) == op
    words = [
        str(op)
        for op in (
            Op("F", 2, 0),
            Op("G", 2, 1),
            Op("N"),
            Op("<", 3, 0, "F", 2),
        )
    ]
    assert words == ["2F0", "2G#1", "N", "3F0<2"]


@pytest.mark.parametrize(
    "word",
    ["2f0", "F0", "2F", "2X0", "2N", "G", "2F0>", "2W0>3", "2F0 ", "", "2G#"],
)
def test_a_word_that_is_no_operation_is_refused_with_examples(
    word: str,
) -> None:
    with pytest.raises(ProgramError, match="is not an operation"):
        Op.parse(word)


def test_a_program_saves_as_text_and_loads_again() -> None:
    for text in (
        "",
        "dp2x2 zero3 accum:3",
        "dp2 pp2 tp2 1f1b:4 zero3 gather:micro",
        "pp3 zb-h2:5",
    ):
        for program in (step(text, 6), step(text, 6, tied=True, agree=True)):
            assert Program.parse(str(program)) == program
            assert max(map(len, str(program).splitlines())) <= 100
    apart = per_rank(step("dp2 pp2 1f1b:2 zero1", 4))
    assert len(apart.rows) == 4
    assert Program.parse(str(apart)) == apart


def test_a_person_may_add_comments_and_break_lines() -> None:
    program = step("pp2 1f1b:2", 2)
    text = (
        str(program).replace("ranks 1:", "\n# the last stage\nranks 1:\n ")
        + "  # the end\n"
    )
    assert Program.parse(text) == program


@pytest.mark.parametrize(
    "change, parts",
    [
        (("0F0", "0f0"), ("mine.txt, line 4", "'0f0' is not an operation")),
        (
            ("mesh pp2", "mesh qq2"),
            ("mine.txt, line 2", "'qq2' is not an axis"),
        ),
        (("tied 1:0", "tied one"), ("mine.txt, line 3", "tied PIECE:UNIT")),
        (("ranks 1:", "ranks one:"), ("mine.txt, line 5", "ranks 0,1:")),
        (
            ("ranks 1:", "ranks 0:"),
            ("mine.txt, line 5", "rank 0 has a list already"),
        ),
        (
            ("ranks 1:", "rank 1:"),
            ("mine.txt, line 5", "none of 'mesh', 'tied'"),
        ),
        (("ranks 0:", " "), ("mine.txt, line 4", "before the first 'ranks")),
        (
            ("mesh pp2", "mesh pp3"),
            ("mine.txt", "ranks 0 to 2", "ranks 2 are missing"),
        ),
        (("phalanx program 1", "phalanx program 2"), ("mine.txt, line 1",)),
    ],
)
def test_a_typo_is_named_with_its_line(
    change: tuple[str, str], parts: tuple[str, ...]
) -> None:
    good = "phalanx program 1\nmesh pp2\ntied 1:0\nranks 0: 0F0 0F0>1 0B0<1 0B0\nranks 1: 1F0<0 1F0 1B0\n"
    Program.parse(good)
    bad = good.replace(*change)
    assert bad != good
    with pytest.raises(ProgramError) as caught:
        Program.parse(bad, "mine.txt")
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_program_whose_ranks_and_rows_do_not_fit_is_refused() -> None:
    with pytest.raises(
        ProgramError, match="1 rows for a mesh 'dp2' of 2 ranks; 1 ranks"
    ):
        Program(((Op("F", 0),),), Mesh.parse("dp2"), (0,))
    with pytest.raises(ProgramError, match=r"2 rows .* follow rows \[0\]"):
        Program(((), ()), Mesh.parse("dp2"))


GOLDEN = {
    "mlp-alone": ("accum:2", "mlp", False),
    "mlp-zero3": ("dp2 zero3", "mlp", False),
    "mlp-zero1-clipped": ("dp2 zero1 accum:2", "mlp", True),
    "tiny-zero3-in-8-bits": ("dp2 zero3 accum:2 fp8:tile", "tiny", True),
    "mlp-hsdp": ("dp2x2 zero2 accum:2", "mlp", False),
    "tiny-1f1b-zero2": ("dp2 pp2 1f1b:4 zero2", "tiny", True),
    "tiny-zb-h1-recomputed": ("pp2 zb-h1:3 recompute:all", "tiny", False),
    "tiny-zb-h1-selective": (
        "dp2 pp2 zb-h1:3 zero3 gather:micro recompute:selective",
        "tiny",
        True,
    ),
    "tiny-zb-v-zero3-each-use": (
        "dp2 pp2 zb-v:3 zero3 gather:micro",
        "tiny",
        False,
    ),
    "tiny-offloaded": (
        "pp2 gpipe:2 offload:activations,weights",
        "tiny",
        False,
    ),
}


def golden(name: str) -> Program:
    """The program that a golden file should hold."""
    text, model, agree = GOLDEN[name]
    layout = Layout.parse(text)
    return build(
        layout,
        staged_pieces(layout, Shape.load(model)),
        StepOptions(agree=agree),
    )


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_golden_programs_are_what_is_built(name: str) -> None:
    """A change of a pass shows here, op by op; run this file to write them anew."""
    assert str(golden(name)) == (PROGRAMS / f"{name}.txt").read_text()


def test_there_are_no_other_golden_programs() -> None:
    assert {path.stem for path in PROGRAMS.iterdir()} == set(GOLDEN)


if __name__ == "__main__":
    for name in GOLDEN:
        (PROGRAMS / f"{name}.txt").write_text(str(golden(name)))
