"""Records of a run's own steps: layouts compare equal with one process, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_worlds import records as events
from loop_worlds import small, trained, weights

from phalanx.comm import Work
from phalanx.parallel import Unit
from phalanx.training.audit import folder_of
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.precision import LossScale
from torch_audit import records
from torch_audit.checks import check_run
from torch_audit.compare import EQUAL, REFUTED, compare
from torch_audit.report import verdict_text
from torch_audit.runs import Names, Run, load
from torch_audit.shards import whole_place
from torch_audit.sketch import sketch

DENSE = ("steps=2", "train.audit=2", "validation.batches=0")
EXPERTS = (*DENSE, "model.experts=4", "model.top_k=2", "model.tied=true")


def recorded(out: Path, layout: str, *more: str) -> Run:
    trained(small(out, *more), layout)
    return load(folder_of(out, 0))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("one") / "run", "fp64", *DENSE)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2x2 zero3 accum:2 fp64",
        "tp2 seq pp2 1f1b:2 fp64",
        "dp2 cp2 zero1 fp64",
        "tp2 fp64",
    ],
)
def test_a_layout_records_the_step_of_one_process(
    tmp_path: Path, one: Run, layout: str
) -> None:
    run = recorded(tmp_path / "run", layout, *DENSE)
    verdict = compare(one, run)
    assert verdict.result == EQUAL, verdict_text(verdict, layout, "one")
    assert (verdict.steps, verdict.precision) == (2, "float64")
    assert 0 < verdict.worst < 1e-12
    assert not [x for x in check_run(run) if x.fault]


def test_experts_tied_weights_and_muon_record_the_same(tmp_path: Path) -> None:
    more = (*EXPERTS, "optimizer.name=muon", "train.check_copies=0")
    one = recorded(tmp_path / "one", "fp64", *more)
    run = recorded(tmp_path / "run", "dp2 ep2 pp2 fp64", *more)
    verdict = compare(one, run)
    assert verdict.result == EQUAL, verdict_text(verdict, "run", "one")
    assert not [x for x in check_run(run) if x.fault]


@pytest.mark.parametrize("layout", ["fp64", "dp2 zero3 fp64"])
def test_a_step_that_only_prepares_matrices_changes_none(
    tmp_path: Path, layout: str
) -> None:
    """SOAP's first step makes the bases of its matrices; without decay, nothing moves them."""
    soap = ("optimizer.name=soap", "optimizer.weight_decay=0")
    run = recorded(tmp_path / "run", layout, *DENSE, *soap)
    first, second = (step.parameters(Names()) for step in run.steps.values())
    still = {
        name
        for name, each in first.items()
        if each.sketch(records.WEIGHT) == each.sketch(records.UPDATED)
    }
    assert len(still) == 21
    assert {name for name, each in first.items() if not each.rate} == still
    # The second step is an update, so its absence would be a fault.
    assert all(each.rate > 0 for each in second.values())
    assert not [x for x in check_run(run) if x.fault]


def test_matrices_record_the_rate_of_their_own(tmp_path: Path) -> None:
    muon = ("optimizer.name=muon", "optimizer.matrix_lr=5e-3")
    run = recorded(tmp_path / "run", "dp2 fp64", *DENSE, *muon)
    parameters = run.first.parameters(Names())
    rates: dict[bool, set[float]] = {True: set(), False: set()}
    for name, each in parameters.items():
        matrix = len(each.shape) == 2 and name.startswith("layers.")
        rates[matrix].add(each.rate)
    # A warmup of one step has the whole rates from the first on.
    assert rates == {True: {5e-3}, False: {1e-2}}


