"""A run against a loop in plain torch on the same batches: torch.optim's updates, torch's clipping, and
losses over all tokens. Every key of the optimizer is moved off its default once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_worlds import records, small, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from phalanx.layout.optimizers import OptimizerChoice
from phalanx.layout.run import Run
from phalanx.models import Decoder
from phalanx.parallel import build_model, start
from phalanx.training import loop, rank
from phalanx.training.checkpoint_format import read_manifest
from phalanx.training.data.batches import Batches
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.rank import Rank, batches_of
from phalanx.training.soap import Soap
from phalanx.verification.soap import PlainSoap

PLAIN = (
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.lr=0.02",
    "steps=4",
)
SGD, MUON = "optimizer.name=sgd", "optimizer.name=muon"
SOAP = "optimizer.name=soap"
# Each key with a value that changes the losses, and what else it needs. A key that is added to the run
# file and not here fails `test_every_key_of_the_optimizer_is_in_the_table`.
KEYS: dict[str, tuple[str, ...]] = {
    "name": (SGD,),
    "lr": ("optimizer.lr=0.05",),
    "betas": ("optimizer.betas=[0.5, 0.6]",),
    "eps": ("optimizer.eps=1e-2",),
    "momentum": (SGD, "optimizer.momentum=0.7"),
    "weight_decay": ("optimizer.weight_decay=2.0",),
    "clip": (SGD, "optimizer.clip=0.05"),
    "nesterov": (MUON, "optimizer.nesterov=false"),
    "adjust_lr": (MUON, "optimizer.adjust_lr=original"),
    "matrix_lr": (MUON, "optimizer.matrix_lr=0.1"),
    "refresh_every": (SOAP, "optimizer.refresh_every=1"),
}
MOMENTUM = (MUON, "optimizer.momentum=0.7", "optimizer.weight_decay=2.0")
# How the rate moves is held against its formulas in test_loop.py.
RATES = {"schedule", "warmup_steps", "decay_steps", "min_lr"}


def test_every_key_of_the_optimizer_is_in_the_table() -> None:
    assert KEYS.keys() | RATES == {f.name for f in fields(OptimizerChoice)}


class Unrounded(TorchFunctionMode):
    """While it is on, torch's Muon does not round to bfloat16 what it makes orthogonal."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (
            args[0].clone()
            if func is Tensor.bfloat16
            else func(*args, **(kwargs or {}))
        )


class _ZLoss(nn.Module):
    def __init__(self, z: float) -> None:
        super().__init__()
        self.z = z

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return (
            losses
            + self.z * logits.logsumexp(-1)[targets != -100].square().sum()
        )


def _decoder(run: Run) -> Decoder:
    shape = run.shape
    decoder = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        ffn=shape.ffn, eps=shape.eps,
    ).double()  # fmt: skip
    if run.z_loss:
        decoder.head.loss = _ZLoss(run.z_loss)  # type: ignore[assignment]
    ours = build_model(shape)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(start(ours, name, run.seed, torch.float64))
    return decoder


