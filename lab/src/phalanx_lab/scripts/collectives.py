"""Every collective once, with numbers that show which rank they come from.

torchrun --nproc-per-node 4 collectives.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

# Row r is what rank r has: 10 r, 10 r + 1, ... Each rank knows its own row only; the
# table is here to check the results.
numbers = torch.arange(float(ranks))
table = torch.stack([10 * r + numbers for r in range(ranks)])
own = table[rank].clone()
total = table.sum(0)

x = own.clone()
dist.broadcast(x, src=0)
assert torch.equal(x, table[0])

x = own.clone()
dist.reduce(x, dst=0)  # a sum; the other ranks' x is undefined afterwards
assert rank > 0 or torch.equal(x, total)

x = own.clone()
dist.all_reduce(x)
assert torch.equal(x, total)

x = torch.empty(ranks * ranks)
dist.all_gather_into_tensor(x, own)
gathered = x.view(ranks, ranks)
assert torch.equal(gathered, table)

x = torch.empty(1)
dist.reduce_scatter_tensor(x, own)
assert x.item() == total[rank]

x = torch.empty(ranks)
dist.all_to_all_single(x, own)
column = table[:, rank]  # rows become columns
assert torch.equal(x, column)

x = torch.empty(ranks)
parts = list(table) if rank == 0 else None
dist.scatter(x, parts, src=0)
assert torch.equal(x, own)

rows = [torch.empty(ranks) for _ in range(ranks)] if rank == 0 else None
dist.gather(own, rows, dst=0)
if rows is not None:
    gathered = torch.stack(rows)
    assert torch.equal(gathered, table)

dist.barrier()
print(f"rank {rank}: every collective does what its name says")
dist.destroy_process_group()
