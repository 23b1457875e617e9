"""Send and receive: a value passes through all ranks, and its gradient comes back.

torchrun --nproc-per-node 4 point_to_point.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()
last = ranks - 1

# The value comes from the rank before; rank 0 begins.
x = torch.tensor([3.0])
if rank > 0:
    dist.recv(x, src=rank - 1)
x.requires_grad_()

# Each rank multiplies it by its own number.
y = (rank + 2) * x
if rank < last:
    dist.send(y.detach(), dst=rank + 1)

# The gradient travels in the other direction. That of the last result is 1.
gradient = torch.ones(1)
if rank < last:
    dist.recv(gradient, src=rank + 1)
y.backward(gradient)
if rank > 0:
    dist.send(x.grad, dst=rank - 1)

# One process: x is 3 * 2 * 3 ..., its gradient the product of the factors from here on.
factors = [float(r + 2) for r in range(ranks)]
expected_x = 3 * torch.tensor(factors[:rank]).prod()
expected_gradient = torch.tensor(factors[rank:]).prod()
assert x.item() == expected_x
assert x.grad.item() == expected_gradient
print(f"rank {rank}: x {x.item():g}, gradient {x.grad.item():g}")
dist.destroy_process_group()
