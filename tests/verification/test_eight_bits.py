"""Layouts with products in 8 bits against plain torch on one process, which rounds by arithmetic."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from phalanx.layout import Layout
from phalanx.layout.choices import MATMULS
from phalanx.parallel import build_model
from phalanx.verification import SHAPES, low_precision, verify
from phalanx.verification.low_precision import Rounding, can_replay, sums_of
from sampled import one_in

# Matrices of several squares of 128 x 128, and of parts of some.
WIDE = replace(
    SHAPES["gqa"],
    name="wide",
    layers=2,
    hidden=144,
    ffn=268,
    sequence=9,
    batch=6,
)
SHAPES_OF = SHAPES | {
    "wide": WIDE,
    "lora": replace(SHAPES["gqa"], name="lora", lora_r=3),
}


def verdicts(
    name: str, text: str, dtype: str = "float64", backend: str = "threads"
) -> list[tuple[str, bool, float]]:
    layouts = [
        replace(x, precision="fp64")
        for x in Layout.parse_many(" ".join(text.split()))
    ]
    found = list(
        verify(SHAPES_OF[name], layouts, dtype=dtype, steps=2, backend=backend)
    )
    assert len(found) == len(layouts)
    return [(v.first_difference, v.passed, v.max_rel_error) for v in found]


EXACT = """
    dp2 zero3 fp8; dp3 zero1 accum:2 fp8; dp2x2 zero2 fp8; pp2 zb-h1:3 fp8; recompute:selective fp8;
    dp2 pp2 zero3 1f1b:3 recompute:all fp8; pp2 zb-v:4 offload:activations fp8
"""
MORE = """
    dp2 zero3 fp8:e5m2; dp2 zero3 fp8:tile; pp2 zb-h1:3 fp8:tile,e5m2; dp2 zero1 accum:2 mxfp8;
    pp2 interleaved2:4 zero2 dp2 mxfp8:e5m2
"""


def test_where_sums_are_whole_a_layout_has_the_numbers_of_one_process() -> (
    None
):
    assert [
        v for v in verdicts("gqa", EXACT) if not v[1] or v[2] > 1e-12
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "gpt", "qwen"])
def test_so_it_is_with_every_kind_of_scales(name: str) -> None:
    assert [
        v
        for v in verdicts(name, EXACT + ";" + MORE)
        if not v[1] or v[2] > 1e-10
    ] == []


NARROW = """
    dp2 zero3 fp8:tile; dp3 zero1 accum:2 fp8:tile; dp2x2 zero2 fp8:tile,e5m2; dp5 zero3 fp8:tile;
    dp2 pp2 zero3 1f1b:3 recompute:all fp8:tile; dp2 pp2 zero1 zb-h1:3 fp8:tile;
    dp2 zero3 gather:step offload:activations fp8:tile; dp2 zero3 offload:weights fp8:tile
"""


@pytest.mark.parametrize("name", one_in(2, ["wide", "lora"]))
def test_weights_that_travel_in_8_bits_are_those_of_one_process(
    name: str,
) -> None:
    assert [
        v for v in verdicts(name, NARROW) if not v[1] or v[2] > 1e-12
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "gpt", "experts", "latent"])
def test_so_they_are_in_every_model(name: str) -> None:
    assert [
        v for v in verdicts(name, NARROW) if not v[1] or v[2] > 1e-10
    ] == []


@pytest.mark.slow
def test_adapters_beside_products_in_8_bits_have_the_numbers_of_one_process() -> (
    None
):
    text = "dp2 fp8; dp2 zero3 fp8; pp2 zb-h1:3 mxfp8; dp2 zero1 accum:2 fp8:e5m2; tp2 seq fp8"
    assert [v for v in verdicts("lora", text) if not v[1]] == []


ROUTED = """
    dp2 fp8:experts; ep2 mxfp8:experts; dp2 pp2 zero3 1f1b:3 recompute:all fp8:tile,experts;
    dp2 zero1 recompute:selective fp8:tile,e5m2,experts; dp2 ep2 zero3 overlap accum:2 fp8:experts
