"""Killed at any moment, a run goes on from a whole checkpoint, and nothing of it is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_worlds import Campaign
from loop_worlds import records

pytestmark = pytest.mark.long_file


def _killed(
    out: Path,
    layout: str,
    asynchronous: bool,
    *,
    kills: int,
    in_save: int,
    seed: int,
) -> Campaign:
    """So many kills, and of them so many inside a save: a save that was begun and left proves it."""
    run = Campaign(out, layout, asynchronous, seed)
    for _ in range(kills - in_save):
        run.kill(in_save=False)
    before, tries = run.killed_in_save, 0
    while run.killed_in_save < before + in_save:
        tries += 1
        assert tries <= 6 * in_save, "a save cannot be hit"
        run.kill(in_save=True)
    last = run.end()
    run.undisturbed(out.with_name("undisturbed"), last)
    print(
        f"{layout}{' async' if asynchronous else ''}: {run.killed} kills in {last} steps,"
        f" {run.killed_in_save} inside a save; lost steps at most {max(run.lost)}"
    )
    return run


@pytest.mark.parametrize(
    "layout, asynchronous",
    [
        pytest.param("dp2 zero1", False, marks=pytest.mark.slow),
        ("pp2 1f1b:2", True),
    ],
)
def test_a_kill_inside_a_save_leaves_a_run_that_ends_bit_for_bit_as_one_undisturbed(
    layout: str, asynchronous: bool, tmp_path: Path
) -> None:
    run = _killed(
        tmp_path / "run", layout, asynchronous, kills=1, in_save=1, seed=1
    )
    assert run.killed_in_save >= 1


@pytest.mark.parametrize(
    "layout", ["dp2 zero1", pytest.param("fp32", marks=pytest.mark.slow)]
)
def test_ranks_start_again_after_a_kill_and_end_bit_for_bit_as_if_undisturbed(
    layout: str, tmp_path: Path
) -> None:
    run = Campaign(tmp_path / "run", layout, False, 1, restarts=1)
    last = run.restarted(kills=1)
    run.undisturbed(tmp_path / "undisturbed", last)


def test_ranks_that_are_killed_again_and_again_before_a_save_start_as_often_as_the_run_says(
    tmp_path: Path,
) -> None:
    run = Campaign(tmp_path / "run", "dp2", False, 1, restarts=3, every=0)
    run.restarted(kills=3)
    assert [r["step"] for r in records(run.out, "start")] == [0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, asynchronous, kills, in_save",
    [
        ("dp2 zero2", False, 10, 4),
        ("tp2", False, 10, 3),
        ("pp2 1f1b:2", True, 10, 4),
    ],
)
def test_thirty_kills_never_cost_more_than_an_interval(
    layout: str, asynchronous: bool, kills: int, in_save: int, tmp_path: Path
) -> None:
    run = _killed(
        tmp_path / "run",
        layout,
        asynchronous,
        kills=kills,
        in_save=in_save,
        seed=7,
    )
    assert run.killed >= kills
