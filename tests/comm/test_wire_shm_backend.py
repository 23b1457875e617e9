"""torch's own parallel code runs over shared memory unchanged."""

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.comm import launch

F64 = torch.float64


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 10, dtype=F64), nn.Tanh(), nn.Linear(10, 6, dtype=F64), nn.Tanh()
    )


def batch(rank):
    return torch.randn(4, 6, dtype=F64, generator=torch.Generator().manual_seed(rank))


def train(net, x, steps=3):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def one_process(size):
    net = model()
    train(net, torch.cat([batch(rank) for rank in range(size)]))
    return [p.detach() for p in net.parameters()]


def joined(world, place, fn):
    """What fn returns in a process group over backend shm."""
    import phalanx.comm.shared  # noqa: F401 - it registers the backend

    store = dist.FileStore(os.path.join(place, "store"), world.size)
    dist.init_process_group("shm", store=store, rank=world.rank, world_size=world.size)
    try:
        return fn(world.rank, world.size)
    finally:
        dist.destroy_process_group()


def over_shm(fn, size=2):
    with tempfile.TemporaryDirectory() as place:
        return launch(joined, size, place, fn, wire="shared", timeout=60.0)


def as_ddp(rank, size):
    net = model()
    train(nn.parallel.DistributedDataParallel(net), batch(rank))
    return [p.detach() for p in net.parameters()]


def as_fsdp2(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    train(net, batch(rank))
    return [p.full_tensor().detach() for p in net.parameters()]


def as_dtensors(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = copy.deepcopy(model())
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, torch.cat([batch(i) for i in range(size)]))
    return [p.full_tensor().detach() for p in net.parameters()]


@pytest.mark.parametrize("fn", [as_ddp, as_fsdp2, as_dtensors])
def test_torch_s_own_parallel_training_gives_the_weights_of_one_process(fn):
    # First, so that the ranks inherit what optimizers import.
    wanted = one_process(2)
    for weights in over_shm(fn):
        for got, want in zip(weights, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def every_call(rank, size):
    """Each function of torch.distributed, on a group of all and on a group of two."""
    pair = dist.new_group([0, 2])
    mine = torch.full((4,), float(rank + 1))
    got = {}
    total = mine.clone()
    dist.all_reduce(total)
    got["all_reduce"] = total
    strided = torch.stack([mine, -mine], 1)[:, 0]
    dist.all_reduce(strided, dist.ReduceOp.MAX)
    got["strided"] = strided.clone()
    got["broadcast"] = mine.clone()
    dist.broadcast(got["broadcast"], 2)
    got["reduce"] = mine.clone()
    dist.reduce(got["reduce"], 1)
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    got["all_gather"] = torch.stack(parts)
    got["scattered"] = torch.zeros(4)
    dist.reduce_scatter(got["scattered"], [mine * (i + 1) for i in range(size)])
    outs = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(outs, [mine * 10 + i for i in range(size)])
    got["all_to_all"] = torch.stack(outs)
    dist.gather(mine, parts if rank == 0 else None, 0)
    got["gather"] = torch.stack(parts)
    got["scatter"] = torch.zeros(4)
    dist.scatter(got["scatter"], [mine * i for i in range(size)] if rank == 1 else None, 1)
    if rank != 1:
        got["pair"] = mine.clone()
        dist.all_reduce(got["pair"], group=pair)
    letter = torch.zeros(4)
    # Receives first: neither is in the other's way.
    asked = [
        dist.P2POp(dist.irecv, letter, (rank - 1) % size),
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(asked):
        work.wait()
    got["letter"] = letter
    said = [None] * size
    dist.all_gather_object(said, f"rank {rank}")
    dist.barrier()
    return {key: x[..., 0].tolist() for key, x in got.items()} | {"objects": said}


def test_the_functions_of_torch_distributed_do_what_they_say():
    for rank, got in enumerate(over_shm(every_call, 3)):
        wanted = {
            "all_reduce": 6.0,
            "strided": 3.0,
            "broadcast": 3.0,
            "reduce": 6.0 if rank == 1 else rank + 1.0,
            "all_gather": [1.0, 2.0, 3.0],
            "scattered": 6.0 * (rank + 1),
            "all_to_all": [10.0 * (i + 1) + rank for i in range(3)],
            "gather": [1.0, 2.0, 3.0],
            "scatter": 2.0 * rank,
            "pair": 4.0,
            "letter": (rank - 1) % 3 + 1.0,
            "objects": ["rank 0", "rank 1", "rank 2"],
        }
        assert got == {key: value for key, value in wanted.items() if key != "pair" or rank != 1}
