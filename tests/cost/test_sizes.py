"""What pieces keep, found on meta tensors; `test_peak_memory.py` holds it against real steps."""

from __future__ import annotations

from functools import partial

import torch

from phalanx.cost.live import Live
from phalanx.cost.sizes import sizes_of
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, build_model
from phalanx.program.memory import peaks
from phalanx.train.program import program_of
from phalanx.verify import batch_of

SHAPE = Shape(
    "deep", layers=8, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64, sequence=64, batch=8
)
BATCH = batch_of(SHAPE, 0, dtype=torch.float32)


def test_recomputing_keeps_less_and_selective_lies_between() -> None:
    def peak(text: str) -> float:
        layout = Layout.parse(text)
        program = program_of(build_model(SHAPE), layout)
        sizes = sizes_of(partial(build_model, SHAPE), layout, program, BATCH, Precision())
        return peaks(program, sizes)[0].kinds["activations"]

    assert peak("recompute:all") < peak("recompute:selective") < peak("recompute:none")
    assert peak("recompute:sqrt") < peak("recompute:selective")


def test_live_counts_a_storage_once_and_forgets_what_is_gone() -> None:
    before = torch.ones(100)
    with Live() as live:
        a = torch.zeros(10)
        b = a.view(2, 5)
        before.add_(1)
        nothing = torch.zeros(1000, device="meta") + 1
        assert live.now == 40
        c = b + 1
        assert live.now == 80
        del a, b
        assert live.now == 40
        assert c.sum() == 10
        assert nothing.shape == (1000,)
