"""What the device tests share: short runs of threads, and the operators that a call takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from phalanx.comm import launch
from phalanx.layout import Layout
from phalanx.layout.journal import read_journal
from phalanx.layout.run import Run
from phalanx.training.loop import train

RUN = """
steps = 4
batch = 6
sequence = 64
model = {layers = 4, hidden = 32, heads = 4, kv_heads = 2, ffn = 48, vocab = 256}
optimizer = {lr = 1e-2, warmup_steps = 1, schedule = "constant"}
validation = {batches = 0}
checkpoint = {every = 2}
"""


def losses(
    out: Path,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
    gpu: bool,
) -> list[float]:
    """The losses that a short run of threads logs, with the GPUs or without them."""
    run = Run.parse(RUN, "device", (f"out={out}", *more))
    with monkeypatch.context() as patch:
        if not gpu:
            # `phalanx.comm.launch` is a function too.
            module = importlib.import_module("phalanx.comm.launch")
            patch.setattr(module, "used_gpus", lambda *_: 0)
        launch(
            train,
            Layout.parse(layout).ranks,
            run,
            layout,
            True,
            backend="threads",
        )
    return [
        float(r["loss"])
        for r in read_journal(out / "metrics.jsonl")
        if r["event"] == "step"
    ]


def attention_operators(call: Callable[[], Any]) -> set[str]:
    """The names of torch's attention operators that a call takes, also inside an operator of ours.

    A dispatch mode sees only the outer one.
    """
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    names = {str(event.key) for event in trace.key_averages()}
    return {
        name.removeprefix("aten::")
        for name in names
        if "attention" in name and "aten::" in name
    }
