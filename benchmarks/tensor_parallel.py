"""Tensor parallel beside torch's `parallelize_module` (DTensor), over gloo and over shared memory.

    OMP_NUM_THREADS=1 python benchmarks/tensor_parallel.py --rounds 10

Two ranks share the work of one process: a ratio of 0.5 would be perfect. "without messages" is ours
with every call of its groups left out (its numbers are wrong, its work is the same). On the tiny model
there is next to nothing to compute, so its time is what the host does for each layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from phalanx.comm import Group, World
from phalanx.comm.base import Call, Work
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape
from phalanx.models import Decoder
from phalanx.parallel import build_model, count_valid, microbatches
from phalanx.parallel.local import build_local, model_stages
from phalanx.program import build
from phalanx.train import AdamW, Executor
from phalanx.verify import batch_of
from side_by_side import Row, Step, alone, beside, in_turn, machine, table

SIZES = {
    "17m": Shape(
        "17m",
        layers=6,
        hidden=448,
        heads=8,
        head_dim=56,
        ffn=1216,
        vocab=2048,
        sequence=256,
        batch=4,
    ),
    "tiny": Shape("tiny", layers=6, hidden=32, heads=4, ffn=64, vocab=64, sequence=16, batch=1),
}


def plain(shape: Shape) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        head_dim=shape.head_dim, ffn=shape.ffn,
    )  # fmt: skip


def dtensor(mesh: DeviceMesh, model: Decoder) -> Decoder:
    """Blocks as torch's tutorial cuts them; embedding and head stay whole, which favours it."""
    plan = {
        "attn.wq": ColwiseParallel(), "attn.wk": ColwiseParallel(), "attn.wv": ColwiseParallel(),
        "attn.wo": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    return model


def torch_step(shape: Shape, wrap: Callable[[Decoder], Decoder]) -> Step:
    model = wrap(plain(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    batch = microbatches(batch_of(shape, 0, dtype=torch.float32), Layout(), 0)[0]
    count = count_valid(batch)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(batch["tokens"], batch["targets"], positions=batch["positions"]) / count).backward()
        optimizer.step()

    return step


class _Mute(Group):
    """A group of two that sends nothing: what comes is what was there."""

    def _begin(self, call: Call) -> Work:
        return Work()


class MuteWorld(World):
    """A rank of two that never hears of the other."""

    def _split(
        self, name: str, groups: list[tuple[int, ...]], flows: Sequence[tuple[int, int]]
    ) -> Group:
        ranks = next(group for group in groups if self.rank in group)
        return _Mute(name, ranks.index(self.rank), ranks, self.device)


def our_step(world: World, shape: Shape, name: str, text: str) -> Step:
    layout = Layout.parse(text)
    model = build_model(shape)
    program = build(layout, model_stages(model, layout), model.tied)
    held = build_local(world, layout, model, program, prefix=f"{name}/")
    performer = Executor(
        held,
        program,
        world.rank,
        AdamW(),
    )
    own = microbatches(batch_of(shape, 0, dtype=torch.float32), layout, 0)
    return lambda: performer.step(own, 1e-4)


def run(world: World, size: str, rounds: int) -> list[Row]:
    shape = SIZES[size]
    group = dist.new_group(backend="shm")
    worlds = {
        "gloo": world, "shm": beside(), "without messages": MuteWorld(world.rank, 2, world.device)
    }  # fmt: skip
    meshes = {"gloo": init_device_mesh("cpu", (2,)), "shm": DeviceMesh.from_group(group, "cpu")}
    steps = {"one process": alone(torch_step(shape, lambda m: m))}
    for name, mesh in meshes.items():
        steps[f"torch DTensor, {name}"] = torch_step(shape, partial(dtensor, mesh))
    for name, here in worlds.items():
        steps[f"ours tp2, {name}"] = our_step(here, shape, f"{name}, plain", "tp2")
        steps[f"ours tp2 seq, {name}"] = our_step(here, shape, f"{name}, seq", "tp2 seq")
    times = in_turn(steps, rounds)
    world.clear()
    return [Row(name, tuple(times[name])) for name in steps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=10)
    said = parser.parse_args()
    print(machine())
    for size in said.sizes:
        rows = launch(run, 2, size, said.rounds, backend="gloo", threads_per_rank=1)[0]
        print(f"\n{table(f'{size}, fp32, 2 ranks', rows, 'one process')}", flush=True)


if __name__ == "__main__":
    main()
