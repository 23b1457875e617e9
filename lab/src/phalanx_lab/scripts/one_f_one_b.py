"""1F1B: a backward as soon as possible, so that a stage keeps few microbatches.

torchrun --nproc-per-node 4 one_f_one_b.py
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank = dist.get_rank()
ranks = dist.get_world_size()
last = ranks - 1

torch.manual_seed(0)  # the same weights and batch on every rank
start = [torch.randn(6, 6, dtype=torch.float64) / 2 for _ in range(ranks)]
batch = torch.randn(4 * ranks, 6, dtype=torch.float64)
weight = start[rank].clone().requires_grad_()
microbatches = batch.chunk(2 * ranks)
sent: list[tuple[dist.Work | None, Tensor]] = []


def send(x: Tensor, to: int) -> None:
    """Send without waiting: two neighbours that wait for each other would deadlock."""
    sent.append((dist.isend(x, dst=to), x))


def forward(rows: Tensor) -> tuple[Tensor, Tensor]:
    x = rows.clone()
    if rank > 0:
        dist.recv(x, src=rank - 1)
    x.requires_grad_()
    y = gelu(x @ weight)
    if rank < last:
        send(y.detach(), rank + 1)
    return x, y


def backward(x: Tensor, y: Tensor) -> None:
    gradient = 2 * y.detach() / batch.numel()
    if rank < last:
        dist.recv(gradient, src=rank + 1)
    y.backward(gradient)
    if rank > 0:
        send(x.grad, rank - 1)


# The first backward comes when the microbatch has been to the last stage and back.
kept: list[tuple[Tensor, Tensor]] = []
most = 0
for rows in microbatches:
    kept.append(forward(rows))
    most = max(most, len(kept))
    if len(kept) == ranks - rank:
        backward(*kept.pop(0))
while kept:
    backward(*kept.pop(0))
for work, _ in sent:
    if work is not None:
        work.wait()

alone = [w.clone().requires_grad_() for w in start]
whole = batch
for w in alone:
    whole = gelu(whole @ w)
loss = whole.square().mean()
loss.backward()
expected = alone[rank].grad
torch.testing.assert_close(weight.grad, expected)
assert most == ranks - rank
print(f"rank {rank}: kept {most} of {len(microbatches)} microbatches")
dist.destroy_process_group()
