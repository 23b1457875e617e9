"""What ranks hold at their peak, as promised by kind and as it is: storages counted, in real steps."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from phalanx.comm import World
from phalanx.comm.launch import launch
from phalanx.cost import Live, sizes_of
from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, Unit, build_model, microbatches
from phalanx.parallel.local import LocalModel, build_local
from phalanx.parallel.pool import storage_of
from phalanx.program import Program, Sizes
from phalanx.program.memory import changes, peaks
from phalanx.training.executor import Executor
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import batch_of

SHAPE = Shape(
    "deep",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=64,
    sequence=64,
    batch=8,
)
BATCH = batch_of(SHAPE, 0, dtype=torch.float32)
FLAT = ("gathered", "gradients")
PASSING = ("activations", "inputs", "temporary", "messages")
TEXTS = (
    "", "accum:2", "recompute:all", "recompute:every=2", "recompute:every=4", "recompute:sqrt",
    "recompute:selective", "accum:4 recompute:selective", "dp2", "dp2 zero1", "dp2 zero2 accum:2",
    "dp2 zero3", "dp2 zero3 accum:2 recompute:all", "tp2", "tp2 seq",
    "cp2", "cp2:ulysses", "pp2 gpipe:4", "pp2 1f1b:4", "pp2 interleaved2:4", "pp2 zb-h1:4",
    "pp2 zb-v:4", "pp2 1f1b:4 recompute:all", "dp2 pp2 1f1b:4 zero1", "pp2 tp2 seq 1f1b:4",
)  # fmt: skip


class Held(NamedTuple):
    """Bytes at their highest, each by itself, and of all together."""

    weights: float
    optimizer: float
    flat: float
    passing: float
    total: float


class Watch(Live):
    """Asks at every new storage what everything together is."""

    def __init__(self, local: LocalModel, always: float) -> None:
        super().__init__()
        self.local, self.always = local, always
        self.flat = self.total = 0.0
        self.passing = 0

    def look(self) -> None:
        flat, passing = _out(self.local), self.now - _grads(self.local)
        self.flat, self.passing = (
            max(self.flat, flat),
            max(self.passing, passing),
        )
        self.total = max(self.total, self.always + flat + passing)

    def _note(self, storage: torch.UntypedStorage) -> None:
        super()._note(storage)
        self.look()


def _grads(local: LocalModel) -> int:
    """Bytes of gradients that are autograd's own: the pool counts them, and they are storages too."""
    plain = (unit for unit in local.units.values() if unit.plain)
    grads = (p.grad for unit in plain for p in unit.parameters.values())
    return sum(
        grad.untyped_storage().nbytes() for grad in grads if grad is not None
    )


def _out(local: LocalModel) -> float:
    """Bytes of the flat buffers that are out of the pool, without weights that never leave."""
    pool = local.pool
    made = sum(
        count * n * dtype.itemsize for (n, dtype), count in pool.made.items()
    )
    free = sum(
        len(left) * n * dtype.itemsize
        for (n, dtype), left in pool.free.items()
    )
    resident = [
        u.buffer for u in local.units.values() if u.resident and not u.same
    ]
    return (
        made
        - free
        - sum(b.numel() * b.itemsize for b in resident if b is not None)
    )


def _weights(units: dict[int, Unit]) -> float:
    kept = [u.home for u in units.values()]
    kept += [
        u.buffer for u in units.values() if u.resident and u.buffer is not None
    ]
    return sum(
        {storage_of(x): x.untyped_storage().nbytes() for x in kept}.values()
    )


def measured(world: World, layout: Layout) -> Held:
    """One step of a rank, the second, when the optimizer's state is there."""
    model = build_model(SHAPE)
    program = program_of(model, layout)
    held = build_local(world, layout, model, program)
    performer = Executor(
        held, program, world.rank, AdamW(), clip=1.0,
    )  # fmt: skip
    own = microbatches(
        BATCH, layout, held.coordinates["dp"], held.coordinates["cp"]
    )
    performer.step(own, 1e-3)
    weights = _weights(held.units)
    state = float(sum(_state(u) for u in performer.updates.values()))
    watch = Watch(held, weights + state)
    take, pool = held.pool.take, held.pool

    def taken(*asked: Any) -> torch.Tensor:
        with _disable_current_modes():  # flat buffers are counted by the pool
            buffer = take(*asked)
        watch.look()
        return buffer

    pool.take = taken  # type: ignore[method-assign]
    with watch:
        performer.step(own, 1e-3)
    world.clear()
    return Held(weights, state, watch.flat, float(watch.passing), watch.total)


def _state(update: Any) -> int:
    tensors = [
        x
        for s in update.state.values()
        for x in s.values()
        if torch.is_tensor(x)
    ]
    return sum(x.numel() * x.itemsize for x in tensors if x.numel() > 1)


def promised(program: Program, sizes: Sizes, row: int) -> Held:
    now: dict[str, float] = {}
    flat = passing = 0.0
    for _, takes, gives in changes(program, sizes, row):
        for kind, amount in takes:
            now[kind] = now.get(kind, 0.0) + amount
        flat = max(flat, sum(now.get(kind, 0.0) for kind in FLAT))
        passing = max(passing, sum(now.get(kind, 0.0) for kind in PASSING))
        for kind, amount in gives:
            now[kind] -= amount
    total = peaks(program, sizes)[row].total
    return Held(now["weights"], now["optimizer"], flat, passing, total)


@pytest.mark.parametrize("text", TEXTS)
def test_peak_memory_is_what_was_promised_within_five_percent_by_kind(
    text: str,
) -> None:
    layout = Layout.parse(text)
    program = program_of(build_model(SHAPE), layout)
    sizes = sizes_of(
        partial(build_model, SHAPE), layout, program, BATCH, Precision()
    )
    found = launch(measured, layout.ranks, layout, backend="threads")
    for row in range(len(program.rows)):
        expected, real = (
            promised(program, sizes, row),
            found[program.owner.index(row)],
        )
        for kind, amount in expected._asdict().items():
            assert getattr(real, kind) == pytest.approx(amount, rel=0.05), (
                kind,
                row,
            )


def test_over_gloo_what_was_sent_stays_until_the_step_ends() -> None:
    layout = Layout.parse("pp2 gpipe:8")
    program = program_of(build_model(SHAPE), layout)
    make = partial(build_model, SHAPE)
    sizes = sizes_of(make, layout, program, BATCH, Precision(), backend="gloo")
    without = sizes_of(make, layout, program, BATCH, Precision())
    found = launch(measured, layout.ranks, layout, backend="gloo")
    for row, real in enumerate(found):
        assert real.passing == pytest.approx(
            promised(program, sizes, row).passing, rel=0.05
        )
        assert (
            peaks(program, sizes)[row].kinds["messages"] >= 8 * sizes.edge[0]
        )
        assert (
            peaks(program, without)[row].kinds["messages"] < 3 * sizes.edge[0]
        )
