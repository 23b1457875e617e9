"""Steps of `exact` send hardly more bytes than ordinary ones, in buffers that are counted."""

from dataclasses import replace

import pytest
import torch

from phalanx.comm import Message, TallyWorld, Work
from phalanx.layout import Layout
from phalanx.layout.cases import SHAPES
from phalanx.parallel import build_model
from phalanx.parallel.batch import microbatches
from phalanx.parallel.exact import ExactUnit
from phalanx.parallel.local import build_local
from phalanx.parallel.pool import storage_of
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification.cases import trial_batch

# Wide enough that the gradients outweigh the norm's whole numbers, 4 KB a step.
WIDE = replace(SHAPES["gqa"], hidden=128, ffn=256, vocab=256)


def sent(message: Message) -> float:
    """The bytes that a rank sends: the least that the collective needs."""
    others = (message.size - 1) / message.size
    if message.collective == "all_reduce":
        return 2 * others * message.bytes
    assert message.collective in ("all_gather", "reduce_scatter", "all_to_all")
    return others * message.bytes


class TalliedStep:
    """A step of one rank that sends nothing; the start's messages are not counted."""

    def __init__(self, text: str) -> None:
        self.layout = layout = Layout.parse(text)
        model = build_model(WIDE)
        program = program_of(model, layout)
        self.world = TallyWorld(0, layout.ranks, "cpu")
        self.local = build_local(self.world, layout, model, program)
        self.executor = Executor(self.local, program, 0, AdamW())
        self.world.ledger.clear()

    def run(self) -> None:
        # two rows in each microbatch
        layout = self.layout
        sized = replace(WIDE, batch=2 * layout.data * layout.microbatches)
        batch = trial_batch(sized, 0, dtype=torch.float32)
        own = microbatches(batch, layout, 0, 0)
        self.executor.step(own, 1e-3)
        self.world.clear()


def bytes_of_a_step(text: str) -> float:
    step = TalliedStep(text)
    step.run()
    return sum(map(sent, step.world.ledger))


@pytest.mark.parametrize(
    "text",
    ["dp2", "dp4", "dp3 zero1", "dp4 zero2", "dp4 zero3", "dp2x2 zero2"],
)
def test_a_step_sends_at_most_a_twentieth_more(text: str) -> None:
    assert 0 < bytes_of_a_step(f"{text} exact") <= 1.05 * bytes_of_a_step(text)


def test_replicas_share_the_elements_of_the_gradient_norm() -> None:
    """A quarter each, in parts of 64 elements."""
    step = TalliedStep("dp2x2 zero1 exact")
    for unit in step.local.units.values():
        counted = sum(run.stop - run.start for run in unit.counted_runs)
        assert 4 * counted <= unit.numel


def test_with_accumulation_zero3_sends_gradients_only_once() -> None:
    text = "dp4 zero3 accum:4"
    assert bytes_of_a_step(f"{text} exact") < bytes_of_a_step(text)


def test_a_shard_with_replicas_is_exchanged_in_counted_buffers() -> None:
    """The parts' new order is made in the pool, in no third whole gradient."""
    step = TalliedStep("dp2x2 zero2 exact")
    pool = step.local.pool
    unit = step.local.units[2]
    assert isinstance(unit, ExactUnit)
    made: set[int] = set()
    allocate = pool.empty

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = allocate(numel, dtype)
        made.add(storage_of(buffer))
        return buffer

    pool.empty = empty
    exchange = unit.copies.all_to_all
    seen = []

    def all_to_all(out: torch.Tensor, x: torch.Tensor, **how: bool) -> Work:
        seen.append({storage_of(out), storage_of(x)})
        return exchange(out, x, **how)

    object.__setattr__(unit.copies, "all_to_all", all_to_all)
    step.run()
    assert seen
    assert all(storages <= made for storages in seen)
    plain = TalliedStep("dp4 zero2 exact")
    plain.run()
    whole = unit.numel, torch.float32
    assert pool.most[whole] <= plain.local.pool.most[whole]
