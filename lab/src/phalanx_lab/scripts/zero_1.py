"""ZeRO-1: each rank keeps the optimizer's state of a part of the weights.

torchrun --nproc-per-node 4 zero_1.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()

torch.manual_seed(0)  # the same weight and batches on every rank
start = torch.randn(8, ranks, dtype=torch.float64) / 3
batches = [torch.randn(2 * ranks, 8, dtype=torch.float64) for _ in range(5)]

# All elements in one row. Rank r updates those of its part, 8 elements.
flat = start.flatten().clone()
part = flat.view(ranks, -1)[rank].clone().requires_grad_()
optimizer = torch.optim.AdamW([part], lr=0.1)  # moments of the part only

begin = 2 * rank
end = begin + 2
for batch in batches:
    weight = flat.view(8, ranks).requires_grad_()
    rows = batch[begin:end]
    y = rows @ weight
    loss = y.square().mean()
    loss.backward()
    # Each rank gets the sum of its part, and needs no other.
    part.grad = torch.empty_like(part)
    gradient = weight.grad.flatten()
    dist.reduce_scatter_tensor(part.grad, gradient)
    part.grad /= ranks
    optimizer.step()
    # Everybody gathers the updated parts.
    flat = torch.empty_like(flat.detach())
    dist.all_gather_into_tensor(flat, part.detach())

# One process, with all of AdamW's state.
alone = start.clone().requires_grad_()
reference = torch.optim.AdamW([alone], lr=0.1)
for batch in batches:
    reference.zero_grad()
    y = batch @ alone
    loss = y.square().mean()
    loss.backward()
    reference.step()

ours = flat.view(8, ranks)
torch.testing.assert_close(ours, alone.detach())
held = sum(
    value.numel()
    for state in optimizer.state.values()
    for value in state.values()
    if value.numel() > 1
)
assert held == 2 * flat.numel() // ranks
print(f"rank {rank}: two moments of {part.numel()} of {flat.numel()} elements")
dist.destroy_process_group()
