"""Data parallel inside one process, a thread for each device: how it works and why it is slower.

The classic `nn.DataParallel`. The first device holds the batch and the weights. Every step it deals
out rows, copies *all* weights to every other device, a Python thread drives each device, outputs and
gradients come back to the first. Three reasons to leave it: the interpreter lock lets one thread at
a time run Python; everything lands on the first device first, which sends n-1 times the weights
while the others idle; and a replica is a whole model on one device, so it does not combine with
splitting the model. Measured here beside one process per rank, which sends 2(n-1)/n of the weights.

Ranks as threads share one interpreter too; `--wire gloo` gives the second form its processes.

Without several GPUs the devices are the CPU under n names: copies are real, the devices are not.
"""

import threading
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.comm import World
from phalanx.lab.claims import Claim, Held, Size, equal, holds
from phalanx.lab.mlp import batch, gradients_of, start, trained_as_one, update
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank, n = everyone(world), world.rank, world.size
    note.step("rank 0 drives all devices, the other ranks wait")
    weights, losses = start(size), [0.0] * size.steps
    first = [torch.zeros_like(w) for w in weights]
    copied, begin = 0, time.perf_counter()
    note.holds("before", weights=weights)
    if rank == 0:
        for step in range(size.steps):
            with note.doing(f"step {step}"):
                losses[step], gradients, moved = replicated(weights, batch(size, step), n, size)
                copied += moved
                for w, g in zip(weights, gradients, strict=True):
                    update(w, g)
            first = gradients if step == 0 else first
    threaded = time.perf_counter() - begin
    note.holds("after", weights=weights, losses=losses)
    wire.barrier()

    note.step("the same with a rank for each device")
    weights_by_rank, begin = start(size), time.perf_counter()
    before = note.sent()
    note.holds("before", weights=weights_by_rank)
    for step in range(size.steps):
        _, gradients = gradients_of(weights_by_rank, batch(size, step)[size.part("batch", rank, n)])
        for w, g in zip(weights_by_rank, gradients, strict=True):
            wire.all_reduce(g, "average")
            update(w, g)
    by_rank, sent = time.perf_counter() - begin, note.sent() - before
    note.holds("after", weights=weights_by_rank)
    if rank == 0:
        note.says(
            f"{n} threads over {n} devices: {1e3 * threaded:.0f} ms, {copied:,} bytes through the "
            f"first device. One rank for each: {1e3 * by_rank:.0f} ms, {sent:,.0f} bytes from each."
        )
    held = {"sent": sent, "copied": copied, "weights by rank": weights_by_rank}
    return held | {"losses": losses, "gradients": first, "weights": weights}


def replicated(
    weights: Sequence[Tensor], x: Tensor, n: int, size: Size
) -> tuple[float, list[Tensor], int]:
    """Loss, gradients, and the bytes that left or entered the first device."""
    devices = [_device(i) for i in range(n)]
    answers: list[tuple[Tensor, list[Tensor]]] = [(x, [])] * n
    moved = 0
    replicas: list[tuple[list[Tensor], Tensor]] = []
    for i, device in enumerate(devices):
        rows = x[size.part("batch", i, n)]
        # A copy even where source and device are one memory: a replica is a replica.
        replica = [w.to(device, copy=True) for w in weights] if i else list(weights)
        replicas.append((replica, rows.to(device)))
        moved += sum(w.nbytes for w in (*weights, rows)) if i else 0

    def drive(i: int) -> None:
        answers[i] = gradients_of(*replicas[i])

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gradients = []
    for layer in range(len(weights)):
        parts = [own[layer].to(weights[0].device) for _, own in answers]
        gradients.append(torch.stack(parts).mean(0))
        moved += sum(part.nbytes for part in parts[1:])
    return sum(loss.item() for loss, _ in answers) / n, gradients, moved


def _device(i: int) -> torch.device:
    gpus = torch.cuda.device_count()
    return torch.device("cuda", i % gpus) if gpus > 1 else torch.device("cpu")


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    n = len(results)
    yield from trained_as_one(results[:1], size)
    for rank, held in enumerate(results):
        want, whole = results[0]["weights"], 8 * size.layers * size.width**2
        yield equal(f"rank {rank}: both ways train alike", held["weights by rank"], want)
        formula = size.steps * 2 * (n - 1) / n * whole
        yield equal(f"rank {rank} sent 2(n-1)/n of the weights a step", held["sent"], formula)
        if rank:
            yield equal(f"rank {rank} only waited", held["losses"], [0.0] * size.steps)
            yield equal(f"rank {rank} has untrained weights", held["weights"], start(size))
            yield equal(f"rank {rank} has no gradients", held["gradients"], [0 * w for w in want])
            yield holds(f"rank {rank} copied nothing", held["copied"] == 0)
    rows = 8 * size.batch * size.width * (n - 1) // n
    formula = size.steps * (2 * (n - 1) * whole + rows)
    yield equal("the first device moved 2(n-1) times the weights", results[0]["copied"], formula)
