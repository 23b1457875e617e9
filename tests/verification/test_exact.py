"""Layouts of `exact` have the bits of one process, and a difference of a bit is named."""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm import Work
from phalanx.layout import Layout, Shape
from phalanx.layout.cases import SHAPES, covering, exact_layouts
from phalanx.layout.choices import BF16, FP16, FP32
from phalanx.models import ExpertProducts
from phalanx.models.dense import Mlp
from phalanx.parallel import build_model
from phalanx.parallel import exact as units
from phalanx.parallel.compile import BACKEND
from phalanx.parallel.exact import ExactUnit
from phalanx.parallel.local import ExactPlace
from phalanx.training import muon, totals
from phalanx.training.precision import precision_of
from phalanx.training.totals import (
    ExactTotals,
    squares_by_exponent,
    sum_in_tree,
    sum_of_limbs,
)
from phalanx.verification.cases import trial_batch
from phalanx.verification.exact import verify_exact
from phalanx.verification.replay import replay, rounding_of
from phalanx.verification.trial import Setting, join, program_in, train_layout
from phalanx.verification.verify import worlds_over
from seeded import FAULTS
from seeded.exact import catch_exactly

FEW = {
    "gqa": "dp2x2 zero3 accum:2 exact; pp2 zb-v:4 zero1 exact",
    "gpt": "dp3 pp2 zb-h1:2 zero2 recompute:all exact",
    "experts": "dp2 ep2 zero1 accum:2 exact",
}


WHOLE = Shape(
    "whole", layers=1, hidden=8, heads=2, ffn=12, vocab=16, sequence=6
)


def differences(
    model: str | Shape, text: str, *precisions: str, **terms: Any
) -> list[str]:
    layouts = Layout.parse_many(text)
    shape = SHAPES[model] if isinstance(model, str) else model
    verdicts = verify_exact(shape, layouts, precisions=precisions, **terms)
    return [v.first_difference for v in verdicts if not v.passed]


@pytest.mark.parametrize("model", FEW)
def test_layouts_have_the_bits_of_one_process(model: str) -> None:
    assert not differences(model, FEW[model], FP32)


def test_bfloat16_with_float32_weights_has_them_too() -> None:
    assert not differences("gpt", "dp2 pp2 1f1b:2 zero1 exact", BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["dp2 zero1 accum:2 exact", "pp2 1f1b:4 exact"]
)
def test_float16_with_a_loss_scale_has_them_too(text: str) -> None:
    assert not differences("gqa", text, FP16)


def test_a_stage_without_trained_weights_has_them_too() -> None:
    frozen = replace(SHAPES["gqa"], freeze=("embed", "layers.0"))
    layouts = Layout.parse_many("pp2 1f1b:2 exact")
    verdicts = verify_exact(frozen, layouts, precisions=[FP32])
    assert [v.first_difference for v in verdicts if not v.passed] == []


@pytest.mark.slow
def test_adapters_have_them_too() -> None:
    adapted = replace(SHAPES["gqa"], lora_r=4)
    layouts = Layout.parse_many("dp2x2 zero3 accum:2 exact; pp2 1f1b:4 exact")
    verdicts = verify_exact(adapted, layouts)
    assert [v.first_difference for v in verdicts if not v.passed] == []


PARTS = 4  # of the list of layouts, a test each
LARGE = (
    "dp6 zero3 accum:2 exact",
    "dp2x4 zero1 accum:4 exact",
    "dp3 pp3 zb-h1:2 zero2 exact",
    "dp4x3 zero3 recompute:all exact",
    "dp4x4 zero2 exact",
    "dp4 pp4 1f1b:4 exact",
    "dp8 pp2 interleaved2:2 zero1 exact",
)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("precision", [FP32, BF16])
@pytest.mark.parametrize("model", ["gqa", "gpt", "experts"])
def test_every_two_choices_have_the_bits_of_one_process(
    model: str, precision: str, part: int
) -> None:
    layouts = covering(exact_layouts(SHAPES[model], 4), 60)
    assert len(layouts) >= 60
    own = layouts[part::PARTS]
    verdicts = verify_exact(SHAPES[model], own, precisions=[precision])
    assert not [v for v in verdicts if not v.passed]


