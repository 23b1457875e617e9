"""Dropout in every layout, against one process in plain torch with masks by the written formula.

The formula is here a second time, in numpy: whether a feature of a token is dropped is a hash of (seed,
step, the token's index in the whole batch, the block, the place in the block, the feature's index in
the uncut width), and of nothing that a layout decides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.comm.launch import launch
from phalanx.layout import Layout
from phalanx.models import Decoder
from phalanx.parallel import Precision, build_model, start
from phalanx.verification import SHAPES, batch_of
from phalanx.verification.trial import Setting, join, program_in, train_layout
from sampled import one_in

RATE, SEED, STEP = 0.25, 11, 4
EMBEDDING = 2**31 - 1  # its number among the blocks
Words = NDArray[np.uint64]


def scramble(x: Words) -> Words:
    """Wellons' 32-bit mixer: xorshift 16, multiply, xorshift 15, multiply, xorshift 15."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def stir(key: Words, salt: Words | int) -> Words:
    return scramble(key + np.uint64(0x9E3779B1) * np.uint64(salt))


def dropped(
    token: Words, block: int, place: int, features: int
) -> NDArray[np.bool_]:
    """Tokens by features: what is zeroed, of tokens by their index in the batch."""
    step = stir(scramble(np.array([SEED], np.uint64)), STEP) >> 1
    key = stir(scramble(scramble(token) ^ step), block)
    draw = stir(
        stir(key, place)[:, None], np.arange(features, dtype=np.uint64)[None]
    )
    return draw < round(RATE * 2**32)


class ByFormula(nn.Module):
    """In the place of a Dropout on one process."""

    def __init__(self, block: int, place: int) -> None:
        super().__init__()
        self.block, self.place = block, place

    def forward(self, x: Tensor, *unused: object) -> Tensor:
        token = np.arange(x.shape[0] * x.shape[1], dtype=np.uint64)
        mask = dropped(token, self.block, self.place, x.shape[2]).reshape(
            x.shape
        )
        return x.masked_fill(torch.from_numpy(mask), 0.0) / (1 - RATE)


def batch(name: str) -> dict[str, Tensor]:
    return dict(batch_of(SHAPES[name], STEP, seed=SEED, noisy=True))


def on_one_process(name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss per target and the gradients."""
    shape = SHAPES[name]
    plain = Decoder(
        vocab=shape.vocab, hidden=shape.hidden, layers=shape.layers, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.head_dim, ffn=shape.ffn, sequence=shape.sequence,
        norm=shape.norm, eps=shape.eps, positions=shape.positions, gated=shape.gated, tied=shape.tied,  # type: ignore[arg-type]
        bias=shape.bias, qk_norm=shape.qk_norm, dropout=RATE,  # type: ignore[arg-type]
    ).double()  # fmt: skip
    model = build_model(shape)
    with torch.no_grad():
        for weight, parameter in plain.named_parameters():
            parameter.copy_(start(model, weight, 0, torch.float64))
    plain.embed.dropout = ByFormula(EMBEDDING, 0)
    for number, block in enumerate(plain.layers):
        block.attn.dropout = ByFormula(number, 0)
        block.attn_dropout = ByFormula(number, 1)
        block.mlp_dropout = ByFormula(number, 2)
    given = batch(name)
    loss = plain(**given) / (given["targets"] != -100).sum()
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in plain.named_parameters() if p.grad is not None
    }


LAYOUTS = (
    "", "accum:3", "dp2 accum:2", "dp3 zero3", "pp2 1f1b:3", "pp2 interleaved2:3",
    "pp2 zb-h1:3 recompute:all", "tp2", "tp4", "tp2 seq", "tp4 seq", "tp2 seq accum:3 recompute:all",
    "tp2 recompute:selective",
    "cp2", "cp2:ulysses", "cp4:2x2", "cp2 tp2 seq", "cp2:ulysses tp2", "dp2 pp2 tp2 seq zero1 1f1b:2",
)  # fmt: skip


# 2 has no factor in common with 3 models, so every layout occurs.
@pytest.mark.parametrize(
    "case", one_in(2, product(LAYOUTS, ("gqa", "gpt", "qwen"))), ids="-".join
)
def test_dropout_drops_what_the_formula_says_in_every_layout(
    case: tuple[str, str],
) -> None:
    text, name = case
    loss, gradients = on_one_process(name)
    wide = Precision(torch.float64, torch.float64, torch.float64)
    layout = Layout.parse(f"{text} fp64")
    make = partial(build_model, replace(SHAPES[name], dropout=RATE))
    setting = Setting(lambda step: batch(name), steps=1, precision=wide)
    program = program_in(layout, make, setting)
    seen = launch(
        train_layout,
        layout.ranks,
        layout,
        program,
        make,
        setting,
        backend="threads",
    )
    (step,) = join(seen, 1).steps
    assert step.mismatches == ()
    assert step.loss == pytest.approx(loss, rel=1e-12)
    assert step.gradients.keys() == gradients.keys()
    most = max(float(g.abs().max()) for g in gradients.values())
    for weight, gradient in gradients.items():
        apart = (step.gradients[weight] - gradient).abs().max()
        assert apart <= 1e-10 * max(
            float(gradient.abs().max()), 1e-6 * most
        ), weight


def test_the_formula_drops_the_share_and_otherwise_in_each_step_block_and_place() -> (
    None
):
    token = np.arange(300, dtype=np.uint64)
    masks = [
        dropped(token, block, place, 64)
        for block in range(3)
        for place in range(3)
    ]
    assert np.mean(masks) == pytest.approx(RATE, abs=0.005)
    assert len({mask.tobytes() for mask in masks}) == 9
