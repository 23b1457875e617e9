"""Tensor parallel in pairs: columns of one layer, rows of the next, one all-reduce.

torchrun --nproc-per-node 4 tensor_parallel_pair.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

torch.manual_seed(0)  # the same weights and batch on every rank
up = torch.randn(6, 2 * ranks, dtype=torch.float64)
down = torch.randn(2 * ranks, 6, dtype=torch.float64)
batch = torch.randn(5, 6, dtype=torch.float64)

# Two columns of the first layer, and the two rows of the second that multiply them.
first = 2 * rank
mine = slice(first, first + 2)
own_up = up[:, mine].clone().requires_grad_()
own_down = down[mine].clone().requires_grad_()
x = batch.clone().requires_grad_()

# gelu acts on each feature by itself, so it needs no message.
features = gelu(x @ own_up)
partial = features @ own_down
y = partial.detach().clone()
dist.all_reduce(y)

# The loss is the mean square of y. Every rank has y's gradient; x's is a sum of parts.
gradient = 2 * y / y.numel()
partial.backward(gradient)
dist.all_reduce(x.grad)

whole_up = up.clone().requires_grad_()
whole_down = down.clone().requires_grad_()
whole_x = batch.clone().requires_grad_()
features = gelu(whole_x @ whole_up)
whole_y = features @ whole_down
loss = whole_y.square().mean()
loss.backward()
up_columns = whole_up.grad[:, mine]
down_rows = whole_down.grad[mine]
torch.testing.assert_close(own_up.grad, up_columns)
torch.testing.assert_close(own_down.grad, down_rows)
torch.testing.assert_close(x.grad, whole_x.grad)
print(f"rank {rank}: features {first} and {first + 1}")
dist.destroy_process_group()
