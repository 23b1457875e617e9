"""Learning-rate schedules against tables worked out by hand, closed forms and torch's schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from phalanx.layout.optimizers import OptimizerChoice
from phalanx.training.optimizer import learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    """The rate of every step of a run."""
    choice = OptimizerChoice(**keys)  # type: ignore[arg-type]
    return [learning_rate(choice, step, steps) for step in range(steps)]


# ---- tables by hand: a peak of 1 and an end of 0, so that a rate is the share of the peak

TABLES: list[tuple[str, int, dict[str, int], list[float]]] = [
    ("linear", 4, {}, [3 / 4, 2 / 4, 1 / 4, 0]),
    ("linear", 5, {"warmup_steps": 1}, [1, 3 / 4, 2 / 4, 1 / 4, 0]),
    ("linear", 6, {"warmup_steps": 3}, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0]),
    # cos(pi / 4) = sqrt(1 / 2)
    ("cosine", 4, {}, [(1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2, 0]),
    ("cosine", 5, {"warmup_steps": 2}, [1 / 2, 1, 3 / 4, 1 / 4, 0]),
    ("wsd", 5, {"decay_steps": 2}, [1, 1, 1, 1 / 2, 0]),
    (
        "wsd",
        6,
        {"warmup_steps": 2, "decay_steps": 3},
        [1 / 2, 1, 1, 2 / 3, 1 / 3, 0],
    ),
    ("wsd", 4, {"warmup_steps": 3, "decay_steps": 1}, [1 / 3, 2 / 3, 1, 0]),
    ("constant", 4, {}, [1, 1, 1, 1]),
    ("constant", 4, {"warmup_steps": 2}, [1 / 2, 1, 1, 1]),
]
# A tenth of the steps, rounded up, is the tail of `wsd` where no `decay_steps` is given.
TABLES += [
    ("wsd", 3, {}, [1, 1, 0]),
    ("wsd", 10, {}, [1] * 9 + [0]),
    ("wsd", 11, {}, [1] * 9 + [1 / 2, 0]),
    ("wsd", 19, {}, [1] * 17 + [1 / 2, 0]),
    ("wsd", 20, {}, [1] * 18 + [1 / 2, 0]),
    ("wsd", 21, {}, [1] * 18 + [2 / 3, 1 / 3, 0]),
    ("wsd", 25, {"warmup_steps": 1}, [1] * 22 + [2 / 3, 1 / 3, 0]),
    # The rise leaves two steps, and the tail would be three.
    (
        "wsd",
        21,
        {"warmup_steps": 19},
        [n / 19 for n in range(1, 20)] + [1 / 2, 0],
    ),
]


@pytest.mark.parametrize(("schedule", "steps", "keys", "wanted"), TABLES)
def test_every_rate_is_the_one_of_a_table_by_hand(
    schedule: str, steps: int, keys: dict[str, int], wanted: list[float]
) -> None:
    shares = rates(steps, schedule=schedule, lr=1.0, min_lr=0.0, **keys)
    assert shares == pytest.approx(wanted, abs=1e-15)
    # With another peak and another end each share lies between these two, after the rise.
    scaled = rates(steps, schedule=schedule, lr=5.0, min_lr=2.0, **keys)
    rise = keys.get("warmup_steps", 0)
    assert scaled[:rise] == pytest.approx(
        [5.0 * share for share in wanted[:rise]]
    )
    assert scaled[rise:] == pytest.approx(
        [2.0 + 3.0 * share for share in wanted[rise:]]
    )


# ---- closed forms, over every rise of every short run


def cosine(done: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * done)


def linear(done: float) -> float:
    return 1.0 - done


@pytest.mark.parametrize(
    ("schedule", "falling"), [("cosine", cosine), ("linear", linear)]
)
@pytest.mark.parametrize("steps", [1, 2, 7, 16])
def test_a_rise_of_none_some_or_all_steps_ends_at_the_peak_and_the_fall_at_the_end(
    schedule: str, falling: Callable[[float], float], steps: int
) -> None:
    for rise in range(steps + 1):
        found = rates(
            steps, schedule=schedule, lr=2.0, min_lr=0.5, warmup_steps=rise
        )
        up = [2.0 * (step + 1) / rise for step in range(rise)]
        fall = steps - rise
        down = [0.5 + 1.5 * falling((n + 1) / fall) for n in range(fall)]
        assert found == pytest.approx([*up, *down])
        assert found[-1] == pytest.approx(2.0 if rise == steps else 0.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_without_an_end_the_rate_falls_to_a_tenth_of_the_peak(
    schedule: str,
) -> None:
    assert rates(30, schedule=schedule, lr=3.0)[-1] == pytest.approx(0.3)
    assert rates(30, schedule=schedule, lr=3.0, min_lr=0.0)[
        -1
    ] == pytest.approx(0.0)


# ---- torch's schedulers, of which epoch n is the rate after n steps


def of_torch(
    scheduler: Callable[[torch.optim.Optimizer], object], steps: int
) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    made: torch.optim.lr_scheduler.LRScheduler = scheduler(optimizer)  # type: ignore[assignment]
    found = []
    for _ in range(steps):
        optimizer.step()
        made.step()
        found.append(made.get_last_lr()[0])
    return found


@pytest.mark.parametrize("steps", [1, 9, 40])
def test_rates_are_those_of_torchs_schedulers(steps: int) -> None:
    torchs = torch.optim.lr_scheduler
    annealed = of_torch(
        lambda o: torchs.CosineAnnealingLR(o, steps, eta_min=0.5), steps
    )
    assert rates(
        steps, schedule="cosine", lr=2.0, min_lr=0.5
    ) == pytest.approx(annealed)
    falling = of_torch(
        lambda o: torchs.LinearLR(o, 1.0, 0.25, total_iters=steps), steps
    )
    assert rates(
        steps, schedule="linear", lr=2.0, min_lr=0.5
    ) == pytest.approx(falling)
    # A rise of all steps, from zero, is the same for every schedule.
    rising = of_torch(
        lambda o: torchs.LambdaLR(o, lambda epoch: epoch / steps), steps
    )
    for schedule in ("cosine", "linear", "wsd", "constant"):
        assert rates(
            steps, schedule=schedule, lr=2.0, warmup_steps=steps
        ) == pytest.approx(rising)
