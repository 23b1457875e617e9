"""Runs of `exact` have the same bits in every layout, and when the layout changes."""

from pathlib import Path
from shutil import rmtree

import pytest
from loop_worlds import losses, small, trained, weights

STEPS = 20
SETTINGS = (
    f"steps={STEPS}",
    "batch=8",
    "checkpoint.every=10",
    "checkpoint.keep=3",
)
ALONE = "accum:4 exact"
FEW = ("dp2 zero3 accum:2 exact", "pp2 1f1b:4 exact")
MORE = (
    "dp4 zero1 exact",
    "dp2x2 zero2 exact",
    "pp3 zb-h1:4 exact",
    "dp2 pp2 zb-v:2 offload:optimizer exact",
    "dp2 accum:2 recompute:all exact",
)


def bits(
    out: Path, layout: str, *more: str, backend: str = "threads"
) -> tuple[dict[int, str], dict[str, str]]:
    """The losses of a run and the weights that it ends with."""
    run = small(out, *SETTINGS, *more)
    trained(run, layout, backend)
    return losses(out), weights(out, STEPS)


def test_runs_have_the_bits_of_one_process(tmp_path: Path) -> None:
    known = bits(tmp_path / "alone", ALONE)
    assert len(known[0]) == STEPS
    for n, layout in enumerate(FEW):
        assert bits(tmp_path / f"run{n}", layout) == known


@pytest.mark.slow
def test_without_the_word_they_do_not(tmp_path: Path) -> None:
    known = bits(tmp_path / "alone", "accum:4")
    assert bits(tmp_path / "other", "dp4 zero1") != known


def test_a_run_goes_on_with_fewer_ranks_and_the_same_bits(
    tmp_path: Path,
) -> None:
    known = bits(tmp_path / "alone", ALONE)
    out = tmp_path / "changes"
    assert bits(out, "dp2x2 zero2 exact") == known
    rmtree(out / "checkpoints" / f"step-{STEPS:08}")
    assert bits(out, "dp2 pp2 1f1b:2 exact") == known
    rmtree(out / "checkpoints" / f"step-{STEPS:08}")
    assert bits(out, ALONE) == known


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE)
def test_more_runs_have_the_bits_of_one_process(
    layout: str, tmp_path: Path
) -> None:
    for words in ((), ("precision=bf16",)):
        known = bits(tmp_path / f"alone{len(words)}", ALONE, *words)
        assert bits(tmp_path / f"run{len(words)}", layout, *words) == known


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(
    backend: str, tmp_path: Path
) -> None:
    known = bits(tmp_path / "alone", ALONE)
    for n, layout in enumerate(FEW):
        out = tmp_path / f"run{n}"
        assert bits(out, layout, backend=backend) == known
