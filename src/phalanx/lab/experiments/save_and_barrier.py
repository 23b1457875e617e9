"""One rank saves, everyone waits, all load: the barrier ensures that the file is complete.

The weights are the same on all ranks, so one copy is enough. Without the barrier a rank might open
the file before it exists, or when half of it is written. Rank 0 writes under another name and
renames, so that a crash leaves the old file or the new one, never a part of one. A second barrier
stands before the file is removed. The file is safetensors: opening it runs no code.
"""

import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.lab.claims import Claim, Claims, Results, Size, Values, every
from phalanx.lab.experiments.process_groups import from_rank_0
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, one_process, start, trained, update


def run(lab: Lab) -> Values:
    group, weights = lab.group, start(lab.size)
    loaded: list[Tensor] = []
    saved = torch.zeros(1, dtype=torch.int64)

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        if step == lab.size.steps // 2:
            save_and_load()
        loss, gradients = gradients_of(weights, lab.rows(step))
        for w, g in zip(weights, gradients, strict=True):
            group.all_reduce(g, "average")
            update(w, g)
        return loss, gradients

    def save_and_load() -> None:
        lab.step("rank 0 saves, barrier, all load")
        lab.shows("before", weights=weights)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(from_rank_0(group, str(Path(folder) / "weights.safetensors")))
            if lab.rank == 0:
                with lab.doing("save"):
                    save_file({str(i): w for i, w in enumerate(weights)}, f"{path}.new")
                    os.replace(f"{path}.new", path)
                    saved[0] = path.stat().st_size
            group.barrier()  # nobody opens the file before it is complete
            with lab.doing("load"):
                file = load_file(path)
            group.barrier()  # the folder is removed when everyone has read
        group.broadcast(saved, root=0)
        for i in range(len(weights)):
            weights[i] = file[str(i)].clone()
            loaded.append(weights[i].clone())
        lab.shows("after", weights=weights, bytes_of_the_file=int(saved))
        lab.step("training continues from the file")

    values = lab.train(train_step, weights)
    return values | {"loaded": loaded, "bytes": int(saved)}


def check(results: Results, size: Size) -> Claims:
    yield from trained(results, size)
    half = size.steps // 2
    there = (
        one_process(Size(size.batch, size.width, size.layers, half)).weights
        if half
        else start(size)
    )
    yield from every(results, "loaded", "it loaded what was saved", there)
    for rank, values in enumerate(results):
        header = values["bytes"] - size.bytes
        says = f"rank {rank}: the file is the weights and a header of {header} bytes"
        yield Claim(says, 8 < header < 200 * size.layers + 64 and header % 8 == 0)
