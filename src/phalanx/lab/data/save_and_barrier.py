"""One rank saves, everyone waits, all load: the barrier is what makes the file whole.

The weights are the same on all ranks, so one copy is enough. Without the barrier a rank may open the
file before it is there, or half of it. Rank 0 writes under another name and renames, so that a
crash leaves the old file or the new one, never a torn one. A second barrier stands before the file
is removed. The file is safetensors: opening it runs nothing.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.comm import Group, World
from phalanx.lab.claims import Claim, Held, Size, equal
from phalanx.lab.mlp import batch, gradients_of, one_process, start, trained_as_one, update
from phalanx.lab.note import Note, everyone


def run(world: World, size: Size, note: Note) -> Held:
    wire, rank = everyone(world), world.rank
    half = size.steps // 2
    weights, losses = start(size), []
    first: list[Tensor] = []
    note.step(f"{half} steps of data parallel")
    note.holds("before", weights=weights)
    for step in range(half):
        loss, gradients = train_step(weights, wire, size, step)
        losses.append(loss)
        first = first or gradients
    note.holds("after", weights=weights)

    note.step("rank 0 saves, barrier, all load")
    note.holds("before", weights=weights)
    saved = torch.zeros(1, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = _told(wire, Path(folder) / "weights.safetensors")
        if rank == 0:
            with note.doing("save"):
                save_file({str(i): w for i, w in enumerate(weights)}, f"{path}.new")
                os.replace(f"{path}.new", path)
                saved[0] = path.stat().st_size
        wire.barrier()  # nobody opens the file before it is whole
        with note.doing("load"):
            loaded = load_file(path)
        wire.barrier()  # the folder goes when everyone has read
    wire.broadcast(saved, root=0)
    del weights
    weights = [loaded[str(i)].clone() for i in range(size.layers)]
    note.holds("after", weights=weights, bytes_of_the_file=int(saved))
    at_load = [w.clone() for w in weights]

    note.step("training goes on from the file")
    note.holds("before", weights=weights)
    for step in range(half, size.steps):
        loss, gradients = train_step(weights, wire, size, step)
        losses.append(loss)
        first = first or gradients
    note.holds("after", weights=weights)
    held = {"losses": losses, "gradients": first, "weights": weights}
    return held | {"loaded": at_load, "bytes": int(saved)}


def train_step(
    weights: list[Tensor], wire: Group, size: Size, step: int
) -> tuple[float, list[Tensor]]:
    loss, gradients = gradients_of(
        weights, batch(size, step)[size.part("batch", wire.rank, wire.size)]
    )
    wire.all_reduce(loss, "average")
    for w, g in zip(weights, gradients, strict=True):
        wire.all_reduce(g, "average")
        update(w, g)
    return loss.item(), gradients


def _told(wire: Group, path: Path) -> Path:
    """Rank 0's path, known to all."""
    said = torch.zeros(256, dtype=torch.uint8)
    said[: len(str(path))] = torch.tensor(list(str(path).encode()), dtype=torch.uint8)
    wire.broadcast(said, root=0)
    return Path(bytes(said.tolist()).rstrip(b"\0").decode())


def check(results: list[Held], size: Size) -> Iterator[Claim]:
    yield from trained_as_one(results, size)
    half = size.steps // 2
    there = start(size)
    if half:
        there = one_process(Size(size.batch, size.width, size.layers, half)).weights
    numbers = 8 * size.layers * size.width**2
    for rank, held in enumerate(results):
        yield equal(f"rank {rank} loaded what was saved", held["loaded"], there)
        header = held["bytes"] - numbers
        says = f"rank {rank}: the file is the weights and a header of {header} bytes"
        yield Claim(says, 8 < header < 200 * size.layers + 64 and header % 8 == 0)
