"""The grid: groups of ranks that differ along one axis of a mesh.

torchrun --nproc-per-node 4 grid.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

# dp2 tpN: the last axis varies fastest, so ranks 0 and 1 differ along tp.
tp = ranks // 2
assert ranks == 2 * tp, "this mesh needs an even number of ranks"
mesh = torch.arange(ranks).view(2, tp)

# Every rank takes part in making every group, including groups that it is not in.
tp_groups = [dist.new_group(row.tolist()) for row in mesh]
dp_groups = [dist.new_group(column.tolist()) for column in mesh.T]
my_dp = rank // tp
my_tp = rank % tp

x = torch.tensor([float(rank)])
dist.all_reduce(x, group=tp_groups[my_dp])
assert x.item() == mesh[my_dp].sum()

# Summing along every axis in turn is summing over all ranks.
dist.all_reduce(x, group=dp_groups[my_tp])
assert x.item() == mesh.sum()

print(f"rank {rank}: dp {my_dp}, tp {my_tp}, sum over all ranks {x.item():g}")
dist.destroy_process_group()
