"""Why a timing without synchronisation lies: the call returns before the work is done.

A GPU kernel, or a collective with wait=False, is only *launched* by the call. A clock read when it
returns measures the launch. Here rank 0 is late on purpose: it enters only after the last rank has
launched, looked at its clock and said so. At that moment the result cannot exist, however fast the
launch seemed. On a GPU the cure is torch.cuda.synchronize (or events) before reading the clock, or
CUDA_LAUNCH_BLOCKING=1 to look for errors; here it is .wait().
"""

import time
from collections.abc import Iterator

import torch

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import batch, gradients_of, one_process, start
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    last = n - 1
    with note.doing("gradient"):
        rows = size.part("batch", rank, n)
        gradient = gradients_of(start(size), batch(size, 0)[rows])[1][0]
    ready = torch.zeros(1)
    note.step("an all-reduce that is launched, and what the clock says")
    note.holds("before", gradient=gradient)
    if rank == 0 and n > 1:
        wire.receive(ready, source=last)  # late: the others have launched
    begin = time.perf_counter()
    work = wire.all_reduce(gradient, "average", wait=False)
    launched = time.perf_counter() - begin
    done = work.done()
    if rank == last and n > 1:
        wire.send(ready, to=0)  # only now may rank 0 enter
    with note.doing("something useful meanwhile"):
        torch.ones(size.width) @ torch.ones(size.width, size.width)
    work.wait()
    waited = time.perf_counter() - begin
    note.holds("after", gradient=gradient)
    note.says(
        f"Rank {rank}: the call returned after {1e6 * launched:,.0f} us, the result was there "
        f"after {1e6 * waited:,.0f} us. Done when it returned: {done}."
    )
    if torch.cuda.is_available():
        note.says(_on_the_gpu(size.width))
    return {"gradient": gradient, "done too early": int(done and rank == last and n > 1)}


def _on_the_gpu(width: int) -> str:
    x = torch.randn(width, width, device="cuda")
    _ = x @ x
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        _ = x @ x
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    waited = time.perf_counter() - begin
    return (
        f"Ten matmuls on the GPU: {1e6 * launched:,.0f} us unsynchronised, {1e6 * waited:,.0f} us."
    )


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    want = one_process(size).gradients[0]
    for rank, held in enumerate(results):
        yield equal(f"rank {rank}: after waiting, one process's gradient", held["gradient"], want)
        says = f"rank {rank}: nothing was done before rank 0 had come"
        yield holds(says, held["done too early"] == 0)
