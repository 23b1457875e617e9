"""The executor waits for no message that the program does not declare.

Ranks are threads whose groups note which operation began each call, and which one waits for it. A
handler waits for nothing but what its row of the table says that its kind sends inside; all other
waits are needs of an operation, made before its handler runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from phalanx.comm import Work
from phalanx.comm.threads import ThreadGroup, ThreadWorld, run_threads
from phalanx.layout import Layout, Mesh, Shape
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.block_parts import cut_blocks
from phalanx.parallel.compile import BACKEND
from phalanx.parallel.local import build_local
from phalanx.parallel.low_precision import matmul_named
from phalanx.program import Op, Program, StepOptions, ops
from phalanx.program.state import State
from phalanx.training.executor import Executor
from phalanx.training.muon import Muon
from phalanx.training.optimizer import AdamW, Optimizer
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of
from torch_shm.calls import Call
from verification.covered import covered


class Watch(threading.local):
    """Where this thread's rank is in its list, and what it did there that the list does not say."""

    mesh = Mesh()
    handling: Op | None = None  # its handler runs
    preparing: Op | None = None  # what it needs is waited for
    needs: frozenset[Op] = frozenset()  # of that one, by the program

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}

    def axes(self, ranks: tuple[int, ...]) -> set[str]:
        """The mesh axes along which some ranks differ, in their parts: dp.shard, cp.ring."""
        places = [self.mesh.coordinates(rank) for rank in ranks]
        differ = {
            axis
            for axis in places[0]
            if len({place[axis] for place in places}) > 1
        }
        parted = {axis.partition(".")[0] for axis in differ if "." in axis}
        return differ - parted

    def begins(self, call: Call, ranks: tuple[int, ...]) -> None:
        """A handler begins a call: over axes that its kind's row names."""
        if self.handling is None:
            return
        kind = ops.KINDS[self.handling.kind]
        named = {*kind.axes, *kind.inside} | (
            {"pp"} if kind.on == ops.MESSAGE else set()
        )
        if undeclared := _outside(self.axes(ranks), named):
            self.faults[
                f"{self.handling} calls {call.kind} over {undeclared}"
            ] = None

        # Its attention sends keys and values; nothing else of the model is over these ranks.
        over_cp = (
            self.axes(ranks) <= {"cp.ring", "cp.ulysses"}
            and "cp" not in kind.axes
        )
        if over_cp and call.kind == "all_reduce":
            self.faults[f"{self.handling} calls all_reduce over cp"] = None

    def waits(
        self, call: Call, ranks: tuple[int, ...], begun: Op | None
    ) -> None:
        """The rank waits for a call: inside a handler, or before one."""
        if self.handling is not None:
            kind = ops.KINDS[self.handling.kind]
            if begun != self.handling or _outside(
                self.axes(ranks), {*kind.inside}
            ):
                over = ", ".join(sorted(self.axes(ranks)))
                of = "" if begun == self.handling else f" of {begun}"
                self.faults[
                    f"{self.handling} waits for {call.kind}{of} over {over} inside"
                ] = None
        elif self.preparing is not None and begun not in self.needs:
            self.faults[
                f"{self.preparing} waits for {begun}, which it does not need"
            ] = None


def _outside(axes: set[str], named: set[str]) -> str:
    """The axes that are not named, neither as a whole nor by their part."""
    return ", ".join(
        sorted(a for a in axes if not {a, a.partition(".")[0]} & named)
    )


watch = Watch()


class WatchedWork(Work):
    def __init__(self, work: Work, call: Call, ranks: tuple[int, ...]) -> None:
        self.work, self.call, self.ranks = work, call, ranks
        self.begun = watch.handling

    def wait(self) -> None:
        watch.waits(self.call, self.ranks, self.begun)
        self.work.wait()

    def done(self) -> bool:
        return self.work.done()


class WatchedGroup(ThreadGroup):
    def _begin(self, call: Call) -> Work:
        if self.size == 1:
            return super()._begin(call)
        watch.begins(call, self.ranks)
        return WatchedWork(super()._begin(call), call, self.ranks)


class WatchedWorld(ThreadWorld):
    group_type = WatchedGroup


class Watched(Executor):
    """Says where it is; what its program needs is derived anew, and not taken from the executor."""

    def __init__(
        self, local: Any, program: Program, rank: int, optimizer: Optimizer
    ) -> None:
        super().__init__(local, program, rank, optimizer, clip=1.0)
        state = State(program, program.owner[rank])
        self.declared = {
            op: frozenset(need for need in needs if isinstance(need, Op))
            for op, needs in state.walk()
        }
        for kind, handler in list(self.handlers.items()):
            self.handlers[kind] = self._marked(handler)

    def _marked(self, handler: Any) -> Any:
        def marked(op: Op) -> Work | None:
            with here(handling=op):
                work: Work | None = handler(op)
                return work

        return marked

    def _issue(self, op: Op) -> tuple[Any, Work | None]:
        with here(preparing=op, needs=self.declared[op]):
            return super()._issue(op)


