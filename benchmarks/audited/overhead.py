"""Prints the cost of recording: PYTHONPATH=benchmarks:torch-audit/src python -m audited.overhead [RANKS]

A transformer of 4.2 million parameters, a core each rank, with and without the recorder, in turns. Several
ranks train by DDP over gloo; the first one's times are printed, and the largest file of all. Times are
those of the processor, which other programs on the machine change least.
"""

import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_audit.recorder import Recorder

from .programs import enter_world

WIDTH, LAYERS, VOCABULARY, ROWS, LENGTH = 256, 4, 2048, 4, 128
ROUNDS, RECORDED = 7, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def seconds_of_steps(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCABULARY
    found = []
    for _ in range(steps):
        start = time.process_time()
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.process_time() - start)
    return found


def measure(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = Model()
    elements = sum(each.numel() for each in model.parameters())
    if ranks > 1:
        enter_world(str(folder), rank, ranks)
        model = nn.parallel.DistributedDataParallel(model)
    seconds_of_steps(model, 2)
    plain, recorded, after = [], [], []
    for each_round in range(ROUNDS):
        plain += seconds_of_steps(model, RECORDED)
        out = folder / f"round-{each_round}"
        out.mkdir(exist_ok=True)
        recorder = Recorder(out, RECORDED)
        recorder.install()
        times = seconds_of_steps(model, 2 * RECORDED)
        recorder.finish()
        recorded += times[:RECORDED]
        after += times[RECORDED + 1 :]
    if rank:
        return
    tensors = len(list(model.parameters()))
    usual = statistics.median(plain)
    if ranks > 1:
        print(f"{ranks} ranks")
    print(f"{elements} elements in {tensors} parameters")
    print(f"a step: {usual:.3f} s")
    for name, found in (("recorded", recorded), ("after it", after)):
        middle = statistics.median(found)
        print(f"a step {name}: {middle:.3f} s, {middle / usual:.2f} x")
    sizes = [path.stat().st_size for path in folder.glob("round-*/*")]
    print(f"a file: {max(sizes) / tensors:.0f} bytes a parameter")


def main(ranks: int) -> int:
    """Forks all ranks, as ranks of one parent meet in one store; 1 if one failed."""
    with tempfile.TemporaryDirectory() as name:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                os._exit(_measured(rank, ranks, Path(name)))
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
    return int(any(codes))


def _measured(rank: int, ranks: int, folder: Path) -> int:
    try:
        measure(rank, ranks, folder)
    except Exception:
        traceback.print_exc()
        return 1
    # A fork's end writes out nothing.
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
