"""Experts beside tp and cp have the bits of one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.layout import Layout, Shape
from phalanx.layout.cases import SHAPES
from phalanx.layout.choices import BF16, FP16, FP32
from phalanx.models import Merge
from phalanx.parallel import experts_parts, tensor, time_parts
from phalanx.parallel.exact import ExactUnit
from phalanx.parallel.time_parts import MergeInTime, SendingInTime
from phalanx.verification.exact import verify_exact

# Three experts for two ranks; biases of products and routers; all losses of a router.
SMALL = Shape(
    "small",
    layers=1,
    hidden=16,
    heads=4,
    kv_heads=4,
    ffn=16,
    vocab=32,
    sequence=11,
    experts=3,
    top_k=2,
    expert_ffn=8,
    shared_experts=1,
    shared_gate=True,
    bias="all",
    balance="bias",
    sequence_loss=0.3,
    z_loss=0.1,
)
WIDE = {
    name: replace(SHAPES[name], vocab=40, heads=8, kv_heads=8, expert_ffn=16)
    for name in ("experts", "latent", "sinks")
}


def differences(
    shape: Shape, text: str, *precisions: str, **terms: Any
) -> Any:
    layouts = Layout.parse_many(text)
    verdicts = verify_exact(shape, layouts, precisions=precisions, **terms)
    return [v.first_difference for v in verdicts if not v.passed]


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("tp2 ep2 seq exact:2; cp2 ep2 exact:1x4", FP32),
        ("cp2 tp2 seq exact:2x2", BF16),
    ],
)
def test_layouts_of_experts_have_the_bits_of_one_process(
    text: str, precision: str
) -> None:
    assert not differences(SMALL, text, precision, steps=2)


# Sizes at which a product with the tokens of two senders rounds otherwise than one with
# the tokens of each.
UNEVEN = replace(
    SMALL, hidden=64, ffn=96, sequence=33, experts=4, expert_ffn=40
)


def test_frozen_experts_have_the_bits_of_one_process() -> None:
    frozen = replace(UNEVEN, freeze=("layers.0",))
    text = "ep2 exact; ep2 exact:2; ep2 exact:1x2"
    assert not differences(frozen, text, FP32, steps=1)


@pytest.mark.slow
def test_frozen_experts_beside_adapters_have_them_too() -> None:
    adapted = replace(UNEVEN, layers=2, lora_r=4)
    assert not differences(adapted, "ep2 exact", FP32, BF16)


@pytest.mark.slow
def test_frozen_experts_that_are_dropped_after_use_have_them_too() -> None:
    frozen = replace(UNEVEN, layers=2, freeze=("layers.0",))
    text = "dp2 ep2 zero3 exact:2; pp2 ep2 zb-h1:2 exact:1x2"
    assert not differences(frozen, text, FP32, BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("experts", "dp2 cp2 ep2 zero3 accum:2 exact:1x4; tp8 seq exact:8"),
        ("latent", "pp2 tp2 ep2 zb-h1:2 exact:2; cp2:ulysses ep2 exact:1x2"),
        ("latent", "cp2 tp2 ep2 seq exact:2x2; ep4 tp2 zero2 exact:2"),
        ("sinks", "tp4 seq exact:4; ep2 tp2 seq overlap accum:2 exact:4"),
    ],
)
def test_more_layouts_of_experts_have_them_too(model: str, text: str) -> None:
    assert not differences(WIDE[model], text, FP32, BF16)


@pytest.mark.slow
def test_more_parts_than_ranks_have_them_too() -> None:
    text = "tp2 seq exact:4; cp2 ep2 tp2 exact:2x2; tp2 cp2 exact:4x4"
    assert not differences(SMALL, text, FP32, BF16, steps=2)


@pytest.mark.slow
def test_packed_rows_noise_and_float16_have_them_too() -> None:
    text = "ep2 tp2 seq exact:2; cp2 ep2 exact:1x2"
    shape = WIDE["experts"]
    assert not differences(shape, text, FP32, packed=True)
    assert not differences(shape, text.split(";")[1], FP32, dropout=0.1)
    assert not differences(shape, text, FP16, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_processes_have_the_bits_of_one_process(backend: str) -> None:
    text = "ep2 tp2 seq exact:2; cp2 ep2 exact:1x2"
    assert not differences(SMALL, text, FP32, BF16, backend=backend)


# ---- differences of bits


def first_difference(text: str) -> str:
    (found,) = differences(SMALL, text, FP32, steps=1)
    return str(found)


def test_a_gradient_of_tokens_from_a_ranks_parts_alone_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor, "_copied", lambda group, x: x)
    found = first_difference("tp2 exact:2")
    assert "the gradient of layers.0.attn.wo.weight from " in found


def test_a_bias_behind_each_part_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = experts_parts.ExpertsInParts._cut

    def cut(self: Any, weights: Any) -> Any:
        own = plain(self, weights)
        return [each._replace(down_bias=weights.down_bias) for each in own]

    monkeypatch.setattr(experts_parts.ExpertsInParts, "_cut", cut)
    found = first_difference("exact:2")
    assert found.startswith("one process differs from plain torch: ")


def test_tokens_in_the_order_of_parts_of_time_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank would take the first rows for its experts, whatever they are."""
    monkeypatch.setattr(
        SendingInTime,
        "_by_rank",
        lambda self, counts, rows: torch.arange(rows),
    )
    found = first_difference("cp2 ep2 exact:1x4")
    assert found.startswith("step 0: the output of layers.0 for microbatch 0")


def test_results_merged_in_the_order_of_their_arrival_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_parts, "ordered", lambda x, order: x)
    found = first_difference("cp2 ep2 exact:1x4")
    assert found.startswith("step 0: the output of layers.0 for microbatch 0")


def test_gradients_of_runs_in_another_slot_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ExactUnit.of_slot

    def other(self: Any, name: str, weight: Tensor, slot: int) -> Tensor:
        turned = slot // self.times + self.senders * (slot % self.times)
        return plain(self, name, weight, turned if self.senders > 1 else slot)

    monkeypatch.setattr(ExactUnit, "of_slot", other)
    found = first_difference("cp2 ep2 exact:1x4")
    assert "the gradient of layers.0.mlp.routed." in found


def test_slots_of_other_times_that_are_added_first_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = ExactUnit._over_senders

    def turned(self: Any, every: Tensor) -> Tensor:
        slots = every.view(self.senders, self.times, -1)
        other = slots.reshape(self.times, self.senders, -1).transpose(0, 1)
        if self.senders > 1:
            slots.copy_(other.contiguous().view_as(slots))
        return plain(self, every)

    monkeypatch.setattr(ExactUnit, "_over_senders", turned)
    found = first_difference("cp2 ep2 exact:1x4")
    assert "the sum of the gradient of layers.0.mlp.routed." in found


def test_parts_of_time_are_merged_as_their_own_tokens_are() -> None:
    """Against the merge of each part by itself."""
    draw = torch.Generator().manual_seed(0)
    merge = Merge()
    gates = torch.rand(2, 6, 2, generator=draw)
    rows = torch.randn(24, 4, generator=draw)
    order = torch.randperm(24, generator=draw)
    found = MergeInTime(merge, 3)(rows, gates, order)
    in_place = torch.empty_like(rows)
    in_place[order] = rows
    for part in range(3):
        tokens = slice(2 * part, 2 * part + 2)
        own = in_place[8 * part : 8 * part + 8].view(2, 2, 2, 4)
        by_hand = (own * gates[:, tokens].unsqueeze(-1)).sum(2)
        assert torch.equal(found[:, tokens], by_hand)
