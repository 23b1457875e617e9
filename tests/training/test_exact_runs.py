"""Runs of `exact` have the same bits in every layout, and when the layout changes."""

from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from kill_worlds import Campaign
from loop_worlds import losses, records, small, trained, weights

from phalanx.comm import World, launch
from phalanx.layout import Layout
from phalanx.layout.cases import SHAPES
from phalanx.parallel import build_model
from phalanx.parallel.local import build_local
from phalanx.program import Timeline
from phalanx.program.build import forward_only
from phalanx.training.executor import StepResult, Validator
from phalanx.training.program import program_of

STEPS = 20
SETTINGS = (
    f"steps={STEPS}",
    "batch=8",
    "checkpoint.every=10",
    "checkpoint.keep=3",
    "model.layers=4",  # as many as the stages of zb-v
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
    return found(out)


def found(out: Path) -> tuple[dict[int, str], dict[str, str]]:
    each = losses(out)
    # validations have numbers of their own, behind those of the steps
    for record in records(out, "validation"):
        each[STEPS + record["step"]] = float(record["loss"]).hex()
    return each, weights(out, STEPS)


def test_runs_have_the_bits_of_one_process(tmp_path: Path) -> None:
    known = bits(tmp_path / "alone", ALONE)
    assert len(known[0]) == STEPS + 1  # and the validation at the end
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
    for precision in "fp32", "bf16", "fp16":
        word = f"precision={precision}"
        known = bits(tmp_path / f"alone-{precision}", ALONE, word)
        assert bits(tmp_path / precision, layout, word) == known


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(
    backend: str, tmp_path: Path
) -> None:
    known = bits(tmp_path / "alone", ALONE)
    for n, layout in enumerate(FEW):
        out = tmp_path / f"run{n}"
        assert bits(out, layout, backend=backend) == known


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_goes_on_with_fewer_and_the_same_bits(
    tmp_path: Path,
) -> None:
    fallback = f"train.fallback=dp2 zero1 accum:2 exact; {ALONE}"
    run = Campaign(tmp_path / "run", "dp4 zero2 exact", False, seed=0)
    for ranks in 4, 2:
        run.more = fallback, "--ranks", str(ranks)
        run.kill(in_save=False)
    run.more = fallback, "--ranks", "1"
    last = run.end(more=STEPS)
    starts = [record["layout"] for record in records(run.out, "start")]
    assert [text.split()[0] for text in starts] == ["dp4", "dp2", "accum:4"]
    alone = Campaign(tmp_path / "alone", ALONE, False, seed=0)
    assert alone.command(last).wait(timeout=300) == 0
    assert losses(run.out) == losses(alone.out)
    assert weights(run.out, last) == weights(alone.out, last)


# ---- validation

HALF_BIT = 2.0**-53  # half of the last bit of 1 in float64
LOSSES = (1.0, HALF_BIT, HALF_BIT, HALF_BIT)
IN_TREE = (LOSSES[0] + LOSSES[1]) + (LOSSES[2] + LOSSES[3])


class GivenLosses(Validator):
    """A validator whose microbatches have these losses."""

    def step(
        self, batches: Sequence[Any], lr: float, **more: Any
    ) -> StepResult:
        count = len(batches)
        first = self.local.coordinates["data"] * count
        own = LOSSES[first : first + count]
        self.totals.begin(count, 1)
        for microbatch, loss in enumerate(own):
            self.totals.record(microbatch, 0, torch.tensor([loss]).double())
        return StepResult(Timeline(()), loss=sum(own), count=1.0)


def validated(world: World, text: str) -> float | None:
    layout = Layout.parse(text)
    model = build_model(SHAPES["gqa"])
    program = program_of(model, layout)
    local = build_local(world, layout, model, program)
    forward = forward_only(program, layout)
    validator = GivenLosses(local, forward, world.rank)
    return validator.mean_loss([[{}] * layout.microbatches])


@pytest.mark.parametrize("text", [ALONE, "dp2 accum:2 exact", "dp4 exact"])
def test_losses_of_a_validation_are_added_in_the_tree(text: str) -> None:
    assert sum(LOSSES) < IN_TREE  # a running sum rounds otherwise
    ranks = Layout.parse(text).ranks
    found = launch(validated, ranks, text, backend="threads")
    assert found == [IN_TREE] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_of_tp_have_the_bits_of_one_process_and_change_their_tp(
    tmp_path: Path, precision: str
) -> None:
    words = f"precision={precision}", "model.heads=4"
    known = bits(tmp_path / "alone", "accum:4 exact:4", *words)
    out = tmp_path / "changes"
    assert bits(out, "dp2 tp2 seq zero1 accum:2 exact:4", *words) == known
    rmtree(out / "checkpoints" / f"step-{STEPS:08}")
    assert bits(out, "pp2 tp2 1f1b:4 exact:4", *words) == known
    rmtree(out / "checkpoints" / f"step-{STEPS:08}")
    assert bits(out, "tp4 accum:4 exact:4", *words) == known
