"""How often each rank's host reads from a GPU in a step with experts, as JSON: by operation."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, build_model, microbatches, on_device
from phalanx.parallel.block_parts import cut_blocks
from phalanx.parallel.local import build_local
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import batch_of
from rank_watch.positions import OP, WORDS

SHAPE = Shape(
    "experts", layers=2, hidden=16, heads=2, ffn=32, vocab=32, sequence=16, batch=4,
    experts=4, top_k=2, expert_ffn=16, dense_layers=0,
)  # fmt: skip
BF16 = Precision(torch.bfloat16, torch.float32, torch.float32)


class Reads(TorchDispatchMode):
    """Counts numbers that are read, and copies to the host."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self.executor, self.counts = executor, Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name, out = func._schema.name, func(*args, **kwargs)
        reads = name == "aten::_local_scalar_dense" and args[0].is_cuda
        copies = name in ("aten::_to_copy", "aten::copy_") and _to_host(
            args, out
        )
        if reads or copies:
            place = self.executor.words[OP]
            kind = self.executor.row[place].kind if place >= 0 else "step"
            self.counts[kind] += 1
        return out


def _to_host(args: Any, out: Any) -> bool:
    source = (
        args[1]
        if len(args) > 1 and isinstance(args[1], torch.Tensor)
        else args[0]
    )
    return bool(source.is_cuda and not out.is_cuda)


def rank_reads(world: World, text: str) -> dict[str, int]:
    layout = Layout.parse(text)
    model = cut_blocks(build_model(SHAPE), layout)
    program = program_of(model, layout)
    local = build_local(world, layout, model, program, precision=BF16, seed=0)
    executor = Executor(local, program, world.rank, AdamW(), clip=1.0)
    executor.words = [0] * WORDS
    rows, place = batch_of(SHAPE, 0), local.coordinates
    own = microbatches(rows, layout, place["data"], place["cp"])
    own = [on_device(each, world.device) for each in own]
    executor.step(own, 1e-3)
    with Reads(executor) as reads:
        executor.step(own, 1e-3)
    return dict(reads.counts)


if __name__ == "__main__":
    found = {}
    for layout in sys.argv[1:]:
        ranks = Layout.parse(layout).ranks
        found[layout] = launch(rank_reads, ranks, layout, backend="threads")
    print(json.dumps(found))