def _loss(decoder: Decoder, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the losses, and the count of the targets."""
    shared = {
        k: v for k, v in batch.items() if k in ("positions", "documents")
    }
    loss = decoder(batch["tokens"], batch["targets"], **shared)
    return loss, int((batch["targets"] != -100).sum())


def _by_hand(
    run: Run, skipped: Collection[int] = ()
) -> tuple[list[float], float]:
    """The losses of all steps, of which some update nothing, and the validation loss after them."""
    decoder, batches, o = (
        _decoder(run),
        batches_of(run, run.shape),
        run.optimizer,
    )
    weights = dict(decoder.named_parameters())
    still = [
        w for n, w in weights.items() if n.endswith(("norm.weight", "bias"))
    ]
    moving = [
        w
        for n, w in weights.items()
        if not n.endswith(("norm.weight", "bias"))
    ]
    matrices = [
        w
        for n, w in weights.items()
        if n.startswith("layers.") and w.dim() == 2
    ]
    if o.name == "muon":
        moving = [w for w in moving if not any(w is each for each in matrices)]
    groups = [
        {"params": moving, "weight_decay": o.weight_decay},
        {"params": still, "weight_decay": 0.0},
    ]
    optimizer: Any
    if o.name == "soap":
        others = AdamW(*o.betas, o.eps, o.weight_decay)
        optimizer = PlainSoap(
            Soap(o.refresh_every, others),
            weights,
            o.lr,
            build_model(run.shape),
        )
    elif o.name == "sgd":
        optimizer = torch.optim.SGD(
            groups, lr=o.lr, momentum=o.momentum or 0.0
        )
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=o.lr, betas=o.betas, eps=o.eps
        )
    muon = torch.optim.Muon(
        matrices if o.name == "muon" else [nn.Parameter(torch.empty(0, 0))],
        lr=o.matrix_lr or o.lr, weight_decay=o.weight_decay, nesterov=o.nesterov,
        momentum=0.95 if o.momentum is None else o.momentum, adjust_lr_fn=o.adjust_lr,
    )  # fmt: skip
    losses = []
    for step in range(run.steps):
        total, count = _loss(decoder, batches.batch(step))
        loss = total / count
        for weight in weights.values():
            weight.grad = None
        loss.backward()
        if o.clip:
            torch.nn.utils.clip_grad_norm_(list(weights.values()), o.clip)
        if step not in skipped:
            optimizer.step()
            with Unrounded():
                muon.step()
        losses.append(loss.item())
    with torch.no_grad():
        parts = [
            _loss(decoder, batches.validation(n, slice(0, batches.size)))
            for n in range(min(run.validation.batches, batches.validations))
        ]
    return losses, float(sum(p[0] for p in parts)) / sum(p[1] for p in parts)


class _Spoiled(Rank):
    """Makes the loss of the last rank NaN in some steps, so that all ranks skip these."""

    steps: Collection[int] = ()

    def batch(self, step: int) -> list[dict[str, Tensor]]:
        last = self.world.rank == self.world.size - 1
        self.part.trainer.__dict__["spoiled"] = last and step in self.steps
        return super().batch(step)


def _spoil(steps: Collection[int], patched: pytest.MonkeyPatch) -> None:
    right = Executor._add_loss

    def add_loss(self: Executor, y: Tensor) -> None:
        right(self, y * math.nan if self.__dict__.get("spoiled") else y)

    patched.setattr(_Spoiled, "steps", steps)
    patched.setattr(loop, "Rank", _Spoiled)
    patched.setattr(Executor, "_add_loss", add_loss)


@pytest.mark.parametrize(
    "optimizer",
    [("optimizer.name=adamw",), (SGD, "optimizer.momentum=0.7"), (*MOMENTUM,)],
    ids=["adamw", "sgd", "muon"],
)
@pytest.mark.parametrize(
    ("skipped", "stop", "layout"),
    [
        ((1,), 6, "dp2 zero1 accum:2"),
        ((0,), 6, "pp2 1f1b:2"),  # before the optimizer has any state
        ((1,), 2, "dp2"), ((1,), 3, "pp2 1f1b:2"), ((0, 1), 2, "dp2 zero3"), ((1, 4), 3, ""),
    ],
)  # fmt: skip
def test_a_skipped_step_updates_nothing_and_counts_as_no_update_also_after_a_stop(
    optimizer: tuple[str, ...],
    skipped: tuple[int, ...],
    stop: int,
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's optimizer, whose step is not called then. Adam's first updates hang on their number."""
    keys = (
        *PLAIN,
        *optimizer,
        "optimizer.clip=0",
        "steps=6",
        "checkpoint.every=1",
        "checkpoint.keep=9",
    )
    out = tmp_path / "run"
    _spoil(skipped, monkeypatch)
    if stop < 6:
        trained(small(out, *keys, f"steps={stop}"), f"{layout} fp64")
    run = small(out, *keys)
    trained(run, f"{layout} fp64")
    assert [r["step"] for r in records(out, "skip")] == [
        step + 1 for step in skipped
    ]
    wanted, validation = _by_hand(run, skipped)
    losses = {r["step"]: r["loss"] for r in records(out, "step")}
    assert [losses[step + 1] for step in skipped] == ["nan"] * len(skipped)
    trained_on = [step for step in range(6) if step not in skipped]
    found = [losses[step + 1] for step in trained_on]
    assert found == pytest.approx(
        [wanted[step] for step in trained_on], rel=1e-9
    )
    assert records(out, "validation")[-1]["loss"] == pytest.approx(
        validation, rel=1e-9
    )
    # What a checkpoint keeps is the number of updates, not that of steps.
    for done in range(1, 7):
        updates = read_manifest(
            out / "checkpoints" / f"step-{done:08}"
        ).updates
        made = sum(step < done for step in trained_on)
        assert updates == (None if "sgd" in optimizer[0] else made)


def test_muons_momentum_and_decay_are_torchs(tmp_path: Path) -> None:
    run = small(tmp_path / "run", *PLAIN, *MOMENTUM)
    trained(run, "dp2 zero1 fp64")
    wanted, _ = _by_hand(run)
    assert [
        r["loss"] for r in records(tmp_path / "run", "step")
    ] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("layout", ["fp64", "dp2 zero2 fp64"])
def test_every_key_of_the_optimizer_does_what_torch_does(
    key: str, layout: str, tmp_path: Path
) -> None:
    run = small(tmp_path / "run", *PLAIN, *KEYS[key])
    trained(run, layout)
    wanted, validation = _by_hand(run)
    assert [
        r["loss"] for r in records(tmp_path / "run", "step")
    ] == pytest.approx(wanted, rel=1e-9)
    assert records(tmp_path / "run", "validation")[-1][
        "loss"
    ] == pytest.approx(validation, rel=1e-9)
    # The key matters: without it, and with what else it needs, the losses are others.
    without = _by_hand(small(tmp_path / "run", *PLAIN, *KEYS[key][:-1]))[0]
    assert max(abs(a - b) for a, b in zip(wanted, without, strict=True)) > 1e-6


@pytest.mark.parametrize("layout", ["fp64", "tp2 fp64"])
def test_z_loss_is_what_torch_adds(layout: str, tmp_path: Path) -> None:
    run = small(tmp_path / "run", *PLAIN, "z_loss=0.1")
    trained(run, layout)
    wanted, _ = _by_hand(run)
    assert [
        r["loss"] for r in records(tmp_path / "run", "step")
    ] == pytest.approx(wanted, rel=1e-9)
    assert wanted[0] > _by_hand(small(tmp_path / "run", *PLAIN))[0][0] + 1.0


class _Uneven(Batches):
    """Batches of the held-out part whose targets are fewer and fewer."""

    def validation(self, index: int, rows: slice) -> Any:
        found = super().validation(index, rows)
        found["targets"][:, : 8 * index] = -100
        return found


@pytest.mark.parametrize(
    "layout", ["fp64", "dp2 fp64", "pp2 1f1b:3 fp64", "tp2 fp64", "cp2 fp64"]
)
def test_the_validation_loss_is_a_mean_over_all_tokens_and_not_of_means(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "Batches", _Uneven)
    run = small(
        tmp_path / "run",
        *PLAIN,
        "steps=1",
        "validation.batches=3",
        "sequence=24",
    )
    trained(run, layout)
    _, wanted = _by_hand(run)
    (found,) = records(tmp_path / "run", "validation")
    assert found["loss"] == pytest.approx(wanted, rel=1e-10)
    decoder, batches = _decoder(run), batches_of(run, run.shape)
    counts = [
        _loss(decoder, batches.validation(n, slice(0, 6)))[1] for n in range(3)
    ]
    assert counts[0] > 1.3 * counts[1] > 1.3 * counts[2]
