"""Narrow precision: the bounds come from plain torch alone, clean layouts keep them, mistakes do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from covered import covered
from torch import Tensor

from phalanx.layout import Layout, Shape
from phalanx.parallel import Precision, Unit, build_model
from phalanx.verification import SHAPES, Trace, compare, verify
from phalanx.verification.replay import (
    not_replayed,
    parts_of,
    replay,
    replay_differences,
    rounding_of,
)
from phalanx.verification.trial import Setting
from phalanx.verification.verify import judge, precision_named, truth_of
from seeded import HALVES, setting_of, swapped, trained, truth, verdict_of

pytestmark = pytest.mark.long_tests


@cache
def exact(name: str) -> Trace:
    return truth(name, "float64").trace


def changed(trace: Trace, factor: float) -> Trace:
    """The same training with every gradient multiplied."""
    steps = [
        replace(
            step,
            gradients={name: x * factor for name, x in step.gradients.items()},
        )
        for step in trace.steps
    ]
    return replace(trace, steps=steps)


def vanishing(name: str) -> set[str]:
    """Weights whose true gradient is zero, so that no number in it means anything: a key's bias
    moves all scores of a row alike, and a softmax does not see that."""
    gradients = exact(name).steps[0].gradients
    most = max(float(g.norm()) for g in gradients.values())
    return {n for n, g in gradients.items() if float(g.norm()) < 1e-10 * most}


# Of latents and sinks the default suite compares float64 alone.
LONG = ("latent", "sinks")
# In `ahead`, rounding decides which experts many tokens choose: its bounds of experts are wider than
# their gradients.
CHOSEN = [
    pytest.param(n, marks=[pytest.mark.slow] * (n in LONG))
    for n in SHAPES
    if n != "ahead"
]


# The default suite has each shape in one of the two dtypes.
IN_ONE = {(name, HALVES[n % 2]) for n, name in enumerate(SHAPES)}
REJECTED = [
    pytest.param(
        name,
        dtype,
        marks=[pytest.mark.slow]
        * (name in LONG or (name, dtype) not in IN_ONE),
    )
    for name, dtype in product(SHAPES, HALVES)
    if name != "ahead"
]


@pytest.mark.parametrize(("name", "dtype"), REJECTED)
def test_a_gradient_that_is_zeroed_or_flipped_is_rejected_for_every_weight_and_step(
    name: str, dtype: str
) -> None:
    setting, known, free = (
        setting_of(SHAPES[name], dtype),
        truth(name, dtype),
        vanishing(name),
    )
    assert judge(Layout(), known.trace, known, setting).passed
    assert all(n.endswith("wk.bias") for n in free)
    for factor in (0.0, -1.0):
        wrong = changed(known.trace, factor)
        found = compare(wrong, known.trace, setting.rate, known.bounds)
        gradients = [d for d in found if d.what == "gradient"]
        # One step of three has no gradient: in bfloat16 no targets, in float16 one that overflows.
        taught = [
            n
            for n, s in enumerate(known.trace.steps)
            if s.loss and math.isfinite(s.norm)
        ]
        assert len(taught) == (
            3 if (name, dtype) == ("mlp", "bfloat16") else 2
        )
        gradients = [d for d in gradients if d.step in taught]
        assert len(gradients) == len(taught) * len(known.trace.start)
        accepted = [d for d in gradients if d.agrees and d.name not in free]
        # rounding decides which groups some tokens choose: counts are apart
        if name == "latent":
            accepted = [
                d for d in accepted if not d.name.endswith("router.bias")
            ]
        if (name, dtype) == ("experts", "bfloat16"):
            # So it does here in the last blocks, of experts that few tokens choose.
            assert all(d.step and ".mlp.rout" in d.name for d in accepted)
        elif (name, dtype) == ("gemma", "bfloat16"):
            # Rounding moves what its attention learns by more than itself: the norms of q and k and
            # the cap of the scores leave little of it. float16 and float32 tell these apart.
            assert len(accepted) <= 4
            assert all(
                (d.step and ".attn.w" in d.name) or "_norm" in d.name
                for d in accepted
            )
        else:
            assert accepted == []
        assert not judge(Layout(), wrong, known, setting).passed


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gqa", "bfloat16"),
        ("gpt", "float16"),
        pytest.param("gqa", "float16", marks=pytest.mark.slow),
        pytest.param("gpt", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_clean_layouts_that_cover_the_choices_keep_the_bounds(
    name: str, dtype: str
) -> None:
    layouts = covered(name, 8)
    # Spread evenly, and every one in the precision's own word as a run would have it.
    spread = layouts[:: len(layouts) // 4][:4]
    some = [replace(x, precision="fp32") for x in spread]
    # In float16 the loss scale doubles after two steps.
    steps = 3 if dtype == "float16" else 2
    verdicts = list(verify(SHAPES[name], some, dtype=dtype, steps=steps))
    assert len(verdicts) == 4
    assert [v for v in verdicts if not v.passed] == []


def test_sums_over_tokens_keep_the_bounds_where_tp_cuts_what_goes_into_them() -> (
    None
):
    """Gradients of norms' biases, which torch's LayerNorm adds up in bfloat16 on a CPU."""
    layouts = Layout.parse_many("tp2; tp4; tp2 recompute:selective")
    verdicts = list(verify(SHAPES["odd"], layouts, dtype="bfloat16", steps=1))
    assert max(verdict.of_allowed for verdict in verdicts) < 0.8


def test_a_bias_whose_gradient_is_rounded_once_for_each_microbatch_keeps_the_bounds() -> (
    None
):
    """In float16 five numbers of a router's bias are off by what a microbatch's rounding makes alone."""
    layouts = Layout.parse_many("dp2 zero3; tp2")
    verdicts = list(verify(SHAPES["sinks"], layouts, dtype="float16", steps=1))
    assert [v for v in verdicts if not v.passed] == []


@pytest.mark.parametrize(
    "layout", ["dp2 zero3", "pp2 1f1b:3", "dp2 zero1 accum:2", "tp2"]
)
def test_a_layout_has_the_gradients_of_its_replay(layout: str) -> None:
    """In the first step they differ by the order of sums in float32 alone, as outputs do not."""
    where, shape = Layout.parse(layout), SHAPES["gqa"]
    setting = setting_of(shape, "bfloat16", steps=1)
    got = trained(where, shape, setting)
    known = replay(partial(build_model, shape), setting, rounding_of(where))
    found = replay_differences(where, got, known, setting, {})
    assert {d.error for d in found if d.what == "output"} == {0.0}
    assert max(d.error for d in found if d.what == "gradient") < 1e-6


# What splits the sums inside of pieces. The default suite has the families that differ most.
SPLIT = "tp4; dp2 tp2 seq zero3; cp2"
WITH_EXPERTS = "dp2 tp2 seq zero3; ep2 tp2 seq experts:tp"
DEFAULT = {("odd", "float16"), ("experts", "bfloat16")}
REPLAYED = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in DEFAULT))
    for case in product(SHAPES, HALVES)
    if case[0] != "mlp"
]


@pytest.mark.parametrize(("name", "dtype"), REPLAYED)
def test_layouts_that_split_sums_agree_with_their_replay(
    name: str, dtype: str
) -> None:
    shape = SHAPES[name]
    layouts = Layout.parse_many(WITH_EXPERTS if shape.experts else SPLIT)
    model = build_model(shape)
    assert not any(not_replayed(layout, model) for layout in layouts)
    verdicts = verify(shape, layouts, dtype=dtype, steps=1)
    assert [v for v in verdicts if not v.passed] == []


def test_what_is_not_replayed_is_named() -> None:
    def why(layout: str, shape: Shape) -> str:
        return not_replayed(Layout.parse(layout), build_model(shape))

    assert "router" in why("cp2", SHAPES["experts"])
    assert "noise" in why("tp2", replace(SHAPES["gqa"], dropout=0.1))
    assert "decoders" in why("tp2", SHAPES["mlp"])
    whole = replace(SHAPES["latent"], sequence_loss=0.0, batch_loss=0.3)
    assert "batch" in why("dp2", whole)
    assert "8 bits" in why("dp2 fp8", SHAPES["gqa"])
    assert why("dp2 zero3", SHAPES["mlp"]) == ""


def test_the_rows_of_each_microbatch_of_each_rank() -> None:
    """Earlier ranks and microbatches have one row more."""
    parts = parts_of(9, Layout.parse("dp2 accum:3"))
    rows = [part.tolist() for part in parts]
    assert rows == [[0, 1], [2, 3], [4], [5, 6], [7], [8]]


# The default suite has those that differ most.
FLOAT32 = ("gqa", "qwen", "gemma", "experts", "delta")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in FLOAT32))
        for n in SHAPES
        if n != "ahead"
    ],
)
def test_float32_keeps_the_bounds(name: str) -> None:
    verdicts = verify(
        SHAPES[name], covered(name, 4)[:3], dtype="float32", steps=2
    )
    assert [v for v in verdicts if not v.passed] == []


# ---- gradients added up in 16 bits, which shows where one microbatch is large

ACCUMULATED = 256  # microbatches
DEEP = Shape("deep", kind="mlp", layers=3, hidden=16, batch=ACCUMULATED)


def one_large_many_small(
    step: int, *, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """Rows of which the first has a gradient that is large enough for each of the others to be
    rounded away beside it, though together they are a good part of the sum."""
    row = torch.randn(
        1, DEEP.hidden, generator=torch.Generator().manual_seed(step)
    )
    rows = row.repeat(ACCUMULATED, 1)
    # The gradient grows with the square; half a unit in the last place is eps / 2.
    rows[0] *= (3 / torch.finfo(dtype).eps) ** 0.5
    return {"inputs": rows.to(dtype)}


def added_in_compute_dtype() -> AbstractContextManager[None]:
    right = Unit.__init__

    def init(
        self: Unit,
        number: int,
        weights: Any,
        groups: Any,
        pool: Any,
        precision: Precision,
        **more: Any,
    ) -> None:
        narrow = replace(precision, reduce=precision.compute)
        right(self, number, weights, groups, pool, narrow, **more)

    return swapped(Unit, "__init__", init)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_added_up_in_16_bits_show_where_one_microbatch_is_large(
    dtype: str,
) -> None:
    precision = precision_named(dtype)
    batches = partial(one_large_many_small, dtype=precision.compute)
    setting = Setting(batches, steps=1, precision=precision, scaling=(1.0, 2))
    known = truth_of(partial(build_model, DEEP), setting)
    layout = f"accum:{DEEP.batch}"
    clean = verdict_of(layout, DEEP, setting, known)
    assert clean.passed, clean
    with added_in_compute_dtype():
        verdict = verdict_of(layout, DEEP, setting, known)
    assert not verdict.passed
    assert "step 0: the gradient of layers." in verdict.first_difference
