"""A program of plain torch that hangs where it is told to: python plain_program.py FOLDER WHERE.

Each rank is a process that torchrun's variables describe.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from rank_watch import torch_calls, watched


def exchange(text: str) -> list[str]:
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def main(folder: str, where: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    with (
        watched(rank, exchange, folder, timeout=1.0) as positions,
        torch_calls(positions),
    ):
        for step in range(4):
            positions.step(step)
            with positions.operation("forward"):
                loss = model(torch.ones(2, 8)).sum()
            if where == "loader" and step == 2 and rank == 1:
                time.sleep(1e6)
            with positions.operation("backward"):
                loss.backward()
            if where == "skipped" and step == 2 and rank == 1:
                continue
            with positions.operation("count"):
                count = torch.ones(1)
                work = dist.all_reduce(count, async_op=True)
                work.wait()
            assert count.item() == 2
            if where == "message" and step == 3:
                peer = 1 - rank
                dist.recv(count, src=peer)
                dist.send(count, dst=peer)
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} is done")


if __name__ == "__main__":
    main(*sys.argv[1:])
