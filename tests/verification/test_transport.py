"""`verify` makes every call of a transport before it trains over it, and names the first wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from phalanx.comm import Work
from phalanx.comm.threads import ThreadGroup, ThreadWorld, run_threads
from phalanx.layout import Layout
from phalanx.verification import SHAPES, transport, verify
from phalanx.verification.transport import transport_fault
from phalanx.verification.verify import worlds_over
from torch_shm.calls import Call

RANKS = 3


class Then(Work):
    """A call that does something more at its wait."""

    def __init__(self, work: Work, more: Callable[[], object]) -> None:
        self.work, self.more = work, more

    def wait(self) -> None:
        self.work.wait()
        self.more()


def faulty(kind: str, wrong: Callable[[Call], object], op: str = "") -> type:
    """A world of threads in which calls of one kind are followed by a mistake."""

    class Group(ThreadGroup):
        def _begin(self, call: Call) -> Work:
            work = super()._begin(call)
            if call.kind != kind or (op and call.op != op):
                return work
            return Then(work, lambda: wrong(call))

    class World(ThreadWorld):
        group_type = Group

    return World


def first_fault(kind: type) -> str:
    found = run_threads(transport_fault, RANKS, (), 60.0, 0, kind)
    return next(filter(None, found), "")


def _roll(call: Call) -> None:
    assert call.out is not None
    call.out.copy_(call.out.roll(1))


def _forget_nan(call: Call) -> None:
    if call.x.is_floating_point():
        call.x.nan_to_num_(0.0)


def _lose_ones(call: Call) -> None:
    if call.x.dtype == torch.bfloat16:
        call.x[call.x > 256.0] = 256.0


@pytest.mark.parametrize(
    ("world", "named"),
    [
        (faulty("all_gather", _roll), "all_gather of"),
        (faulty("all_to_all", _roll), "all_to_all of"),
        (faulty("reduce_scatter", _roll, "max"), "reduce_scatter(max)"),
        (faulty("broadcast", lambda call: call.x.add_(1)), "broadcast of"),
        (faulty("all_reduce", _forget_nan, "min"), "all_reduce(min) of a NaN"),
        (faulty("all_reduce", _lose_ones), "all_reduce(sum) in bfloat16"),
        (
            faulty("receive", lambda call: call.x.fill_(-1.0)),
            "a message of 1 elements",
        ),
    ],
)
def test_a_wrong_call_is_named(world: type, named: str) -> None:
    assert named in first_fault(world)


def test_a_region_that_reads_memory_in_its_order_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = transport.carry

    def careless(x, kind, group, dim, join):  # type: ignore[no-untyped-def]
        steps = torch.empty(x.shape).stride()
        return plain(x.as_strided(x.shape, steps), kind, group, dim, join)

    monkeypatch.setattr(transport, "carry", careless)
    assert "along dim 0, strided" in first_fault(ThreadWorld)


@pytest.mark.parametrize("backend", ["threads", "gloo", "shm"])
def test_every_transport_passes(backend: str) -> None:
    with worlds_over(backend)(RANKS) as run:
        assert run(transport_fault) == [""] * RANKS


def test_layouts_are_not_trained_over_a_wrong_transport() -> None:
    shape = dataclasses.replace(SHAPES["gqa"], batch=4)

    class Worlds:
        def __init__(self, size: int) -> None:
            self.size = size

        def __enter__(self):  # type: ignore[no-untyped-def]
            world = faulty("all_gather", _roll)
            return lambda fn, *args: run_threads(
                fn, self.size, args, 60.0, 0, world
            )

        def __exit__(self, *error: object) -> None: ...

    (verdict,) = verify(shape, [Layout.parse("dp2 fp64")], worlds=Worlds)
    assert not verdict.passed
    assert verdict.first_difference.startswith(
        "rank 0: all_gather of 5 elements"
    )
