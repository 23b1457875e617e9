"""Data parallel inside one process, a thread for each device: how it works and why it is slower.

This is the classic `nn.DataParallel`. The first device has the batch and the weights. In every step
it scatters rows and copies *all* weights to every other device; a Python thread drives each device;
outputs and gradients return to the first. There are three reasons to avoid it. The interpreter lock
lets one thread at a time run Python. Everything passes through the first device, which sends n-1
times the weights while the others idle. And a replica is a whole model on one device, so it cannot
be combined with splitting the model. Here it is measured beside one process for each rank, which
sends 2(n-1)/n of the weights.

Ranks as threads also share one interpreter; `--backend gloo` gives the second form its processes.
Without several GPUs the devices are the CPU under n names: copies are real, the devices are not.
"""

import threading
import time

import torch
from torch import Tensor

from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, gradients_of, one_process, start, update


def run(lab: Lab) -> None:
    size, n = lab.size, lab.n
    alone = one_process(size)
    weights, copied = start(size), 0
    lab.step("rank 0 drives all devices, the other ranks wait", weights=weights)
    begin = time.perf_counter()
    for step in range(size.steps) if lab.rank == 0 else ():
        with lab.doing(f"step {step}"):
            loss, gradients, moved = replicated(lab, weights, batch(size, step))
            update(weights, gradients)
        copied += moved
        lab.claim("the loss is one process's", loss, alone.losses[step])
        if step == 0:
            lab.claim("gradients are one process's", gradients, alone.gradients)
    threaded = time.perf_counter() - begin
    lab.after(weights=weights)
    want = start(size) if lab.rank else alone.weights
    lab.claim("only rank 0 trained, as one process does", weights, want)
    lab.group.barrier()

    by_rank = start(size)
    lab.step("the same with a rank for each device", weights=by_rank)
    begin = time.perf_counter()
    for step in range(size.steps):
        gradients = gradients_of(by_rank, lab.rows(step))[1]
        for g in gradients:
            lab.group.all_reduce(g, "average")
        update(by_rank, gradients)
    took = time.perf_counter() - begin
    lab.after(weights=by_rank)
    lab.claim("both ways train alike", by_rank, alone.weights)
    formula = size.steps * 2 * (n - 1) / n * size.bytes
    lab.claim("it sent 2(n-1)/n of the weights in each step", lab.sent(), formula)
    if lab.rank == 0:
        rows = 8 * size.batch * size.width * (n - 1) // n
        formula = size.steps * (2 * (n - 1) * size.bytes + rows)
        lab.claim("the first device moved 2(n-1) times the weights", copied, formula)
        lab.note(
            f"{n} threads over {n} devices: {1e3 * threaded:.0f} ms, {copied:,} bytes through the "
            f"first device. One rank for each: {1e3 * took:.0f} ms, {lab.sent():,.0f} bytes each."
        )


def replicated(lab: Lab, weights: list[Tensor], x: Tensor) -> tuple[float, list[Tensor], int]:
    """Loss, gradients, and the bytes that left or entered the first device."""
    answers: dict[int, tuple[Tensor, list[Tensor]]] = {}
    moved = 0

    def drive(i: int, replica: list[Tensor], rows: Tensor) -> None:
        answers[i] = gradients_of(replica, rows)

    threads = []
    for i in range(lab.n):
        rows = x[lab.size.part("batch", i, lab.n)].to(device(i))
        # A copy even where source and device are one memory: a replica is a replica.
        replica = [w.to(device(i), copy=True) for w in weights] if i else weights
        moved += sum(w.nbytes for w in (*weights, rows)) if i else 0
        threads.append(threading.Thread(target=drive, args=(i, replica, rows)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = []
    for layer, w in enumerate(weights):
        parts = [answers[i][1][layer].to(w.device) for i in range(lab.n)]
        gradients.append(torch.stack(parts).mean(0))
        moved += sum(part.nbytes for part in parts[1:])
    return sum(loss.item() for loss, _ in answers.values()) / lab.n, gradients, moved


def device(i: int) -> torch.device:
    gpus = torch.cuda.device_count()
    return torch.device("cuda", i % gpus) if gpus > 1 else torch.device("cpu")
