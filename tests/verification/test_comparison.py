"""The comparison itself, on accounts of trainings written by hand: each quantity that is off is the first
that is named, bounds are where the documentation puts them, and nothing that differs is passed over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.layout import Layout
from phalanx.verification import Difference, Trace, TracedStep, compare
from phalanx.verification.compare import bounds_of
from phalanx.verification.reference import Mismatch
from phalanx.verification.trial import Setting
from phalanx.verification.verify import Truth, judge

RATE = 0.01


def rate(step: int) -> float:
    return RATE


def tensors(*numbers: float) -> dict[str, Tensor]:
    """Two weights; `b` comes last in the model."""
    whole = torch.tensor(numbers, dtype=torch.float64)
    return {"a": whole[:2], "b": whole[2:]}


def account() -> Trace:
    """Two steps of a model of two pieces, with large and small numbers in every tensor."""
    steps = [
        TracedStep(
            3.0, 2.0, tensors(4.0, -0.5, 1.0, -8.0), tensors(0.3, -2.0, 0.001, 0.002),
            {"embed": torch.tensor([1.0, -2.0]).double(), "head": torch.tensor([0.5]).double()},
            scale=1024.0, logged=3.0,
            routes={"head": torch.tensor([[[0, 2]]])}, gaps={"head": torch.tensor([[0.5]])},
        )
        for _ in range(2)
    ]  # fmt: skip
    return Trace(tensors(0.5, -1.0, 0.0, 0.25), steps, validation=4.0)


Change = Callable[[float], Trace]


def in_step(number: int, **new: object) -> Trace:
    plain = account()
    plain.steps[number] = replace(plain.steps[number], **new)  # type: ignore[arg-type]
    return plain


def in_tensor(number: int, field: str, name: str, at: int, by: float) -> Trace:
    whole = dict(getattr(account().steps[number], field))
    whole[name] = whole[name].clone()
    whole[name][at] += by
    return in_step(number, **{field: whole})


def start_off(by: float) -> Trace:
    plain = account()
    plain.start["b"][1] += by
    return plain


# What is off, by a multiple of the scale on which it is compared; where it is, and that scale.
QUANTITIES: list[tuple[str, str, int, float, Change]] = [
    (
        "output",
        "embed[1]",
        0,
        2.0,
        lambda by: in_tensor(0, "outputs", "embed", 1, by),
    ),
    (
        "output",
        "head[0]",
        1,
        0.5,
        lambda by: in_tensor(1, "outputs", "head", 0, by),
    ),
    ("loss", "", 0, 3.0, lambda by: in_step(0, loss=3.0 + by)),
    ("loss", "", 1, 3.0, lambda by: in_step(1, loss=3.0 + by)),
    (
        "gradient",
        "b[0]",
        0,
        8.0,
        lambda by: in_tensor(0, "gradients", "b", 0, by),
    ),
    (
        "gradient",
        "a[1]",
        1,
        4.0,
        lambda by: in_tensor(1, "gradients", "a", 1, by),
    ),
    ("norm", "", 1, 2.0, lambda by: in_step(1, norm=2.0 + by)),
    ("logged loss", "", 0, 3.0, lambda by: in_step(0, logged=3.0 + by)),
    ("weight", "a[0]", 0, 2.0, lambda by: in_tensor(0, "weights", "a", 0, by)),
    # A weight below the rate is compared on the scale of the rate.
    (
        "weight",
        "b[1]",
        1,
        RATE,
        lambda by: in_tensor(1, "weights", "b", 1, by),
    ),
    (
        "validation loss",
        "",
        2,
        4.0,
        lambda by: replace(account(), validation=4.0 + by),
    ),
]


def first(got: Trace, want: Trace | None = None) -> Difference | None:
    found = compare(got, want or account(), rate)
    return next((each for each in found if not each.agrees), None)


def named(difference: Difference) -> str:
    return (
        f"{difference.name}{list(difference.element)}"
        if difference.name
        else ""
    )


@pytest.mark.parametrize(
    ("what", "where", "step", "scale", "change"),
    QUANTITIES,
    ids=lambda x: str(x)[:20],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_quantity_may_be_off_by_1e_10_of_its_scale_and_by_no_more(
    what: str, where: str, step: int, scale: float, change: Change, sign: float
) -> None:
    assert first(change(0.9e-10 * scale * sign)) is None
    found = first(change(1.1e-10 * scale * sign))
    assert found is not None
    assert (found.what, named(found), found.step) == (what, where, step)
    assert found.error == pytest.approx(1.1e-10, rel=1e-3)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("what", "where", "step", "scale", "change"),
    QUANTITIES,
    ids=lambda x: str(x)[:20],
)
def test_a_quantity_that_is_not_finite_never_agrees(
    what: str,
    where: str,
    step: int,
    scale: float,
    change: Change,
    wrong: float,
) -> None:
    found = first(change(wrong))
    assert found is not None
    assert (found.what, named(found), found.step) == (what, where, step)


def test_starts_and_loss_scales_must_be_equal_to_the_bit() -> None:
    found = first(start_off(2.0**-54))  # a unit in the last place of 0.25
    assert found is not None
    assert (found.what, named(found), found.allowed) == ("start", "b[1]", 0.0)
    found = first(in_step(1, scale=math.nextafter(1024.0, 2000.0)))
    assert found is not None
    assert (found.what, found.step, found.allowed) == ("loss scale", 1, 0.0)


def test_a_token_that_goes_to_other_experts_is_named_before_its_output() -> (
    None
):
    other = in_step(1, routes={"head": torch.tensor([[[0, 1]]])})
    found = first(other)
    assert found is not None
    assert (found.what, named(found), found.step) == (
        "routing",
        "head[0, 0, 1]",
        1,
    )
    nobody = first(in_step(0, routes={}))
    assert nobody is not None
    assert (nobody.what, nobody.got) == ("routing", -1.0)
    # Scores that are nearly equal: the text says that rounding decides.
    near = account()
    near.steps[1] = replace(
        near.steps[1], gaps={"head": torch.tensor([[1e-12]])}
    )
    found = first(replace(other), near)
    assert found is not None
    assert "rounding decides" in found.hint


@pytest.mark.parametrize("field", ["outputs", "gradients", "weights"])
def test_a_tensor_that_no_rank_has_or_of_another_shape_is_named(
    field: str,
) -> None:
    whole = getattr(account().steps[1], field)
    missing = dict(list(whole.items())[1:])
    for wrong in (missing, whole | {next(iter(whole)): torch.zeros(3)}):
        found = first(in_step(1, **{field: wrong}))
        assert found is not None
        assert (found.what, found.hint) == (
            field.removesuffix("s"),
            "no rank has it",
        )
        assert found.error == math.inf


def test_a_validation_that_is_missing_is_named() -> None:
    found = first(replace(account(), validation=None))
    assert found is not None
    assert found.what == "validation loss"


NUMBERS = ("norm", "loss scale", "logged loss", "validation loss")


@pytest.mark.parametrize("what", ["start", "gradient", "weight", *NUMBERS])
def test_ranks_that_have_different_numbers_are_named_with_both(
    what: str,
) -> None:
    name, element = ("", ()) if what in NUMBERS else ("b", (1,))
    apart = Mismatch(what, name, element, (0, 3), (1.0, 1.0 + 2.0**-52))
    step = {"start": 0, "validation loss": 1}.get(what, 1)
    found = first(in_step(step, mismatches=(apart,)))
    assert found is not None
    assert (found.what, found.ranks) == (what, (0, 3))
    assert "is 1 on rank 0 and 1.0000000000000002 on rank 3" in str(found)
    # Also in a narrow precision, in which a weight is compared by how far it has come.
    bounds = bounds_of(account(), [], rate, torch.bfloat16)
    found_narrow = compare(
        in_step(step, mismatches=(apart,)), account(), rate, bounds
    )
    assert [d.ranks for d in found_narrow if not d.agrees] == [(0, 3)]


def test_what_is_made_first_is_named_first() -> None:
    """Every quantity is off: as a step goes on, the first is passed over and the next is named."""
    order = [
        "start", "routing", "output", "loss", "gradient", "norm", "loss scale", "logged loss", "weight",
        "validation loss",
    ]  # fmt: skip
    step = account().steps[0]
    off: dict[str, dict[str, object]] = {
        "routing": {"routes": {"head": torch.tensor([[[1, 1]]])}},
        "output": {
            "outputs": {name: x + 1 for name, x in step.outputs.items()}
        },
        "loss": {"loss": 9.0},
        "gradient": {
            "gradients": {name: x + 1 for name, x in step.gradients.items()}
        },
        "norm": {"norm": 9.0},
        "loss scale": {"scale": 1.0},
        "logged loss": {"logged": 9.0},
        "weight": {
            "weights": {name: x + 1 for name, x in step.weights.items()}
        },
    }
    for number, what in enumerate(order):
        changes: dict[str, object] = {}
        for each in order[number:]:
            changes |= off.get(each, {})
        got = replace(in_step(0, **changes), validation=9.0)
        if number == 0:
            got.start["a"][0] += 1
        # Of the same piece; the piece before has no routers.
        if what == "routing":
            got.steps[0].outputs["embed"] = step.outputs["embed"]
        found = first(got)
        assert found is not None
        assert found.what == what
    # Backward comes from the last weight to the first.
    found = first(
        in_step(0, gradients={n: x + 1 for n, x in step.gradients.items()})
    )
    assert found is not None
    assert found.name == "b"


def test_a_gradient_of_zero_is_compared_with_a_millionth_of_the_norm() -> None:
    want = in_step(0, gradients=tensors(0.0, 0.0, 1.0, -7.0), norm=8.0)
    for by, agrees in ((0.9e-10 * 8e-6, True), (1.1e-10 * 8e-6, False)):
        got = in_step(0, gradients=tensors(0.0, by, 1.0, -7.0), norm=8.0)
        assert (first(got, want) is None) == agrees


def test_a_step_without_any_gradient_agrees_with_none_and_with_nothing_else() -> (
    None
):
    want = in_step(
        1,
        loss=0.0,
        logged=0.0,
        norm=0.0,
        gradients=tensors(0.0, 0.0, 0.0, 0.0),
    )
    assert first(want, want) is None
    for wrong in (
        replace(want.steps[1], loss=1e-20),
        replace(want.steps[1], norm=-1e-20),
        replace(want.steps[1], gradients=tensors(0.0, 1e-300, 0.0, 0.0)),
    ):
        assert (
            first(replace(want, steps=[want.steps[0], wrong]), want)
            is not None
        )


def test_a_skipped_step_agrees_where_neither_is_finite_and_its_weights_are_compared() -> (
    None
):
    bad = {"loss": math.inf, "norm": math.nan, "logged": math.inf}
    want = in_step(0, **bad)
    other = {"loss": math.nan, "norm": math.inf, "logged": math.nan}
    assert first(in_step(0, **other), want) is None
    assert first(account(), want) is not None
    moved = {name: x + 1e-9 for name, x in want.steps[0].weights.items()}
    found = first(in_step(0, **bad, weights=moved), want)
    assert found is not None
    assert found.what == "weight"


@pytest.mark.parametrize(
    ("ratio", "hint"),
    [
        (2.0, "2 times as much"),
        (16.0, "16 times as much"),
        (1 / 3, "1/3 of it"),
        (1.5, ""),
    ],
)
def test_a_wrong_factor_is_explained(ratio: float, hint: str) -> None:
    found = first(in_step(0, loss=3.0 * ratio))
    assert found is not None
    assert found.hint.startswith(hint)
    assert bool(found.hint) == bool(hint)


# ---- the verdict


def test_the_verdict_has_the_first_difference_and_the_largest_error_of_all() -> (
    None
):
    truth, setting = Truth(account()), Setting(lambda step: {}, rate=rate)
    clean = judge(Layout.parse("dp2"), account(), truth, setting)
    assert (clean.passed, clean.max_rel_error, clean.first_difference) == (
        True,
        0.0,
        "",
    )
    near = judge(
        Layout.parse("dp2"), in_step(1, loss=3.0 * (1 + 5e-11)), truth, setting
    )
    assert near.passed
    assert near.max_rel_error == pytest.approx(5e-11, rel=1e-4)
    assert near.of_allowed == pytest.approx(0.5, rel=1e-4)
    both = in_step(1, loss=3.3, norm=4.0)
    wrong = judge(Layout.parse("dp2 tp2"), both, truth, setting)
    assert not wrong.passed
    assert (wrong.layout, wrong.ranks) == ("dp2 tp2", 4)
    assert wrong.max_rel_error == pytest.approx(1.0)
    assert wrong.of_allowed == pytest.approx(1e10)
    assert wrong.first_difference.startswith(
        "step 1: the loss is 3.3, one process has 3;"
    )


# ---- bounds in a narrow precision


def test_bounds_are_twice_the_largest_change_of_any_nudged_training_and_a_rounding() -> (
    None
):
    """By hand, for bfloat16, whose unit in the last place is 2^-8 (torch calls 2^-7 eps)."""
    least = 2.0**-7 / 16 + 4 * 2.0**-23
    nudged = [
        in_step(1, loss=3.0 * 1.01),
        in_step(1, loss=3.0 * 0.97),
        in_step(0, norm=2.02),
    ]
    bounds = bounds_of(account(), nudged, rate, torch.bfloat16)
    assert bounds[1, "loss", ""] == pytest.approx(2 * 0.03 + least)
    assert bounds[0, "loss", ""] == pytest.approx(least)
    # Norms have the largest change of all steps.
    for number in (0, 1):
        assert bounds[number, "norm", ""] == pytest.approx(2 * 0.01 + least)
    # Tensors go by the root of the sum of squares: (3, 4) beside (4, -0.5) and (1, -8).
    step = account().steps[0]
    changed = {
        "a": step.gradients["a"] + torch.tensor([3.0, 4.0]),
        "b": step.gradients["b"],
    }
    bounds = bounds_of(
        account(), [in_step(0, gradients=changed)], rate, torch.bfloat16
    )
    assert bounds[0, "gradient", "a"] == pytest.approx(
        2 * 5 / math.hypot(4.0, 0.5) + least
    )
    assert bounds[0, "gradient", "b"] == pytest.approx(least)


def test_an_update_may_be_off_by_the_rounding_of_the_weight_that_it_moves() -> (
    None
):
    least = 2.0**-7 / 16 + 4 * 2.0**-23
    bounds = bounds_of(account(), [], rate, torch.bfloat16)
    # `a` came from (0.5, -1) to (0.3, -2): by (-0.2, -1), beside weights of (0.3, -2).
    rounding = 2.0**-23 * math.hypot(0.3, 2.0) / math.hypot(0.2, 1.0)
    assert bounds[0, "update", "a"] == pytest.approx(least + rounding)
    assert not any(what == "weight" for _, what, _ in bounds)


def test_in_a_narrow_precision_each_quantity_keeps_its_own_bound() -> None:
    bounds = bounds_of(
        account(), [in_step(0, loss=3.0 * 1.01)], rate, torch.bfloat16
    )
    wanted = {
        (0, "loss", ""): lambda by: in_step(0, loss=3.0 * (1 + by)),
        (1, "loss", ""): lambda by: in_step(1, loss=3.0 * (1 - by)),
        (1, "gradient", "b"): lambda by: in_tensor(
            1, "gradients", "b", 0, by * math.hypot(1.0, 8.0)
        ),
        (1, "update", "b"): lambda by: in_tensor(
            1, "weights", "b", 1, by * math.hypot(0.001, 0.248)
        ),
        (0, "output", "embed"): lambda by: in_tensor(
            0, "outputs", "embed", 0, by * math.hypot(1, 2)
        ),
        (2, "validation loss", ""): lambda by: replace(
            account(), validation=4.0 * (1 + by)
        ),
    }
    for key, change in wanted.items():
        for share, agrees in ((0.99, True), (1.01, False)):
            found = compare(
                change(share * bounds[key]), account(), rate, bounds
            )
            off = [(d.step, d.what, d.name) for d in found if not d.agrees]
            assert off == ([] if agrees else [key])
    # Starts are computed in no dtype.
    assert [
        d.what
        for d in compare(start_off(1e-9), account(), rate, bounds)
        if not d.agrees
    ][:1] == ["start"]
