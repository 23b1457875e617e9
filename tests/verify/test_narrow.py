"""Narrow precision: the bounds come from plain torch alone, clean layouts keep them, mistakes do not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import narrow
import pytest
from narrow import DEEP, accumulation_setting, setting_of, verdict_of

from phalanx.layout import Layout
from phalanx.parallel import build_model
from phalanx.verify import SHAPES, Trace, compare, covering, every_layout, verify
from phalanx.verify.verify import Truth, judge, truth_of

HALVES = ("bfloat16", "float16")


@cache
def truth(name: str, dtype: str, optimizer: str = "adamw") -> Truth:
    shape = SHAPES[name]
    return truth_of(partial(build_model, shape), setting_of(shape, dtype, optimizer=optimizer))


@cache
def exact(name: str) -> Trace:
    return truth(name, "float64").trace


def changed(trace: Trace, factor: float) -> Trace:
    """The same training with every gradient multiplied."""
    steps = [
        replace(step, gradients={name: x * factor for name, x in step.gradients.items()})
        for step in trace.steps
    ]
    return replace(trace, steps=steps)


def vanishing(name: str) -> set[str]:
    """Weights whose true gradient is zero, so that no number in it means anything: a key's bias
    moves all scores of a row alike, and a softmax does not see that."""
    gradients = exact(name).steps[0].gradients
    most = max(float(g.norm()) for g in gradients.values())
    return {n for n, g in gradients.items() if float(g.norm()) < 1e-10 * most}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_that_is_zeroed_or_flipped_is_rejected_for_every_weight_and_step(
    name: str, dtype: str
) -> None:
    setting, known, free = setting_of(SHAPES[name], dtype), truth(name, dtype), vanishing(name)
    assert judge(Layout(), known.trace, known, setting).passed
    assert all(n.endswith("wk.bias") for n in free)
    for factor in (0.0, -1.0):
        wrong = changed(known.trace, factor)
        found = compare(wrong, known.trace, setting.rate, known.bounds)
        gradients = [d for d in found if d.what == "gradient"]
        assert len(gradients) == setting.steps * len(known.trace.start)
        assert [d for d in gradients if d.agrees and d.name not in free] == []
        assert not judge(Layout(), wrong, known, setting).passed


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["gqa", "gpt"])
def test_clean_layouts_that_cover_the_choices_keep_the_bounds(name: str, dtype: str) -> None:
    layouts = covering(every_layout(SHAPES[name], 8), 1)
    # Spread evenly, and every one in the precision's own word as a run would have it.
    some = [replace(x, precision="fp32") for x in layouts[:: len(layouts) // 30]][:30]
    verdicts = list(verify(SHAPES[name], some, dtype=dtype))
    assert len(verdicts) == 30
    assert [v for v in verdicts if not v.passed] == []


@pytest.mark.parametrize("name", SHAPES)
def test_float32_keeps_the_bounds(name: str) -> None:
    layouts = covering(every_layout(SHAPES[name], 4), 1)[:8]
    assert [v for v in verify(SHAPES[name], layouts, dtype="float32") if not v.passed] == []


FAULTS = [
    ("stale_copy", "dp2", "step 2: the output of embed", HALVES),
    ("stale_copy", "pp2 1f1b:3", "step 2: the output of embed", HALVES),
    ("masters_not_kept", "dp2", "step 0: the update of", HALVES),
    ("masters_not_kept", "dp2 zero1", "step 0: the update of", HALVES),
    ("norm_not_unscaled", "tp2", "step 0: the norm", ("float16",)),
    ("stage_divides", "pp2 1f1b:3", "step 0: the gradient of head.output", HALVES),
    ("middle_stage_divides", "pp2 1f1b:3", "step 0: the gradient of layers.1", HALVES),
    ("scale_doubles_every_step", "dp2", "step 1: the loss scale", ("float16",)),
    ("gradients_not_unscaled", "dp2", "step 0: the update of", HALVES),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("fault", "layout", "names", "dtypes"), FAULTS)
def test_a_mistake_of_mixed_precision_is_caught_and_named(
    fault: str, layout: str, names: str, dtypes: tuple[str, ...], dtype: str
) -> None:
    shape, known = SHAPES["gqa"], truth("gqa", dtype)
    setting = setting_of(shape, dtype)
    with getattr(narrow, fault)():
        verdict = verdict_of(layout, shape, setting, known)
    assert verdict.passed == (dtype not in dtypes), verdict
    if dtype in dtypes:
        assert names in verdict.first_difference


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_added_up_in_16_bits_show_where_one_microbatch_is_large(dtype: str) -> None:
    setting = accumulation_setting(dtype)
    known = truth_of(partial(build_model, DEEP), setting)
    layout = f"accum:{DEEP.batch}"
    clean = verdict_of(layout, DEEP, setting, known)
    assert clean.passed, clean
    with narrow.added_in_compute_dtype():
        verdict = verdict_of(layout, DEEP, setting, known)
    assert not verdict.passed
    assert "step 0: the gradient of layers." in verdict.first_difference
