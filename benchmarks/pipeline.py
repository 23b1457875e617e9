"""Pipelines: ours beside `torch.distributed.pipelining`, and measured bubbles beside the formula.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --rounds 10
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --sleep

The first runs 2 ranks with stages made equal (a tiny vocabulary, so embedding and head piece_costs nothing).
The second puts a fixed sleep in place of every layer's work, as 4 ranks of real work share 2 cores
and cannot show a bubble.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Rules, Shape
from phalanx.models import Decoder
from phalanx.parallel import Model, build_model, count_valid, microbatches
from phalanx.parallel.local import build_local, model_stages
from phalanx.program import Costs, Timeline, build, simulate
from phalanx.train import AdamW, Executor
from phalanx.verify import batch_of
from side_by_side import Row, Step, in_turn, machine, table

SHAPE = Shape("pipe", layers=8, hidden=384, heads=6, ffn=1024, vocab=64, sequence=128, batch=8)
M = 8
PAIRS: dict[str, tuple[str, str, int]] = {
    "GPipe": (f"pp2 gpipe:{M}", "ScheduleGPipe", 1),
    "1F1B": (f"pp2 1f1b:{M}", "Schedule1F1B", 1),
    "interleaved": (f"pp2 interleaved2:{M}", "ScheduleInterleaved1F1B", 2),
    # torch has no plain ZB-H1; its zero-bubble schedule interleaves two chunks.
    "zero bubble": (f"pp2 zb-h1:{M}", "ScheduleInterleavedZeroBubble", 2),
}


class TorchStage(nn.Module):
    """A run of blocks with embedding or head where they belong."""

    def __init__(self, model: Decoder, index: int, stages: int) -> None:
        super().__init__()
        each = len(model.layers) // stages
        self.embed = model.embed if index == 0 else None
        self.blocks = model.layers[index * each : (index + 1) * each]
        self.head = model.head if index == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        if self.embed is not None:
            x = self.embed(x, positions)
        for block in self.blocks:
            x = block(x, positions=positions)
        return x if self.head is None else self.head.logits(x)


def torch_step(rank: int, schedule: str, chunks: int) -> Step:
    torch.manual_seed(0)
    model = Decoder(
        vocab=SHAPE.vocab,
        hidden=SHAPE.hidden,
        layers=SHAPE.layers,
        heads=SHAPE.heads,
        ffn=SHAPE.ffn,
    )
    stages = 2 * chunks
    held = [rank + 2 * c for c in range(chunks)]
    modules = [TorchStage(model, index, stages) for index in held]
    parts = [
        PipelineStage(m, i, stages, torch.device("cpu")) for m, i in zip(modules, held, strict=True)
    ]
    batch = batch_of(SHAPE, 0, dtype=torch.float32)
    count = count_valid(batch)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        return total / count

    make = getattr(torch_schedules, schedule)
    order = make(parts if chunks > 1 else parts[0], M, loss_fn=loss, scale_grads=False)
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            order.step(batch["tokens"])
        else:
            order.step(target=batch["targets"], losses=[])
        optimizer.step()

    return step


def our_performer(world: World, name: str, text: str) -> tuple[Executor, list[Any]]:
    layout = Layout.parse(text)
    model = build_model(SHAPE)
    program = build(layout, model_stages(model, layout), model.tied)
    held = build_local(world, layout, model, program, prefix=f"{name}/")
    performer = Executor(held, program, world.rank, AdamW())
    return performer, microbatches(batch_of(SHAPE, 0, dtype=torch.float32), layout, 0)


def run(world: World, rounds: int) -> tuple[list[Row], dict[str, list[Timeline]]]:
    steps: dict[str, Step] = {}
    seen: dict[str, list[Timeline]] = {}
    for name, (text, schedule, chunks) in PAIRS.items():
        performer, own = our_performer(world, name, text)

        def ours(p: Executor = performer, own: list[Any] = own, name: str = name) -> None:
            seen.setdefault(name, []).append(p.step(own, 1e-4).timeline)

        steps[f"{name}, torch"] = torch_step(world.rank, schedule, chunks)
        steps[f"{name}, ours"] = ours
    times = in_turn(steps, rounds)
    world.clear()
    return [Row(name, tuple(times[name])) for name in steps], seen


def compare(rounds: int) -> None:
    told = launch(run, 2, rounds, backend="gloo", threads_per_rank=1)
    print(f"\n{table(f'2 ranks over gloo, fp32, {M} microbatches', told[0][0], '1F1B, torch')}\n")
    print("| schedule | bubble measured (median) | bubble of the formula |\n|---|---|---|")
    for name, (text, _, _) in PAIRS.items():
        bubbles = sorted(
            Timeline(tuple(s for t in step for s in t.spans)).bubble_fraction
            for step in zip(*(rank[1][name][-rounds:] for rank in told), strict=True)
        )
        print(f"| {name} | {bubbles[len(bubbles) // 2]:.1%} | {formula(text, SHAPE):.1%} |")


def formula(text: str, shape: Shape) -> float:
    """The bubble when all layers cost the same, F=1, B=2: the program simulated."""
    layout = Layout.parse(text)
    model = build_model(shape)
    program = build(layout, model_stages(model, layout), model.tied)
    layers = range(1, 1 + shape.layers)
    costs = Costs(
        {}, {(k, p): c for p in layers for k, c in (("F", 1), ("B", 2), ("I", 1), ("W", 1))}
    )
    return simulate(program, costs).bubble_fraction


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
    """A layer whose forward takes a fixed time and whose backward takes twice that."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.empty(1, 1, device="meta")), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight.sum(), self.seconds)


def sleeping(world: World, text: str, layers: int) -> list[Timeline]:
    shape = Shape("sleep", kind="mlp", layers=layers, hidden=4, batch=8)
    plain = build_model(shape)
    first, *_, last = plain.pieces
    middle = [(f"layers.{i}", Sleeper(0.02 * 4 / layers)) for i in range(layers)]
    model = Model((first, *middle, last), Rules.parse("layers.*.weight : embed embed"), shape=shape)
    layout = Layout.parse(text)
    program = build(layout, model_stages(model, layout), model.tied)
    held = build_local(world, layout, model, program)
    performer = Executor(held, program, world.rank, AdamW())
    own = microbatches({"inputs": torch.randn(8, 4)}, layout, 0)
    seen = []
    for _ in range(5):
        dist.barrier()
        seen.append(performer.step(own, 1e-4).timeline)
    world.clear()
    return seen


def sleep() -> None:
    print("\n4 ranks, stages of a fixed sleep (F 20 ms, B 40 ms), 8 microbatches\n")
    print("| schedule | bubble measured (median of 5) | formula |\n|---|---|---|")
    for text, layers in (("gpipe:8", 4), ("1f1b:8", 4), ("interleaved2:8", 8)):
        told = launch(sleeping, 4, f"pp4 {text}", layers, backend="gloo", threads_per_rank=1)
        bubbles = sorted(
            Timeline(tuple(s for t in step for s in t.spans)).bubble_fraction
            for step in zip(*told, strict=True)
        )
        chunks = 2 if "interleaved" in text else 1
        print(f"| {text} | {bubbles[2]:.1%} | {3 / (8 * chunks + 3):.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--sleep", action="store_true", help="measured bubbles of 4 ranks that sleep"
    )
    said = parser.parse_args()
    print(machine())
    act: Callable[[], None] = sleep if said.sleep else lambda: compare(said.rounds)
    act()


if __name__ == "__main__":
    main()
