"""The executor does what `simulate` says, to the moment.

Ranks are threads that compute and communicate for real, on clocks that are made up: computing takes
what it costs, and a collective ends so long after its last member has begun it. The times are carried
beside each call, over a second set of groups. Whatever the executor waits for that is no edge of the
graph, or the other way round, is a difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import Group, Work, World
from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.parallel import Precision, build_model, microbatches
from phalanx.parallel.block_parts import cut_blocks
from phalanx.parallel.exchange import Exchange
from phalanx.parallel.groups import Groups, UnitGroups, open_groups
from phalanx.parallel.local import build_local
from phalanx.parallel.low_precision import matmul_named
from phalanx.parallel.pieces import CopyLane
from phalanx.parallel.works import ChainedWork
from phalanx.program import (
    Costs,
    Op,
    Program,
    Span,
    StepOptions,
    Timeline,
    ops,
    simulate,
)
from phalanx.training.executor import Executor, StepClock
from phalanx.training.optimizer import AdamW
from phalanx.training.program import program_of
from phalanx.verification import SHAPES, batch_of
from torch_shm.calls import Call

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Log = list[tuple[float, float]]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


class Delayed(Group):
    """A group whose calls take `delay` each, one after the other, on the ranks' clocks.

    `times` is a group of the same ranks, that carries when each of them began the call.
    """

    def __init__(
        self, inner: Group, times: Group, clock: Clock, delay: float
    ) -> None:
        super().__init__(inner.name, inner.rank, inner.ranks, inner.device)
        self.inner, self.times, self.clock, self.delay = (
            inner,
            times,
            clock,
            delay,
        )
        self.begun: dict[object, list[Timed]] = defaultdict(list)
        self.log: dict[object, Log] = defaultdict(list)

    def _begin(self, call: Call) -> Work:
        now = torch.tensor([self.clock.now], dtype=torch.float64)
        if call.kind == "send":
            self.times.send(now, call.at)
            return self.inner._begin(call)
        work = self.inner._begin(call)
        if call.kind == "receive":
            began = torch.zeros(1, dtype=torch.float64)
            lane: object = call.at
            timed = Timed(
                self,
                lane,
                work,
                self.times.receive(began, call.at, wait=False),
            )
            timed.posted, timed.began = self.clock.now, began
        else:
            lane = "all"
            timed = Timed(
                self, lane, work, self.times.all_reduce(now, "max", wait=False)
            )
            timed.began = now
        self.begun[lane].append(timed)
        return timed


class Timed(Work):
    posted = 0.0
    began: Tensor

    def __init__(
        self, group: Delayed, lane: object, work: Work, stamp: Work
    ) -> None:
        self.group, self.lane, self.work, self.stamp = group, lane, work, stamp

    def wait(self) -> None:
        self.work.wait()
        group, log = self.group, self.group.log[self.lane]
        calls = group.begun[self.lane]
        while len(log) <= calls.index(self):  # those before it have ended, too
            call = calls[len(log)]
            call.stamp.wait()
            start = max(
                float(call.began), call.posted, log[-1][1] if log else 0.0
            )
            log.append((start, start + group.delay))
        group.clock.now = max(group.clock.now, log[calls.index(self)][1])


class Copies(CopyLane):
    """Copies to or from the host that take `delay` each."""

    def __init__(self, clock: Clock, delay: float) -> None:
        super().__init__(torch.device("cpu"))
        self.clock, self.delay, self.free = clock, delay, 0.0

    def begin(self, copy: Callable[[], None]) -> Work:
        work = super().begin(copy)
        self.free = end = max(self.free, self.clock.now) + self.delay

        def copied() -> None:
            self.clock.now = max(self.clock.now, end)

        return ChainedWork(work, copied)


GROUPS = {
    "gather": ops.GATHER, "reduce": ops.REDUCE, "replica": ops.REDUCE_REPLICAS, "tie": ops.TIE,
    "count": ops.COUNT, "everyone": ops.AGREE, "activations": "send", "gradients": "send",
    "scales": ops.AGREE_SCALES, "norms": ops.SUM_PARTS, "ep": ops.EXCHANGE,
    "routes": ops.COUNT_ROUTES, "sequences": ops.SUM_CHOICES,
}  # fmt: skip


def timed_step(
    world: World,
    layout: Layout,
    shape: str,
    agree: bool,
    kinds: dict[str, float],
) -> tuple[Program, Timeline, dict[str, Log]]:
    """This rank's step on a made-up clock, and when the calls of each group started and ended."""
    model = cut_blocks(build_model(SHAPES[shape]), layout)
    program = program_of(model, layout, StepOptions(agree=agree))
    precision = Precision(matmul=matmul_named(layout.matmul))
    held = build_local(world, layout, model, program, precision=precision)
    times = open_groups(world, layout, model, program, prefix="times ")
    clock = Clock()
    costs = {
        **kinds,
        ops.REDUCE_REPLICAS: kinds[
            ops.REDUCE_REPLICAS if layout.zero else ops.REDUCE
        ],
    }
    delayed: dict[tuple[str, int], Delayed] = {}  # units share groups

    def slow(
        groups: DataclassInstance, its_times: DataclassInstance
    ) -> dict[str, Any]:
        """The groups by name, each as late as its operations cost."""
        names = {field.name for field in fields(groups)} & {*GROUPS}
        return {
            name: delayed.setdefault(
                (name, id(group)),
                Delayed(
                    group, getattr(its_times, name), clock, costs[GROUPS[name]]
                ),
            )
            for name in sorted(names)
            for group in [getattr(groups, name)]
            if group is not None
        }

    plain = held.groups
    groups = replace(plain, **slow(plain, times))
    exchange = Exchange(groups.ep, groups.routes, held.exchange.receivers)
    held = replace(held, groups=groups, exchange=exchange)
    for number, unit in held.units.items():
        theirs = times.units[number].also
        also = {
            name: delayed.setdefault(
                (name, id(group)),
                Delayed(group, theirs[name], clock, costs[ops.SUM_PARTS]),
            )
            for name, group in unit.groups.also.items()
        }
        unit.groups = replace(
            unit.groups, **slow(unit.groups, times.units[number]), also=also
        )
    known = {
        field.name for kind in (Groups, UnitGroups) for field in fields(kind)
    }
    assert known >= set(GROUPS) - {"norms"}
    executor = Executor(held, program, world.rank, AdamW(), clip=float(agree))
    executor.out, executor.back = (
        Copies(clock, kinds[k]) for k in (ops.OFFLOAD, ops.RELOAD)
    )
    moments = StepClock()
    moments.start = moments.end = lambda: clock.now  # type: ignore[method-assign]
    executor.checked, executor.clock = True, moments
    for kind, plain in list(executor.handlers.items()):
        if ops.KINDS[kind].lane == ops.COMPUTE:

            def computes(op: Op, plain: object = plain) -> None:
                plain(op)  # type: ignore[operator]
                clock.now += Costs(kinds).of(op, 0)

            executor.handlers[kind] = computes
    batch = batch_of(SHAPES[shape], 0, dtype=torch.float32)
    own = microbatches(
        batch, layout, held.coordinates["data"], held.coordinates["cp"]
    )
    timeline = executor.step(own, 1e-3).timeline
    logs = {
        name: log
        for (name, _), group in delayed.items()
        for log in group.log.values()
    }
    world.clear()
    return program, timeline, logs


