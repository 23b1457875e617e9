"""All-reduce: a reduce-scatter, then an all-gather.

torchrun --nproc-per-node 4 all_reduce.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

# Row r is what rank r begins with: (ranks, numbers).
numbers = torch.arange(2.0 * ranks)
table = torch.stack([numbers + 10 * r for r in range(ranks)])
total = table.sum(0)
own = table[rank]

x = own.clone()
dist.all_reduce(x)
assert torch.equal(x, total)

# The same in two halves. Each rank sums its own part for all ranks ...
part = torch.empty(2)
dist.reduce_scatter_tensor(part, own.clone())
begin = 2 * rank
end = begin + 2
assert torch.equal(part, total[begin:end])

# ... and everybody gathers all parts.
whole = torch.empty(2 * ranks)
dist.all_gather_into_tensor(whole, part)
assert torch.equal(whole, x)

largest = own.clone()
dist.all_reduce(largest, dist.ReduceOp.MAX)
assert torch.equal(largest, table.amax(0))

print(f"rank {rank}: {x.tolist()}")
dist.destroy_process_group()
