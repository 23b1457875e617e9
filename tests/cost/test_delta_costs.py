"""Costs of delta layers against sizes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.cost.pieces import piece_costs
from phalanx.layout import Layout
from phalanx.layout.cases import SHAPES
from phalanx.models.delta import chunk_terms
from phalanx.parallel import build_model

# Blocks of one delta layer and one attention, without experts.
SHAPE = replace(
    SHAPES["delta"], layers=2, mixers=("delta", "attention"), experts=0,
    shared_experts=0, shared_gate=False, dense_layers=0,
)  # fmt: skip
HEADS, KEY, VALUE = 8, 3, 5


@pytest.mark.parametrize("sequence", [32, 64])
def test_the_messages_of_a_state_do_not_grow_with_the_sequence(
    sequence: int,
) -> None:
    layout = Layout.parse("cp2 fp32")
    costs = piece_costs(build_model(SHAPE), layout, 1, sequence=sequence)
    delta, attention = costs[1:3]
    # Two runs on each of two ranks: the last two tokens of each run, with the channels
    # of four queries and four keys of 3 and eight values of 5; and for each head M and
    # N, side by side.
    channels = 2 * 4 * KEY + HEADS * VALUE
    tokens = 4 * 2 * channels * 4
    states = 4 * HEADS * KEY * (KEY + VALUE) * 4
    sent = [(m.axis, m.op, m.bytes) for m in delta.forward.messages]
    assert sent == [
        ("cp.ring", "all_gather", float(tokens)),
        ("cp.ring", "all_gather", float(states)),
    ]
    back = {(m.op, m.bytes) for m in delta.input_gradient.messages}
    assert back == {
        ("reduce_scatter", float(states)),
        ("reduce_scatter", float(tokens)),
    }
    # Keys and values of attention do grow.
    ring = sum(m.bytes for m in attention.forward.messages)
    assert ring == 2 * (sequence // 2) * 2 * 4 * 4


def test_a_longer_sequence_costs_a_delta_layer_in_proportion() -> None:
    """Attention's work grows with the square: no rate of attention is used."""
    layout = Layout.parse("fp32")
    found = [
        piece_costs(build_model(SHAPE), layout, 1, sequence=length)
        for length in (64, 128)
    ]
    delta = [costs[1].forward for costs in found]
    assert not any(load.attention for load in delta)
    assert delta[1].flops == 2 * delta[0].flops
    attention = [costs[2].forward for costs in found]
    assert attention[1].flops > 2 * attention[0].flops


def test_a_cut_at_the_gather_would_keep_thirty_times_a_blocks_input() -> None:
    """The sizes of Qwen3-Next, with 8,192 tokens on a rank, in bfloat16."""
    tokens, hidden, heads, dim = 8192, 2048, 32, 128
    keys = torch.empty(
        1, tokens, heads // 2, dim, dtype=torch.bfloat16, device="meta"
    )
    values = torch.empty(
        1, tokens, heads, dim, dtype=torch.bfloat16, device="meta"
    )
    rates = torch.empty(1, tokens, heads, device="meta")
    terms = chunk_terms(keys, keys, values, rates, rates, None, 64)
    block_input = tokens * hidden * 2
    crossing = sum(each.nbytes for each in terms)
    assert crossing == 960 * 2**20
    assert crossing == 30 * block_input
    # M and N of one run: the message itself is small.
    whole, added = terms.moves[:, :, :, 0], terms.adds[:, :, :, 0]
    assert whole.nbytes + added.nbytes == 4 * 2**20
