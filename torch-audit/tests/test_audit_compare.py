"""Verdicts on records made by hand: each result, tolerances, and what a report says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_audit.checks import check_step
from torch_audit.command import compare_folders, main
from torch_audit.compare import (
    EQUAL,
    NOT_COMPARABLE,
    REFUTED,
    Verdict,
    compare,
)
from torch_audit.own import judged
from torch_audit.records import (
    CLIPPED,
    GRADIENT,
    UPDATED,
    WEIGHT,
    BatchRecord,
    ClipRecord,
    ParameterRecord,
    RecordError,
    StepRecord,
)
from torch_audit.report import ranges, verdict_text
from torch_audit.runs import Run, Step, load
from torch_audit.shards import whole_place
from torch_audit.sketch import sketch

NAMES = ("layers.0.up", "layers.1.up", "layers.1.bias")
SHAPES = ((4, 6), (4, 6), (5,))
RATE, MOST = 0.1, 1.0


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def record(
    rank: int = 0,
    world: int = 1,
    *,
    names: tuple[str, ...] = NAMES,
    dtype: str = "float64",
    factors: dict[str, float] | None = None,
    noise: float = 0.0,
    seed: int = 0,
    rows: tuple[int, ...] = (1, 2, 3),
    operations: dict[str, int] | None = None,
) -> StepRecord:
    """A step of plain SGD: every kind of sketch follows from weights and gradients."""
    result = StepRecord(rank, 0, world, losses=[1.0])
    result.operations = operations or {}
    result.batches = [BatchRecord(list(rows), 12, 0, True)]
    result.sketches = {
        kind: {} for kind in (WEIGHT, GRADIENT, CLIPPED, UPDATED)
    }
    gradients = []
    for index, (name, shape) in enumerate(zip(names, SHAPES, strict=True)):
        factor = (factors or {}).get(name, 1.0)
        moved = 1 + noise * random(100 + seed + index, shape)
        gradients.append(factor * random(10 + index, shape) * moved)
    told = torch.cat([each.flatten() for each in gradients]).norm().item()
    for index, (name, gradient) in enumerate(
        zip(names, gradients, strict=True)
    ):
        place = whole_place(tuple(gradient.shape))
        weight = random(index, place.shape)
        clipped = gradient * min(1.0, MOST / (told + 1e-6))
        values = (weight, gradient, clipped, weight - RATE * clipped)
        for kind, value in zip(result.sketches, values, strict=True):
            result.sketches[kind][index] = sketch(
                value, place.indices
            ).tolist()
        result.parameters.append(
            ParameterRecord(
                [name], list(place.shape), place.count, place.cover, place.cover,
                place.text(), dtype, True, RATE,
            )
        )  # fmt: skip
    result.clips = [ClipRecord([0, 1, 2], MOST, 2.0, told)]
    return result


def run_of(*records: StepRecord) -> Run:
    return Run(Path("run"), {0: Step({each.rank: each for each in records})})


def verdict_on(*records: StepRecord, dtype: str = "float64") -> Verdict:
    return compare(run_of(record(dtype=dtype)), run_of(*records))


def test_the_same_record_is_equal() -> None:
    verdict = verdict_on(record())
    assert verdict.result == EQUAL
    assert verdict.parameters == 3


def test_the_first_quantity_that_differs_is_told_with_its_factor() -> None:
    verdict = verdict_on(
        record(factors={"layers.0.up": 2.0, "layers.1.up": 2.0})
    )
    assert (verdict.result, verdict.quantity) == (REFUTED, "gradient")
    assert [each.factor for each in verdict.different] == pytest.approx(
        [2.0, 2.0]
    )
    text = verdict_text(verdict, "run", "one")
    assert (
        "layers.*.up (2): off by 1 of its size; = 2.0000 x reference; ranks 0"
        in text
    )
    assert "equal before it: 3 samples, weights before the step, loss" in text
    assert "Repeat them in the dtype that you train in" in text


def test_other_samples_are_not_comparable() -> None:
    verdict = verdict_on(record(rows=(1, 2, 9)))
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "samples")
    assert "2 of the reference's 3" in verdict.text


def test_other_names_are_not_comparable() -> None:
    verdict = verdict_on(record(names=("layers.0.up", "layers.1.up", "other")))
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "names")
    assert (
        "only the reference has layers.1.bias; only the run has other"
        in verdict.text
    )


def recorded_at(*numbers: int) -> Run:
    step = Step({0: record()})
    return Run(Path("run"), dict.fromkeys(numbers, step))


def test_runs_without_a_common_step_are_not_comparable() -> None:
    verdict = compare(recorded_at(0, 1), recorded_at(2, 3))
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "steps")
    assert "the reference has steps 0 to 1" in verdict.text
    assert "the run has steps 2 to 3" in verdict.text
    assert "first difference" not in verdict_text(verdict, "run", "one")
    # A perturbed run may be what lacks them.
    same = recorded_at(0)
    verdict = compare(same, same, [recorded_at(1)])
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "steps")
    assert "perturbed run 1 has step 1" in verdict.text


def test_a_step_that_one_run_has_left_out_ends_the_comparison() -> None:
    """Weights after it differ, which is no fault of the steps that both have recorded."""
    verdict = compare(recorded_at(0, 1, 2), recorded_at(0, 2, 3))
    assert (verdict.result, verdict.quantity) == (NOT_COMPARABLE, "steps")
    assert verdict.text == "only the reference has recorded step 1"
    assert verdict.step == 2
    # Both have left it out.
    assert compare(recorded_at(0, 2), recorded_at(0, 2)).result == EQUAL


def test_ranks_that_deviate_are_named() -> None:
    wrong = record(1, 2, factors={"layers.1.bias": 1.01})
    wrong.clips = record().clips
    (different,) = verdict_on(record(0, 2), wrong).different
    assert (different.name, different.ranks) == ("layers.1.bias", [1])
    assert different.factor == pytest.approx(1.01)


def test_a_norm_that_is_not_that_of_the_gradients_is_a_fault() -> None:
    wrong = record()
    (clip,) = wrong.clips
    wrong.clips = [replace(clip, norm=1.25 * clip.norm)]
    found = {
        finding.check: finding.text
        for finding in check_step(0, Step({0: wrong}))
    }
    assert "used = 1.2500 x true" in found["norm"]


def test_samples_that_come_again_are_noted_without_a_reference() -> None:
    before = Step({0: record(rows=(1, 2, 3))})
    for rows, expected in (
        ((4, 5, 6), {}),
        ((3, 4, 5), {"samples again": "1 of 3 samples were in the step"}),
        ((4, 4, 5), {"samples": "1 of 2 samples are seen more often"}),
    ):
        step = Step({0: record(rows=rows)})
        found = {
            finding.check: finding.text
            for finding in check_step(1, step, before)
            if "samples" in finding.check
        }
        assert found.keys() == expected.keys(), rows
        for check, text in expected.items():
            assert found[check].startswith(text)


def test_rounding_of_float32_is_no_difference_and_a_thousandth_in_float64_is() -> (
    None
):
    for dtype, noise, result in (
        ("float32", 1e-6, EQUAL),
        ("float32", 0.05, REFUTED),
        ("bfloat16", 0.01, EQUAL),
        ("float64", 1e-14, EQUAL),
        ("float64", 1e-7, REFUTED),
    ):
        verdict = verdict_on(record(dtype=dtype, noise=noise), dtype=dtype)
        assert verdict.result == result, (dtype, noise, verdict.text)


def test_rounding_of_float32_counts_in_float64_where_operations_compute_in_it() -> (
    None
):
    in_part = {"float64": 8, "float32": 2}
    for ours, theirs, noise, result in (
        (in_part, in_part, 1e-7, EQUAL),
        (in_part, in_part, 1e-5, REFUTED),
        ({"float64": 10}, {"float64": 10}, 1e-7, REFUTED),
        (in_part, {"float64": 10}, 1e-7, EQUAL),
    ):
        run = run_of(record(noise=noise, operations=ours))
        verdict = compare(run_of(record(operations=theirs)), run)
        assert verdict.result == result, (ours, theirs, noise)
        noted = any("2 of 10 operations" in x for x in verdict.notes)
        assert noted == (ours != theirs)


def test_a_difference_that_the_own_dtype_does_not_have_is_one_of_float64() -> (
    None
):
    """A difference smaller than the own dtype's rounding is not excused by it."""
    one = run_of(record(dtype="float32"))
    perturbed = [
        run_of(record(dtype="float32", noise=1e-6, seed=seed))
        for seed in (10, 20, 30)
    ]
    for by, own, only, hidden in (
        (0.5, 1.0, True, 0),
        (0.5, 0.5, False, 0),
        (1 + 1e-8, 1.0, False, 1),
    ):
        exact = verdict_on(record(factors={"layers.0.up": by}))
        assert exact.result == REFUTED
        run = record(dtype="float32", factors={"layers.0.up": own})
        repeated = judged(exact, one, run_of(run), perturbed)
        found = repeated.only_in_float64, len(repeated.hidden)
        assert found == (only, hidden), (by, own)


