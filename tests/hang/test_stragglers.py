"""Which ranks are called slow, from numbers by hand."""

from __future__ import annotations

import pytest

from phalanx.program import Op, Span, ops
from phalanx.train.stragglers import DATA, NAMES, OwnTime, Stragglers


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
    taken = {name: part for name, part in zip(NAMES, parts, strict=True) if part}
    assert taken == {DATA: 0.5, "forward": 0.75, "backward": 1.25}
    assert own.taken() == [0.0] * (1 + len(NAMES))


def test_a_rank_that_was_slow_once_for_long_is_named_with_its_operations() -> None:
    stragglers = Stragglers(2.0, [0, 0, 0, 1])
    usual = row(0.3, forward=0.1, backward=0.2)
    assert not list(stragglers.look([usual, usual, usual, row(0.9)], 1))
    (slow,) = stragglers.look([usual, row(20.3, forward=20.1, backward=0.2), usual, row(0.9)], 1)
    assert (slow.rank, slow.seconds, slow.usual) == (1, 20.3, 0.3)
    assert slow.operations == {"forward": (20.1, 0.1)}
    assert "rank 1 is slow: 20.3 s of its own work a step, where 300 ms is usual" in str(slow)
    assert "forward 20.1 s (100 ms)" in str(slow)


def test_a_little_adds_up_and_noise_does_not() -> None:
    stragglers = Stragglers(2.0, [0, 0])
    lines = [list(stragglers.look([row(0.25), row(0.75)], 1)) for _ in range(10)]
    assert [len(line) for line in lines] == [0, 0, 0, 0, 1] * 2  # a quarter of a second each
    noisy, usual = Stragglers(2.0, [0, 0]), row(0.01)
    for n in range(1000):
        assert not list(noisy.look([usual, row(0.035 if n % 3 == 0 else 0.01)], 1))
    assert not list(Stragglers(0.0, [0, 0]).look([usual, row(100.0)], 1))


def test_a_rank_without_peers_is_compared_with_its_own_earlier_steps() -> None:
    stragglers = Stragglers(2.0, [0, 1])
    for _ in range(5):
        assert not list(stragglers.look([row(0.1), row(0.7)], 1))
    (slow,) = stragglers.look([row(0.1), row(9.0)], 1)
    assert (slow.rank, slow.usual) == (1, pytest.approx(0.7))
