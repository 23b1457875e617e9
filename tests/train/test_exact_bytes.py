"""Steps of `exact` send hardly more bytes than ordinary ones."""

from dataclasses import replace

import pytest
import torch

from phalanx.comm import Message, TallyWorld
from phalanx.layout import Layout
from phalanx.layout.cases import SHAPES
from phalanx.parallel import build_model
from phalanx.parallel.batch import microbatches
from phalanx.parallel.local import build_local
from phalanx.train.executor import Executor
from phalanx.train.optimizer import AdamW
from phalanx.train.program import program_of
from phalanx.verify.cases import trial_batch

# Wide enough that the gradients outweigh the norm's whole numbers, 6 KB a step.
WIDE = replace(SHAPES["gqa"], hidden=128, ffn=256, vocab=256)


def sent(message: Message) -> float:
    """The bytes that a rank sends: the least that the collective needs."""
    others = (message.size - 1) / message.size
    if message.collective == "all_reduce":
        return 2 * others * message.bytes
    assert message.collective in ("all_gather", "reduce_scatter", "all_to_all")
    return others * message.bytes


def bytes_of_a_step(text: str) -> float:
    layout = Layout.parse(text)
    model = build_model(WIDE)
    program = program_of(model, layout)
    world = TallyWorld(0, layout.ranks, "cpu")
    local = build_local(world, layout, model, program)
    executor = Executor(local, program, 0, AdamW())
    world.ledger.clear()  # of the messages of the start
    # two rows in each microbatch
    sized = replace(WIDE, batch=2 * layout.data * layout.microbatches)
    batch = trial_batch(sized, 0, dtype=torch.float32)
    own = microbatches(batch, layout, 0, 0)
    executor.step(own, 1e-3)
    world.clear()
    return sum(map(sent, world.ledger))


@pytest.mark.parametrize(
    "text",
    ["dp2", "dp4", "dp3 zero1", "dp4 zero2", "dp4 zero3", "dp2x2 zero2"],
)
def test_a_step_sends_at_most_a_twentieth_more(text: str) -> None:
    assert 0 < bytes_of_a_step(f"{text} exact") <= 1.05 * bytes_of_a_step(text)


def test_with_accumulation_zero3_sends_gradients_only_once() -> None:
    text = "dp4 zero3 accum:4"
    assert bytes_of_a_step(f"{text} exact") < bytes_of_a_step(text)