def test_perturbed_runs_give_tolerances_with_a_floor() -> None:
    one = run_of(record(dtype="float32"))
    perturbed = [
        run_of(record(dtype="float32", noise=1e-5, seed=seed))
        for seed in (10, 20, 30)
    ]
    # One parameter whose own difference happens to be nothing in all perturbed runs.
    for each in perturbed:
        still = each.first.ranks[0].sketches
        for kind, rows in one.first.ranks[0].sketches.items():
            still[kind][2] = rows[2]
    close = run_of(record(dtype="float32", noise=1e-5, seed=40))
    far = run_of(record(dtype="float32", noise=5e-4, seed=40))
    assert compare(one, close, perturbed).result == EQUAL
    verdict = compare(one, far, perturbed)
    assert (verdict.result, verdict.measured) == (REFUTED, 3)
    assert compare(one, far).result == EQUAL  # by the usual limits of float32


def test_perturbed_runs_of_another_program_give_no_tolerances() -> None:
    one = run_of(record())
    other = run_of(record(names=("a", "b", "c")))
    verdict = compare(one, one, [other])
    assert (verdict.result, verdict.quantity) == (
        NOT_COMPARABLE,
        "perturbed runs",
    )


def test_a_gradient_of_nothing_but_rounding_is_not_compared() -> None:
    """A key's bias has the gradient zero: what is left is rounding, other in each layout."""
    one = record(factors={"layers.1.bias": 1e-17})
    other = record(factors={"layers.1.bias": -3e-17})
    assert compare(run_of(one), run_of(other)).result == EQUAL


