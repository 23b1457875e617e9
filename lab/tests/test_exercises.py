"""Exercises: right answers, wrong ones with their hints, and the command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from wrong_answers import WRONG, wrong_answer

from phalanx.cli.usage import UsageError
from phalanx_lab import command
from phalanx_lab.exercises import ExerciseError, exercise, exercises

ALL = exercises()


def hint(name: str, answer: str) -> str:
    """The words for a wrong answer."""
    verdict = exercise(name).check(answer)
    assert not verdict.right
    return verdict.words


def test_there_are_twenty_and_each_belongs_to_a_chapter() -> None:
    from phalanx_lab.catalogue import NAMES

    assert len(ALL) == 20
    assert {each.chapter for each in ALL.values()} <= set(NAMES)


@pytest.mark.parametrize("name", ALL)
def test_the_solution_is_right_and_what_one_begins_with_is_not(
    name: str,
) -> None:
    asked = ALL[name]
    assert asked.check(asked.answer).right
    assert not asked.check(asked.start).right
    assert not asked.check("").right
    assert not asked.check("<b>no</b>").right


@pytest.mark.parametrize("name", ALL)
def test_the_command_takes_a_right_answer_and_gives_a_hint_for_a_wrong_one(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = tmp_path / "answer.txt"
    answer.write_text(ALL[name].answer)
    assert run(name, str(answer), "--json") == 0
    assert json.loads(capsys.readouterr().out)["right"]
    answer.write_text(wrong_answer(name))
    assert run(name, str(answer)) == 1
    # Printed lines are wrapped.
    printed = " ".join(capsys.readouterr().out.split())
    assert WRONG[name][1] in printed


# By hand: shares of idle time (p - 1) / (v m + p - 1); 2 gathers for each of 4 pieces and
# 4 microbatches, less 4 for the head and 3 for the embedding; 8 bytes a parameter over 8.
NUMBERS = {
    "bubble": 100 * 3 / 11,
    "bubble-interleaved": 100 * 3 / 19,
    "in-flight": 8,
    "gathers": 2 * 4 * 4 - 4 - 3,
    "moments": 8_030_261_248 * 2 * 4 / 8 / 1e9,
    "all-reduce-bytes": 2 * 7 / 8,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_predictions_are_compared_with_numbers_made_by_hand(name: str) -> None:
    asked, true = ALL[name], NUMBERS[name]
    assert asked.check(f"{true:.3f}").right
    assert "too large" in hint(name, f"{1.55 * true:.3f}")
    assert "too small" in hint(name, f"{0.41 * true:.4f}")
    for usual in asked.hints:
        assert hint(name, f"{usual.at}") == usual.words


def test_every_prediction_is_tried() -> None:
    names = {name for name, each in ALL.items() if each.kind == "prediction"}
    assert names == set(NUMBERS)


@pytest.mark.parametrize("name, answer, words", [
    ("gpipe", "rank 0: F0 F1 B0 B1; rank 1: F0 F1 B0", "rank 1 has no backward after 1F1"),
    ("gpipe", "rank 1: F0 F1 B0 B1; rank 0: F0 F1 B0 B1", "write 'rank 0:'"),
    ("gpipe", "F0 F1 B0 B1", "1 lists for 2 stages"),
    ("one-f-one-b", "F0 F1 F2 B0 F3 B1 B2 B3; F0 F1 F2 B0 B1 F3 B2 B3; F0 B0 F1 B1 F2 B2 F3 B3",
     "rank 1 keeps 3 microbatches; 2 are allowed"),
    ("zero-bubble", "F0 F1 I0 W0 F2 I1 W1 I2 W2; F0 I0 W0 F1 I1 W1 F2 I2 W2", "takes 11 units; 10"),
    ("deadlock", "F0 B0 F1 B1; F0 F1 B0 B1", "rank 0 waits at 0B0"),
    ("my-group", "4 5", "differ along tp"),
    ("my-group", "5 7", "differ along pp"),
    ("my-group", "1 3", "in its own group"),
    ("my-group", "5", "has 2 ranks"),
    ("my-group", "0 5", "coordinates"),
    ("my-group", "a b", "numbers of the ranks"),
    ("two-hosts", "dp8 zero3", "8 ranks; 16"),
    ("two-hosts", "dp16 zero3", "divided by 16, not by 8"),
    ("two-hosts", "dp2x8 zero1", "this is zero1"),
    ("two-hosts", "dp2x8 zero9", "zero9"),
    ("small-bubble", "dp2 pp4 1f1b:8", "idles 27.3%"),
    ("small-bubble", "dp2 pp4 1f1b:16", "at most 8"),
    ("small-bubble", "dp4 pp2 1f1b:8", "2 pipeline stages"),
])  # fmt: skip
def test_a_wrong_answer_gets_a_hint_that_names_its_mistake(
    name: str, answer: str, words: str
) -> None:
    assert words in hint(name, answer)


def test_a_repair_may_take_nothing_away_and_add_nothing() -> None:
    asked = exercise("missing-all-reduce")
    # Without the head, nothing that is left contradicts itself.
    words = [word for word in asked.answer.split(" ") if word[:1] != "3"]
    assert "no longer does" in hint(asked.name, " ".join(words))
    more = asked.answer.replace("N ", "N N#1 ")
    assert "without need" in hint(asked.name, more)
    other = asked.answer.replace("mesh dp2", "mesh cp2")
    assert "mesh is 'dp2'" in hint(asked.name, other)


def test_a_repair_may_stand_wherever_the_step_is_complete() -> None:
    asked = exercise("missing-all-reduce")
    late = asked.answer.replace(" 1S", "").replace(" A ", " 1S A ")
    assert asked.check(late).right


# ---- the command


def run(*words: str) -> int:
    return command.run(["exercise", *words])


def test_the_command_lists_shows_and_checks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run() == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ALL)
    assert run("deadlock") == 0
    assert "rank 0: F0 B0 F1 B1" in capsys.readouterr().out
    assert run("deadlock", "rank 0: F0 B0 F1 B1; rank 1: F0 F1 B0 B1") == 1
    assert "rank 0 waits at 0B0" in capsys.readouterr().out
    answer = tmp_path / "answer.txt"
    answer.write_text(ALL["deadlock"].answer)
    assert run("deadlock", str(answer)) == 0
    right = capsys.readouterr().out
    assert "Right" in right
    assert "zero-bubble" in right
    assert max(map(len, right.splitlines())) <= 80
    assert run("bubble", "--solution") == 0
    assert "27.3" in capsys.readouterr().out


def test_an_answer_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1, 5\n"))
    assert run("my-group", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["right"]


def test_wrong_usage_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the answer"):
        run("deadlock", str(tmp_path / "nothing.txt"))
    with pytest.raises(ExerciseError, match="bubble"):
        run("buble")
    with pytest.raises(UsageError, match="--solution needs"):
        run("--solution")
