"""Why a timing without synchronisation is wrong: the call returns before the work is done.

A GPU kernel, or a collective with wait=False, is only *launched* by the call. A clock read when it
returns measures the launch. Here rank 0 is late on purpose: it enters only after the last rank has
launched, read its clock and sent a message. At that moment the result cannot exist, however fast
the launch was. On a GPU the cure is torch.cuda.synchronize (or events) before reading the clock, or
CUDA_LAUNCH_BLOCKING=1 to find errors; here it is .wait().
"""

import time

import torch

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, one_process, start


def run(lab: Lab) -> None:
    group, rank, last = lab.group, lab.rank, lab.n - 1
    gradient = gradients_of(start(lab.size), lab.rows(0))[1][0]
    ready = torch.zeros(1)
    lab.step("an all-reduce that is launched, and what the clock shows", gradient=gradient)
    if rank == 0 and last:
        group.receive(ready, source=last)  # late: the others have launched
    begin = time.perf_counter()
    work = group.all_reduce(gradient, "average", wait=False)
    launched = time.perf_counter() - begin
    done = work.done()
    if rank == last and last:
        group.send(ready, to=0)  # only now may rank 0 enter
    with lab.doing("something useful meanwhile"):
        torch.ones(lab.size.width) @ torch.ones(lab.size.width, lab.size.width)
    work.wait()
    waited = time.perf_counter() - begin
    lab.after(gradient=gradient)
    lab.note(
        f"Rank {rank}: the call returned after {1e6 * launched:,.0f} us, the result was there "
        f"after {1e6 * waited:,.0f} us. Done when it returned: {done}."
    )
    want = one_process(lab.size).gradients[0]
    lab.claim("after waiting, it is one process's gradient", gradient, want)
    lab.claim("nothing was done before rank 0 came", done and rank == last > 0, False)
    if torch.cuda.is_available():
        lab.note(on_the_gpu(lab.size.width))


def on_the_gpu(width: int) -> str:
    x = torch.randn(width, width, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        _ = x @ x
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    waited = time.perf_counter() - begin
    return f"Ten matmuls on the GPU: {launched:.1e} s to launch them, {waited:.1e} s to do them."