def _by_op(
    spans: tuple[Span, ...], rank: int, lane: str
) -> dict[str, tuple[float, float]]:
    return {
        str(s.op): (s.start, s.end)
        for s in spans
        if (s.rank, s.lane) == (rank, lane)
    }


FAST = {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1, "U": 0.2, "G": 0.7, "M": 0.2, "C": 0.3, "S": 0.9,
        "H": 0.4, "T": 0.5, "N": 0.1, "A": 0.3, "O": 0.6, "Z": 0.8, "L": 0.8, "Q": 0.6, "K": 0.1,
        "E": 0.5, "J": 0.5, "send": 0.3}  # fmt: skip
SLOW = {**FAST, "G": 3.5, "M": 2.5, "C": 2.9, "S": 7.0, "H": 5.0, "T": 4.0, "N": 9.0, "O": 4.0,
        "Z": 3.0, "L": 3.0, "Q": 4.5, "K": 0.6, "E": 2.4, "J": 2.4, "send": 2.5}  # fmt: skip
LAYOUTS = (
    ("gqa", "dp2"), ("gqa", "dp2 zero3 accum:2"), ("gqa", "dp2 zero2 accum:3 prefetch:2"),
    ("gqa", "dp2x2 zero2 accum:2"), ("gqa", "dp2x2 zero3"), ("gqa", "pp2 1f1b:3"),
    ("gqa", "pp2 zb-v:3"), ("gqa", "dp2 pp2 zero3 1f1b:3 gather:micro"),
    ("gqa", "pp2 zb-h2:4 recompute:every=2"), ("gpt", "dp2 pp2 zero1 1f1b:2"),
    ("gpt", "pp2 zb-h1:3 reduce:micro"), ("gqa", "pp2 gpipe:3 offload:activations"),
    ("gqa", "accum:3 offload:activations,weights"), ("gqa", "dp2 zero2 offload:weights accum:2"),
    ("gqa", "dp2 zero3 accum:2 fp8:tile"), ("gqa", "dp2 zero1 fp8:tile"),
    ("latent", "cp2 accum:2"), ("latent", "pp2 cp2 zb-h2:3 recompute:all"),
    ("gqa", "tp2 seq"), ("gqa", "dp2 tp2 seq accum:2"),
    ("experts", "ep2 zero3 accum:2"), ("experts", "ep2 accum:3 overlap"),
    ("experts", "ep2 pp2 zb-h2:3 overlap recompute:all"),
)  # fmt: skip


