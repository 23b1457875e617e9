"""Prints the cost of recording: PYTHONPATH=benchmarks:torch-audit/src python -m audited.overhead

A transformer of 4.5 million parameters on one core, with and without the recorder, in turns.
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_audit.recorder import Recorder

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
        start = time.perf_counter()
        logits = model(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(time.perf_counter() - start)
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    seconds_of_steps(model, 2)
    plain, recorded, after = [], [], []
    for _ in range(ROUNDS):
        plain += seconds_of_steps(model, RECORDED)
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Path(folder), RECORDED)
            recorder.install()
            times = seconds_of_steps(model, 2 * RECORDED)
            recorder.finish()
            recorded += times[:RECORDED]
            after += times[RECORDED + 1 :]
            paths = list(Path(folder).iterdir())
            size = max(path.stat().st_size for path in paths)
    tensors = len(list(model.parameters()))
    elements = sum(each.numel() for each in model.parameters())
    usual = statistics.median(plain)
    print(f"{elements} elements in {tensors} parameters")
    print(f"a step: {usual:.3f} s")
    for name, found in (("recorded", recorded), ("after it", after)):
        middle = statistics.median(found)
        print(f"a step {name}: {middle:.3f} s, {middle / usual:.2f} x")
    print(f"a file: {size / tensors:.0f} bytes a parameter")


if __name__ == "__main__":
    main()