def test_files_are_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RecordError, match="holds no recorded run"):
        load(tmp_path)
    record(1, 3).write(tmp_path)
    with pytest.raises(RecordError, match="rank 0, 2 recorded none"):
        load(tmp_path)
    (tmp_path / "rank00000-step0000.audit").write_text("{}\n")
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "is no file of a recorded run" in capsys.readouterr().err


def test_exit_codes_are_those_of_the_worst_run(tmp_path: Path) -> None:
    made = {
        "one": record(),
        "twice": record(factors=dict.fromkeys(NAMES, 2.0)),
        "other": record(rows=(7,)),
    }
    for name, each in made.items():
        (tmp_path / name).mkdir()
        each.write(tmp_path / name)
    one, twice, other = (tmp_path / name for name in made)
    for runs, code in (
        ([one], 0),
        ([one, twice], 1),
        ([other], 2),
        ([one, other], 2),
    ):
        assert compare_folders(one, runs, []).code == code


def test_ranks_are_told_as_ranges() -> None:
    assert ranges([3, 0, 1, 2, 7]) == "0-3, 7"


def test_a_program_without_a_backward_of_its_own_has_no_cause_by_it() -> None:
    twice = record(factors=dict.fromkeys(NAMES, 2.0))
    one = record()
    for each in (one, twice):
        each.losses = []
    verdict = compare(run_of(one), run_of(twice))
    assert (verdict.result, verdict.causes) == (REFUTED, [])
