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

from phalanx.lab.claims import Claims, Results, Size, Values, every
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import batch, gradients_of, start, trained, update


def run(lab: Lab) -> Values:
    size, n = lab.size, lab.n
    lab.step("rank 0 drives all devices, the other ranks wait")
    weights = start(size)
    losses: list[float] = []
    first: list[Tensor] = []
    copied, begin = 0, time.perf_counter()
    lab.shows("before", weights=weights)
    for step in range(size.steps) if lab.rank == 0 else ():
        with lab.doing(f"step {step}"):
            loss, gradients, moved = replicated(weights, batch(size, step), n, size)
            for w, g in zip(weights, gradients, strict=True):
                update(w, g)
        copied += moved
        losses.append(loss)
        first = first or gradients
    threaded = time.perf_counter() - begin
    lab.shows("after", weights=weights, losses=losses)
    lab.group.barrier()

    lab.step("the same with a rank for each device")
    by_rank, begin = start(size), time.perf_counter()
    lab.shows("before", weights=by_rank)
    for step in range(size.steps):
        for w, g in zip(by_rank, gradients_of(by_rank, lab.rows(step))[1], strict=True):
            lab.group.all_reduce(g, "average")
            update(w, g)
    took = time.perf_counter() - begin
    lab.shows("after", weights=by_rank)
    if lab.rank == 0:
        lab.note(
            f"{n} threads over {n} devices: {1e3 * threaded:.0f} ms, {copied:,} bytes through the "
            f"first device. One rank for each: {1e3 * took:.0f} ms, {lab.sent():,.0f} bytes each."
        )
    values = {"sent": lab.sent(), "copied": copied, "weights by rank": by_rank}
    return values | {"losses": losses, "gradients": first, "weights": weights}


def replicated(
    weights: list[Tensor], x: Tensor, n: int, size: Size
) -> tuple[float, list[Tensor], int]:
    """Loss, gradients, and the bytes that left or entered the first device."""
    answers: dict[int, tuple[Tensor, list[Tensor]]] = {}
    moved = 0

    def drive(i: int, replica: list[Tensor], rows: Tensor) -> None:
        answers[i] = gradients_of(replica, rows)

    threads = []
    for i in range(n):
        rows = x[size.part("batch", i, n)].to(device(i))
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
        parts = [answers[i][1][layer].to(w.device) for i in range(n)]
        gradients.append(torch.stack(parts).mean(0))
        moved += sum(part.nbytes for part in parts[1:])
    return sum(loss.item() for loss, _ in answers.values()) / n, gradients, moved


def device(i: int) -> torch.device:
    gpus = torch.cuda.device_count()
    return torch.device("cuda", i % gpus) if gpus > 1 else torch.device("cpu")


def check(results: Results, size: Size) -> Claims:
    n = len(results)
    yield from trained(results[:1], size)
    want = results[0]["weights"]
    yield from every(results, "weights by rank", "both ways train alike", want)
    formula = size.steps * 2 * (n - 1) / n * size.bytes
    yield from every(results, "sent", "it sent 2(n-1)/n of the weights in each step", formula)
    says = "only rank 0 trained in the first part"
    yield from every(results, "weights", says, lambda rank: start(size) if rank else want)
    rows = 8 * size.batch * size.width * (n - 1) // n
    formula = size.steps * (2 * (n - 1) * size.bytes + rows)
    says = "the first device moved 2(n-1) times the weights"
    yield from every(results, "copied", says, lambda rank: 0 if rank else formula)
