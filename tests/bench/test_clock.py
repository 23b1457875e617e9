"""The clock: what it runs, when it stops, and whose time counts. Times are said, not taken."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.bench import Clock, Timing
from phalanx.bench import clock as module
from phalanx.comm import World, launch


class Pretend:
    """A clock of the system's on which only works move time on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, takes: float, done: list[float]) -> object:
        def run() -> None:
            self.now += takes
            done.append(takes)

        return run


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    pretend = Pretend()
    monkeypatch.setattr(module, "time", pretend)
    return pretend


def test_what_is_short_is_repeated_until_a_reading_is_long_enough(
    pretend: Pretend,
) -> None:
    done: list[float] = []
    (timing,) = Clock().measure(pretend.work(1e-4, done), repeats=5, warm_up=2)  # type: ignore[arg-type]
    assert timing.calls == 10
    assert timing.warm_up == 2
    assert len(timing.readings) == 5
    assert timing.median == pytest.approx(1e-4)
    assert len(done) == 2 + 5 * 10


def test_works_are_read_in_turn(pretend: Pretend) -> None:
    done: list[float] = []
    works = [pretend.work(takes, done) for takes in (0.1, 0.2, 0.3)]
    found = Clock().measure(*works, repeats=4, warm_up=1)  # type: ignore[arg-type]
    assert done == [0.1, 0.2, 0.3] * 5
    assert [t.median for t in found] == pytest.approx([0.1, 0.2, 0.3])


def test_what_is_long_is_read_once_and_not_warmed_up_again(
    pretend: Pretend,
) -> None:
    done: list[float] = []
    (timing,) = Clock().measure(
        pretend.work(30.0, done), repeats=7, warm_up=3, limit=5.0
    )  # type: ignore[arg-type]
    assert (len(timing.readings), timing.calls, timing.warm_up) == (1, 1, 1)
    assert len(done) == 2


def test_a_timing_tells_its_median_and_spread() -> None:
    timing = Timing((3.0, 1.0, 2.0, 9.0, 2.5), 1, 1)
    assert (timing.least, timing.median, timing.most) == (1.0, 2.5, 9.0)


def uneven(world: World) -> tuple[list[float], list[float]]:
    clock = Clock("cpu", world.split("all", [range(world.size)]))
    agreed = clock.agree([world.rank, 10.0 - world.rank])
    (timing,) = clock.measure(lambda: time.perf_counter(), repeats=3)
    return agreed, list(timing.readings)


def test_the_slowest_rank_counts_and_all_ranks_read_the_same() -> None:
    found = launch(uneven, 3, backend="threads")
    assert [agreed for agreed, _ in found] == [[2.0, 10.0]] * 3
    assert found[0][1] == found[1][1] == found[2][1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_clock_that_does_not_wait_claims_too_little_on_a_gpu() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    clock = Clock("cuda")
    (timing,) = clock.measure(lambda: x @ x)
    assert clock.claimed(lambda: x @ x) < timing.median / 2
