"""SOAP's state is one tensor for each whole matrix, which its owner saves and any layout loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import loop_worlds
import pytest
import torch
from checkpoint_worlds import Run, resaved, run, trained
from torch import Tensor

from phalanx.comm import RankFailed
from phalanx.layout import Shape
from phalanx.training import checkpoint, parallelize
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.checkpoint_load import TensorReader
from phalanx.training.optimizer import AdamW
from phalanx.training.precision import LossScale
from phalanx.training.soap import MATRICES, Soap
from phalanx.verification import SHAPES
from seeded.fault import swapped

GQA, EXPERTS = SHAPES["gqa"], SHAPES["experts"]


def _as_numbers(folder: Path) -> dict[tuple[str, str], Tensor]:
    path = folder / "step-00000002"
    manifest = read_manifest(path)
    with TensorReader(path, manifest) as reader:
        return {
            (each.kind, each.name): reader.whole(each)
            for each in manifest.tensors
        }


@pytest.mark.parametrize(
    ("shape", "first", "second"),
    [
        (GQA, "dp2 tp2 zero3", "pp2 dp2 zero1 1f1b:2"),
        (EXPERTS, "ep2 zero1", "dp2 tp2"),
    ],
)
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, shape: Shape, first: str, second: str
) -> None:
    """Two steps, and two more elsewhere, are four on one process, and nothing is lost on the way."""
    worlds = partial(_options, shape)
    trained(tmp_path / "a", first, **worlds())
    resaved(tmp_path / "a", second, tmp_path / "b", **worlds())
    before, after = _as_numbers(tmp_path / "a"), _as_numbers(tmp_path / "b")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    kinds = {kind for kind, _ in before}
    assert {each.kind for each in MATRICES.owned} < kinds
    assert _losses_after(tmp_path / "a", second, worlds()) == pytest.approx(
        _losses_after(None, "dp1", worlds()), rel=1e-10
    )


def _options(shape: Shape) -> dict[str, Any]:
    # A second refresh falls between the save and the end.
    soap = Soap(1, AdamW(0.8, 0.9, 1e-3))
    return {"shape": shape, "optimizer": soap}


def _losses_after(
    folder: Path | None, layout: str, options: dict[str, Any]
) -> list[float]:
    """The losses of steps 2 to 4, after a resume or after two steps."""

    def work(each: Run) -> list[float]:
        if folder is None:
            each.steps(2)
        else:
            assert each.resume(folder) is not None
        return [float.fromhex(loss) for loss in each.steps(3)]

    return run(layout, work, **options)[0]  # type: ignore[no-any-return]


def test_bases_that_are_not_saved_are_missed(tmp_path: Path) -> None:
    right = checkpoint._owned_state

    def without_bases(update: Any) -> Any:
        return (each for each in right(update) if "basis" not in each[0].kind)

    with swapped(checkpoint, "_owned_state", without_bases):
        trained(tmp_path, "dp2", **_options(GQA))
    with pytest.raises(RankFailed, match=r"left_basis of .* is missing"):
        run("dp2", lambda each: each.resume(tmp_path), **_options(GQA))


def test_a_checkpoint_before_the_first_update_is_loaded(
    tmp_path: Path,
) -> None:
    """At this scale every float16 step overflows and is skipped."""
    folder = tmp_path / "run"
    words = "optimizer.name=soap", "validation.batches=0"
    with swapped(parallelize, "LossScale", lambda: LossScale(2.0**60)):
        for steps in 1, 2:
            run_file = loop_worlds.small(folder, f"steps={steps}", *words)
            loop_worlds.trained(run_file, "fp16")
    skipped = loop_worlds.records(folder, "skip")
    assert len(skipped) == 2
    state = _as_numbers(folder / "checkpoints")
    kinds = {each.kind for each in MATRICES.owned}
    assert kinds < {kind for kind, _ in state}
    assert not any(
        values.any() for (kind, _), values in state.items() if kind in kinds
    )
