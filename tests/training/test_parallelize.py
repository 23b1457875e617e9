"""A rank's part of a model makes steps with no run file, data set, log or folder: against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.comm import World, launch
from phalanx.layout import Layout, Shape
from phalanx.models import Decoder
from phalanx.parallel import Precision, build_model, start
from phalanx.training.optimizer import AdamW
from phalanx.training.parallelize import parallelize
from phalanx.training.program import program_of

SHAPE = Shape(
    "small", layers=3, hidden=16, heads=2, ffn=24, vocab=37, sequence=8, batch=4
)  # fmt: skip
WIDE = torch.float64
STEPS, LR, CLIP, SEED = 3, 0.05, 0.4, 3


def _batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(
        SHAPE.vocab, (SHAPE.batch, SHAPE.sequence + 1), generator=generator
    )
    return {
        "tokens": ids[:, :-1].contiguous(),
        "targets": ids[:, 1:].contiguous(),
        "positions": torch.arange(SHAPE.sequence)
        .expand(SHAPE.batch, -1)
        .contiguous(),
    }


def _losses(world: World, text: str) -> list[float]:
    """The mean losses of some steps that a caller makes by itself."""
    layout = Layout.parse(text)
    model = build_model(SHAPE)
    part = parallelize(
        world,
        layout,
        model,
        program_of(model, layout),
        AdamW(decay=0.0),
        precision=Precision(WIDE, WIDE, WIDE),
        clip=CLIP,
        seed=SEED,
    )
    rows = part.rows_of(SHAPE.batch)
    losses = []
    for step in range(STEPS):
        own = {name: x[rows] for name, x in _batch(step).items()}
        losses.append(part.trainer.step(part.microbatches(own), LR).total)
    last = {name: x[rows] for name, x in _batch(STEPS).items()}
    validation = part.validator.mean_loss([part.microbatches(last)])
    assert validation is not None
    return [*losses, validation]


def _plain() -> list[float]:
    """The same by torch.optim on one process."""
    sizes = {
        name: getattr(SHAPE, name)
        for name in ("vocab", "hidden", "layers", "heads", "ffn")
    }
    decoder = Decoder(**sizes, eps=SHAPE.eps).double()
    ours = build_model(SHAPE)
    weights = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(start(ours, name, SEED, WIDE))
    optimizer = torch.optim.AdamW(
        weights.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for step in range(STEPS + 1):
        batch = _batch(step)
        total = decoder(
            batch["tokens"], batch["targets"], positions=batch["positions"]
        )
        loss = total / batch["targets"].numel()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "dp2 zero3 accum:2",
        "tp2 seq zero1",
        "pp2 1f1b:2",
        "cp2 recompute:all",
    ],
)
def test_steps_need_no_run_and_no_folder(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"{layout} fp64"
    ranks = Layout.parse(text).ranks
    wanted = pytest.approx(_plain(), rel=1e-9)
    for losses in launch(
        _losses, ranks, text, backend="threads", timeout=30.0
    ):
        assert losses == wanted
    assert not list(tmp_path.iterdir())
