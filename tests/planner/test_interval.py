"""Ranges of predicted steps: their causes, their widths, and how often they hold runs that were left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.layout import Layout, Shape
from phalanx.layout.optimizers import OPTIMIZERS
from phalanx.planner import MachineError, cluster
from phalanx.planner import interval as module
from phalanx.planner.case import Case
from phalanx.planner.hardware import hardware_of
from phalanx.planner.interval import (
    CAUSES,
    amounts,
    interval,
    widths,
    with_own_range,
)
from phalanx.planner.profile import SoftwareProfile, profile, profiles

SHAPE = Shape.load("8b")
COMPUTING = {"compute": 1.0}


def _amounts(
    where: str = "h100x8",
    text: str = "dp8 zero1 bf16",
    what: SoftwareProfile | None = None,
    shape: Shape = SHAPE,
    sequence: int = 8192,
    parts: Mapping[str, float] = COMPUTING,
) -> dict[str, float]:
    case = Case(shape, Layout.parse(text), 1.0, sequence)
    found = amounts(
        case, hardware_of(cluster(where)), what or profile("nemo"), parts
    )
    return {name: amount for name, amount in found.items() if amount}


def _range(
    where: str, text: str, what: SoftwareProfile
) -> tuple[float, float]:
    case = Case(SHAPE, Layout.parse(text), 1.0, 8192)
    found = interval(case, hardware_of(cluster(where)), what, COMPUTING)
    return found.low, found.high


def test_each_cause_applies_where_it_is_told_and_nowhere_else() -> None:
    assert _amounts() == {"base": 1.0}
    assert _amounts(what=profile("default")) == {"base": 1.0, "software": 1.0}
    assert _amounts(text="dp2 tp4 seq bf16 fp8")["narrow"] == 1.0
    assert _amounts(shape=Shape.load("8x7b"))["experts"] == 1.0
    assert _amounts(text="dp8 zero1 bf16 offload:optimizer")["offload"] == 1.0
    # doublings of eight devices
    assert _amounts("h100x64", "dp64 bf16")["scale"] == 3.0
    # doublings of a server
    assert _amounts("h100x64", "tp32 dp2 seq bf16")["tensor"] == 2.0
    half = {
        "compute": 1.0,
        "tensor": 0.25,
        "data": 0.5,
        "pipe": 0.25,
        "bubble": 0.0,
    }
    assert _amounts(parts=half)["messages"] == 0.5


def test_what_nobody_measured_of_a_device_counts_by_its_part_of_the_work() -> (
    None
):
    b200 = _amounts("b200x8")
    # 6 s h l beside 6 N of a token.
    attention = 8192 * 4096 * 32 / (8192 * 4096 * 32 + SHAPE.active)
    assert b200 == {
        "base": 1.0,
        "device": 1.0,
        "attention": pytest.approx(attention),
    }
    assert _amounts("b200x8", sequence=1 << 18)["attention"] > 0.8
    # Scores in memory are matmuls, which were measured.
    assert "attention" not in _amounts(
        "b200x8", what=replace(profile("nemo"), attention="scores")
    )
    mi300x = _amounts("mi300xx8", "dp8 bf16 fp8")
    assert mi300x["matmul"] == pytest.approx(1 - attention)
    assert "matmul" not in _amounts("mi300xx8", "dp8 bf16")


def test_a_range_is_the_root_of_the_squares_of_its_causes_and_names_the_widest() -> (
    None
):
    case = Case(SHAPE, Layout.parse("dp64 bf16"), 1.0, 8192)
    found = interval(
        case, hardware_of(cluster("h100x64")), profile("default"), COMPUTING
    )
    below, above = widths().below, widths().above
    names = {"base": 1, "software": 1, "scale": 3}
    assert math.log(found.high) ** 2 == pytest.approx(
        sum((n * above[name]) ** 2 for name, n in names.items())
    )
    assert math.log(found.low) ** 2 == pytest.approx(
        sum((n * below[name]) ** 2 for name, n in names.items())
    )
    assert found.causes[0].name == "software"
    assert "software" in found.cause
    assert found.around(10.0) == (10 * found.low, 10 * found.high)


def test_ranges_grow_with_what_is_unknown() -> None:
    known, unknown = (
        _range("h100x8", "dp8 bf16", profile(name))
        for name in ("nemo", "default")
    )
    assert unknown[0] < known[0] < 1 < known[1] < unknown[1]
    new = _range("b200x8", "dp8 bf16", profile("nemo"))
    many = _range("h100x16384", "dp16384 bf16", profile("nemo"))
    assert new[0] < known[0]
    assert new[1] > known[1]
    assert many[1] > known[1]


def test_every_cause_has_a_width_and_every_device_of_the_list_is_catalogued() -> (
    None
):
    for side in (widths().below, widths().above):
        assert set(side) == set(CAUSES)
        assert all(value > 0 for value in side.values())
    for name in widths().devices:
        assert hardware_of(cluster(f"{name}x8")).ranks == 8
    assert {name for name, each in profiles().items() if not each.known} == {
        "default",
        "compiled",
        "phalanx",
        "llama-3",
        "deepseek",
        "deepspeed",
        "internlm",
        *(
            f"phalanx-{row.name}"
            for row in OPTIMIZERS.values()
            if row.matrices
        ),
    }


# ---- runs of one's own


def _own(
    off: list[float], where: str = "b200x8", text: str = "dp8 bf16"
) -> SoftwareProfile:
    case, hardware = (
        Case(SHAPE, Layout.parse(text), 1.0, 8192),
        hardware_of(cluster(where)),
    )
    base = profile("default")
    before = interval(case, hardware, base, COMPUTING)
    causes = amounts(case, hardware, base, COMPUTING)
    return with_own_range(base, off, [(before, causes)] * len(off))


def test_the_range_of_a_calibrated_profile_is_that_of_its_runs() -> None:
    wide = _range("b200x8", "dp8 bf16", profile("default"))
    few, many = ([0.02, -0.02] * n for n in (1, 20))
    low, high = _range("b200x8", "dp8 bf16", _own(few))
    assert wide[0] < low < 0.97  # two runs that are near by luck
    assert 1.03 < high < wide[1]
    low, high = _range("b200x8", "dp8 bf16", _own(many))
    # Forty runs with a spread of 2 %: 1.28 of it on either side, and a little for the range before.
    assert (low, high) == pytest.approx((0.95, 1.05), abs=0.02)
    # Runs that are off by more than was expected make the range wider than it was.
    assert _range("b200x8", "dp8 bf16", _own([0.5, -0.6, 0.7]))[1] > wide[1]
    assert _own([0.1]) == profile("default")  # one run cannot be left out


def test_causes_that_go_beyond_the_calibrating_runs_still_count() -> None:
    own = _own([0.02, -0.02] * 5)
    near = _range("b200x8", "dp8 bf16", own)
    assert _range("b200x64", "dp64 bf16", own)[1] > near[1]
    assert _range("b200x64", "tp64 seq bf16", own)[1] > 1.2 * near[1]
    # Fewer causes than the runs had are not narrower: those runs are all that is known.
    assert _range("h100x8", "dp8 bf16", own) == near
    wider = _own([0.02, -0.02] * 5, "h100x64", "dp64 bf16")
    assert (
        _range("b200x64", "dp64 bf16", wider)[0]
        < _range("h100x64", "dp64 bf16", wider)[0]
    )


def test_a_written_profile_brings_its_range_back(tmp_path: Path) -> None:
    from phalanx.layout.codec import dump

    own, path = _own([0.02, -0.03, 0.05]), tmp_path / "own.toml"
    path.write_text(dump(own, short=True))
    assert _range("b200x8", "dp8 bf16", profile(str(path))) == _range(
        "b200x8", "dp8 bf16", own
    )
    path.write_text('own_runs = 2\nown_causes = ["scale"]\n')
    with pytest.raises(
        MachineError, match="names 1 causes, and own_amounts has 0 numbers"
    ):
        profile(str(path))


@pytest.mark.parametrize(
    ("degrees", "exact"),
    [(3, 1.638), (4, 1.533), (6, 1.440), (11, 1.363), (30, 1.310)],
)
def test_students_quantile_is_that_of_tables(
    degrees: int, exact: float
) -> None:
    assert module._student(degrees) == pytest.approx(exact, rel=0.01)
