"""The terms of a comparison differ from step to step, so that what only some steps need is compared too:
clipping that is not at work, ranks and steps without targets, a step that float16 skips, z-loss, both
scales of Muon. What cannot be compared is no agreement."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.layout import Layout, Shape
from phalanx.models import loss
from phalanx.parallel import Unit, build_model, local, microbatches
from phalanx.program import DoesNotFit, Op, ProgramError
from phalanx.training.executor import Executor
from phalanx.verification import SHAPES, Verdict, trial, verify
from phalanx.verification.cases import trial_batch
from phalanx.verification.optimizers import OPTIMIZERS
from phalanx.verification.reference import Trace, reference, validation_of
from phalanx.verification.trial import clip, program_in
from seeded import setting_of, swapped, trained, truth

IGNORED = -100
TEXT = [name for name, shape in SHAPES.items() if shape.kind == "decoder"]


def verdicts(layouts: str, name: str = "gqa", **more: Any) -> list[Verdict]:
    return list(verify(SHAPES[name], Layout.parse_many(layouts), **more))


def failures(layouts: str, name: str = "gqa", **more: Any) -> list[str]:
    found = verdicts(layouts, name, **more)
    assert found
    return [f"{v.layout}: {v.first_difference}" for v in found if not v.passed]


# ---- what differs from step to step


@pytest.mark.parametrize("name", SHAPES)
def test_clipping_is_at_work_in_the_first_step_and_not_in_the_next(
    name: str,
) -> None:
    first, second, third = truth(name).trace.steps
    assert first.norm > 1.5 * clip(0) > 0
    assert 0 < 10 * second.norm < clip(1)
    assert clip(2) == 0
    assert math.isfinite(third.norm)


def targets(
    name: str, step: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return trial_batch(SHAPES[name], step, dtype=dtype)["targets"] != IGNORED


@pytest.mark.parametrize("name", TEXT)
def test_one_step_has_targets_on_the_last_rank_alone_and_one_has_none(
    name: str,
) -> None:
    for ranks in (3, 4, 5, 8):
        layout = Layout.parse(f"dp{ranks}")
        batch = trial_batch(SHAPES[name], 1)
        parts = [
            microbatches(batch, layout, rank)[0]["targets"]
            for rank in range(ranks)
        ]
        counts = [int((part != IGNORED).sum()) for part in parts]
        assert counts[0] == 0 < counts[-1]
    thirds = microbatches(
        trial_batch(SHAPES[name], 1), Layout.parse("accum:3"), 0
    )
    assert [bool((part["targets"] != IGNORED).any()) for part in thirds] == [
        False,
        False,
        True,
    ]
    assert not targets(name, 2).any()
    for step in (0, 3, 4, 5):
        assert targets(name, step).any(1).all()  # in every row
    # What is not a target is as it would be: only the targets of two steps differ.
    for step in range(3):
        batch, other = (
            trial_batch(SHAPES[name], step),
            trial_batch(SHAPES[name], step, dtype=torch.float16),
        )
        assert torch.equal(batch["tokens"], other["tokens"])


@pytest.mark.parametrize("name", TEXT)
def test_validation_has_targets_after_any_number_of_steps(name: str) -> None:
    for steps in (1, 2, 3, 7):
        batches = validation_of(partial(trial_batch, SHAPES[name]), steps)
        counts = [
            int((batch["targets"] != IGNORED).sum()) for batch in batches
        ]
        assert counts[0] > 1.5 * counts[1] > 0


def trained_by_torch(shape: Shape) -> Trace:
    """A training in float16 on one process with torch's own scaler."""
    setting = setting_of(shape, "float16")
    first, patience = setting.scaling
    return reference(
        build_model(shape),
        setting.batches,
        steps=setting.steps,
        optimizer=setting.optimizer,
        rate=setting.rate,
        clip=setting.clip,
        precision=setting.precision,
        seed=setting.seed,
        scaler=torch.amp.GradScaler("cpu", first, growth_interval=patience),
        cut=lambda rows: torch.arange(rows).chunk(3),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_of_three_steps_in_float16_the_second_overflows_and_is_skipped_by_torch(
    name: str,
) -> None:
    known = trained_by_torch(SHAPES[name])
    finite = [math.isfinite(step.norm) for step in known.steps]
    assert finite == [True, False, True]
    first, second, third = (step.scale for step in known.steps)
    assert second == 2 * first == 2 * third
    before, skipped, after = (step.weights for step in known.steps)
    assert all(torch.equal(before[n], skipped[n]) for n in before)
    assert any(not torch.equal(skipped[n], after[n]) for n in before)


# ---- a step that float16 skips

SKIPPING = "; dp2; tp2 seq; pp2 1f1b:3; cp2; dp2 zero1; dp3 zero3; dp2x2 zero2 accum:2; offload:optimizer"
FEW_SKIPPING = "dp2; tp2 seq; pp2 1f1b:3; dp3 zero3"


@pytest.mark.parametrize(
    "optimizer", [name for name in OPTIMIZERS if name != "muon:original"]
)
def test_an_overflow_is_skipped_in_every_kind_of_layout_as_torchs_scaler_skips_it(
    optimizer: str,
) -> None:
    # Layouts of every kind with AdamW, and a few with each other optimizer.
    layouts = SKIPPING if optimizer == "adamw" else FEW_SKIPPING
    assert failures(layouts, dtype="float16", optimizer=optimizer) == []
    if optimizer == "adamw":
        assert (
            failures(
                "ep2 tp2 seq; dp2 zero1", "experts", dtype="float16", steps=2
            )
            == []
        )


@pytest.mark.parametrize(
    "layout", ["dp2", "dp2 zero1", "dp2 zero3", "pp2 1f1b:3", "tp2"]
)
def test_the_overflow_is_of_one_rank_and_all_ranks_skip_the_step(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before gradients are summed, only some ranks have numbers that are not finite."""
    right, bad = Executor._reduce, set[int]()

    def reduce(self: Executor, op: Op) -> Any:
        for unit in self.local.of_piece(op.piece, trained=True):
            tensors = (
                [unit.full]
                if unit.full is not None
                else unit.gradients(unit.counted_runs)
            )
            if not all(bool(x.isfinite().all()) for x in tensors):
                bad.add(self.rank)
        return right(self, op)

    setting = setting_of(SHAPES["gqa"], "float16", steps=2)
    with swapped(Executor, "_reduce", reduce):
        got = trained(Layout.parse(layout), SHAPES["gqa"], setting)
    # Between stages the gradient travels on: the one target's goes through both. With tp its logit is
    # one rank's, and what goes into the head is summed over both.
    assert bad == ({0} if layout.startswith("dp") else {0, 1})
    first, skipped = got.steps
    assert not math.isfinite(skipped.norm)
    assert all(
        torch.equal(first.weights[n], skipped.weights[n])
        for n in first.weights
    )
    assert skipped.mismatches == ()


# ---- options


@pytest.mark.parametrize("name", ["gqa", "gpt", "experts"])
def test_z_loss_agrees_with_torchs_formula_over_ranks(name: str) -> None:
    layouts = "tp2; tp4 seq zero1; pp2 1f1b:3; dp2 zero3; cp2"
    assert failures(layouts, name, z_loss=0.1, steps=2) == []


def test_z_loss_is_in_the_loss_that_is_compared() -> None:
    plain, more = (truth("gqa", z_loss=z).trace.steps[0] for z in (0.0, 0.1))
    # log(Z) of 37 words that are nearly alike is log(37), and its square times 0.1 is 1.3.
    assert more.loss - plain.loss == pytest.approx(
        0.1 * math.log(37) ** 2, rel=0.02
    )


def test_a_mistake_in_our_own_loss_is_caught_though_both_sides_train_the_same_model() -> (
    None
):
    """One process has torch's cross-entropy and not ours, which would be compared with itself."""
    right = loss._token_sums

    def too_large(*args: Any) -> loss._TokenSums:
        sums = right(*args)
        return sums._replace(losses=sums.losses * (1 + 1e-6))

    assert failures("dp2", steps=1) == []
    with swapped(loss, "_token_sums", too_large):
        assert "step 0: the loss is" in failures("dp2", steps=1)[0]

    def tripled(ctx: Any, gradient: torch.Tensor) -> Any:
        into, *rest = backward(ctx, gradient)
        return (3 * into, *rest)

    backward = loss._ChunkedLoss.backward
    with swapped(loss._ChunkedLoss, "backward", staticmethod(tripled)):
        assert "3 times as much" in failures("dp2", steps=1)[0]


@pytest.mark.parametrize(
    "layout", ["dp2 zero1; tp2", "pp2 zb-h1:3; dp2 zero3"]
)
def test_muon_with_torchs_original_scale_agrees_over_ranks(
    layout: str,
) -> None:
    assert failures(layout, optimizer="muon:original", steps=2) == []


def test_both_scales_of_muon_are_compared() -> None:
    plain, original = (
        truth("gqa", optimizer=name).trace
        for name in ("muon", "muon:original")
    )
    name = "layers.0.attn.wq.weight"
    moved = [
        float((t.steps[0].weights[name] - t.start[name]).norm())
        for t in (plain, original)
    ]
    # A square of 16: 0.2 sqrt(16) and sqrt(max(1, 16 / 16)), of matrices with singular values near 1.
    assert moved[0] / moved[1] == pytest.approx(0.8, rel=0.1)


def test_the_command_takes_z_loss_and_the_other_scale_of_muon(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "verify",
        "--z-loss",
        "0.1",
        "--optimizer",
        "muon:original",
        "--layouts",
        "dp2; tp2",
    ]
    assert main([*words, "--steps", "1"]) == 0
    assert "2 of 2 layouts of gqa agree" in capsys.readouterr().out
    assert main(["verify", "--z-loss", "-1", "--layouts", "dp2"]) == 2
    assert (
        "--z-loss is -1; write a number from 0 to 1."
        in capsys.readouterr().err
    )
    assert (
        main(
            ["verify", "--model", "mlp", "--z-loss", "0.1", "--layouts", "dp2"]
        )
        == 2
    )
    assert "has no phalanx.models.loss.CrossEntropy" in capsys.readouterr().err


# ---- what cannot be compared is no agreement


def refused(error: Exception) -> Callable[..., Any]:
    def program(layout: Layout, *more: Any) -> Any:
        if layout.zero == 1:
            raise error
        return program_in(layout, *more)

    return program


MODULE = sys.modules["phalanx.verification.verify"]


@pytest.mark.parametrize("layout", ["dp2 zero1", "dp2 zero1 recompute:fit"])
def test_a_program_that_check_refuses_fails_with_the_reason(
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ProgramError("rank 0: 1F0 needs 1G, which is missing.")
    monkeypatch.setattr(MODULE, "program_in", refused(error))
    assert (
        main(["verify", "--layouts", f"tp2; {layout}; dp2", "--steps", "1"])
        == 1
    )
    shown = capsys.readouterr().out
    assert f"FAIL      inf  {layout} fp64" in shown
    assert "ProgramError: rank 0: 1F0 needs 1G, which is missing." in shown
    assert "2 of 3 layouts of gqa agree" in shown
    assert "cannot fit" not in shown
    assert main(["verify", "--layouts", layout, "--steps", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["failed"], found["cannot_fit"]) == (0, 1, 0)


def test_only_a_limit_that_no_recomputation_meets_is_counted_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "FIT", 1e-6)
    [verdict] = verdicts("dp2 recompute:fit", steps=1)
    assert (verdict.cannot_fit, verdict.passed) == (True, False)
    assert verdict.first_difference.startswith("DoesNotFit: rank 0 holds ")
    # As the program's own error it is a ProgramError, which `train` reports as before.
    with pytest.raises(DoesNotFit, match="the limit is"):
        program_in(
            Layout.parse("recompute:fit"),
            partial(build_model, SHAPES["gqa"]),
            setting_of(SHAPES["gqa"]),
        )
    assert issubclass(DoesNotFit, ProgramError)


def test_an_unchecked_rank_that_holds_what_the_program_drops_is_named() -> (
    None
):
    """Ranks compare what they hold with the program after every operation."""
    with swapped(Unit, "drop", lambda self: None):
        [message] = failures("dp2 zero3", steps=1)
    assert "holds gathered units" in message


def test_memory_that_nobody_has_written_is_nan_on_ranks_and_nowhere_else() -> (
    None
):
    seen: list[bool] = []
    right = local._real

    def real(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        seen.append(bool(torch.empty(5).isnan().all()))
        seen.append(bool(torch.empty(5).double().new_empty(3).isnan().all()))
        made = right(x, device)
        seen.append(bool(made.isnan().all()) or not made.is_floating_point())
        return made

    with swapped(local, "_real", real):
        assert failures("pp2 1f1b:3", steps=1) == []
    assert len(seen) > 3
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_setting_of_deterministic_algorithms_is_as_it_was_after_ranks_that_fail() -> (
    None
):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with swapped(Executor, "_update", lambda self, op: 1 / 0):
            [verdict] = verdicts("dp2", steps=1)
        assert "ZeroDivisionError" in verdict.first_difference
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    with swapped(Executor, "_update", lambda self, op: 1 / 0):
        verdicts("dp2", steps=1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_loss_scale_that_would_spoil_the_first_step_is_lowered() -> None:
    """Of `olmo` torch's default overflows in an ordinary step; of `gqa` it does not."""
    assert setting_of(SHAPES["gqa"], "float16").scaling == (2.0**16, 1)
    first, patience = setting_of(SHAPES["olmo"], "float16").scaling
    assert first < 2.0**16
    assert patience == 1
    assert (
        replace(setting_of(SHAPES["olmo"]), scaling=(1.0, 1)).precision.compute
        == torch.float64
    )


# ---- what no step reached


def test_a_float16_comparison_without_an_overflow_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One step is not enough: the loss scale is chosen so that the first one does not overflow."""
    words = ["verify", "--dtype", "float16", "--layouts", "dp2"]
    for steps, missing in (("1", True), ("3", False)):
        assert main([*words, "--steps", steps]) == 0
        text = capsys.readouterr().out
        assert ("Not covered: a step of float16 that overflows" in text) is (
            missing
        )
    (exact,) = verdicts("dp2", steps=1)
    assert (exact.covered, exact.not_covered) == ("", "")
