"""Small runs in one process, and what they left behind."""

from __future__ import annotations

from pathlib import Path

from checkpoint_worlds import hash_tensors

from phalanx.comm import launch
from phalanx.layout import Layout
from phalanx.layout.journal import Record, read_journal
from phalanx.layout.run import Run
from phalanx.planner import Machine, Rate
from phalanx.training.loop import Outcome, train

# A peak from a file: measuring one takes a moment in each run and is not what is tested.
RUN = """
steps = 5
batch = 6
sequence = 18
model = {layers = 3, hidden = 16, heads = 2, ffn = 24, vocab = 256}
optimizer = {lr = 1e-2, warmup_steps = 1}
validation = {batches = 2}
"""


def small(out: Path, *more: str) -> Run:
    machine = out.parent / "machine.toml"
    rates = (
        Rate("fp32", 512, 512, 512, 1e11),
        Rate("fp64", 512, 512, 512, 5e10),
    )
    said = Machine(
        "this", "2026-11-21", "by hand", "a CPU", "cpu", 1, 2, 8e9, rates=rates
    )
    machine.write_text(said.text())
    return Run.parse(RUN, "small", (f"out={out}", f"machine={machine}", *more))


def trained(run: Run, layout: str, backend: str = "threads") -> list[Outcome]:
    return launch(
        train, Layout.parse(layout).ranks, run, layout, True, backend=backend
    )


def records(out: Path, event: str) -> list[Record]:
    return [
        r for r in read_journal(out / "metrics.jsonl") if r["event"] == event
    ]


def losses(out: Path) -> dict[int, str]:
    """The loss of every step, as it was last done, bit by bit."""
    return {r["step"]: float(r["loss"]).hex() for r in records(out, "step")}


def weights(out: Path, step: int) -> dict[str, str]:
    """Hashes of all whole tensors of a checkpoint."""
    return hash_tensors(out / "checkpoints" / f"step-{step:08}")
