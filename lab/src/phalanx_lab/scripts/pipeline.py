"""Pipeline: a layer on each rank, and the batch in microbatches (GPipe).

torchrun --nproc-per-node 4 pipeline.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()
last = ranks - 1

torch.manual_seed(0)  # the same weights and batch on every rank
start = [torch.randn(6, 6, dtype=torch.float64) / 2 for _ in range(ranks)]
batch = torch.randn(8, 6, dtype=torch.float64)
weight = start[rank].clone().requires_grad_()
microbatches = batch.chunk(4)

# All forwards: a stage works on one microbatch while the next works on the one before.
kept: list[tuple[Tensor, Tensor]] = []
for rows in microbatches:
    x = rows.clone()
    if rank > 0:
        dist.recv(x, src=rank - 1)
    x.requires_grad_()
    y = gelu(x @ weight)
    if rank < last:
        dist.send(y.detach(), dst=rank + 1)
    kept.append((x, y))

# All backwards. The loss is the mean square over the whole batch.
for x, y in kept:
    gradient = 2 * y.detach() / batch.numel()
    if rank < last:
        dist.recv(gradient, src=rank + 1)
    y.backward(gradient)
    if rank > 0:
        dist.send(x.grad, dst=rank - 1)

alone = [w.clone().requires_grad_() for w in start]
whole = batch
for w in alone:
    whole = gelu(whole @ w)
loss = whole.square().mean()
loss.backward()
expected = alone[rank].grad
torch.testing.assert_close(weight.grad, expected)
print(f"rank {rank}: kept {len(kept)} microbatches")
dist.destroy_process_group()
