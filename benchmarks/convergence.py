"""Does it learn, and does every layout learn the same? A byte model of 2M parameters on the built-in
text: its validation loss after 300 steps on one process and in other layouts.

    .venv/bin/python benchmarks/convergence.py
    .venv/bin/python benchmarks/convergence.py --layouts "; dp4" --steps 100

Goals: below 2.0 nats per byte on one process, every layout within 0.02 of it. Exit code 1 if missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from phalanx.layout import Layout
from phalanx.layout.run import Run
from phalanx.train.loop import train
from phalanx.wire import launch

RUN = """
batch = 64
sequence = 64
masks = false
model = {layers = 4, hidden = 192, heads = 6, ffn = 512, vocab = 256}
optimizer = {lr = 4e-3, warmup = 20, schedule = "cosine", least = 0.02}
metrics = {every = 50}
validation = {batches = 1000}  # all of the held-out part: a few documents alone say little
"""
LAYOUTS = "; dp4; pp2 tp2; dp4 zero3"
LOW, NEAR = 2.0, 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", default=LAYOUTS, help="separated by ;, one process is empty")
    parser.add_argument("--steps", type=int, default=300)
    said = parser.parse_args()
    losses: dict[str, float] = {}
    print(
        "| layout | parameters | steps | validation loss, nats per byte | seconds |\n|---|---|---|---|---|"
    )
    for layout in (text.strip() for text in said.layouts.split(";")):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            run = Run.parse(RUN, "convergence", (f"out={out}", f"steps={said.steps}"))
            begun = time.monotonic()
            outcomes = launch(train, Layout.parse(layout).ranks, run, layout, True)
            seconds = time.monotonic() - begun
        losses[layout] = outcomes[0].validation
        name = layout or "one process"
        print(f"| {name} | {run.shape.total:,} | {said.steps} | {losses[layout]:.4f} | {seconds:.0f} |",
              flush=True)  # fmt: skip
    first = losses[next(iter(losses))]
    apart = max(abs(loss - first) for loss in losses.values())
    print(f"\nThe first is {'below' if first < LOW else 'NOT below'} {LOW}; the others are at most"
          f" {apart:.4f} from it, of {NEAR}.")  # fmt: skip
    return 0 if first < LOW and apart <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
