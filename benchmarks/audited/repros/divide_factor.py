"""python divide_factor.py: the gradient of a weight, divided by 2, on a shard mesh of one rank."""

import itertools
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

store = f"file://{sys.argv[1]}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
for dtype, forced in itertools.product(dtypes, (False, True)):
    layer = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    layer.set_gradient_divide_factor(2.0)
    layer.set_force_sum_reduction_for_comms(forced)
    layer(
        torch.ones(1, 1, dtype=dtype)
    ).sum().backward()  # d(w x)/dw = x = 1, so 1/2
    print(dtype, "forced sum" if forced else "", layer.weight.grad.item())
