"""Measured pipeline bubbles against the formula, with layers that sleep instead of
computing.

    OMP_NUM_THREADS=1 python benchmarks/bubbles.py

Four ranks that compute would compete for two cores and could not show a bubble; ranks
that sleep can.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Rules, Shape, plain_pieces
from phalanx.parallel import Model, build_model, microbatches
from phalanx.parallel.local import build_local, model_stages
from phalanx.program import StepOptions, Timeline, build
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient.clone(), None


class Sleeper(nn.Module):
    """Layer whose forward takes a fixed time and whose backward takes twice as long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = (
            nn.Parameter(torch.empty(1, 1, device="meta")),
            seconds,
        )

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight.sum(), self.seconds)


def sleeping(world: World, text: str, layers: int) -> list[Timeline]:
    shape = Shape("sleep", kind="mlp", layers=layers, hidden=4, batch=8)
    plain = build_model(shape)
    first, *_, last = plain.pieces
    middle = [
        (f"layers.{i}", Sleeper(0.02 * 4 / layers)) for i in range(layers)
    ]
    model = Model(
        (first, *middle, last),
        Rules.parse("layers.*.weight : embed embed"),
        shape=shape,
    )
    layout = Layout.parse(text)
    program = build(
        layout,
        plain_pieces(model_stages(model, layout), tied=model.tied),
        StepOptions(agree=False),
    )
    local = build_local(world, layout, model, program)
    executor = Executor(local, program, world.rank, AdamW())
    own = microbatches({"inputs": torch.randn(8, 4)}, layout, 0)
    seen = []
    for _ in range(5):
        dist.barrier()
        seen.append(executor.step(own, 1e-4).timeline)
    world.clear()
    return seen


def main() -> None:
    print(
        "4 ranks, stages of a fixed sleep (F 20 ms, B 40 ms), 8 microbatches\n"
    )
    print(
        "| schedule | bubble measured (median of 5) | formula |\n|---|---|---|"
    )
    for text, layers in (("gpipe:8", 4), ("1f1b:8", 4), ("interleaved2:8", 8)):
        ranks = launch(
            sleeping,
            4,
            f"pp4 {text}",
            layers,
            backend="gloo",
            threads_per_rank=1,
        )
        bubbles = sorted(
            Timeline(tuple(s for t in step for s in t.spans)).bubble_fraction
            for step in zip(*ranks, strict=True)
        )
        chunks = 2 if "interleaved" in text else 1
        print(f"| {text} | {bubbles[2]:.1%} | {3 / (8 * chunks + 3):.1%} |")


if __name__ == "__main__":
    main()
