"""ZeRO-3: weights are sharded too, and gathered when a layer needs them.

torchrun --nproc-per-node 4 zero_3.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

torch.manual_seed(0)  # the same weights and batch on every rank
width = 2 * ranks
start = [torch.randn(width, width, dtype=torch.float64) / 3 for _ in range(3)]
batch = torch.randn(4 * ranks, width, dtype=torch.float64)
begin = 4 * rank
end = begin + 4
rows = batch[begin:end]

# Rank r keeps rows 2 r and 2 r + 1 of every weight.
first = 2 * rank
stop = first + 2
shards = [weight[first:stop].clone() for weight in start]


def gathered(shard: Tensor) -> Tensor:
    """The whole weight, which is freed when nothing refers to it."""
    whole = torch.empty(width, width, dtype=torch.float64)
    dist.all_gather_into_tensor(whole, shard)
    return whole


# Forward: a layer's weight lives while the layer is computed. Inputs are kept.
inputs = [rows]
for shard in shards:
    weight = gathered(shard)
    x = inputs[-1]
    y = gelu(x @ weight)
    inputs.append(y)
    del weight
y = inputs.pop()
gradient = 2 * y / batch.numel()  # of the mean square over all rows

# Backward: gather again, compute, and keep the sum of this rank's part only.
sums: list[Tensor] = []
for shard, x in zip(reversed(shards), reversed(inputs), strict=True):
    x = x.detach().requires_grad_()
    weight = gathered(shard).requires_grad_()
    y = gelu(x @ weight)
    y.backward(gradient)
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, weight.grad)
    sums.insert(0, part)
    gradient = x.grad

# One process with all rows.
alone = [weight.clone().requires_grad_() for weight in start]
x = batch
for weight in alone:
    x = gelu(x @ weight)
loss = x.square().mean()
loss.backward()
for part, weight in zip(sums, alone, strict=True):
    expected = weight.grad[first:stop]
    torch.testing.assert_close(part, expected)
print(f"rank {rank}: its shards' gradients are those of one process")
dist.destroy_process_group()