"""


def test_products_of_routed_experts_in_8_bits_have_the_numbers_of_one_process() -> (
    None
):
    assert [
        v for v in verdicts("experts", ROUTED) if not v[1] or v[2] > 1e-12
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latent", "sinks"])
def test_so_they_have_with_biases_and_with_groups_of_experts(
    name: str,
) -> None:
    assert [
        v for v in verdicts(name, ROUTED) if not v[1] or v[2] > 1e-10
    ] == []


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++"), reason="compile needs a C++ compiler"
)
@pytest.mark.parametrize(
    "name, text",
    [
        ("gqa", "dp2 compile fp8; dp2 zero3 compile fp8:tile"),
        ("wide", "dp2 zero3 compile fp8:tile"),
    ],
)
def test_kernels_of_torch_compile_have_the_numbers_of_one_process(
    name: str, text: str
) -> None:
    assert [
        v
        for v in verdicts(name, text, backend="gloo")
        if not v[1] or v[2] > 1e-12
    ] == []


# Ranks that share a head of k and v (tp4 of gqa), uneven parts, a padded length, both kinds of cp.
CUT = "tp4 {0}; tp3 {0}; dp2 tp2 seq zero1 accum:2 {0}; cp2 {0}; cp2:ulysses tp2 seq {0}"
FEW = "tp4 {0}; dp2 tp2 seq zero1 {0}; cp2 tp2 {0}"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("gqa", "mxfp8"),
        ("wide", "fp8:tile"),
        pytest.param("olmo", "fp8:e5m2", marks=pytest.mark.slow),
    ],
)
def test_where_tp_or_cp_cuts_sums_one_process_that_cuts_them_alike_has_the_same_numbers(
    name: str, word: str
) -> None:
    assert [
        v for v in verdicts(name, FEW.format(word)) if not v[1] or v[2] > 1e-12
    ] == []


CUT_EXPERTS = (
    "tp4 zero3 accum:2 reduce:step prefetch:3 {0}; ep2 tp2 seq experts:tp {0}"
)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("experts", "fp8:tile"),
        pytest.param("latent", "mxfp8:experts", marks=pytest.mark.slow),
        ("sinks", "fp8:experts"),
    ],
)
def test_so_they_are_where_experts_are_chosen_and_heads_are_made_of_latents(
    name: str, word: str
) -> None:
    """A choice between two experts may hang on a scale: one process makes the layout's choice."""
    found = verdicts(name, CUT_EXPERTS.format(word))
    assert [v for v in found if not v[1] or v[2] > 1e-12] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in SHAPES_OF if n not in ("mlp", "wide")]
)
@pytest.mark.parametrize("word", ["fp8", "fp8:e5m2", "fp8:tile", "mxfp8"])
def test_so_they_are_in_every_model_and_with_every_kind_of_scales(
    name: str, word: str
) -> None:
    assert [
        v for v in verdicts(name, CUT.format(word)) if not v[1] or v[2] > 1e-10
    ] == []


def test_a_model_that_one_process_cannot_cut_is_held_to_what_cuts_at_random_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a model of somebody's own: nobody knows which of its modules join what ranks computed."""
    monkeypatch.setattr(low_precision, "owners", lambda block: [])
    model, layout = build_model(SHAPES["gqa"]), Layout.parse("tp2 seq fp8")
    assert not can_replay(model, sums_of(layout))
    found = verdicts("gqa", "tp2 seq fp8")
    assert [v for v in found if not v[1]] == []
    assert max(v[2] for v in found if v[2]) > 1e-6


@pytest.mark.slow
def test_in_bfloat16_layouts_keep_the_bounds_of_a_unit_in_the_last_place() -> (
    None
):
    text = "dp2 zero3 fp8; pp2 zb-h1:3 fp8; tp2 seq fp8"
    assert [v for v in verdicts("gqa", text, "bfloat16") if not v[1]] == []


def test_only_tp_and_cp_cut_what_shares_a_scale() -> None:
    for text in (
        "dp4 zero3 fp8",
        "pp4 fp8",
        "dp2 pp2 zb-h1:4 fp8",
        "ep2 recompute:all fp8",
    ):
        assert sums_of(Layout.parse(text)) == Layout()
    for text, cuts in (
        ("dp2 tp2 seq zero3 fp8", "tp2 seq"), ("pp2 cp4:2x2 1f1b:3 mxfp8", "cp4:2x2"),
        ("ep2 tp2 seq experts:tp fp8", "tp2 seq experts:tp"), ("cp2 experts:cp fp8", "cp2"),
    ):  # fmt: skip
        assert sums_of(Layout.parse(text)) == Layout.parse(cuts)


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_the_reference_s_arithmetic_rounds_as_torch_s_dtypes_do(
    form: str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator).exp2() * torch.randn(
        64, 96, generator=generator
    )
    x[0, :8] = torch.tensor(
        [0.0, 1.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875, -448.0]
    )
    x[0, 8:] = 0.0
    dtype = getattr(torch, form)
    most = torch.finfo(dtype).max
    factor = (
        most / x.abs().amax(1, keepdim=True).double().clamp(min=1e-12)
    ).float()
    want = (x * factor).to(dtype).float() * factor.reciprocal()
    assert torch.equal(Rounding(MATMULS["fp8"])(x, form), want)
