"""Data parallel in all its forms, side by side with torch's own, over gloo and over shared memory.

    OMP_NUM_THREADS=1 python benchmarks/data_parallel.py --sizes 17m --rounds 10

Every rank does the work of one process alone: a ratio of 1 would be free communication. "apart" is
two processes that never talk, each with the whole step: what sharing the machine's memory costs.
Peak memory counts live storages over two whole steps, weights, gradients and optimizer among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.comm.shm.local import ShmWorld
from phalanx.layout import Layout, Shape
from phalanx.models import Decoder
from phalanx.parallel import build_model, count_valid, microbatches
from phalanx.parallel.data import storage_of
from phalanx.parallel.local import LocalModel, build_local, model_stages
from phalanx.program import build
from phalanx.train import AdamW, Executor
from phalanx.train.precision import precision_of
from phalanx.verify import batch_of
from side_by_side import Peak, Row, Step, alone, beside, in_turn, machine, table

SIZES = {
    "17m": Shape("17m", layers=6, hidden=448, heads=7, ffn=1216, vocab=2048, sequence=256, batch=4),
    "50m": Shape(
        "50m", layers=10, hidden=608, heads=8, ffn=1664, vocab=4096, sequence=256, batch=4
    ),
}
OURS = {"DDP": "dp2", "ZeRO-1": "dp2 zero1", "ZeRO-2": "dp2 zero2", "ZeRO-3": "dp2 zero3"}
BACKENDS = ("gloo", "shm")


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


Wrap = Callable[[Decoder], nn.Module]


def torch_step(shape: Shape, rank: int, wrap: Wrap, dtype: str, *, casts: bool = True) -> Step:
    """A step of torch's own: zero_grad, forward, backward, fused AdamW."""
    model = wrap(plain(shape))
    optimizer = adamw(model)
    batch = batch_of(shape, 0, dtype=torch.float32)
    own = microbatches(batch, Layout.parse("dp2"), rank)[0]
    count = count_valid(own)
    casting = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16" and casts)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with casting:
            loss = model(own["tokens"], own["targets"], positions=own["positions"]) / count
        loss.backward()
        optimizer.step()

    return step


def replicated(group: dist.ProcessGroup) -> Wrap:
    return lambda model: DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True
    )


def sharded(mesh: DeviceMesh, dtype: str) -> Wrap:
    """FSDP2 as its documentation says: each block, then the whole."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if dtype == "bf16" else None,
        reduce_dtype=torch.float32 if dtype == "bf16" else None,
    )

    def wrap(model: Decoder) -> nn.Module:
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    return wrap


def our_step(
    world: World,
    shape: Shape,
    name: str,
    text: str,
    dtype: str,
    unseen: dict[str, Callable[[], int]],
) -> Step:
    layout = Layout.parse(f"{text} {dtype}")
    model = build_model(shape)
    program = build(layout, model_stages(model, layout), model.tied)
    held = build_local(
        world, layout, model, program, precision=precision_of(dtype), prefix=f"{name}/"
    )
    performer = Executor(held, program, world.rank, AdamW())
    own = microbatches(batch_of(shape, 0, dtype=torch.float32), layout, held.coordinates["dp"])
    if isinstance(world, ShmWorld):
        # No operation of torch makes what lies in shared memory, so it is added.
        unseen[name] = lambda: flat_bytes(held)
    return lambda: performer.step(own, 1e-4)


def flat_bytes(held: LocalModel) -> int:
    """All flat buffers of a rank: those of its pool, and the homes that are not a run of one."""
    pool = sum(n * dtype.itemsize * count for (n, dtype), count in held.pool.made.items())
    homes = [u.home for u in held.units.values()]
    buffers = {storage_of(u.buffer) for u in held.units.values() if u.resident and not u.same}
    return pool + sum(h.numel() * h.itemsize for h in homes if storage_of(h) not in buffers)


def contenders(
    world: World,
    shape: Shape,
    dtype: str,
    groups: Sequence[str],
    unseen: dict[str, Callable[[], int]],
) -> dict[str, Callable[[], Step]]:
    """How each step is made, by name; every rank makes them in this order."""
    by_itself = partial(torch_step, shape, world.rank, lambda model: model, dtype)
    makers: dict[str, Callable[[], Step]] = {
        "one process": lambda: alone(by_itself()),
        "two processes apart": by_itself,
    }
    for group in groups:
        if group == "gloo":
            group, mesh, here = dist.group.WORLD, init_device_mesh("cpu", (2,)), world
        else:
            group = dist.new_group(backend="shm")
            mesh, here = DeviceMesh.from_group(group, "cpu"), beside()
        assert group is not None
        makers[f"torch DDP, {group}"] = partial(
            torch_step, shape, world.rank, replicated(group), dtype
        )
        makers[f"torch FSDP2, {group}"] = partial(
            torch_step, shape, world.rank, sharded(mesh, dtype), dtype, casts=False
        )
        for name, text in OURS.items():
            full = f"ours {name}, {group}"
            makers[full] = partial(our_step, here, shape, full, text, dtype, unseen)
    return makers


def run(
    world: World, size: str, dtype: str, groups: Sequence[str], only: Sequence[str], rounds: int
) -> list[Row]:
    steps, peaks = {}, {}
    unseen: dict[str, Callable[[], int]] = {}
    for name, make in contenders(world, SIZES[size], dtype, groups, unseen).items():
        if only and not any(word in name for word in ("one process", *only)):
            continue
        with Peak() as peak:
            steps[name] = make()
            steps[name]()
            steps[name]()
        peaks[name] = peak.most + (unseen[name]() if name in unseen else 0)
    times = in_turn(steps, rounds)
    world.clear()
    return [Row(name, tuple(times[name]), peaks[name]) for name in steps]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--only", nargs="+", default=(), help="contenders that have such a word")
    parser.add_argument("--rounds", type=int, default=10)
    said = parser.parse_args()
    print(machine())
    for size in said.sizes:
        asked = size, said.dtype, said.groups, said.only, said.rounds
        rows = launch(run, 2, *asked, backend="gloo", threads_per_rank=1)[0]
        print(f"\n{table(f'{size}, {said.dtype}, 2 ranks', rows, 'one process')}", flush=True)


if __name__ == "__main__":
    main()
