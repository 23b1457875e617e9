"""A measured machine as a file: there and back, and every mistake in it told at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.planner import (
    Curve,
    Hidden,
    Machine,
    MachineError,
    Rate,
    Store,
    bus_factor,
)
from phalanx.planner.curve import moved, steps

MACHINE = Machine(
    name="this", date="2026-01-31", method='a "clock" \\ with\ta tab', device="NVIDIA H200", kind="cuda",
    count=2, cores=16, memory=1.5e11, catalogue="h200", torch="2.13.0", launch=4.5e-06,
    stores=(Store("copy", 4.1e12), Store("read", 4.2e12)),
    rates=(Rate("bf16", 4096, 4096, 4096, 7.5e14), Rate("bf16", 512, 512, 512, 1e14)),
    hidden=(Hidden("product beside copy", -0.25),),
    curves=(
        Curve("all_reduce", "nccl", 2, "ring", 1e-05, 2e11, 0.05, 1024, 1 << 26),
        Curve("all_reduce", "nccl", 8, "tree", 2e-05, 4e11, 0.05, 1024, 1 << 26, 1, 4096, 3e11),
        Curve("all_gather", "nccl", 2, "ring", 0.0, 2e11, 0.05, 1024, 1 << 26, apart=4),
    ),
    links=("NV18", "SYS"),
)  # fmt: skip


def test_a_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Machine.parse(MACHINE.text()) == MACHINE
    least = Machine("m", "2026-01-31", "", "a CPU", "cpu", 1, 2, 1e9)
    assert Machine.parse(least.text()) == least
    (tmp_path / "m.toml").write_text(MACHINE.text())
    assert Machine.load(tmp_path / "m.toml") == MACHINE


def test_floats_keep_six_digits() -> None:
    read = Machine.parse(replace(MACHINE, launch=1.23456789e-6).text())
    assert read.launch == 1.23457e-6


def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    text = MACHINE.text().replace(
        "cores = 16", "coers = 16\nhost = 3\ncount = true"
    )
    text = text.replace("count = 2\n", "").replace("m = 4096", 'm = "wide"', 1)
    with pytest.raises(MachineError) as told:
        Machine.parse(text, "machine.toml")
    for said in (
        "machine.toml has 5 mistakes", "line 6: coers = 16: there is no key", "Did you mean 'cores'",
        "cores is missing", "line 7: host = 3 is a whole number",
        "line 8: count = true is true or false", 'rates[0].m = "wide" is text',
    ):  # fmt: skip
        assert said in str(told.value)
    with pytest.raises(MachineError, match="is not TOML"):
        Machine.parse("name = ")
    with pytest.raises(
        MachineError, match=r"cannot read the machine file nowhere\.toml"
    ):
        Machine.load("nowhere.toml")


def test_a_machine_tells_its_best_rate_and_its_curves() -> None:
    best = MACHINE.best("bf16")
    assert best is not None
    assert best.m == 4096
    assert best.seconds == pytest.approx(2 * 4096**3 / 7.5e14)
    assert MACHINE.best("fp8") is None
    assert MACHINE.memory_bandwidth == 4.1e12
    assert MACHINE.entry is not None
    assert MACHINE.curve("all_reduce", 8) == MACHINE.curves[1]
    # The nearest size that was measured, with the steps of the size that is asked for.
    assert MACHINE.curve("all_reduce", 16) == replace(
        MACHINE.curves[1], ranks=16
    )
    assert MACHINE.curve("all_reduce", 4) == replace(
        MACHINE.curves[0], ranks=4
    )
    with pytest.raises(MachineError, match="no measured send"):
        MACHINE.curve("send", 2)
    with pytest.raises(MachineError, match="over gloo"):
        MACHINE.curve("all_reduce", 2, backend="gloo")


def test_bus_factors_are_what_a_rank_has_to_send() -> None:
    assert bus_factor("all_reduce", 4) == 2 * 3 / 4
    for op in (
        "reduce_scatter",
        "all_gather",
        "all_to_all",
        "scatter",
        "gather",
    ):
        assert bus_factor(op, 4) == 3 / 4
    assert [bus_factor(op, 4) for op in ("broadcast", "reduce", "send")] == [
        1,
        1,
        1,
    ]
    # An all-reduce is its two halves.
    for n in range(2, 9):
        halves = bus_factor("reduce_scatter", n) + bus_factor("all_gather", n)
        assert bus_factor("all_reduce", n) == pytest.approx(halves)


def test_a_ring_sends_few_bytes_and_a_tree_takes_few_steps() -> None:
    for n in (4, 8, 64):
        assert steps("all_reduce", "ring", n) == 2 * (n - 1)
        assert steps("all_reduce", "tree", n) < steps("all_reduce", "ring", n)
        assert moved("all_reduce", "tree", n) > moved("all_reduce", "ring", n)
    assert steps("broadcast", "tree", 9) == 4
    assert moved("broadcast", "tree", 9) == 4


def test_a_bent_curve_goes_on_where_it_bends() -> None:
    curve = MACHINE.curves[1]
    assert curve.seconds(4097) == pytest.approx(curve.seconds(4096), rel=1e-3)
    slope = (curve.seconds(2e9) - curve.seconds(1e9)) / 1e9
    assert slope == pytest.approx(moved("all_reduce", "tree", 8) / 3e11)
    assert curve.bus(1e9) == pytest.approx(
        bus_factor("all_reduce", 8) * 1e9 / curve.seconds(1e9)
    )