@pytest.mark.slow
@pytest.mark.parametrize("text", LARGE)
def test_six_to_sixteen_ranks_have_the_bits_of_one_process(text: str) -> None:
    assert not differences("gqa", text, FP32, BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("latent", "ep2 zero2 accum:2 exact; dp2 pp2 1f1b:2 exact"),
        ("sinks", "ep4 overlap zero3 exact; dp2 ep2 pp2 zb-v:4 exact"),
        ("experts", "dp2x2 ep4 zero1 exact; ep8 zero3 recompute:all exact"),
    ],
)
def test_more_layouts_with_experts_have_them_too(
    model: str, text: str
) -> None:
    assert not differences(model, text, FP32, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(backend: str) -> None:
    text = "dp2x2 zero3 accum:2 exact; dp2 pp2 1f1b:2 exact; dp4 exact"
    assert not differences("gqa", text, FP32, BF16, backend=backend)


@pytest.mark.parametrize("optimizer", ["muon", "soap"])
def test_optimizers_of_whole_matrices_have_the_bits_of_one_process(
    optimizer: str,
) -> None:
    """Two owners share the matrices, which one process has all."""
    text = "dp2 zero1 exact"
    assert not differences(WHOLE, text, FP32, steps=2, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "soap"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("gqa", "dp2x2 zero3 accum:2 exact; dp2 pp2 zb-h1:2 zero2 exact"),
        ("gpt", "dp2 cp2 zero1 exact:1x2; cp2:ulysses exact:1x2"),
        ("experts", "dp2 ep2 zero2 offload:optimizer exact"),
    ],
)
def test_more_layouts_of_such_optimizers_have_them_too(
    model: str, text: str, optimizer: str
) -> None:
    assert not differences(model, text, FP32, BF16, optimizer=optimizer)


def test_a_batched_product_of_an_owners_matrices_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch of an owner would depend on the number of owners."""
    right = muon.orthogonalized

    def of_all(x: Tensor) -> Tensor:
        return right(x) * (1.0 + len(x) * 2.0**-20)

    monkeypatch.setattr(muon, "orthogonalized", of_all)
    monkeypatch.setattr(muon, "ExactUnit", type(None))
    (found,) = differences(WHOLE, "dp2 zero1 exact", FP32, optimizer="muon")
    assert found == "step 0: layers.0.attn.wo.weight after its update (U)"


@pytest.mark.parametrize("model", ["latent", "experts"])
def test_a_replay_of_16_bits_has_the_gradients_of_one_process(
    model: str,
) -> None:
    """Also where a router has losses: its logits have one gradient."""
    shape = replace(SHAPES[model], batch=4)
    make = partial(build_model, shape)
    layout = Layout.parse("accum:2 bf16 exact")
    batches = partial(trial_batch, shape, dtype=torch.bfloat16)
    setting = Setting(batches, steps=1, precision=precision_of(BF16))
    program = program_in(layout, make, setting)
    with worlds_over("threads")(1) as run:
        seen = run(train_layout, layout, program, make, setting)
    found = join(seen, 1).steps[0].gradients
    known = replay(make, setting, rounding_of(layout)).steps[0].gradients
    other = [n for n in known if not torch.equal(found[n], known[n])]
    assert not other


@pytest.mark.slow
def test_layouts_of_routers_with_losses_are_within_the_bounds_of_rounding() -> (
    None
):
    text = "dp2x2 zero3 accum:2 exact"
    assert not differences("ahead", text, BF16, steps=1, packed=True)


# ---- differences of bits


def test_modules_that_are_not_their_formulas_are_found_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every layout has the mistake, and the one process and plain torch have it."""
    right = Mlp.forward

    def too_large(self: Mlp, x: Tensor) -> Tensor:
        return right(self, x) * 1.05

    monkeypatch.setattr(Mlp, "forward", too_large)
    (found,) = differences("gqa", "dp2 exact", FP32, steps=1)
    assert "the model's modules are not its formulas" in found


def in_order_of_arrival(count: int) -> Iterator[tuple[int, int]]:
    return ((0, term) for term in range(1, count))


def test_another_order_over_ranks_is_named_as_a_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "merges", in_order_of_arrival)
    (found,) = differences("gqa", "dp4 zero1 exact", FP32)
    assert found.startswith("step 0: the sum of the gradient of ")
    assert "(^ or X)" in found


def test_a_gradient_of_one_microbatch_is_named_with_its_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaf = ExactUnit.leaf

    def other(self: ExactUnit, user: int, m: int) -> Any:
        every = leaf(self, user, m)
        (found,) = every
        if self.copies.rank == 1 and m == 1 and user == 2:
            name = next(n for n in found if n.endswith("wq.weight"))
            bits = found[name].view(-1)[:1].view(torch.int32)
            bits ^= 1
        return every

    monkeypatch.setattr(ExactUnit, "leaf", other)
    (found,) = differences("gqa", "dp2 accum:2 exact", BF16)
    assert found == (
        "step 0: the gradient of layers.1.attn.wq.weight from microbatch 3"
        " (2B1 of dp rank 1)"
    )


def test_products_of_all_senders_at_once_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_once(
        self: ExpertProducts,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        weights: Any,
    ) -> torch.Tensor:
        monkeypatch.setattr(self, "weight_of_run", None)
        return self.on_runs(tokens, counts)

    monkeypatch.setattr(ExpertProducts, "on_each", at_once)
    (found,) = differences("experts", "ep3 exact", FP32)
    assert found.startswith("step 0: the output of layers.")


