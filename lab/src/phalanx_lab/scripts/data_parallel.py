"""Data parallel: every rank has all weights and its own rows of the batch.

torchrun --nproc-per-node 4 data_parallel.py
"""

import torch
import torch.distributed as dist
from torch import Tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

torch.manual_seed(0)  # the same weights and batches on every rank
start = [torch.randn(8, 8, dtype=torch.float64) / 3 for _ in range(3)]
batches = [torch.randn(4 * ranks, 8, dtype=torch.float64) for _ in range(5)]


def loss_of(weights: list[Tensor], x: Tensor) -> Tensor:
    for weight in weights:
        x = torch.nn.functional.gelu(x @ weight)
    return x.square().mean()


weights = [w.clone().requires_grad_() for w in start]
begin = 4 * rank
end = begin + 4
for batch in batches:
    rows = batch[begin:end]
    loss = loss_of(weights, rows)
    loss.backward()
    with torch.no_grad():
        for w in weights:
            # The mean over all rows is the mean of the ranks' means.
            dist.all_reduce(w.grad)
            w -= 0.1 * w.grad / ranks
            w.grad = None

# One process trains on all rows.
alone = [w.clone().requires_grad_() for w in start]
for batch in batches:
    loss = loss_of(alone, batch)
    loss.backward()
    with torch.no_grad():
        for w in alone:
            w -= 0.1 * w.grad
            w.grad = None

for ours, theirs in zip(weights, alone, strict=True):
    torch.testing.assert_close(ours, theirs)
print(f"rank {rank}: the weights are those of one process")
dist.destroy_process_group()
