"""FLOPs against formulas by hand and against torch's own counter on the real model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.cost import forward_flops, step_flops
from phalanx.layout import Layout, Shape, cases, plain_pieces
from phalanx.parallel import build_model
from phalanx.parallel.local import model_stages
from phalanx.program import StepOptions, build

TINY = Shape.load("tiny")
SHAPES = {
    "grouped": TINY,
    "learned, tied, not gated": replace(
        TINY,
        positions="learned",
        tied=True,
        gated=False,
        norm="layer",
        bias="all",
        kv_heads=4,
    ),
    "wide heads": replace(TINY, head_dim=24, heads=6, kv_heads=3, layers=3),
    "adapters": replace(TINY, lora_r=3, lora_targets=("wq", "down")),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_forward_counts_what_torch_counts_on_the_model(name: str) -> None:
    shape, batch, sequence = SHAPES[name], 3, 20
    model = build_model(shape)
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    shared = {"positions": tokens}
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        x = model.pieces[0][1](tokens, **shared)
        for _, block in model.pieces[1:-1]:
            x = block(x, **shared)
        model.pieces[-1][1](x, tokens)
    # Its plain attention multiplies all pairs, so the full count is the one to compare.
    found = sum(op.full for op in forward_flops(shape, batch, sequence))
    assert found == counter.get_total_flops()


def test_a_delta_layer_counts_as_by_hand_whatever_its_chunks() -> None:
    """Eight heads with states of 3 x 5: corrected, written and read for each token."""
    for chunk in (1, 64):
        shape = replace(cases.SHAPES["delta"], delta_chunk=chunk)
        rules = [
            op for op in forward_flops(shape, 2, 20) if op.name == "delta rule"
        ]
        assert [op.piece for op in rules] == [1, 2, 4]
        assert {op.full for op in rules} == {2 * (2 * 20) * 8 * 3 * (3 * 5)}
        assert all(op.causal == op.full and op.trained for op in rules)


def test_a_block_of_the_8b_counts_as_by_hand() -> None:
    """Llama 3 8B: 4096 wide, 32 heads of 128, 8 of k and v, 14336 inside, 128256 words."""
    shape, t = Shape.load("8b"), 8192
    ops = {
        op.name: op
        for op in forward_flops(shape, 1, t)
        if op.piece in (1, shape.pieces - 1)
    }
    assert ops["wq"].causal == ops["wo"].causal == 2 * t * 4096 * 4096
    assert ops["wk"].causal == ops["wv"].causal == 2 * t * 4096 * 1024
    assert (
        ops["gate"].causal
        == ops["up"].causal
        == ops["down"].causal
        == 2 * t * 4096 * 14336
    )
    assert ops["attention"].full == 2 * (2 * t * t * 4096)
    assert ops["attention"].causal == 2 * (2 * 4096 * (t * (t + 1) // 2))
    assert ops["output"].causal == 2 * t * 4096 * 128256


@pytest.mark.parametrize("name", ["8b", "124m", "25m"])
def test_without_attention_a_step_is_6nd_of_the_weights_that_multiply(
    name: str,
) -> None:
    shape, batch, t = Shape.load(name), 2, 512
    products = shape.total - shape.rows[0].numel
    if shape.tied:
        # The embedding, used as the output.
        products += shape.vocab * shape.hidden
    norms = shape.hidden * (2 if shape.norm == "layer" else 1)
    products -= norms * (2 * shape.layers + 1)
    if shape.bias == "all":
        # Q k v o, up (4) and down.
        products -= shape.layers * (9 * shape.hidden)
    attention = sum(
        op.causal for op in forward_flops(shape, batch, t) if op.attends
    )
    assert (
        step_flops(shape, batch, t).model - 3 * attention
        == 6 * products * batch * t
    )


def test_the_mlp_counts_its_square_weights() -> None:
    shape = Shape.load("mlp")
    assert step_flops(shape, 128, 1).model == 6 * 128 * 4 * 1024**2


@pytest.mark.parametrize(
    "recompute, again",
    [("none", set()), ("all", {0, 1, 2, 3, 4}), ("every=2", {0, 1, 2, 3})],
)
def test_the_hardware_does_also_what_is_recomputed(
    recompute: str, again: set[int]
) -> None:
    """What stands right before its own backward is still there and is not done twice."""
    layout = Layout.parse(f"accum:2 recompute:{recompute}")
    program = build(
        layout,
        plain_pieces(model_stages(build_model(TINY), layout)),
        StepOptions(agree=False),
    )
    repeated = {
        op.piece for row in program.rows for op in row if op.kind == "R"
    }
    ops = forward_flops(TINY, 4, 64)
    once = sum(op.causal * (3.5 if op.attends else 3) for op in ops)
    found = step_flops(TINY, 4, 64, program)
    assert found.hardware == once + sum(
        op.causal for op in ops if op.piece in repeated
    )
    assert found.model == sum(3 * op.causal for op in ops)
    assert repeated == again


def test_half_of_the_pairs_are_causal_and_the_rest_is_the_same() -> None:
    for op in forward_flops(TINY, 2, 63):
        assert op.causal == (op.full * 32 / 63 if op.attends else op.full)


def test_a_window_counts_the_pairs_that_it_sees() -> None:
    """Of 7 tokens with a window of 3: 1, 2 and 3, then 3 for each of the last four."""
    plain = Shape(
        "w", layers=3, hidden=8, heads=2, vocab=10, sequence=7, windows=(3, 0)
    )
    attention = [op for op in forward_flops(plain, 1, 7) if op.attends]
    per_pair = 4 * 4 * 2
    assert [op.causal for op in attention] == [
        18 * per_pair,
        28 * per_pair,
        18 * per_pair,
    ]
    assert [op.full for op in attention] == [49 * per_pair] * 3
