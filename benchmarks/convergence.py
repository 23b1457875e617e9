"""Validation loss of a byte model with 2M parameters, in one process and in other
layouts.

    .venv/bin/python benchmarks/convergence.py
    .venv/bin/python benchmarks/convergence.py --layouts "dp4" --log convergence.jsonl

Trains 300 steps on the built-in text. With a log, each layout can be a command of its
own: results in the log are not computed again. Goals: below 2.0 nats per byte in one
process, and every layout within 0.02 of it. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
from pathlib import Path

from phalanx.comm import launch
from phalanx.layout import Layout, Run
from phalanx.training.loop import train

RUN = """
batch = 32
sequence = 64
document_masks = false
model = {layers = 4, hidden = 192, heads = 6, ffn = 512, vocab = 256}
optimizer = {lr = 2e-3, warmup_steps = 30, schedule = "cosine", min_lr = 4e-5}
metrics = {every = 50}
validation = {batches = 150}  # 307,200 bytes, a quarter of the held-out part: a few files say little
"""
LAYOUTS = "; dp4; pp2 tp2; dp4 zero3"
LOW, NEAR = 2.0, 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts",
        default=LAYOUTS,
        help="separated by ;, one process is empty",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--backend", default="auto")
    parser.add_argument(
        "--log",
        help="verdicts as JSON lines; those it holds are not run again",
    )
    said = parser.parse_args()
    log = Path(said.log) if said.log else None
    known = log.read_text().splitlines() if log and log.exists() else []
    found = {one["layout"]: one for one in map(json.loads, known)}
    for layout in (text.strip() for text in said.layouts.split(";")):
        if layout not in found:
            found[layout] = trained(layout, said.steps, said.backend)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(found[layout]) + "\n")
    return told(list(found.values()))


def trained(layout: str, steps: int, backend: str) -> dict[str, object]:
    """Return the validation loss at the end of a run in this layout, and the CPU time
    of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.parse(
            RUN, "convergence", (f"out={folder}/run", f"steps={steps}")
        )
        outcome = launch(
            train,
            Layout.parse(layout).ranks,
            run,
            layout,
            True,
            backend=backend,
        )[0]
    used = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return {
        "layout": layout, "parameters": run.shape.total, "steps": steps,
        "loss": outcome.loss, "validation": outcome.validation,
        "cpu": sum(one.ru_utime + one.ru_stime for one in used),
    }  # fmt: skip


def told(found: list[dict[str, object]]) -> int:
    """Print the table and the verdict; return the exit code."""
    print(
        "| layout | parameters | steps | validation loss, nats per byte | from one process |"
    )
    print("|---|---|---|---|---|")
    first = next(
        (one["validation"] for one in found if not one["layout"]), None
    )
    apart = 0.0
    for one in found:
        off = (
            abs(one["validation"] - first)
            if first is not None
            else float("nan")
        )
        apart = max(apart, off)
        name = one["layout"] or "one process"
        print(
            f"| {name} | {one['parameters']:,} | {one['steps']} | {one['validation']:.4f} | {off:.1e} |"
        )
    if first is None:
        return 0
    print(f"\nOne process is {'below' if first < LOW else 'NOT below'} {LOW}; the others are at most"
          f" {apart:.1e} from it, of {NEAR}.")  # fmt: skip
    return 0 if first < LOW and apart <= NEAR else 1


if __name__ == "__main__":
    sys.exit(main())
