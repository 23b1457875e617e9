"""The key `dropout` of a run: every layout drops what a plain script with masks by hand drops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loop_worlds import records, trained
from torch import Tensor, nn

from phalanx.cli import main
from phalanx.layout import Layout
from phalanx.layout.run import Run, RunError
from phalanx.models import Decoder
from phalanx.parallel import build_model, start
from phalanx.parallel.model import decoder_of
from phalanx.report.sizes import sizes_of_run
from phalanx.training.program import maker_of, program_of
from phalanx.training.rank import batches_of

RATE, SEED = 0.25, 3
EMBEDDING = 2**31 - 1
WORDS = (
    "model={layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,vocab=256,positions='learned',sequence=12}",
    f"dropout={RATE}",
    f"seed={SEED}",
    "batch=6",
    "steps=3",
    "sequence=12",
    "optimizer.name=sgd",
    "optimizer.lr=0.5",
    "optimizer.schedule=constant",
    "optimizer.weight_decay=0",
    "optimizer.clip=0",
    "validation.batches=0",
    "document_masks=false",
)


def run_of(out: Path, *more: str) -> Run:
    return Run.parse("", "dropped", (*WORDS, f"out={out}", *more))


def mixed(x: int) -> int:
    """Wellons' 32-bit mixer, on plain integers."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def keyed(key: int, number: int) -> int:
    return mixed((key + 0x9E3779B1 * number) & 0xFFFFFFFF)


def mask(step: int, block: int, place: int, shape: torch.Size) -> Tensor:
    """True where a feature stays."""
    above = keyed(mixed(SEED), step) >> 1
    stays = np.empty(shape[0] * shape[1] * shape[2], bool).reshape(
        -1, shape[2]
    )
    for token in range(len(stays)):
        own = keyed(keyed(mixed(mixed(token) ^ above), block), place)
        bits = [keyed(own, feature) for feature in range(shape[2])]
        stays[token] = np.array(bits) >= round(RATE * 2**32)
    return torch.from_numpy(stays).view(shape)


class ByHand(nn.Module):
    """In the place of a Dropout: x times its mask, divided by the share that stays."""

    step = 0

    def __init__(self, block: int, place: int) -> None:
        super().__init__()
        self.block, self.place = block, place

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        stays = mask(ByHand.step, self.block, self.place, x.shape)
        return x * stays / (1 - RATE)


def by_hand(run: Run) -> list[float]:
    """The losses of a plain script."""
    plain: Decoder = decoder_of(replace(run.shape, dropout=0.0)).double()
    model = build_model(run.shape)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(start(model, name, SEED, torch.float64))
    plain.embed.dropout = ByHand(EMBEDDING, 0)
    for number, block in enumerate(plain.layers):
        block.attn.dropout = ByHand(number, 0)
        block.attn_dropout = ByHand(number, 1)
        block.mlp_dropout = ByHand(number, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    quiet = replace(run, dropout=0.0)
    batches, losses = batches_of(quiet, quiet.shape), []
    for step in range(run.steps):
        ByHand.step = step
        batch = batches.batch(step)
        # attention asks for its dropout only where there is noise
        batch["noise"] = torch.zeros_like(batch["tokens"])
        loss = plain(**batch) / (batch["targets"] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return by_hand(run_of(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(
    "layout",
    [
        "accum:2 recompute:all",
        "dp2 tp2 seq zero3",
        "cp2 tp2",
        "pp2 zb-h1:3",
        pytest.param("dp2 pp2 tp2 seq zero1 1f1b:3 recompute:selective", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_layout_drops_what_the_plain_script_drops(
    layout: str, wanted: list[float], tmp_path: Path
) -> None:
    run = run_of(tmp_path / "run")
    trained(run, f"{layout} fp64")
    logged = [each["loss"] for each in records(tmp_path / "run", "step")]
    assert logged == pytest.approx(wanted, rel=1e-10)


def test_a_run_goes_on_with_the_masks_of_its_steps(
    wanted: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    trained(run_of(out, "steps=2"), "fp64")
    trained(run_of(out), "dp2 zero2 fp64")
    logged = [each["loss"] for each in records(out, "step")]
    assert logged == pytest.approx(wanted, rel=1e-10)


def test_validation_drops_nothing(tmp_path: Path) -> None:
    """The loss of one step is that of the same weights without dropout."""
    found = {}
    for rate in ("0", str(RATE)):
        out = tmp_path / rate
        more = ("steps=1", "optimizer.lr=1e-30", "validation.batches=2")
        trained(run_of(out, f"dropout={rate}", *more), "fp64")
        (step,), (validation,) = (
            records(out, name) for name in ("step", "validation")
        )
        found[rate] = step["loss"], validation["loss"]
    (plain, held), (dropped, held_too) = found.values()
    assert plain != dropped
    assert held == held_too


def kept_bytes(run: Run) -> float:
    """What the planner says that a block keeps from forward to backward."""
    make, layout = maker_of(run), Layout.parse("")
    program = program_of(make(), layout)
    sizes = sizes_of_run(make, layout, program, 12, "cpu")
    return sizes.kept[1]


def test_the_planner_counts_the_masks_that_a_block_keeps(
    tmp_path: Path,
) -> None:
    """One byte a feature in three places, and the heads' outputs in float32: wo keeps
    the dropped ones, the attention kernel its own."""
    plain = kept_bytes(run_of(tmp_path, "dropout=0"))
    features = 6 * 12 * 16  # rows, tokens and width
    assert kept_bytes(run_of(tmp_path)) - plain == (3 + 4) * features


def test_dropout_of_a_class_of_ones_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"phalanx\.models\.Dropout"):
        Run.load("", ("model=model.py:Net", "dropout=0.1"))
    with pytest.raises(RunError, match="dropout"):
        Run.load("", ("dropout=1",))


def test_words_of_others_are_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "attn_pdrop=0.1"]) == 2
    assert "fused kernels" in capsys.readouterr().err
    assert main(["train", "hidden_dropout=0.1"]) == 2
    assert "Write dropout" in capsys.readouterr().err
