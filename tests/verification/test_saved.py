"""Checks of a trial's checkpoints and reports: sound ones pass, and each mistake is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from phalanx.layout import Layout
from phalanx.layout.choices import FP64
from phalanx.layout.goodput import Goodput
from phalanx.layout.journal import Record, read_journal
from phalanx.layout.run import Run
from phalanx.training import checkpoint
from phalanx.training.checkpoint_format import StoredTensor, verify_checkpoint
from phalanx.training.program import shape_of
from phalanx.training.stragglers import Stragglers
from phalanx.verification import keys, run_trial, saved
from phalanx.verification.reports import (
    Start,
    report_faults,
    straggler_faults,
)
from phalanx.verification.verify import Verdict
from seeded import swapped

WORDS = (
    "model={layers=2,hidden=32,heads=4,kv_heads=2,ffn=48,vocab=256,sequence=24}",
    "batch=8",
    "steps=20",
)


class Trial(NamedTuple):
    """An ended trial: what was called with its checkpoints and its journal."""

    verdict: Verdict
    path: Path
    step: int
    weights: dict[str, Tensor]
    reported: Sequence[Any]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """One trial in float64, of which every check below sees the files."""
    out = tmp_path_factory.mktemp("trial")
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1"))
    seen: dict[str, Any] = {}

    def files(path: Path, step: int, weights: dict[str, Tensor]) -> Any:
        seen["saved"] = path, step, weights
        return saved.saved_faults(path, step, weights)

    def reports(*arguments: Any) -> Any:
        seen["reported"] = arguments
        return report_faults(*arguments)

    with (
        swapped(run_trial, "saved_faults", files),
        swapped(run_trial, "report_faults", reports),
    ):
        layout = Layout.parse("dp2 zero1")
        made = run_trial.run_trial(run, run.shape, layout, str(out))
        verdict = next(run_trial.verify_run(made))
    return Trial(verdict, *seen["saved"], seen["reported"])


def test_a_right_trial_passes(trial: Trial) -> None:
    assert trial.verdict.passed, trial.verdict
    assert trial.step == run_trial.STEPS
    assert FP64 in trial.verdict.layout


def test_a_sound_checkpoint_has_no_fault_and_other_weights_are_named(
    trial: Trial,
) -> None:
    _, path, step, weights, _ = trial
    assert not [*saved.saved_faults(path, step, weights)]
    name, weight = next(iter(weights.items()))
    moved = {**weights, name: weight * (1 + 1e-15)}
    (wrong,) = saved.saved_faults(path, step, moved)
    assert f"other values of {name}" in wrong
    less = {other: x for other, x in weights.items() if other != name}
    (wrong,) = saved.saved_faults(path, step, less)
    assert name in wrong


def test_damage_that_is_accepted_is_named(
    trial: Trial, tmp_path: Path
) -> None:
    copy = tmp_path / trial.path.name
    shutil.copytree(trial.path, copy)
    assert not [*saved.undetected(copy)]
    with (
        swapped(saved, "WRONG", 4),
        swapped(saved, "verify_checkpoint", lambda path: []),
    ):
        accepted = [*saved.undetected(copy)]
    assert len(accepted) > 40
    for what in (
        "is empty",
        "one more byte",
        "pieces.0.start",
        "data_offsets",
    ):
        assert any(what in each for each in accepted), what
    # One rule less of a manifest.
    with (
        swapped(saved, "WRONG", 4),
        swapped(StoredTensor, "_uncovered", lambda self: iter(())),
    ):
        assert any("pieces" in each for each in saved.undetected(copy))


def test_a_tensor_that_the_manifest_does_not_name_is_damage(
    trial: Trial, tmp_path: Path
) -> None:
    copy = tmp_path / trial.path.name
    shutil.copytree(trial.path, copy)
    body = json.loads((copy / saved.MANIFEST).read_text())["body"]
    lost = body["tensors"].pop()
    saved._sign(body, copy)
    (wrong,) = verify_checkpoint(copy)
    assert f"the manifest has no {lost['kind']}/{lost['name']}" in wrong


def test_checkpoints_that_should_be_gone_or_aside_are_named(
    trial: Trial, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(trial.path.parent, folder)
    steps, aside = (run_trial.STEPS - 1, run_trial.STEPS), [run_trial.BROKEN]
    assert not [*saved.kept_faults(folder, steps, aside)]
    assert [*saved.kept_faults(folder, steps[1:], aside)]
    assert [*saved.kept_faults(folder, steps, [])]


def test_a_save_that_leaves_old_checkpoints_is_named(tmp_path: Path) -> None:
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1"))
    layout = Layout.parse("dp2 zero1")
    made = run_trial.run_trial(run, run.shape, layout, str(tmp_path))
    with swapped(checkpoint, "prune", lambda *more: None):
        verdict = next(run_trial.verify_run(made))
    assert "has the checkpoints" in verdict.first_difference


# ---- what a run reports


def changed(
    records: Sequence[Record], event: str, **values: Any
) -> list[Record]:
    """The records, with other values in the last one of an event."""
    at = max(n for n, each in enumerate(records) if each["event"] == event)
    return [*records[:at], {**records[at], **values}, *records[at + 1 :]]


@pytest.mark.parametrize(
    ("event", "values", "named"),
    [
        ("step", {"goodput": 0.99}, "the journal's goodput is 0.99"),
        ("end", {"step": 4}, "the journal has the records"),
        ("start", {"ranks": 3}, "the journal's ranks of a start is 3"),
        ("start", {"parameters": 5}, "the journal's parameters of a start"),
        ("start", {"held": 0}, "a rank holds 0 of"),
        ("checkpoint", {"step": 4}, "checkpoints of the steps"),
        ("checkpoint", {"error": "full"}, "with the error 'full'"),
        ("step", {"memory": 1e15}, "memory of 1000000000000000"),
        (
            "end",
            {"parts": dict.fromkeys(Goodput().spent, 0.0)},
            "0 s of steps",
        ),
    ],
)
def test_a_wrong_record_is_named(
    trial: Trial, event: str, values: dict[str, Any], named: str
) -> None:
    run, records, *more = trial.reported
    assert not [*report_faults(run, records, *more)]
    wrong = [*report_faults(run, changed(records, event, **values), *more)]
    assert any(named in each for each in wrong), wrong


def test_goodput_that_forgets_lost_steps_is_named(trial: Trial) -> None:
    with swapped(Goodput, "_lose", lambda self, at: None):
        assert any(
            "goodput loses" in x for x in report_faults(*trial.reported)
        )


def test_a_measured_step_without_an_operation_is_named(trial: Trial) -> None:
    run, *more = trial.reported
    path = Path(run.out, "timeline.json")
    text = path.read_text()
    table = json.loads(text)
    path.write_text(json.dumps(table | {"spans": table["spans"][1:]}))
    try:
        wrong = [*report_faults(run, *more)]
    finally:
        path.write_text(text)
    assert any("other operations than its list" in each for each in wrong)


def test_the_journal_is_that_of_both_starts(trial: Trial) -> None:
    run, records, starts, parameters, shape = trial.reported
    assert records == read_journal(Path(run.out, "metrics.jsonl"))
    assert [start.last for start in starts] == [3, 5]
    assert shape == asdict(shape_of(run))
    other = [replace(starts[0], first=1), *starts[1:]]
    assert [*report_faults(run, records, other, parameters, shape)]
    assert isinstance(starts[0], Start)


def test_slow_ranks_by_hand() -> None:
    assert not [*straggler_faults()]
    beyond = Stragglers._beyond

    def hasty(self: Stragglers, numbers: Any, ranks: Any, steps: int) -> Any:
        return beyond(self, numbers, ranks, 2 * steps)

    with swapped(Stragglers, "_beyond", hasty):
        assert [*straggler_faults()]


# ---- keys of a run file


def test_a_key_whose_wrong_values_are_accepted_is_named() -> None:
    run = Run.parse("", "run", (*WORDS, "layout=dp2 zero1"))
    assert not [*keys.key_faults(run)]
    plain: Callable[..., Run] = Run.parse

    def lenient(text: str, where: str, words: Sequence[str] = ()) -> Run:
        # a run without the words that it does not understand
        try:
            return plain(text, where, words)
        except ValueError:
            return plain(text, where)

    class Lenient:
        parse = staticmethod(lenient)

    with swapped(keys, "Run", Lenient):
        wrong = [*keys.key_faults(run)]
    assert any("it is accepted" in each for each in wrong)
