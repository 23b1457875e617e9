"""A step of `phalanx.prepare`'s loop beside one of `train` and one of a plain script.

The same module, batches and optimizer, on one process, in turns:

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/own_loop.py

Times are processor seconds, since other work on the machine does not count in them. A
ratio is of two steps that ran one after the other.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.comm import AloneWorld
from phalanx.layout import Layout, Run
from phalanx.training.program import shape_of
from phalanx.training.rank import Rank, batches_of

TESTS = Path(__file__).parents[1] / "tests" / "training"
STEPS, WARM, LR, CLIP = 120, 10, 1e-3, 1.0
SIZES = {
    "n_layer": 6,
    "n_head": 4,
    "n_embd": 128,
    "block_size": 128,
    "vocab_size": 256,
}
LAYOUT = "accum:2"


def run_of(out: str) -> Run:
    sizes = ", ".join(f"{name}={size}" for name, size in SIZES.items())
    return Run.parse(
        "",
        "own",
        (
            f"model={TESTS / 'plain_gpt.py'}:Plain({sizes})",
            f"out={out}",
            f"optimizer.lr={LR}",
            f"optimizer.clip={CLIP}",
            "optimizer.schedule=constant",
            "batch=8",
            "steps=1000",
        ),
    )


def module() -> Any:
    """The module with the weights that a run with seed 0 draws."""
    sys.path.insert(0, str(TESTS))
    import plain_gpt

    torch.manual_seed(0)
    return plain_gpt.Plain(plain_gpt.PlainConfig(**SIZES))


def adamw_of(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def plain_step(model: Any, adamw: torch.optim.AdamW) -> Callable[..., float]:
    """A step with two microbatches as PyTorch's documentation writes it."""

    def step(batch: dict[str, torch.Tensor]) -> float:
        adamw.zero_grad()
        targets = batch["targets"]
        targets = targets.masked_fill(targets == -100, -1)  # as in nanoGPT
        count = (targets != -1).sum()
        total = torch.zeros(())
        for part in (slice(0, 4), slice(4, 8)):
            _, mean = model(batch["tokens"][part], targets[part])
            loss = mean * (targets[part] != -1).sum() / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        return float(total)

    return step


def main() -> None:
    layout = Layout.parse(LAYOUT)
    with tempfile.TemporaryDirectory() as out:
        run = run_of(out)
        rank = Rank(AloneWorld("cpu"), run, layout)
        data = batches_of(run, shape_of(run))
        model = module()
        own = phalanx.prepare(
            model,
            adamw_of(model),
            layout,
            clip=CLIP,
            example=data.batch(0),
            world=AloneWorld("cpu"),
            verify=False,
        )
        other = module()
        plain = plain_step(other, adamw_of(other))

        def of_train(step: int) -> float:
            batch = rank.batch(step)
            return rank.part.trainer.step(batch, LR, timed=True).total

        kinds: dict[str, Callable[[int], float]] = {
            "train": of_train,
            "own loop": lambda step: own.step(data.batch(step)).loss,
            "plain script": lambda step: plain(data.batch(step)),
        }
        times = measured(kinds)
    report(times)


def measured(
    kinds: dict[str, Callable[[int], float]],
) -> dict[str, list[float]]:
    """The processor seconds of every step. The order within a step is drawn."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    draw = random.Random(0)
    for step in range(WARM + STEPS):
        losses = []
        for name in draw.sample([*kinds], len(kinds)):
            begun = time.process_time()
            losses.append(kinds[name](step))
            times[name].append(time.process_time() - begun)
        spread = max(losses) - min(losses)
        assert spread < 1e-3 * max(losses), f"not the same work: {losses}"
    return {name: each[WARM:] for name, each in times.items()}


def report(times: dict[str, list[float]]) -> None:
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(
            f"{name:13} {1e3 * middle:7.2f} ms"
            f"   middle half {1e3 * low:.2f} to {1e3 * high:.2f}"
        )
    own = times["own loop"]
    for other in ("train", "plain script"):
        ratios = [a / b for a, b in zip(own, times[other], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"own loop / {other}: {middle:.3f}"
            f"   middle half {low:.3f} to {high:.3f}, {len(ratios)} pairs"
        )


if __name__ == "__main__":
    main()