def test_recorded_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Sketches of the whole tensors that the run has saved, which the recorder never saw."""
    out = tmp_path / "run"
    run = recorded(out, "tp2 dp2 zero2 fp64", *DENSE)
    path = out / "checkpoints" / "step-00000002"
    manifest = read_manifest(path)
    parameters = run.steps[1].parameters(Names())
    with TensorReader(path, manifest) as reader:
        whole = {x.title: reader.whole(x) for x in manifest.tensors}
    compared = 0
    for name, parameter in parameters.items():
        weight = whole[f"weight/{name}"]
        indices = whole_place(tuple(weight.shape)).indices
        found = parameter.whole(records.UPDATED)
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64), sketch(weight, indices)
        )
        compared += 1
    assert compared > 20


def test_a_start_in_another_layout_records_steps_of_its_own(
    tmp_path: Path,
) -> None:
    """A run goes on from one checkpoint in two layouts; only its recorded steps are compared."""
    runs = {}
    for layout in ("fp64", "tp2 zero1 dp2 fp64"):
        out = tmp_path / layout.replace(" ", "-")
        trained(small(out, "steps=2", "train.audit=0"), "dp2 fp64")
        assert not (out / "audit").exists()
        more = ("steps=5", "train.audit=2")
        trained(small(out, *more), layout)
        runs[layout] = load(folder_of(out, 2))
    one, run = runs.values()
    assert sorted(run.steps) == [2, 3]
    assert compare(one, run).result == EQUAL


def test_half_precision_is_recorded_without_its_loss_scale(
    tmp_path: Path,
) -> None:
    one = recorded(tmp_path / "one", "fp16", *DENSE)
    run = recorded(tmp_path / "run", "dp2 zero3 fp16", *DENSE)
    verdict = compare(one, run)
    assert (verdict.result, verdict.precision) == (EQUAL, "float16")
    # Not 2^16 times as large: the norm that the log tells.
    (clip,) = one.first.ranks[0].clips
    squares = one.first.ranks[0].sketches[records.GRADIENT].values()
    total = sum(numbers[0] for numbers in squares) ** 0.5
    assert total == pytest.approx(clip.norm, rel=1e-2)


def test_steps_that_the_loss_scale_skips_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss scale is too large, and both layouts halve it in the same steps."""
    defaults = (2.0**20, 2000, 0)
    monkeypatch.setattr(LossScale.__init__, "__defaults__", defaults)
    more = ("steps=8", "train.audit=3", "validation.batches=0")
    runs = {
        layout: recorded(tmp_path / layout.replace(" ", "-"), layout, *more)
        for layout in ("fp16", "dp2 fp16")
    }
    one, run = runs.values()
    # The log counts steps from 1.
    skipped = {r["step"] - 1 for r in events(tmp_path / "fp16", "skip")}
    assert skipped
    assert list(one.steps) == sorted(set(range(8)) - skipped)[:3]
    verdict = compare(one, run)
    assert verdict.result == EQUAL, verdict_text(verdict, "run", "one")
    assert verdict.steps == 3
    assert not [x for each in (one, run) for x in check_run(each) if x.fault]


def test_a_layout_that_leaves_out_a_sum_is_named(
    tmp_path: Path, one: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms on parts of a sequence, whose gradients ranks of tp have to sum."""

    def nothing(self: Unit) -> Any:
        return Work()

    monkeypatch.setattr(Unit, "sum_parts", nothing)
    more = (*DENSE, "train.check_copies=0")
    run = recorded(tmp_path / "run", "tp2 seq fp64", *more)
    verdict = compare(one, run)
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    assert all("norm" in x.name for x in verdict.different)
    assert len(verdict.different) >= 3
    # Also without a reference.
    faults = {x.check for x in check_run(run) if x.fault}
    assert "copies" in faults


def test_recorded_steps_change_no_bit_and_nothing_stays_behind(
    tmp_path: Path,
) -> None:
    """All weights after four steps, of which none, two or all are recorded."""
    found = set()
    for steps in (0, 2, 4):
        out = tmp_path / str(steps)
        more = ("steps=4", "validation.batches=0", f"train.audit={steps}")
        trained(small(out, *more), "dp2 zero3")
        found.add(str(weights(out, 4)))
        made = list(out.glob("audit/*/*.audit"))
        assert len(made) == 2 * steps
    assert len(found) == 1
