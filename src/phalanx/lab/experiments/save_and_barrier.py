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

from phalanx.lab.catalogue import Size
from phalanx.lab.experiments.process_groups import from_rank_0
from phalanx.lab.lab import Lab
from phalanx.lab.mlp import gradients_of, one_process, start, update


def run(lab: Lab) -> None:
    size, group, weights, half = lab.size, lab.group, start(lab.size), lab.size.steps // 2

    def train_step(step: int) -> tuple[Tensor, list[Tensor]]:
        if step == half:
            save_and_load()
        loss, gradients = gradients_of(weights, lab.rows(step))
        for g in gradients:
            group.all_reduce(g, "average")
        update(weights, gradients)
        return loss, gradients

    def save_and_load() -> None:
        lab.step("rank 0 saves, barrier, all load", weights=weights)
        saved = torch.zeros(1, dtype=torch.int64)
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
        weights[:] = [file[str(i)].clone() for i in range(len(weights))]
        lab.after(weights=weights, bytes_of_the_file=int(saved))
        before = Size(size.batch, size.width, size.layers, half) if half else None
        want = one_process(before).weights if before else start(size)
        lab.claim("it loaded what was saved", weights, want)
        header = int(saved) - size.bytes
        says = f"the file is the weights and a header of {header} bytes"
        lab.claim(says, 8 < header < 200 * size.layers + 64 and header % 8 == 0)
        lab.step("training continues from the file")

    lab.train(train_step, weights)
