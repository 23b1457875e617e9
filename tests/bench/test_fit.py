"""Fits against curves that are known."""

from __future__ import annotations

import random
import statistics

import pytest

from phalanx.bench import OPERATIONS, Sample, fit, fit_all, growths
from phalanx.planner import Curve

SIZES = [1 << i for i in range(10, 27)]


def samples(
    curve: Curve, sizes: list[int] = SIZES, noise: float = 0.0
) -> list[Sample]:
    draw = random.Random(0)
    found = []
    for size in sizes:
        time = curve.seconds(size) * (1 + noise * draw.uniform(-1, 1))
        found.append(
            Sample(
                curve.op,
                curve.ranks,
                curve.apart,
                size,
                time,
                time,
                time,
                1,
                True,
            )
        )
    return found


def curve(op: str, ranks: int, form: str, **more: float) -> Curve:
    known = {"latency": 2e-5, "bandwidth": 3e9} | more
    return Curve(
        op,
        "gloo",
        ranks,
        form,
        error=0.0,
        least=SIZES[0],
        most=SIZES[-1],
        **known,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("form", ["ring", "tree"])
def test_a_fit_finds_the_latency_and_bandwidth_that_made_the_times(
    op: str, form: str
) -> None:
    known = curve(op, 4, form)
    found = fit(samples(known), "gloo", form)
    assert found.latency == pytest.approx(known.latency, rel=1e-9)
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=1e-9)
    assert found.error < 1e-9
    assert not found.bend


def test_growth_with_the_ranks_tells_ring_from_tree() -> None:
    for form, other in (("ring", "tree"), ("tree", "ring")):
        known = [
            s
            for n in (2, 4, 8, 16)
            for s in samples(curve("all_reduce", n, form), noise=0.1)
        ]
        (growth,) = growths(known)
        assert growth.better == form
        assert growth.ranks == (2, 4, 8, 16)
        assert getattr(growth, form) < 0.1 < getattr(growth, other)
        assert {c.form for c in fit_all(known, "gloo")} == {form}
    # One group size cannot tell.
    assert growths(samples(curve("all_reduce", 4, "tree"))) == ()


def test_a_bend_is_found_where_bandwidth_changes_and_nowhere_else() -> None:
    bent = curve("all_gather", 2, "ring", bend=1 << 20, beyond=3e8)
    found = fit(samples(bent, noise=0.02), "gloo")
    assert (1 << 18) <= found.bend <= (1 << 22)
    assert found.beyond == pytest.approx(3e8, rel=0.15)
    assert (
        fit(samples(curve("all_gather", 2, "ring"), noise=0.1), "gloo").bend
        == 0
    )


def test_unseen_sizes_are_predicted() -> None:
    for known in (
        curve("all_reduce", 4, "ring"),
        curve("all_reduce", 2, "ring", bend=1 << 20, beyond=3e8),
    ):
        found = fit(samples(known, SIZES[::2], noise=0.2), "gloo")
        off = [
            abs(found.seconds(n) / known.seconds(n) - 1) for n in SIZES[1::2]
        ]
        assert statistics.median(off) < 0.15


def test_flat_and_few_times_still_give_a_finite_curve() -> None:
    flat = [
        Sample("send", 2, 1, n, 1e-4, 1e-4, 1e-4, 1, True) for n in SIZES[:6]
    ]
    found = fit(flat, "gloo")
    assert found.seconds(SIZES[0]) == pytest.approx(1e-4, rel=0.15)
    assert found.seconds(SIZES[-1]) > found.seconds(SIZES[0])
    one = fit(flat[:1], "gloo")
    assert one.seconds(SIZES[0]) == pytest.approx(1e-4)
    falling = [
        Sample("send", 2, 1, n, 1e-3 / (i + 1), 0, 0, 1, True)
        for i, n in enumerate(SIZES)
    ]
    assert 0 < fit(falling, "gloo").bandwidth < float("inf")
