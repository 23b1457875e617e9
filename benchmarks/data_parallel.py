"""Data parallel in all its forms, side by side with torch's own, over the same transport.

    OMP_NUM_THREADS=1 python benchmarks/data_parallel.py --sizes 17m 50m --rounds 10

Every rank does the work of one process alone: a ratio of 1 would be free communication. Peak memory
counts live storages over two whole steps, weights, gradients and optimizer among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.layout import Layout, Shape
from phalanx.model import Decoder
from phalanx.program import build
from phalanx.split import build_model, count_valid, microbatches
from phalanx.split.holding import hold, model_stages
from phalanx.train import AdamW, Performer
from phalanx.train.precision import precision_of
from phalanx.verify import batch_of
from phalanx.wire import World
from phalanx.wire.launch import launch
from side_by_side import Peak, Row, Step, alone, in_turn, machine, table

SIZES = {
    "17m": Shape("17m", layers=6, hidden=448, heads=7, ffn=1216, vocab=2048, sequence=256, batch=4),
    "50m": Shape(
        "50m", layers=10, hidden=608, heads=8, ffn=1664, vocab=4096, sequence=256, batch=4
    ),
}
OURS = {
    "ours, DDP": "dp2",
    "ours, ZeRO-1": "dp2 zero1",
    "ours, ZeRO-2": "dp2 zero2",
    "ours, ZeRO-3": "dp2 zero3",
}


def plain(shape: Shape) -> Decoder:
    torch.manual_seed(0)
    return Decoder(
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        ffn=shape.ffn,
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )


def torch_step(shape: Shape, rank: int, wrap: Callable[[Decoder], nn.Module], dtype: str) -> Step:
    """A step of torch's own: zero_grad, forward, backward, fused AdamW."""
    model = wrap(plain(shape))
    optimizer = adamw(model)
    batch = batch_of(shape, 0, dtype=torch.float32)
    own = microbatches(batch, Layout.parse("dp2"), rank)[0]
    count = count_valid(own)
    casting = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16" and wrap is not sharded)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with casting:
            loss = model(own["tokens"], own["targets"], positions=own["positions"]) / count
        loss.backward()
        optimizer.step()

    return step


def sharded(model: Decoder) -> nn.Module:
    """FSDP2 as its documentation says: each block, then the whole."""
    policy = MixedPrecisionPolicy()
    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def our_step(world: World, shape: Shape, name: str, text: str, dtype: str) -> Step:
    layout = Layout.parse(f"{text} {dtype}")
    model = build_model(shape)
    program = build(layout, model_stages(model, layout), model.tied)
    held = hold(world, layout, model, program, precision=precision_of(dtype), prefix=f"{name}/")
    performer = Performer(held, program, world.rank, AdamW(), width=shape.hidden)
    own = microbatches(batch_of(shape, 0, dtype=torch.float32), layout, held.place["dp"])
    return lambda: performer.step(own, 1e-4)


def run(world: World, size: str, dtype: str, rounds: int) -> list[Row]:
    shape = SIZES[size]
    makers: dict[str, Callable[[], Step]] = {
        "one process": lambda: alone(torch_step(shape, world.rank, lambda m: m, dtype)),
        "torch DDP": lambda: torch_step(
            shape,
            world.rank,
            lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True),
            dtype,
        ),
        "torch FSDP2": lambda: torch_step(shape, world.rank, sharded, dtype),
    }
    for name, text in OURS.items():
        makers[name] = lambda name=name, text=text: our_step(world, shape, name, text, dtype)
    steps, peaks = {}, {}
    for name, make in makers.items():
        with Peak() as peak:
            steps[name] = make()
            steps[name]()
            steps[name]()
        peaks[name] = peak.most
    times = in_turn(steps, rounds)
    world.clear()
    return [Row(name, tuple(times[name]), peaks[name]) for name in steps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=10)
    said = parser.parse_args()
    print(machine())
    for size in said.sizes:
        rows = launch(run, 2, size, said.dtype, said.rounds, wire="gloo", threads_per_rank=1)[0]
        print(
            f"\n{table(f'{size}, {said.dtype}, 2 ranks over gloo', rows, 'one process')}",
            flush=True,
        )


if __name__ == "__main__":
    main()
