"""Tests of ranks that fail or differ, of idle time and of peaks: each mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module as module
from typing import Any

import pytest

from phalanx.comm import agree, base
from phalanx.comm.late import late_worlds
from phalanx.layout import Layout
from phalanx.layout.choices import (
    DUALPIPE_V,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    ZB_H2,
    ZB_V,
)
from phalanx.parallel import build_model
from phalanx.program import schedules
from phalanx.program.state import State
from phalanx.verification import (
    SHAPES,
    failing,
    refusals,
    rows,
    step_order,
)
from phalanx.verification.cases import trial_batch
from phalanx.verification.claims import false_claim
from phalanx.verification.trial import Setting, program_in
from seeded import swapped


def reports_that_blame_each_rank() -> AbstractContextManager[None]:
    plain = base.Report.of

    def blamed(rank: int, error: BaseException) -> base.Report:
        return replace(plain(rank, error), secondary=False)

    return swapped(base.Report, "of", staticmethod(blamed))


def errors_of_the_first_rank_only() -> AbstractContextManager[None]:
    def first(group: Any, error: str) -> list[str]:
        return agree.errors_of(group, error)[:0]

    return swapped(failing, "errors_of", first)


def test_ranks_that_fail_are_named_first() -> None:
    with late_worlds(3) as run:
        assert failing.failure_fault(3, run) == ""
        with reports_that_blame_each_rank():
            assert "is said of rank" in failing.failure_fault(3, run)


def test_errors_that_do_not_reach_the_others_are_named() -> None:
    with late_worlds(2) as run:
        assert failing.failure_fault(2, run) == ""
        with errors_of_the_first_rank_only():
            wrong = failing.failure_fault(2, run)
        assert "an error of rank 0 becomes []" in wrong


@pytest.mark.parametrize(
    "name", [GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_H2, ZB_V, DUALPIPE_V]
)
def test_idle_time_of_a_schedule_is_that_of_its_paper(name: str) -> None:
    chunks = "2" if name == INTERLEAVED else ""
    layout = Layout.parse(f"pp2 {name}{chunks}:4")
    assert not [*step_order.idle_faults(layout)]
    right = schedules.schedule
    # A step of the same operations, in the order of another schedule.
    other = ZB_H1 if name in (GPIPE, ONE_F_ONE_B, INTERLEAVED) else GPIPE

    def wrong(_: str, stages: int, count: int, chunks: int) -> Any:
        return right(other, stages, count)

    with swapped(step_order, "schedule", wrong):
        assert [*step_order.idle_faults(layout)]


def claim_of(text: str) -> str:
    layout, shape = Layout.parse(text), SHAPES["gqa"]
    setting = Setting(partial(trial_batch, shape))
    program = program_in(layout, partial(build_model, shape), setting)
    return false_claim(layout, program, None)


@pytest.mark.parametrize(
    ("text", "method", "kind"),
    [
        ("accum:3 offload:activations", "_to_or_from_host", "activations"),
        ("dp2 zero3 prefetch:3", "_unit", "gathered"),
    ],
)
def test_peaks_that_are_not_those_of_the_list_are_named(
    text: str, method: str, kind: str
) -> None:
    assert claim_of(text) == ""
    plain: Callable[..., None] = State.__dict__[method]

    def twice(self: State, op: Any, start: list[Any], end: list[Any]) -> None:
        plain(self, op, start, end)
        # What is taken or given back is counted at both ends of the operation.
        start += [each for each in end if each not in start]

    with swapped(State, method, twice):
        assert claim_of(text)


def test_rows_of_every_small_shape_are_compared() -> None:
    rows._compare_shapes.cache_clear()
    assert rows.shapes_differ() == ""
    plain = rows.staged_pieces

    def without_sinks(layout: Layout, shape: Any) -> Any:
        return plain(layout, replace(shape, sinks=False))

    rows._compare_shapes.cache_clear()
    with swapped(rows, "staged_pieces", without_sinks):
        assert rows.shapes_differ().startswith("sinks: ")
    rows._compare_shapes.cache_clear()


def test_wrong_layouts_that_are_accepted_are_named() -> None:
    layout, shape = Layout.parse("dp2 tp2 seq zero1"), SHAPES["gqa"]
    assert not [*refusals.refusal_faults(layout, shape)]
    lenient = swapped(module("phalanx.layout.layout"), "_check_values", id)
    with lenient:
        wrong = [*refusals.refusal_faults(layout, shape)]
    for name in ("zero", "precision", "gather", "reduce", "prefetch"):
        assert any(f"with {name} = " in each for each in wrong), name
    with swapped(refusals, "legal", lambda layout, shape: []):
        wrong = [*refusals.refusal_faults(layout, shape)]
    assert [each.split()[0] for each in wrong] == [
        f"{axis}509" for axis in ("dp", "pp", "cp", "tp", "ep")
    ]
