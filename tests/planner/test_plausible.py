"""What no device could do is never printed: every profile on every cluster, and prices broken on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from by_hand import pieces

from phalanx.layout import ByKind, Layout, Shape
from phalanx.planner import cluster
from phalanx.planner.case import Case
from phalanx.planner.hardware import (
    Hardware,
    Network,
    PredictionError,
    hardware_of,
)
from phalanx.planner.piece_price import piece_parts
from phalanx.planner.plausible import refuse_too_long, shortest_step
from phalanx.planner.price import Priced, Units
from phalanx.planner.profile import SoftwareProfile, profile, profiles
from phalanx.planner.step import Choice, choice, predicted

SHAPE = Shape(
    name="small",
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=16,
    ffn=4096,
    vocab=32000,
    sequence=2048,
)
# On one device, inside a server, and over two and three of them.
LAYOUTS = {
    1: ("accum:2", "zero3 accum:2"),
    2: ("dp2 zero1 accum:2", "tp2 seq accum:2", "pp2 1f1b:2"),
    8: ("dp8 accum:2", "dp8 zero3 accum:2", "dp2 pp2 tp2 zero1 seq 1f1b:4", "dp2x4 zero3 accum:2"),
    24: ("dp24 zero1 accum:2", "dp6 tp4 seq zero3 accum:2"),
    16: ("dp16 zero3 accum:2", "dp2x8 zero3 accum:2", "dp4x4 zero1 accum:2", "pp8 dp2 zero1 1f1b:8",
         "cp2 dp8 zero2 accum:2", "dp8 pp2 1f1b:4"),
}  # fmt: skip


def _priced(
    words: str,
    what: SoftwareProfile,
    hardware: Hardware | None = None,
    *,
    tied: bool = True,
) -> Priced:
    layout = Layout.parse(f"{words} bf16")
    hardware = hardware or hardware_of(cluster(f"h100x{layout.ranks}"))
    e, b, h = (
        piece_parts(cost, hardware, what, layout, layout.precision).under(what)
        for cost in pieces(SHAPE, layout, SHAPE.sequence, 1.0)
    )
    case = Case(replace(SHAPE, tied=tied), layout, 1.0, SHAPE.sequence)
    return Priced(
        case, ByKind.equal_blocks(e, b, h, SHAPE.layers), hardware, what
    )


@pytest.mark.parametrize("name", profiles())
def test_every_profile_takes_no_less_than_the_peak_allows_and_no_more_than_a_minute(
    name: str,
) -> None:
    for words in sum(LAYOUTS.values(), ()):
        priced = _priced(words, profile(name))
        step = choice(priced).step
        assert shortest_step(priced.case, priced.hardware) <= step < 60, words


@pytest.mark.parametrize("words", LAYOUTS[8])
def test_one_port_changes_nothing_within_a_server(words: str) -> None:
    one = _priced(words, replace(profile("default"), one_port=True))
    assert choice(one).step == choice(_priced(words, profile("default"))).step


def test_one_port_of_a_server_is_an_eighth_of_all_where_a_group_leaves_it() -> (
    None
):
    layout = Layout.parse("dp64 zero3")
    hardware = hardware_of(cluster("h100x64"))
    size = 1e10
    one, all_ports = (
        Units(layout, hardware, replace(profile("default"), one_port=flag))
        .of(size)
        .gather
        for flag in (True, False)
    )
    assert one == pytest.approx(8 * all_ports, rel=0.02)


def test_a_group_that_no_link_joins_has_no_bandwidth() -> None:
    inside = hardware_of(cluster("h100x8")).network
    with pytest.raises(
        PredictionError, match="no link joins a group of 2 ranks"
    ):
        inside.seconds("all_reduce", 1e9, 2, 8)
    with pytest.raises(PredictionError, match="no link joins"):
        Network(()).seconds("all_gather", 1e9, 8, 1)


@dataclass(frozen=True)
class _Broken:
    """A network on which every message takes the same wrong time."""

    time: float

    def seconds(
        self, op: str, size: float, ranks: float, apart: float
    ) -> float:
        return self.time


@pytest.mark.parametrize("time", [math.inf, math.nan, -1.0])
@pytest.mark.parametrize("words", ["dp8 zero3 accum:2", "dp2 pp2 tp2 1f1b:4"])
def test_a_price_that_is_no_time_is_refused_as_our_mistake(
    words: str, time: float
) -> None:
    hardware = replace(hardware_of(cluster("h100x8")), network=_Broken(time))
    with pytest.raises(
        PredictionError, match=r"impossible.*This is a bug in phalanx"
    ):
        choice(_priced(words, profile("default"), hardware))


def test_bytes_that_are_none_are_refused() -> None:
    for wrong in (math.inf, math.nan, -1e12):
        what = replace(profile("default"), context=wrong)
        with pytest.raises(PredictionError, match="the memory is other"):
            choice(_priced("dp8 accum:2", what))


def test_a_step_that_beats_the_peak_is_refused_unless_the_peak_was_measured() -> (
    None
):
    fast = replace(profile("default"), slower=1e-3, host=0.0)
    hardware = hardware_of(cluster("h100x1"))
    with pytest.raises(
        PredictionError, match=r"an MFU of \d{3,}.*This is a bug in phalanx"
    ):
        choice(_priced("accum:2", fast, hardware))
    assert (
        choice(_priced("accum:2", fast, replace(hardware, measured=True))).step
        > 0
    )


def test_steps_of_more_than_a_day_are_refused_and_the_longest_part_is_named() -> (
    None
):
    priced = _priced("dp8 zero3 accum:2", profile("default"))
    found = choice(priced)

    def of(**more: float) -> Choice:
        return replace(found, parts={**found.parts, **more})

    for slow, words in (
        (of(data=2.6e12), r"100.0% of it is 'data'.*This is a bug in phalanx"),
        (of(compute=90_000.0), "longer than a day"),
    ):
        with pytest.raises(PredictionError, match=words):
            refuse_too_long(slow.case, priced.hardware, slow.parts)
    refuse_too_long(found.case, priced.hardware, found.parts)
    # A batch that is honestly too large is not called a mistake of ours.
    large = replace(priced.case, rows=1e9)
    with pytest.raises(PredictionError) as refused:
        refuse_too_long(large, priced.hardware, of(compute=1e7).parts)
    assert "Plan for fewer tokens" in str(refused.value)
    assert "mistake" not in str(refused.value)


def test_a_timeline_that_never_ends_is_refused() -> None:
    hardware = replace(
        hardware_of(cluster("h100x8")), network=_Broken(math.nan)
    )
    with pytest.raises(PredictionError, match="the timeline is makespan"):
        predicted(_priced("dp8 zero3 accum:2", profile("default"), hardware))