@pytest.mark.parametrize("shape, text", LAYOUTS)
@pytest.mark.parametrize(
    ("agree", "kinds"),
    [
        pytest.param(False, FAST, id="free-fast"),
        pytest.param(True, SLOW, id="clipped-slow"),
        pytest.param(False, SLOW, id="free-slow", marks=pytest.mark.slow),
        pytest.param(True, FAST, id="clipped-fast", marks=pytest.mark.slow),
    ],
)
def test_every_operation_starts_and_ends_when_simulate_says(
    shape: str, text: str, agree: bool, kinds: dict[str, float]
) -> None:
    layout = Layout.parse(text)
    # one copy, one microbatch: no call that sums, as there is nothing to sum
    if text == "tp2 seq":
        kinds = {**kinds, ops.REDUCE: 0.0}
    routed = SHAPES[shape].experts > 0
    # A block's experts are a unit of their own, whose calls are others.
    if routed:
        kinds = {**kinds, "S": 0.0, "G": 0.0}
    ranks = launch(
        timed_step,
        layout.ranks,
        layout,
        shape,
        agree,
        kinds,
        backend="threads",
        timeout=60,
    )
    program = ranks[0][0]
    expected = simulate(program, Costs(kinds))
    for row in range(len(program.rows)):
        rank = program.owner.index(row)
        _, timeline, logs = ranks[rank]
        # What computes, to the moment.
        there = _by_op(expected.spans, rank, ops.COMPUTE)
        assert _by_op(timeline.spans, rank, ops.COMPUTE) == {
            op: pytest.approx(times) for op, times in there.items()
        }
        # What runs beside: each lane's calls in their order.
        for name, kind in GROUPS.items():
            if kind in (ops.GATHER, *ops.REDUCTIONS) and (
                routed or text == "tp2 seq"
            ):
                continue
            if kind in ops.KINDS and not (
                kind == ops.REDUCE_REPLICAS and not program.replicated
            ):
                # The gradients of tokens go over the tokens' group.
                also = (ops.EXCHANGE_GRADIENT,) if kind == ops.EXCHANGE else ()
                kinds_ = (kind, *also)
                spans = [
                    s
                    for s in expected.spans
                    if s.rank == rank and s.op.kind in kinds_
                ]
                if kind == ops.REDUCE and not layout.zero:
                    name = "replica"
                assert logs.get(name, []) == [
                    pytest.approx((s.start, s.end)) for s in spans
                ]


def test_slow_reductions_hold_up_the_backward_as_simulated() -> None:
    """Six units whose sums take 0.3 s each, one after the other, at most two under way: the fifth
    sum starts when the third has ended, and the last backward follows it."""
    kinds = {**dict.fromkeys(FAST, 0.0), "S": 0.3}
    layout = Layout.parse("dp2 zero2")
    program, timeline, logs = launch(
        timed_step,
        2,
        layout,
        "gqa",
        True,
        kinds,
        backend="threads",
        timeout=60,
    )[0]
    assert sum(op.kind == "S" for op in program.rows[0]) == 6
    for spans in (timeline.spans, simulate(program, Costs(kinds)).spans):
        begins = _by_op(spans, 0, ops.COMPUTE)
        assert begins["0B0"][0] == pytest.approx(0.9)
        assert begins["5U"][0] == pytest.approx(1.8)
    assert logs["reduce"] == [
        pytest.approx((0.3 * n, 0.3 * (n + 1))) for n in range(6)
    ]


def test_dispatch_is_hidden_behind_another_microbatch() -> None:
    """Twelve pieces, three of them experts: of a microbatch tokens travel twelve times, 0.5 s each, beside
    12 s of forward and 24 s of backward. Overlapped, nobody waits but in the first forward and in the
    last backward, six times each."""
    kinds = {
        **dict.fromkeys(FAST, 0.0),
        "F": 1.0,
        "B": 2.0,
        "E": 0.5,
        "J": 0.5,
    }
    for text, seconds in (
        ("ep2 accum:3", 108 + 3 * 12 * 0.5),
        ("ep2 accum:3 overlap", 108 + 12 * 0.5),
    ):
        program, timeline, _ = launch(
            timed_step,
            2,
            Layout.parse(text),
            "experts",
            True,
            kinds,
            backend="threads",
            timeout=60,
        )[0]
        for spans in (timeline.spans, simulate(program, Costs(kinds)).spans):
            assert max(s.end for s in spans) == pytest.approx(seconds)