def test_compiled_pieces_have_the_bits_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The same graphs as with inductor, but kernels of torch: those take a minute.
    monkeypatch.setenv(BACKEND, "aot_eager")
    text = "dp2 zero3 compile exact"
    assert not differences("gqa", text, FP32, steps=1)


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("g++"), reason="kernels for a CPU need a C++ compiler"
)
@pytest.mark.parametrize("model", FEW)
def test_kernels_of_a_compiler_have_the_bits_of_one_process(
    model: str,
) -> None:
    text = "dp2 accum:2 compile exact; pp2 1f1b:4 zero3 compile exact"
    assert not differences(model, text, FP32, BF16)


def test_a_norm_in_the_order_of_arrival_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def squares(self: ExactTotals, unit: Any) -> torch.Tensor:
        total = torch.zeros(2, 256, dtype=torch.float64)
        norm = sum(float(run.norm()) ** 2 for run in unit.counted())
        total[0, 150] = norm
        return total

    monkeypatch.setattr(totals.ExactTotals, "squares", squares)
    (found,) = differences("gqa", "dp2 zero1 exact", FP32)
    assert found.startswith("step 0: the gradient norm is ")


def test_a_part_that_is_not_shared_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def share_sums(self: ExactUnit) -> Work:
        shard = self.parts.pop(0)
        self.summed(shard, shard)
        return Work()

    monkeypatch.setattr(ExactUnit, "share_sums", share_sums)
    assert differences("gqa", "dp2 exact", FP32)


def test_a_mistake_that_one_process_makes_too_differs_from_plain_torch() -> (
    None
):
    decay = next(f for f in FAULTS if f.name.startswith("weight decay"))
    with decay.patch():
        (found,) = differences("gqa", "accum:2 exact", FP32)
    assert found.startswith("one process differs from plain torch: step 0")
    assert "norm.weight" in found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_seeded_fault_is_found_in_bfloat16(part: int) -> None:
    found = [*map(catch_exactly, FAULTS[part::8])]
    assert not [c for c in found if not (c.refused or c.first_difference)]


# ---- sums of numbers


def rounded_square(value: float) -> Fraction:
    """The square of a normal float32 by hand, with 24 bits."""
    square = Fraction(value) ** 2
    if not square:
        return square
    _, exponent = math.frexp(value * value)
    unit = Fraction(2) ** (exponent - 24)  # the value of its last bit
    return round(square / unit) * unit


def test_squares_are_summed_without_rounding_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against fractions of Python: each square is rounded once, their sums never."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2000, generator=draw) * 10.0 ** torch.randint(
        -36, 18, (2000,), generator=draw
    )
    # the smallest of them has no bit that is not stored, and counts as zero
    x[:3] = torch.tensor([0.0, -0.0, 1e-45])
    normal = [v for v in x.tolist() if abs(v) >= 2.0**-126]
    exact = sum(map(rounded_square, normal), Fraction(0))
    parts = [squares_by_exponent(part) for part in x.split(7)]
    monkeypatch.setattr(totals, "_RUN", 300)
    shuffled = squares_by_exponent(x[torch.randperm(2000, generator=draw)])
    in_parts = sum_of_limbs(sum(parts[1:], parts[0]))
    assert torch.equal(in_parts, sum_of_limbs(shuffled))
    relative = Fraction(float(in_parts)) / exact - 1
    assert abs(relative) < 1e-15


def test_squares_of_long_runs_are_summed_without_overflow() -> None:
    largest = 2.0 - 2.0**-23  # all bits of the mantissa are set
    count = 2 * 2**15 + 7
    squares = squares_by_exponent(torch.full((count,), largest))
    # as if 2^20 ranks had such a run each
    every = count * 2**20 * rounded_square(largest)
    assert Fraction(float(sum_of_limbs(squares * 2.0**20))) == every


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_makes_the_norm_so(value: float) -> None:
    class One:
        def counted(self) -> Sequence[torch.Tensor]:
            return [torch.tensor([1.0, value, 2.0])]

    alone = ExactPlace(ranks=1, rank=0, time_parts=1, own=slice(0, 1))
    totals = ExactTotals(torch.device("cpu"), alone)
    totals.begin(1, 1)
    unit: Any = One()
    own = totals.own([totals.squares(unit)], torch.zeros(1))
    reduced = torch.cat(own)
    squares, _ = totals.agreed(reduced)
    assert not squares.isfinite().any()


def test_slots_are_added_in_the_tree() -> None:
    terms = torch.tensor([1.0, 2.0**-53, 2.0**-53, 3.0, 5.0]).double()
    expected = ((terms[0] + terms[1]) + (terms[2] + terms[3])) + terms[4]
    assert sum_in_tree(terms) == expected
