"""Which ranks are called slow, from numbers by hand."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from phalanx.program import Op, Span, ops
from phalanx.training import stragglers as stragglers_module
from phalanx.training.stragglers import (
    DATA,
    NAMES,
    OwnTime,
    Stragglers,
    _medians_of_others,
)


def row(total: float, **parts: float) -> list[float]:
    return [total, *(parts.get(name, 0.0) for name in NAMES)]


def test_own_time_is_that_of_a_step_without_what_it_waited_in_calls() -> None:
    own = OwnTime()
    spans = [
        Span(0, ops.COMPUTE, Op(ops.FORWARD, 0, 0), 1.0, 3.0),
        Span(0, ops.COMPUTE, Op(ops.BACKWARD, 0, 0), 3.0, 6.0),
        Span(0, "gather", Op(ops.GATHER, 0, 0), 0.0, 6.0),
    ]
    own.add(7.0, 1.0, spans, [(2.0, 2.5), (5.5, 6.5)])
    own.add(7.0, 0.0, (), ())
    total, *parts = own.taken()
    assert total == (7.0 - 1.5 + 7.0) / 2
    taken = {
        name: part for name, part in zip(NAMES, parts, strict=True) if part
    }
    assert taken == {DATA: 0.5, "forward": 0.75, "backward": 1.25}
    assert own.taken() == [0.0] * (1 + len(NAMES))


def test_own_time_on_a_device_is_what_it_computed() -> None:
    """Its host waits nowhere but at the end of the step, and all ranks' steps take equally long."""
    own = OwnTime(queued=True)
    spans = [
        Span(0, ops.COMPUTE, Op(ops.FORWARD, 0, 0), 1.0, 3.0),
        Span(0, ops.COMPUTE, Op(ops.BACKWARD, 0, 0), 4.0, 6.0),
        Span(0, "gather", Op(ops.GATHER, 0, 0), 0.0, 6.0),
    ]
    own.add(9.0, 0.5, spans, [(0.5, 8.5)])
    total, *parts = own.taken()
    assert total == 0.5 + 2.0 + 2.0
    taken = {
        name: part for name, part in zip(NAMES, parts, strict=True) if part
    }
    assert taken == {DATA: 0.5, "forward": 2.0, "backward": 2.0}


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 31])
def test_each_rank_is_compared_with_the_median_of_all_others(
    count: int,
) -> None:
    draw = random.Random(count)
    values = [draw.choice((0.1, 0.2, draw.random())) for _ in range(count)]
    by_hand = [
        statistics.median(values[:i] + values[i + 1 :]) for i in range(count)
    ]
    assert _medians_of_others(np.array(values)).tolist() == pytest.approx(
        by_hand
    )


def test_looking_at_4096_ranks_names_the_slow_one_and_sorts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took 2.9 s of every rank's time at 1,024 ranks: a median of all peers for each rank."""
    sorts: list[int] = []
    whole = stragglers_module._medians_of_others

    def counted(values: np.ndarray) -> np.ndarray:
        sorts.append(len(values))
        return whole(values)

    monkeypatch.setattr(stragglers_module, "_medians_of_others", counted)
    table = [row(0.3, forward=0.3) for _ in range(4096)]
    table[77] = row(9.0, forward=9.0)
    (slow,) = Stragglers(2.0, [0] * 2048 + [1] * 2048).look(table, 1)
    assert slow.rank == 77
    assert sorts == [2048, 2048]


def test_many_slow_ranks_are_named_by_the_slowest_few() -> None:
    table = [row(0.1)] * 60 + [row(10.0 + rank) for rank in range(40)]
    named = [slow.rank for slow in Stragglers(2.0, [0] * 100).look(table, 1)]
    assert named == list(range(99, 91, -1))


def test_a_rank_that_was_slow_once_for_long_is_named_with_its_operations() -> (
    None
):
    stragglers = Stragglers(2.0, [0, 0, 0, 1])
    usual = row(0.3, forward=0.1, backward=0.2)
    assert not list(stragglers.look([usual, usual, usual, row(0.9)], 1))
    (slow,) = stragglers.look(
        [usual, row(20.3, forward=20.1, backward=0.2), usual, row(0.9)], 1
    )
    assert (slow.rank, slow.seconds, slow.usual) == (1, 20.3, 0.3)
    assert slow.operations == {"forward": (20.1, 0.1)}
    assert (
        "rank 1 is slow: 20.3 s of its own work a step, where 300 ms is usual"
        in str(slow)
    )
    assert "forward 20.1 s (100 ms)" in str(slow)


def test_a_little_adds_up_and_noise_does_not() -> None:
    stragglers = Stragglers(2.0, [0, 0])
    lines = [
        list(stragglers.look([row(0.25), row(0.75)], 1)) for _ in range(10)
    ]
    # a quarter of a second each
    assert [len(line) for line in lines] == [0, 0, 0, 0, 1] * 2
    noisy, usual = Stragglers(2.0, [0, 0]), row(0.01)
    for n in range(1000):
        assert not list(
            noisy.look([usual, row(0.035 if n % 3 == 0 else 0.01)], 1)
        )
    assert not list(Stragglers(0.0, [0, 0]).look([usual, row(100.0)], 1))


def test_a_rank_without_peers_is_compared_with_its_own_earlier_steps() -> None:
    stragglers = Stragglers(2.0, [0, 1])
    for _ in range(5):
        assert not list(stragglers.look([row(0.1), row(0.7)], 1))
    (slow,) = stragglers.look([row(0.1), row(9.0)], 1)
    assert (slow.rank, slow.usual) == (1, pytest.approx(0.7))


def test_data_read_ahead_takes_time_where_the_device_had_to_wait_for_it() -> (
    None
):
    own = OwnTime(queued=True)
    spans = [Span(0, ops.COMPUTE, Op(ops.FORWARD, 0, 0), 1.0, 3.0)]
    # Hidden behind two seconds of computing.
    own.add(9.0, 0.5, spans, (), ahead=1.5)
    own.add(9.0, 0.5, spans, (), ahead=6.0)
    total, *parts = own.taken()
    data = (0.5 + 0.5 + 4.0) / 2
    assert total == data + 2.0
    assert dict(zip(NAMES, parts, strict=True))[DATA] == data
