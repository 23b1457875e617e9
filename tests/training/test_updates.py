"""Updates of flat runs against torch's optimizers under torch's loss scaler, with overflows at any step; the
scale of gradients by hand; and the norm in the precision that it is documented to have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.parallel.data import Segment
from phalanx.training.optimizer import AdamW, Scale, Sgd, Update
from phalanx.training.precision import LossScale
from phalanx.training.totals import norms_of, sum_of_squares

SIZE = 24  # of which the first 16 decay


class FlatUnit:
    """What an update needs of a unit: a flat home, its runs, and a gradient for each step."""

    plain = False

    def __init__(self, start: Tensor) -> None:
        self.home = start.clone()
        self.gradient = torch.empty(0)
        self.refreshed = self.spent = 0

    def own_segments(self) -> list[Segment]:
        return [
            Segment(0, 16, "", decay=True, rate=0.0),
            Segment(16, SIZE, "", decay=False, rate=0.0),
        ]

    def gradients(self, runs: Sequence[slice]) -> list[Tensor]:
        return [self.gradient[run].clone() for run in runs]

    def spend(self) -> None:
        self.spent += 1

    def refresh(self) -> None:
        self.refreshed += 1


def of_torch(
    kind: AdamW | Sgd, start: Tensor
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    weights = [
        nn.Parameter(start[:16].clone()),
        nn.Parameter(start[16:].clone()),
    ]
    groups = [
        {"params": weights[:1], "weight_decay": kind.decay},
        {"params": weights[1:], "weight_decay": 0.0},
    ]
    if isinstance(kind, Sgd):
        return torch.optim.SGD(groups, lr=1.0, momentum=kind.momentum), weights
    betas = kind.beta1, kind.beta2
    return torch.optim.AdamW(
        groups, lr=1.0, betas=betas, eps=kind.eps
    ), weights


def norm_of(x: Tensor) -> Tensor:
    return x.double().norm().view(1)


KINDS = [AdamW(0.8, 0.9, 1e-3, 0.2), Sgd(0.9, 0.1), Sgd(0.0, 0.1)]


@pytest.mark.parametrize("kind", KINDS, ids=["adamw", "momentum", "sgd"])
@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1), (2, 3), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_torchs_under_its_scaler_with_overflows_at_any_step(
    kind: AdamW | Sgd, bad: tuple[int, ...], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=draw, dtype=dtype)
    unit = FlatUnit(start)
    update = Update(unit, kind)  # type: ignore[arg-type]
    optimizer, weights = of_torch(kind, start)
    ours, scaler = (
        LossScale(64.0, 2),
        torch.amp.GradScaler("cpu", 64.0, growth_interval=2),
    )
    for step in range(6):
        lr, clip = 0.1 / (step + 1), (0.5, 0.0, 1e3)[step % 3]
        gradient = torch.randn(SIZE, generator=draw, dtype=dtype)
        scaled = gradient * ours.scale
        if step in bad:
            scaled[5 + step] = math.inf
        before = unit.home.clone()
        states = [
            {k: x.clone() for k, x in each.items()}
            for each in update.state.values()
        ]
        unit.gradient = scaled.clone()
        norm = norm_of(scaled) / ours.scale
        update(lr, Scale.of(norm, clip, ours.scale))
        if step in bad:
            assert torch.equal(unit.home, before)
            for each, old in zip(update.state.values(), states, strict=False):
                assert all(torch.equal(each[k], x) for k, x in old.items())
        # torch: unscale, clip, and its scaler decides on the step.
        for group in optimizer.param_groups:
            group["lr"] = lr
        both = torch.cat([weight.view(-1) for weight in weights])
        scaler.scale((both * gradient).sum()).backward()
        if step in bad:
            grad = weights[0].grad
            assert grad is not None
            grad[5 + step] = math.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, clip or math.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ours.saw(finite=bool(norm.isfinite()))
        assert ours.scale == scaler.get_scale()
        wanted = torch.cat([weight.detach().view(-1) for weight in weights])
        torch.testing.assert_close(
            unit.home,
            wanted,
            rtol=1e-5 if dtype == torch.float32 else 1e-12,
            atol=0,
        )
    assert unit.spent == unit.refreshed == 6
    if isinstance(kind, AdamW):
        assert {float(s["step"]) for s in update.state.values()} == {
            6.0 - len(bad)
        }


@pytest.mark.parametrize(
    ("norm", "clip", "loss_scale", "factor"),
    [
        (4.0, 1.0, 1.0, 1 / (4 + 1e-6)),  # larger than the limit
        (0.5, 1.0, 1.0, 1.0),  # smaller: never scaled up
        (1e-30, 1.0, 1.0, 1.0),
        (0.0, 1.0, 1.0, 1.0),
        (4.0, 0.0, 1.0, 1.0),  # no limit
        (4.0, 1.0, 1024.0, 1 / (4 + 1e-6) / 1024),
        (0.5, 1.0, 1024.0, 1 / 1024),
        (4.0, 0.0, 1024.0, 1 / 1024),
    ],
)
def test_gradients_are_scaled_down_to_the_limit_and_never_up(
    norm: float, clip: float, loss_scale: float, factor: float
) -> None:
    scale = Scale.of(
        torch.tensor([norm], dtype=torch.float64), clip, loss_scale
    )
    assert float(scale.factor) == pytest.approx(factor, rel=1e-14)
    assert float(scale.divisor) == pytest.approx(1 / factor, rel=1e-7)
    assert (float(scale.skip), float(scale.done)) == (0.0, 1.0)
    assert (scale.factor.dtype, scale.divisor.dtype) == (
        torch.float64,
        torch.float32,
    )


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_norm_that_is_not_finite_skips(norm: float, clip: float) -> None:
    scale = Scale.of(torch.tensor([norm], dtype=torch.float64), clip, 2.0)
    assert (float(scale.skip), float(scale.done)) == (1.0, 0.0)


# ---- the norm


def unit_of(*tensors: Tensor, reduce: torch.dtype = torch.float32) -> Any:
    device = torch.device("cpu")
    return SimpleNamespace(
        counted=lambda: list(tensors),
        precision=SimpleNamespace(reduce=reduce),
        pool=SimpleNamespace(device=device),
    )


def squares(*tensors: Tensor, reduce: torch.dtype = torch.float32) -> float:
    return float(
        sum_of_squares(
            [norms_of(unit_of(*tensors, reduce=reduce))], torch.device("cpu")
        )
    )


def test_squares_of_float32_gradients_are_added_up_in_float64() -> None:
    """2^28 + 1 has no float32: a large and a small weight, each a run of its own."""
    large, small = torch.tensor([2.0**14]), torch.tensor([1.0])
    assert squares(large, small) == 2.0**28 + 1
    assert squares(*[large, *[small] * 9]) == 2.0**28 + 9
    # Runs of one flat tensor of 1024 numbers each.
    flat = torch.zeros(3 * 1024)
    flat[0], flat[1024], flat[2048] = 2.0**14, 1.0, 2.0
    assert squares(flat) == 2.0**28 + 5


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 2049, 1 << 21])
@pytest.mark.parametrize("reduce", [torch.float32, torch.float64])
def test_the_norm_is_torchs_in_float64_whatever_the_size(
    size: int, reduce: torch.dtype
) -> None:
    x = torch.randn(
        size,
        generator=torch.Generator().manual_seed(size),
        dtype=torch.float64,
    )
    x = x.to(reduce)
    exact = float(x.double().square().sum())
    # The norm of each run of 1,024 is rounded to float32 once; over many runs that averages out.
    bound = (
        1e-14 if reduce == torch.float64 else 3e-7 if size < 1 << 14 else 1e-7
    )
    assert squares(x, reduce=reduce) == pytest.approx(exact, rel=bound)


def test_a_matrix_counts_each_of_its_rows() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert squares(x) == pytest.approx(sum(n * n for n in range(12)), rel=1e-6)
    assert squares(torch.empty(0), torch.empty(0, 4), x) == pytest.approx(
        506, rel=1e-6
    )
    assert squares() == 0.0


def test_one_number_that_is_not_finite_makes_the_sum_so() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(5000)
        x[4999] = bad
        assert not math.isfinite(squares(x))
