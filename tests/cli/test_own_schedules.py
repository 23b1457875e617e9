"""A schedule of one's own is one training step, or every command refuses it with the same sentence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.program import Op

Row = list[tuple[str, int, int]]
Rows = list[Row]

STAGES, MICROBATCHES = 2, 2
MODEL = "model={layers=2,hidden=16,heads=2,ffn=24,vocab=256}"
F1B: Rows = [
    [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
    [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
]
# The second stage's backward is whole for one microbatch and split for the other.
SPLIT: Rows = [
    [
        ("F", 0, 0),
        ("F", 0, 1),
        ("I", 0, 0),
        ("I", 0, 1),
        ("W", 0, 0),
        ("W", 0, 1),
    ],
    [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("I", 1, 1), ("W", 1, 1)],
]
NONE: Rows = [[], []]
FORWARDS: Rows = [[op for op in row if op[0] == "F"] for row in F1B]


def mutants(rows: Rows) -> Iterator[Rows]:
    """Every schedule in which one operation is dropped, repeated, changed, moved or swapped."""

    def replaced(number: int, row: Row) -> Rows:
        return [
            row if n == number else list(other) for n, other in enumerate(rows)
        ]

    for number, row in enumerate(rows):
        for i, (kind, piece, m) in enumerate(row):
            rest = row[:i] + row[i + 1 :]
            yield replaced(number, rest)
            yield replaced(number, [*row[: i + 1], *row[i:]])
            for changed in (
                (kind, 1 - piece, m),
                (kind, piece, 1 - m),
                (kind, piece, m + 2),
            ):
                yield replaced(number, [*row[:i], changed, *row[i + 1 :]])
            yield replaced(number, [*row[:i], ("G", piece, 0), *row[i + 1 :]])
            moved = replaced(number, rest)
            moved[1 - number].append((kind, piece, m))
            yield moved
        for i, j in combinations(range(len(row)), 2):
            swapped = list(row)
            swapped[i], swapped[j] = row[j], row[i]
            yield replaced(number, swapped)
    yield [list(reversed(row)) for row in rows]
    yield rows[::-1]


def trains(rows: Rows) -> bool:
    """An oracle of its own: walks the ranks until nothing moves, and looks whether all is computed."""
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(rows)

    def ready(kind: str, piece: int, m: int) -> bool:
        forward = ("F", piece, m) in done
        above = piece == STAGES - 1 or bool(
            {("B", piece + 1, m), ("I", piece + 1, m)} & done
        )
        if kind == "F":
            return not forward and (piece == 0 or ("F", piece - 1, m) in done)
        if kind == "W":
            return ("I", piece, m) in done and ("W", piece, m) not in done
        begun = {("B", piece, m), ("I", piece, m)} & done
        return kind in "BI" and forward and above and not begun

    moved = True
    while moved:
        moved = False
        for number, row in enumerate(rows):
            while at[number] < len(row) and ready(*row[at[number]]):
                done.add(row[at[number]])
                at[number] += 1
                moved = True
    wanted = range(STAGES * MICROBATCHES)
    whole = all(
        ("F", p, m) in done and {("B", p, m), ("W", p, m)} & done
        for p, m in (divmod(i, MICROBATCHES) for i in wanted)
    )
    held = [{piece for _, piece, _ in row} for row in rows]
    one_home = (
        not held[0] & held[1] and all(held) and held[0] | held[1] == {0, 1}
    )
    return (
        whole
        and one_home
        and all(i == len(row) for i, row in zip(at, rows, strict=True))
    )


def written(rows: Rows, name: str) -> str:
    """A file with this schedule, as a layout names it."""
    ops = [[Op(*op) for op in row] for row in rows]
    Path(f"{name}.py").write_text(
        "from phalanx.program import Op\n"
        f"def order(stages, microbatches, chunks=1):\n    return {ops}\n"
    )
    return f"{name}.py:order"


def test_every_change_of_a_schedule_is_a_training_step_or_refused_alike_everywhere(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    every = []
    for rows in (F1B, SPLIT, FORWARDS, NONE, *mutants(F1B), *mutants(SPLIT)):
        if rows not in every:
            every.append(rows)
    assert trains(F1B)
    assert trains(SPLIT)
    legal = []
    for number, rows in enumerate(every):
        name = written(rows, f"own{number}")
        commands = [
            [
                "draw",
                name,
                "--stages",
                "2",
                "--microbatches",
                "2",
                "--out",
                "step.svg",
            ],
            ["check", f"pp2 {name}:2", "--model", "tiny"],
        ]
        if number % 5 == 0:
            explain = ["--cluster", "h100x2", "--explain", f"pp2 {name}:2"]
            commands.append(["plan", "--model", "tiny", *explain])
        if not trains(rows):
            layout = f"layout=pp2 {name}:2"
            commands.append(
                ["train", MODEL, "batch=4", "sequence=8", "steps=1", layout]
            )
            commands += [["verify", "--layouts", f"pp2 {name}:2"]] * (
                number % 5 == 0
            )
        codes = [main(command) for command in commands]
        shown = capfd.readouterr().err
        if trains(rows):
            assert not any(codes), (rows, shown)
            legal.append(f"pp2 {name}:2")
            continue
        sentences = shown.splitlines()
        assert codes == [2] * len(commands), (rows, codes, shown)
        assert len(sentences) == len(commands)
        assert len(set(sentences)) == 1, (rows, sentences)
        assert sentences[0].startswith(f"ProgramError: schedule {name}")
    assert len(every) > 100
    assert 10 < len(legal) < 40
    # They compute what one process computes.
    some = [legal[0], *legal[1::3]]
    assert (
        main(["verify", "--layouts", "; ".join(some), "--steps", "1"]) == 0
    ), capfd.readouterr()


@pytest.mark.parametrize(
    "returned",
    [
        "None",
        "[]",
        "[[], [], []]",
        "[1, 2]",
        "['F', 'B']",
        "[[('F', 0, 0)], []]",
        "{}",
    ],
)
def test_what_is_no_list_of_operations_is_refused(
    returned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        f"def f(stages, microbatches, chunks):\n    return {returned}\n"
    )
    assert main(["draw", "own.py:f", "--stages", "2"]) == 2
    assert main(["check", "pp2 own.py:f:2", "--model", "tiny"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith("ProgramError: schedule own.py:f")