@contextmanager
def here(**place: Any) -> Iterator[None]:
    before = {name: getattr(watch, name) for name in place}
    try:
        for name, value in place.items():
            setattr(watch, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(watch, name, value)


def watched_step(
    world: Any, layout: Layout, shape: Shape, optimizer: Optimizer
) -> list[str]:
    """What this rank did in one step that its program does not declare."""
    watch.mesh = layout.mesh
    model = cut_blocks(build_model(shape), layout)
    options = StepOptions(whole_matrices=optimizer.whole_matrices)
    program = program_of(model, layout, options)
    precision = Precision(matmul=matmul_named(layout.matmul))
    held = build_local(world, layout, model, program, precision=precision)
    executor = Watched(held, program, world.rank, optimizer)
    executor.checked = True
    batch = batch_of(shape, 0, dtype=torch.float32)
    own = microbatches(
        batch, layout, held.coordinates["data"], held.coordinates["cp"]
    )
    executor.step(own, 1e-3)
    world.clear()
    return list(watch.faults)


def undeclared(
    layout: Layout, shape: Shape, optimizer: Optimizer
) -> list[str]:
    """What any rank did in one step that the program does not declare."""
    args = (layout, shape, optimizer)
    ranks = run_threads(
        watched_step, layout.ranks, args, 60.0, 0, WatchedWorld
    )
    return list(dict.fromkeys(fault for faults in ranks for fault in faults))


def _small(name: str) -> Shape:
    return replace(SHAPES[name], batch=12, sequence=8)


def _all_undeclared(
    name: str, ranks: int, each: int = 1
) -> dict[str, list[str]]:
    """The faults of every `each`-th layout of the covering list."""
    layouts = [
        replace(layout, precision="fp32")
        for layout in covered(name, ranks)[::each]
    ]
    found = {
        str(layout): undeclared(layout, _small(name), AdamW())
        for layout in layouts
    }
    return {text: faults for text, faults in found.items() if faults}


@pytest.mark.parametrize(
    "name, ranks, each", [("gqa", 2, 1), ("latent", 4, 2)]
)
def test_no_handler_waits_for_what_its_row_does_not_name(
    name: str, ranks: int, each: int
) -> None:
    assert not _all_undeclared(name, ranks, each)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "mlp"])
def test_no_handler_of_any_shape_waits_for_what_its_row_does_not_name(
    name: str,
) -> None:
    assert not _all_undeclared(name, 4)


LATENT = _small("latent")
BATCH_LOSS = replace(LATENT, sequence_loss=0.0, batch_loss=0.3)
BOTH_LOSSES = replace(LATENT, batch_loss=0.3)
LORA = replace(_small("gqa"), lora_r=2)
FROZEN = replace(_small("gqa"), freeze=("embed", "layers.1"))
OPTIONS = (
    # What travels in 8 bits.
    (_small("gqa"), "dp2 zero1 fp8:tile"), (_small("gqa"), "dp2 zero3 accum:2 fp8:tile"),
    (_small("gqa"), "dp2x2 zero3 fp8:tile"), (_small("gqa"), "dp2 pp2 zero2 1f1b:3 fp8:tile"),
    (_small("gqa"), "cp2 tp2 seq zero3 fp8:tile"), (_small("latent"), "ep2 zero3 fp8:tile"),
    (LORA, "dp2 zero3 fp8:tile"), (FROZEN, "dp2 zero3 fp8:tile"),
    (_small("gqa"), "dp2 tp2 fp8"), (_small("gqa"), "dp2 mxfp8"),
    # What is trained.
    (LORA, "dp2 tp2 seq zero3"), (LORA, "pp2 tp2 1f1b:3"), (FROZEN, "dp2 zero3 accum:2"),
    # Where things stand: hosts, replicas, two stages with one weight.
    (_small("gqa"), "dp2 zero3 offload:weights,activations accum:3"),
    (_small("gqa"), "dp2 zero2 offload:optimizer"), (_small("gqa"), "dp2x2 zero2 accum:2"),
    (_small("gpt"), "dp2 pp2 zero1 1f1b:3"), (_small("gpt"), "pp2 tp2 zb-h1:3 reduce:micro"),
    (_small("gqa"), "cp2 tp2 recompute:selective"), (_small("gqa"), "tp2 seq recompute:selective"),
    # Experts, and the losses of their routers.
    (_small("experts"), "tp2 seq experts:tp"), (_small("experts"), "cp2 ep2 experts:cp zero3"),
    (_small("experts"), "ep2 accum:3 overlap"), (LATENT, "cp2 recompute:selective"),
    (BATCH_LOSS, "dp2 cp2"), (BATCH_LOSS, "ep2 tp2 seq"), (BOTH_LOSSES, "dp2 cp2 recompute:all"),
    (BOTH_LOSSES, "dp2 zero3"), (LATENT, "pp2 cp2 zb-h2:3 recompute:all"),
)  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_no_handler_waits_for_what_its_row_does_not_name_with_any_option(
    first: int,
) -> None:
    found = {
        (shape.name, text): undeclared(Layout.parse(text), shape, optimizer)
        for (shape, text), optimizer in zip(
            OPTIONS[first::2], cycle((AdamW(), Muon()))
        )
    }
    assert not {case: faults for case, faults in found.items() if faults}


@pytest.mark.slow
def test_no_compiled_forward_waits_for_the_count_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses of routers are divided by it, in the backward."""
    monkeypatch.setenv(BACKEND, "aot_eager")
    assert not undeclared(Layout.parse("dp2 compile"), LATENT, AdamW())
