"""The loss scale against torch's own scaler, over a stop too, and the validation loss against a
plain loop over the whole held-out part."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
from loop_worlds import records, small, trained
from torch import Tensor, nn

from phalanx.api.load import load
from phalanx.comm import World, launch
from phalanx.layout import Layout
from phalanx.layout.run import Run
from phalanx.models import Decoder
from phalanx.parallel import Precision, build_model
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.data.batches import Batches
from phalanx.training.precision import LossScale, precision_of
from phalanx.training.program import shape_of
from phalanx.training.rank import Rank, batches_of
from phalanx.training.validation import validation_loss
from phalanx.verification.reference import draw

# ---- loss scale


def torch_scales(
    finite: list[bool], first: float, interval: int
) -> list[float]:
    """What torch's scaler has before each of these steps, and after the last."""
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=first, growth_interval=interval
    )
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for good in finite:
        scales.append(float(scaler.get_scale()))
        scaler.scale(weight.sum() * (1.0 if good else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*scales, float(scaler.get_scale())]


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_the_loss_scale_is_that_of_torchs_scaler(
    interval: int, seed: int
) -> None:
    chance, ours = random.Random(seed), LossScale(2.0**12, interval)
    finite, scales = [], []
    for _ in range(40):
        # Neither end of the range is reached: torch's scaler has none.
        good = chance.random() > 0.7 / (interval + 1)
        good = (good or ours.scale <= 4.0) and ours.scale < 2.0**22
        finite.append(good)
        scales.append(ours.scale)
        ours.saw(finite=good)
    assert len(set(finite)) == 2
    assert [*scales, ours.scale] == torch_scales(finite, 2.0**12, interval)


def test_the_loss_scale_begins_and_grows_as_torchs_does_by_default() -> None:
    torchs, ours = torch.amp.GradScaler("cpu"), LossScale()
    assert (ours.scale, ours.patience) == (
        torchs.get_scale(),
        torchs.get_growth_interval(),
    )


def test_the_loss_scale_stays_between_1_and_2_to_the_24() -> None:
    scale = LossScale(2.0, 1)
    for _ in range(3):
        scale.saw(finite=False)
    assert scale.scale == 1.0
    for _ in range(30):
        scale.saw(finite=True)
    assert scale.scale == 2.0**24


def test_only_float16_has_a_loss_scale_and_weights_are_kept_in_float32() -> (
    None
):
    for word, compute in {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
    }.items():
        said = precision_of(word)
        assert (said.compute, said.master, said.reduce) == (
            compute,
            torch.float32,
            torch.float32,
        )
    for word, dtype in {"fp32": torch.float32, "fp64": torch.float64}.items():
        assert precision_of(word) == Precision(dtype, dtype, dtype)


def kept_scale(out: Path, step: int) -> object:
    return read_manifest(out / "checkpoints" / f"step-{step:08}").state[
        "loss_scale"
    ]


@pytest.mark.parametrize(
    ("layout", "stop"),
    # Before, at and after the step at which the scale doubles.
    [("fp16", 2), ("fp16", 3), ("dp2 zero1 fp16", 3), ("dp2 zero1 fp16", 4)],
)
def test_a_run_that_goes_on_has_the_loss_scale_it_stopped_with(
    layout: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default would stay 65536 for 2000 steps, restored or not.
    monkeypatch.setattr(
        "phalanx.training.parallelize.LossScale", partial(LossScale, 1024.0, 3)
    )
    expected = torch_scales([True] * 8, 1024.0, 3)
    for until in (stop, 8):
        trained(
            small(tmp_path / "run", f"steps={until}", "checkpoint.every=1"),
            layout,
        )
        assert kept_scale(tmp_path / "run", until) == [
            expected[until],
            until % 3,
        ]


@pytest.mark.parametrize("layout", ["fp16", "dp2 zero1 fp16"])
def test_a_run_that_goes_on_after_skipped_steps_counts_its_updates_and_not_its_steps(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So large that the first steps overflow and are skipped: Adam's count is then below the step.
    monkeypatch.setattr(
        "phalanx.training.parallelize.LossScale",
        partial(LossScale, 2.0**23, 1000),
    )
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    steps = 14
    constant = "optimizer.schedule=constant"  # whatever the number of steps
    trained(small(whole, f"steps={steps}", constant), layout)
    skipped = [record["step"] for record in records(whole, "skip")]
    assert skipped[:2] == [1, 2]
    assert len(skipped) <= steps - 4
    for until in (8, steps):
        trained(small(parted, f"steps={until}", constant), layout)
        manifest = read_manifest(parted / "checkpoints" / f"step-{until:08}")
        assert manifest.updates == until - sum(
            step <= until for step in skipped
        )
    found, wanted = load(parted), load(whole)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- validation


def validations(world: World, run: Run, layout: str) -> float | None:
    return validation_loss(Rank(world, run, Layout.parse(layout)))


@pytest.fixture(autouse=True)
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of a validation has targets in fewer rows than the one before, the last none."""
    whole = Batches.validation

    def validation(
        self: Batches, index: int, rows: slice | None = None
    ) -> dict[str, Tensor]:
        batch = whole(self, index)
        batch["targets"][: 2 * index] = -100
        return {name: x[rows or slice(None)] for name, x in batch.items()}

    monkeypatch.setattr(Batches, "validation", validation)


def plain_losses(run: Run, batches: int) -> list[tuple[float, int]]:
    """The sum of the losses and the number of targets of each batch, from the model alone."""
    shape = shape_of(run)
    model = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, ffn=shape.ffn, sequence=shape.sequence, eps=shape.eps,
    ).double()  # fmt: skip
    described = build_model(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(draw(described, name, run.seed))
        found = []
        for index in range(batches):
            batch = batches_of(run, shape).validation(index)
            found.append(
                (float(model(**batch)), int((batch["targets"] != -100).sum()))
            )
    return found


@pytest.mark.parametrize(
    "layout", ["", "dp2", "dp3 zero3 accum:2", "tp2 seq", "pp2 1f1b:3", "cp2"]
)
@pytest.mark.parametrize("count", [2, 4])
def test_the_validation_loss_is_the_mean_over_all_tokens_of_all_batches(
    layout: str, count: int, tmp_path: Path
) -> None:
    run = small(tmp_path / "run", f"validation.batches={count}")
    losses = plain_losses(run, count)
    mean = sum(loss for loss, _ in losses) / sum(
        tokens for _, tokens in losses
    )
    where = f"{layout} fp64"
    for found in launch(
        validations, Layout.parse(where).ranks, run, where, backend="threads"
    ):
        assert found == pytest.approx(mean, rel=1e-12)
    assert (losses[-1] == (0.0, 0)) == (count == 4)
    # Else the mean of their means would do.
    means = [loss / tokens for loss, tokens in losses if tokens]
    assert abs(sum(means) / len(means) / mean - 1) > 1e-6


def test_a_run_writes_down_the_validation_loss_of_its_weights(
    tmp_path: Path,
) -> None:
    """The rate is so small that no step changes them."""
    run = small(tmp_path / "run", "validation.every=2", "optimizer.lr=1e-30")
    losses = plain_losses(run, 2)
    mean = sum(loss for loss, _ in losses) / sum(
        tokens for _, tokens in losses
    )
    trained(run, "dp2 fp64")
    told = [
        record["loss"] for record in records(tmp_path / "run", "validation")
    ]
    assert told == pytest.approx([mean] * 3, rel=1e-12)
