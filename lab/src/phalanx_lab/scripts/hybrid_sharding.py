"""Hybrid sharding: groups of ranks share the weights, and the groups are copies.

torchrun --nproc-per-node 4 hybrid_sharding.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

# Two copies, such as two hosts, of `shards` ranks each.
shards = ranks // 2
assert ranks == 2 * shards, "two copies need an even number of ranks"
mesh = torch.arange(ranks).view(2, shards)
# Every rank takes part in making every group.
inside = [dist.new_group(copy.tolist()) for copy in mesh]
across = [dist.new_group(column.tolist()) for column in mesh.T]
my_copy = rank // shards
my_shard = rank % shards

torch.manual_seed(0)  # the same weight and batch on every rank
weight = torch.randn(2 * shards, 3, dtype=torch.float64)
batch = torch.randn(4 * ranks, 2 * shards, dtype=torch.float64)
begin = 4 * rank
end = begin + 4
rows = batch[begin:end]
first = 2 * my_shard
stop = first + 2
shard = weight[first:stop].clone()

# Gathered inside the host, where messages are fast.
whole = torch.empty_like(weight)
dist.all_gather_into_tensor(whole, shard, group=inside[my_copy])
whole.requires_grad_()
y = rows @ whole
loss = y.square().mean()
loss.backward()

# Sum over the shards inside the host first, then only this rank's part across hosts.
part = torch.empty_like(shard)
dist.reduce_scatter_tensor(part, whole.grad, group=inside[my_copy])
dist.all_reduce(part, group=across[my_shard])
part /= ranks

alone = weight.clone().requires_grad_()
y = batch @ alone
loss = y.square().mean()
loss.backward()
expected = alone.grad[first:stop]
torch.testing.assert_close(part, expected)
print(f"rank {rank}: {part.numel()} of {weight.numel()} elements went across")
dist.destroy_process_group()
